"""Whole runs from the command line: output, evaluation, stopping and resuming."""

import json
import os
import shutil
import signal
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from megatron_cp.attention.modules.native import ContextParallelAttention
from megatron_cp.data.samples.datasets import MockDataset

METRICS = {
    "iteration",
    "consumed_samples",
    "consumed_tokens",
    "consumed_loss_tokens",
    "loss_tokens",
    "lm_loss",
    "grad_norm",
    "learning_rate",
    "step_time_s",
    "tokens_per_s",
    "tokens_per_s_per_device",
    "tflops_per_device",
    "num_microbatches",
    "skipped",
    "loss_scale",
    "timers_s",
    "peak_memory_bytes",
}


def metrics(folder: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (folder / "run" / "metrics.jsonl").read_text().splitlines()]


def test_metrics_and_checkpoints_of_a_run(cli: Any, tmp_path: Path) -> None:
    code, text = cli("train.train_iters=5", "checkpoint.save_interval=2", "logger.tensorboard=true")
    assert code == 0, text
    lines = metrics(tmp_path)
    assert [line["iteration"] for line in lines] == [1, 2, 3, 4, 5]
    assert all(set(line) >= METRICS for line in lines)
    assert lines[-1]["consumed_samples"] == 10 and lines[-1]["consumed_tokens"] == 320
    assert sorted(path.name for path in (tmp_path / "run").glob("iter_*")) == [
        "iter_0000002",
        "iter_0000004",
        "iter_0000005",
    ]
    assert list((tmp_path / "run" / "tensorboard").iterdir())


def test_phases_and_memory_of_a_run(cli: Any, tmp_path: Path) -> None:
    settings = ["checkpoint.save_interval=3", "validation.eval_interval=2", "validation.eval_iters=1"]
    code, text = cli("train.train_iters=5", "logger.log_interval=2", *settings)
    assert code == 0, text
    lines = [line for line in metrics(tmp_path) if "lm_loss" in line]
    logged = [line for line in lines if "timers_s" in line]
    assert [line["iteration"] for line in logged] == [2, 4, 5]
    assert text.count(" | lm loss: ") == 3
    for line in logged:
        timers = line["timers_s"]
        assert {"data", "forward_backward", "optimizer", "other"} <= set(timers)
        assert 1e8 < line["peak_memory_bytes"] < 1e11
    # Evaluation after the second step, a checkpoint after the third: both within the second interval.
    assert [("evaluation" in line["timers_s"], "checkpoint" in line["timers_s"]) for line in logged] == [
        (False, False),
        (True, True),
        (True, False),
    ]
    assert all(line["tokens_per_s"] == pytest.approx(64 / line["step_time_s"]) for line in lines)


def test_phases_add_up_to_the_steps_time(cli: Any, tmp_path: Path) -> None:
    """One run of three that is not disturbed must do.

    Ranks that are kept from running are in no phase.
    """
    for _ in range(3):
        code, text = cli("train.train_iters=4", "logger.log_interval=2")
        assert code == 0, text
        lines, shares = metrics(tmp_path), []
        for pair in (lines[:2], lines[2:]):
            timers = pair[-1]["timers_s"]
            inside = timers["data"] + timers["forward_backward"] + timers["optimizer"]
            shares.append(inside / (sum(line["step_time_s"] for line in pair) / 2))
        if all(0.5 < share <= 1.2 for share in shares):
            return
        shutil.rmtree(tmp_path / "run")
    pytest.fail(f"of the steps' time the phases have {shares}")


def test_the_staged_backend_warns_that_it_is_slow(cli: Any) -> None:
    code, text = cli("dist.distributed_backend=staged", "train.train_iters=2")
    assert code == 0 and text.count("GPU tensors travel through host memory and gloo, slowly") == 1, text


