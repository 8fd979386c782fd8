"""``megatron-cp report``: input, messages and output."""

from __future__ import annotations

import json
import os
import random
import re
import struct
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import pytest
import yaml

from megatron_cp.cli import main
from megatron_cp.common.errors import DataError
from megatron_cp.report.figures import draw
from megatron_cp.report.runs import read_runs
from megatron_cp.report.summary import table

HCP = {"cp_comm_type": "a2a+p2p", "hierarchical_context_parallel_sizes": [2, 2]}


def run_folder(folder: Path, steps: int = 30, model: dict[str, Any] | None = None, ranks: int = 4) -> Path:
    """Write a run's folder with made-up numbers.

    Each step has 100 tokens/s more; forward-backward takes three quarters of the time.
    """
    folder.mkdir(parents=True)
    draw = random.Random(0)
    lines: list[dict[str, Any]] = []
    for i in range(1, steps + 1):
        line: dict[str, Any] = {
            "iteration": i, "consumed_samples": 8 * i, "consumed_tokens": 2048 * i,
            "lm_loss": 6 / i**0.2 + draw.random() / 9,
            "grad_norm": 1.0, "learning_rate": 1e-3, "step_time_s": 0.4, "tokens_per_s": 1000.0 + 100 * i,
            "tokens_per_s_per_device": (1000.0 + 100 * i) / ranks, "tflops_per_device": 0.02, "num_microbatches": 1,
            "skipped": i == 3, "mfu_of_measured_peak": 0.16,
        }  # fmt: skip
        if i % 5 == 0:
            line |= {"timers_s": {"data": 0.04, "forward_backward": 0.3, "optimizer": 0.06}}
            line |= {"peak_memory_bytes": 10_000_000 * i}
        lines.append(line)
    lines.append({"iteration": steps, "validation_loss": 3.25, "validation_loss_per_sample": 3.5})
    (folder / "metrics.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    config = {
        "recipe": "llama_tiny_pretrain_config",
        "model": {"context_parallel_size": 4, "cp_comm_type": "p2p", "seq_length": 256} | (model or {}),
        "train": {"train_iters": 40, "global_batch_size": 8},
    }
    (folder / "config.yaml").write_text(yaml.safe_dump(config))
    return folder


def test_the_numbers(tmp_path: Path) -> None:
    (run,) = read_runs([run_folder(tmp_path / "a")])
    rows = dict(table([run]))
    assert rows["tokens/s (median)"] == ["2,650"]  # the median of steps 3 to 30
    assert rows["tokens/s a device (median)"] == ["662"]
    assert rows["iterations"] == ["30 of 40"] and rows["skipped steps"] == ["1"]
    assert rows["time by phase"] == ["forward-backward 75%, optimizer 15%, data 10%"]
    assert rows["peak memory a rank, GB"] == ["0.30"]
    assert rows["validation loss"] == ["3.2500"] and rows["validation loss per sample"] == ["3.5000"]
    assert rows["layout"] == ["4 ranks: cp 4 (p2p)"] and rows["sequence length"] == ["256"]
    assert rows["step alone, ms (median)"] == ["400.0"] and rows["MFU of a measured peak (median)"] == ["0.160"]
    assert "padding (median)" not in rows and "MFU of a given peak (median)" not in rows


def test_a_bar_and_its_table_name_the_same_thing_and_number(tmp_path: Path) -> None:
    """The run has evaluations, and a last reading over fewer iterations."""
    folder = run_folder(tmp_path / "a", steps=32)
    with (folder / "metrics.jsonl").open("a") as file:
        timers = {"data": 0.04, "forward_backward": 0.3, "optimizer": 0.06, "evaluation": 1.6}
        line = {"iteration": 33, "lm_loss": 3.0, "step_time_s": 0.4, "timers_s": timers}
        file.write(json.dumps(line) + "\n")
    (run,) = read_runs([folder])
    rows = dict(table([run]))
    name = "iteration with evaluations and checkpoints, ms (mean)"
    assert rows[name] == [f"{(30 * 400 + 3 * 2000) / 33:.1f}"]
    bars = next(axes for axes in draw([run]).axes if axes.get_title(loc="left") == name)
    assert rows[name] == [text.get_text().strip() for text in bars.texts if "%" not in text.get_text()]
    memory = next(axes for axes in draw([run]).axes if axes.get_title(loc="left") == "peak memory a rank, GB")
    assert rows["peak memory a rank, GB"] == [text.get_text().strip() for text in memory.texts]


