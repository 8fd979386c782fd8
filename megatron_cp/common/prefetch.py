"""What is wanted next, made in the background while what was wanted last is used."""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor, wait


class Prefetch[T]:
    """Values that are each begun before they are asked for, one at a time, in a thread of this one's own.

    It holds nothing of who makes them but while they are made, so that whoever holds it may go without closing it.

    Args:
        count: how many will be taken, if that is known: nothing is begun after the last of them.
        name: the thread's.
    """

    def __init__(self, *, count: int | None, name: str) -> None:
        self._left = count
        self._pool = ThreadPoolExecutor(max_workers=1, thread_name_prefix=name)
        self._begun: Future[T] | None = None

    def take(self, make: Callable[..., T], *arguments: object) -> T:
        """The value that was begun; if none was, this call's. Raises what went wrong with it."""
        value = (self._begun or self._pool.submit(make, *arguments)).result()
        self._begun = None
        if self._left is not None:
            self._left -= 1
        return value

    def begin(self, make: Callable[..., T], *arguments: object) -> None:
        """Have the next value made by this call, if it will be taken."""
        if self._left is None or self._left > 0:
            self._begun = self._pool.submit(make, *arguments)

    def settle(self) -> None:
        """Wait until nothing is being made: what was begun is there, or what went wrong with it."""
        if self._begun is not None:
            wait([self._begun])

    def forget(self) -> None:
        """What was begun is not wanted; nothing is being made when this returns."""
        if self._begun is not None and not self._begun.cancel():
            self.settle()
        self._begun = None

    def close(self) -> None:
        """End the thread, after what it is making."""
        self._pool.shutdown(wait=True, cancel_futures=True)
