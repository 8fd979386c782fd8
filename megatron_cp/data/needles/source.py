"""Samples of retrieval tasks, of exact length, computed when they are read."""

from __future__ import annotations

import zlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, NamedTuple

import numpy as np

from megatron_cp.common.errors import DataError
from megatron_cp.data.needles.haystack import Haystack
from megatron_cp.data.needles.tasks import Needles, Task
from megatron_cp.data.text.tokenizers import Tokenizer

if TYPE_CHECKING:
    from megatron_cp.dynamic_cp.runtime.packing import Sample

INTRODUCTION = "Remember the codes and variables in this text.\n"


@dataclass(frozen=True)
class Cell:
    """One task at one length and depth.

    ``depth`` is in percent; None: needles all over the text.
    """

    task: Task
    length: int
    depth: int | None


def cells_of(tasks: Sequence[Task], lengths: Sequence[int], depths: Sequence[int]) -> list[Cell]:
    """Return the cells of a table, ordered by task, length, depth."""
    return [
        Cell(task, length, depth)
        for task in tasks
        for length in lengths
        for depth in (depths if task.at_depth else [None])
    ]


class Written(NamedTuple):
    """A sample as tokens and as text; the last tokens are those of ``needles.tail``."""

    tokens: np.ndarray
    needles: Needles
    prompt: str
    response: str


class _Draft(NamedTuple):
    """A sample without its haystack.

    ``lines``: (share of the haystack before it, text, tokens) of each needle, in the order of the text.
    """

    rng: np.random.Generator
    needles: Needles
    lines: list[tuple[float, str, list[int]]]
    tail: list[int]
    size: int


class NeedleSource:
    """``per_cell`` samples of each cell.

    Sample i is number ``i % per_cell`` of cell ``i // per_cell``.

    A sample depends on the seed, task, depth, number and length only; samples of several lengths differ in the haystack
    only. Samples ``for_training`` are other ones, with needles of their own for each length. The document of a sample
    has one token more than its length, as every token but the first is a label, and ends with the answer.

    Raises:
        DataError: a length is too short for its task.
    """

    def __init__(
        self,
        cells: Sequence[Cell],
        per_cell: int,
        haystack: Sequence[str],
        tokenizer: Tokenizer,
        seed: int,
        for_training: bool = False,
    ) -> None:
        self.cells, self.per_cell, self._tokenizer = list(cells), per_cell, tokenizer
        self._seed, self._for_training = seed, for_training
        self._haystack = Haystack(haystack, tokenizer.tokenize)
        self._before = [*tokenizer.prefix, *tokenizer.tokenize(INTRODUCTION)]
        for cell in cells:
            needed = max(self._draft(cell, number).size for number in range(per_cell))
            if needed > cell.length + 1:
                raise DataError(
                    f"--lengths {cell.length}: is too short for {cell.task.label}, which needs {needed - 1} tokens. "
                    f"Fix: --lengths {needed - 1} (or more)"
                )

    def __len__(self) -> int:
        return len(self.cells) * self.per_cell

    @property
    def num_documents(self) -> int:
        """Each sample is a document."""
        return len(self)

    def documents_of(self, indices: np.ndarray) -> np.ndarray:
        """Return the document of each sample."""
        return indices

    def lengths(self, indices: np.ndarray) -> np.ndarray:
        """Return the tokens of each sample, int64, in the shape of ``indices``."""
        return np.array([cell.length for cell in self.cells], dtype=np.int64)[indices // self.per_cell]

    def __getitem__(self, index: int) -> Sample:
        import torch  # the module is used where nothing is computed

        written = self.write(index)
        tokens = torch.from_numpy(written.tokens)
        loss_mask = torch.zeros(len(tokens) - 1)
        loss_mask[_scored(written, self._tokenizer.tokenize) - 1] = 1.0  # label i is token i + 1
        return {"tokens": tokens[:-1], "labels": tokens[1:], "loss_mask": loss_mask}

    def write(self, index: int) -> Written:
        """Return a sample with its text."""
        place, number = divmod(index, self.per_cell)
        cell = self.cells[place]
        draft = self._draft(cell, number)
        room = cell.length + 1 - draft.size
        tokens, borders, hay = self._haystack.cut(draft.rng, room)
        parts: list[Sequence[int] | np.ndarray] = [self._before]
        text, done = [INTRODUCTION], 0
        for share, line, ids in draft.lines:
            border = int(np.abs(borders - share * room).argmin())
            parts += [tokens[borders[done] : borders[border]], ids]
            text += [*hay[done:border], line]
            done = border
        parts += [tokens[borders[done] :], draft.tail]
        prompt, response = draft.needles.prompt_and_response
        text += [*hay[done:], prompt]
        return Written(np.concatenate(parts).astype(np.int64), draft.needles, "".join(text), response)

    def _draft(self, cell: Cell, number: int) -> _Draft:
        task, tokenize = cell.task, self._tokenizer.tokenize
        depth = 101 if cell.depth is None else cell.depth
        kind = cell.length if self._for_training else 0
        rng = np.random.default_rng((self._seed, kind, zlib.crc32(task.label.encode()), depth, number))
        needles = task.write(rng, task.count)
        shares = [cell.depth / 100] if cell.depth is not None else sorted(rng.random(len(needles.asked)))
        shares += list(rng.random(len(needles.others)))
        lines = [
            (share, line, tokenize(line)) for share, line in zip(shares, [*needles.asked, *needles.others], strict=True)
        ]
        lines.sort(key=lambda each: each[0])
        tail = tokenize(needles.tail)
        size = len(self._before) + sum(len(ids) for _, _, ids in lines) + len(tail)
        return _Draft(rng, needles, lines, tail, size)


def _scored(written: Written, tokenize: Callable[[str], list[int]]) -> np.ndarray:
    """Return the places of the scored tokens.

    Of a scored piece, these are the tokens that differ without it.
    """
    tail = tokenize(written.needles.tail)
    text, places = written.needles.question, list[int]()
    for piece, is_scored in written.needles.answer:
        if is_scored:
            start, after = _shared(tokenize(text), tail), tokenize(text + piece)
            end = _shared(after, tail)
            places += range(start, end + (end < len(after)))  # a token may reach beyond the piece
        text += piece
    return np.array(places) + len(written.tokens) - len(tail)


def _shared(first: Sequence[int], second: Sequence[int]) -> int:
    """Return how many tokens two sequences share at their start."""
    different = (place for place, pair in enumerate(zip(first, second, strict=False)) if pair[0] != pair[1])
    return next(different, min(len(first), len(second)))
