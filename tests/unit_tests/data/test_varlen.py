"""Variable-length samples: one a document, labels never from the next one."""

from pathlib import Path

import numpy as np
import pytest
import torch

from megatron_cp.data.varlen import DocumentDataset, MockVarlenDataset
from megatron_cp.errors import DataError


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


def test_mock_samples_depend_on_seed_and_index_alone() -> None:
    data = MockVarlenDataset([3, 7, 1], 50, seed=1, masked_fraction=0.5)
    assert data.lengths(np.arange(3)).tolist() == [3, 7, 1]
    assert torch.equal(data[1]["tokens"], data[1]["tokens"]) and data[1]["tokens"].max() < 50
    other = MockVarlenDataset([3, 7, 1], 50, seed=2)
    assert not torch.equal(data[1]["tokens"], other[1]["tokens"]) and other[1]["loss_mask"].all()
    with pytest.raises(DataError, match="lengths of 1 or more"):
        MockVarlenDataset([3, 0], 50, seed=1)
