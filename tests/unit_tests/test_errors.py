"""How errors are worded."""

from megatron_cp.errors import shown


def test_the_first_of_many_are_shown() -> None:
    texts = [f"text {number}" for number in range(10)]
    assert shown(texts[:2], "; ", most=2) == "text 0; text 1"
    assert shown(texts, "; ", most=2) == "text 0; text 1 and 8 more"
    assert shown(texts, "\n  ").splitlines() == ["text 0", *(f"  text {n}" for n in range(1, 8)), "  and 2 more"]
