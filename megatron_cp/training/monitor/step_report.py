"""Per-step reports of ranks, exchanged in one tensor."""

from __future__ import annotations

from dataclasses import dataclass, field, replace

import torch
from torch import Tensor
from torch.distributed import ProcessGroup

from megatron_cp.parallel.collectives import gather_tensors, pack, unpack
from megatron_cp.parallel.transfer import send
from megatron_cp.training.monitor.phases import PHASES, Interval, Phase


@dataclass(frozen=True)
class StepReport:
    """One rank's report.

    Over all ranks: means of ``seconds``, and the maximum of each other number.
    """

    signal: int = 0  # signal that asked the rank to stop
    out_of_time: bool = False  # train.exit_duration_in_mins is over
    saving: bool = False  # writing a checkpoint in the background
    peak_memory_bytes: int = 0
    seconds: dict[Phase, float] = field(default_factory=lambda: dict.fromkeys(PHASES, 0.0))  # since the last log line

    def interval(self, steps: int) -> Interval:
        """Return the interval of ``steps`` steps, without phases that did not run."""
        means: dict[str, float] = {name: value / max(steps, 1) for name, value in self.seconds.items() if value > 0}
        return Interval(means, self.peak_memory_bytes)


def gather_reports(report: StepReport, suspected: Tensor, group: ProcessGroup) -> Tensor:
    """Gather reports and gradient flags of all ranks, without a device wait.

    Collective.

    Args:
        suspected: [1], float64, on the device: 1 or 0.

    Returns:
        Maximum and mean of each number, on the device, for :func:`read_reports`.
    """
    per_rank = gather_tensors(torch.cat([suspected, send(pack(report), suspected.device)]), group)
    return torch.stack([per_rank.amax(0), per_rank.mean(0)])


def read_reports(gathered: Tensor, own: StepReport) -> tuple[bool, StepReport]:
    """Read a host copy of the result of :func:`gather_reports`.

    ``mine``: this rank's report.

    Returns:
        Whether any rank suspects its gradients, and the report over all ranks.
    """
    suspected, numbers = gathered.split([1, gathered.shape[1] - 1], dim=1)
    largest, mean = (unpack(row, own) for row in numbers)
    return bool(suspected.any()), replace(largest, seconds=mean.seconds)
