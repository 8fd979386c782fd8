"""Launch runs for ``chaos``: start them, find processes, check a clean end."""

from __future__ import annotations

import os
import re
import shlex
import signal
import subprocess
import sys
import time
import uuid
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path

import psutil

from megatron_cp.training.checkpoint.files import latest_iteration
from tests.functional_tests.soak import TINY, losses_of

ROOT = Path(__file__).parents[2]
LAUNCHERS = ("megatron_cp.torchrun", "torchrun", "megatron-cp train")  # the last one is a single process
ITERATIONS = 200
ENDS_WITHIN = 60.0  # seconds from a signal to the end of all processes; torchrun itself gives ranks 30
STARTS_WITHIN = 180.0
_MARK = "MEGATRON_CP_CHAOS"  # environment variable that all processes of a run inherit
_SETTINGS = (
    *TINY,
    f"train.train_iters={ITERATIONS}",
    *("checkpoint.save_interval=10", "dist.distributed_timeout_minutes=1"),
    *("model.cp_comm_type=p2p", "model.hierarchical_context_parallel_sizes=null"),
)


def ranks_of(launcher: str) -> int:
    return 1 if launcher == LAUNCHERS[2] else 2


def command(launcher: str, *settings: str) -> list[str]:
    """Return the command that trains the tiny model under a launcher."""
    ranks = ranks_of(launcher)
    module = {LAUNCHERS[0]: "megatron_cp.torchrun", LAUNCHERS[1]: "torch.distributed.run"}.get(launcher)
    program = [sys.executable, "-m", "megatron_cp", "train"]
    if module:
        program = [sys.executable, "-m", module, "--standalone", f"--nproc_per_node={ranks}"]
        program.append("scripts/training/run_recipe.py")
    recipe = ("--recipe", "llama_tiny_pretrain_config", f"model.context_parallel_size={ranks}")
    return [*program, *recipe, *_SETTINGS, *settings]


