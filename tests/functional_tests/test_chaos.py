"""Real launched runs resume after random strikes, and ``chaos`` detects faults."""

from __future__ import annotations

import json
import os
import time
from pathlib import Path

import pytest

from tests.functional_tests import chaos_runs
from tests.functional_tests.chaos import Strike, chaos, table
from tests.functional_tests.chaos_runs import LAUNCHERS, Life, tracebacks

STRIKES = int(os.environ.get("MEGATRON_CP_CHAOS_STRIKES", "6"))
REFERENCE = [6.0, 5.5, 5.25, 5.125]


@pytest.mark.slow
@pytest.mark.timeout(0)
def test_chaos(tmp_path: Path) -> None:
    strikes = chaos(STRIKES, 1, tmp_path)
    assert len(strikes) == STRIKES and not any(strike.problems for strike in strikes), table(strikes)


def ended(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, script: str, losses: list[float], saved: int) -> list[str]:
    """List problems of a shell script that stands for a run.

    It has these losses and this newest checkpoint.
    """
    folder = tmp_path / "run"
    folder.mkdir()
    (folder / "latest_checkpointed_iteration.txt").write_text("0")
    monkeypatch.setattr(chaos_runs, "command", lambda *_: ["sh", "-c", script])
    life = Life(LAUNCHERS[0], folder, tmp_path / "log")
    lines = [json.dumps({"iteration": i, "lm_loss": loss}) for i, loss in enumerate(losses, 1)]
    time.sleep(0.05)
    (folder / "metrics.jsonl").write_text("\n".join(lines))
    (folder / "latest_checkpointed_iteration.txt").write_text(str(saved))
    left = life.wait_for_the_end(1.0)
    assert not life.processes()
    return [*(["left"] if left else []), *life.problems_of_the_end(REFERENCE)]


@pytest.mark.parametrize(
    ("script", "losses", "saved", "problem"),
    [
        ("exit 143", REFERENCE[:3], 3, ""),
        ("kill -9 $$", REFERENCE[:3], 2, ""),
        ("exit 143", REFERENCE[:3], 2, "exit code 143 after iteration 3, of which 2 are saved"),
        ("kill -9 $$", [6.0, 5.5000000001], 2, "the loss of iteration 2 differs from the uninterrupted run's"),
        ("exit 0", REFERENCE[:3], 3, "exit code 0 after iteration 3 of 200"),
        ("echo resumed from iteration 2; exit 1", REFERENCE[:3], 2, "began at 2, and the newest checkpoint was 0"),
        ("echo another run writes into it; exit 1", REFERENCE[:3], 2, "the run folder was still locked"),
        ("sleep 60 & exit 1", REFERENCE[:3], 2, "left"),
    ],
)
def test_chaos_detects_faults(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, script: str, losses: list[float], saved: int, problem: str
) -> None:
    assert ended(tmp_path, monkeypatch, script, losses, saved) == ([problem] if problem else [])


def test_chaos_ignores_tracebacks_of_torchrun_itself() -> None:
    head = "Traceback (most recent call last):\n"
    torchs = head + '  File "/x/torch/distributed/run.py", line 1\n    run(args)\ntorch.distributed.ChildFailedError:\n'
    ours = head + '  File "/x/megatron_cp/loop.py", line 1, in train\n    step()\nRuntimeError: lost\n'
    assert not tracebacks(torchs, "torchrun") and len(tracebacks(torchs, "megatron_cp.torchrun")) == 1
    assert tracebacks(torchs + ours, "torchrun") == [
        'RuntimeError: lost (in File "/x/megatron_cp/loop.py", line 1, in train)'
    ]


def test_chaos_prints_strikes_and_recoveries() -> None:
    kind = ("SIGKILL", "rank", "saving", "torchrun")
    text = table([Strike(*kind, seconds=2.5), Strike(*kind, problems=["a traceback"])])
    assert "| SIGKILL | rank | saving | torchrun | 2 | 1 | 2.5 |" in text
    assert text.endswith("failed: SIGKILL, rank, saving, torchrun: a traceback")
