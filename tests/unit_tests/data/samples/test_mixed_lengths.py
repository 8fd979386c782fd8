"""A mixture of lengths: shares of tokens, epochs of each class, order, and errors."""

import json
import logging
from collections import Counter
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from megatron.core.datasets.indexed_dataset import IndexedDatasetBuilder

from megatron_cp.common.errors import DataError
from megatron_cp.config.run_config import RunConfig
from megatron_cp.data.length_mixture import LengthMixture, parse_mixture
from megatron_cp.data.samples.datasets import build_datasets
from megatron_cp.data.summary import TokensUsed, log_data
from megatron_cp.data.text.tokenizers import ByteLevelTokenizer, NullTokenizer
from megatron_cp.preview.lengths import as_lines, length_rows

NULL = NullTokenizer(60000)


def write(prefix: Path, count: int, shift: int, seed: int = 0) -> str:
    """Write documents of a lognormal length, some with one token.

    Every token is the document's number plus ``shift``.
    """
    builder = IndexedDatasetBuilder(f"{prefix}.bin", dtype=np.uint16)
    rng = np.random.default_rng(seed)
    for number, length in enumerate(np.clip(rng.lognormal(4, 1, count), 1, 900).astype(int)):
        builder.add_document(np.full(length, number + shift), [length])
    builder.finalize(f"{prefix}.idx")
    return str(prefix)


@pytest.fixture
def config(tmp_path: Path) -> RunConfig:
    config = RunConfig()
    config.model.sequence_packing_scheduler = "dp_balanced"
    config.dataset.data_path = write(tmp_path / "a", 600, 0)
    config.dataset.seq_length, config.dataset.split = 256, "1,0,0"  # documents of up to 900 tokens are split
    config.dataset.length_mixture = [0.2, 50, 0.3, 256, 0.5]
    return config.finalize()


def class_of(length: int) -> int:
    return int(np.searchsorted([50, 256], length, side="right"))


def test_shares_of_tokens_and_epochs_of_each_class(config: RunConfig) -> None:
    plain = replace(config.dataset, length_mixture=None)
    whole: Any = build_datasets(plain, NULL, 1).train
    lengths: Counter[int] = Counter()
    for i, length in enumerate(whole.lengths(np.arange(len(whole._sources[0])))):
        lengths[whole.origin(i).documents[0]] += length
    mixed: Any = build_datasets(config.dataset, NULL, 4000).train
    seen: list[list[tuple[int, int]]] = [[], [], []]
    tokens = np.zeros(3)
    for i, length in enumerate(mixed.lengths(np.arange(4000))):
        name, (document,), start = mixed.origin(i)
        assert name == config.dataset.data_path
        seen[class_of(lengths[document])].append((document, start))
        tokens[class_of(lengths[document])] += length
        if i < 100:
            assert mixed[i]["tokens"].tolist() == [document] * length
    assert tokens / tokens.sum() == pytest.approx([0.2, 0.3, 0.5], abs=0.01)
    # In an epoch of a class each of its samples comes once, and a class has all documents of its lengths.
    contents = mixed.sources()
    assert [each.documents for each in contents] == [sum(class_of(n) == k for n in lengths.values()) for k in range(3)]
    assert sum(each.tokens for each in contents) == sum(lengths.values())
    for each, drawn in zip(contents, seen, strict=True):
        size = int(each.samples)
        assert len(drawn) > 2 * size and len(set(drawn[:size])) == size
        assert sorted(drawn[:size]) == sorted(drawn[size : 2 * size]) and drawn[:size] != drawn[size : 2 * size]
    rows = length_rows(mixed, 4000)
    assert [row.share_drawn for row in rows] == pytest.approx([0.2, 0.3, 0.5], abs=0.002)
    assert [row.epochs * each.samples for row, each in zip(rows, contents, strict=True)] == pytest.approx(
        [len(drawn) for drawn in seen]
    )
    assert list(as_lines(rows))[1].startswith("below 50 tokens")


def test_the_order_is_a_function_of_the_sample_number(config: RunConfig, tmp_path: Path) -> None:
    first, longer = (build_datasets(config.dataset, NULL, count).train for count in (50, 5000))
    numbers = [first.origin(i) for i in range(300)]  # type: ignore[union-attr]
    assert numbers == [longer.origin(i) for i in range(300)]  # type: ignore[union-attr]
    config.dataset.random_seed += 1
    other = build_datasets(config.dataset, NULL, 50).train
    assert [other.origin(i) for i in range(300)] != numbers  # type: ignore[union-attr]
    (folder,) = (tmp_path / "cache").glob("lengths-*")
    assert len(list(folder.iterdir())) == 9, "one index, whatever the seed and the length of the run"


