"""C. The transport of context-parallel attention and its hierarchical sizes."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import replace

from megatron_cp.config.run_config import CP_COMM_TYPES
from megatron_cp.config.schema import nearest
from megatron_cp.rules.base import Context, Finding, broken, rule, te_rule
from megatron_cp.rules.environment import PRESETS
from megatron_cp.rules.proposals import divisors, either, one_of, resized, typed

# What other projects call our transports.
_OTHER_NAMES = {
    "allgather": "all_gather",
    "ag": "all_gather",
    "ring": "p2p",
    "alltoall": "a2a",
    "all_to_all": "a2a",
    "ulysses": "a2a",
    "usp": "a2a+p2p",
    "hybrid": "a2a+p2p",
    "hierarchical": "a2a+p2p",
    "hcp": "a2a+p2p",
    "p2p+a2a": "a2a+p2p",
}


_SIZES = "model.hierarchical_context_parallel_sizes"
FLAT = f"model.cp_comm_type=p2p {_SIZES}=null"


def splits(c: Context) -> list[str]:
    """Two levels for cp, neither of size 1, whose all-to-all divides the heads (rule D2)."""
    fitting = [d for d in divisors(c.cp) if c.heads % d == 0 and (c.backend == "native" or c.kv_heads % d == 0)]
    return [typed(_SIZES, [d, c.cp // d]) for d in fitting if 1 < d < c.cp]


def plain_transports(c: Context) -> list[str]:
    """Transports of one level."""
    fits = c.heads % c.cp == 0 and (c.backend == "native" or c.kv_heads % c.cp == 0)
    return [FLAT, *([f"model.cp_comm_type=a2a {_SIZES}=null"] if fits else [])]


@rule(
    "C1",
    "cp_comm_type is p2p, all_gather, a2a, a2a+p2p or auto.",
    "Transformer Engine finds out in the first forward pass.",
    broken("model.cp_comm_type=ring", "model.hierarchical_context_parallel_sizes=null"),
)
def transport_is_known(c: Context) -> Iterator[Finding]:
    valid = (*CP_COMM_TYPES, "auto")
    for kind in c.transports:
        if kind == "auto":  # where one can be chosen, it was before the rules are asked
            yield Finding("model.cp_comm_type", "auto finds no transport for these heads", either(*plain_transports(c)))
        elif kind not in valid:
            other = _OTHER_NAMES.get(kind.lower().replace("-", "_"))
            suggestion = f"; did you mean '{other}'?" if other else nearest(kind, list(valid))
            meant = next((name for name in valid if f"'{name}'" in suggestion), "")
            known = f" (one of {', '.join(valid)})" if not suggestion else ""
            yield Finding(
                "model.cp_comm_type",
                f"Unsupported communication type: {kind}{suggestion or known}",
                one_of(
                    "model.cp_comm_type", [_in_place(c, kind, name) for name in dict.fromkeys([meant, *valid]) if name]
                ),
            )


def _in_place(c: Context, wrong: str, right: str) -> str | list[str]:
    kinds = c.config.model.cp_comm_type
    return right if isinstance(kinds, str) else [right if kind == wrong else kind for kind in kinds]


@rule(
    "C3",
    "A cp_comm_type list has one entry a layer.",
    "Layers past the list (those of multi-token prediction) use the last entry.",
    broken("model.cp_comm_type=[p2p,a2a]", "model.hierarchical_context_parallel_sizes=null"),
)
def one_transport_a_layer(c: Context) -> Iterator[Finding]:
    kinds, layers = c.config.model.cp_comm_type, c.config.model.num_layers
    if isinstance(kinds, list) and len(kinds) != layers:
        yield Finding(
            "model.cp_comm_type",
            f"Length of cp_comm_type ({len(kinds)}) must equal num_layers ({layers}). megatron-core: Length of "
            f"cp_comm_type ({len(kinds)}) should equal to the total number of transformer layers ({layers})",
            one_of("model.cp_comm_type", [resized(kinds, layers), kinds[0]] if kinds else CP_COMM_TYPES),
        )


@rule(
    "C4",
    "a2a+p2p needs hierarchical_context_parallel_sizes.",
    "Without the two levels Transformer Engine's attention gets no group at all and silently attends to its own slice.",
    broken("model.hierarchical_context_parallel_sizes=null"),
)
def hierarchy_needs_sizes(c: Context) -> Iterator[Finding]:
    if c.cp > 1 and "a2a+p2p" in c.transports and not c.config.model.hierarchical_context_parallel_sizes:
        yield Finding(
            "model.hierarchical_context_parallel_sizes",
            "hierarchical_context_parallel_sizes must be set when cp_comm_type contains 'a2a+p2p'",
            either(*splits(c), *plain_transports(c)),
        )


@rule(
    "C5",
    "The hierarchical sizes multiply to cp.",
    "megatron-core asserts it without a message, after half of the groups are built.",
    broken("model.hierarchical_context_parallel_sizes=[2,4]"),
)
def sizes_multiply_to_cp(c: Context) -> Iterator[Finding]:
    sizes = c.config.model.hierarchical_context_parallel_sizes
    if c.cp > 1 and sizes and min(sizes) >= 1 and math.prod(sizes) != c.cp:
        yield Finding(
            "model.hierarchical_context_parallel_sizes",
            f"Product of hierarchical_context_parallel_sizes {sizes} (={math.prod(sizes)}) must equal "
            f"context_parallel_size (={c.cp}).",
            either(*splits(c), *plain_transports(c)),
        )


@rule(
    "C6",
    "There are two hierarchical levels: all-to-all, then ring.",
    "megatron-core builds groups for any number of levels, attention takes exactly two.",
    broken("model.context_parallel_size=8", "model.hierarchical_context_parallel_sizes=[2,2,2]", world_size=8),
)
def two_levels(c: Context) -> Iterator[Finding]:
    sizes = c.config.model.hierarchical_context_parallel_sizes
    if c.cp > 1 and sizes is not None and sizes and len(sizes) != 2:
        yield Finding(
            "model.hierarchical_context_parallel_sizes",
            f"has {len(sizes)} levels; a2a+p2p requires cp_group = [a2a_cp_group, p2p_cp_group]",
            either(*splits(c), *plain_transports(c)),
        )


@rule(
    "C7",
    "Hierarchical sizes are at least 1.",
    "Negative pairs multiply to the right number and fail in an index transformation.",
    broken("model.hierarchical_context_parallel_sizes=[-2,-2]"),
)
def levels_are_positive(c: Context) -> Iterator[Finding]:
    sizes = c.config.model.hierarchical_context_parallel_sizes
    if sizes and min(sizes) < 1:
        yield Finding(
            "model.hierarchical_context_parallel_sizes",
            f"sizes must be integers of at least 1, got {sizes}",
            either(*splits(c), *plain_transports(c)),
        )


@rule(
    "C8",
    "No hierarchical level has size 1.",
    "It does nothing: it works and is the same as the plain transport of the other level.",
    broken("model.hierarchical_context_parallel_sizes=[1,4]"),
    severity="warning",
)
def level_of_one(c: Context) -> Iterator[Finding]:
    if c.cp > 1 and c.levels is not None and 1 in c.levels and "a2a+p2p" in c.transports:
        same = "p2p" if c.levels[0] == 1 else "a2a"
        yield Finding(
            "model.hierarchical_context_parallel_sizes",
            f"{list(c.levels)} is equivalent to {same}",
            f"model.cp_comm_type={same} model.hierarchical_context_parallel_sizes=null",
        )


@rule(
    "C9",
    "Hierarchical sizes are used by some layer.",
    "Upstream ignores the sizes silently when no layer uses a2a+p2p: the run is not what its configuration says.",
    broken("model.cp_comm_type=p2p"),
)
def sizes_are_used(c: Context) -> Iterator[Finding]:
    sizes = c.config.model.hierarchical_context_parallel_sizes
    if c.cp > 1 and sizes and "a2a+p2p" not in c.transports and "auto" not in c.transports:
        yield Finding(
            "model.hierarchical_context_parallel_sizes",
            f"is set but no layer uses a2a+p2p (model.cp_comm_type={c.config.model.cp_comm_type})",
            "model.hierarchical_context_parallel_sizes=null, or model.cp_comm_type=a2a+p2p",
        )


@rule(
    "C15",
    "Settings of context parallelism are for more than one context-parallel rank.",
    "They have no effect otherwise. A recipe written for several ranks may be run on one to compare; the transport is "
    "then ignored.",
    broken("model.context_parallel_size=1", "train.micro_batch_size=4"),
    severity="warning",
)
def settings_without_cp(c: Context) -> Iterator[Finding]:
    model = c.config.model
    elsewhere = model.dynamic_context_parallel or c.eval_cp > 1
    if c.cp == 1 and not elsewhere and model.hierarchical_context_parallel_sizes:
        yield Finding(
            "model.hierarchical_context_parallel_sizes",
            "is ignored because context_parallel_size is 1",
            "model.hierarchical_context_parallel_sizes=null model.cp_comm_type=p2p",
        )


te_rule(
    "C16",
    "Transformer Engine is new enough.",
    "Context parallelism came with 1.0, a2a+p2p with 1.12, and what we use of its attention with 2.10.",
    broken("model.attention_backend=te", environment=replace(PRESETS["gpu"], transformer_engine="1.11.0")),
)
