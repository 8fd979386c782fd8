"""The ``data:`` line against counts of documents and of loss masks.

The documents are those written. The loss masks are those of every sample.
"""

import json
import logging
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from megatron.core.datasets.indexed_dataset import IndexedDatasetBuilder

from megatron_cp.config.run_config import RunConfig, TrainConfig
from megatron_cp.data.samples.contents import Contents
from megatron_cp.data.samples.datasets import Datasets, build_datasets
from megatron_cp.data.summary import LINE, TokensUsed, log_data, planned_line
from megatron_cp.data.text.tokenizers import build_tokenizer
from tests.training_runs import tiny_config

EOD = 254
PACKED = {"model__sequence_packing_scheduler": "dp_balanced"}
LENGTHS = [40, 1, 90, 33, 64, 2, 75, 51, 120, 28]


def write(prefix: Path, lengths: list[int], end: int = EOD) -> str:
    """Write documents of these lengths that end with ``end``.

    Every third one has two sequences.
    """
    builder = IndexedDatasetBuilder(f"{prefix}.bin", dtype=np.uint16)
    rng = np.random.default_rng(len(lengths))
    for number, length in enumerate(lengths):
        tokens = np.append(rng.integers(0, EOD, length - 1), end)
        builder.add_document(tokens, [length] if number % 3 or length < 2 else [length // 2, length - length // 2])
    builder.finalize(f"{prefix}.idx")
    return str(prefix)


@pytest.fixture
def data_lines(caplog: pytest.LogCaptureFixture) -> Callable[..., tuple[str, list[str], Datasets]]:
    """Return the ``data:`` line of a run, the other lines, and the data sets.

    The run trains on ``samples`` samples.
    """

    def say(samples: int = 40, first: int = 0, **overrides: Any) -> tuple[str, list[str], Datasets]:
        given = {"train__train_iters": samples // 4, "tokenizer__eod_id": EOD, **overrides}
        config = tiny_config(**{"dataset__kind": None, "dataset__split": "1,0,0"} | given)
        tokenizer, evaluated = build_tokenizer(config.tokenizer), config.evaluation_samples
        wanted = 0 if config.train.skip_train else samples
        tested = evaluated * config.dataset.split.endswith("1")
        datasets = build_datasets(config.dataset, tokenizer, wanted, evaluated, tested)
        caplog.clear()
        with caplog.at_level(logging.INFO, "megatron_cp.data.summary"):
            taken = TokensUsed(first, samples, config.train.global_batch_size, config.validation, 4)
            log_data(config.dataset, config.tokenizer, datasets, tokenizer.eod, taken)
        lines = [record for record in caplog.records if record.name == "megatron_cp.data.summary"]
        assert [record.getMessage().startswith("data:") for record in lines] == [True] + [False] * (len(lines) - 1)
        line, mock = lines[0].getMessage(), config.dataset.kind in ("mock", "mock_documents")
        assert len(line) <= LINE and (lines[0].levelno == logging.WARNING) == mock == ("MOCK DATA" in line)
        return line, [record.getMessage() for record in lines[1:]], datasets

    return say


def one_epoch(dataset: Any) -> tuple[int, int, int]:
    """Count samples, tokens and tokens in the loss of one epoch by reading them."""
    seen: dict[bytes, tuple[int, int]] = {}
    for index in range(1000):
        sample = dataset[index]
        key = sample["tokens"].numpy().tobytes()
        if key in seen:
            break
        seen[key] = (len(sample["tokens"]), int(sample["loss_mask"].sum()))
    return len(seen), sum(n for n, _ in seen.values()), sum(n for _, n in seen.values())


def test_windows(data_lines: Any, tmp_path: Path) -> None:
    lengths = [90] * 80  # 225 windows of 32 tokens: more than a hundred, so an epoch is an index of its own
    prefix = write(tmp_path / "corpus", lengths)
    line, others, datasets = data_lines(450, dataset__data_path=prefix)
    samples, _, counted = one_epoch(datasets.train)
    assert (samples, counted) == (224, 7168) and sum(lengths) == 7200
    assert line.endswith(
        "corpus | 80 documents | 7,200 tokens, 7,168 in loss | 224 samples | run: 2.01 epochs | none held out"
    )
    assert others == []


def test_windows_of_a_share_and_a_small_file(data_lines: Any, tmp_path: Path) -> None:
    prefix = write(tmp_path / "corpus", LENGTHS)
    # Sequences are divided, and some documents have two: 12 are for training, with documents 0 to 7.
    line, others, datasets = data_lines(
        400, dataset__data_path=prefix, dataset__split="80,10,10", dataset__eod_mask_loss=True
    )
    contents = datasets.train.sources()[0]
    count = len(datasets.train._dataset.sample_index) - 1
    tokens = int(datasets.train._dataset.dataset.sequence_lengths[datasets.train._dataset.indices].sum())
    assert contents.tokens == tokens and contents.samples == pytest.approx(tokens / 32, rel=0.01)
    assert contents.samples * -(-100 * 32 // tokens) == pytest.approx(count) and count >= 99
    assert "tokens, all but EOD in loss" in line
    repeats = float(others[0].split("repeated ")[1].split()[0])
    assert repeats == pytest.approx(400 * 32 / tokens, rel=0.01)
    iterations = int(others[0].split("train.train_iters=")[1].split(",")[0])
    assert data_lines(4 * iterations, dataset__data_path=prefix, dataset__split="80,10,10")[1] == []
    assert data_lines(4 * iterations + 4, dataset__data_path=prefix, dataset__split="80,10,10")[1] != []


@pytest.mark.parametrize("longest", [32, 128])
def test_documents(data_lines: Any, tmp_path: Path, longest: int) -> None:
    prefix = write(tmp_path / "corpus", LENGTHS)
    line, _, datasets = data_lines(20, dataset__data_path=prefix, dataset__seq_length=longest, **PACKED)
    samples, targets, counted = one_epoch(datasets.train)
    assert targets == counted == sum(LENGTHS) - len(LENGTHS)
    assert f"10 documents | {sum(LENGTHS)} tokens, {counted} in loss | {samples} samples" in line
    assert f"run: {20 / samples:.3g} epochs" in line


def test_prompts(data_lines: Any, tmp_path: Path) -> None:
    rng = np.random.default_rng(0)
    pairs = [
        (rng.integers(0, EOD, p), rng.integers(0, EOD, r)) for p, r in ((5, 9), (60, 3), (1, 1), (40, 50), (1, 70))
    ]
    rows = [{"prompt": " ".join(map(str, p)), "response": " ".join(map(str, r))} for p, r in pairs]
    rows.append({"text": " ".join(map(str, range(100, 120)))})
    file = tmp_path / "chats.jsonl"
    file.write_text("\n".join(map(json.dumps, rows)))
    line, _, datasets = data_lines(8, dataset__data_path=str(file), **PACKED)
    samples, _, counted = one_epoch(datasets.train)
    tokens = sum(len(p) + len(r) + 1 for p, r in pairs) + 21
    assert counted == sum(len(r) + 1 for _, r in pairs) + 20
    assert f"6 documents | {tokens} tokens, {counted} in loss | {samples} samples" in line


def test_shares_of_documents(data_lines: Any, tmp_path: Path) -> None:
    prefix = write(tmp_path / "corpus", LENGTHS)
    given = {"dataset__data_path": prefix, "dataset__split": "70,20,10", **PACKED}
    held_out, _, _ = data_lines(8, **given)
    assert held_out.endswith("| 30% held out, unused")
    line, others, datasets = data_lines(8, **given | {"dataset__split": "8,1,1", "validation__eval_iters": 2})
    assert line.endswith("| validation 10%, test 10%")
    assert f"8 documents | {sum(LENGTHS[:8])} tokens" in line
    samples = [sum(source.samples for source in part.sources()) for part in (datasets.valid, datasets.test)]
    assert samples == [4, 1]  # of 120 and 28 tokens
    assert (
        "uses 8 validation samples and repeats them, as there are only 4. Fix: validation.eval_iters=1, or" in others[0]
    )
    once = "validation.full_validation=true validation.eval_iters=0 (each sample once)"
    assert f"uses 8 test samples and repeats them, as there are only 1. Fix: {once}, or more" in others[1]
    line, others, _ = data_lines(8, **given | {"dataset__split": "8,1,1", "validation__full_validation": True})
    assert line.endswith("| validation 10%, test 10%") and not others


def test_files_of_their_own(data_lines: Any, tmp_path: Path) -> None:
    paths = {f"dataset__{n}data_path": write(tmp_path / f"{n}c", LENGTHS) for n in ("", "valid_")}
    line, _, _ = data_lines(8, **paths, **PACKED, validation__eval_iters=1)
    assert line.endswith("| validation has its own files") and f"{sum(LENGTHS)} tokens" in line


@pytest.mark.parametrize("packed", [PACKED, {}], ids=["documents", "windows"])
def test_a_blend(data_lines: Any, tmp_path: Path, packed: dict[str, Any]) -> None:
    large, small = write(tmp_path / "large", LENGTHS * 20), write(tmp_path / "small", LENGTHS * 2)
    given = {"dataset__data_path": [0.5, large, 0.5, small], "dataset__seq_length": 16, **packed}
    line, others, datasets = data_lines(1000, **given)
    source = [one_epoch_of(path, data_lines, **packed) for path in (large, small)]
    dealt = np.bincount([_of_small(datasets.train, i, small) for i in range(1000)], minlength=2)
    epochs = [n / s.samples for n, s in zip(dealt, source, strict=True)]
    assert "arge and 1 more | 220 documents" in line
    low, high = line.split("run: ")[1].split(" epochs")[0].split(" to ")
    assert float(low) == pytest.approx(epochs[0], rel=0.02) and float(high) == pytest.approx(epochs[1], rel=0.02)
    assert [text.split(":")[0] for text in others[:2]] == ["file 1 of 2", "file 2 of 2"]
    assert "small | 20 documents | 1,008 tokens" in others[0] and "large | 200 documents | 10,080 tokens" in others[1]
    assert f"dataset.data_path={small}: is repeated {high} times" in others[2] and len(others) == 3


def one_epoch_of(path: str, data_lines: Any, **packed: Any) -> Contents:
    return data_lines(8, dataset__data_path=path, dataset__seq_length=16, **packed)[2].train.sources()[0]


def _of_small(dataset: Any, index: int, small: str) -> int:
    """Return 1 if a sample is of the second file, as the data set itself deals them."""
    if hasattr(dataset, "_blend_order"):
        return int(dataset._blend_order(index)[0])
    return int(dataset._dataset.dataset_index[index])


def test_mock_samples(data_lines: Any) -> None:
    line, others, datasets = data_lines(8, dataset__mock_masked_fraction=0.0, dataset__mock_num_samples=50)
    assert one_epoch(datasets.train) == (50, 1600, 1600)
    assert line == (
        "data: MOCK DATA (random tokens) | 1,600 tokens, all in loss | 50 samples | run: 0.16 epochs | "
        "real: dataset.kind=null dataset.data_path=PREFIX"
    )
    assert data_lines(4000, dataset__mock_num_samples=50)[1] == others == []  # repeats are no problem


@pytest.mark.parametrize("masked", [0.4, 0.8])
def test_masked_mock_samples(data_lines: Any, masked: float, tmp_path: Path) -> None:
    lengths = tmp_path / "lengths.txt"
    lengths.write_text("\n".join(["300", "500", "31"]))
    mocks: list[dict[str, Any]] = [{}, {"dataset__mock_lengths": str(lengths), **PACKED}]
    for overrides in mocks:
        given = {"dataset__mock_masked_fraction": masked, "dataset__seq_length": 512, "dataset__mock_num_samples": 900}
        line, _, datasets = data_lines(8, **given | overrides)
        samples, tokens, counted = one_epoch(datasets.train)
        (source,) = datasets.train.sources()
        assert (source.samples, source.tokens) == (samples, tokens) and ", ~" in line
        assert source.loss_tokens == pytest.approx(counted, rel=0.05)
    assert "(random, …lengths.txt) | 249,300 tokens, ~" in line


def test_lengths_that_are_cut(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    (tmp_path / "lengths.txt").write_text("300\n31\n65\n64")
    caplog.set_level(logging.INFO, "megatron_cp.data.samples.mock")
    config = tiny_config(
        dataset__kind=None, dataset__mock_lengths=f"{tmp_path}/lengths.txt", dataset__seq_length=64, **PACKED
    )
    build_datasets(config.dataset, build_tokenizer(config.tokenizer), 8)
    assert "lengths.txt: 5000 of 10000 cut to dataset.seq_length" in caplog.text


def test_a_resumed_run_and_one_that_is_done(data_lines: Any, tmp_path: Path) -> None:
    given = {"dataset__data_path": write(tmp_path / "corpus", LENGTHS), **PACKED, "dataset__seq_length": 128}
    assert "run: 2.22 epochs |" in data_lines(20, **given)[0] and data_lines(20, **given)[1] == []
    line, others, _ = data_lines(60, first=20, **given)
    assert "run: 4.44 of 6.67 epochs |" in line
    assert "is repeated 6.67 times" in others[0]
    assert "run: 0 of 2.22 epochs |" in data_lines(20, first=20, **given)[0]


def test_a_run_that_only_evaluates(data_lines: Any, tmp_path: Path) -> None:
    given = {"dataset__data_path": write(tmp_path / "corpus", LENGTHS * 3), "dataset__split": "5,5,0", **PACKED}
    line, _, _ = data_lines(20, **given, train__skip_train=True, validation__eval_iters=2)
    assert "15 documents" in line and "eval: 0.267 epochs" in line and "validation 50%, test 0%" in line


def test_another_tokenizers_files(data_lines: Any, tmp_path: Path) -> None:
    ours, other = write(tmp_path / "ours", LENGTHS), write(tmp_path / "other", LENGTHS, end=3)
    for kind in (PACKED, {}):
        assert data_lines(8, dataset__data_path=ours, **kind)[1] == []
        (warning,) = data_lines(8, dataset__data_path=other, **kind)[1]
        assert "other: none of the first 8 documents ends with token 254, the end-of-document token of Null" in warning
        assert data_lines(8, dataset__data_path=other, tokenizer__eod_id=None, **kind)[1] == []  # it is not known


def test_the_longest_line(caplog: pytest.LogCaptureFixture) -> None:
    class Large:
        files = 9

        def sources(self) -> list[Contents]:
            return [
                Contents("/" + "x" * 500, 123456789012, 234567890123, 15678901234567, 15678901234560, 1912345678)
            ] * self.files

        def taken(self, count: int) -> list[float]:
            return [count * (1 + i / 7) for i in range(self.files)]

    config = tiny_config(validation__eval_iters=2, dataset__kind="documents", dataset__data_path="x")
    large: Any = Large()
    taken = TokensUsed(99999999, 2345678912, 4, config.validation, 4)
    with caplog.at_level(logging.INFO, "megatron_cp.data.summary"):
        log_data(config.dataset, config.tokenizer, Datasets(large, large, large), 1, taken)
    (line,) = [r.getMessage() for r in caplog.records if r.getMessage().startswith("data:")]
    assert "xxxx and 8 more | " in line and len(line) <= LINE, (len(line), line)
    config.dataset.kind, config.dataset.mock_lengths = "mock_documents", "some/long/path/of/lengths.txt"
    large.files = 1
    for parts in (Datasets(large, large, large), Datasets(None, large, large)):
        log_data(config.dataset, config.tokenizer, parts, 1, taken)
        line = caplog.records[-1].getMessage()
        assert line.startswith("data: MOCK DATA") and len(line) <= LINE, (len(line), line)


def test_a_dry_run_names_the_data_without_opening_it() -> None:
    config: RunConfig = tiny_config()
    assert planned_line(config.dataset, TrainConfig(10)) == (
        "data: MOCK DATA (random tokens) | real: dataset.kind=null dataset.data_path=PREFIX"
    )
    config.dataset.kind, config.dataset.data_path = "documents", "no/such/file"
    assert planned_line(config.dataset, TrainConfig(10)).startswith(
        "data: no/such/file (documents) | 80 training samples"
    )
    assert " | 2.5 epochs: train.train_iters from the data | " in planned_line(
        config.dataset, TrainConfig(None, train_epochs=2.5)
    )
