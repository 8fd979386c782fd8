"""Save and load checkpoints in megatron-core's ``torch_dist`` format.

A checkpoint is complete or absent. Only random states depend on the layout; they are restored in the same layout.
"""

from __future__ import annotations

import contextlib
import shutil
import time
from dataclasses import asdict, dataclass, fields
from functools import partial
from pathlib import Path
from typing import Any

import torch.distributed as dist
from megatron.core import dist_checkpointing
from megatron.core.dist_checkpointing.mapping import ShardedObject, ShardedTensor

from megatron_cp.common.errors import ConfigError, RuntimeFault
from megatron_cp.config.names import NAME
from megatron_cp.config.run_config import settings_affecting
from megatron_cp.config.setting import DATA
from megatron_cp.launch.store_watch import completing
from megatron_cp.mcore.checkpoint_index import read_index
from megatron_cp.parallel.collectives import gather_on_first_rank, raised_on_all_ranks, run_on_first_rank
from megatron_cp.parallel.device import random_state, restore_random_state
from megatron_cp.training.checkpoint.checksums import CHECKSUMS
from megatron_cp.training.checkpoint.content import FORMAT, check_random_state
from megatron_cp.training.checkpoint.differences import describe, differences
from megatron_cp.training.checkpoint.files import (
    checkpoint_folder,
    clean_leftovers,
    create_partial,
    existing_folder,
    keep_most_recent,
    latest_iteration,
    put_in_place,
)
from megatron_cp.training.checkpoint.optimizer_state import fill_step_counts, index_groups, to_layout
from megatron_cp.training.checkpoint.resume import (
    FORGOTTEN,
    check_fits,
    loads_optimizer,
    mtp_differs,
    resume_fix,
    saved_model,
)
from megatron_cp.training.checkpoint.run_lock import check_still_held
from megatron_cp.training.checkpoint.verification import verified_common
from megatron_cp.training.checkpoint.writer import Writer
from megatron_cp.training.monitor.metrics import logger
from megatron_cp.training.monitor.nonfinite import parameters_are_finite
from megatron_cp.training.setup import Run, TrainProgress

_CONTENT = {"distrib_optim_sharding_type": "fully_reshardable", "chained_optim_avoid_prefix": True}
# Settings that place ranks; each rank restores its random state only if these are equal.
_LAYOUT_SETTINGS = (
    NAME.dist.use_tp_pp_dp_mapping,
    NAME.model.tensor_model_parallel_size,
    NAME.model.pipeline_model_parallel_size,
    NAME.model.virtual_pipeline_model_parallel_size,
    NAME.model.context_parallel_size,
    NAME.model.expert_model_parallel_size,
    NAME.model.expert_tensor_parallel_size,
)


@dataclass
class SaveResult:
    """A checkpoint, from the start of the save until it is complete.

    paused: seconds that training paused. taken: seconds from start to completion.
    """

    iteration: int
    folder: Path
    partial: Path  # the folder it is written into
    writer: Writer
    started: float
    paused: float = 0.0
    taken: float = 0.0


