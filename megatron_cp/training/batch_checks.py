"""What no configuration can tell: whether each rank's microbatches are what the layout says. Checked before every step.

A rank that found fault with its batches and stopped alone would leave the others waiting for it. So all ranks exchange
a few numbers a step (is anything wrong here, and checksums of the samples) and raise the same error together.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import NoReturn

import torch

from megatron_cp.common.errors import DataError, RuntimeFault, shown
from megatron_cp.dynamic_cp.runtime.iterator import StepPlan
from megatron_cp.dynamic_cp.runtime.packing import mask_problems
from megatron_cp.parallel.collectives import gather_objects, gather_problems, max_of_messages
from megatron_cp.rules.batch import KEYS, check_batch, check_pack, check_positions
from megatron_cp.training.setup import Run

Batch = Mapping[str, torch.Tensor]
Problem = str | DataError  # the latter is of the data's files, which another start would find as they are


class BatchChecks:
    """The checks of one run's batches."""

    def __init__(self, run: Run) -> None:
        self._run = run
        self._replicas = [run.layout.coordinates(rank)["dp"] for rank in range(run.layout.world_size)]

    def problems_of(self, sliced: Batch) -> list[str]:
        """What is wrong with a microbatch that is sliced for this rank."""
        config, cp = self._run.config, self._run.groups.cp
        shapes = {key: tuple(value.shape) for key, value in sliced.items()}
        found = check_batch(shapes, seq_length=config.model.seq_length or 0, cp_size=cp.size())
        if not found and not config.dataset.reset_position_ids:
            found = check_positions(sliced["position_ids"].numpy(), cp_rank=cp.rank(), cp_size=cp.size())
        texts = [str(violation) for violation in found]
        return texts + (mask_problems(sliced["loss_mask"]) if "loss_mask" in sliced else [])

    def agree(self, checksum: int, problems: Sequence[Problem]) -> None:
        """Compare what all ranks found; collective over the run's ranks.

        Args:
            checksum: of the whole samples, before slicing, that this rank works on in the coming step.
            problems: what is wrong here.

        Raises:
            RuntimeFault: on every rank, if any rank has a problem or ranks that share samples have different ones.
        """
        mine = self._replicas[self._run.all_ranks.rank()]
        differing = _exchange(self._run, problems, {mine: checksum}, size=max(self._replicas) + 1)
        if differing:
            _raise(self._run, self._disagreements(gather_objects(checksum, self._run.all_ranks), differing))

    def _disagreements(self, checksums: Sequence[int], replicas: Iterable[int]) -> list[str]:
        texts = []
        for replica in replicas:
            ranks = [rank for rank, each in enumerate(self._replicas) if each == replica]
            others = [rank for rank in ranks if checksums[rank] != checksums[ranks[0]]]
            texts.append(
                f"data-parallel replica {replica}: ranks {others} read other samples than rank {ranks[0]}, but "
                f"ranks {ranks} work on the same ones (each on its slice). Check that all nodes read the same data "
                "files and sample index, and that the sampler depends on the data-parallel rank alone"
            )
        return texts


class PackChecks:
    """The checks of one run's packed steps, of ``batch_size`` samples each."""

    def __init__(self, run: Run, batch_size: int) -> None:
        self._run = run
        self._size = batch_size

    def agree(self, plan: StepPlan | None, problems: Sequence[Problem]) -> None:
        """Check this rank's packs and compare what all ranks found; collective over the run's ranks, one exchange.

        All ranks must have made the same schedule of the same lengths, and ranks that read the same sample (those of a
        group, and of other pipeline stages and tensor-parallel ranks) must have read the same.

        Args:
            plan: the coming step; None where there is none because of ``problems``.

        Raises:
            RuntimeFault: on every rank, if any rank has a problem or ranks differ.
        """
        problems = [*problems, *(problems_of_packs(plan) if plan else ())]
        made, read = (plan.checksum, plan.checksums) if plan else (0, {})
        differing = _exchange(self._run, problems, {**read, self._size: made}, self._size + 1)
        if self._size in differing:
            _raise(self._run, self._differing_plans(made))
        if differing and plan is not None:
            _raise(self._run, self._differing_samples(plan, differing))

    def _differing_plans(self, made: int) -> list[str]:
        everyone = gather_objects(made, self._run.all_ranks)
        others = [rank for rank, theirs in enumerate(everyone) if theirs != everyone[0]]
        return [
            f"ranks {others} have other sample lengths, or another schedule of them, than rank 0. Check that all nodes "
            "read the same data files and run on the same kind of machine"
        ]

    def _differing_samples(self, plan: StepPlan, sample_ids: Sequence[int]) -> list[str]:
        mine = {i: plan.checksums[i] for i in sample_ids if i in plan.checksums}
        everyone = gather_objects(mine, self._run.all_ranks)
        texts = []
        for sample_id in sample_ids:
            read = {rank: theirs[sample_id] for rank, theirs in enumerate(everyone) if sample_id in theirs}
            first, *_ = read
            others = [rank for rank, checksum in read.items() if checksum != read[first]]
            texts.append(
                f"sample {plan.samples[sample_id]}: ranks {others} read other tokens, labels or loss masks than rank "
                f"{first}. Check that all nodes read the same data files"
            )
        return texts


_NOT_READ = -(1 << 40)  # less than any checksum of 32 bits, and than its negative


@dataclass(frozen=True)
class _Found:
    """What one rank found. Ranks exchange the largest of each number: of negatives, that is the smallest."""

    problems: int
    read: torch.Tensor  # a checksum in each place, or _NOT_READ
    minus_read: torch.Tensor  # its negative, or _NOT_READ


def _exchange(run: Run, problems: Sequence[Problem], checksums: Mapping[int, int], size: int) -> list[int]:
    """The places, of ``size``, for which ranks have different checksums. Collective.

    Raises:
        RuntimeFault: on every rank, if any rank has a problem.
    """
    read, minus_read = torch.full((2, size), _NOT_READ, dtype=torch.int64)
    for place, checksum in checksums.items():
        read[place], minus_read[place] = checksum, -checksum
    largest = max_of_messages(_Found(len(problems), read, minus_read), run.all_ranks, run.device)
    if largest.problems:
        of_data = any(gather_objects(any(isinstance(problem, DataError) for problem in problems), run.all_ranks))
        _raise(run, gather_problems(list(map(str, problems)), run.all_ranks), of_data)
    return ((largest.read != _NOT_READ) & (largest.read != -largest.minus_read)).nonzero().flatten().tolist()


def problems_of_packs(plan: StepPlan) -> list[str]:
    """What is wrong with the packs of a step on this rank (rules B7, B9, F1, F2, F4, F15)."""
    found = []
    width = plan.schedule.sequence_parallel_size
    for pack in plan.packs:
        total = pack.padded_starts[-1]
        shapes = {key: tuple(pack.tensors[key].shape) for key in KEYS if key in pack.tensors}
        found += check_batch(shapes, seq_length=total, cp_size=pack.cp_size, packed=True)
        found += check_pack(pack.starts, pack.padded_starts, num_tokens=total, cp_size=pack.cp_size, tp_size=width)
    return [str(violation) for violation in found]


def _raise(run: Run, texts: Sequence[str], of_data: bool = False) -> NoReturn:
    """On every rank at once."""
    message = f"the batches of step {run.progress.iteration + 1} cannot be used.\n{shown(texts, '\n')}"
    raise RuntimeFault(message, on_all_ranks=True, of_data=of_data)
