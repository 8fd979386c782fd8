"""Scores of retrieval: a sample is right if every token of its answer is."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from megatron_cp.data.needles.source import NeedleSource


@dataclass(frozen=True)
class Score:
    """Result of one cell.

    ``exact``: samples whose answer is right. ``tokens``: answer tokens; ``correct`` of them are right.
    """

    task: str
    length: int
    depth: int | None
    samples: int
    exact: int
    tokens: int
    correct: int

    @property
    def share(self) -> float:
        return self.exact / self.samples


def scores_of(source: NeedleSource, correct: np.ndarray, tokens: np.ndarray) -> list[Score]:
    """Return the score of each cell.

    Args:
        correct: right answer tokens of each sample, int64 ``[samples]``, in the source's order.
        tokens: answer tokens of each sample, in the same order.
    """
    correct, tokens = (np.asarray(each, dtype=np.int64).reshape(-1, source.per_cell) for each in (correct, tokens))
    exact = (correct == tokens).sum(axis=1)
    return [
        Score(
            cell.task.label,
            cell.length,
            cell.depth,
            source.per_cell,
            int(exact[place]),
            int(tokens[place].sum()),
            int(correct[place].sum()),
        )
        for place, cell in enumerate(source.cells)
    ]
