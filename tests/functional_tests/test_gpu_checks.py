"""The commands that ``scripts/gpu_checks.sh`` runs.

A stand-in replaces the interpreter.
"""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from benchmarks import device_rates, gpu_attention, gpu_pretrain
from megatron_cp.config.recipes import load_recipe
from megatron_cp.rules import check

ROOT = Path(__file__).resolve().parents[2]
CHECKS = ["look", "verify", "train", "tests", "pretrain", "attention", "rates", "profile", "larger"]
# Records its arguments. If a file exists for one of them, runs the text of that file.
PYTHON = """#!/bin/bash
printf '%s\\n' "$*" >> "$FOLDER/calls"
for file in "$FOLDER"/when.*; do
    [[ -e $file && "$*" == *"${file##*when.}"* ]] && . "$file"
done
echo "what it found"
"""


def run(folder: Path, *arguments: str, **when: str) -> tuple[int, str, list[str]]:
    """Return exit code, output and calls.

    ``when``: behavior of the interpreter for calls with this word.
    """
    python = folder / "python"
    python.write_text(PYTHON)
    python.chmod(0o755)
    for word, does in when.items():
        (folder / f"when.{word}").write_text(does)
    done = subprocess.run(
        [ROOT / "scripts" / "gpu_checks.sh", "--out", "out", *arguments],
        env=os.environ | {"PYTHON": str(python), "FOLDER": str(folder)},
        cwd=folder,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        timeout=120,
    )
    calls = folder / "calls"
    return done.returncode, done.stdout, calls.read_text().splitlines() if calls.exists() else []


def test_every_check_runs_and_has_its_log(tmp_path: Path) -> None:
    code, text, calls = run(tmp_path)
    assert code == 0, text
    assert len(calls) == len(CHECKS)
    assert [line.split(":")[0] for line in text.splitlines()[-len(CHECKS) :]] == [f"== {name}" for name in CHECKS]
    assert all(line.endswith("what it found") and ": passed, " in line for line in text.splitlines()[-len(CHECKS) :])
    assert sorted(path.name for path in (tmp_path / "out").glob("*.log")) == sorted(f"{name}.log" for name in CHECKS)


def test_a_failed_check_does_not_stop_others(tmp_path: Path) -> None:
    code, text, calls = run(tmp_path, doctor="echo broken; exit 3", verify="exit 1")
    assert code == 1 and len(calls) == len(CHECKS)
    assert re.search(r"== look: failed \(3\), \d+ s: broken\n", text) and "== verify: failed (1), " in text
    assert text.count(": passed, ") == len(CHECKS) - 2


def test_only_named_checks_run_in_the_usual_order(tmp_path: Path) -> None:
    code, text, calls = run(tmp_path, "rates", "look")
    assert code == 0, text
    assert ["doctor" in calls[0], "device_rates" in calls[1], len(calls)] == [True, True, 2]


def test_the_time_limit_is_kept(tmp_path: Path) -> None:
    began = time.monotonic()
    # The check gets the signal, as pytest does. A process left behind would hold the log open.
    slow = "trap 'echo summed up; exit 1' INT; sleep 60 & wait"
    code, text, calls = run(tmp_path, "--seconds", "7", "look", "verify", "rates", verify=slow)
    assert code == 1 and time.monotonic() - began < 50
    assert "== look: passed, " in text and "== verify: stopped after " in text
    assert ": summed up\n" in text
    assert text.endswith("== rates: no time left\n") and len(calls) == 2


def test_checks_left_out_fail_the_script(tmp_path: Path) -> None:
    code, text, calls = run(tmp_path, "--seconds", "1", "look")
    assert (code, calls) == (1, []) and text.endswith("== look: no time left\n")


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        (["--fast"], "no option or check --fast"),
        (["--seconds", "soon"], "--seconds soon"),
        (["test"], "check test;"),
        (["--out"], "--out needs"),
    ],
)
def test_unknown_arguments_are_refused(tmp_path: Path, arguments: list[str], says: str) -> None:
    code, text, calls = run(tmp_path, *arguments)
    assert code == 2 and says in text and not calls


def test_help_names_every_check(tmp_path: Path) -> None:
    code, text, _ = run(tmp_path, "--help")
    assert code == 0 and all(name in text.split("CHECK     ")[1] for name in CHECKS)


def test_an_interrupt_ends_the_running_and_all_later_checks(tmp_path: Path) -> None:
    run(tmp_path, "--help", doctor='echo $$ > "$FOLDER/pid"; exec sleep 100')
    began = subprocess.Popen(
        [ROOT / "scripts" / "gpu_checks.sh", "--out", str(tmp_path / "out")],
        env=os.environ | {"PYTHON": str(tmp_path / "python"), "FOLDER": str(tmp_path)},
        stdout=subprocess.DEVNULL,
        start_new_session=True,
    )
    pid = tmp_path / "pid"
    wait_for(lambda: pid.exists() and pid.read_text().endswith("\n"))
    os.killpg(began.pid, signal.SIGINT)  # as a terminal does
    assert began.wait(60) == 130
    wait_for(lambda: not Path("/proc", pid.read_text().strip()).exists())
    assert len((tmp_path / "calls").read_text().splitlines()) == 1


def wait_for(condition: Callable[[], bool]) -> None:
    deadline = time.monotonic() + 60
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.05)


class Parsed(Exception):
    pass


def test_benchmarks_accept_their_arguments(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def stop(*_: Any) -> None:
        raise Parsed

    modules = {"gpu_pretrain": gpu_pretrain, "gpu_attention": gpu_attention, "device_rates": device_rates}
    for name, module in modules.items():
        monkeypatch.setattr(module, "print_matmul_rates" if name == "gpu_attention" else "start_logging", stop)
    calls = [call.split() for call in run(tmp_path)[2] if call.startswith("benchmarks/")]
    assert {Path(program).stem for program, *_ in calls} == set(modules)
    for program, *arguments in calls:
        monkeypatch.setattr(sys, "argv", [program, *arguments])
        with pytest.raises(Parsed):
            modules[Path(program).stem].main()


def test_the_layout_is_one_that_a_gpu_can_run(tmp_path: Path) -> None:
    recipes = [call.split() for call in run(tmp_path, "verify", "train")[2]]
    for words in recipes:
        overrides = [word for word in words if "=" in word and not word.startswith("-")]
        config = load_recipe(words[words.index("--recipe") + 1], overrides)
        assert [v for v in check(config, 4, environment="gpu") if v.severity == "error"] == []
        assert config.model.cp_comm_type == "a2a+p2p" and config.dist.distributed_backend == "staged"
    assert len(recipes) == 2
