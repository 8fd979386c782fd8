"""How errors are worded."""

from megatron_cp.common.errors import shown, shown_ranks


def test_the_first_of_many_are_shown() -> None:
    texts = [f"text {number}" for number in range(10)]
    assert shown(texts[:2], "; ", most=2) == "text 0; text 1"
    assert shown(texts, "; ", most=2) == "text 0; text 1 and 8 more"
    assert shown(texts, "\n  ").splitlines() == ["text 0", *(f"  text {n}" for n in range(1, 8)), "  and 2 more"]


def test_ranks_are_shown_in_runs() -> None:
    assert shown_ranks([3]) == "rank 3"
    assert shown_ranks([0, 1, 2, 5, 7, 8]) == "ranks 0-2, 5, 7-8"
    assert shown_ranks(range(0, 60, 2)).endswith(", 28, 30 and 14 more")
