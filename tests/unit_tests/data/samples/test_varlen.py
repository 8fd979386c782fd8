"""Samples of variable length: one per document, labels never from the next one."""

import os
from pathlib import Path

import numpy as np
import pytest
import torch

from megatron_cp.common.errors import DataError
from megatron_cp.data.formats.documents import DocumentIndex, open_documents
from megatron_cp.data.formats.indexed import open_indexed
from megatron_cp.data.samples.varlen import DocumentDataset, MockVarlenDataset


@pytest.fixture
def documents(tmp_path: Path) -> str:
    from megatron.core.datasets.indexed_dataset import IndexedDatasetBuilder

    prefix = str(tmp_path / "docs")
    builder = IndexedDatasetBuilder(prefix + ".bin", dtype=np.uint16)
    for start, length in ((0, 5), (10, 1), (20, 2), (30, 10)):
        builder.add_document(torch.arange(start, start + length), [length])
    builder.finalize(prefix + ".idx")
    return prefix


def test_documents_become_samples_and_long_ones_are_split(documents: str) -> None:
    data = DocumentDataset(documents, max_length=4)
    assert data.lengths(np.arange(len(data))).tolist() == [4, 1, 4, 4, 1]
    for index in range(len(data)):
        sample = data[index]
        assert len(sample["tokens"]) == len(sample["loss_mask"]) == data.lengths(np.array([index]))
        assert torch.equal(sample["labels"], sample["tokens"] + 1), "each token predicts its document's next one"
    for outside in (-1, len(data)):
        with pytest.raises(IndexError, match=f"sample {outside} of 5"):
            data[outside]
        with pytest.raises(IndexError, match=f"sample {outside} of 5"):
            data.lengths(np.array([0, outside]))
    assert data[2]["tokens"].tolist() == [30, 31, 32, 33] and data[4]["tokens"].tolist() == [38]


def test_too_long_documents_can_be_refused(documents: str) -> None:
    with pytest.raises(DataError, match=r"document 3 has 10 tokens, more than 4 \+ 1"):
        DocumentDataset(documents, max_length=4, too_long="refuse")
    assert len(DocumentDataset(documents, max_length=9, too_long="refuse")) == 3


@pytest.fixture
def many(tmp_path: Path) -> tuple[str, list[int]]:
    """Write documents of several sequences, of one and of none.

    Returns the tokens of each, too.
    """
    from megatron.core.datasets.indexed_dataset import IndexedDatasetBuilder

    prefix, rng = str(tmp_path / "many"), np.random.default_rng(0)
    builder = IndexedDatasetBuilder(prefix + ".bin", dtype=np.int32)
    totals = []
    for number in range(60):
        lengths = rng.integers(0, 9, number % 4).tolist()
        totals.append(sum(lengths))
        builder.add_document(torch.arange(totals[-1]) + 100 * number, lengths)
    builder.finalize(prefix + ".idx")
    return prefix, totals


def in_memory(totals: list[int], max_length: int, part: tuple[float, float]) -> list[list[int]]:
    """Return the tokens of a file's samples.

    The documents count up from 100 times their number.
    """
    first, last = (round(share * len(totals)) for share in part)
    return [
        list(range(100 * number + start, 100 * number + min(start + max_length, totals[number] - 1)))
        for number in range(first, last)
        for start in range(0, totals[number] - 1, max_length)
    ]


@pytest.mark.parametrize("max_length", [1, 4, 7, 100])
@pytest.mark.parametrize("part", [(0.0, 1.0), (0.0, 0.5), (0.5, 0.9), (0.9, 1.0)])
def test_the_stored_index_equals_the_one_in_memory(
    many: tuple[str, list[int]], max_length: int, part: tuple[float, float], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("megatron_cp.data.formats.indexed._CHUNK", 7)
    prefix, totals = many
    data = DocumentDataset(prefix, max_length, part=part)
    expected = in_memory(totals, max_length, part)
    assert [data[i]["tokens"].tolist() for i in range(len(data))] == expected
    assert data.lengths(np.arange(len(data))).tolist() == [len(tokens) for tokens in expected]
    assert data.num_tokens == sum(map(len, expected))
    first, last = (round(share * len(totals)) for share in part)
    longest = max(totals[first:last])
    with pytest.raises(DataError, match=f"document {totals.index(longest, first)} has {longest} tokens"):
        DocumentDataset(prefix, longest - 2, "refuse", part=part)


def test_the_index_is_stored_once_and_mapped(many: tuple[str, list[int]], tmp_path: Path) -> None:
    prefix, totals = many
    cache = tmp_path / "elsewhere"

    def opened(max_length: int) -> DocumentIndex:
        return open_documents(open_indexed(prefix), max_length, str(cache))

    index = opened(3)
    assert isinstance(index.targets, np.memmap) and isinstance(index.samples, np.memmap)
    assert index.targets.dtype.itemsize == 2 and len(index.targets) == len(index.samples) == len(totals) + 1
    (folder,) = cache.iterdir()
    written = {path: path.stat().st_mtime_ns for path in folder.iterdir()}
    assert opened(3).samples.tolist() == index.samples.tolist()
    assert {path: path.stat().st_mtime_ns for path in folder.iterdir()} == written
    opened(4)
    os.utime(prefix + ".idx", ns=(0, 1))
    opened(4)
    assert len(list(cache.iterdir())) == 3


def test_a_damaged_index_is_named(documents: str) -> None:
    DocumentDataset(documents, max_length=4)
    (stored,) = Path(documents).parent.glob("cache/documents-*/samples.npy")
    stored.write_bytes(stored.read_bytes()[:-1])
    with pytest.raises(DataError, match=r"samples\.npy: cannot be read .*Fix: rm -r "):
        DocumentDataset(documents, max_length=4)


def test_mock_samples_depend_on_seed_and_index_alone() -> None:
    data = MockVarlenDataset([3, 7, 1], 50, seed=1, masked_fraction=0.5)
    assert data.lengths(np.arange(3)).tolist() == [3, 7, 1]
    assert torch.equal(data[1]["tokens"], data[1]["tokens"]) and data[1]["tokens"].max() < 50
    other = MockVarlenDataset([3, 7, 1], 50, seed=2)
    assert not torch.equal(data[1]["tokens"], other[1]["tokens"]) and other[1]["loss_mask"].all()
    with pytest.raises(DataError, match="lengths of 1 or more"):
        MockVarlenDataset([3, 0], 50, seed=1)
