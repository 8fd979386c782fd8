"""Prefetch the next value in a background thread."""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor, wait


class Prefetch[T]:
    """Values computed one at a time in a background thread, before they are needed.

    Keeps no reference to the producer between calls, so its owner can be garbage-collected without ``close()``.

    Args:
        count: number of values that will be taken; None if unknown. No further value is started.
        name: name of the thread.
    """

    def __init__(self, *, count: int | None, name: str) -> None:
        self._left = count
        self._pool = ThreadPoolExecutor(max_workers=1, thread_name_prefix=name)
        self._begun: Future[T] | None = None

    def take(self, make: Callable[..., T], *arguments: object) -> T:
        """Return the prefetched value, or compute it now; raises the call's error."""
        value = (self._begun or self._pool.submit(make, *arguments)).result()
        self._begun = None
        if self._left is not None:
            self._left -= 1
        return value

    def begin(self, make: Callable[..., T], *arguments: object) -> None:
        """Start computing the next value, unless ``count`` values were taken."""
        if self._left is None or self._left > 0:
            self._begun = self._pool.submit(make, *arguments)

    def settle(self) -> None:
        """Wait until no value is being computed."""
        if self._begun is not None:
            wait([self._begun])

    def forget(self) -> None:
        """Discard the prefetched value; nothing is being computed when this returns."""
        if self._begun is not None and not self._begun.cancel():
            self.settle()
        self._begun = None

    def close(self) -> None:
        """End the thread after the current computation."""
        self._pool.shutdown(wait=True, cancel_futures=True)
