"""Sample lengths from a distribution, a text file or an indexed corpus."""

from __future__ import annotations

import os
import sys

import numpy as np

from megatron_cp.common.errors import ConfigError
from megatron_cp.config.schema import nearest_first
from megatron_cp.data.formats.indexed import check_lengths, open_indexed, sequence_lengths
from megatron_cp.dynamic_cp.distributions import DISTRIBUTIONS, parse_lengths, read_lengths, sample_lengths


def lengths_of(source: str, longest: int, count: int) -> tuple[int, ...]:
    """Return ``count`` sample lengths from a distribution or a file.

    longest: tokens; longer samples are cut.

    Raises:
        ConfigError: the file cannot be read.
    """
    if source in DISTRIBUTIONS:
        return tuple(sample_lengths(source, count, longest).tolist())
    try:
        found = lengths_from(source)
    except (OSError, ValueError) as error:
        near = nearest_first(source, DISTRIBUTIONS)[0]
        raise ConfigError(f"--lengths {source}: {error}. Fix: --lengths {near}, or a readable file") from error
    return tuple(np.minimum(np.resize(found, count), longest).tolist())


def lengths_from(source: str) -> np.ndarray:
    """Read lengths from a file; ValueError if the file is invalid."""
    if source.endswith(".idx"):
        files = open_indexed(source)
        check_lengths(files)
        lengths = sequence_lengths(files).astype(np.int64)
        if lengths.max(initial=0) < 2:
            raise ValueError(f"{source}: every document has fewer than two tokens, so there is nothing to predict")
        return lengths[lengths >= 2]  # as training does
    index = source.removesuffix(".bin") + ".idx"
    if os.path.isfile(index) and (source.endswith(".bin") or not os.path.exists(source)):
        raise ValueError(f"{source}: has no lengths. Fix: --lengths {index}")
    return parse_lengths(sys.stdin.read().removeprefix("\ufeff"), "-") if source == "-" else read_lengths(source)
