"""Switch of the active context-parallel group to a microbatch's.

megatron-core's modules read their group from a shared collection (attention for rotary positions, for instance). They
must see a microbatch's group only while they work on this microbatch: not on the next one in a pipeline, and again in
recomputation during the backward pass. So each layer switches the group by its arguments, and restores it afterwards,
also after an error.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from megatron.core.packed_seq_params import PackedSeqParams
from megatron.core.process_groups_config import ProcessGroupCollection


@contextmanager
def active_group(groups: ProcessGroupCollection, packed: PackedSeqParams | None, *routers: Any) -> Iterator[None]:
    """Set ``groups.cp`` to the microbatch's group in the body, if it has one.

    If the microbatch also has a group with its tensor-parallel ranks, ``groups.tp_cp`` is set too. ``routers`` have
    their own attributes (``cp_group``, ``tp_cp_group``), and count nothing while ``idle``.
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
