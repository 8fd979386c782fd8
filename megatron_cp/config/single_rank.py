"""A configuration of the same model without parallelism. Pure."""

from __future__ import annotations

import copy

from megatron_cp.config.run_config import RunConfig
from megatron_cp.config.setting import LAYOUT, facts_of


def on_single_rank(config: RunConfig) -> RunConfig:
    """Return the same model, data and optimizer without parallelism or optimizations."""
    config = copy.deepcopy(config)
    defaults, packed = type(config.model)(), config.model.sequence_packing_scheduler is not None
    for name, facts in facts_of(type(config.model)).items():
        if LAYOUT in facts.affects:
            setattr(config.model, name, getattr(defaults, name))
    if packed:
        config.model.sequence_packing_scheduler = "dp_balanced"
    config.dist = type(config.dist)(
        attention_probe=False, distributed_timeout_minutes=config.dist.distributed_timeout_minutes
    )
    config.ddp = type(config.ddp)(grad_reduce_in_fp32=config.ddp.grad_reduce_in_fp32)
    config.optimizer.use_distributed_optimizer = False
    return config.finalize()
