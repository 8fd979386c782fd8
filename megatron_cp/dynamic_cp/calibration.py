"""Fit the cost model to measured times during training."""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np

from megatron_cp.dynamic_cp.cost import FITTED, CostModel

_RIDGE = 1e-3  # weight of the scaled prior


@dataclass(frozen=True)
class Fit:
    """Calibrated cost model.

    residual, prior_residual: median relative errors of its and the prior's predictions. scale: the machine's time over
    the prior's. at_bound: coefficients at a bound of their range, of those that matter to the times.
    """

    cost: CostModel
    residual: float
    prior_residual: float
    observations: int
    scale: float = 1.0
    at_bound: tuple[str, ...] = ()


class Calibrator:
    """Collects measurements and fits a cost model's coefficients.

    First the prior is scaled by the median of measured over predicted, without a bound: schedules depend on ratios of
    coefficients only. Then each coefficient (per_microbatch, quadratic, linear, kv_intra, kv_inter, ring_step,
    per_sample) is the scaled prior's times a factor between 1 / bound and bound; 0 stays 0. The fit minimizes relative
    errors by iteratively reweighted least squares with Huber's weights (1964), so a few disturbed steps do no harm. A
    slight ridge towards the scaled prior decides what measurements cannot, and the prior stays if the fit is no better.

    window: number of latest observations used.
    """

    def __init__(self, prior: CostModel, *, window: int = 512, bound: float = 8.0) -> None:
        if window < 1 or bound <= 1:
            raise ValueError(f"Calibrator: window={window} must be >= 1 and bound={bound} > 1")
        self.prior = prior
        self.bound = bound
        self._rows: deque[tuple[np.ndarray, float]] = deque(maxlen=window)

    def observe(self, microbatches: Sequence[tuple[Sequence[int] | np.ndarray, int]], seconds: float) -> None:
        """Add one measurement: ``seconds`` of forward and backward over ``microbatches``.

        Each is (lengths, cp_size); usually one microbatch, or all of a rank's step. Must not include waiting for other
        ranks.
        """
        if not seconds > 0 or not microbatches:
            raise ValueError(f"observe: seconds={seconds} of {len(microbatches)} microbatches: both must be above 0")
        parts = [(np.asarray(lengths, dtype=np.float64), cp_size) for lengths, cp_size in microbatches]
        rows = [(s @ s, s.sum(), c, self.prior.calls_of_pack(len(s), c), (s * s) @ s) for s, c in parts]
        self._rows.append((np.array(rows), float(seconds)))

    def fit(self) -> Fit:
        """Return the best fitting cost model; the prior without observations."""
        if not self._rows:
            return Fit(self.prior, 0.0, 0.0, 0)
        table = np.concatenate([rows for rows, _ in self._rows])
        owner = np.repeat(np.arange(len(self._rows)), [len(rows) for rows, _ in self._rows])
        measured = np.array([s for _, s in self._rows])
        unscaled = factors = np.ones(len(FITTED))
        scale = float(np.median(measured / self._design(table, owner, unscaled).sum(axis=1)))
        seconds = measured / scale  # on a machine as fast as the prior
        for _ in range(25):
            design = self._design(table, owner, factors) / seconds[:, None]
            error = design @ factors - 1.0
            tolerated = 1.345 * max(1.4826 * float(np.median(np.abs(error))), 1e-4)
            weight = np.minimum(1.0, tolerated / np.maximum(np.abs(error), 1e-12))
            updated = self._solve(design, weight)
            if np.allclose(updated, factors, rtol=1e-6):
                break
            factors = updated

        def errors(factors: np.ndarray, seconds: np.ndarray) -> np.ndarray:
            return np.abs(self._design(table, owner, factors) @ factors / seconds - 1.0)

        # By the mean: the scale was chosen by the median, which noisy times could hide the fit behind.
        if errors(factors, seconds).mean() >= errors(unscaled, seconds).mean():
            factors = unscaled
        # Share of the times by coefficient, at its prior or fitted value; above a tenth it matters.
        shares = (self._design(table, owner, factors) * np.maximum(1.0, factors) / seconds[:, None]).mean(axis=0)
        clipped = (shares > 0.1) & ((factors <= 1 / self.bound) | (factors >= self.bound))
        values = {name: getattr(self.prior, name) * scale * f for name, f in zip(FITTED, factors.tolist(), strict=True)}
        return Fit(
            replace(self.prior, **values),
            residual=float(np.median(errors(factors, seconds))),
            prior_residual=float(np.median(errors(unscaled, measured))),
            observations=len(seconds),
            scale=scale,
            at_bound=tuple(name for name, outside in zip(FITTED, clipped.tolist(), strict=True) if outside),
        )

    def _design(self, table: np.ndarray, owner: np.ndarray, factors: np.ndarray) -> np.ndarray:
        """Return seconds per factor of each observation: [observations, factors].

        Exposed communication is max(0, a - b) of two linear terms; which one counts is decided at ``factors``.
        """
        prior = self.prior
        squares, tokens, c, calls, cubes = table.T
        parallel = c > 1
        inside = c <= prior.ranks_per_node
        messages = prior.messages
        cut = cubes / np.maximum(squares, 1.0) if prior.in_pieces(2) else tokens
        attention = prior.quadratic * (squares / c + prior.small_tile * (cut + (tokens - cut) / c))
        moved = parallel * cut * (c - 1) / c / (c if messages.by_heads else 1)
        intra, inter = prior.kv_intra * moved * inside, prior.kv_inter * moved * ~inside
        hidden = (prior.overlap if messages.hops else 0.0) * attention
        exposed = parallel & (factors[3] * intra + factors[4] * inter > factors[1] * hidden)
        columns = np.stack(
            [
                np.full_like(c, prior.per_microbatch),
                attention - exposed * hidden,
                prior.linear * tokens / c,
                exposed * intra,
                exposed * inter,
                prior.ring_step * parallel * ((c - 1) if messages.hops else 1.0),
                prior.per_sample * calls,
            ],
            axis=1,
        )
        design = np.zeros((int(owner[-1]) + 1, len(FITTED)))
        np.add.at(design, owner, columns)
        return design

    def _solve(self, design: np.ndarray, weight: np.ndarray) -> np.ndarray:
        """Solve weighted least squares with a ridge towards 1 and bounded factors."""
        rows = len(design)
        normal = (design * weight[:, None]).T @ design / rows + _RIDGE * np.diag((design**2).mean(axis=0) + 1e-6)
        target = (design * weight[:, None]).sum(axis=0) / rows + _RIDGE * ((design**2).mean(axis=0) + 1e-6)
        low, high = 1 / self.bound, self.bound
        fixed = np.full(design.shape[1], np.nan)
        while True:
            free = np.isnan(fixed)
            solution = fixed.copy()
            rest = target[free] - normal[np.ix_(free, ~free)] @ fixed[~free]
            solution[free] = np.linalg.solve(normal[np.ix_(free, free)], rest)
            outside = free & ((solution < low) | (solution > high))
            if not outside.any():
                return solution
            fixed[outside] = np.clip(solution[outside], low, high)
