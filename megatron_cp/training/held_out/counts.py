"""Sum loss, tokens and correct predictions over every sample, on all ranks."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import closing, contextmanager
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from megatron_cp.dynamic_cp.runtime.iterator import StepPlan
from megatron_cp.dynamic_cp.runtime.packing import HostPack, PackedMicrobatch
from megatron_cp.models.language_model import LanguageModelMixin
from megatron_cp.parallel.collectives import sum_over_ranks
from megatron_cp.training.forward_backward import forward_backward
from megatron_cp.training.held_out.samples import EverySample
from megatron_cp.training.packed.steps import PackedSteps
from megatron_cp.training.setup import Run

_CLASSES = 48  # of positions: up to 2**48 tokens


@dataclass(frozen=True)
class Counts:
    """Sums over the tokens in the loss, float64.

    Columns are loss, tokens and correct predictions. ``documents`` is [documents, 3]. Row k of ``positions`` has the
    labels after 2**k to 2**(k + 1) - 1 tokens of their sample. A prediction is correct if no other token has a larger
    logit than the label.
    """

    documents: np.ndarray
    positions: np.ndarray


class _Tables:
    """Sums on this rank's device."""

    def __init__(self, documents: int, device: torch.device) -> None:
        self.documents = torch.zeros(documents, 3, dtype=torch.float64, device=device)
        self.positions = torch.zeros(_CLASSES, 3, dtype=torch.float64, device=device)
        self._powers = 2 ** torch.arange(_CLASSES, device=device)
        self._keys: dict[int, Tensor] = {}

    def expect(self, microbatches: list[PackedMicrobatch], documents: list[np.ndarray]) -> None:
        """Set the document of each token of the next microbatches."""
        device = self.documents.device
        self._keys = {
            id(each): torch.from_numpy(own).to(device) for each, own in zip(microbatches, documents, strict=True)
        }

    def add(self, microbatch: PackedMicrobatch, losses: Tensor) -> None:
        """Add a microbatch's losses; they are negative where another token is more likely."""
        mask = microbatch.loss_mask.reshape(-1).double()
        signed = losses.reshape(-1).double()
        rows = torch.stack([signed.abs() * mask, mask, (signed >= 0) * mask], dim=1)
        self.documents.index_add_(0, self._keys[id(microbatch)], rows)
        classes = torch.bucketize(microbatch.position_ids.reshape(-1) + 1, self._powers, right=True) - 1
        self.positions.index_add_(0, classes, rows)


def batches_of(run: Run, samples: EverySample) -> int:
    """Return the number of global batches that hold all samples."""
    return -(-len(samples) // run.config.evaluation_batch[0])


def count_tokens(run: Run, samples: EverySample, asked_to_stop: Callable[[], int]) -> tuple[Counts, int]:
    """Evaluate every sample once. Collective.

    Args:
        asked_to_stop: called before each batch; returns the same value on all ranks. Not 0: stop there.

    Returns:
        The counts, equal on all ranks, and the last value of ``asked_to_stop``.
    """
    tables, stop = _Tables(samples.num_documents, run.device), 0
    batches = batches_of(run, samples)
    opened = PackedSteps(run, samples, 0, training=False, num_steps=batches)
    with _marking_errors(run), torch.no_grad(), closing(opened) as steps:
        for _ in range(batches):
            if stop := asked_to_stop():
                break
            step = next(steps)
            assert step.plan is not None and run.dynamic_groups is not None
            keys = _documents_of_tokens(step.plan, samples, run.dynamic_groups.position)
            tables.expect(list(step.microbatches), keys)  # type: ignore[arg-type]
            forward_backward(run, step.microbatches, forward_only=True, observe=tables.add)
    for table in (tables.documents, tables.positions):
        for group in (run.groups.dp_cp, run.groups.pp):  # only the last stage has losses
            sum_over_ranks(table, group)
    return Counts(tables.documents.cpu().numpy(), tables.positions.cpu().numpy()), stop


@contextmanager
def _marking_errors(run: Run) -> Iterator[None]:
    """Evaluate, with losses that are negative where another token is more likely."""
    modules = [module for chunk in run.model for module in chunk.modules() if isinstance(module, LanguageModelMixin)]
    for chunk in run.model:
        chunk.eval()
        if chunk.ddp_config.overlap_param_gather:
            chunk.start_param_sync(force_sync=True)
    for module in modules:
        module.marks_errors = True
    try:
        yield
    finally:
        for module in modules:
            module.marks_errors = False
        for chunk in run.model:
            chunk.train()


def _documents_of_tokens(plan: StepPlan, samples: EverySample, position: int) -> list[np.ndarray]:
    """Return the document of each of this rank's tokens, int64 [t_local] a microbatch."""
    documents = samples.documents_of(np.array(plan.samples))
    found = []
    for group, pack in zip(plan.groups, plan.packs, strict=True):
        if group is None:
            found.append(np.zeros(pack.padded_starts[-1], dtype=np.int64))
            continue
        owners = _samples_of_tokens(pack, group.ranks.index(position))
        found.append(documents[np.array(group.sample_ids)[owners]])
    return found


def _samples_of_tokens(pack: HostPack, rank: int) -> np.ndarray:
    """Return the place in the pack of each local token's sample, int64 [t_local]."""
    starts = pack.padded_starts[: len(pack.lengths)]  # padding after the last sample counts as its own
    return np.searchsorted(np.array(starts), pack.places(rank), side="right") - 1