def test_the_latest_value_of_an_iteration_counts_per_data_set(tmp_path: Path) -> None:
    folder = run_folder(tmp_path / "a")
    later: list[dict[str, Any]] = [
        {"iteration": 10, "validation_loss": 9.0},
        {"iteration": 10, "validation_loss": None},  # not finite: no older value stands in for it
        {"iteration": 30, "validation_loss": 3.5},
        {"iteration": 30, "validation_loss": 3.125},
        {"iteration": 20, "validation_loss": 4.5},
        {"iteration": 30, "validation_loss": 8.0, "measured_with": {"dataset.valid_data_path": "other"}},
        {"iteration": 30, "validation_loss": 7.0, "measured_with": {"dataset.valid_data_path": "other"}},
        {"iteration": 5, "test_loss": 6.0, "measured_with": {"checkpoint.load": "b", "validation.eval_iters": 3}},
    ]
    with (folder / "metrics.jsonl").open("a") as file:
        file.writelines(json.dumps(line) + "\n" for line in later)
    (run,) = read_runs([folder])
    assert run.points("validation_loss") == ([20, 30], [4.5, 3.125])
    rows = dict(table([run]))
    assert rows["validation loss"] == ["3.1250"]
    assert rows["other evaluations"] == [
        "7.0000 (validation, iteration 30, dataset.valid_data_path=other); "
        "6.0000 (test, iteration 5, checkpoint.load=b, validation.eval_iters=3)"
    ]


@pytest.mark.parametrize(
    ("model", "ranks", "layout"),
    [
        (HCP, 4, "4 ranks: cp 4 (a2a+p2p [2, 2])"),
        ({"context_parallel_size": 2, "tensor_model_parallel_size": 2}, 16, "16 ranks: cp 2 (p2p), tp 2, dp 4"),
        ({"dynamic_context_parallel": True}, 8, "8 ranks: dynamic cp up to 4, dp 2"),
        ({"context_parallel_size": 1}, 1, "1 rank"),
        ({"cp_comm_type": ["p2p", "a2a", "p2p"]}, 4, "4 ranks: cp 4 (p2p, a2a)"),
    ],
)  # fmt: skip
def test_the_layout_in_words(tmp_path: Path, model: dict[str, Any], ranks: int, layout: str) -> None:
    assert read_runs([run_folder(tmp_path / "a", model=model, ranks=ranks)])[0].layout == layout


def test_a_killed_run_a_diverged_one_and_one_without_its_config(tmp_path: Path) -> None:
    folder = run_folder(tmp_path / "a")
    path = folder / "metrics.jsonl"
    path.write_text(path.read_text() + '{"iteration": 31, "lm_loss": null, "tokens_per_s": 5}\n{"iteration": 32, "lm')
    (folder / "config.yaml").write_text("model: [")
    (run,) = read_runs([folder])
    assert run.steps[-1]["iteration"] == 31 and len(run.points("lm_loss")[0]) == 30
    assert run.layout == "4 ranks" and dict(table([run]))["iterations"] == ["31"]
    assert main(["report", str(folder), "--png", str(tmp_path / "a.png")]) == 0


@pytest.mark.parametrize("config", ["model: null", "model: 3", "model: {context_parallel_size: abc, pp: null}"])
def test_an_invalid_config_is_left_out(tmp_path: Path, config: str) -> None:
    folder = run_folder(tmp_path / "a")
    (folder / "config.yaml").write_text(config)
    assert read_runs([folder])[0].layout == "4 ranks" or "abc" in config
    assert main(["report", str(folder), "--png", str(tmp_path / "a.png")]) == 0


ODD = ['"a"', "[1]", "{}", "NaN", "Infinity", "1e999", "1" + "0" * 4000, "-1", "true", "1e308"]


