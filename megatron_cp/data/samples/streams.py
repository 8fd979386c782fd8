"""Data sets for packing: samples of variable length in an order of their own.

The order depends on neither the layout nor the length of the run. ``Stream.lengths(indices)`` reads no tokens;
``stream[i]`` returns 1-D ``tokens``, ``labels`` (int64) and ``loss_mask`` (float32) for
:mod:`megatron_cp.dynamic_cp.runtime.iterator`.
"""

from __future__ import annotations

import logging
import os
from collections.abc import Iterator, Sequence

import numpy as np

from megatron_cp.common.errors import DataError, readable
from megatron_cp.common.input_files import file_or_pipe
from megatron_cp.config.names import NAME
from megatron_cp.config.run_config import DatasetConfig, TokenizerConfig
from megatron_cp.data.formats.documents import open_documents
from megatron_cp.data.formats.indexed import open_indexed
from megatron_cp.data.formats.length_classes import open_length_classes
from megatron_cp.data.formats.loss_spans import map_spans
from megatron_cp.data.formats.sample_files import check_first_row, log_notes, map_rows, tokenized
from megatron_cp.data.length_mixture import parse_mixture
from megatron_cp.data.samples.blend import BlendOrder
from megatron_cp.data.samples.contents import Contents, Origin
from megatron_cp.data.samples.mixed_lengths import DocumentsOfLength, mixed
from megatron_cp.data.samples.mock import mock_documents
from megatron_cp.data.samples.order import shuffled_all
from megatron_cp.data.samples.split_files import SPLITS, files_of_splits, paths_of
from megatron_cp.data.samples.varlen import DocumentDataset, MockVarlenDataset, Sample
from megatron_cp.data.text.records import check_records
from megatron_cp.data.text.tokenizers import Tokenizer
from megatron_cp.dynamic_cp.distributions import DISTRIBUTIONS
from megatron_cp.launch import launcher
from megatron_cp.parallel.collectives import run_on_all_ranks, run_once_per_node

logger = logging.getLogger(__name__)
_QUICKSTART = "runs/quickstart/data/"  # files of the recipes that continue the quick start
KINDS = ("documents", "jsonl", "mock_documents")
Source = DocumentDataset | MockVarlenDataset | DocumentsOfLength  # one epoch of samples


class Stream:
    """Endless, shuffled blend of sources; a run uses the first ``num_samples``.

    Sample i does not depend on ``num_samples``, and exists beyond them. Each epoch of a source is a new permutation of
    all of its samples. ``weights`` are shares of *tokens*; by default the sources' numbers of samples decide.
    ``keep_small``: as for :class:`BlendOrder`; by default without weights, as the user can raise a small weight.
    """

    def __init__(
        self,
        sources: Sequence[Source],
        weights: Sequence[float] | None,
        seed: int,
        num_samples: int,
        keep_small: bool | None = None,
    ) -> None:
        self._sources, self._seed, self._num_samples = list(sources), seed, num_samples
        shares = [float(len(source)) for source in sources]
        if weights is not None:
            shares = [w * len(source) / source.num_tokens for w, source in zip(weights, sources, strict=True)]
        keep_small = weights is None if keep_small is None else keep_small
        self._blend_order = BlendOrder(shares, keep_small=keep_small) if len(sources) > 1 else None

    def __len__(self) -> int:
        return self._num_samples

    def sources(self) -> list[Contents]:
        """Return the counts of one epoch of each source."""
        return [source.contents() for source in self._sources]

    def one_epoch(self) -> list[Source]:
        """Return the sources, each with one epoch of samples."""
        return self._sources

    def taken(self, count: int) -> Sequence[float]:
        """Return how many of the first ``count`` samples come from each source."""
        return self._blend_order.taken(count) if self._blend_order else [count]

    def _locate(self, indices: np.ndarray) -> Iterator[tuple[Source, np.ndarray, np.ndarray]]:
        """Yield (source, offsets into ``indices``, indices within the source)."""
        numbers, nths = self._blend_order(indices) if self._blend_order else (np.zeros_like(indices), indices)
        for number in np.unique(numbers).tolist():
            source, mine = self._sources[number], np.flatnonzero(numbers == number)
            epochs, positions = np.divmod(nths[mine], len(source))
            yield source, mine, shuffled_all(positions, len(source), self._seed + number, epochs)

    def lengths(self, indices: np.ndarray) -> np.ndarray:
        """Return the tokens of each sample, int64, in the shape of ``indices``."""
        found = np.empty(len(indices), dtype=np.int64)
        for source, mine, places in self._locate(indices):
            found[mine] = source.lengths(places)
        return found

    def origin(self, index: int) -> Origin:
        """Return the place of a sample in its file."""
        source, place = self._place(index)
        return source.origin(place)

    def __getitem__(self, index: int) -> Sample:
        source, place = self._place(index)
        return source[place]

    def _place(self, index: int) -> tuple[Source, int]:
        """Return a sample's source, and its index within it."""
        ((source, _, places),) = self._locate(np.array([index]))
        return source, int(places[0])


