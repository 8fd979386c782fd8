"""The one place where a microbatch's context-parallel group is switched on and off.

megatron-core's modules read their group from the process-group collection that all of them share: attention for its
rotary positions, for instance. A packed microbatch brings a group of its own, and the modules must see that one while
they work on this microbatch, and only then: not the next one's in a pipeline, and the right one again when the forward
pass is recomputed much later during the backward pass. So each layer switches for itself, with the parameters that it
is handed, and restores what was there also when it fails.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from megatron.core.packed_seq_params import PackedSeqParams
from megatron.core.process_groups_config import ProcessGroupCollection


@contextmanager
def active_group(groups: ProcessGroupCollection, packed: PackedSeqParams | None) -> Iterator[None]:
    """Let ``groups.cp`` be the microbatch's group inside; nothing happens for a microbatch without one."""
    if packed is None or packed.cp_group is None:
        yield
        return
    configured = groups.cp
    groups.cp = packed.cp_group
    try:
        yield
    finally:
        groups.cp = configured
