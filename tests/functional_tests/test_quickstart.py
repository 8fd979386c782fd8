"""The quick start: its parts, and all of it with two iterations.

A slow test runs it as a user does.
"""

import io
import json
import os
import re
import subprocess
from pathlib import Path

import pytest
from rich.console import Console

from megatron_cp import quickstart
from megatron_cp.config.recipes import load_recipe, to_yaml
from megatron_cp.data.text.corpus import standard_library_sources
from megatron_cp.rules import check

ROOT = Path(__file__).parents[2]


@pytest.fixture(scope="module")
def sources(tmp_path_factory: pytest.TempPathFactory) -> list[Path]:
    folder = tmp_path_factory.mktemp("sources")
    for number in range(30):
        text = "".join(f"def function_{number}_{i}(argument):\n    return argument + {i}\n\n" for i in range(50))
        (folder / f"module_{number:02}.py").write_text(text)
    return sorted(folder.iterdir())


def test_the_corpus_is_the_standard_library() -> None:
    files = standard_library_sources()
    assert files == sorted(files) == standard_library_sources()
    assert {"ast.py", "typing.py"} <= {path.name for path in files}
    assert not any("site-packages" in path.parts or "test" in path.parts for path in files)
    assert 4e6 < sum(path.stat().st_size for path in files) < 20e6


def test_data_is_made_once(sources: list[Path], tmp_path: Path) -> None:
    console = Console(record=True, width=200, quiet=True)
    prefix = quickstart.prepare_data(tmp_path, quickstart.NumberedSteps(console, 3), sources)
    made = {path: path.stat().st_mtime_ns for path in (Path(f"{prefix}.bin"), Path(f"{prefix}.idx"))}
    quickstart.prepare_data(tmp_path, quickstart.NumberedSteps(console, 3), sources)
    assert {path: path.stat().st_mtime_ns for path in made} == made
    quickstart.prepare_data(tmp_path, quickstart.NumberedSteps(console, 3), sources[:20])  # changed text: created again
    assert Path(f"{prefix}.bin").stat().st_mtime_ns != made[Path(f"{prefix}.bin")]


@pytest.mark.parametrize("gpus", [0, 1, 2, 3, 4, 8])
def test_every_machine_gets_a_layout_that_runs(gpus: int, tmp_path: Path) -> None:
    ranks = {0: 4, 1: 1, 2: 2, 3: 2, 4: 4, 8: 4}[gpus]
    overrides = quickstart.overrides_for(tmp_path / "a b", tmp_path / "s", gpus)
    config = load_recipe(quickstart.RECIPE, overrides)
    assert config.model.context_parallel_size == ranks
    assert config.dataset.data_path == str(tmp_path / "a b")
    assert [str(v) for v in check(config, ranks, ranks if gpus else None) if v.severity == "error"] == []


