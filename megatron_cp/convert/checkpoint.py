"""Whole model in one process, without training state, and its checkpoints."""

from __future__ import annotations

import shlex
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from megatron.core import dist_checkpointing
from megatron.core.process_groups_config import ProcessGroupCollection
from megatron.core.transformer.module import Float16Module
from torch.distributed.checkpoint.api import CheckpointException

from megatron_cp.common.errors import ConfigError, RuntimeFault, Violation
from megatron_cp.common.limits import in_one_line
from megatron_cp.config.run_config import CheckpointConfig, MixedPrecisionConfig, RunConfig
from megatron_cp.config.schema import build
from megatron_cp.config.single_rank import on_single_rank
from megatron_cp.mcore.private_names import keep_expert_bias_in_float32
from megatron_cp.models.build import Build
from megatron_cp.models.builder import build_model
from megatron_cp.models.layer_specs import choose_attention
from megatron_cp.models.layers.router import PackedRouter
from megatron_cp.models.transformer_config import transformer_config
from megatron_cp.parallel.device import seed_everything, stop_distributed
from megatron_cp.parallel.process_groups import build_process_groups, destroy_process_groups
from megatron_cp.training.checkpoint.checksums import CHECKSUMS
from megatron_cp.training.checkpoint.content import FORMAT
from megatron_cp.training.checkpoint.files import (
    checkpoint_folder,
    create_partial,
    existing_folder,
    latest_iteration,
    put_in_place,
    saved_iterations,
    stored_tensors,
    suggest_folder,
)
from megatron_cp.training.checkpoint.resume import check_format
from megatron_cp.training.checkpoint.saver import drop_extra_states
from megatron_cp.training.checkpoint.verification import verified_common
from megatron_cp.training.checkpoint.writer import Writer
from megatron_cp.training.setup import TrainProgress

_EMBEDDING = "embedding.word_embeddings.weight"


@dataclass(frozen=True)
class WholeModel:
    """Model on a single rank, with uninitialized parameters in host memory."""

    config: RunConfig
    groups: ProcessGroupCollection
    module: Any

    def parameters(self) -> dict[str, torch.Tensor]:
        """Return parameters and router biases by name; a tied output layer has none."""
        biases = {name: each for name, each in self.module.named_buffers() if name.endswith("router.expert_bias")}
        named = dict(self.module.named_parameters()) | biases
        return {name.removeprefix("module."): tensor for name, tensor in named.items()}

    def save(self, root: Path, iteration: int) -> Path:
        """Save the weights as a checkpoint to start a run from; return its folder.

        Raises:
            OSError: the checkpoint could not be written; a partial folder's name begins with a dot.
        """
        final = checkpoint_folder(root, iteration)
        state = {
            "model": self._sharded(),
            "format": FORMAT,
            "checksums": CHECKSUMS,
            "progress": asdict(TrainProgress()),
            "config": self.config.as_written(),
            "world_size": 1,
            "data": {},
        }
        partial = create_partial(final)
        writer = Writer()
        writer.start(state, partial, content_metadata={}, replicas=None, background=False)
        writer.write_index(partial, [writer.finish()])
        put_in_place(partial, final)
        return final

    def load(self, folder: Path) -> None:
        """Load a checkpoint's weights.

        Raises:
            RuntimeFault: the weights cannot be read.
        """
        state = self._sharded()
        try:
            drop_extra_states(state, folder)
            loaded = dist_checkpointing.load({"model": state}, str(folder))
        except (Exception, CheckpointException) as error:
            raise RuntimeFault(f"checkpoint {folder}: cannot be read: {in_one_line(error)}") from error
        self.module.load_state_dict(loaded["model"])

    def _sharded(self) -> dict[str, Any]:
        return self.module.sharded_state_dict(metadata={"dp_cp_group": self.groups.dp_cp})


@dataclass(frozen=True)
class CheckpointInfo:
    """Configuration, embedding rows (with padding) and dtype of a checkpoint."""

    folder: Path
    iteration: int
    config: RunConfig
    vocabulary_rows: int
    dtype: str


