"""Where the samples of train, validation and test set come from: shares of the same files, or files of their own."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from megatron_cp.common.errors import DataError
from megatron_cp.config.names import NAME
from megatron_cp.config.run_config import DatasetConfig
from megatron_cp.data.data_path import parse_blend
from megatron_cp.data.split import shares

SPLITS = ("train", "valid", "test")
_SPLIT = f"\"{NAME.dataset.split}='98,1,1'\""
_FIELDS = ("data_path", "valid_data_path", "test_data_path")


class Part(NamedTuple):
    """Files, their weights if they have any, and where in each of them the part begins and ends, as shares."""

    paths: list[str]
    weights: list[float] | None
    share: tuple[float, float]


def parts_of(config: DatasetConfig, samples: Sequence[int]) -> list[Part | None]:
    """The parts for train, valid and test; ``None`` where no samples are asked for.

    Raises:
        DataError: ``split`` is not one to three shares, a part that is asked for has no share or no files, or a path is
            none.
    """
    if config.divides:
        return [
            Part(*parse_blend(config.data_path), share) if share else None for share in _divided(config.split, samples)
        ]
    parts: list[Part | None] = []
    for field, count in zip(_FIELDS, samples, strict=True):
        path = getattr(config, field)
        if count and path is None and field != "data_path":
            raise DataError(
                f"dataset.{field}: is not set, but {count} samples of it are needed: where validation or test has "
                f"files of its own, {NAME.dataset.data_path} is all for training. "
                f"Fix: dataset.{field}=PATH, or {NAME.validation.eval_iters}=0"
            )
        parts.append(Part(*parse_blend(path, f"dataset.{field}"), (0.0, 1.0)) if count else None)
    return parts


def paths_of(config: DatasetConfig) -> list[str]:
    """Every file that a run may read, each once. Raises DataError where a path is none."""
    given = [f for f in _FIELDS if f == "data_path" or getattr(config, f) is not None]
    return list(dict.fromkeys(path for f in given for path in parse_blend(getattr(config, f), f"dataset.{f}")[0]))


def has_test_part(config: DatasetConfig) -> bool:
    """Whether there is data for the test set. Raises as :func:`parts_of` does."""
    return sum(_shares(config.split)[2:]) > 0 if config.divides else config.test_data_path is not None


def _divided(split: str, samples: Sequence[int]) -> list[tuple[float, float] | None]:
    from megatron.core.datasets.blended_megatron_dataset_config import (
        convert_split_vector_to_split_matrix,
        parse_and_normalize_split,
    )

    _shares(split)
    parts = convert_split_vector_to_split_matrix(parse_and_normalize_split(split))
    for name, part, count in zip(SPLITS, parts, samples, strict=True):
        if count and part is None:
            fix = "" if name == "train" else f", or {NAME.validation.eval_iters}=0"
            raise DataError(
                f"{NAME.dataset.split}={split}: has no share for {name}, but {count} samples are needed. Fix: "
                f"{_SPLIT}{fix}"
            )
    return [part if count else None for part, count in zip(parts, samples, strict=True)]


def _shares(split: str) -> list[float]:
    try:
        return shares(split)
    except ValueError as error:
        raise DataError(
            f"{NAME.dataset.split}={split}: {error}. Fix: {_SPLIT} (the shares of train, valid and test)"
        ) from error