def test_validation_data_have_their_own_lengths(config: RunConfig) -> None:
    config.dataset.split = "80,20,0"
    train, valid, _ = build_datasets(config.dataset, NULL, 100, 100)
    assert {train.origin(i).documents[0] for i in range(2000)} <= set(range(480))  # type: ignore[union-attr]
    (own,) = valid.sources()  # type: ignore[union-attr]
    assert own.documents == 120 and own.lengths == ""
    trained = train.sources()  # type: ignore[union-attr]
    assert sum(each.documents for each in trained) < 480 and sum(each.all_documents for each in trained) < 600


def test_files_have_their_weights_within_a_class(config: RunConfig, tmp_path: Path) -> None:
    other = write(tmp_path / "b", 200, 1000, seed=5)
    config.dataset.data_path = [0.6, str(config.dataset.data_path), 0.4, other]
    stream: Any = build_datasets(config.dataset, NULL, 10).train
    natural, weights = {}, {config.dataset.data_path[1]: 0.6, other: 0.4}
    for name in weights:
        natural[name] = [each.tokens for each in stream.sources() if each.name == name]
    drawn = np.zeros((2, 3))
    for source, taken in zip(stream.sources(), stream.taken(65536), strict=True):
        place = (
            list(weights).index(source.name),
            ["below 50 tokens", "50 to 255 tokens", "256 tokens or more"].index(source.lengths),
        )
        drawn[place] = taken * source.tokens / source.samples
    assert drawn.sum(0) / drawn.sum() == pytest.approx([0.2, 0.3, 0.5], abs=0.001)
    wanted = np.array([[weights[name] * n / sum(tokens) for n in tokens] for name, tokens in natural.items()])
    assert drawn / drawn.sum(0) == pytest.approx(wanted / wanted.sum(0), abs=0.001)


def test_mock_documents_and_prompts(config: RunConfig, tmp_path: Path) -> None:
    """The counts of tokens in the loss must be those of all masks."""
    rows = [{"prompt": "p" * (i % 9), "response": "r" * (5 + 3 * i)} for i in range(60)] + [{"text": "t" * 70}]
    (tmp_path / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    config.dataset.data_path, config.dataset.kind = str(tmp_path / "rows.jsonl"), "jsonl"
    config.dataset.length_mixture, config.dataset.seq_length = [1, 64, 3], 100
    stream: Any = build_datasets(config.dataset, ByteLevelTokenizer(), 10).train
    counted: dict[tuple[int, int], int] = {}
    for i in range(1000):
        counted[stream.origin(i)[1:]] = int(stream[i]["loss_mask"].sum())
    assert sum(counted.values()) == sum(each.loss_tokens for each in stream.sources())
    assert len(counted) == sum(each.samples for each in stream.sources())
    config.dataset.data_path, config.dataset.kind = None, "mock_documents"
    mock: Any = build_datasets(config.dataset, NULL, 10).train
    lengths = mock.lengths(np.arange(20000))
    assert lengths[lengths >= 64].sum() / lengths.sum() == pytest.approx(0.75, abs=0.01)
    assert len(mock[7]["tokens"]) == lengths[7]


def test_the_log_counts_epochs_of_classes(config: RunConfig, caplog: pytest.LogCaptureFixture) -> None:
    config.dataset.length_mixture = [0.01, 50, 0.04, 256, 0.95]
    datasets = build_datasets(config.dataset, NULL, 3000)
    with caplog.at_level(logging.INFO, "megatron_cp.data.summary"):
        log_data(config.dataset, config.tokenizer, datasets, NULL.eod, TokensUsed(0, 3000, 10, config.validation, 0))
    first, *classes, warning, other = [record.getMessage() for record in caplog.records]
    assert "a | " in first and "more" not in first and len(classes) == 3
    (row,) = (row for row in length_rows(datasets.train, 3000) if row.lengths.startswith("256"))  # type: ignore[arg-type]
    assert row.epochs > 4 and f"95% of the run's | {row.epochs:.3g} epochs" in classes[0]
    assert f", 256 tokens or more' is repeated {row.epochs:.3g} times by this run" in warning
    assert "a smaller share in dataset.length_mixture" in warning
    assert "ends with token" in other, "one line a file, not one a class"


def test_an_empty_class(config: RunConfig) -> None:
    config.dataset.length_mixture = [1, 50, 1, 5000, 1]
    with pytest.raises(
        DataError, match=r"no document for training has 5,000 tokens or more \(below 50 tokens: \d+, 50 to"
    ):
        build_datasets(config.dataset, NULL, 10)


def test_forms_of_a_mixture() -> None:
    assert parse_mixture([2, 8192, 6]) == LengthMixture((8192,), (0.25, 0.75))
    for given, message in {
        (): "begins and ends with a share",
        (1,): "begins and ends with a share",
        (0.5, 8192): "begins and ends with a share",
        (0.5, 0.5, 0.5): "whole number of tokens",
        (1, 50, 1, 50, 1): "lengths must rise",
        (1, 50, -1): "share -1 must be above zero",
        (1, 50, float("nan")): "must be above zero",
    }.items():
        with pytest.raises(ValueError, match=message):
            parse_mixture(given)
