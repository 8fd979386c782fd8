"""Compare a layout with a single rank, or another layout, on the same data."""

from __future__ import annotations

import math
import time
from collections.abc import Sequence
from dataclasses import dataclass

import torch
import torch.distributed as dist

from megatron_cp.common.errors import RuntimeFault
from megatron_cp.config.run_config import RunConfig
from megatron_cp.parallel.collectives import broadcast_object, gather_objects
from megatron_cp.parallel.layout import RankLayout, layout_of
from megatron_cp.parallel.process_groups import build_single_rank_groups
from megatron_cp.training.step import StepResult
from megatron_cp.verify.measure import Measurement, add_dummies, measure, same_packs
from megatron_cp.verify.tensors import UPDATE_FLOOR, TensorDifferences, compare_tensors

# Float32 rounding, relative to the reference: other summation orders change the loss by about 1e-7 and the norm by
# about 1e-6. Gradient elements cancel, so they are compared with the largest one of their parameter. The optimizer
# divides by magnitudes, and differences of several steps add up.
LOSS_TOLERANCE, NORM_TOLERANCE, GRADIENT_TOLERANCE, UPDATE_TOLERANCE = 1e-5, 1e-5, 1e-4, 1e-3
RATE_TOLERANCE = 1e-12
TOKEN_LOSSES, NORM = "each token's loss", "gradient norm"  # row names
# Smaller token losses are compared relative to this share of the largest.
TOKEN_FLOOR = 0.1


@dataclass(frozen=True)
class Row:
    """One compared quantity, with the displayed values of reference and layout.

    ``step`` counts from 1; None: all steps.
    """

    name: str
    step: int | None
    values: tuple[str, str]
    difference: float
    tolerance: float

    @property
    def equal(self) -> bool:
        return self.difference <= self.tolerance  # False for nan


@dataclass(frozen=True)
class TokenLosses:
    """Differences of single tokens' losses in the first step; equal on all ranks."""

    difference: float
    wrong: int  # labels whose losses differ
    number: int  # labels with a loss


@dataclass(frozen=True)
class Comparison:
    """Results of a comparison; equal on all ranks."""

    reference: list[StepResult]
    layout: list[StepResult]  # empty if the layout failed to run
    tokens: list[TokenLosses]  # for the main loss and each MTP depth
    rates: tuple[float, str, str]  # largest relative difference; reference and layout there
    gradients: TensorDifferences
    updates: TensorDifferences
    ranks: RankLayout
    probe: str | None
    fault: str | None  # why the layout failed to run
    seconds: tuple[float, float]

    def rows(self) -> list[Row]:
        """List all compared quantities, in the order of computation."""
        if self.fault is not None:
            return []
        first, mine = self.reference[0], self.layout[0]
        rows = [Row("tokens", 1, (str(first.tokens), str(mine.tokens)), abs(first.tokens - mine.tokens), 0)]
        for depth, losses in enumerate(self.tokens):
            name = TOKEN_LOSSES if depth == 0 else f"{TOKEN_LOSSES}, MTP depth {depth}"
            values = "", f"{losses.wrong} of {losses.number} wrong"
            rows.append(Row(name, 1, values, losses.difference, LOSS_TOLERANCE))
        for step, (expected_step, measured) in enumerate(zip(self.reference, self.layout, strict=True), 1):
            found = _numbers_of(measured)
            for name, number in _numbers_of(expected_step).items():
                tolerance = NORM_TOLERANCE if name == NORM else LOSS_TOLERANCE
                shown = f"{number:.7f}", f"{found[name]:.7f}"
                rows.append(Row(name, step, shown, _relative(number, found[name]), tolerance))
        rows.append(_worst("gradient, step 1", self.gradients, GRADIENT_TOLERANCE))
        rows.append(_worst("change of a weight", self.updates, UPDATE_TOLERANCE))
        difference, expected, rate = self.rates
        return [*rows, Row("learning rates", None, (expected, rate), difference, RATE_TOLERANCE)]

    @property
    def equal(self) -> bool:
        """Whether the layout's results match the reference, up to rounding."""
        copies = self.gradients.replicas or self.updates.replicas
        return self.fault is None and self.probe is None and copies is None and all(row.equal for row in self.rows())


def _numbers_of(step: StepResult) -> dict[str, float]:
    """Return a step's losses and gradient norm by display name."""
    depths = {f"MTP loss of depth {depth}": loss for depth, loss in enumerate(step.mtp_losses, 1)}
    return {"loss": step.loss} | depths | step.router_losses | {NORM: step.grad_norm or 0.0}


def _worst(what: str, found: TensorDifferences, tolerance: float) -> Row:
    name, rank = ("none", "") if found.worst is None else (found.worst.name, f"on rank {found.worst.rank}")
    return Row(f"worst {what}: {name}", None, ("", rank), found.difference, tolerance)


def _relative(a: float, b: float) -> float:
    """Return the difference relative to ``a``; infinite if either is NaN."""
    difference = abs(a - b) / max(abs(a), 1e-30)
    return difference if difference == difference else math.inf


