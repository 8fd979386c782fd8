"""Datasets of fixed-length samples: indexed files (GPTDataset) and mock samples.

``dataset[i]`` returns 1-D tensors of ``seq_length``: ``tokens``, ``labels`` and ``position_ids`` (int64) and
``loss_mask`` (float32). There is no attention mask: a ``[s, s]`` tensor would be larger than the activations that
context parallelism divides.
"""

from __future__ import annotations

import warnings
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
from megatron.core.datasets.blended_dataset import BlendedDataset
from megatron.core.datasets.blended_megatron_dataset_builder import BlendedMegatronDatasetBuilder
from megatron.core.datasets.gpt_dataset import GPTDataset, GPTDatasetConfig
from megatron.core.datasets.utils import Split
from torch.utils.data import Dataset

from megatron_cp.common.errors import DataError
from megatron_cp.config.names import NAME
from megatron_cp.config.run_config import DatasetConfig
from megatron_cp.data.formats.cache import build_cached, cache_key, cache_root, map_array
from megatron_cp.data.formats.indexed import (
    IndexedFiles,
    check_ids,
    check_lengths,
    first_end_tokens,
    open_indexed,
    tokens_before,
)
from megatron_cp.data.samples.contents import Contents, Origin
from megatron_cp.data.samples.mock import MockDataset
from megatron_cp.data.samples.order import shuffled
from megatron_cp.data.samples.split_files import SplitFiles, files_of_splits
from megatron_cp.data.samples.streams import KINDS, Stream, build_streams
from megatron_cp.data.split import ALL_FOR_TRAINING
from megatron_cp.data.text.tokenizers import Tokenizer
from megatron_cp.mcore.global_state import hidden_process_group
from megatron_cp.parallel.collectives import run_on_all_ranks, run_once_per_node

Sample = dict[str, torch.Tensor]
_FORMAT = 2  # of the cached index; a change invalidates caches
_PARTS = 100
SAMPLE_KEYS = ("tokens", "labels", "loss_mask", "position_ids")


class Datasets(NamedTuple):
    """One dataset per split, ``None`` without samples; a Stream for packed kinds."""

    train: Dataset | Stream | None
    valid: Dataset | Stream | None
    test: Dataset | Stream | None


def build_datasets(
    data: DatasetConfig,
    tokenizer: Tokenizer,
    train_samples: int,
    valid_samples: int = 0,
    test_samples: int = 0,
    *,
    reports: bool = True,
) -> Datasets:
    """Build the datasets of a run, each with at least the given number of samples.

    Call it on every rank. For indexed files, one rank per file system builds the sample indices and caches them.
    ``reports``: log what is skipped and cut.

    Raises:
        DataError: a file or a setting of the ``dataset`` section is wrong; raised on every rank with one message.
    """
    samples = (train_samples, valid_samples, test_samples)
    kind = data.kind or ("indexed" if data.data_path else "mock")
    if kind in KINDS:
        return Datasets(*build_streams(data, tokenizer, samples, reports))
    if kind == "indexed":
        return Datasets(*_build_indexed(data, tokenizer, samples))
    seeds = (data.random_seed + 1_000_003 * split for split in range(3))
    return Datasets(
        *(
            MockDataset(data, tokenizer.vocab_size, seed, n) if n else None
            for seed, n in zip(seeds, samples, strict=True)
        )
    )


