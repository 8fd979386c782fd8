"""Exclude functions from ``torch.compile``."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import torch


def never_compiled[**P, R](function: Callable[P, R]) -> Callable[P, R]:
    """Decorate a function that ``torch.compile`` must not trace.

    A compiled caller breaks its graph around the call. Like ``torch.compiler.disable``, which imports torch._dynamo for
    seconds; here the first call does.
    """
    excluded: Callable[P, R] | None = None

    @functools.wraps(function)
    def call(*args: P.args, **kwargs: P.kwargs) -> R:
        nonlocal excluded
        if excluded is None:
            disable: Any = torch.compiler.disable
            excluded = disable(function, reason="it communicates and chooses kernels on the host")
        return excluded(*args, **kwargs)

    return call