@pytest.mark.parametrize("field", ["lm_loss", "tokens_per_s", "tokens_per_s_per_device", "timers_s", "iteration"])
def test_values_that_are_not_numbers_are_left_out(tmp_path: Path, field: str) -> None:
    folder = run_folder(tmp_path / "a")
    with (folder / "metrics.jsonl").open("a") as file:
        for number, value in enumerate(ODD):
            line = {"iteration": 40 + number, "lm_loss": 2.0, "tokens_per_s": 4.0, "tokens_per_s_per_device": 1.0}
            odd = value if field != "timers_s" else f'{{"data": {value}}}'
            file.write(json.dumps(line | {field: "@"}).replace('"@"', odd) + "\n")
        file.write("[" * 100_000 + "\n")
    assert main(["report", str(folder), "--html", str(tmp_path / "a.html")]) == 0


def test_a_pipe_for_a_config_does_not_block(tmp_path: Path) -> None:
    folder = run_folder(tmp_path / "a")
    (folder / "config.yaml").unlink(missing_ok=True)
    os.mkfifo(folder / "config.yaml")
    assert read_runs([folder])[0].layout == "4 ranks"


def test_a_name_that_is_too_long(capsys: pytest.CaptureFixture) -> None:
    assert main(["report", "x" * 300]) == 2
    assert "there is no run folder xxx" in capsys.readouterr().err


def test_runs_have_distinct_names(tmp_path: Path) -> None:
    folders = [run_folder(tmp_path / a / "run") for a in ("x", "y")]
    assert [run.name for run in read_runs(folders)] == ["x/run", "y/run"]


@pytest.mark.parametrize(
    ("prepare", "message"),
    [
        (lambda p: None, "there is no run folder"),
        (lambda p: p.mkdir(), "is not a run folder: metrics.jsonl is missing"),
        (lambda p: run_folder(p / "inner"), "run folders in it: inner"),
        (lambda p: (p.mkdir(), (p / "metrics.jsonl").write_text('{"iteration": 1, "lm')), "no complete training step"),
    ],
)
def test_folders_that_are_no_runs_are_reported(
    tmp_path: Path, prepare: Any, message: str, capsys: pytest.CaptureFixture
) -> None:
    prepare(tmp_path / "a")
    with pytest.raises(DataError, match=message):
        read_runs([tmp_path / "a"])
    assert main(["report", str(tmp_path / "a")]) == 2
    assert message in capsys.readouterr().err


def test_the_picture(tmp_path: Path) -> None:
    folders = [str(run_folder(tmp_path / name, steps=n)) for name, n in (("a", 1), ("b", 200))]
    assert main(["report", *folders, "--png", str(tmp_path / "r.png")]) == 0
    data = (tmp_path / "r.png").read_bytes()
    width, height = struct.unpack(">II", data[16:24])
    assert data[:4] == b"\x89PNG" and width > 1000 and height > 800


class Links(HTMLParser):
    """Collect everything that a page would load from other places."""

    def __init__(self) -> None:
        super().__init__()
        self.loaded: list[str] = []
        self.cells: list[str] = []

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        if tag in ("script", "link", "img", "iframe"):
            self.loaded.append(tag)
        self.loaded += [v for k, v in attrs if k in ("src", "href", "xlink:href") and v and not v.startswith("#")]

    def handle_data(self, data: str) -> None:
        self.cells.append(data)


def test_the_page_is_self_contained(tmp_path: Path, capsys: pytest.CaptureFixture) -> None:
    folders = [str(run_folder(tmp_path / name)) for name in ("plain", "with <b>")]
    assert main(["report", *folders, "--html", str(tmp_path / "r.html")]) == 0
    text = (tmp_path / "r.html").read_text()
    links = Links()
    links.feed(text)
    assert not links.loaded and "<b>" not in text
    assert {"plain", "with <b>", "4 ranks: cp 4 (p2p)"} <= set(links.cells)
    assert text.count("<svg") == 1 and not re.search(r"url\(\s*['\"]?http", text)
    assert "tokens/s" in capsys.readouterr().out


def test_a_page_that_cannot_be_written(tmp_path: Path, capsys: pytest.CaptureFixture) -> None:
    assert main(["report", str(run_folder(tmp_path / "a")), "--html", str(tmp_path / "no" / "r.html")]) == 2
    assert "cannot write the report" in capsys.readouterr().err
