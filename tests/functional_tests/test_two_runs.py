"""Two real launchers on one run folder: one trains, and the other waits.

The other then resumes or fails.
"""

from __future__ import annotations

import os
import re
import signal
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import psutil
import pytest

from megatron_cp.training.checkpoint.run_lock import LOCK
from tests.functional_tests.test_restarts import ROOT, command, losses

pytestmark = [pytest.mark.slow, pytest.mark.timeout(600)]
TORCHRUN, OURS = "torch.distributed.run", "megatron_cp.torchrun"
SCHEDULE = "scheduler.lr_decay_iters=100000"  # the same however long a run is
IMPATIENT = "dist.distributed_timeout_minutes=0.2"  # half of that is how long the run waits for another


class Launched:
    """Launcher with two ranks, and all their output."""

    def __init__(self, folder: Path, name: str, module: str, *settings: str, steps: int) -> None:
        self._log = folder / f"{name}.log"
        with self._log.open("w") as log:
            self.process = psutil.Popen(
                [*command(folder / "run", "--standalone", module=module, steps=steps), SCHEDULE, *settings],
                cwd=ROOT,
                env=os.environ | {"OMP_NUM_THREADS": "1"},
                stdout=log,
                stderr=log,
            )

    @property
    def text(self) -> str:
        return self._log.read_text()

    def wait_for(self, text: str, seconds: float = 120) -> None:
        deadline = time.monotonic() + seconds
        while not re.search(text, self.text):
            assert self.process.poll() is None and time.monotonic() < deadline, self.text[-3000:]
            time.sleep(0.05)

    def end(self) -> int:
        code = self.process.wait(timeout=200)
        assert "Traceback" not in self.text, self.text
        return code

    def kill(self) -> None:
        """Send SIGKILL to the launcher and everything that it started."""
        if self.process.poll() is None:
            for each in [*self.process.children(recursive=True), self.process]:
                each.send_signal(signal.SIGKILL)
            self.process.wait()


@contextmanager
def killed_at_the_end(*launched: Launched) -> Iterator[None]:
    try:
        yield
    finally:
        for each in launched:
            each.kill()


def is_locked(folder: Path) -> bool:
    return f":{(folder / LOCK).stat().st_ino} " in Path("/proc/locks").read_text()


def test_two_runs_in_one_folder_train_one_after_the_other(tmp_path: Path) -> None:
    runs = [Launched(tmp_path, str(number), module, steps=100) for number, module in enumerate([TORCHRUN, OURS])]
    with killed_at_the_end(*runs):
        assert [each.end() for each in runs] == [0, 0], runs[0].text + runs[1].text
    first, second = sorted(runs, key=lambda each: "Waiting 120 s for that run to end" in each.text)
    assert "another run" not in first.text and "nothing to do: already at iteration 100" in second.text, second.text
    assert "saved checkpoint" in first.text and "saved checkpoint" not in second.text, second.text
    assert [iteration for iteration, _ in losses(tmp_path / "run")] == list(range(1, 101))


def test_a_second_run_is_refused_until_the_first_is_killed(tmp_path: Path) -> None:
    first = Launched(tmp_path, "first", OURS, steps=100000)
    with killed_at_the_end(first):
        first.wait_for("saved checkpoint")
        assert is_locked(tmp_path / "run")
        second = Launched(tmp_path, "second", OURS, IMPATIENT, steps=100000)
        with killed_at_the_end(second):
            assert second.end() == 1
        assert re.search("another run writes into this folder .process [0-9]+ on .*Fix: wait until", second.text)
        assert second.text.count("Fix:") == 1 and "saved checkpoint" not in second.text, second.text
        assert is_locked(tmp_path / "run") and first.process.poll() is None
        first.kill()
    reached = losses(tmp_path / "run")[-1][0]
    third = Launched(tmp_path, "third", TORCHRUN, steps=reached + 20)
    with killed_at_the_end(third):
        assert third.end() == 0, third.text
    assert "another run" not in third.text and "resumed from iteration" in third.text, third.text
    assert [iteration for iteration, _ in losses(tmp_path / "run")] == list(range(1, reached + 21))
