"""The typed configuration of a run, with Megatron-Bridge's sections and names.

``model.*`` has megatron-core's names plus this project's own. Defaults and metadata of a setting are in its
declaration, in ``config/model/`` and ``config/sections/``. Nothing here imports torch or megatron, so composing and
checking takes milliseconds.

``None`` means "derived from other settings" (see :meth:`RunConfig.finalize`).
"""

from __future__ import annotations

from copy import copy
from dataclasses import asdict, dataclass, field, is_dataclass, replace
from functools import cache
from typing import Any, Literal

from megatron_cp.common.interpolation import as_written
from megatron_cp.config.model_config import ModelConfig
from megatron_cp.config.schema import hints
from megatron_cp.config.sections.checkpoint import CheckpointConfig
from megatron_cp.config.sections.data import DatasetConfig, TokenizerConfig
from megatron_cp.config.sections.distributed import DistributedConfig, DistributedDataParallelConfig
from megatron_cp.config.sections.logging import LoggerConfig, ProfilingConfig
from megatron_cp.config.sections.numerics import MixedPrecisionConfig, RNGConfig
from megatron_cp.config.sections.optimization import OptimizerConfig, SchedulerConfig
from megatron_cp.config.sections.training import TrainConfig, ValidationConfig
from megatron_cp.config.setting import Facts, facts_of

# Lengths in iterations or samples: NAME_iters and NAME_samples.
TRAINING_LENGTHS, SCHEDULE_LENGTHS = ("train",), ("lr_warmup", "lr_decay", "lr_wsd_decay")


