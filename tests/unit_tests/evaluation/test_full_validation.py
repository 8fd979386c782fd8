"""Validation of whole samples against transformers, under several layouts.

It runs before and after training.
"""

from pathlib import Path
from typing import Any

import numpy as np
import pytest

from megatron_cp.common.jsonl_log import read_lines
from tests.unit_tests.evaluation.conftest import COMMON, DYNAMIC, expected, write_files

LAYOUTS = {
    "1 rank": (1, ("model.sequence_packing_scheduler=dp_balanced",)),
    "dynamic cp": (2, DYNAMIC),
    "cp 4": (
        4,
        (
            "model.context_parallel_size=4",
            "model.cp_comm_type=p2p",
            "model.sequence_packing_scheduler=dp_balanced",
        ),
    ),
    "tp 2, pp 2": (
        4,
        (
            "model.tensor_model_parallel_size=2",
            "model.sequence_parallel=true",
            "model.pipeline_model_parallel_size=2",
            "model.sequence_packing_scheduler=dp_balanced",
        ),
    ),
    "dp 2, other groups in evaluation": (
        2,
        ("model.sequence_packing_scheduler=dp_balanced", "dist.eval_context_parallel_size=2"),
    ),
}  # fmt: skip
FAST = "dynamic cp"


def arguments(folder: Path) -> list[str]:
    """Return the settings of a step on the rows of :func:`write_files`."""
    rows = write_files(folder)[0]
    return [
        *COMMON,
        "dataset.kind=null",
        f"dataset.data_path={rows}",
        f"dataset.valid_data_path={rows}",
        "train.train_iters=1",
        "scheduler.lr_warmup_fraction=null",
        "validation.eval_iters=0",
        "validation.full_validation=true",
        "logger.progress=plain",
    ]


@pytest.mark.parametrize("name", [pytest.param(n, marks=[] if n == FAST else pytest.mark.slow) for n in LAYOUTS])
def test_each_sample_is_validated_once_before_training(published: Path, run: Any, tmp_path: Path, name: str) -> None:
    ranks, layout = LAYOUTS[name]
    assert run(ranks, *arguments(tmp_path), *layout, command="train") == [0] * ranks, (tmp_path / "log0").read_text()
    first, step, last = read_lines(tmp_path / "run" / "metrics.jsonl")
    sums = expected(published)[0][0]  # of the first document, which has several samples, and the others
    assert first["validation_loss"] == pytest.approx(sums[:, 0].sum() / sums[:, 1].sum(), rel=1e-6)
    assert first["validation_loss_per_sample"] == pytest.approx(np.mean(sums[:, 0] / sums[:, 1]), rel=1e-6)
    assert (first["validation_samples"], first["validation_loss_tokens"]) == (4, sums[:, 1].sum())
    assert [line["iteration"] for line in (first, step, last)] == [0, 1, 1]
    assert last["validation_loss"] != first["validation_loss"]
    shown = f"{first['validation_loss']:.6f} per token, {first['validation_loss_per_sample']:.6f} per sample (4 samples"
    assert f"validation loss at iteration 0: {shown}" in (tmp_path / "log0").read_text()


@pytest.mark.slow
def test_a_first_look_does_not_change_the_training(run: Any, tmp_path: Path) -> None:
    found = []
    for looks in ("true", "false"):
        given = [*arguments(tmp_path), *LAYOUTS["1 rank"][1], f"validation.eval_on_start={looks}"]
        assert run(1, *given, command="train") == [0]
        lines = read_lines(tmp_path / "run" / "metrics.jsonl")
        found.append([(line.get("lm_loss"), line.get("validation_loss")) for line in lines if line["iteration"]])
        (tmp_path / "run").rename(tmp_path / looks)
    assert found[0] == found[1] and len(found[0]) == 2
