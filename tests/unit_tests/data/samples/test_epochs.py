"""An epoch takes every sample of the training part once, of every kind of data."""

import json
from pathlib import Path
from typing import Any

import pytest

from megatron_cp.config.run_config import RunConfig, TrainConfig
from megatron_cp.data.samples.datasets import build_datasets
from megatron_cp.data.samples.epochs import iterations_of_epochs
from megatron_cp.data.text.tokenizers import build_tokenizer
from tests.training_runs import tiny_config
from tests.unit_tests.data.test_summary import LENGTHS, PACKED, write

LONGER = 30 * LENGTHS


def config_of(folder: Path, **overrides: Any) -> RunConfig:
    for name, lengths in (("a", LENGTHS), ("b", LONGER)):
        if not (folder / f"{name}.idx").exists():
            write(folder / name, lengths)
    (folder / "c.jsonl").write_text("".join(json.dumps({"text": f"{n} {n}"}) + "\n" for n in range(1, 12)))
    given = {"dataset__kind": None, "dataset__split": "1,0,0", **overrides}
    path = given.get("dataset__data_path")
    if isinstance(path, str):
        given["dataset__data_path"] = str(folder / path)
    if isinstance(path, list):
        given["dataset__data_path"] = [str(folder / each) if isinstance(each, str) else each for each in path]
    return tiny_config(**given)


def windows(lengths: list[int], part: slice = slice(None)) -> int:
    """Count windows of 32 tokens in the documents; each needs one token more."""
    return (sum(lengths[part]) - 1) // 32


def documents(lengths: list[int]) -> int:
    """Count samples of at most 32 targets, each of one document.

    A single token has no target.
    """
    return sum(-(-(length - 1) // 32) for length in lengths)


@pytest.mark.parametrize(
    ("overrides", "samples"),
    [
        ({"dataset__mock_num_samples": 30}, 30),
        (PACKED | {"dataset__mock_num_samples": 30}, 30),
        ({"dataset__data_path": "b"}, windows(LONGER)),
        ({"dataset__data_path": "b", "dataset__split": "80,20,0"}, windows(LONGER, slice(240))),
        ({"dataset__data_path": ["a", "b"]}, windows(LONGER) + windows(LENGTHS)),
        (PACKED | {"dataset__data_path": "a"}, documents(LENGTHS)),
        (
            PACKED | {"dataset__data_path": [1, "a", 9, "b"]},
            documents(LENGTHS) + documents(LONGER),
        ),  # whatever the weights
        (PACKED | {"dataset__data_path": "c.jsonl"}, 11),
    ],
)
def test_an_epoch_has_every_sample(tmp_path: Path, overrides: dict[str, Any], samples: int) -> None:
    config = config_of(tmp_path, **overrides)
    tokenizer = build_tokenizer(config.tokenizer)

    def iterations(epochs: float, batch: int = 1) -> int:
        train = TrainConfig(None, train_epochs=epochs, global_batch_size=batch)
        return iterations_of_epochs(train, config.dataset, tokenizer)

    counts = [iterations(1), iterations(2)]
    # Windows of fixed length continue into the next epoch of a small file, so one less is lost.
    assert counts[0] == pytest.approx(samples, abs=1) and counts[1] == pytest.approx(2 * samples, abs=2)
    assert iterations(2, 4) == -(-counts[1] // 4)
    if overrides.get("dataset__data_path") in ("a", "b", "c.jsonl"):  # each sample once
        train: Any = build_datasets(config.dataset, tokenizer, counts[0]).train
        assert len({tuple(train[index]["tokens"].tolist()) for index in range(samples)}) == samples
