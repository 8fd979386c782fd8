"""Packed runs from the command line: output, resumption and end.

The tests check what the runs write, how they are resumed, and what ends them.
"""

import contextlib
import io
import json
import os
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from megatron_cp.cli import schedule as schedule_cli
from megatron_cp.cli.data import preview as preview_cli
from megatron_cp.common.errors import DataError
from megatron_cp.data.samples.varlen import MockVarlenDataset
from megatron_cp.dynamic_cp.analysis.recorded import read_step
from megatron_cp.dynamic_cp.runtime.iterator import DynamicBatches
from megatron_cp.planner import scheduling
from tests.packed_runs import lengths_file

PACKED = [
    "dataset.kind=mock_documents",
    "dataset.seq_length=128",
    "train.global_batch_size=10",
    "model.dynamic_context_parallel=true",
    "model.max_seqlen_per_dp_cp_rank=64",
]


def lines_of(folder: Path, name: str = "metrics.jsonl") -> list[dict[str, Any]]:
    lines = [json.loads(line) for line in (folder / name).read_text().splitlines()]
    return [line for line in lines if "lm_loss" in line or "lengths" in line]


def losses(folder: Path) -> list[tuple[float, float]]:
    return [(line["lm_loss"], line["grad_norm"]) for line in lines_of(folder)]


def schedules(folder: Path) -> list[Any]:
    return [line["microbatches"] for line in lines_of(folder, "schedules.jsonl")]


@pytest.fixture
def packed(cli: Any, tmp_path: Path) -> Any:
    lengths = f"dataset.mock_lengths={lengths_file(tmp_path)}"
    return lambda *arguments, **more: cli(*PACKED, lengths, *arguments, **more)


def shown_by(command: Any, *arguments: str) -> tuple[int, str]:
    """Return exit code and output.

    pytest's own capturing would replace the streams of forked ranks.
    """
    text = io.StringIO()
    with contextlib.redirect_stdout(text), contextlib.redirect_stderr(text):
        code = command.main(list(arguments))
    return code, text.getvalue()


def test_what_a_run_writes(packed: Any, tmp_path: Path) -> None:
    run = tmp_path / "run"
    evaluation = ["validation.eval_iters=1", "validation.eval_interval=2", "logger.tensorboard=true"]
    code, text = packed("train.train_iters=3", *evaluation)
    assert code == 0, text
    assert "DYNAMIC_CONTEXT_PARALLEL_GROUPS 2:[0-1] 1:2 ranks alone (created before their first use)" in text
    assert text.count("validation loss") == 2
    lines, recorded = lines_of(run), lines_of(run, "schedules.jsonl")
    assert [line["iteration"] for line in lines] == [line["iteration"] for line in recorded] == [1, 2, 3]
    for line, step in zip(lines, recorded, strict=True):
        assert sorted(i for groups in step["microbatches"] for *_, ids in groups for i in ids) == list(range(10))
        sizes = [size for groups in step["microbatches"] for _, size, _ in groups]
        assert line["cp_sizes"] == {str(size): sizes.count(size) for size in sorted(set(sizes))}
        assert step["context_parallel_size"] == 2 and step["pipeline_size"] == step["sync_ranks"] == 1
        assert line["num_microbatches"] == len(step["microbatches"])
        assert line["imbalance"] >= 1 and 0 < line["padding_fraction"] < 1 and line["schedule_time_s"] >= 0
    assert lines[-1]["consumed_tokens"] == sum(sum(step["lengths"]) for step in recorded)
    assert list((run / "tensorboard").iterdir())
    # The run is drawn as it was.
    picture = str(tmp_path / "step.svg")
    code, shown = shown_by(schedule_cli, "--from-run", str(run), "--iteration", "2", "--plot", picture)
    assert code == 0 and "the run, iteration 2" in shown and f"{lines[1]['step_time_s']:.3f} s" in shown, shown
    # Imbalance is one quantity, in metrics.jsonl, of which report shows the median, as in schedule.
    code, shown = shown_by(schedule_cli, "--from-run", str(run), "--iteration", "2", "--json")
    assert code == 0 and json.loads(shown)["run"]["imbalance"] == pytest.approx(lines[1]["imbalance"])
    assert read_step(run).iteration == 3 and list(read_step(run, 2).lengths) == recorded[1]["lengths"]
    code, shown = shown_by(schedule_cli, "--from-run", str(run), "--iteration", "9")
    assert code == 2 and "has no iteration 9, only 1 to 3" in shown
    # A preview of the run shows the same packs.
    code, shown = shown_by(preview_cli, str(run), "--step", "2", "--world-size", "2", "--json")
    previewed = json.loads(shown[shown.index("{") :])["microbatches"]
    packs = [[[g["ranks"][0], g["cp_size"], [i - 10 for i in g["samples"]]] for g in groups] for groups in previewed]
    assert code == 0 and packs == recorded[1]["microbatches"]