def test_a_resumed_run_equals_an_uninterrupted_run(cli: Any, tmp_path: Path) -> None:
    more = ["train.train_iters=6", "model.hidden_dropout=0.1"]
    assert cli(*more)[0] == 0
    uninterrupted = [line["lm_loss"] for line in metrics(tmp_path)]
    (tmp_path / "run").rename(tmp_path / "first")
    assert cli(*more, "train.exit_interval=4")[0] == 0
    code, text = cli(*more)
    assert code == 0 and "resumed from iteration 4" in text
    assert [line["lm_loss"] for line in metrics(tmp_path)] == uninterrupted


def record_samples(folder: str) -> None:
    original = MockDataset.__getitem__

    def read(self: MockDataset, index: int) -> Any:
        with open(f"{folder}/samples", "a") as file:
            file.write(f"{index}\n")
        return original(self, index)

    MockDataset.__getitem__ = read  # type: ignore[method-assign]


def test_a_run_resumed_with_a_smaller_batch_has_samples_to_the_end(cli: Any, tmp_path: Path) -> None:
    """Four iterations of two samples are fewer than the two of eight before."""
    more = ["model.context_parallel_size=1", "dataset.num_workers=0"]
    assert cli(*more, "train.global_batch_size=8", "train.train_iters=3", "train.exit_interval=2", ranks=1)[0] == 0
    more += ["train.train_iters=4", "scheduler.override_opt_param_scheduler=true"]
    code, text = cli(*more, ranks=1, before=partial(record_samples, str(tmp_path)))
    assert code == 0, text
    assert (tmp_path / "samples").read_text().split() == ["16", "17", "18", "19"]


def test_evaluation_is_the_same_under_another_layout(cli: Any, tmp_path: Path) -> None:
    losses = []
    layouts = (
        ["model.context_parallel_size=2"],
        ["model.context_parallel_size=1"],
        # Stages expect tensors of the evaluation's microbatches, not of training's.
        [
            "model.context_parallel_size=1",
            "model.pipeline_model_parallel_size=2",
            "validation.eval_micro_batch_size=2",
        ],
    )
    for number, layout in enumerate(layouts):
        code, text = cli(
            *layout,
            "model.num_layers=2",
            "train.train_iters=2",
            "validation.eval_interval=1",
            "validation.eval_iters=2",
            "dataset.mock_masked_fraction=0.4",
        )
        assert code == 0, text
        losses.append([line["validation_loss"] for line in metrics(tmp_path) if "validation_loss" in line])
        (tmp_path / "run").rename(tmp_path / str(number))
    assert len(losses[0]) >= 2
    assert losses[1] == pytest.approx(losses[0], rel=2e-6) and losses[2] == pytest.approx(losses[0], rel=2e-6)


def record_groups(folder: str) -> None:
    """Record the group's size of each attention call, and whether the model trained."""
    original = ContextParallelAttention.forward

    def forward(self: Any, *args: Any, **kwargs: Any) -> Any:
        size = self._context_of(kwargs.get("packed_seq_params"), args[0].shape[-2]).size
        with open(f"{folder}/groups{os.environ['RANK']}", "a") as file:
            file.write(f"{'training' if self.training else 'evaluation'} {size}\n")
        return original(self, *args, **kwargs)

    ContextParallelAttention.forward = forward  # type: ignore[method-assign]


HCP = ["model.cp_comm_type=a2a+p2p", "model.hierarchical_context_parallel_sizes=[2,2]", "model.context_parallel_size=4"]
PACKS = ["model.sequence_packing_scheduler=dp_balanced", "dataset.kind=mock_documents"]
DYNAMIC = ["model.dynamic_context_parallel=true", "dataset.kind=mock_documents", "model.max_seqlen_per_dp_cp_rank=16"]
HYBRID = ["model.architecture=hybrid", "model.hybrid_layer_pattern=M*-", "model.num_layers=3"]
HYBRID += ["model.mamba_head_dim=16", "model.mamba_num_groups=2", "model.mamba_state_dim=8"]
slow = pytest.mark.slow


