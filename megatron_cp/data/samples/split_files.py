"""Files of train, validation and test set: shares of the same files, or own files."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from megatron_cp.config.run_config import DatasetConfig
from megatron_cp.data.data_path import parse_blend
from megatron_cp.data.split import shares

SPLITS = ("train", "valid", "test")
_FIELDS = ("data_path", "valid_data_path", "test_data_path")


class SplitFiles(NamedTuple):
    """Files, optional weights, and the part of each file as (begin, end) in [0, 1]."""

    paths: list[str]
    weights: list[float] | None
    share: tuple[float, float]


def files_of_splits(config: DatasetConfig, samples: Sequence[int]) -> list[SplitFiles | None]:
    """Return the files for train, valid and test; ``None`` for a part without samples.

    Rule K32 ensures that each part with samples has a share or files.

    Raises:
        DataError: a path is not set.
    """
    if config.divides:
        from megatron.core.datasets.blended_megatron_dataset_config import (
            convert_split_vector_to_split_matrix,
            parse_and_normalize_split,
        )

        divided = convert_split_vector_to_split_matrix(parse_and_normalize_split(config.split))
        given = [(config.data_path, "data_path", share) for share in divided]
    else:
        given = [(getattr(config, field), field, (0.0, 1.0)) for field in _FIELDS]
    return [
        SplitFiles(*parse_blend(path, f"dataset.{field}"), share) if count else None
        for (path, field, share), count in zip(given, samples, strict=True)
    ]


def paths_of(config: DatasetConfig) -> list[str]:
    """Return every file that a run may read, each once; DataError if one is not set."""
    given = [f for f in _FIELDS if f == "data_path" or getattr(config, f) is not None]
    return list(dict.fromkeys(path for f in given for path in parse_blend(getattr(config, f), f"dataset.{f}")[0]))


def has_test_part(config: DatasetConfig) -> bool:
    """Return whether there is data for the test set."""
    return sum(shares(config.split)[2:]) > 0 if config.divides else config.test_data_path is not None
