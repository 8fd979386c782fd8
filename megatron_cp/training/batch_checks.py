"""What no configuration can tell: whether each rank's microbatches are what the layout says. Checked before every step.

A rank that found fault with its batches and stopped alone would leave the others waiting for it. So all ranks exchange
two numbers a step (is anything wrong here, and a checksum of the samples) and raise the same error together.
"""

from __future__ import annotations

import zlib
from collections import defaultdict
from collections.abc import Mapping, Sequence
from typing import Any

import torch
import torch.distributed as dist

from megatron_cp.errors import RuntimeFault
from megatron_cp.parallel.layout import layout_of
from megatron_cp.rules.batch import check_batch, check_positions
from megatron_cp.training.setup import Run

Batch = Mapping[str, torch.Tensor]


class BatchChecks:
    """The checks of one run's batches."""

    def __init__(self, run: Run) -> None:
        self._run = run
        layout = layout_of(run.config, run.all_ranks.size())
        self._replicas = [layout.coordinates(rank)["dp"] for rank in range(layout.world_size)]

    def problems_of(self, sliced: Batch) -> list[str]:
        """What is wrong with a microbatch that is sliced for this rank."""
        config, cp = self._run.config, self._run.groups.cp
        shapes = {key: tuple(value.shape) for key, value in sliced.items()}
        found = check_batch(shapes, seq_length=config.model.seq_length or 0, cp_size=cp.size())
        if not found and not config.dataset.reset_position_ids:
            found = check_positions(sliced["position_ids"].numpy(), cp_rank=cp.rank(), cp_size=cp.size())
        return [str(violation) for violation in found]

    def agree(self, checksum: int, problems: Sequence[str]) -> None:
        """Compare what all ranks found; collective over the run's ranks.

        Args:
            checksum: of the whole samples, before slicing, that this rank works on in the coming step.
            problems: what is wrong here.

        Raises:
            RuntimeFault: on every rank, if any rank has a problem or ranks that share samples have different ones.
        """
        group = self._run.all_ranks
        mine = torch.tensor([len(problems), checksum], dtype=torch.int64, device=self._run.device)
        everyone = [torch.empty_like(mine) for _ in range(group.size())]
        dist.all_gather(everyone, mine, group=group)
        counts, checksums = torch.stack(everyone).T.tolist()
        if any(counts):
            said: list[Any] = [None] * group.size()
            dist.all_gather_object(said, list(problems), group=group)
            texts = [f"rank {rank}: {text}" for rank, theirs in enumerate(said) for text in theirs]
        else:
            texts = self._disagreements(checksums)
        if texts:
            shown = texts[:8] + ([f"and {len(texts) - 8} more"] if len(texts) > 8 else [])
            step = self._run.progress.iteration + 1
            raise RuntimeFault(f"the batches of step {step} cannot be used.\n" + "\n".join(shown), on_all_ranks=True)

    def _disagreements(self, checksums: Sequence[int]) -> list[str]:
        members: dict[int, list[int]] = defaultdict(list)
        for rank, replica in enumerate(self._replicas):
            members[replica].append(rank)
        texts = []
        for replica, ranks in members.items():
            others = [rank for rank in ranks if checksums[rank] != checksums[ranks[0]]]
            if others:
                texts.append(
                    f"data-parallel replica {replica}: ranks {others} read other samples than rank {ranks[0]}, but "
                    f"ranks {ranks} work on the same ones (each on its slice). Check that all nodes read the same data "
                    "files and sample index, and that the sampler depends on the data-parallel rank alone"
                )
        return texts


def checksum_of(batch: Batch, start: int = 0) -> int:
    """A checksum of every tensor of a batch on the host, going on from ``start``."""
    for key in sorted(batch):
        start = zlib.crc32(batch[key].contiguous().numpy().tobytes(), start)
    return start
