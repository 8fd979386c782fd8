"""Parse ``dataset.data_path``: a path, a list of paths, or a weighted blend.

Imports no torch.
"""

from __future__ import annotations

import os
from typing import Any

from megatron_cp.common.errors import DataError
from megatron_cp.config.names import NAME

_LEAST, _MOST = 1e-100, 1e100  # sums and products of weights in this range neither overflow nor become 0
_MOST_FILES = 32767  # megatron-core numbers the files of a blend in 16 bits


def parse_blend(data_path: Any, name: str = NAME.dataset.data_path) -> tuple[list[str], list[float] | None]:
    """Return (paths, weights) of the setting ``name``.

    Raises:
        DataError: ``data_path`` is empty.
        ValueError: as :func:`paths_and_weights`; for a run's settings, rule K58 reports these errors first.
    """
    if not data_path:
        raise DataError(f"{name}: is not set. Fix: {name}=PREFIX (of a .bin/.idx pair), or {NAME.dataset.kind}=mock")
    return paths_and_weights(data_path)


def paths_and_weights(data_path: str | list[str | int | float]) -> tuple[list[str], list[float] | None]:
    """Return (paths, weights) of a path, a list of paths, or a blend.

    Raises:
        ValueError: a weight or a path is missing, a weight is out of range, or there are too many files.
    """
    given = [data_path] if isinstance(data_path, str) else data_path
    items = [str(item) for item in given]
    if len(items) > _MOST_FILES:
        raise ValueError(f"has {len(items)} entries; a blend has at most {_MOST_FILES}: join some of the files")
    if not any(isinstance(item, int | float) for item in given) and (
        number_in(items[0]) is None or os.path.exists(items[0] + ".idx")
    ):
        return items, None
    weights = [weight for weight in map(number_in, items[0::2]) if weight is not None]
    if len(items) % 2 or 2 * len(weights) < len(items):
        raise ValueError("a blend is weight, prefix, weight, prefix, ... or a list of prefixes without weights")
    for weight, path in zip(items[0::2], items[1::2], strict=True):
        if not _LEAST <= float(weight) <= _MOST:
            raise ValueError(f"the weight of {path} is {weight}; it must be above zero, from {_LEAST:g} to {_MOST:g}")
    return items[1::2], weights


def number_in(text: str) -> float | None:
    """Convert a text to a float; ``None`` if it is no number."""
    try:
        return float(text)
    except ValueError:
        return None
