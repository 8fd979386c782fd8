"""Datasets of fixed-length samples: megatron-core's GPTDataset over indexed files, and a mock.

Every dataset answers ``dataset[i]`` with 1-D tensors of ``seq_length``: ``tokens``, ``labels`` and ``position_ids``
(int64) and ``loss_mask`` (float32). None of them has an attention mask: a ``[s, s]`` tensor would be larger than the
activations that context parallelism divides.
"""

from __future__ import annotations

import warnings
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
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
    first_ends,
    open_indexed,
    tokens_before,
)
from megatron_cp.data.samples.contents import Contents
from megatron_cp.data.samples.mock import MockDataset
from megatron_cp.data.samples.order import shuffled
from megatron_cp.data.samples.split_files import SplitFiles, files_of_splits
from megatron_cp.data.samples.streams import KINDS, Stream, build_streams
from megatron_cp.data.split import ALL_FOR_TRAINING
from megatron_cp.data.text.tokenizers import Tokenizer
from megatron_cp.mcore.global_state import hidden_process_group
from megatron_cp.parallel.collectives import run_on_all_ranks, run_once_per_node

Sample = dict[str, torch.Tensor]
_FORMAT = 2  # of the cached index; another number makes it anew
_PARTS = 100
SAMPLE_KEYS = ("tokens", "labels", "loss_mask", "position_ids")


class Datasets(NamedTuple):
    """One dataset a split, ``None`` where no samples were asked for: a Stream for the kinds that are packed."""

    train: Dataset | Stream | None
    valid: Dataset | Stream | None
    test: Dataset | Stream | None


