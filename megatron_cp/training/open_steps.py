"""Open the optimizer steps of a configuration: fixed-length or packed samples."""

from __future__ import annotations

from typing import Any

from megatron_cp.dynamic_cp.runtime.iterator import Scheduler
from megatron_cp.training.batches import StaticSteps, Steps
from megatron_cp.training.packed.steps import FixedLengthSource, PackedSteps
from megatron_cp.training.setup import Run


def open_steps(
    run: Run, dataset: Any, consumed_samples: int, training: bool, scheduler: Scheduler | None = None
) -> Steps:
    """Return the steps over a dataset, starting after ``consumed_samples``.

    Args:
        scheduler: schedules packs; the configured one by default.
    """
    packed = run.config.model.sequence_packing_scheduler is not None
    in_other_groups = not training and run.config.dist.eval_context_parallel_size is not None
    if not packed and not in_other_groups:
        return StaticSteps(run, dataset, consumed_samples, training)
    source = dataset if packed else FixedLengthSource(dataset, run.config.dataset.seq_length)
    return PackedSteps(run, source, consumed_samples, training, scheduler)
