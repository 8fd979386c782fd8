"""Compare the lengths that a mixture draws with those of the data."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import NamedTuple

from megatron_cp.data.samples.contents import HasSources


class LengthRow(NamedTuple):
    """A class of length over all files: shares of tokens, and epochs."""

    lengths: str
    documents: int
    share_of_data: float
    share_drawn: float
    epochs: float


def length_rows(dataset: HasSources, num_samples: int) -> list[LengthRow]:
    """Return the classes of a mixture for a run of ``num_samples``; else none."""
    sources = dataset.sources()
    drawn = [
        taken * source.tokens / source.samples
        for source, taken in zip(sources, dataset.taken(num_samples), strict=True)
    ]
    in_data, in_run = sum(source.tokens for source in sources), sum(drawn) or 1.0
    rows = []
    for lengths in dict.fromkeys(source.lengths for source in sources if source.lengths):
        own = [(source, tokens) for source, tokens in zip(sources, drawn, strict=True) if source.lengths == lengths]
        tokens, tokens_drawn = sum(source.tokens for source, _ in own), sum(each for _, each in own)
        documents = sum(source.documents or 0 for source, _ in own)
        rows.append(LengthRow(lengths, documents, tokens / in_data, tokens_drawn / in_run, tokens_drawn / tokens))
    return rows


def as_lines(rows: Sequence[LengthRow]) -> Iterator[str]:
    """Format the rows as a table."""
    width = max(len(row.lengths) for row in rows)
    yield f"{'documents of':{width}} {'number':>12} {'tokens in data':>16} {'tokens drawn':>14} {'epochs':>10}"
    for row in rows:
        shares = f"{100 * row.share_of_data:14.2f} % {100 * row.share_drawn:12.2f} %"
        yield f"{row.lengths:{width}} {row.documents:12,} {shares} {row.epochs:10.3g}"
