"""Prefetching in the background: values, their number, errors, and the end."""

import threading
from collections.abc import Iterator
from contextlib import closing

import pytest

from megatron_cp.common.prefetch import Prefetch


class Made:
    """Return the given value when allowed."""

    def __init__(self, may: bool = True) -> None:
        self.asked: list[object] = []
        self.threads: set[str] = set()
        self.begun, self.may = threading.Event(), threading.Event()
        if may:
            self.may.set()

    def __call__(self, value: object) -> object:
        self.asked.append(value)
        self.threads.add(threading.current_thread().name)
        self.begun.set()
        assert self.may.wait(60)
        if isinstance(value, BaseException):
            raise value
        return value


@pytest.fixture
def made() -> Iterator[Made]:
    made = Made()
    yield made
    made.may.set()


def test_the_next_value_is_prefetched(made: Made) -> None:
    with closing(Prefetch(count=None, name="maker")) as ahead:
        assert ahead.take(made, 1) == 1
        made.begun.clear()
        ahead.begin(made, 2)
        assert made.begun.wait(60), "before it is asked for"
        assert ahead.take(made, 3) == 2, "as it was begun"
        assert ahead.take(made, 4) == 4, "nothing was begun"
    assert made.asked == [1, 2, 4] and made.threads == {"maker_0"}
    assert not [thread for thread in threading.enumerate() if thread.name.startswith("maker")]


@pytest.mark.parametrize(("count", "asked"), [(None, [0, 1, 2]), (3, [0, 1, 2]), (2, [0, 1]), (0, [0, 1])])
def test_no_value_beyond_the_count_is_started(made: Made, count: int | None, asked: list[int]) -> None:
    with closing(Prefetch(count=count, name="maker")) as ahead:
        for number in range(2):
            ahead.take(made, number)
            ahead.begin(made, number + 1)
        ahead.settle()
        assert made.asked == asked


def test_an_error_is_raised_by_take_each_time(made: Made) -> None:
    with closing(Prefetch(count=None, name="maker")) as ahead:
        ahead.begin(made, KeyError("lost"))
        ahead.settle()
        for _ in range(2):
            with pytest.raises(KeyError, match="lost"):
                ahead.take(made, 1)
        ahead.forget()
        assert ahead.take(made, 1) == 1


def test_forget_ends_the_computation() -> None:
    made = Made(may=False)
    with closing(Prefetch(count=None, name="maker")) as ahead:
        ahead.begin(made, 1)
        assert made.begun.wait(60)
        threading.Timer(0.2, made.may.set).start()
        ahead.forget()
        assert made.may.is_set(), "waited for"
        assert ahead.take(made, 2) == 2
