import json
import os
import pickle
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any
from unittest import mock

import numpy as np
import pytest
import torch
import torch.distributed as dist
from megatron.core.datasets.indexed_dataset import IndexedDatasetBuilder

from megatron_cp.common.errors import DataError
from megatron_cp.config.run_config import RunConfig, TokenizerConfig
from megatron_cp.data.data_path import parse_blend
from megatron_cp.data.samples import datasets
from megatron_cp.data.samples.datasets import SAMPLE_KEYS, build_datasets
from megatron_cp.data.samples.split_files import has_test_part
from megatron_cp.data.samples.streams import check_files
from megatron_cp.data.text.preprocess import preprocess
from megatron_cp.data.text.tokenizers import ByteLevelTokenizer, NullTokenizer, Tokenizer, build_tokenizer, train_bpe
from megatron_cp.parallel import collectives
from tests.ranks import run_ranks

TOKENIZER = ByteLevelTokenizer()


def _check_sample(sample: dict[str, torch.Tensor], length: int) -> None:
    assert tuple(sample) == SAMPLE_KEYS
    assert all(value.shape == (length,) for value in sample.values())
    assert sample["loss_mask"].dtype == torch.float32
    assert all(sample[key].dtype == torch.int64 for key in ("tokens", "labels", "position_ids"))
    assert torch.equal(sample["tokens"][1:], sample["labels"][:-1])


def test_indexed_samples(config: RunConfig, corpus: Callable[..., str]) -> None:
    config.dataset.data_path = corpus()
    train, valid, test = build_datasets(config.dataset, TOKENIZER, 500, 10)
    assert len(train) >= 500 and len(valid) >= 10 and test is None  # about five epochs
    for index in (0, 7, 499):
        _check_sample(train[index], 32)
    assert torch.equal(train[3]["loss_mask"], torch.ones(32))


# The data's own tokenizer, and one with only its vocabulary size and end-of-document id.
@pytest.mark.parametrize("tokenizer", [TOKENIZER, NullTokenizer(300, TOKENIZER.eod)], ids=["bytes", "null"])
def test_masked_ends_of_documents(config: RunConfig, corpus: Callable[..., str], tokenizer: Tokenizer) -> None:
    config.dataset.data_path, config.dataset.eod_mask_loss = corpus(), True
    train, _, _ = build_datasets(config.dataset, tokenizer, 60)
    masks = torch.stack([train[i]["loss_mask"] for i in range(60)])
    tokens = torch.stack([train[i]["tokens"] for i in range(60)])
    assert (masks == 0).any()
    assert torch.equal(masks == 0, tokens == TOKENIZER.eod)


def test_a_padding_token_in_the_text_is_a_token_like_others(config: RunConfig, tmp_path: Path) -> None:
    """Megatron-core makes it token 0, without a loss.

    See upstream's gpt_dataset.py, "For padded sequences".
    """
    (tmp_path / "text.txt").write_text("abcabcabdabe" * 50)
    folder = train_bpe(["abc"], 257, tmp_path / "tokenizer")
    named = json.loads((folder / "tokenizer_config.json").read_text())
    (folder / "tokenizer_config.json").write_text(json.dumps({**named, "pad_token": "a"}))
    config.tokenizer = TokenizerConfig("HuggingFaceTokenizer", str(folder))
    config.dataset.data_path = preprocess([tmp_path / "text.txt"], tmp_path / "text", config.tokenizer).prefix
    config.dataset.split = "1,0,0"
    tokenizer = build_tokenizer(config.tokenizer)
    train, _, _ = build_datasets(config.dataset, tokenizer, 2)
    pad = tokenizer.tokenize("a")[0]
    for sample in (train[0], train[1]):
        assert (sample["labels"] == pad).any() and torch.equal(sample["loss_mask"], torch.ones(32))


def test_filling_of_short_samples_has_no_loss(config: RunConfig, corpus: Callable[..., str]) -> None:
    config.dataset.data_path = corpus()
    train, _, _ = build_datasets(config.dataset, TOKENIZER, 1)
    core = train._dataset
    core.sample_index = np.array([[0, 0], [0, 20]])  # the first window ends after 20 tokens
    core.shuffle_index = np.array([0])
    sample = train[0]
    assert torch.equal(sample["loss_mask"], (torch.arange(32) < 20).float())
    assert (sample["labels"][20:] == 0).all() and (sample["tokens"][21:] == 0).all()