def test_a_run_has_few_packed_shapes(packed: Any, tmp_path: Path) -> None:
    """The run logs its buckets, records them, and a preview has the same."""
    few = "model.packed_shape_buckets=3"
    code, text = packed("train.train_iters=2", few)
    assert code == 0 and text.count("packed shapes: 3 numbers of tokens a rank (") == 1, text
    lines, recorded = lines_of(tmp_path / "run"), lines_of(tmp_path / "run", "schedules.jsonl")
    buckets = recorded[0]["token_buckets"]
    assert len(buckets) == 3 and buckets[-1] == 64 and recorded[1]["token_buckets"] == buckets
    code, shown = shown_by(schedule_cli, "--from-run", str(tmp_path / "run"), "--json")
    assert code == 0 and json.loads(shown)["run"]["padding"] == pytest.approx(lines[-1]["padding_fraction"])
    code, shown = shown_by(preview_cli, str(tmp_path / "run"), "--step", "2", "--world-size", "2", "--json")
    groups = [g for groups in json.loads(shown[shown.index("{") :])["microbatches"] for g in groups]
    padded = sum(group["padding"] for group in groups)
    assert code == 0 and padded / sum(recorded[1]["lengths"]) == pytest.approx(lines[-1]["padding_fraction"])


SLOW_WAYS = ["packed_placement=balanced", "packed_shape_buckets=3"]


@pytest.mark.parametrize(
    "way", ["packed_placement=zigzag", *(pytest.param(way, marks=pytest.mark.slow) for way in SLOW_WAYS)]
)
def test_a_resumed_run_is_the_undisturbed_run(packed: Any, tmp_path: Path, way: str) -> None:
    more = ["train.train_iters=4", "model.hidden_dropout=0.1", f"model.{way}"]
    assert packed(*more)[0] == 0
    (tmp_path / "run").rename(tmp_path / "first")
    assert packed(*more, "train.exit_interval=2")[0] == 0
    code, text = packed(*more)
    assert code == 0 and "resumed from iteration 2" in text, text
    assert "packed shapes:" not in text, "the checkpoint has them"
    assert losses(tmp_path / "run") == losses(tmp_path / "first")
    assert schedules(tmp_path / "run") == schedules(tmp_path / "first")


def test_a_run_resumed_with_a_smaller_batch_takes_the_samples_that_follow(packed: Any, tmp_path: Path) -> None:
    """A smaller count of trained samples is no reason to begin again.

    Four iterations of four samples are fewer than the two of ten that were consumed.
    """
    more = ["model.context_parallel_size=1", "model.max_seqlen_per_dp_cp_rank=128"]
    more += ["scheduler.override_opt_param_scheduler=true"]
    assert packed(*more, "train.train_iters=3", "train.exit_interval=2", ranks=1)[0] == 0
    code, text = packed(*more, "train.train_iters=4", "train.global_batch_size=4", ranks=1)
    assert code == 0 and "resumed from iteration 2" in text, text
    resumed = [line["lengths"] for line in lines_of(tmp_path / "run", "schedules.jsonl")][2:]
    (tmp_path / "run").rename(tmp_path / "first")
    code, text = packed(*more, "train.train_iters=7", "train.global_batch_size=4", ranks=1)
    assert code == 0, text
    assert resumed == [line["lengths"] for line in lines_of(tmp_path / "run", "schedules.jsonl")][5:]


def test_a_resumed_calibrated_run_keeps_its_cost_model(packed: Any, tmp_path: Path) -> None:
    """The next step's schedule was made with the model from before the checkpoint."""
    more = ["train.train_iters=8", "model.dynamic_context_parallel_calibration_iters=5", "checkpoint.save_interval=5"]
    code, text = packed(*more)
    assert code == 0 and "cost model calibrated" in text, text
    run, first = tmp_path / "run", tmp_path / "first"
    shutil.copytree(run, first)
    costs = [line["cost"] for line in lines_of(run, "schedules.jsonl")]
    assert costs[0] == costs[5] != costs[6] == costs[7]
    shutil.rmtree(run / "iter_0000008")
    (run / "latest_checkpointed_iteration.txt").write_text("5")
    code, text = packed(*more)
    assert code == 0 and "resumed from iteration 5" in text and "model calibrated" not in text, text
    assert losses(run) == losses(first) and schedules(run) == schedules(first)
    assert [line["cost"] for line in lines_of(run, "schedules.jsonl")] == costs


