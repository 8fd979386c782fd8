"""Datasets of fixed-length samples: megatron-core's GPTDataset over indexed files, and a mock.

Every dataset answers ``dataset[i]`` with 1-D tensors of ``seq_length``: ``tokens``, ``labels`` and ``position_ids``
(int64) and ``loss_mask`` (float32). None of them has an attention mask: a ``[s, s]`` tensor would be larger than the
activations that context parallelism divides.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
import re
import shutil
import socket
import tempfile
import warnings
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple
from unittest import mock

import numpy as np
import torch
import torch.distributed as dist
from megatron.core.datasets.blended_megatron_dataset_builder import BlendedMegatronDatasetBuilder
from megatron.core.datasets.gpt_dataset import GPTDataset, GPTDatasetConfig
from torch.utils.data import Dataset

from megatron_cp.config import DatasetConfig, RunConfig
from megatron_cp.data.indexed import IndexedFiles, check_lengths, open_indexed
from megatron_cp.data.tokenizers import Tokenizer
from megatron_cp.errors import DataError

Sample = dict[str, torch.Tensor]
SAMPLE_KEYS = ("tokens", "labels", "loss_mask", "position_ids")
_SPLITS = ("train", "valid", "test")


class Datasets(NamedTuple):
    """One dataset a split, ``None`` where no samples were asked for."""

    train: Dataset | None
    valid: Dataset | None
    test: Dataset | None


def build_datasets(
    config: RunConfig, tokenizer: Tokenizer, train_samples: int, valid_samples: int = 0, test_samples: int = 0
) -> Datasets:
    """The datasets of a run; each has at least as many samples as asked for. Call it on every rank.

    The sample indices of indexed files are built once, by the first rank of each node, and cached.

    Raises:
        DataError: on every rank, with one message, where a file or a setting of the ``dataset`` section is at fault.
    """
    samples = (train_samples, valid_samples, test_samples)
    if (config.dataset.kind or ("indexed" if config.dataset.data_path else "mock")) == "indexed":
        return Datasets(*_build_indexed(config.dataset, tokenizer, samples))
    seeds = (config.dataset.random_seed + 1_000_003 * split for split in range(3))
    return Datasets(
        *(
            MockDataset(config.dataset, tokenizer.vocab_size, seed, n) if n else None
            for seed, n in zip(seeds, samples, strict=True)
        )
    )


class MockDataset(Dataset):
    """Random tokens that depend on (seed, index) alone, so that every parallel layout sees the same samples.

    ``mock_masked_fraction`` of the loss mask is zero on average: one run of tokens in each sample, of varying length
    and place, so that neither samples nor parts of a sequence weigh the same.
    """

    def __init__(self, config: DatasetConfig, vocab_size: int, seed: int, num_samples: int) -> None:
        if not 0.0 <= config.mock_masked_fraction < 1.0:
            raise DataError(f"dataset.mock_masked_fraction={config.mock_masked_fraction}: must be in [0, 1).")
        if config.mock_num_samples < 1:
            raise DataError(f"dataset.mock_num_samples={config.mock_num_samples}: must be 1 or more.")
        self._config, self._vocab_size, self._seed, self._num_samples = config, vocab_size, seed, num_samples

    def __len__(self) -> int:
        return self._num_samples

    def __getitem__(self, index: int) -> Sample:
        length, masked = self._config.seq_length, self._config.mock_masked_fraction
        rng = np.random.default_rng((self._seed, int(index) % self._config.mock_num_samples))
        text = torch.from_numpy(rng.integers(0, self._vocab_size, length + 1, dtype=np.int64))
        loss_mask = torch.ones(length, dtype=torch.float32)
        spread = min(masked, 1.0 - masked)
        count = min(round(rng.uniform(masked - spread, masked + spread) * length), length - 1)
        start = rng.integers(0, length - count + 1)
        loss_mask[start : start + count] = 0.0
        return {
            "tokens": text[:-1].clone(),
            "labels": text[1:].clone(),
            "loss_mask": loss_mask,
            "position_ids": torch.arange(length, dtype=torch.int64),
        }


class TokenDataset(GPTDataset):
    """megatron-core's GPTDataset with three faults turned into answers."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        # Upstream keeps the first sample's loss mask *after* zeroing its padding, and gives it to all later samples:
        # what a rank computes would depend on the sample it read first.
        self.masks_and_position_ids_are_cacheable = False

    def _get_num_epochs(self, num_tokens_per_epoch: int) -> int:
        # Upstream adds epochs of no tokens for ever.
        if num_tokens_per_epoch == 0:
            raise DataError(
                f"{self.dataset_path}: the {self.index_split.name} part of dataset.split={self.config.split} has no "
                f"documents (the file has {len(self.dataset)}). Give that part a larger share, or ask for no samples "
                "of it (validation.eval_iters=0)."
            )
        return super()._get_num_epochs(num_tokens_per_epoch)

    def __getitem__(self, idx: int | None) -> Sample:
        sample = super().__getitem__(idx)
        smallest, largest = (int(value) for value in sample["labels"].aminmax())
        vocab_size = self.config.tokenizer.vocab_size
        if smallest < 0 or largest >= vocab_size:
            raise DataError(
                f"{self.dataset_path}: holds token {smallest if smallest < 0 else largest}, but the tokenizer's ids "
                f"are 0 to {vocab_size - 1}. "
                "If the files were made with another tokenizer, set tokenizer.tokenizer_model to that one."
            )
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