def test_train_and_validation_share_no_document(config: RunConfig, corpus: Callable[..., str]) -> None:
    config.dataset.data_path = corpus()
    train, valid, _ = build_datasets(config.dataset, TOKENIZER, 80, 20)
    text = [bytes(d[i]["tokens"][:16].clamp(max=255).tolist()) for d in (train, valid) for i in range(20)]
    assert len(set(text)) == 40


def test_the_index_is_cached_and_follows_the_files(config: RunConfig, corpus: Callable[..., str]) -> None:
    prefix = config.dataset.data_path = corpus("a")
    cache = Path(prefix).parent / "cache"
    first = build_datasets(config.dataset, TOKENIZER, 50).train[0]["tokens"]
    (folder,) = cache.iterdir()
    written = {p: p.stat().st_mtime_ns for p in folder.iterdir()}
    assert torch.equal(build_datasets(config.dataset, TOKENIZER, 50).train[0]["tokens"], first)
    assert {p: p.stat().st_mtime_ns for p in folder.iterdir()} == written
    # Other content under the same name must not use the old index.
    other = corpus("b", documents=25)
    for ending in (".bin", ".idx"):
        os.replace(other + ending, prefix + ending)
    build_datasets(config.dataset, TOKENIZER, 50)
    assert len(list(cache.iterdir())) == 2


def _order(config: RunConfig, samples: int, first: int) -> list[tuple[int, ...]]:
    train, _, _ = build_datasets(config.dataset, TOKENIZER, samples)
    return [tuple(train[i]["tokens"].tolist()) for i in range(first)]


class _Runs:
    def __init__(self, marker: Path) -> None:
        self.marker = marker

    def __reduce__(self) -> tuple[Any, ...]:
        return open, (str(self.marker), "w")


def test_an_index_of_pickled_objects_is_not_read(config: RunConfig, corpus: Callable[..., str], tmp_path: Path) -> None:
    """A cache beside data of unknown origin may hold any pickle.

    megatron-core raises with a traceback.
    """
    prefix, marker = corpus("a"), tmp_path / "marker"
    config.dataset.data_path = prefix
    build_datasets(config.dataset, TOKENIZER, 50)
    for file in Path(prefix).parent.glob("cache/*/*.npy"):
        file.write_bytes(pickle.dumps(_Runs(marker)))  # numpy treats a file without an array header as a pickle
    with pytest.raises(DataError, match=r"\.npy: cannot be read .*Fix: rm -r "):
        build_datasets(config.dataset, TOKENIZER, 50)
    assert not marker.exists()


def test_a_longer_run_deals_the_same_samples_first(config: RunConfig, corpus: Callable[..., str]) -> None:
    """A resumed run with more iterations must continue with the same samples.

    Upstream shuffles all epochs together, which changes them.
    """
    prefixes = [corpus("a"), corpus("b", letters="nopqrstuvwxyz")]
    for data_path in (prefixes[0], [0.6, prefixes[0], 0.4, prefixes[1]]):
        config.dataset.data_path = data_path
        short = _order(config, 250, 250)  # two epochs and more of either
        assert _order(config, 3000, 250) == short == _order(config, 251, 250)


def test_every_epoch_has_every_sample_once_and_an_order_of_its_own(
    config: RunConfig, corpus: Callable[..., str]
) -> None:
    config.dataset.data_path = corpus()
    samples = _order(config, 1000, 1000)
    epoch = len(set(samples))
    assert 90 < epoch < 120
    epochs = [samples[start : start + epoch] for start in range(0, 3 * epoch, epoch)]
    assert sorted(epochs[0]) == sorted(epochs[1]) == sorted(epochs[2])
    assert epochs[0] != epochs[1] != epochs[2]


def _numbered(tmp_path: Path, documents: int, length: int) -> str:
    """Write documents of as many tokens each, all of them different."""
    prefix = str(tmp_path / f"numbers{documents}")
    builder = IndexedDatasetBuilder(f"{prefix}.bin", dtype=np.uint16)
    for number in range(documents):
        builder.add_document(np.arange(number * length, (number + 1) * length, dtype=np.uint16), [length])
    builder.finalize(f"{prefix}.idx")
    return prefix


