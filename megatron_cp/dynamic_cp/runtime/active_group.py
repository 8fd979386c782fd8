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
from typing import Any

from megatron.core.packed_seq_params import PackedSeqParams
from megatron.core.process_groups_config import ProcessGroupCollection


@contextmanager
def active_group(groups: ProcessGroupCollection, packed: PackedSeqParams | None, *routers: Any) -> Iterator[None]:
    """Let ``groups.cp`` be the microbatch's group inside; nothing happens for a microbatch without one.

    Where the microbatch has a group together with its tensor-parallel ranks, ``groups.tp_cp`` is that one inside.
    ``routers`` keep groups of their own (``cp_group``, ``tp_cp_group``) and count nothing while they are ``idle``.
    """
    if packed is None or packed.cp_group is None:
        yield
        return
    wide, idle = getattr(packed, "tp_cp_group", None), getattr(packed, "idle", False)
    switched = [(groups, "cp", packed.cp_group)] + ([] if wide is None else [(groups, "tp_cp", wide)])
    for router in routers:
        switched += [(router, "cp_group", packed.cp_group), (router, "idle", idle)]
        switched += [] if wide is None else [(router, "tp_cp_group", wide)]
    configured = [(holder, name, getattr(holder, name)) for holder, name, _ in switched]
    for holder, name, value in switched:
        setattr(holder, name, value)
    try:
        yield
    finally:
        for holder, name, value in configured:
            setattr(holder, name, value)