@pytest.mark.parametrize(
    ("layout", "sizes"),
    [
        pytest.param(["model.context_parallel_size=2"], (2, 1), id="cp2 to 1", marks=slow),
        pytest.param(HCP, (4, 2), id="a2a+p2p to 2"),
        pytest.param(
            ["model.context_parallel_size=2", *HCP[:1], "model.hierarchical_context_parallel_sizes=[2,1]"],
            (2, 4),
            id="2 to two levels",
            marks=slow,
        ),
        pytest.param(
            ["model.context_parallel_size=1", "model.pipeline_model_parallel_size=2"], (1, 2), id="pp2, 1 to 2"
        ),
        pytest.param(
            ["model.context_parallel_size=2", "dist.use_decentralized_pg=true"], (2, 4), id="decentralized", marks=slow
        ),
        pytest.param(["model.context_parallel_size=2", *HYBRID], (2, 4), id="hybrid", marks=slow),
        pytest.param(["model.context_parallel_size=2", *PACKS], (2, 4), id="packs", marks=slow),
        pytest.param(["model.context_parallel_size=4", *DYNAMIC], (None, 2), id="dynamic", marks=slow),
    ],
)
def test_evaluation_in_groups_of_its_own(
    cli: Any, tmp_path: Path, layout: list[str], sizes: tuple[int | None, int]
) -> None:
    """The losses must be those in training's groups.

    Attention must really run in the other groups.
    """
    settings = [*layout, "train.train_iters=2", "train.global_batch_size=4", "validation.eval_interval=1"]
    settings += ["validation.eval_iters=1", "validation.eval_global_batch_size=8", "validation.eval_micro_batch_size=1"]
    settings += [] if "model.num_layers=3" in layout else ["model.num_layers=2"]
    settings += [] if "dataset.kind=mock_documents" in layout else ["dataset.mock_masked_fraction=0.4"]
    losses = []
    for more in ([], [f"dist.eval_context_parallel_size={sizes[1]}"]):
        code, text = cli(*settings, *more, ranks=4, before=partial(record_groups, str(tmp_path)))
        assert code == 0, text
        lines = metrics(tmp_path)
        losses.append([line[key] for line in lines for key in ("lm_loss", "validation_loss") if key in line])
        seen = [(tmp_path / f"groups{rank}").read_text().split("\n")[:-1] for rank in range(4)]
        for path in (tmp_path / "run", *(tmp_path / f"groups{rank}" for rank in range(4))):
            path.rename(f"{path}.{len(losses)}")
    assert len(losses[0]) == 4 and losses[1] == pytest.approx(losses[0], rel=2e-6)
    for lines in seen:
        assert {line for line in lines if line.startswith("evaluation")} == {f"evaluation {sizes[1]}"}
        assert sizes[0] is None or {line for line in lines if line.startswith("tr")} == {f"training {sizes[0]}"}


@pytest.mark.parametrize(("number", "code"), [(signal.SIGTERM, 143), (signal.SIGINT, 130)])
def test_a_signal_to_one_rank_ends_all_after_a_checkpoint(cli: Any, tmp_path: Path, number: int, code: int) -> None:
    def signal_rank_1_at_the_third_step() -> None:
        from megatron_cp.training import loop

        original = loop.train_step

        def step(run: Any, *args: Any) -> Any:
            if run.progress.iteration == 2 and os.environ["RANK"] == "1":
                os.kill(os.getpid(), number)
            return original(run, *args)

        loop.train_step = step

    ended, text = cli("train.train_iters=50", before=signal_rank_1_at_the_third_step)
    assert ended == code, text
    assert (tmp_path / "run" / "latest_checkpointed_iteration.txt").read_text() == "3"


def test_running_out_of_time_saves_and_ends_with_zero(cli: Any, tmp_path: Path) -> None:
    code, text = cli("train.train_iters=1000", "train.exit_duration_in_mins=0.001")
    assert code == 0, text
    assert 1 <= int((tmp_path / "run" / "latest_checkpointed_iteration.txt").read_text()) < 1000
