"""The fix of a message about data makes the data readable.

It is typed after the configuration.
"""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from megatron.core.datasets.indexed_dataset import IndexedDatasetBuilder

from megatron_cp.common.errors import DataError
from megatron_cp.config.run_config import DatasetConfig, RunConfig
from megatron_cp.data.data_path import parse_blend
from megatron_cp.data.formats.indexed import check_ids, open_indexed
from megatron_cp.data.formats.rows import read_lines
from megatron_cp.data.formats.sample_files import sample_of
from megatron_cp.data.samples.split_files import files_of_splits
from megatron_cp.data.samples.varlen import DocumentDataset
from megatron_cp.rules.remedies import parse_fix, with_overrides


@pytest.fixture
def corpus(tmp_path: Path) -> str:
    """Write three documents; the longest has 90 tokens."""
    builder = IndexedDatasetBuilder(f"{tmp_path}/corpus.bin", dtype=np.uint16)
    for length in (20, 90, 30):
        builder.add_document(np.arange(length), [length])
    builder.finalize(f"{tmp_path}/corpus.idx")
    return f"{tmp_path}/corpus"


def read_files(config: RunConfig) -> None:
    if config.dataset.kind != "mock":
        paths, _ = parse_blend(config.dataset.data_path)
        for path in paths:
            open_indexed(path)


def read_documents(config: RunConfig) -> None:
    data, evaluated = config.dataset, config.validation.eval_iters
    for part in filter(None, files_of_splits(data, [8, evaluated, evaluated])):
        DocumentDataset(part.paths[0], data.seq_length, data.too_long, part=part.share)


def look_at_ids(config: RunConfig) -> None:
    check_ids("corpus.bin", 0, 300, config.tokenizer.vocab_size)


def read_texts(config: RunConfig) -> None:
    list(read_lines(Path(str(config.dataset.data_path)), lambda row: sample_of(row, config.dataset)))


# Kind of the data, overrides, and the alternatives that can be typed unchanged.
BAD: dict[str, tuple[Callable[[RunConfig], None], dict[str, Any], list[int]]] = {
    "no path": (read_files, {"data_path": None}, [1]),
    "ends otherwise": (read_files, {"data_path": "CORPUS_text_document"}, [0]),
    "no documents": (read_documents, {"data_path": "CORPUS", "split": "98,1,1"}, [0]),
    "too long": (read_documents, {"data_path": "CORPUS", "split": "1,1,1", "too_long": "refuse"}, [0, 1, 2]),
    "ids": (look_at_ids, {}, [1]),
    "other key": (read_texts, {"data_path": "LINES"}, [0]),
    "both": (read_texts, {"data_path": "LINES", "text_key": "content"}, [0, 1]),
}


@pytest.mark.parametrize("name", BAD)
def test_every_alternative_reads_the_data(tmp_path: Path, corpus: str, name: str) -> None:
    read, settings, typed = BAD[name]
    lines = tmp_path / "lines.jsonl"
    line = {"content": "a text"} | ({"prompt": "a question", "response": "an answer"} if name == "both" else {})
    lines.write_text(json.dumps(line) + "\n")

    def filled_in(value: Any) -> Any:
        if isinstance(value, list):
            return list(map(filled_in, value))
        return value.replace("CORPUS", corpus).replace("LINES", str(lines)) if isinstance(value, str) else value

    config = RunConfig(dataset=DatasetConfig(**{"seq_length": 64} | {k: filled_in(v) for k, v in settings.items()}))
    config.validation.eval_iters, config.tokenizer.vocab_size = 2, 256
    config.dataset.kind = "jsonl" if read is read_texts else "documents" if read is read_documents else "indexed"
    with pytest.raises(DataError, match="Fix: ") as refused:
        read(config.finalize())
    fixes = parse_fix(str(refused.value).partition("Fix: ")[2])
    tried = [number for number, fix in enumerate(fixes) if fix.can_be_tried]
    assert tried == typed, fixes
    for number in tried:
        read(with_overrides(config, fixes[number].overrides))
