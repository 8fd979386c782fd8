"""Checkpoints: megatron-core's ``torch_dist`` format, complete or absent.

A checkpoint is written beside its final place, then renamed, and only then named as the latest one. Nothing in it
depends on the layout that wrote it but the random states, which are restored where the layout is the same.
"""

from __future__ import annotations

import contextlib
import os
import random
import shutil
from dataclasses import asdict
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from megatron.core import dist_checkpointing, tensor_parallel
from megatron.core.dist_checkpointing.mapping import ShardedObject
from torch.distributed.checkpoint.api import CheckpointException

from megatron_cp.errors import ConfigError, RuntimeFault
from megatron_cp.training.setup import Progress, Run

FORMAT = 1
LATEST = "latest_checkpointed_iteration.txt"

# What makes a model another model: a checkpoint with other values of these cannot be continued.
_ARCHITECTURE = (
    "architecture",
    "hybrid_layer_pattern",
    "num_layers",
    "hidden_size",
    "ffn_hidden_size",
    "num_attention_heads",
    "num_query_groups",
    "kv_channels",
    "share_embeddings_and_output_weights",
    "position_embedding_type",
    "rotary_base",
    "rotary_percent",
    "normalization",
    "activation_func",
    "gated_linear_unit",
    "add_bias_linear",
    "add_qkv_bias",
    "qk_layernorm",
    "softmax_type",
    "multi_latent_attention",
    "mtp_num_layers",
    "num_moe_experts",
)


def checkpoint_folder(root: str | Path, iteration: int) -> Path:
    return Path(root) / f"iter_{iteration:07d}"


def latest_iteration(root: str | Path) -> int | None:
    """The newest complete checkpoint's iteration, ``None`` if there is none.

    Raises:
        ConfigError: the file that names it cannot be read.
    """
    path = Path(root) / LATEST
    if not path.exists():
        return None
    try:
        return int(path.read_text().strip())
    except (OSError, ValueError) as error:
        raise ConfigError(
            f"{path} does not hold an iteration number ({error}). Write the number of one of the iter_* folders beside "
            "it into it, or give another checkpoint.load."
        ) from error


def save_checkpoint(run: Run, root: str | Path, data_state: dict[str, Any]) -> Path:
    """Save everything that resuming needs below ``root``; collective.

    Raises:
        RuntimeFault: on every rank, where any rank could not write. The previous checkpoint stays the latest.
    """
    final = checkpoint_folder(root, run.progress.iteration)
    aside = final.with_name(f".{final.name}.partial")
    with _reported_on_all_ranks(f"checkpoint {final} could not be written"):
        if dist.get_rank() == 0:
            shutil.rmtree(aside, ignore_errors=True)
            aside.mkdir(parents=True)
    with _reported_on_all_ranks(f"checkpoint {final} could not be written"):
        state = _sharded_state(run, is_loading=False) | {
            "format": FORMAT,
            "progress": asdict(run.progress),
            "config": asdict(run.config),
            "world_size": dist.get_world_size(),
            "data": data_state,
        }
        dist_checkpointing.save(state, str(aside), content_metadata=_content_metadata())
    with _reported_on_all_ranks(f"checkpoint {final} could not be put in its place"):
        if dist.get_rank() == 0:
            _put_in_place(aside, final)
            _keep_most_recent(Path(root), run.config.checkpoint.most_recent_k, final)
    return final


def load_checkpoint(run: Run, root: str | Path, iteration: int) -> dict[str, Any]:
    """Load checkpoint ``iteration`` below ``root`` into the run; returns the data state. Collective.

    Raises:
        RuntimeFault: the checkpoint is missing, unreadable or of another model; says what differs.
    """
    folder = checkpoint_folder(root, iteration)
    common = _read_common(folder)
    _check_same_model(run, common, folder)
    wanted = run.config.checkpoint
    with_optimizer = wanted.load_optim and not wanted.finetune
    same_layout = _layout_of(common["config"], common["world_size"]) == _layout_of(
        asdict(run.config), dist.get_world_size()
    )
    with_rng = wanted.load_rng and not wanted.finetune and same_layout and common["config"]["checkpoint"]["save_rng"]
    state = _sharded_state(run, is_loading=True, optimizer=with_optimizer, rng=with_rng)
    with _reported_on_all_ranks(f"checkpoint {folder} could not be loaded"):
        loaded = dist_checkpointing.load(state, str(folder))
    for name, chunk in zip(_chunk_names(run), run.model, strict=True):
        chunk.module.load_state_dict(loaded[name])
    if with_optimizer:
        run.optimizer.load_state_dict(loaded["optimizer"])
        _load_scheduler(run, loaded["scheduler"], folder)
    else:
        run.optimizer.reload_model_params()
    if with_rng:
        _restore_rng(loaded["rng"])
    if wanted.finetune:
        return {}
    run.progress = Progress(**common["progress"])
    return common["data"]


def _load_scheduler(run: Run, state: dict[str, Any], folder: Path) -> None:
    try:
        run.scheduler.load_state_dict(state)
    except AssertionError as error:  # megatron-core's way to say that a schedule has changed
        raise RuntimeFault(
            f"checkpoint {folder} was trained with another learning-rate schedule: {error}. Other train.train_iters "
            "change it too, unless scheduler.lr_decay_iters and lr_warmup_iters are given. Go on with the new schedule "
            "by scheduler.override_opt_param_scheduler=true, or with the checkpoint's by "
            "scheduler.use_checkpoint_opt_param_scheduler=true.",
            on_all_ranks=True,
        ) from error


