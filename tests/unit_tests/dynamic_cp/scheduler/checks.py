"""Checks of every schedule that do not use the scheduler's own code."""

from collections import Counter
from collections.abc import Sequence

from megatron_cp.dynamic_cp import Schedule, legal_groups


def problems(
    schedule: Schedule,
    lengths: Sequence[int],
    num_ranks: int,
    max_seqlen_per_rank: int,
    min_cp_size: int = 1,
    microbatch_multiple: int = 1,
    sequence_parallel_size: int = 1,
    placement: str = "zigzag",
) -> list[str]:
    """List everything that is wrong with a schedule; empty if nothing is."""
    wrong = []
    legal = set(legal_groups(num_ranks, min_cp_size))
    seen = Counter(x for groups in schedule.microbatches for group in groups for x in group.sample_ids)
    if seen != Counter(range(len(lengths))):
        missing = [x for x in range(len(lengths)) if not seen[x]]
        wrong.append(f"samples lost {missing[:5]}, doubled {[x for x, k in seen.items() if k > 1][:5]}")
    if schedule.num_microbatches % microbatch_multiple:
        wrong.append(f"{schedule.num_microbatches} microbatches, not a multiple of {microbatch_multiple}")
    for k, groups in enumerate(schedule.microbatches):
        ranks = [rank for group in groups for rank in group.ranks]
        if len(ranks) != len(set(ranks)):
            wrong.append(f"microbatch {k}: a rank is in two groups")
        for group in groups:
            if group.ranks not in legal:
                wrong.append(f"microbatch {k}: {group.ranks} is not a legal group")
            if len(group.ranks) < min_cp_size:
                wrong.append(f"microbatch {k}: {group.ranks} is narrower than {min_cp_size}")
            if not group.sample_ids:
                wrong.append(f"microbatch {k}: {group.ranks} has no sample")
            unit = len(group.ranks) * sequence_parallel_size
            if placement == "balanced" and len(group.ranks) > 1:
                padded = [sum(lengths[x] for x in group.sample_ids)]
            else:
                unit, padded = 2 * unit, [lengths[x] for x in group.sample_ids]
            tokens = sum((length + unit - 1) // unit * unit for length in padded)
            if tokens > max_seqlen_per_rank * len(group.ranks):
                wrong.append(f"microbatch {k}: {tokens} tokens on {group.ranks}, over {max_seqlen_per_rank} a rank")
    return wrong