def test_fewer_samples_than_ranks(packed: Any) -> None:
    code, text = packed("train.global_batch_size=1", "model.max_seqlen_per_dp_cp_rank=128", ranks=2)
    assert code == 0, text


def on_rank_one(change: Callable[[], None]) -> None:
    if os.environ["RANK"] == "1":
        change()


def change_samples(how: Callable[[dict], dict]) -> None:
    original = MockVarlenDataset.__getitem__
    MockVarlenDataset.__getitem__ = lambda self, index: how(original(self, index))  # type: ignore[method-assign]


def too_long() -> None:
    MockVarlenDataset.lengths = lambda self, indices: np.full(len(indices), 129)  # type: ignore[method-assign]


def empty() -> None:
    MockVarlenDataset.lengths = lambda self, indices: np.zeros_like(indices)  # type: ignore[method-assign]


def fewer_labels() -> None:
    change_samples(lambda sample: sample | {"labels": sample["labels"][:-1]})


def other_samples() -> None:
    change_samples(lambda sample: sample | {"loss_mask": 1 - sample["loss_mask"]})


def weighed_tokens() -> None:
    change_samples(lambda sample: sample | {"loss_mask": torch.full_like(sample["loss_mask"], 0.5)})


def unreadable() -> None:
    def fail(sample: dict) -> dict:
        raise OSError("corpus.bin: Input/output error")

    change_samples(fail)


def another_tokenizers() -> None:
    def fail(sample: dict) -> dict:
        raise DataError("corpus: holds token 502, but the tokenizer's ids are 0 to 256.")

    change_samples(fail)


def other_lengths() -> None:
    original = MockVarlenDataset.lengths
    MockVarlenDataset.lengths = lambda self, indices: np.minimum(90, original(self, indices))  # type: ignore[method-assign]
    change_samples(lambda sample: {key: value[:90] for key, value in sample.items()})


def another_schedule() -> None:
    original = scheduling.schedule
    scheduling.schedule = lambda *args, **kwargs: original(*args, **kwargs | {"min_cp_size": 2})


def fits_nowhere() -> None:
    original = scheduling.schedule
    scheduling.schedule = lambda lengths, ranks, limit, **more: original(lengths, ranks, 32, **more)


def pack_of_another_length() -> None:
    original = DynamicBatches._read

    def read(self: Any, *args: Any) -> Any:
        pack = original(self, *args)
        return type(pack)(pack.tensors, pack.starts, (*pack.padded_starts[:-1], pack.padded_starts[-1] + 1), 1)

    DynamicBatches._read = read  # type: ignore[method-assign]


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (too_long, r"rank 1: sample 0 of the data set has 129 tokens, more than dataset.seq_length=128"),
        pytest.param(empty, "rank 1: sample 0 of the data set is empty", marks=pytest.mark.slow),
        (fewer_labels, "labels, but 128 are required"),
        pytest.param(unreadable, "rank 1: corpus.bin: Input/output error", marks=pytest.mark.slow),
        pytest.param(another_tokenizers, "rank 1: corpus: holds token 502", marks=pytest.mark.slow),
        (weighed_tokens, "of the data set: the loss mask has values other than 0 and 1"),
        (other_samples, "ranks [1] and rank 0 read different tokens, labels or loss masks"),
        pytest.param(
            other_lengths,
            "ranks [1] and rank 0 have different sample lengths or schedules",
            marks=pytest.mark.slow,
        ),
        (another_schedule, "ranks [1] and rank 0 have different sample lengths or schedules"),
        pytest.param(
            fits_nowhere,
            "tokens does not fit: 2 ranks of max_seqlen_per_rank=32 hold 64 tokens",
            marks=pytest.mark.slow,
        ),
        pytest.param(pack_of_another_length, "rank 1: error B9: tokens: holds", marks=pytest.mark.slow),
    ],
)
def test_one_ranks_fault_ends_all_ranks(packed: Any, change: Callable[[], None], message: str) -> None:
    code, text = packed(before=lambda: on_rank_one(change))
    expected = 2 if change is another_tokenizers else 1
    assert code == expected and text.count("the batches of step 1 cannot be used.") == 1 and message in text, text
