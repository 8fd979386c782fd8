"""Published measurements are predicted as well as docs/explanation/time.md says."""

from __future__ import annotations

import csv
import tracemalloc
from pathlib import Path

import numpy as np
import pytest

from benchmarks import planner_accuracy
from benchmarks.planner_accuracy import Outcome, by_gpu, outcomes, regrets, table

FILE = Path(__file__).parents[3] / "benchmarks" / "measurements" / "published.csv"


@pytest.fixture(scope="module")
def found() -> list[Outcome]:
    with FILE.open(newline="") as file:
        rows = list(csv.DictReader(file))
    deepspeed = [row for row in rows if "vTrain" in row["source"]]
    return outcomes([row for row in rows if "vTrain" not in row["source"]] + deepspeed[::6], 0)


def errors(found: list[Outcome], source: str, dense: bool, *gpus: str) -> np.ndarray:
    experts = ("deepseek", "qwen3", "gpt-oss", "nemo", "kimi", "moe")
    return np.abs(
        [
            each.error
            for each in found
            if each.predicted is not None
            and source in each.row["source"]
            and "memory" not in each.row["metric"]
            and each.row["gpu_type"].startswith(gpus or ("",))
            and dense != any(name in each.row["model"].lower() for name in experts)
        ]
    )


def test_dense_models(found: list[Outcome]) -> None:
    """The rows are Bridge's containers and NeMo's, on H100, B200 and GB200."""
    for gpu in ("H100", "B200", "GB200"):
        every = np.concatenate([errors(found, part, True, gpu) for part in ("NeMo", "Megatron-Bridge")])
        assert len(every) >= 6
        assert every.mean() <= 0.06 and np.quantile(every, 0.9) <= 0.12, gpu


def test_long_sequences(found: list[Outcome]) -> None:
    assert errors(found, "performance_long_sequence", True).max() <= 0.08


def test_a100(found: list[Outcome]) -> None:
    assert errors(found, "2205.05198 Table 5", True).mean() <= 0.04
    assert errors(found, "vTrain", True).mean() <= 0.08


def test_context_parallel_bars_are_in_order(found: list[Outcome]) -> None:
    """Bars that are less than 0.08 apart are predicted within 0.08."""
    bars = [each for each in found if "speedup_over_tp8" in each.row["metric"] and each.predicted]
    assert len(bars) == 11
    for one in bars:
        assert one.predicted == pytest.approx(one.measured, abs=0.1)
        for other in bars:
            same = (one.row["seq_len"], one.row["precision"]) == (other.row["seq_len"], other.row["precision"])
            if same and one.measured < other.measured - 0.08:
                assert (one.predicted or 0) < (other.predicted or 0)


def test_a_row_without_a_prediction_has_a_reason() -> None:
    whole = {
        "source": "mine",
        "model": "llama3-8b",
        "seq_len": "8192",
        "gpus": "8",
        "gpu_type": "H100",
        "tp": "1",
        "cp": "1",
        "pp": "1",
        "mbs": "1",
        "gbs": "64",
        "precision": "bf16",
        "metric": "iteration_time_s",
        "value": "5",
    }

    def reason(**changes: str) -> str:
        return outcomes([{**whole, **changes}], 0)[0].reason

    assert reason() == ""
    assert reason(gpu_type="TPU") == "gpu_type='TPU' is unknown"
    assert reason(tp="") == "tp not stated"
    assert reason(tp="3") == "tp * cp * pp = 3 does not divide 8 GPUs"
    assert reason(seq_len="long") == "seq_len='long' is no number"
    assert reason(model="mixtral-8x7b") == "ep not stated"
    assert reason(model="something-8x7b", hidden="1024", layers="2", heads="8") == "experts not stated"
    assert reason(model="") == "shape not stated (hidden, layers, heads)"
    assert reason(value="") == "no value above 0" or "not understood" in reason(value="")
    assert reason(metric="joy") == "joy is not predicted"
    assert reason(cp="2", cp_comm_type="pigeon") == "cp_comm_type=pigeon is no transport here"
    assert reason(note="finetune LoRA") == "trains adapters only"
    assert outcomes([{"source": "mine"}], 0)[0].predicted is None
    # Cost and memory of an estimate do not grow with the batch: this once allocated an entry for each sample.
    tracemalloc.start()
    assert reason(mbs="99999999", gbs="999999999") == ""
    assert tracemalloc.get_traced_memory()[1] < 10e6
    tracemalloc.stop()


def test_the_command(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    lines = FILE.read_text().splitlines()
    deepspeed = [line for line in lines if "vTrain" in line]
    path = tmp_path / "rows.csv"
    path.write_text("\n".join([lines[0], *deepspeed[:60], "only,a,few,cells"]))
    assert planner_accuracy.main(["--rows", str(path), "--calibrate", "3", "--regret"]) == 0
    out = capsys.readouterr().out
    assert "| 60 | 57 |" in out and "refused: calibrated with" in out and "regret, mean" in out
    assert planner_accuracy.main(["--rows", str(tmp_path / "none.csv")]) == 2


def test_the_table_by_gpu_has_whole_steps_of_the_named_sources(found: list[Outcome]) -> None:
    lines = by_gpu(found, "NVIDIA")[3:]
    assert [line.split(" | ")[:2] for line in lines[:4]] == [
        ["| dense", gpu] for gpu in ("B200", "GB200", "GB300", "H100")
    ]
    assert sum(int(line.split(" | ")[2]) for line in lines) == sum(
        "NVIDIA" in each.row["source"] and each.predicted is not None for each in found if _is_whole_step(each)
    )


def _is_whole_step(each: Outcome) -> bool:
    return not any(part in each.row["metric"] for part in ("memory", "speedup", "mfu", "attention"))


def test_tables_of_nothing() -> None:
    assert len(table([])) == 2 and len(regrets([])) == 3 and len(by_gpu([], "")) == 3
