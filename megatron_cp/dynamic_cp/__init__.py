"""Dynamic context parallelism: a CP size for every packed microbatch. See docs/explanation/dynamic_cp.md.

Pure, and what the rest may import:

- what a schedule is, and what it costs: ``types``, ``groups``, ``cost``, ``calibration``;
- making one: ``scheduler`` and ``fixed``, with their internals ``problem``, ``jobs``, ``plan``, ``binning``, ``gaps``;
- looking at one: ``simulate``, ``report``, ``timeline``, ``recorded``, and ``distributions`` of lengths to try.

With torch, running one: ``iterator``, ``packing``, ``domain``, ``active_group``.
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