@dataclass
class RunConfig:
    """All settings of a run."""

    model: ModelConfig = field(default_factory=ModelConfig)
    train: TrainConfig = field(default_factory=TrainConfig)
    validation: ValidationConfig = field(default_factory=ValidationConfig)
    optimizer: OptimizerConfig = field(default_factory=OptimizerConfig)
    scheduler: SchedulerConfig = field(default_factory=SchedulerConfig)
    dataset: DatasetConfig = field(default_factory=DatasetConfig)
    tokenizer: TokenizerConfig = field(default_factory=TokenizerConfig)
    dist: DistributedConfig = field(default_factory=DistributedConfig)
    ddp: DistributedDataParallelConfig = field(default_factory=DistributedDataParallelConfig)
    checkpoint: CheckpointConfig = field(default_factory=CheckpointConfig)
    logger: LoggerConfig = field(default_factory=LoggerConfig)
    rng: RNGConfig = field(default_factory=RNGConfig)
    profiling: ProfilingConfig = field(default_factory=ProfilingConfig)
    mixed_precision: MixedPrecisionConfig = field(default_factory=MixedPrecisionConfig)
    env_vars: dict[str, str] = field(default_factory=dict)
    recipe: str = "unnamed"  # set by the recipe loader; names the default run folder
    recipe_world_size: int | None = None  # ranks of the recipe's layout; a run may use other numbers

    def finalize(self) -> RunConfig:
        """Fill in place every value derived from other settings; return self.

        Idempotent. Checks nothing.
        """
        given = asdict(self)
        model, data = self.model, self.dataset
        if model.seq_length is None:
            model.seq_length = data.seq_length
        if model.max_position_embeddings is None:
            model.max_position_embeddings = model.yarn_length or model.seq_length
        if model.num_query_groups is None:
            model.num_query_groups = model.num_attention_heads
        if model.ffn_hidden_size is None:
            model.ffn_hidden_size = 4 * model.hidden_size
        if model.kv_channels is None and isinstance(model.num_attention_heads, int) and model.num_attention_heads > 0:
            model.kv_channels = model.hidden_size // model.num_attention_heads
        if model.expert_tensor_parallel_size is None:
            model.expert_tensor_parallel_size = model.tensor_model_parallel_size
        if model.dynamic_context_parallel and model.sequence_packing_scheduler is None:
            model.sequence_packing_scheduler = "default_dynamic_cp"
        if model.sequence_packing_scheduler is not None and model.max_seqlen_per_dp_cp_rank is None:
            model.max_seqlen_per_dp_cp_rank = model.tokens_per_rank
        if data.kind is None:
            data.kind = _kind_of_data(data.data_path, packed=model.sequence_packing_scheduler is not None)
        self._count_in_iterations()
        if self.scheduler.lr_decay_iters is None:
            self.scheduler.lr_decay_iters = self.train.train_iters
        if self.checkpoint.save is None:
            self.checkpoint.save = f"runs/{self.recipe}"
        if self.checkpoint.load is None:
            self.checkpoint.load = self.checkpoint.save
        self.__dict__.setdefault("_given", (given, asdict(self)))  # not a field: excluded from settings and from ==
        return self

    def as_written(self) -> dict[str, Any]:
        """Return all settings with interpolations of environment variables kept."""
        return as_written(asdict(self))

    def given(self) -> dict[str, Any]:
        """Return the settings as plain values before :meth:`finalize` filled any.

        Returns the current values if the configuration was changed since, or never finalized.
        """
        given, filled = self.__dict__.get("_given", (None, None))
        now = asdict(self)
        return given if given is not None and filled == now else now

    def value_at(self, path: str) -> Any:
        """Return a setting by its dotted name; None if there is no such setting."""
        value: Any = self
        for name in path.split("."):
            value = getattr(value, name, None)
        return value

    def with_iterations(self, iterations: int) -> RunConfig:
        """Return this run with its length in epochs counted.

        The decay of the learning rate gets the same length, if it has none.
        """
        decay = self.scheduler.lr_decay_iters
        return replace(
            self,
            train=replace(self.train, train_iters=iterations, train_epochs=None),
            scheduler=replace(self.scheduler, lr_decay_iters=iterations if decay is None else decay),
        )

    def _count_in_iterations(self) -> None:
        """Convert lengths in samples to iterations; rule K56 reports those given in both.

        A length in epochs is known once the data are open: until then there is none in iterations.
        """
        if self.train.train_epochs is not None and self.train.train_iters == TrainConfig().train_iters:
            self.train.train_iters = None
        batch = self.train.global_batch_size
        section: TrainConfig | SchedulerConfig
        for section, names in ((self.train, TRAINING_LENGTHS), (self.scheduler, SCHEDULE_LENGTHS)):
            defaults = type(section)()
            for name in names if batch >= 1 else ():
                iterations, samples = f"{name}_iters", f"{name}_samples"
                unset, given = getattr(defaults, samples), getattr(section, samples)
                if given != unset and getattr(section, iterations) in (None, getattr(defaults, iterations)):
                    setattr(section, iterations, given // batch)
                    setattr(section, samples, unset)

    @property
    def runs_packs(self) -> bool:
        """Whether training runs packs, or evaluation does in separate groups."""
        return self.model.sequence_packing_scheduler is not None or self.dist.eval_context_parallel_size is not None

    @property
    def evaluation_batch(self) -> tuple[int, int]:
        """Global and micro batch size of evaluation; training's by default."""
        own, train = self.validation, self.train
        batch, micro = own.eval_global_batch_size, own.eval_micro_batch_size
        return batch or train.global_batch_size, micro or train.micro_batch_size

    @property
    def evaluation_samples(self) -> int:
        """Samples that an evaluation draws.

        1 with ``validation.full_validation``: the data decide how many.
        """
        return 1 if self.validation.full_validation else self.validation.eval_iters * self.evaluation_batch[0]


def _kind_of_data(
    data_path: str | list[str | int | float] | None, packed: bool
) -> Literal["indexed", "mock", "documents", "jsonl", "mock_documents"]:
    if data_path is None:
        return "mock_documents" if packed else "mock"
    paths = data_path if isinstance(data_path, list) else [data_path]
    if any(str(path).endswith((".jsonl", ".parquet")) for path in paths):
        return "jsonl"
    return "documents" if packed else "indexed"


def default_at(path: str) -> Any:
    """Return the default of a setting, by its dotted name."""
    return copy(_defaults().value_at(path))


@cache
def _defaults() -> RunConfig:
    return RunConfig()


@cache
def settings() -> dict[str, Facts]:
    """Return dotted name -> metadata of all settings, in the order of printing."""
    sections = {name: kind for name, kind in hints(RunConfig).items() if is_dataclass(kind)}
    return {f"{section}.{name}": facts for section, kind in sections.items() for name, facts in facts_of(kind).items()}


def settings_affecting(decide: str) -> list[str]:
    """Return the dotted names of settings with an effect such as ``"weights"``."""
    return [name for name, facts in settings().items() if decide in facts.affects]
