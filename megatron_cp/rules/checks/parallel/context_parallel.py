"""C rules: the transport of context-parallel attention and its hierarchical sizes."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import replace

from megatron_cp.attention.modules.te_support import first_versions
from megatron_cp.attention.transports.registry import ALL_TO_ALL, HIERARCHICAL, RING, TRANSPORTS
from megatron_cp.config.names import NAME
from megatron_cp.config.schema import nearest
from megatron_cp.parallel.layout import LEVELS
from megatron_cp.rules.base import Context, Finding, broken, rule, te_rule
from megatron_cp.rules.environment import PRESETS
from megatron_cp.rules.proposals import divisors, resized, typed
from megatron_cp.rules.resolve import replaced

_SIZES = NAME.model.hierarchical_context_parallel_sizes
FLAT = " ".join(RING.settings)
TWO_GROUPS = f"cp_group = [{LEVELS[0]}_cp_group, {LEVELS[1]}_cp_group]"


def splits(c: Context) -> list[str]:
    """Return overrides with two levels > 1 of cp whose all-to-all divides the heads."""
    fitting = [
        d for d in divisors(c.cp) if c.local_heads % d == 0 and (c.backend == "native" or c.local_kv_heads % d == 0)
    ]
    return [typed(_SIZES, [d, c.cp // d]) for d in fitting if 1 < d < c.cp]


def plain_transports(c: Context) -> list[str]:
    """Return the overrides of one-level transports that this model can use."""
    fits = c.local_heads % c.cp == 0 and (c.backend == "native" or c.local_kv_heads % c.cp == 0)
    return [FLAT, *(" ".join(t.settings) for t in TRANSPORTS.values() if t.cost.by_heads and fits)]


def _wrong_levels(c: Context, message: str) -> Finding:
    return Finding(_SIZES, message, *splits(c), *plain_transports(c))


@rule(
    "C1",
    f"{NAME.model.cp_comm_type} is {', '.join(TRANSPORTS)} or auto.",
    "Transformer Engine reports an unknown transport only in the first forward pass.",
    broken(f"{NAME.model.cp_comm_type}={RING.other_names[0]}", f"{_SIZES}=null"),
)
def transport_is_known(c: Context) -> Iterator[Finding]:
    kinds, valid = c.model.cp_comm_type, (*TRANSPORTS, "auto")
    names = {other: transport.name for transport in TRANSPORTS.values() for other in transport.other_names}
    for kind in c.model.transports:
        if kind == "auto":  # a possible choice was made before the rules run
            yield Finding(NAME.model.cp_comm_type, "auto found no transport for these heads", *plain_transports(c))
        elif kind not in valid:
            other = names.get(kind.lower().replace("-", "_"))
            suggestion = f"; did you mean '{other}'?" if other else nearest(kind, list(valid))
            meant = next((name for name in valid if f"'{name}'" in suggestion), "")
            known = f" (one of {', '.join(valid)})" if not suggestion else ""
            proposed = [replaced(kinds, name, kind) for name in dict.fromkeys([meant, *valid]) if name]
            message = f"Unsupported communication type: {kind}{suggestion or known}"
            yield Finding(NAME.model.cp_comm_type, message, values=proposed)


@rule(
    "C3",
    f"A {NAME.model.cp_comm_type} list has one entry per layer.",
    "Layers past the end of the list (multi-token prediction) use the last entry.",
    broken(f"{NAME.model.cp_comm_type}=[{RING.name},{ALL_TO_ALL.name}]", f"{_SIZES}=null"),
)
def one_transport_per_layer(c: Context) -> Iterator[Finding]:
    kinds, layers = c.model.cp_comm_type, c.model.num_layers
    if isinstance(kinds, list) and len(kinds) != layers:
        yield Finding(
            NAME.model.cp_comm_type,
            f"Length of cp_comm_type ({len(kinds)}) must equal num_layers ({layers}). megatron-core: Length of "
            f"cp_comm_type ({len(kinds)}) should equal to the total number of transformer layers ({layers})",
            values=[resized(kinds, layers), kinds[0]] if kinds else list(TRANSPORTS),
        )


@rule(
    "C4",
    f"{HIERARCHICAL.name} needs hierarchical_context_parallel_sizes.",
    "Without the two levels Transformer Engine's attention gets no process group and silently attends to the local "
    "slice only.",
    broken(model=dict(hierarchical_context_parallel_sizes=None)),
)
def hierarchy_needs_sizes(c: Context) -> Iterator[Finding]:
    if c.cp > 1 and c.hierarchical and not c.model.hierarchical_context_parallel_sizes:
        message = f"hierarchical_context_parallel_sizes must be set when cp_comm_type contains {c.hierarchical.name!r}"
        yield _wrong_levels(c, message)


@rule(
    "C5",
    "The hierarchical sizes multiply to cp.",
    "megatron-core asserts this without a message, after it has built half of the groups.",
    broken(model=dict(hierarchical_context_parallel_sizes=[2, 4])),
)
def sizes_multiply_to_cp(c: Context) -> Iterator[Finding]:
    sizes = c.model.hierarchical_context_parallel_sizes
    if c.cp > 1 and sizes and min(sizes) >= 1 and math.prod(sizes) != c.cp:
        yield _wrong_levels(
            c,
            f"Product of hierarchical_context_parallel_sizes {sizes} (={math.prod(sizes)}) must equal "
            f"context_parallel_size (={c.cp}).",
        )


@rule(
    "C6",
    "There are two hierarchical levels: all-to-all, then ring.",
    "megatron-core builds groups for any number of levels; attention supports exactly two.",
    broken(model=dict(context_parallel_size=8, hierarchical_context_parallel_sizes=[2, 2, 2]), world_size=8),
)
def two_levels(c: Context) -> Iterator[Finding]:
    sizes = c.model.hierarchical_context_parallel_sizes
    if c.cp > 1 and sizes and len(sizes) != 2:
        yield _wrong_levels(c, f"has {len(sizes)} levels; {HIERARCHICAL.name} requires {TWO_GROUPS}")


@rule(
    "C7",
    "Hierarchical sizes are at least 1.",
    "Pairs of negative sizes multiply to cp and fail later, in an index computation.",
    broken(model=dict(hierarchical_context_parallel_sizes=[-2, -2])),
)
def levels_are_positive(c: Context) -> Iterator[Finding]:
    sizes = c.model.hierarchical_context_parallel_sizes
    if sizes and min(sizes) < 1:
        yield _wrong_levels(c, f"sizes must be integers of at least 1, got {sizes}")


@rule(
    "C8",
    "No hierarchical level has size 1.",
    "A level of size 1 works but has no effect: the other level's plain transport is the same.",
    broken(model=dict(hierarchical_context_parallel_sizes=[1, 4])),
    severity="warning",
)
def level_of_one(c: Context) -> Iterator[Finding]:
    if c.cp > 1 and c.levels is not None and 1 in c.levels and c.hierarchical:
        same = c.hierarchical.levels[1 if c.levels[0] == 1 else 0]
        yield Finding(
            _SIZES, f"{list(c.levels)} is equivalent to {same}", f"{NAME.model.cp_comm_type}={same} {_SIZES}=null"
        )


@rule(
    "C9",
    "Hierarchical sizes are used by at least one layer.",
    "Upstream silently ignores the sizes when no layer uses two levels.",
    broken(RING.settings[0]),
)
def sizes_are_used(c: Context) -> Iterator[Finding]:
    sizes = c.model.hierarchical_context_parallel_sizes
    if c.cp > 1 and sizes and c.hierarchical is None and "auto" not in c.model.transports:
        yield Finding(
            _SIZES,
            f"no layer uses {HIERARCHICAL.name} ({NAME.model.cp_comm_type}={c.model.cp_comm_type})",
            "=null",
            HIERARCHICAL.settings[0],
        )


@rule(
    "C15",
    "Settings of context parallelism need more than one context-parallel rank.",
    "With one rank they have no effect. A recipe for several ranks may be run on one rank to compare.",
    broken(model=dict(context_parallel_size=1), train=dict(micro_batch_size=4)),
    severity="warning",
)
def settings_without_cp(c: Context) -> Iterator[Finding]:
    used = c.model.dynamic_context_parallel or c.eval_cp > 1
    if c.cp == 1 and not used and c.model.hierarchical_context_parallel_sizes:
        yield Finding(_SIZES, f"has no effect: {NAME.model.context_parallel_size} is 1", FLAT)


te_rule(
    "C16",
    "Transformer Engine is new enough.",
    f"Context parallelism: {first_versions('context_parallelism')}; the attention features used here: since 2.10.",
    broken(model=dict(attention_backend="te"), environment=replace(PRESETS["gpu"], transformer_engine="1.11.0")),
)
