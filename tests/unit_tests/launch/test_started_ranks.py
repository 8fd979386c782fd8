"""``-n N`` starts ranks of the same command, and errors are printed once.

They are printed before the start if possible.
"""

import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType

import pytest

from megatron_cp import cli
from megatron_cp.config.recipes import load_recipe, to_yaml

ROOT = Path(__file__).parents[3]
TINY = "llama_tiny_pretrain_config"


@pytest.fixture(autouse=True)
def _no_launcher(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    for name in ("WORLD_SIZE", "RANK", "LOCAL_WORLD_SIZE", "LOCAL_RANK", "OMP_NUM_THREADS"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setattr("megatron_cp.cli.train.end_when_interrupted", lambda: None)
    yield
    os.environ.pop("OMP_NUM_THREADS", None)


@pytest.fixture
def launched(monkeypatch: pytest.MonkeyPatch) -> list[list[str]]:
    """Record the arguments of every launcher."""
    calls: list[list[str]] = []
    module = ModuleType("megatron_cp.torchrun")
    module.main = lambda argv: calls.append(argv) or 7  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "megatron_cp.torchrun", module)
    return calls


@pytest.mark.parametrize(
    "command",
    [
        ["train", "-n", "4", TINY],
        ["verify", "--recipe", TINY, "--nproc_per_node=4"],
        ["evaluate", "-n4", TINY, "validation.eval_iters=3"],
    ],
    ids=lambda command: command[0],
)
def test_ranks_are_given_the_same_command(launched: list[list[str]], command: list[str]) -> None:
    assert cli.main(command) == 7
    assert launched == [["--standalone", "--nproc_per_node=4", "-m", "megatron_cp", *command]]
    assert os.environ["OMP_NUM_THREADS"] == "1"


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["train", "-n", "2", TINY], "world size (2) is not divisible by total_model_size (4)"),
        (["verify", "-n", "2", TINY], "world size (2) is not divisible by total_model_size (4)"),
        (["evaluate", "-n", "2", TINY, "validation.eval_iters=1"], "world size (2) is not divisible"),
        (["train", "-n", "4", TINY, "model.num_layer=2"], "did you mean 'model.num_layers'?"),
        (["train", "-n", "0", TINY], "-n=0: must be at least 1. Fix: -n 1"),
        (["evaluate", "-n", "4", TINY, "validation.eval_iters=0"], "Fix: validation.eval_iters=10"),
        (["train", "-n", "4"], "no recipe is given"),
    ],
)
def test_a_mistake_ends_it_before_ranks_are_started(
    launched: list[list[str]], capsys: pytest.CaptureFixture[str], arguments: list[str], message: str
) -> None:
    assert cli.main(arguments) == 2
    assert capsys.readouterr().err.count(message) == 1 and not launched


def test_a_rank_does_the_work(
    launched: list[list[str]], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    trained = []
    module = ModuleType("megatron_cp.training.train")
    module.run = lambda config: trained.append(config) or 0  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "megatron_cp.training", ModuleType("megatron_cp.training"))
    monkeypatch.setitem(sys.modules, "megatron_cp.training.train", module)
    monkeypatch.setenv("WORLD_SIZE", "4")
    assert cli.main(["train", "-n", "4", TINY]) == 0 and len(trained) == 1 and not launched
    assert cli.main(["train", "-n", "8", TINY]) == 2
    assert "-n=8: a launcher has started 4 ranks already. Fix: leave out -n" in capsys.readouterr().err


def test_a_dry_run_is_for_the_ranks_that_would_be_started(capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["train", "-n", "8", TINY, "--dry-run", "-gb", "32", "--environment", "cpu"]) == 0
    assert f"# {TINY} on 8 ranks" in capsys.readouterr().out


def test_a_runs_folder_is_evaluated(tmp_path: Path, launched: list[list[str]]) -> None:
    config = load_recipe(TINY, [f"checkpoint.save={tmp_path}", "validation.eval_iters=2"])
    (tmp_path / "config.yaml").write_text(to_yaml(config))
    assert cli.main(["evaluate", "-n", "4", str(tmp_path)]) == 7 and len(launched) == 1


def test_torchs_launcher_prints_a_mistake_once_and_last(tmp_path: Path) -> None:
    """The traceback and exit code 1 of torch's launcher must not appear."""
    command = [
        "-m",
        "torch.distributed.run",
        "--nproc_per_node=2",
        "-m",
        "megatron_cp",
        "train",
        TINY,
        "--num-layers=2",
    ]
    environment = os.environ | {"OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT)}
    done = subprocess.run(
        [sys.executable, *command],
        capture_output=True,
        text=True,
        timeout=120,
        env=environment,
        cwd=tmp_path,
        check=False,
    )
    fix = f"Fix: megatron-cp train {TINY} model.num_layers=2"
    assert done.returncode == 1 and done.stderr.count(fix) == 1 and not done.stdout
    *_, last, border = done.stderr.rstrip().splitlines()
    assert last.strip() == fix and set(border) == {"="}


@pytest.mark.parametrize("launcher", ["no file can be written", "ours"])
def test_errors_are_printed_without_a_launcher(
    launcher: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    folder = tmp_path / "absent" if launcher != "ours" else tmp_path
    monkeypatch.setenv("TORCHELASTIC_ERROR_FILE", str(folder / "error.json"))
    if launcher == "ours":
        monkeypatch.setenv("MEGATRON_CP_LAUNCHER", "1 pid")
    assert cli.main(["train", "--recipe", "absent"]) == 2
    assert "unknown recipe 'absent'" in capsys.readouterr().err and not (folder / "error.json").exists()