def parse_blend(data_path: Any) -> tuple[list[str], list[float] | None]:
    """``dataset.data_path`` as (prefixes, weights): a prefix, a list of prefixes, or weight, prefix, weight, prefix.

    Raises:
        DataError: nothing given, a weight without its prefix, or a weight that is not above zero.
    """
    if not data_path:
        raise DataError("dataset.data_path is not set: give the prefix of a .bin/.idx pair, or dataset.kind=mock.")
    items = [str(item) for item in ([data_path] if isinstance(data_path, str) else data_path)]
    if _number(items[0]) is None or os.path.exists(items[0] + ".idx"):
        return items, None
    weights = [_number(item) for item in items[0::2]]
    if len(items) % 2 or None in weights:
        raise DataError(
            f"dataset.data_path={items}: a blend is weight, prefix, weight, prefix, ... "
            "or a list of prefixes without any weight."
        )
    if min(w for w in weights if w is not None) <= 0:
        raise DataError(f"dataset.data_path={items}: every weight must be above zero; leave out what is not wanted.")
    return items[1::2], [w for w in weights if w is not None]


def _number(text: str) -> float | None:
    try:
        return float(text)
    except ValueError:
        return None


def _build_indexed(config: DatasetConfig, tokenizer: Tokenizer, samples: Sequence[int]) -> list[Dataset | None]:
    if config.reset_attention_mask:
        raise DataError(
            "dataset.reset_attention_mask=true needs a [s, s] mask, which no rank may build. Leave it false: "
            "documents in a sample then see each other."
        )
    prefixes, weights = parse_blend(config.data_path)
    files = [open_indexed(prefix) for prefix in prefixes]
    if len(files) == 1:
        weights = None
    elif weights is None:
        # In proportion to the tokens. Without weights megatron-core would offer one epoch and no more.
        weights = [float(f.num_tokens) for f in files]

    def build(cache: Path) -> list[Dataset | None]:
        return _build_with_megatron_core(config, tokenizer, files, weights, samples, cache)

    root = Path(config.path_to_cache) if config.path_to_cache else Path(files[0].prefix).absolute().parent / "cache"
    return _build_cached(build, files, root / _cache_key(config, tokenizer, files, weights, samples))