def build_streams(
    config: DatasetConfig, tokenizer: Tokenizer, samples: Sequence[int], reports: bool = True
) -> list[Stream | None]:
    """Build a stream for train, valid and test; ``None`` for a part without samples.

    Call it on every rank.

    Raises:
        DataError: a file or a setting of the ``dataset`` section is wrong; raised on every rank with one message.
    """
    seeds = [config.random_seed + 1_000_003 * split for split in range(len(SPLITS))]
    if config.kind == "mock_documents":
        return run_on_all_ranks(
            lambda: [
                _stream([mock_documents(config, tokenizer.vocab_size, seed, name)], None, seed, count, config, name)
                if count
                else None
                for name, seed, count in zip(SPLITS, seeds, samples, strict=True)
            ]
        )
    parts = run_on_all_ranks(lambda: files_of_splits(config, samples))
    paths = list(dict.fromkeys(path for part in parts if part for path in part.paths))
    mixed_paths = parts[0].paths if parts[0] is not None and config.length_mixture is not None else []
    run_once_per_node(lambda: _prepare(paths, mixed_paths, config, tokenizer))

    def build() -> list[Stream | None]:
        prefixes = {path: _prefix(path, config, tokenizer) for path in paths}
        spans = {path: map_spans(prefixes[path]) for path in paths if config.kind == "jsonl"}
        for path in spans if reports else ():
            log_notes(prefixes[path])
        streams: list[Stream | None] = []
        for name, part, seed, count in zip(SPLITS, parts, seeds, samples, strict=True):
            if part is None:
                streams.append(None)
                continue
            try:
                sources = [
                    DocumentDataset(
                        prefixes[path],
                        config.seq_length,
                        config.too_long,
                        part=part.share,
                        spans=spans.get(path),
                        rows=map_rows(prefixes[path]) if path in spans else None,
                        vocab_size=tokenizer.vocab_size,
                        path_to_cache=config.path_to_cache,
                        name=path,
                    )
                    for path in part.paths
                ]
            except DataError as error:
                if not config.divides:
                    raise
                raise DataError(f"the {name} part of {NAME.dataset.split}={config.split}: {error}") from error
            if reports:
                _report_cut(name, sources, config)
            streams.append(_stream(sources, part.weights, seed, count, config, name))
        return streams

    return run_on_all_ranks(build)


def _report_cut(part: str, sources: Sequence[DocumentDataset], config: DatasetConfig) -> None:
    """Log what too_long cut away."""
    documents, tokens = (sum(getattr(source, f"cut_{what}") for source in sources) for what in ("documents", "tokens"))
    if documents and launcher.is_first_rank():
        message = f"{NAME.dataset.too_long}=%s: cut %d documents of the %s data to %d tokens; %d tokens are left out"
        logger.info(message, config.too_long, documents, part, config.seq_length, tokens)


def _stream(
    sources: Sequence[DocumentDataset] | Sequence[MockVarlenDataset],
    weights: Sequence[float] | None,
    seed: int,
    count: int,
    config: DatasetConfig,
    split: str,
) -> Stream:
    """Return the stream of a split; training data have the configured mixture."""
    if config.length_mixture is None or split != SPLITS[0]:
        return Stream(sources, weights, seed, count)
    mixture = parse_mixture(config.length_mixture)
    classes = [source.length_classes(mixture.bounds) for source in sources]
    # A file may have few documents of a class.
    return Stream(*mixed(sources, weights, classes, mixture), seed, count, keep_small=True)


def _prepare(paths: list[str], mixed_paths: list[str], config: DatasetConfig, tokenizer: Tokenizer) -> dict[str, str]:
    """Build the caches of this node; return each path's counts, to compare nodes."""
    contents = {}
    for path in paths:
        files = open_indexed(_prefix(path, config, tokenizer))
        one_sample = config.too_long in ("keep_start", "keep_end")
        index = open_documents(files, config.seq_length, config.path_to_cache, one_sample=one_sample)
        if path in mixed_paths:
            bounds = parse_mixture(config.length_mixture or ()).bounds
            open_length_classes(files, index, config.seq_length, bounds, config.path_to_cache)
        contents[path] = f"{files.num_boundaries - 1} documents, {files.num_tokens} tokens"
    return contents


def _prefix(path: str, config: DatasetConfig, tokenizer: Tokenizer) -> str:
    """Return the prefix of the ``.bin/.idx`` pair with the documents of ``path``."""
    return tokenized(path, tokenizer, config) if config.kind == "jsonl" else path


def check_files(config: DatasetConfig, tokenizer: Tokenizer, settings: TokenizerConfig) -> None:
    """Check the files of a run on one rank, before the rendezvous.

    Reads headers and first rows.

    Raises:
        DataError: a file is missing or unusable, or has other special tokens than the run's ``tokenizer``.
    """
    if config.kind in ("indexed", "documents", "jsonl"):
        paths, is_text = paths_of(config), config.kind == "jsonl"
        for path in paths:
            if is_text:
                _check_exists(path)
                check_first_row(path, tokenizer, config)
            else:
                open_indexed(path)
        check_records(() if is_text else paths, config, tokenizer, settings)
    elif config.kind == "mock_documents" and config.mock_lengths not in DISTRIBUTIONS:
        _readable(config.mock_lengths)


def _check_exists(path: str) -> None:
    if not os.path.lexists(path):
        made = "megatron-cp quickstart (writes it), or " if path.startswith(_QUICKSTART) else ""
        raise DataError(f"{path}: cannot be read: No such file or directory. Fix: {made}name an existing file")


def _readable(path: str) -> None:
    with readable(path), open(path, "rb", opener=file_or_pipe) as file:
        empty = not file.read(1)
    if empty:
        raise DataError(f"{path}: is empty. Fix: name a file with samples")