@pytest.mark.parametrize("documents", [1, 3, 19])  # of 0.1, 0.3 and 1.9 samples
def test_small_files_are_used_completely(config: RunConfig, tmp_path: Path, documents: int) -> None:
    config.dataset.data_path, config.dataset.seq_length = _numbered(tmp_path, documents, 100), 1000
    config.dataset.split = "1,0,0"
    train, _, _ = build_datasets(config.dataset, NullTokenizer(2000), 100)
    assert len({int(token) for i in range(100) for token in train[i]["labels"]}) == 100 * documents
    longer, _, _ = build_datasets(config.dataset, NullTokenizer(2000), 2000)
    assert all(torch.equal(train[i]["tokens"], longer[i]["tokens"]) for i in range(100))


def test_small_files_keep_their_share_of_a_blend(config: RunConfig, tmp_path: Path) -> None:
    config.dataset.data_path, config.dataset.split = [_numbered(tmp_path, 2, 50), _numbered(tmp_path, 6, 50)], "1,0,0"
    train, _, _ = build_datasets(config.dataset, NullTokenizer(2000), 400)
    assert sum(int(train._dataset[i]["dataset_id"]) for i in range(400)) == 300


def test_a_part_of_less_than_a_sample_is_repeated(config: RunConfig, corpus: Callable[..., str]) -> None:
    config.dataset.data_path, config.dataset.split, config.dataset.seq_length = corpus(), "39,1,0", 256
    _, valid, _ = build_datasets(config.dataset, TOKENIZER, 4, 10)  # one document of at most 150 bytes
    _check_sample(valid[9], 256)


def test_a_blend_follows_its_weights(config: RunConfig, corpus: Callable[..., str], tmp_path: Path) -> None:
    prefixes = [corpus("a"), corpus("b", letters="nopqrstuvwxyz")]
    config.dataset.data_path = [0.75, prefixes[0], "0.25", prefixes[1]]
    config.dataset.path_to_cache = str(tmp_path / "elsewhere")
    train, _, _ = build_datasets(config.dataset, TOKENIZER, 400)
    assert (tmp_path / "elsewhere").is_dir() and not (tmp_path / "cache").exists()
    from_first = sum((train[i]["tokens"][:2] <= ord("m")).any().item() for i in range(400))
    assert from_first / 400 == pytest.approx(0.75, abs=0.02)


def test_prefixes_without_weights_last_for_more_than_an_epoch(config: RunConfig, corpus: Callable[..., str]) -> None:
    config.dataset.data_path = [corpus("a"), corpus("b", letters="nopqrstuvwxyz")]
    train, _, _ = build_datasets(config.dataset, TOKENIZER, 2000)
    _check_sample(train[1999], 32)


@pytest.mark.parametrize(
    ("data_path", "expected"),
    [
        ("a", (["a"], None)),
        (["a", "b"], (["a", "b"], None)),
        ([0.3, "a", 0.7, "b"], (["a", "b"], [0.3, 0.7])),
        (["30", "a", "70", "b"], (["a", "b"], [30.0, 70.0])),
    ],
)
def test_blends(data_path: object, expected: object) -> None:
    assert parse_blend(data_path) == expected


