"""Formats of error messages."""

from megatron_cp.common.errors import format_ranks, join_limited


def test_long_lists_are_shortened() -> None:
    texts = [f"text {number}" for number in range(10)]
    assert join_limited(texts[:2], "; ", most=2) == "text 0; text 1"
    assert join_limited(texts, "; ", most=2) == "text 0; text 1 and 8 more"
    assert join_limited(texts, "\n  ").splitlines() == ["text 0", *(f"  text {n}" for n in range(1, 8)), "  and 2 more"]


def test_ranks_are_formatted_as_ranges() -> None:
    assert format_ranks([3]) == "rank 3"
    assert format_ranks([0, 1, 2, 5, 7, 8]) == "ranks 0-2, 5, 7-8"
    assert format_ranks(range(0, 60, 2)).endswith(", 28, 30 and 14 more")