def compare_with_single_rank(layout: RunConfig, reference: RunConfig) -> Comparison:
    """Run the single-rank ``reference``, then ``layout`` on all ranks. Collective.

    Every rank runs the reference by itself, because megatron-core's optimizer needs collectives of the whole world;
    rank 0's result counts. Samples are packed as in the layout.

    Raises:
        RuntimeFault: the layout failed on this rank alone.
    """
    started = time.monotonic()
    alone = build_single_rank_groups(reference.dist.distributed_timeout_minutes)
    ranks = layout_of(layout.model, layout.dist, dist.get_world_size())
    found = measure(reference, alone, scheduler=same_packs(layout, ranks))
    found.steps, found.rates, found.token_losses = broadcast_object((found.steps, found.rates, found.token_losses))
    if dist.get_rank() != 0:
        found.weights, found.gradients, found.updates = [], [], []
    return _compare(found, layout, ranks, time.monotonic() - started)


def compare_layouts(first: RunConfig, second: RunConfig) -> Comparison:
    """Run two layouts of one model in sequence on all ranks. Collective."""
    started = time.monotonic()
    ranks, others = (layout_of(each.model, each.dist, dist.get_world_size()) for each in (first, second))
    found = measure(first, scheduler=add_dummies(first.model, ranks))
    found.token_losses = next(measured for measured in gather_objects(found.token_losses) if measured.numel())
    return _compare(found, second, others, time.monotonic() - started)


def _compare(reference: Measurement, layout: RunConfig, ranks: RankLayout, seconds: float) -> Comparison:
    started = time.monotonic()
    result, fault = Measurement(), None
    try:
        result = measure(layout, weights=reference.weights, scheduler=add_dummies(layout.model, ranks))
    except RuntimeFault as error:
        if not error.on_all_ranks:
            raise
        fault = str(error)
    return Comparison(
        reference.steps,
        max(gather_objects(result.steps), key=lambda steps: _largest_difference(reference.steps, steps)),
        _compare_tokens(reference.token_losses, result.token_losses),
        _compare_rates(reference.rates, result.rates),
        compare_tensors(reference.gradients, result.gradients, GRADIENT_TOLERANCE),
        compare_tensors(
            reference.updates,
            result.updates,
            UPDATE_TOLERANCE,
            UPDATE_FLOOR,
            _full_step(reference, layout.optimizer.optimizer),
        ),
        ranks=ranks,
        probe=reference.probe or result.probe,
        fault=fault,
        seconds=(seconds, time.monotonic() - started),
    )


def _full_step(reference: Measurement, optimizer: str) -> float:
    """Return how far Adam can move a weight; 0 for other optimizers.

    It divides a gradient by its own size or by its epsilon. So rounding of a gradient moves all weights alike, also
    those of an expert with few tokens, which hardly change.
    """
    return sum(map(max, reference.rates)) if optimizer == "adam" else 0.0


def _largest_difference(reference: list[StepResult], steps: list[StepResult]) -> float:
    """Return the largest difference of a rank's reports from the reference."""
    found = [
        _relative(a, b)
        for expected_step, measured in zip(reference, steps, strict=False)
        for a, b in zip(_numbers_of(expected_step).values(), _numbers_of(measured).values(), strict=True)
    ]
    return max(found, default=0.0)


def _compare_tokens(reference: torch.Tensor, layout: torch.Tensor) -> list[TokenLosses]:
    """Compare token losses, for the main loss and each MTP depth. Collective."""
    scale = reference.abs().maximum(TOKEN_FLOOR * reference.abs().amax(dim=1, keepdim=True)).clamp(min=1e-30)
    errors = ((layout - reference).abs() / scale).nan_to_num(nan=math.inf) if layout.numel() else torch.zeros(1, 1)
    mine = [(row.max().item(), int((row > LOSS_TOLERANCE).sum())) for row in errors]
    numbers = [int((row != 0).sum()) for row in reference]
    gathered = [measured for measured in gather_objects(mine) if len(measured) == len(numbers)]
    worst = [max(of_ranks) for of_ranks in zip(*gathered, strict=True)] or [(0.0, 0)] * len(numbers)
    return [TokenLosses(difference, wrong, number) for (difference, wrong), number in zip(worst, numbers, strict=True)]


def _compare_rates(reference: list[tuple[float, ...]], layout: Sequence[tuple[float, ...]]) -> tuple[float, str, str]:
    """Return the largest learning-rate difference. Collective.

    Each rate is compared with the nearest one of the reference in the same step.
    """
    worst = (0.0, f"{reference[0][-1]:.3g} to {reference[-1][-1]:.3g}", "the same")
    for rank, measured in enumerate(gather_objects(list(layout))):
        for step, (expected, rates) in enumerate(zip(reference, measured, strict=False), 1):
            for rate in rates:
                nearest = min(expected, key=lambda each: abs(each - rate))
                found = _relative(nearest, rate), f"{nearest:.6g}", f"{rate:.6g}, step {step}, rank {rank}"
                worst = max(worst, found, key=lambda each: each[0])
    return worst