class Life:
    """One launched run, from its start until all of its processes have ended."""

    def __init__(self, launcher: str, folder: Path, log: Path, *settings: str) -> None:
        self.launcher, self.folder = launcher, folder
        self.resumes_at = latest_iteration(folder) or 0
        self.arguments = command(launcher, f"checkpoint.save={folder}", *settings)
        self._log, self._mark = log, uuid.uuid4().hex
        self.started, self._started_ns = time.monotonic(), time.time_ns()
        environment = os.environ | {"OMP_NUM_THREADS": "1", _MARK: self._mark}
        with log.open("w") as file:
            # Own session: signals to its process group do not reach this process.
            self._launched = subprocess.Popen(
                self.arguments, cwd=ROOT, env=environment, stdout=file, stderr=file, start_new_session=True
            )

    @property
    def text(self) -> str:
        return self._log.read_text(errors="replace")

    @property
    def code(self) -> int | None:
        """Return the launcher's exit code; None while it runs."""
        return self._launched.poll()

    @property
    def trains(self) -> bool:
        """Return whether this launch has written the numbers of an iteration."""
        return self.has_trained_since(self._started_ns)

    def has_trained_since(self, nanoseconds: int) -> bool:
        """Return whether an iteration's numbers were written after this ``time_ns()``."""
        with suppress(FileNotFoundError):
            return (self.folder / "metrics.jsonl").stat().st_mtime_ns > nanoseconds
        return False

    @property
    def saves(self) -> bool:
        """Return whether a checkpoint is being written now."""
        return any(self.folder.glob(".iter_*"))

    def wait_until(self, holds: Callable[[], bool], seconds: float = STARTS_WITHIN) -> bool:
        """Wait for a condition.

        Returns False if the launcher ends or the time is up before.
        """
        deadline = time.monotonic() + seconds
        while not holds():
            if self.code is not None or time.monotonic() > deadline:
                return False
            time.sleep(0.002)
        return True

    def processes(self) -> list[psutil.Process]:
        """Return all running processes, also those whose launcher has exited."""
        self._launched.poll()  # a launcher that has ended is no process
        return [each for each in psutil.process_iter() if _is_marked(each, self._mark)]

    def targets(self, target: str) -> list[psutil.Process]:
        """Return the processes called "all", "launcher" or "rank".

        "rank" gives all ranks: the caller draws one.
        """
        running = self.processes()
        if target == "all":
            return running
        launcher = [each for each in running if each.pid == self._launched.pid]
        # Writers and workers are forked from a rank and have its command line, but another parent.
        ranks = [each for each in running if _parent(each) == self._launched.pid and _is_rank(each)]
        return (ranks or launcher) if target == "rank" else launcher

    def wait_for_the_end(self, seconds: float = ENDS_WITHIN) -> list[str]:
        """Wait until all processes have ended; kill and name those left after ``seconds``."""
        deadline = time.monotonic() + seconds
        while (left := self.processes()) and time.monotonic() < deadline:
            time.sleep(0.1)
        names = [f"{each.pid} ({_state(each)})" for each in left]
        self.kill()
        return names

    def kill(self) -> None:
        while left := self.processes():
            send(left, signal.SIGKILL)
            time.sleep(0.05)
        self._launched.wait()

    def problems_of_the_end(self, reference: list[float]) -> list[str]:
        """List problems of an ended run: in its output, its losses, its checkpoints."""
        text, problems = self.text, []
        problems += [f"traceback: {error}" for error in tracebacks(text, self.launcher)]
        if "another run writes" in text:
            problems.append("the run folder was still locked")
        resumed = re.search(r"resumed from iteration (\d+)", text)
        began_at = int(resumed[1]) if resumed else 0
        if self.trains and began_at != self.resumes_at:
            problems.append(f"began at {began_at}, and the newest checkpoint was {self.resumes_at}")
        try:
            losses = losses_of(self.folder) if (self.folder / "metrics.jsonl").exists() else []
        except (AssertionError, ValueError) as error:
            return [*problems, f"metrics.jsonl: {error}"]
        if losses != reference[: len(losses)]:
            first = next(i for i, (a, b) in enumerate(zip(losses, reference, strict=False), 1) if a != b)
            problems.append(f"the loss of iteration {first} differs from the uninterrupted run's")
        latest = latest_iteration(self.folder) or 0
        if latest < self.resumes_at:
            problems.append(f"the newest checkpoint is {latest}, and was {self.resumes_at}")
        if self.trains and self.code in (0, 130, 143, 129) and latest != len(losses):
            problems.append(f"exit code {self.code} after iteration {len(losses)}, of which {latest} are saved")
        if self.code == 0 and len(losses) != ITERATIONS:
            problems.append(f"exit code 0 after iteration {len(losses)} of {ITERATIONS}")
        return problems

    def __str__(self) -> str:
        return f"{_MARK}={self._mark} {shlex.join(self.arguments)} (output: {self._log})"


def send(processes: list[psutil.Process], number: signal.Signals) -> None:
    for each in processes:
        with suppress(psutil.NoSuchProcess):
            each.send_signal(number)


def tracebacks(text: str, launcher: str) -> list[str]:
    """Return the last line of each traceback.

    Except those that plain torchrun prints when a rank fails.
    """
    found = []
    for block in text.split("Traceback (most recent call last):")[1:]:
        frames, last = [], "cut off"
        for line in block.splitlines()[1:]:
            if line and not line.startswith((" ", "[rank")):
                last = line
                break
            frames.append(line)
        of_torchrun = launcher == "torchrun" and not any(name in "".join(frames) for name in ("megatron", "run_recipe"))
        if not of_torchrun:
            found.append(f"{last[:160]} (in {frames[-2].strip() if len(frames) > 1 else '?'})")
    signs = ("Fatal Python error", "terminate called", "Segmentation fault")
    return found + [sign for sign in signs if sign in text]


def _is_marked(process: psutil.Process, mark: str) -> bool:
    try:
        return f"{_MARK}={mark}".encode() in Path(f"/proc/{process.pid}/environ").read_bytes()
    except OSError:
        return False  # a zombie has ended too


def _parent(process: psutil.Process) -> int:
    with suppress(psutil.NoSuchProcess):
        return process.ppid()
    return 0


def _is_rank(process: psutil.Process) -> bool:
    with suppress(psutil.NoSuchProcess):
        return "run_recipe" in " ".join(process.cmdline())
    return False


def _state(process: psutil.Process) -> str:
    with suppress(psutil.NoSuchProcess):
        return f"{process.status()}, {' '.join(process.cmdline())[:80]}"
    return "ended"