class CheckpointSaver:
    """Saves a run's checkpoints below ``root``, one at a time.

    With ``checkpoint.async_save`` a forked process of each rank writes. Every method but :attr:`writing` and
    :meth:`close` is collective.
    """

    def __init__(self, run: Run, root: str | Path) -> None:
        self._run = run
        self._root = Path(root)
        self._pending: SaveResult | None = None
        run_on_first_rank(
            lambda: clean_leftovers(root), "partial checkpoints of interrupted saves could not be deleted"
        )

    @property
    def writing(self) -> bool:
        """Whether this rank still writes in the background."""
        return self._pending is not None and self._pending.writer.writing

    def save(self, data_state: dict[str, Any]) -> SaveResult | None:
        """Save everything that resuming needs; async saves complete in :meth:`finish`.

        Raises:
            RuntimeFault: on every rank, if any rank could not write. The previous checkpoint stays the latest.
        """
        self.finish()
        started = time.perf_counter()
        if self._run.model[0].ddp_config.overlap_param_gather:
            # Each rank has only its own shards of the new weights until the next forward pass gathers them; gather them
            # now.
            for chunk in self._run.model:
                chunk.start_param_sync(force_sync=True)
        run, iteration = self._run, self._run.progress.iteration
        final = checkpoint_folder(self._root, iteration)
        if not parameters_are_finite(run):
            message = "parameters are not finite; the previous checkpoint is kept"
            raise RuntimeFault(f"checkpoint {final} could not be written: {message}", on_all_ranks=True)
        failed = self._failed(final)
        partial = run_on_first_rank(lambda: self._create_partial(final), failed)
        self._pending = pending = SaveResult(iteration, final, partial, Writer(), started)
        with self._cleaned_up(partial):
            with raised_on_all_ranks(failed):  # before the next collective
                if not partial.is_dir():
                    raise FileNotFoundError(
                        f"{partial} of rank 0 is missing on this node: all nodes must share the folder"
                    )
            with raised_on_all_ranks(failed):
                state = _sharded_state(run, is_loading=False) | {
                    "format": FORMAT,
                    "checksums": CHECKSUMS,
                    "progress": asdict(run.progress),
                    "config": run.config.as_written(),
                    "world_size": dist.get_world_size(),
                    "data": data_state,
                }
                pending.writer.start(
                    state,
                    partial,
                    content_metadata=_CONTENT,
                    replicas=run.groups.dp_cp if run.config.checkpoint.fully_parallel_save else None,
                    background=run.config.checkpoint.async_save,
                )
        pending.paused = time.perf_counter() - started
        return None if run.config.checkpoint.async_save else self.finish()

    def finish(self) -> SaveResult | None:
        """Wait for the pending save on all ranks, check it and move it into place."""
        pending = self._pending
        if pending is None:
            return None
        waited = time.perf_counter()
        failed = self._failed(pending.folder)
        with self._cleaned_up(pending.partial):
            with raised_on_all_ranks(failed):
                written = pending.writer.finish()
            gathered = gather_on_first_rank(written)
            run_on_first_rank(lambda: self._complete(pending, gathered), failed)
        self._pending = None
        now = time.perf_counter()
        pending.paused += now - waited
        pending.taken = now - pending.started
        return pending

    def close(self) -> None:
        """Stop a pending save; the previous checkpoint stays the latest."""
        if self._pending is not None:
            self._pending.writer.close()
            self._pending = None

    def _create_partial(self, final: Path) -> Path:
        check_still_held(self._root)
        return create_partial(final)

    def _complete(self, pending: SaveResult, written: list[Any]) -> None:
        check_still_held(self._root)
        with completing:  # all ranks have written; no other rank is needed to complete
            pending.writer.write_index(pending.partial, written)
            put_in_place(pending.partial, pending.folder)
        wanted = self._run.config.checkpoint
        try:
            keep_most_recent(self._root, pending.iteration, wanted.most_recent_k, wanted.save_retain_interval)
        except OSError as error:  # the new checkpoint is complete
            logger.warning("an old checkpoint could not be deleted: %s", error)

    def _failed(self, final: Path) -> str:
        latest = latest_iteration(self._root)
        valid = "there is no earlier one" if latest is None else f"the latest is still iteration {latest}"
        return f"checkpoint {final} could not be written; {valid}"

    @contextlib.contextmanager
    def _cleaned_up(self, partial: Path) -> Any:
        """Stop writing and delete the partial folder after a failure on any rank."""
        try:
            yield
        except RuntimeFault:
            self.close()
            if dist.get_rank() == 0:
                shutil.rmtree(partial, ignore_errors=True)
            raise


def load_checkpoint(run: Run, root: str | Path, iteration: int, finetune: bool = False) -> dict[str, Any]:
    """Load a checkpoint (weights only to ``finetune``); return the data state.

    Raises, on every rank:
        RuntimeFault: the checkpoint is missing or unreadable.
        ConfigError: the checkpoint does not fit; see :func:`megatron_cp.training.checkpoint.resume.check_fits`.
    """
    folder = existing_folder(root, iteration) or checkpoint_folder(root, iteration)
    config, wanted = run.config, run.config.checkpoint
    common = verified_common(folder, iteration, wanted.verify_checksums, partial(resume_fix, config))
    failed = f"checkpoint {folder} could not be loaded"
    refused: ConfigError | None = None  # equal on every rank
    with raised_on_all_ranks(failed):
        try:
            check_fits(config, common, folder, finetune)
        except ConfigError as error:
            refused = error
    if refused is not None:
        raise refused
    saved = common["config"]
    with_optimizer = loads_optimizer(config, common) and not finetune
    here = asdict(config)
    same_layout = common["world_size"] == dist.get_world_size() and not differences(saved, here, _LAYOUT_SETTINGS)
    with_rng = wanted.load_rng and not finetune and same_layout and saved["checkpoint"]["save_rng"]
    state = _sharded_state(run, is_loading=True, optimizer=with_optimizer, rng=with_rng)
    chunks = _chunks(run)
    reset_mtp = finetune and mtp_differs(saved_model(common), config.model)
    with raised_on_all_ranks(failed):
        for name in chunks:
            drop_extra_states(state[name], folder, reset_mtp)
        loaded = dist_checkpointing.load(state, str(folder))
        if with_rng:
            check_random_state(loaded["rng"], f"{folder}: rng")
    if reset_mtp and config.model.mtp_num_layers:
        logger.info("%s has no multi-token-prediction layers; they start from random weights", folder)
    with raised_on_all_ranks(failed):
        for name, chunk in chunks.items():
            own = {
                key: value
                for key, value in chunk.module.state_dict().items()
                if key.endswith("_extra_state") or (reset_mtp and _is_mtp(key))
            }
            chunk.module.load_state_dict(own | loaded[name])
        if with_optimizer:
            _load_optimizer(run, loaded["optimizer"], common)
        else:
            run.optimizer.reload_model_params()
            if not finetune:
                logger.info(f"optimizer state not loaded ({NAME.checkpoint.load_optim}=false)")
        if not finetune:
            _load_scheduler(run, common)
        if with_rng:
            restore_random_state(loaded["rng"])
    if finetune:
        return {}
    known, progress = {each.name for each in fields(TrainProgress)}, common["progress"]
    run.progress = TrainProgress(**{name: value for name, value in progress.items() if name in known})
    different = describe(differences(saved, here, settings_affecting(DATA)))
    if different and dist.get_rank() == 0:
        logger.warning("data settings changed; the sample order differs from the first run's: %s", "; ".join(different))
    return common["data"]


