"""Build everything that a step needs, in order of dependence."""

from __future__ import annotations

import gc
from dataclasses import dataclass, field, fields
from functools import partial
from typing import Any

import torch
from megatron.core.distributed import DistributedDataParallel, DistributedDataParallelConfig, finalize_model_grads
from megatron.core.optimizer import MegatronOptimizer
from megatron.core.optimizer_param_scheduler import OptimizerParamScheduler
from megatron.core.process_groups_config import ProcessGroupCollection
from megatron.core.transformer.module import Float16Module
from megatron.core.transformer.transformer_config import TransformerConfig
from torch.distributed import ProcessGroup

from megatron_cp.attention.modules.probe import probe_attention
from megatron_cp.config.run_config import DistributedDataParallelConfig as DDPSettings
from megatron_cp.config.run_config import RunConfig
from megatron_cp.config.setting import passed_on
from megatron_cp.dynamic_cp.buddy_tree import configured_blocks
from megatron_cp.dynamic_cp.runtime.domain import DynamicGroups
from megatron_cp.models.build import Build
from megatron_cp.models.builder import build_model
from megatron_cp.models.layer_specs import choose_attention
from megatron_cp.models.layers.router_losses import RouterLosses
from megatron_cp.models.transformer_config import transformer_config
from megatron_cp.models.vocabulary import padded_vocab_size
from megatron_cp.parallel.device import device, seed_everything
from megatron_cp.parallel.host_memory import HostMemory
from megatron_cp.parallel.layout import RankLayout, layout_of
from megatron_cp.parallel.process_groups import build_process_groups, destroy_process_groups
from megatron_cp.training.monitor.phases import Phases
from megatron_cp.training.monitor.work_clock import WorkClock
from megatron_cp.training.optimizer import build_optimizer, schedule_of
from megatron_cp.training.packed.groups import build_dynamic_groups


@dataclass
class TrainProgress:
    """Training position; saved with every checkpoint."""

    iteration: int = 0
    consumed_samples: int = 0
    consumed_tokens: int = 0  # all tokens of the samples, including masked ones
    consumed_loss_tokens: int = 0  # checkpoints of earlier versions have none
    skipped_iterations: int = 0


@dataclass
class Run:
    """All objects of a run that is ready to step."""

    config: RunConfig
    layout: RankLayout
    core_config: TransformerConfig
    groups: ProcessGroupCollection
    model: list[Any]  # DistributedDataParallel chunks, one per virtual pipeline stage
    vocab_rows: int  # rows of the output layer, including padding
    optimizer: MegatronOptimizer
    scheduler: OptimizerParamScheduler
    device: torch.device
    progress: TrainProgress = field(default_factory=TrainProgress)
    phases: Phases = field(default_factory=Phases)
    skipped_in_a_row: int = 0
    dynamic_groups: DynamicGroups | None = None  # of packed microbatches
    token_buckets: tuple[int, ...] | None = None  # of packed microbatches; None until they are fitted
    work_clock: WorkClock | None = None  # set during calibration
    router_losses: RouterLosses | None = None  # of a mixture of experts
    host_memory: HostMemory | None = None  # with model.offload_layer_inputs

    @property
    def is_last_stage(self) -> bool:
        return self.groups.pp.rank() == self.groups.pp.size() - 1

    @property
    def all_ranks(self) -> ProcessGroup:
        """The ranks of this run: the whole world, unless the run was given other groups."""
        return self.groups.intra_dist_opt

    def close(self) -> None:
        """Destroy the process groups and break the cycle that keeps the model alive.

        Afterwards another run can start in this process.
        """
        if self.dynamic_groups is not None:
            self.dynamic_groups.destroy()
        destroy_process_groups(self.groups)
        # Gradient hooks refer to the model, the model to the configuration, the configuration to the optimizer, and the
        # optimizer to the hooks. The cycle passes through C++, so Python's garbage collector cannot free it.
        self.core_config.grad_scale_func = self.core_config.finalize_model_grads_func = None
        for module in (module for chunk in self.model for module in chunk.modules()):
            if hasattr(module.forward, "cache_clear"):  # the cache of RoPE keeps every instance alive
                module.forward.cache_clear()


