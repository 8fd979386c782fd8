"""The text around needles: lines of noise or of a file, repeated."""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from pathlib import Path

import numpy as np

from megatron_cp.common.errors import DataError, readable
from megatron_cp.common.input_files import decode_text, file_or_pipe

NOISE = (
    "Rain falls on the hills.",
    "A boat drifts past the old pier.",
    "The baker opens before dawn.",
    "Leaves turn red and then brown.",
    "Nobody waits at the station.",
    "Two dogs sleep in the shade.",
)


def read_haystack(path: str) -> list[str]:
    """Return the sentences of a text file.

    Raises:
        DataError: the file cannot be read or has no text.
    """
    with readable(path), open(path, "rb", opener=file_or_pipe) as file:
        content = file.read()
    try:
        text = decode_text(content, Path(path))
    except ValueError as error:
        raise DataError(f"{path}: {error}") from error
    sentences = [each for line in text.splitlines() for each in re.split(r"(?<=[.!?])\s+", line.strip()) if each]
    if not sentences:
        raise DataError(f"{path}: has no text. Fix: name a file with text")
    return sentences


class Haystack:
    """Lines and their tokens; each line is tokenized once, by itself.

    A sample has consecutive lines, from a random one on. After the last line comes the first.
    """

    def __init__(self, sentences: Sequence[str], tokenize: Callable[[str], list[int]]) -> None:
        self._tokenize = tokenize
        self._lines = [f"{sentence}\n" for sentence in sentences]
        parts = [tokenize(line) for line in self._lines]
        self._tokens = np.array([token for part in parts for token in part], dtype=np.int64)
        self._starts = np.cumsum([0, *map(len, parts)])

    def cut(self, rng: np.random.Generator, size: int) -> tuple[np.ndarray, np.ndarray, list[str]]:
        """Return exactly ``size`` tokens, the places between lines, and the lines.

        The first line is cut at its start. The text of that line has only whole words, so its tokens may be fewer.
        """
        lengths = np.diff(self._starts)
        repeats = size // len(self._tokens) + 2
        first = int(rng.integers(len(lengths)))
        # The last line ends the text; count backwards from it.
        tokens = np.tile(np.roll(self._tokens, -int(self._starts[first])), repeats)
        places = np.cumsum(np.tile(np.roll(lengths, -first), repeats))
        dropped = len(tokens) - size
        kept = np.flatnonzero(places > dropped)
        order = (first + kept) % len(lengths)
        lines = [self._lines[number] for number in order]
        borders = np.concatenate([[0], places[kept] - dropped])
        if lines and borders[1] < lengths[order[0]]:
            lines[0] = self._end_of(lines[0], int(borders[1]))
        return tokens[dropped:], borders, lines

    def _end_of(self, line: str, size: int) -> str:
        """Return the longest end of whole words with at most ``size`` tokens."""
        words = line.split(" ")
        ends = (" ".join(words[first:]) for first in range(1, len(words)))
        return next((end for end in ends if len(self._tokenize(end)) <= size), "")