class TokenDataset(GPTDataset):
    """GPTDataset with an order that does not depend on the number of samples.

    megatron-core shuffles the documents of all epochs together, so a longer run has other samples. Here it indexes one
    epoch, and each later epoch is a new permutation of its samples. The tokens after the last whole sample would never
    be read. Training data with few samples are therefore indexed for several epochs, so that less than one part in
    ``_PARTS`` is lost.
    """

    def __init__(self, dataset: Any, path: str | None, indices: np.ndarray, num_samples: int, *others: Any) -> None:
        # 1 sample: upstream then indexes the fewest epochs; for training data, _get_num_epochs adds more.
        super().__init__(dataset, path, indices, 1, *others)
        self._wanted = num_samples
        # Upstream would reuse the first sample's loss mask, with its padding zeroed, for all later samples.
        self.masks_and_position_ids_are_cacheable = False

    def __len__(self) -> int:
        return max(self._wanted, super().__len__())

    def _get_num_epochs(self, num_tokens_per_epoch: int) -> int:
        # Upstream would loop forever.
        if num_tokens_per_epoch == 0:
            raise DataError(
                f"{self.dataset_path}: the {self.index_split.name} part of {NAME.dataset.split}={self.config.split} "
                f"has no documents (the file has {len(self.dataset)}). Fix: {ALL_FOR_TRAINING}"
            )
        epochs = -(-_PARTS * self.config.sequence_length // num_tokens_per_epoch)
        if epochs > 1 and self.index_split == Split.train:  # samples of a held-out part must not share tokens
            # Every sample of these epochs: with fewer, upstream would shuffle the last epoch separately.
            self.num_samples = (epochs * num_tokens_per_epoch - 1) // self.config.sequence_length
        return super()._get_num_epochs(num_tokens_per_epoch)

    def contents(self) -> Contents:
        """Return the counts of one epoch of this part of the file."""
        files, boundaries = open_indexed(self.dataset_path), self.dataset.document_indices
        sequences = np.array([self.indices[0], self.indices[-1] + 1])  # contiguous; a document may have several
        tokens, (first, last) = int(np.diff(tokens_before(files, sequences))[0]), boundaries.searchsorted(sequences)
        samples = super().__len__() / self._get_num_epochs(tokens)
        counted = None if self.config.eod_mask_loss else samples * self.config.sequence_length
        ends = first_end_tokens(files)
        return Contents(self.dataset_path, int(last - first), len(boundaries) - 1, tokens, counted, samples, ends)

    def origin(self, index: int) -> Origin:
        """Return the documents of a sample, and its first token in the first one."""
        place = self.shuffle_index[self._shuffled(index)]
        (first, start), (last, _) = self.sample_index[place : place + 2].tolist()
        sequences = self.document_index[first : last + 1]
        boundaries = self.dataset.document_indices  # a document may have several sequences
        documents = (boundaries.searchsorted(sequences, side="right") - 1).tolist()
        begins = tokens_before(open_indexed(self.dataset_path), np.array([boundaries[documents[0]], sequences[0]]))
        return Origin(self.dataset_path, tuple(dict.fromkeys(documents)), start + int(np.diff(begins)[0]))

    def _shuffled(self, index: int) -> int:
        """Return a sample's index in the first epoch, which upstream has shuffled."""
        count = super().__len__()
        turn, position = divmod(int(index), count)
        return shuffled(position, count, self.config.random_seed, turn) if turn else position

    def __getitem__(self, idx: int | None) -> Sample:
        sample = super().__getitem__(None if idx is None else self._shuffled(idx))
        smallest, largest = (int(value) for value in sample["labels"].aminmax())
        check_ids(self.dataset_path, smallest, largest, self.config.tokenizer.vocab_size)
        return sample


class _Samples(Dataset):
    """Dataset with the keys of a batch only (a blend adds ``dataset_id``)."""

    def __init__(self, dataset: Dataset) -> None:
        self._dataset = dataset

    def __len__(self) -> int:
        return len(self._dataset)  # type: ignore[arg-type]

    def __getitem__(self, index: int) -> Sample:
        sample = self._dataset[index]
        return {key: sample[key] for key in SAMPLE_KEYS}

    def sources(self) -> list[Contents]:
        """Return the counts of one epoch of each file."""
        return [dataset.contents() for dataset in getattr(self._dataset, "datasets", [self._dataset])]

    def taken(self, count: int) -> Sequence[float]:
        """Return how many of the first ``count`` samples come from each source."""
        return [count * weight for weight in getattr(self._dataset, "weights", [1.0])]

    def origin(self, index: int) -> Origin:
        """Return the place of a sample in its file."""
        dataset: Any = self._dataset
        if isinstance(dataset, BlendedDataset):
            number, index = int(dataset.dataset_index[index]), int(dataset.dataset_sample_index[index])
            dataset = dataset.datasets[number]
        return dataset.origin(index)


def _build_indexed(config: DatasetConfig, tokenizer: Tokenizer, samples: Sequence[int]) -> list[Dataset | None]:
    """Fill the cache on one rank (per file system), then load it on every rank."""
    parts = run_on_all_ranks(lambda: files_of_splits(config, samples))
    paths = list(dict.fromkeys(path for part in parts if part for path in part.paths))
    if not paths:
        return [None for _ in parts]
    files = dict(zip(paths, run_on_all_ranks(lambda: [open_indexed(path) for path in paths]), strict=True))
    parts = [part and _weighed(part, files) for part in parts]
    root = cache_root(config.path_to_cache, files[paths[0]].prefix)
    cache = root / _cache_key(config, tokenizer, parts, files.values(), samples)

    def build(cache: Path) -> list[Dataset | None]:
        with hidden_process_group():
            return _build_with_megatron_core(config, tokenizer, parts, samples, cache)

    def fill(partial: Path) -> None:
        for each in files.values():
            check_lengths(each)
        try:
            build(partial)
        except IndexError as error:  # a blend needs more samples of a file than it has
            raise DataError(str(error)) from error

    run_once_per_node(lambda: build_cached(fill, cache))
    run_on_all_ranks(lambda: [map_array(path) for path in cache.rglob("*.npy")])  # one message for a damaged file
    return build(cache)


def _weighed(part: SplitFiles, files: dict[str, IndexedFiles]) -> SplitFiles:
    """Replace paths by prefixes, and set a weight for each of several files."""
    found = [files[path] for path in part.paths]
    weights = part.weights
    if len(found) == 1:
        weights = None
    elif weights is None:
        # Without weights, megatron-core would provide one epoch only.
        weights = [float(f.num_tokens) for f in found]
    return SplitFiles([f.prefix for f in found], weights, part.share)


def _build_with_megatron_core(
    config: DatasetConfig,
    tokenizer: Tokenizer,
    parts: Sequence[SplitFiles | None],
    samples: Sequence[int],
    cache: Path,
) -> list[Dataset | None]:
    blends = [part and (part.paths, part.weights) for part in parts]
    core_config = GPTDatasetConfig(
        random_seed=config.random_seed,
        sequence_length=config.seq_length,
        blend=next(filter(None, blends)) if config.divides else None,
        blend_per_split=None if config.divides else blends,
        split=config.split if config.divides else None,
        path_to_cache=str(cache),
        tokenizer=tokenizer,
        reset_position_ids=config.reset_position_ids,
        reset_attention_mask=False,  # rule E8
        eod_mask_loss=config.eod_mask_loss,
        create_attention_mask=False,
    )
    if config.divides:
        core_config.split_matrix = [part and part.share for part in parts]
    with warnings.catch_warnings():
        # Upstream warns that it cannot determine the rank.
        warnings.filterwarnings("ignore", message="Could not determine rank")
        datasets = BlendedMegatronDatasetBuilder(TokenDataset, list(samples), lambda: True, core_config).build()
    return [None if dataset is None else _Samples(dataset) for dataset in datasets]


def _cache_key(
    config: DatasetConfig,
    tokenizer: Tokenizer,
    parts: Sequence[SplitFiles | None],
    files: Iterable[IndexedFiles],
    samples: Sequence[int],
) -> str:
    """Return a hash of everything that the sample indices depend on.

    megatron-core's own key ignores the contents of the files.

    The index of a blend depends on the number of samples; the index of a single file does not.
    """
    blended = any(part and part.weights for part in parts)
    sizes = list(samples) if blended else [bool(count) for count in samples]
    split = config.split if config.divides else None
    seed, identifiers, stamps = config.random_seed, tokenizer.unique_identifiers, [(f.prefix, f.stamp) for f in files]
    return cache_key(_FORMAT, config.seq_length, split, seed, parts, sizes, identifiers, stamps)