def build_datasets(
    data: DatasetConfig, tokenizer: Tokenizer, train_samples: int, valid_samples: int = 0, test_samples: int = 0
) -> Datasets:
    """The datasets of a run; each has at least as many samples as asked for. Call it on every rank.

    The sample indices of indexed files are built once, by one rank of those that share a file system, and cached.

    Raises:
        DataError: on every rank, with one message, where a file or a setting of the ``dataset`` section is at fault.
    """
    samples = (train_samples, valid_samples, test_samples)
    kind = data.kind or ("indexed" if data.data_path else "mock")
    if kind in KINDS:
        return Datasets(*build_streams(data, tokenizer, samples))
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
    """megatron-core's GPTDataset, dealt in an order that does not depend on how many samples are asked for.

    Upstream shuffles the documents of all epochs of a run together, so that a run that is made longer goes on with
    other samples. Here upstream indexes one epoch, and every later one deals its samples in a new order. What is left
    after the last whole sample would then never be read; so training data of few samples are indexed for more epochs,
    as many as leave less than one part in ``_PARTS``.
    """

    def __init__(self, dataset: Any, path: str | None, indices: np.ndarray, num_samples: int, *others: Any) -> None:
        # One sample: one epoch then, or as many as make up a sample; of training data _get_num_epochs makes it more.
        super().__init__(dataset, path, indices, 1, *others)
        self._wanted = num_samples
        # Upstream keeps the first sample's loss mask *after* zeroing its padding, and gives it to all later samples:
        # what a rank computes would depend on the sample it read first.
        self.masks_and_position_ids_are_cacheable = False

    def __len__(self) -> int:
        return max(self._wanted, super().__len__())

    def _get_num_epochs(self, num_tokens_per_epoch: int) -> int:
        # Upstream adds epochs of no tokens for ever.
        if num_tokens_per_epoch == 0:
            raise DataError(
                f"{self.dataset_path}: the {self.index_split.name} part of {NAME.dataset.split}={self.config.split} "
                f"has no documents (the file has {len(self.dataset)}). Fix: {ALL_FOR_TRAINING}"
            )
        epochs = -(-_PARTS * self.config.sequence_length // num_tokens_per_epoch)
        if epochs > 1 and self.index_split == Split.train:  # of a held-out part, samples that share no token
            # All samples that there are: upstream would deal those of the last epoch apart.
            self.num_samples = (epochs * num_tokens_per_epoch - 1) // self.config.sequence_length
        return super()._get_num_epochs(num_tokens_per_epoch)

    def contents(self) -> Contents:
        """One epoch of this part of the file."""
        files, boundaries = open_indexed(self.dataset_path), self.dataset.document_indices
        sequences = np.array([self.indices[0], self.indices[-1] + 1])  # a run, of which a document may have several
        tokens, (first, last) = int(np.diff(tokens_before(files, sequences))[0]), boundaries.searchsorted(sequences)
        samples = super().__len__() / self._get_num_epochs(tokens)
        counted = None if self.config.eod_mask_loss else samples * self.config.sequence_length
        ends = first_ends(files)
        return Contents(self.dataset_path, int(last - first), len(boundaries) - 1, tokens, counted, samples, ends)

    def __getitem__(self, idx: int | None) -> Sample:
        if idx is not None:  # upstream's index of one epoch is in random order already
            count = super().__len__()
            turn, position = divmod(int(idx), count)
            idx = shuffled(position, count, self.config.random_seed, turn) if turn else position
        sample = super().__getitem__(idx)
        smallest, largest = (int(value) for value in sample["labels"].aminmax())
        check_ids(self.dataset_path, smallest, largest, self.config.tokenizer.vocab_size)
        return sample


class _Samples(Dataset):
    """Only what a batch needs of a sample (a blend adds ``dataset_id``)."""

    def __init__(self, dataset: Dataset) -> None:
        self._dataset = dataset

    def __len__(self) -> int:
        return len(self._dataset)  # type: ignore[arg-type]

    def __getitem__(self, index: int) -> Sample:
        sample = self._dataset[index]
        return {key: sample[key] for key in SAMPLE_KEYS}

    def sources(self) -> list[Contents]:
        """One epoch of each file."""
        return [dataset.contents() for dataset in getattr(self._dataset, "datasets", [self._dataset])]

    def taken(self, count: int) -> Sequence[float]:
        """How many of the first ``count`` samples come from each source: of a blend, by its weights."""
        return [count * weight for weight in getattr(self._dataset, "weights", [1.0])]


def _build_indexed(config: DatasetConfig, tokenizer: Tokenizer, samples: Sequence[int]) -> list[Dataset | None]:
    """Let one rank fill the cache, where nodes share no file system one of each, then load from it everywhere."""
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

    def fill(aside: Path) -> None:
        for each in files.values():
            check_lengths(each)
        try:
            build(aside)
        except IndexError as error:  # a blend that asks a file for more than it has
            raise DataError(str(error)) from error

    run_once_per_node(lambda: build_cached(fill, cache))
    run_on_all_ranks(lambda: [map_array(path) for path in cache.rglob("*.npy")])  # a damaged one: one message
    return build(cache)


def _weighed(part: SplitFiles, files: dict[str, IndexedFiles]) -> SplitFiles:
    """With prefixes for paths, and a weight for each of several files."""
    found = [files[path] for path in part.paths]
    weights = part.weights
    if len(found) == 1:
        weights = None
    elif weights is None:
        # In proportion to the tokens. Without weights megatron-core would offer one epoch and no more.
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
        # Upstream says that it knows no rank.
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
    """Changes with everything the sample indices depend on. Upstream's own key forgets the files' contents.

    The order in which a blend takes turns is as long as the run; that of one file is not.
    """
    blended = any(part and part.weights for part in parts)
    sizes = list(samples) if blended else [bool(count) for count in samples]
    split = config.split if config.divides else None
    seed, identifiers, stamps = config.random_seed, tokenizer.unique_identifiers, [(f.prefix, f.stamp) for f in files]
    return cache_key(_FORMAT, config.seq_length, split, seed, parts, sizes, identifiers, stamps)
