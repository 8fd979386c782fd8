"""megatron-core's optimizer and learning-rate schedule, as configured."""

from __future__ import annotations

import math
from dataclasses import fields
from typing import Any, NamedTuple

import torch
from megatron.core.optimizer import (
    MegatronOptimizer,
    get_megatron_optimizer,
    get_mup_config_overrides,
    get_standard_config_overrides,
)
from megatron.core.optimizer import OptimizerConfig as CoreOptimizerConfig
from megatron.core.optimizer_param_scheduler import get_canonical_lr_for_logging
from megatron.core.process_groups_config import ProcessGroupCollection

from megatron_cp.config.run_config import MixedPrecisionConfig, OptimizerConfig, SchedulerConfig, TrainConfig
from megatron_cp.config.setting import passed_on


def build_optimizer(
    chosen: OptimizerConfig,
    precision: MixedPrecisionConfig,
    model: list[Any],
    groups: ProcessGroupCollection,
    dtype: torch.dtype,
) -> MegatronOptimizer:
    """Build megatron-core's optimizer over the wrapped model chunks.

    ``dtype`` is the parameters' dtype.
    """
    known = [field.name for field in fields(CoreOptimizerConfig)]
    core = CoreOptimizerConfig(
        **passed_on(chosen, known),
        **passed_on(precision, known),
        overlap_param_gather=model[0].ddp_config.overlap_param_gather,
        bf16=dtype == torch.bfloat16,
        fp16=dtype == torch.float16,
        params_dtype=dtype,
        loss_scale=precision.loss_scale if precision.fp16 else None,  # megatron-core would also scale bf16
    )
    if core.grad_norm_skip_threshold is None:
        core.grad_norm_skip_threshold = math.inf  # megatron-core's value for none
    if core.muon_fp32_matmul_prec is None:
        core.muon_fp32_matmul_prec = "highest" if dtype == torch.float32 else "medium"
    overrides, width = get_standard_config_overrides(core), model[0].config.mup_width_mult
    if model[0].config.use_mup:
        overrides |= get_mup_config_overrides(core, width, chosen.optimizer)
    optimizer = get_megatron_optimizer(core, model, overrides, use_gloo_process_groups=False, pg_collection=groups)
    if chosen.optimizer == "sgd":
        for each in getattr(optimizer, "chained_optimizers", [optimizer]):
            each.init_state_fn = _allocate_momentum  # megatron-core calls it on load, but has none for SGD
    for each in getattr(optimizer, "chained_optimizers", [optimizer]):
        _use_one_kernel(each.optimizer)
    return optimizer


def _use_one_kernel(optimizer: torch.optim.Optimizer) -> None:
    """Let torch's Adam update a tensor in one pass over memory.

    megatron-core takes torch's where neither Transformer Engine nor Apex is installed, and has no setting for this.
    """
    if type(optimizer) in (torch.optim.Adam, torch.optim.AdamW):
        for group in optimizer.param_groups:
            group["fused"] = True


def _allocate_momentum(optimizer: torch.optim.Optimizer, config: CoreOptimizerConfig | None = None) -> None:
    """Allocate the zero momentum that torch's SGD allocates in the first step."""
    for group in optimizer.param_groups:
        for parameter in group["params"] if group["momentum"] else ():
            optimizer.state[parameter].setdefault("momentum_buffer", torch.zeros_like(parameter.data))


def schedule_of(schedule: SchedulerConfig, train: TrainConfig, optimizer: OptimizerConfig) -> dict[str, Any]:
    """Return the schedule of learning rate and weight decay, by megatron-core's names.

    Schedule steps are counted in samples.
    """
    batch, decay = train.global_batch_size, optimizer.weight_decay
    return {
        "init_lr": schedule.lr_warmup_init,
        "max_lr": optimizer.lr,
        "min_lr": optimizer.min_lr,
        "lr_warmup_steps": schedule.warmup_iters(train.iterations) * batch,
        "lr_decay_steps": (schedule.lr_decay_iters or train.iterations) * batch,
        "lr_decay_style": schedule.lr_decay_style,
        "start_wd": decay if schedule.start_weight_decay is None else schedule.start_weight_decay,
        "end_wd": decay if schedule.end_weight_decay is None else schedule.end_weight_decay,
        "wd_incr_steps": train.iterations * batch,
        "wd_incr_style": schedule.weight_decay_incr_style,
        "wsd_decay_steps": None if schedule.lr_wsd_decay_iters is None else schedule.lr_wsd_decay_iters * batch,
        "lr_wsd_decay_style": schedule.lr_wsd_decay_style,
    }


class ScheduledValues(NamedTuple):
    """Scheduled values of the next step."""

    learning_rate: float
    weight_decay: float
    loss_scale: Any  # 1.0, or in fp16 a tensor [1] on the device


def scheduled_values(optimizer: MegatronOptimizer, fp16: bool) -> ScheduledValues:
    """Read the scheduled values from the optimizer, before a step.

    After a step the optimizer holds the values of the following step.
    """
    groups = optimizer.param_groups
    decay = max(group["weight_decay"] for group in groups)  # biases and norms have no decay
    return ScheduledValues(
        get_canonical_lr_for_logging(groups) or 0.0, decay, optimizer.get_loss_scale() if fp16 else 1.0
    )
