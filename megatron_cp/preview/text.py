"""Decode a sample in pieces, divided where the loss mask or the document changes."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import pairwise
from typing import NamedTuple

import numpy as np

from megatron_cp.data.text.tokenizers import Tokenizer

_CONTEXT = 8  # preceding tokens to decode with: some decoders drop the first space of a text
_LEAST = 16  # tokens shown of each piece of a shortened sample

Span = tuple[int, int]


class Piece(NamedTuple):
    """Text of consecutive tokens.

    learned: whether the tokens are under the loss; None if they are left out, and the text is their number. ends:
    whether a document ends after it.
    """

    text: str
    learned: bool | None
    ends: bool


def pieces_of(
    ids: np.ndarray, learned: np.ndarray, tokenizer: Tokenizer, most: int | None, *, has_documents: bool
) -> list[Piece]:
    """Decode a sample as pieces.

    A piece ends where ``learned`` changes, and with ``has_documents`` behind every end-of-document token.

    Args:
        ids: tokens, int64 [n]. learned: bool [n].
        most: tokens to show. Longer samples are shortened in the middle of each piece; None shows all.
    """
    ends = set((np.flatnonzero(ids[:-1] == tokenizer.eod) + 1).tolist() if has_documents else ())
    changes = set((np.flatnonzero(np.diff(learned)) + 1).tolist())
    spans = list(pairwise([0, *sorted(ends | changes), len(ids)]))
    if most is None or len(ids) <= most:
        shown = [(span, True) for span in spans]
    else:
        shown = list(_shortened(spans, most))
    return [
        Piece(_text(ids, begin, end, tokenizer), bool(learned[begin]), end in ends)
        if is_shown
        else Piece(f"{end - begin:,} tokens, {int(learned[begin:end].sum()):,} in the loss", None, end in ends)
        for (begin, end), is_shown in shown
    ]


def _shortened(spans: Sequence[Span], most: int) -> Iterator[tuple[Span, bool]]:
    """Yield spans to show and to leave out: the middle of long ones, and of many."""
    count = max(2, min(len(spans), most // _LEAST))
    head, tail = count // 2, max(count // 2, len(spans) - (count - count // 2))
    share = max(2, most // count)
    for begin, end in spans[:head]:
        yield from _without_middle(begin, end, share)
    if head < tail:
        yield (spans[head][0], spans[tail - 1][1]), False
    for begin, end in spans[tail:]:
        yield from _without_middle(begin, end, share)


def _without_middle(begin: int, end: int, share: int) -> Iterator[tuple[Span, bool]]:
    if end - begin <= share + _LEAST:  # a shorter gap would save no room
        yield (begin, end), True
        return
    first, last = begin + share // 2, end - (share - share // 2)
    yield (begin, first), True
    yield (first, last), False
    yield (last, end), True


def _text(ids: np.ndarray, begin: int, end: int, tokenizer: Tokenizer) -> str:
    """Decode tokens [begin, end) as they read behind the tokens before them."""
    before = tokenizer.decode(ids[max(0, begin - _CONTEXT) : begin].tolist())
    whole = tokenizer.decode(ids[max(0, begin - _CONTEXT) : end].tolist())
    return whole[len(before) :] if whole.startswith(before) else tokenizer.decode(ids[begin:end].tolist())