def _is_mtp(name: str) -> bool:
    """Return whether a parameter is of the MTP layers."""
    return "mtp" in name.split(".")


def drop_extra_states(state: dict[str, Any], folder: Path, reset_mtp: bool = False) -> None:
    """Remove entries that must not be loaded: extra states of modules.

    Transformer Engine's float8 extra state is unused, and is a pickle that would be read unrestricted. With
    ``reset_mtp`` the MTP layers are removed too, and keep their initial weights.

    Raises:
        LookupError: the checkpoint lacks weights.
    """
    saved = read_index(folder).state_dict_metadata
    lacking = []
    for name, entry in list(state.items()):
        # The key ends with a number if one module computes several experts.
        is_extra = isinstance(entry, ShardedObject) and entry.key.endswith("_extra_state")
        if (reset_mtp and _is_mtp(name)) or is_extra:
            del state[name]
        elif isinstance(entry, ShardedTensor) and entry.key not in saved:
            lacking.append(entry.key)
    if lacking:
        raise LookupError(
            f"{len(lacking)} of the model's tensors are missing ({', '.join(sorted(set(lacking))[:3])}, ...); earlier "
            "versions of megatron_cp named the norms of expert and latent-attention layers differently"
        )


def _load_optimizer(run: Run, state: Any, common: dict[str, Any]) -> None:
    """Load an optimizer's tensors and counts; keep the configured settings.

    megatron-core matches saved groups by learning rate too, and torch overwrites all settings. New learning rates would
    end the run, and new betas would have no effect.
    """
    configured = [
        {name: value for name, value in group.items() if name not in ("params", "step")}
        for group in run.optimizer.param_groups
    ]
    _set_learning_rates(run, common["scheduler"])
    run.optimizer.load_state_dict(to_layout(state, common["optimizer"], _parameter_groups(run)))
    for group, settings in zip(run.optimizer.param_groups, configured, strict=True):
        group.update(settings)


def _parameter_groups(run: Run) -> list[list[dict[str, Any]]]:
    """Return the parameter groups of each optimizer of the run."""
    return [optimizer.param_groups for optimizer in run.optimizer.chained_optimizers]


def _load_scheduler(run: Run, common: dict[str, Any]) -> None:
    state = dict(common["scheduler"])
    if run.scheduler.wd_incr_style == "constant":
        state["wd_incr_steps"] = run.scheduler.wd_incr_steps  # no effect if constant
    if run.config.scheduler.use_checkpoint_opt_param_scheduler:
        _set_learning_rates(run, state)  # they override the schedule's own
        for name in FORGOTTEN:
            setattr(run.scheduler, name, state.get(name, getattr(run.scheduler, name)))
    run.scheduler.load_state_dict(state)
    run.scheduler.step(increment=0)  # recompute: loading sets the weight decay from the old state


def _set_learning_rates(run: Run, schedule: dict[str, Any]) -> None:
    for group in run.optimizer.param_groups:
        group.update(max_lr=schedule["max_lr"], min_lr=schedule["min_lr"])


def _chunks(run: Run) -> dict[str, Any]:
    """Return the model's chunks by their names in a checkpoint."""
    return {"model" if len(run.model) == 1 else f"model{index}": chunk for index, chunk in enumerate(run.model)}


def _sharded_state(run: Run, is_loading: bool, optimizer: bool = True, rng: bool = True) -> dict[str, Any]:
    metadata = _CONTENT | {"dp_cp_group": run.groups.dp_cp}
    chunks = {name: chunk.module.sharded_state_dict(metadata=metadata) for name, chunk in _chunks(run).items()}
    state: dict[str, Any] = dict(chunks)
    if optimizer and (is_loading or run.config.checkpoint.save_optim):
        saved = run.optimizer.sharded_state_dict(chunks, is_loading=is_loading, metadata=metadata)
        groups = _parameter_groups(run)
        state["optimizer"] = index_groups(saved if is_loading else fill_step_counts(saved, groups), groups)
    if not is_loading:
        state["scheduler"] = run.scheduler.state_dict() | {name: getattr(run.scheduler, name) for name in FORGOTTEN}
    if rng and (is_loading or run.config.checkpoint.save_rng):
        # One object per rank: context-parallel ranks have separate dropout streams.
        state["rng"] = ShardedObject("rng", random_state(), (dist.get_world_size(),), (dist.get_rank(),), replica_id=0)
    return state
