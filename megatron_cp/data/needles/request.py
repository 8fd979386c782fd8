"""What a test of retrieval measures."""

from __future__ import annotations

from dataclasses import dataclass

from megatron_cp.data.needles.haystack import NOISE, read_haystack
from megatron_cp.data.needles.source import NeedleSource, cells_of
from megatron_cp.data.needles.tasks import find_task
from megatron_cp.data.text.tokenizers import Tokenizer


@dataclass(frozen=True)
class NeedleRequest:
    """Tasks, lengths (in tokens) and depths (in percent) to measure."""

    tasks: tuple[str, ...]
    lengths: tuple[int, ...]
    depths: tuple[int, ...]
    samples: int
    haystack: str | None
    seed: int

    def source(self, tokenizer: Tokenizer, for_training: bool = False) -> NeedleSource:
        """Build the samples.

        Raises:
            DataError: a task is unknown, a length too short, or the haystack cannot be read.
        """
        cells = cells_of([find_task(name) for name in self.tasks], self.lengths, self.depths)
        haystack = read_haystack(self.haystack) if self.haystack else NOISE
        return NeedleSource(cells, self.samples, haystack, tokenizer, self.seed, for_training)