def _build_with_megatron_core(
    config: DatasetConfig,
    tokenizer: Tokenizer,
    files: Sequence[IndexedFiles],
    weights: list[float] | None,
    samples: Sequence[int],
    cache: Path,
) -> list[Dataset | None]:
    numbers = [float(n) for n in re.findall(r"[.0-9]+", config.split)]
    if not 1 <= len(numbers) <= 3 or sum(numbers) <= 0:
        raise DataError(f"dataset.split={config.split}: give the shares of train, valid and test, such as 98,1,1.")
    core_config = GPTDatasetConfig(
        random_seed=config.random_seed,
        sequence_length=config.seq_length,
        blend=([f.prefix for f in files], weights),
        split=config.split,
        path_to_cache=str(cache),
        tokenizer=tokenizer,
        reset_position_ids=config.reset_position_ids,
        reset_attention_mask=False,
        eod_mask_loss=config.eod_mask_loss,
        create_attention_mask=False,
    )
    for index, name in enumerate(_SPLITS):
        if samples[index] and core_config.split_matrix[index] is None:
            raise DataError(f"dataset.split={config.split}: has no share for {name}, but {samples[index]} are needed.")
        if not samples[index]:
            core_config.split_matrix[index] = None
    with warnings.catch_warnings():
        # Upstream says at length that it will not mask padding, of which there is none, and that it knows no rank.
        warnings.filterwarnings("ignore", message="The pad token id in the tokenizer collides")
        warnings.filterwarnings("ignore", message="Could not determine rank")
        datasets = BlendedMegatronDatasetBuilder(TokenDataset, list(samples), lambda: True, core_config).build()
    return [None if dataset is None else _Samples(dataset) for dataset in datasets]


def _cache_key(
    config: DatasetConfig,
    tokenizer: Tokenizer,
    files: Sequence[IndexedFiles],
    weights: list[float] | None,
    samples: Sequence[int],
) -> str:
    """Changes with everything the sample indices depend on. Upstream's own key forgets the files' contents."""
    parts = [config.seq_length, config.split, config.random_seed, weights, list(samples)]
    parts += [tokenizer.unique_identifiers, [(f.prefix, f.stamp) for f in files]]
    return hashlib.sha256(json.dumps(parts).encode()).hexdigest()[:16]


def _build_cached(
    build: Callable[[Path], list[Dataset | None]], files: Sequence[IndexedFiles], cache: Path
) -> list[Dataset | None]:
    """Let the first rank of each node fill ``cache``, then load from it everywhere.

    The cache is built aside and renamed, so that an interrupted build is never read. Two nodes on one file system may
    both build; the second finds the name taken and uses it.
    """
    problem: str | None = None
    if _is_first_on_node() and not cache.exists():
        try:
            for f in files:
                check_lengths(f)
            cache.parent.mkdir(parents=True, exist_ok=True)
            aside = tempfile.mkdtemp(dir=cache.parent, prefix=f".building-{socket.gethostname()}-")
            try:
                with _without_process_group():
                    build(Path(aside))
                with contextlib.suppress(OSError):  # another node was quicker
                    os.rename(aside, cache)
                if not cache.exists():
                    raise DataError(f"{cache}: the sample index could not be put in place.")
            finally:
                shutil.rmtree(aside, ignore_errors=True)
        except OSError as error:
            problem = (
                f"{error.filename or cache.parent}: the sample index cannot be written ({error.strerror}); "
                "set dataset.path_to_cache to a folder that can be."
            )
        except (DataError, IndexError) as error:
            problem = str(error)
    if dist.is_initialized():
        # A barrier that also tells the others of a failure, which would otherwise wait for ever.
        problems: list[str | None] = [None] * dist.get_world_size()
        dist.all_gather_object(problems, problem)
        problem = next((p for p in problems if p), None)
    if problem:
        raise DataError(problem)
    with _without_process_group():
        return build(cache)


def _is_first_on_node() -> bool:
    if not dist.is_initialized():
        return True
    return int(os.environ.get("LOCAL_RANK", dist.get_rank())) == 0


@contextlib.contextmanager
def _without_process_group() -> Iterator[None]:
    """Hide torch.distributed from megatron-core's builder.

    With it, only global rank 0 builds and all others read its files, which needs a file system shared by all nodes; and
    an error on rank 0 leaves the others in a barrier.
    """
    with mock.patch.object(torch.distributed, "is_initialized", return_value=False):
        yield