def _chunk_names(run: Run) -> list[str]:
    return ["model"] if len(run.model) == 1 else [f"model{index}" for index in range(len(run.model))]


def _content_metadata() -> dict[str, Any]:
    return {"distrib_optim_sharding_type": "fully_reshardable", "chained_optim_avoid_prefix": True}


def _sharded_state(run: Run, is_loading: bool, optimizer: bool = True, rng: bool = True) -> dict[str, Any]:
    metadata = _content_metadata() | {"dp_cp_group": run.groups.dp_cp}
    chunks = {
        name: chunk.module.sharded_state_dict(metadata=metadata)
        for name, chunk in zip(_chunk_names(run), run.model, strict=True)
    }
    state: dict[str, Any] = dict(chunks)
    if optimizer and run.config.checkpoint.save_optim:
        state["optimizer"] = run.optimizer.sharded_state_dict(chunks, is_loading=is_loading, metadata=metadata)
        state["scheduler"] = run.scheduler.state_dict()
    if rng and run.config.checkpoint.save_rng:
        # One object a rank: context-parallel ranks draw their dropout from streams of their own.
        state["rng"] = ShardedObject("rng", _rng_state(), (dist.get_world_size(),), (dist.get_rank(),), replica_id=0)
    return state


def _rng_state() -> dict[str, Any]:
    return {
        "python": random.getstate(),
        "numpy": np.random.get_state(),
        "torch": torch.get_rng_state(),
        "device": torch.cuda.get_rng_state(),
        "tracker": tensor_parallel.get_cuda_rng_tracker().get_states(),
    }


def _restore_rng(state: dict[str, Any]) -> None:
    random.setstate(state["python"])
    np.random.set_state(state["numpy"])
    torch.set_rng_state(state["torch"])
    torch.cuda.set_rng_state(state["device"])
    tensor_parallel.get_cuda_rng_tracker().set_states(state["tracker"])


def _read_common(folder: Path) -> dict[str, Any]:
    with _reported_on_all_ranks(f"checkpoint {folder} cannot be read"):
        common = dist_checkpointing.load_common_state_dict(str(folder))
        version = common["format"]
    if version > FORMAT:
        raise RuntimeFault(
            f"checkpoint {folder} has format {version}, newer than this version's {FORMAT}: upgrade megatron_cp",
            on_all_ranks=True,
        )
    return common


def _check_same_model(run: Run, common: dict[str, Any], folder: Path) -> None:
    saved, now = common["config"]["model"], asdict(run.config.model)
    different = [
        f"model.{name} is {now[name]!r} here and {saved.get(name)!r} in the checkpoint"
        for name in _ARCHITECTURE
        if saved.get(name) != now[name]
    ]
    if different:
        raise RuntimeFault(
            f"checkpoint {folder} is of another model: {'; '.join(different)}. Use the checkpoint's values (its "
            "config.yaml has them), or another checkpoint.load and checkpoint.save.",
            on_all_ranks=True,
        )


def _layout_of(config: dict[str, Any], world_size: int) -> tuple:
    names = (
        "tensor_model_parallel_size",
        "pipeline_model_parallel_size",
        "virtual_pipeline_model_parallel_size",
        "context_parallel_size",
        "expert_model_parallel_size",
    )
    return (world_size, config["dist"]["use_tp_pp_dp_mapping"], *(config["model"][name] for name in names))


def _put_in_place(aside: Path, final: Path) -> None:
    """Rename, then name it the latest: a crash between the two leaves the older checkpoint the latest, and valid."""
    if final.exists():
        replaced = final.with_name(f".{final.name}.replaced")
        shutil.rmtree(replaced, ignore_errors=True)
        final.rename(replaced)
        aside.rename(final)
        shutil.rmtree(replaced)
    else:
        aside.rename(final)
    latest = final.parent / LATEST
    written = latest.with_name(f".{LATEST}.partial")
    written.write_text(str(int(final.name.removeprefix("iter_"))))
    os.replace(written, latest)


def _keep_most_recent(root: Path, count: int, newest: Path) -> None:
    if count < 1:
        return
    checkpoints = sorted(path for path in root.glob("iter_*") if path.is_dir())
    for path in checkpoints[:-count]:
        if path != newest:
            shutil.rmtree(path)


@contextlib.contextmanager
def _reported_on_all_ranks(what: str) -> Any:
    """If any rank fails inside, all ranks raise one :class:`RuntimeFault` that says which ones and why."""
    failure = None
    try:
        yield
    except (Exception, CheckpointException) as error:
        failure = f"rank {dist.get_rank()}: {_describe(error)}"
    reports: list[str | None] = [None] * dist.get_world_size()
    dist.all_gather_object(reports, failure)
    failures = [report for report in reports if report]
    if failures:
        raise RuntimeFault(f"{what}. {'; '.join(failures[:4])}", on_all_ranks=True)


def _describe(error: BaseException) -> str:
    """One line; torch's ``CheckpointException`` (not an ``Exception``) holds the ranks' own errors and tracebacks."""
    if isinstance(error, CheckpointException) and error.failures:
        error = next(iter(error.failures.values()))[0]
    return f"{type(error).__name__}: {str(error).splitlines()[0] if str(error) else 'no details'}"
