"""Dynamic context parallelism: a CP size for every packed microbatch.

See docs/explanation/dynamic_cp.md. Pure modules, which other packages may import:

- schedules and their cost: ``types``, ``buddy_tree``, ``cost``, ``calibration``;
- scheduling: ``scheduler`` and its modules;
- analysis: ``analysis``, and ``distributions`` of lengths.

With torch: ``runtime``.
"""

from megatron_cp.dynamic_cp.buddy_tree import legal_groups
from megatron_cp.dynamic_cp.calibration import Calibrator
from megatron_cp.dynamic_cp.cost import PRESETS, CostModel
from megatron_cp.dynamic_cp.scheduler.fixed import schedule_fixed_cp
from megatron_cp.dynamic_cp.scheduler.schedule import schedule
from megatron_cp.dynamic_cp.types import Group, Schedule, padded_length

__all__ = [
    "PRESETS",
    "Calibrator",
    "CostModel",
    "Group",
    "Schedule",
    "legal_groups",
    "padded_length",
    "schedule",
    "schedule_fixed_cp",
]
