"""Check before every step that each rank's microbatches fit the layout.

A rank that stopped alone would leave other ranks in a collective. All ranks therefore exchange a few numbers per step
(problems found, checksums of samples) and raise the same error.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch

from megatron_cp.common.errors import DataError, RuntimeFault, join_limited
from megatron_cp.dynamic_cp.runtime.iterator import StepPlan
from megatron_cp.dynamic_cp.runtime.packing import mask_problems
from megatron_cp.parallel.collectives import gather_objects, gather_problems, max_of_messages
from megatron_cp.rules.batch import KEYS, check_batch, check_pack, check_positions
from megatron_cp.training.setup import Run

Batch = Mapping[str, torch.Tensor]
Problem = str | DataError  # DataError: in the data files, so a restart would fail again


class BatchChecks:
    """Checks of one run's batches."""

    def __init__(self, run: Run) -> None:
        self._run = run
        self._replicas = [run.layout.coordinates(rank)["dp"] for rank in range(run.layout.world_size)]

    def problems_of(self, sliced: Batch) -> list[str]:
        """List what is wrong with a microbatch sliced for this rank."""
        config, cp = self._run.config, self._run.groups.cp
        shapes = {key: tuple(value.shape) for key, value in sliced.items()}
        found = check_batch(shapes, seq_length=config.model.seq_length or 0, cp_size=cp.size())
        if not found and not config.dataset.reset_position_ids:
            found = check_positions(sliced["position_ids"].numpy(), cp_rank=cp.rank(), cp_size=cp.size())
        texts = [str(violation) for violation in found]
        return texts + (mask_problems(sliced["loss_mask"]) if "loss_mask" in sliced else [])

    def check_on_all_ranks(self, checksum: int, problems: Sequence[Problem]) -> None:
        """Compare problems and checksums of all ranks of the run. Collective.

        Args:
            checksum: of the whole samples, before slicing, of this rank's coming step.
            problems: found on this rank.

        Raises:
            RuntimeFault: on every rank, if any rank has a problem or ranks of a replica read different samples.
        """
        own = self._replicas[self._run.all_ranks.rank()]
        differing = _exchange(self._run, problems, {own: checksum}, size=max(self._replicas) + 1)
        texts = [
            f"data-parallel replica {replica}: ranks {others} and rank {ranks[0]} read different samples, but ranks "
            f"{ranks} must read the same. Fix: give all nodes the same data files and sample index, and sample by "
            "data-parallel rank only"
            for replica, (ranks, others) in differing.items()
        ]
        _raise_if_any(self._run, texts)


def check_same_packs(run: Run, batch_size: int, plan: StepPlan | None, problems: Sequence[Problem]) -> None:
    """Check this rank's packs and compare all ranks. Collective, one exchange.

    All ranks must have the same schedule and sample lengths. Ranks that read the same sample (a CP group, its pipeline
    stages and tensor-parallel ranks) must read the same values.

    Args:
        batch_size: samples of a step.
        plan: the coming step; None if ``problems`` prevented it.

    Raises:
        RuntimeFault: on every rank, if any rank has a problem or ranks differ.
    """
    problems = [*problems, *(problems_of_packs(plan) if plan else ())]
    made, read = (plan.checksum, plan.checksums) if plan else (0, {})
    differing = _exchange(run, problems, {**read, batch_size: made}, batch_size + 1)
    if batch_size in differing:
        _, others = differing[batch_size]
        texts = [
            f"ranks {others} and rank 0 have different sample lengths or schedules. Fix: give all nodes the same "
            "data files, and use nodes of one kind"
        ]
    else:
        texts = [
            f"sample {plan.samples[sample_id]}: ranks {others} and rank {ranks[0]} read different tokens, labels or "
            "loss masks. Fix: give all nodes the same data files"
            for sample_id, (ranks, others) in differing.items()
            if plan is not None
        ]
    _raise_if_any(run, texts)


_NOT_READ = -(1 << 40)  # below any 32-bit checksum and its negative


@dataclass(frozen=True)
class _Findings:
    """Findings of one rank.

    Ranks exchange the maximum of each number; the maximum of negated checksums gives their minimum.
    """

    problems: int
    read: torch.Tensor  # a checksum in each place, or _NOT_READ
    minus_read: torch.Tensor  # its negative, or _NOT_READ


def _exchange(
    run: Run, problems: Sequence[Problem], checksums: Mapping[int, int], size: int
) -> dict[int, tuple[list[int], list[int]]]:
    """Compare checksums by place, of ``size`` places. Collective.

    Returns:
        For each place where checksums differ: the ranks that have one, and the ranks that differ from the first.

    Raises:
        RuntimeFault: on every rank, if any rank has a problem.
    """
    read, minus_read = torch.full((2, size), _NOT_READ, dtype=torch.int64)
    for place, checksum in checksums.items():
        read[place], minus_read[place] = checksum, -checksum
    largest = max_of_messages(_Findings(len(problems), read, minus_read), run.all_ranks, run.device)
    if largest.problems:
        of_data = any(gather_objects(any(isinstance(problem, DataError) for problem in problems), run.all_ranks))
        _raise_if_any(run, gather_problems(list(map(str, problems)), run.all_ranks), of_data)
    differing = ((largest.read != _NOT_READ) & (largest.read != -largest.minus_read)).nonzero().flatten().tolist()
    if not differing:
        return {}
    gathered = gather_objects({place: checksums.get(place) for place in differing}, run.all_ranks)
    found = {}
    for place in differing:
        ranks = [rank for rank, sent in enumerate(gathered) if sent[place] is not None]
        others = [rank for rank in ranks if gathered[rank][place] != gathered[ranks[0]][place]]
        found[place] = ranks, others
    return found


def problems_of_packs(plan: StepPlan) -> list[str]:
    """List what is wrong with this rank's packs (rules B7, B9, F1, F2, F4, F15)."""
    found = []
    width = plan.schedule.sequence_parallel_size
    for pack in plan.packs:
        total = pack.padded_starts[-1]
        shapes = {key: tuple(pack.tensors[key].shape) for key in KEYS if key in pack.tensors}
        found += check_batch(shapes, seq_length=total, cp_size=pack.cp_size, packed=True)
        chunked, shared = (pack.cp_size, width) if pack.placed is None else (1, pack.cp_size * width)
        found += check_pack(pack.starts, pack.padded_starts, num_tokens=total, cp_size=chunked, tp_size=shared)
    return [str(violation) for violation in found]


def _raise_if_any(run: Run, texts: Sequence[str], of_data: bool = False) -> None:
    """Raise RuntimeFault on every rank if there are ``texts``."""
    if texts:
        message = f"the batches of step {run.progress.iteration + 1} cannot be used.\n{join_limited(texts, '\n')}"
        raise RuntimeFault(message, on_all_ranks=True, of_data=of_data)