def setup(config: RunConfig, vocab_size: int, groups: ProcessGroupCollection | None = None) -> Run:
    """Build groups, model, optimizer, schedule and wrappers of a run. Collective.

    torch.distributed must be initialized.

    Args:
        config: a finalized configuration.
        vocab_size: the tokenizer's size, before padding.
        groups: process groups of the configured sizes; built over all ranks by default.
    """
    gc.collect()  # free the memory and group threads of an earlier run in this process
    model_config, distributed, precision = config.model, config.dist, config.mixed_precision
    groups = groups or build_process_groups(model_config, distributed)
    layout = layout_of(model_config, distributed, groups.intra_dist_opt.size())
    blocks = configured_blocks(model_config, distributed.eval_context_parallel_size, layout)
    seed_everything(config.rng, groups)
    core_config = transformer_config(model_config, precision, distributed.eval_context_parallel_size)
    attention = choose_attention(model_config, core_config, {len(block) for block in blocks}, precision.fp32)
    build = Build(model_config, core_config, groups, config.rng.seed, attention)
    chunks: list[Any] = build_model(build, vocab_size)
    if distributed.attention_probe:
        probe_attention(chunks)
    if core_config.fp16 or core_config.bf16:
        chunks = [Float16Module(core_config, chunk) for chunk in chunks]
    model = wrap_data_parallel(config.ddp, core_config, chunks, groups, config.optimizer.use_distributed_optimizer)
    if config.rng.data_parallel_random_init:  # replicas drew different weights; use the first replica's
        for chunk in model:
            chunk.broadcast_params()
    optimizer = build_optimizer(config.optimizer, precision, model, groups, core_config.params_dtype)
    scheduler = OptimizerParamScheduler(
        optimizer,
        **schedule_of(config.scheduler, config.train, config.optimizer),
        use_checkpoint_opt_param_scheduler=config.scheduler.use_checkpoint_opt_param_scheduler,
        override_opt_param_scheduler=config.scheduler.override_opt_param_scheduler,
    )
    connect_schedule(core_config, model, optimizer, groups)
    # Weights are equal on every rank that may hold a slice; dropout must differ between slices.
    seed_everything(config.rng, groups, per_slice=True)
    rows = padded_vocab_size(model_config, vocab_size)
    run = Run(config, layout, core_config, groups, model, rows, optimizer, scheduler, device())
    run.dynamic_groups = build_dynamic_groups(model_config, distributed, groups, layout, blocks)
    run.router_losses = RouterLosses(core_config, run.device) if core_config.num_moe_experts else None
    run.host_memory = build.host_memory if model_config.offload_layer_inputs else None
    return run


def wrap_data_parallel(
    ddp: DDPSettings,
    core_config: TransformerConfig,
    chunks: list[Any],
    groups: ProcessGroupCollection,
    use_distributed_optimizer: bool,
) -> list[DistributedDataParallel]:
    """Wrap chunks in gradient buffers reduced over data *and* context parallel ranks.

    Overlap is turned off where a rank shares parameters with no other rank; see the chunks' ``ddp_config``.
    """
    alone = groups.dp_cp.size() == groups.expt_dp.size() == 1
    ddp_config = DistributedDataParallelConfig(
        **passed_on(ddp, [field.name for field in fields(DistributedDataParallelConfig)]),
        overlap_grad_reduce=ddp.overlap_grad_reduce and not alone,
        overlap_param_gather=ddp.overlap_param_gather and not alone,
        # megatron-core rejects patterns if all gradients are float32 anyway.
        param_name_patterns_for_fp32_local_accumulation=()
        if ddp.grad_reduce_in_fp32
        else tuple(ddp.param_name_patterns_for_fp32_local_accumulation),
        check_for_nan_in_grad=False,  # training/step.py checks on all ranks and locates the origin
        use_distributed_optimizer=use_distributed_optimizer,
    )
    return [
        DistributedDataParallel(core_config, ddp_config, chunk, disable_bucketing=index > 0, pg_collection=groups)
        for index, chunk in enumerate(chunks)
    ]


def connect_schedule(
    core_config: TransformerConfig,
    model: list[DistributedDataParallel],
    optimizer: MegatronOptimizer,
    groups: ProcessGroupCollection,
) -> None:
    """Set the functions with which megatron-core's schedules process gradients."""

    def one_or_all(functions: list[Any]) -> Any:
        return functions if len(functions) > 1 else functions[0]

    core_config.grad_scale_func = optimizer.scale_loss
    core_config.finalize_model_grads_func = partial(finalize_model_grads, pg_collection=groups)
    core_config.no_sync_func = one_or_all([chunk.no_sync for chunk in model])
    if model[0].ddp_config.overlap_grad_reduce:
        core_config.grad_sync_func = one_or_all([chunk.start_grad_sync for chunk in model])
    if model[0].ddp_config.overlap_param_gather:
        core_config.param_sync_func = one_or_all([chunk.start_param_sync for chunk in model])