def test_suggested_commands_run(tmp_path: Path) -> None:
    run = tmp_path / "run-001"
    run.mkdir()
    lines = (
        {"iteration": 1, "lm_loss": 6.0},
        {"iteration": 2, "lm_loss": 2.5},
        {"iteration": 2, "validation_loss": 2.6},
    )
    (run / "metrics.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    config = load_recipe(quickstart.RECIPE, quickstart.overrides_for(tmp_path / "data", run, 0))
    (run / "config.yaml").write_text(to_yaml(config))
    console = Console(record=True, width=100, file=io.StringIO())
    quickstart.last_screen(console, quickstart.NumberedSteps(console, 3), run, "data", 257, config.train.train_iters, 4)
    text = console.export_text()
    assert "6.0000 -> 2.5000 first and last of 2 iterations" in text and "2.6000 on files" in text
    (recipe, overrides) = re.search(r"--recipe (\S+) (.*)", text).groups()  # type: ignore[union-attr]
    longer = load_recipe(recipe, overrides.split())
    assert longer.train.train_iters == longer.scheduler.lr_decay_iters == 2 * config.train.train_iters
    assert check(longer, 4) == []  # no warning either
    (transport,) = re.findall(r"quickstart (parallel\S+)", text)
    ring = load_recipe(quickstart.RECIPE, [*quickstart.overrides_for(tmp_path / "data", run, 0), transport])
    assert ring.model.cp_comm_type == "p2p" and check(ring, 4) == []


def test_runs_are_numbered(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert quickstart.new_run_folder(tmp_path / "home").name == "run-001"
    (tmp_path / "home" / "run-009").mkdir()
    assert quickstart.new_run_folder(tmp_path / "home").name == "run-010"
    monkeypatch.setattr(Path, "glob", lambda *_: [])  # as for a quick start that looks before another one makes its own
    assert quickstart.new_run_folder(tmp_path / "home").name == "run-002"


def test_a_mistake_ends_it_before_any_work(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert quickstart.main(["model.num_layer=2"], tmp_path / "home") == 2
    assert "num_layers" in capsys.readouterr().err
    assert quickstart.main(["model.context_parallel_size=3"], tmp_path / "home") == 2
    assert not (tmp_path / "home").exists()


SMALL = ["train.train_iters=2", "train.global_batch_size=2", "train.micro_batch_size=1", "model.num_layers=2"]


def test_two_iterations(sources: list[Path], tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert quickstart.main([*SMALL, "validation.eval_iters=1"], tmp_path, sources) == 0
    out = capsys.readouterr().out
    assert "4 CPU processes, context parallel 4 (a2a+p2p [2, 2])" in out
    assert re.search(r"loss +\d+\.\d+ -> \d+\.\d+ first and last of 2 iterations", out)
    assert "files outside of the training data" in out
    assert (tmp_path / "run-001" / "latest_checkpointed_iteration.txt").read_text().strip() == "2"
    assert (tmp_path / "run-001" / "config.yaml").is_file()


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_the_command_to_train_on_works_as_it_is_printed(
    sources: list[Path], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """There must be no warning, and the rate must fall and stay above its minimum."""
    assert quickstart.main(SMALL, tmp_path, sources) == 0
    (command,) = re.findall(r"Continue training from this checkpoint:\s+(.*)", capsys.readouterr().out)
    done = subprocess.run(command, shell=True, cwd=ROOT, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0 and "warning" not in (done.stdout + done.stderr).lower(), done.stderr[-3000:]
    folder = tmp_path / "run-001"
    lines = [json.loads(line) for line in (folder / "metrics.jsonl").open() if "lm_loss" in line]
    assert [line["iteration"] for line in lines] == [1, 2, 3, 4]
    least = load_recipe(str(folder / "config.yaml")).optimizer.min_lr
    assert lines[2]["learning_rate"] > lines[3]["learning_rate"] > least


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_as_a_user_runs_it() -> None:
    """The loss must halve in less than three minutes on two cores."""
    environment = {k: v for k, v in os.environ.items() if k != "OMP_NUM_THREADS"}
    done = subprocess.run(
        ["scripts/quickstart.sh"], capture_output=True, text=True, env=environment, timeout=900, cwd=ROOT
    )
    assert done.returncode == 0, done.stderr[-3000:]
    assert "HIERARCHICAL_CONTEXT_PARALLEL_GROUPS a2a=[[0,1],[2,3]] p2p=[[0,2],[1,3]]" in done.stderr
    (folder,) = re.findall(r"run folder +\W*(runs/quickstart/run-\d+|\S+/run-\d+)", done.stdout)
    lines = map(json.loads, (ROOT / folder / "metrics.jsonl").open())
    losses = [line["lm_loss"] for line in lines if "lm_loss" in line]
    assert sum(losses[-5:]) / 5 < losses[0] / 2
    # The last loss is the same in the panel, the run's last message, its last log line, and metrics.jsonl.
    reported = re.findall(r"-> (\d\.\d{4})", done.stdout + done.stderr)
    logged = re.findall(r"iteration 150/150 \| lm loss: (\d\.\d{4})", done.stderr)
    assert reported == [f"{losses[-1]:.4f}"] * 2 and logged == [f"{losses[-1]:.4f}"]