@pytest.mark.parametrize(
    ("data_path", "message"),
    [
        (None, "is not set"),
        ([], "is not set"),
        ([0.3, "a", "b"], "a blend is weight, prefix"),
        (["0.3", "a", "b", "c"], "a blend is weight, prefix"),
        (["a", 0.3, "b", 0.7], "a blend is weight, prefix"),
        ([3], "a blend is weight, prefix"),
        ([0.0, "a"], "the weight of a is 0.0; it must be above zero"),
        ([1, "a", -1, "b"], "the weight of b is -1; it must be above zero"),
        ([1, "a", "nan", "b"], "the weight of b is nan; it must be "),
        (["inf", "a", 1, "b"], "the weight of a is inf; it must be "),
        ([1e308, "a", 1e308, "b"], r"the weight of a is 1e\+308; it must be .* from 1e-100 to 1e\+100"),
        ([1, "a", 5e-324, "b"], "the weight of b is 5e-324; it must be "),
        (["a"] * 40_000, "has 40000 entries; a blend has at most 32767"),
    ],
)
def test_bad_blends(data_path: object, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        parse_blend(data_path)


def _of(dataset: Any, count: int) -> set[str]:
    """Return the letters in the first samples, without ends of documents."""
    return {chr(token) for i in range(count) for token in dataset[i]["tokens"].tolist() if token < 256}


@pytest.mark.parametrize("kind", ["indexed", "documents"])
def test_parts_with_files_of_their_own(config: RunConfig, corpus: Callable[..., str], kind: str) -> None:
    config.dataset.kind, config.dataset.data_path = kind, [corpus("a", letters="ab"), corpus("b", letters="cd")]
    config.dataset.valid_data_path = [0.5, corpus("c", letters="ef"), 0.5, corpus("d", letters="gh")]
    train, valid, test = build_datasets(config.dataset, TOKENIZER, 300, 40)
    assert (_of(train, 80), _of(valid, 40), test) == (set("abcd"), set("efgh"), None)
    config.dataset.test_data_path = corpus("e", letters="ij")
    again, valid, test = build_datasets(config.dataset, TOKENIZER, 300, 40, 10)
    assert (_of(valid, 40), _of(test, 10)) == (set("efgh"), set("ij"))
    assert all(torch.equal(train[i]["tokens"], again[i]["tokens"]) for i in range(300))
    # All of data_path is for training: its last documents too, which the split would keep.
    config.dataset.data_path = corpus("f", letters="ab")
    sizes = []
    for config.dataset.valid_data_path, config.dataset.test_data_path in ((None, None), (None, "unread")):
        train, _, _ = build_datasets(config.dataset, TOKENIZER, 400)
        sizes.append(len({tuple(train[i]["tokens"].tolist()) for i in range(400)}))
    assert sizes[0] < 0.9 * sizes[1]


def test_a_part_without_files_of_its_own(config: RunConfig, corpus: Callable[..., str]) -> None:
    config.dataset.kind, config.dataset.data_path, config.dataset.test_data_path = "indexed", corpus(), "nowhere"
    with pytest.raises(DataError, match=r"nowhere.bin and nowhere.idx: no such file"):
        check_files(config.dataset, TOKENIZER, config.tokenizer)
    assert has_test_part(config.dataset)
    config.dataset.valid_data_path, config.dataset.test_data_path = "a", None
    assert not has_test_part(config.dataset)


def test_a_split_without_documents(config: RunConfig, corpus: Callable[..., str]) -> None:
    config.dataset.data_path, config.dataset.split = corpus(), "9999,1,0"
    with pytest.raises(DataError, match=r"valid part of dataset.split=9999,1,0 has no documents \(the file has 40\)"):
        build_datasets(config.dataset, TOKENIZER, 10, 10)
    build_datasets(config.dataset, TOKENIZER, 10)  # no sample of that part is needed


def test_no_square_mask(config: RunConfig, corpus: Callable[..., str]) -> None:
    config.dataset.data_path = corpus()
    train, _, _ = build_datasets(config.dataset, TOKENIZER, 10)
    assert "attention_mask" not in train._dataset[0], "nor is one built and left out"


def test_tokens_of_another_tokenizer(config: RunConfig, corpus: Callable[..., str]) -> None:
    config.dataset.data_path = corpus()
    config.tokenizer.tokenizer_type, config.tokenizer.vocab_size = "NullTokenizer", 100
    train, _, _ = build_datasets(config.dataset, build_tokenizer(config.tokenizer), 10)
    with pytest.raises(DataError, match=r"ids are 0 to 99. .*tokenizer_type=HuggingFaceTokenizer"):
        train[0]


def test_unwritable_cache(config: RunConfig, corpus: Callable[..., str], tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    config.dataset.data_path, config.dataset.path_to_cache = corpus(), str(tmp_path / "file" / "cache")
    with pytest.raises(DataError, match=r"Fix: dataset\.path_to_cache="):
        build_datasets(config.dataset, TOKENIZER, 10)


def test_an_interrupted_build_leaves_no_index(
    config: RunConfig, corpus: Callable[..., str], monkeypatch: pytest.MonkeyPatch
) -> None:
    config.dataset.data_path = prefix = corpus()
    monkeypatch.setattr("megatron_cp.data.samples.datasets.TokenDataset.__init__", _interrupt)
    with pytest.raises(KeyboardInterrupt):
        build_datasets(config.dataset, TOKENIZER, 10)
    assert list((Path(prefix).parent / "cache").iterdir()) == []


def _interrupt(*args: object) -> None:
    raise KeyboardInterrupt


def _first_tokens(config: RunConfig) -> list[list[int]]:
    train, valid, _ = build_datasets(config.dataset, TOKENIZER, 30, 5)
    return [train[0]["tokens"].tolist(), valid[0]["tokens"].tolist()]


def test_ranks_share_one_index(config: RunConfig, corpus: Callable[..., str]) -> None:
    config.dataset.data_path = corpus()
    results = run_ranks(_first_tokens, 2, config)
    assert results[0] == results[1]
    assert len(list((Path(config.dataset.data_path).parent / "cache").iterdir())) == 1


def _count_collectives(config: RunConfig) -> int:
    """Count this rank's collectives while another rank builds the index.

    The first rank of the node takes a second for it.
    """
    build, gather, times = datasets._build_with_megatron_core, dist.all_gather_object, []

    def slowly(*arguments: Any) -> Any:
        time.sleep(1.0)
        return build(*arguments)

    def counted(*arguments: Any, **others: Any) -> None:
        times.append(time.monotonic())
        gather(*arguments, **others)

    with (
        mock.patch.object(collectives, "_HEARTBEAT", 0.05),
        mock.patch.object(datasets, "_build_with_megatron_core", slowly),
        mock.patch.object(dist, "all_gather_object", counted),
    ):
        build_datasets(config.dataset, TOKENIZER, 30, 5)
    return len(times)


def test_waiting_for_a_long_build_takes_several_collectives(config: RunConfig, corpus: Callable[..., str]) -> None:
    """A single collective would run into dist.distributed_timeout_minutes."""
    config.dataset.data_path = corpus()
    first, second = run_ranks(_count_collectives, 2, config, timeout=120)
    assert first == second > 4  # without heartbeats there are 4


def _message(config: RunConfig) -> str:
    try:
        build_datasets(config.dataset, TOKENIZER, 30, 5)
    except DataError as error:
        return str(error)
    return "no error"


def test_a_fault_found_by_one_rank_reaches_all(config: RunConfig, corpus: Callable[..., str]) -> None:
    config.dataset.data_path, config.dataset.split = corpus(), "9999,1,0"
    first, second = run_ranks(_message, 2, config, timeout=120)
    assert first == second
    assert "has no documents" in first


@pytest.fixture
def mock_config(config: RunConfig) -> RunConfig:
    config.dataset.kind, config.dataset.mock_masked_fraction = "mock", 0.3
    return config


def test_mock_samples(mock_config: RunConfig) -> None:
    mock_config.dataset.mock_num_samples = 400
    train, valid, test = build_datasets(mock_config.dataset, TOKENIZER, 500, 10)
    assert (len(train), len(valid), test) == (500, 10, None)
    _check_sample(train[0], 32)
    again, _, _ = build_datasets(mock_config.dataset, TOKENIZER, 100)
    assert torch.equal(again[5]["tokens"], train[5]["tokens"])
    assert not torch.equal(train[5]["tokens"], train[6]["tokens"])
    assert not torch.equal(train[5]["tokens"], valid[5]["tokens"])
    assert torch.equal(train[405]["tokens"], train[5]["tokens"])
    tokens = torch.stack([train[i]["tokens"] for i in range(400)])
    assert tokens.min() == 0 and tokens.max() == TOKENIZER.vocab_size - 1


def test_mock_loss_mask_is_uneven(mock_config: RunConfig) -> None:
    train, _, _ = build_datasets(mock_config.dataset, TOKENIZER, 2000)
    masks = torch.stack([train[i]["loss_mask"] for i in range(2000)])
    assert (1 - masks).mean().item() == pytest.approx(0.3, abs=0.01)
    assert len(masks.sum(dim=1).unique()) > 10
    quarters = masks.view(2000, 4, 8).sum(dim=2)
    assert (quarters.amax(dim=1) > quarters.amin(dim=1)).float().mean() > 0.8