def find_checkpoint(root: Path, iteration: int | None, typed: str = "--megatron-path") -> CheckpointInfo:
    """Find a run's checkpoint, by default the latest.

    Args:
        typed: what users write before the run's folder; begins messages.

    Raises:
        ConfigError: the checkpoint does not exist, or another program or a newer version wrote it.
        RuntimeFault: the checkpoint is damaged; the message names a complete one.
    """
    if iteration is None:
        iteration = latest_iteration(root)
    folder = None if iteration is None else existing_folder(root, iteration)
    if folder is None:
        others = saved_iterations(root)
        fix = suggest_folder(root, partial(_options, typed)) or f"{typed} FOLDER (of a run)"
        if others:
            fix = f"--iteration {others[-1]} (of {others})"
        which = "" if iteration is None else f" {iteration}"
        raise ConfigError(f"{typed} {root}: has no checkpoint{which}. Fix: {fix}")
    assert iteration is not None
    common = verified_common(folder, iteration, True, lambda _, other: f"--iteration {other}")
    embedding = stored_tensors(folder).get(_EMBEDDING)
    check_format(common, folder)
    unknown: list[Violation] = []
    config = build(RunConfig, common["config"], unknown)
    if unknown:
        raise ConfigError(unknown)
    if embedding is None:
        raise RuntimeFault(
            f"checkpoint {folder}: has no {_EMBEDDING}, so it is damaged or another program wrote it. "
            "Fix: --iteration N (another one)"
        )
    dtype = str(embedding.properties.dtype).removeprefix("torch.")
    return CheckpointInfo(folder, iteration, config, embedding.size[0], dtype)


def _options(typed: str, run: Path, iteration: int | None) -> str:
    """Return the options for a run's checkpoint, by default the latest."""
    return f"{typed} {shlex.quote(str(run))}" + ("" if iteration is None else f" --iteration {iteration}")


def check_finite(parameters: Mapping[str, torch.Tensor], before: str, after: str) -> None:
    """Raise ConfigError if numbers of dtype ``before`` overflow in ``after``."""
    for name, parameter in parameters.items():
        if before != after == "float16" and not torch.isfinite(parameter).all():
            raise ConfigError(f"{name}: has numbers too large for float16. Fix: --torch-dtype {before}")


def single_rank_config(config: RunConfig, dtype: str) -> RunConfig:
    """Return the finalized configuration of the model on a single rank.

    ``dtype`` is torch's name, such as "bfloat16".
    """
    config = on_single_rank(config)
    config.model.use_cpu_initialization = True
    config.model.transformer_impl = "local"  # weight names of our own layers
    config.checkpoint = CheckpointConfig(save_optim=False, save_rng=False)
    config.mixed_precision = MixedPrecisionConfig(
        fp32=dtype == "float32", bf16=dtype == "bfloat16", fp16=dtype == "float16"
    )
    return config.finalize()


@contextmanager
def whole_model(config: RunConfig) -> Iterator[WholeModel]:
    """Build the model of a finalized single-rank configuration, in this process."""
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    try:
        groups = build_process_groups(config.model, config.dist)
        seed_everything(config.rng, groups)
        core_config = transformer_config(config.model, config.mixed_precision)
        core_config.perform_initialization = False
        assert config.model.vocab_size is not None
        attention = choose_attention(config.model, core_config, (), config.mixed_precision.fp32)
        build = Build(config.model, core_config, groups, config.rng.seed, attention)
        (module,) = build_model(build, config.model.vocab_size)
        if core_config.fp16 or core_config.bf16:
            module = Float16Module(core_config, module)
            for router in (each for each in module.modules() if isinstance(each, PackedRouter)):
                keep_expert_bias_in_float32(router)
        yield WholeModel(config, groups, module)
        destroy_process_groups(groups)
    finally:
        stop_distributed()
