"""Distributions of sequence lengths: two measured ones, and synthetic ones."""

from __future__ import annotations

import csv
import gzip
import re
import zlib
from collections.abc import Callable
from functools import lru_cache
from importlib.resources import files

import numpy as np

from megatron_cp.common.input_files import decode_text, read_bytes

_MOST_DIGITS = 18  # of a length: fits int64
LEAST_LONGEST = {"long": 8192}  # smallest allowed ``longest``
_DATA = files("megatron_cp.dynamic_cp") / "distributions"


@lru_cache(maxsize=1)
def _wikipedia_lengths() -> np.ndarray:
    with (_DATA / "wikipedia_100k.txt.gz").open("rb") as packed:
        return np.array(gzip.decompress(packed.read()).split(), dtype=np.int64)


@lru_cache(maxsize=1)
def _document_histogram() -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    with (_DATA / "document_lengths.csv").open("r", encoding="utf-8") as table:
        rows = list(csv.DictReader(table))
    bounds = np.array([[int(x) for x in re.findall(r"\d+", row["range"])] for row in rows])
    counts = np.array([int(row["number"]) for row in rows], dtype=np.float64)
    return bounds[:, 0], bounds[:, 1], counts / counts.sum()


def _documents(rng: np.random.Generator, n: int, longest: int) -> np.ndarray:
    low, high, share = _document_histogram()
    bucket = rng.choice(len(share), size=n, p=share)
    # Log-uniform inside a bucket: counts fall with length.
    return np.exp(rng.uniform(np.log(np.maximum(low[bucket], 1)), np.log(high[bucket] + 1)))


def _lognormal(rng: np.random.Generator, n: int, mean: float) -> np.ndarray:
    sigma = 1.5
    return rng.lognormal(np.log(mean) - sigma * sigma / 2, sigma, size=n)


def _bimodal(rng: np.random.Generator, n: int, longest: int) -> np.ndarray:
    long = rng.random(n) < 0.05
    return np.where(long, rng.uniform(longest / 2, longest, size=n), rng.lognormal(np.log(1024), 0.8, size=n))


def _chat(rng: np.random.Generator, n: int, longest: int) -> np.ndarray:
    """Draw lengths in Llama 3's proportions: 0.11 % near 37K, the rest near 1K."""
    long = rng.random(n) < 0.0011
    return np.where(long, rng.normal(37_000, 8_000, size=n), rng.lognormal(np.log(1024) - 0.5, 1.0, size=n))


DISTRIBUTIONS: dict[str, Callable[[np.random.Generator, int, int], np.ndarray]] = {
    "wikipedia": lambda rng, n, longest: rng.choice(_wikipedia_lengths(), size=n),
    "documents": _documents,
    "lognormal": lambda rng, n, longest: _lognormal(rng, n, longest / 16),
    "pareto": lambda rng, n, longest: longest / 256 * (1 + rng.pareto(1.1, size=n)),
    "bimodal": _bimodal,
    "chat": _chat,
    # Only long samples, log-uniform from 8K up.
    "long": lambda rng, n, longest: np.exp(rng.uniform(np.log(LEAST_LONGEST["long"]), np.log(longest), size=n)),
    "mock": lambda rng, n, longest: _lognormal(rng, n, 1024),
}


def sample_lengths(name: str, count: int, longest: int, seed: int = 0) -> np.ndarray:
    """Draw ``count`` lengths in tokens (int64), clipped to ``longest``, by seed.

    "wikipedia" (tokens of pages) and "documents" (pre-training documents, a histogram) are measured; the others are
    synthetic.
    """
    if name not in DISTRIBUTIONS:
        raise ValueError(f"distribution {name!r}: unknown; choose one of {', '.join(DISTRIBUTIONS)}")
    if count < 1 or longest < 1:
        raise ValueError(f"count={count} and longest={longest}: both must be at least 1")
    if longest < LEAST_LONGEST.get(name, 1):
        raise ValueError(f"longest={longest}: the distribution '{name}' needs --longest {LEAST_LONGEST[name]} or more")
    rng = np.random.default_rng(seed)
    return np.clip(DISTRIBUTIONS[name](rng, count, longest).astype(np.int64), 1, longest)


def read_lengths(path: str) -> np.ndarray:
    """Read sequence lengths (int64) from a text file, optionally gzipped.

    Raises:
        ValueError: the file cannot be read, or has no lengths.
    """
    try:
        raw = read_bytes(path)
        raw = gzip.decompress(raw) if path.endswith(".gz") else raw
    except (OSError, EOFError, zlib.error) as error:
        raise ValueError(f"{path}: cannot be read: {getattr(error, 'strerror', None) or error}") from error
    try:
        text = decode_text(raw, path)
    except ValueError as error:
        what = "a file of lengths must have whole numbers, one a line or separated by spaces"
        raise ValueError(f"{path}: {what}; the file {error}") from error
    return parse_lengths(text, path)


def parse_lengths(text: str, source: str) -> np.ndarray:
    """Parse whole numbers of 1 or more (int64); ``source`` is named in errors.

    Raises:
        ValueError: other text, with its line, or no lengths.
    """
    lengths: list[int] = []
    for number, line in enumerate(text.splitlines(), 1):
        for word in line.replace(",", " ").split():
            if word.isdecimal() and len(word) > _MOST_DIGITS:
                raise ValueError(f"{source}:{number}: a number of {len(word)} digits is too long for a length")
            if not word.isdecimal() or int(word) < 1:
                raise ValueError(
                    f"{source}:{number}: {word!r} is not a whole number of 1 or more; one length a line, or separated "
                    "by spaces"
                )
            lengths.append(int(word))
    if not lengths:
        raise ValueError(f"{source}: has no lengths")
    return np.array(lengths, dtype=np.int64)
