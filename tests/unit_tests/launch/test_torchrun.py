"""The patient launcher: signalled ranks get time to save, and are not restarted."""

import fcntl
import os
import pty
import signal
import subprocess
import sys
import termios
import time
from collections.abc import Callable
from pathlib import Path

import psutil
import pytest

from tests.ranks import free_port

ROOT = Path(__file__).parents[3]

# Ranks like a run's: when one is asked to stop all do, write and end with 143; rank 0 at once, rank 1 after some
# seconds, in which SIGTERM is not expected any more, and a second SIGINT ends it.
RANK = """
import os, signal, sys, time
from pathlib import Path

folder, rank, restart = Path(sys.argv[1]), os.environ["RANK"], os.environ["TORCHELASTIC_RESTART_COUNT"]
seconds, how = float(sys.argv[2]), sys.argv[3]
asked = []
def ask(number, frame):
    asked.append(signal.Signals(number).name)
    (folder / f"asked{rank}").touch()
signal.signal(signal.SIGTERM, ask)
signal.signal(signal.SIGINT, ask)
if signal.getsignal(signal.SIGHUP) != signal.SIG_IGN:
    signal.signal(signal.SIGHUP, ask)
(folder / f"pid{rank}.{restart}.tmp").write_text(str(os.getpid()))
(folder / f"pid{rank}.{restart}.tmp").rename(folder / f"pid{rank}.{restart}")
if how in ("fail", "refuse") and rank == "0":
    sys.exit({"fail": 1, "refuse": 2}[how])
if how == "die" and rank == "0":
    os.kill(os.getpid(), signal.SIGKILL)
while not list(folder.glob("asked*")):
    time.sleep(0.02)
time.sleep(0.5)  # a launcher asks one rank after the other
signal.signal(signal.SIGTERM, signal.SIG_DFL)
end = time.monotonic() + seconds * int(rank)
while time.monotonic() < end and len(asked) < 2:
    time.sleep(0.02)
(folder / f"saved{rank}").write_text(" ".join(asked))
sys.exit(143)
"""

# Ranks that do not detect each other's failures, as with NCCL.
DEAF = """
import os, signal, sys, time
from datetime import timedelta
from pathlib import Path

import torch.distributed as dist

from megatron_cp.common.errors import RuntimeFault
from megatron_cp.launch.rendezvous import rendezvous
from megatron_cp.launch import health_monitor

folder, rank, how = Path(sys.argv[1]), os.environ["RANK"], sys.argv[3]
health_monitor._GRACE = 1.0
if how == "die" and rank == "1":
    os.kill(os.getpid(), signal.SIGKILL)
if how == f"interrupted{rank}":
    sys.exit(130)
try:
    store, _, size = rendezvous("gloo", timedelta(minutes=2))
except RuntimeFault as fault:
    sys.exit(f"megatron-cp: {fault}")
dist.init_process_group("gloo", store=store, rank=int(rank), world_size=size)
health_monitor.HealthMonitor()
dist.barrier()
(folder / f"pid{rank}.tmp").write_text(str(os.getpid()))
(folder / f"pid{rank}.tmp").rename(folder / f"pid{rank}.0")
time.sleep(300)
"""

OUTLIVING_LAUNCHER = """
import signal, subprocess, sys
from pathlib import Path

signal.signal(signal.SIGHUP, lambda number, frame: None)
command = [sys.executable, "-m", "megatron_cp.torchrun", "--nproc_per_node=2", "rank.py", ".", "2", "stop"]
code = subprocess.call(command)
Path("code.tmp").write_text(str(code))
Path("code.tmp").rename("code")
"""

ALONE = ("--standalone", "--nproc_per_node=2")


class Launched:
    """Launcher of two ranks; rank 1 works for ``seconds`` more after a stop signal."""

    def __init__(
        self, folder: Path, options: tuple[str, ...], seconds: float, how: str, patience: str | None, script: str
    ):
        self.folder = folder
        (folder / "rank.py").write_text(script)
        environment = os.environ | {"OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT)}
        if patience is not None:
            environment["MEGATRON_CP_STOP_SECONDS"] = patience
        self.process = subprocess.Popen(
            [
                *(sys.executable, "-m", "megatron_cp.torchrun", *(options or ALONE)),
                *(folder / "rank.py", folder, str(seconds), how),
            ],
            env=environment,
            cwd=folder,
            stderr=subprocess.PIPE,
            text=True,
        )

    def pids(self, restart: int = 0) -> list[int]:
        """Return the ranks' ids, once both handle signals."""
        files = [self.folder / f"pid{rank}.{restart}" for rank in range(2)]
        deadline = time.monotonic() + 120
        while not all(file.exists() for file in files):
            assert time.monotonic() < deadline and self.process.poll() is None, self.process.communicate()
            time.sleep(0.02)
        return [int(file.read_text()) for file in files]

    def ended(self) -> tuple[int, str]:
        """Return the exit code and the output."""
        _, text = self.process.communicate(timeout=120)
        return self.process.returncode, text

    def written(self, pattern: str) -> list[str]:
        return sorted(path.name for path in self.folder.glob(pattern))


@pytest.fixture
def launch(tmp_path: Path) -> Callable[..., Launched]:
    launched = []

    def start(
        *options: str, seconds: float = 0.0, how: str = "stop", patience: str | None = None, script: str = RANK
    ) -> Launched:
        launched.append(Launched(tmp_path, options, seconds, how, patience, script))
        return launched[-1]

    yield start
    for each in launched:
        if each.process.poll() is None:
            for child in psutil.Process(each.process.pid).children(recursive=True):
                child.kill()
            each.process.kill()
            each.process.wait()


def test_ranks_have_the_time_they_need(launch: Callable[..., Launched]) -> None:
    run = launch(seconds=2.0, patience="60")
    run.pids()
    run.process.terminate()
    code, text = run.ended()
    assert code == 143 and run.written("saved*") == ["saved0", "saved1"], text
    assert "megatron-cp: SIGTERM: sent to the ranks, which exited with 143\n" in text and "Traceback" not in text, text


@pytest.mark.slow
def test_they_are_killed_when_it_is_over(launch: Callable[..., Launched]) -> None:
    run = launch(seconds=12.0, patience="1")
    run.pids()
    run.process.terminate()
    code, text = run.ended()
    assert code == 1 and run.written("saved*") == ["saved0"], text
    assert "megatron-cp: SIGTERM: sent to the ranks, which exited with -9, 143\n" in text and "Traceback" not in text, (
        text
    )


@pytest.mark.slow
def test_ranks_get_the_launchers_second_signal(launch: Callable[..., Launched]) -> None:
    run = launch(seconds=100.0)
    run.pids()
    run.process.send_signal(signal.SIGINT)
    while run.written("asked*") != ["asked0", "asked1"]:
        time.sleep(0.02)
    run.process.send_signal(signal.SIGINT)
    code, text = run.ended()
    assert code == 130 and "Traceback" not in text, text
    assert (run.folder / "saved1").read_text() == "SIGINT SIGINT"


def test_a_terminal_that_hangs_up_stops_the_ranks(tmp_path: Path) -> None:
    """A closed ssh connection must stop the ranks.

    The terminal's shell and the launcher get SIGHUP, some of them twice, and nothing that is written arrives.
    """
    environment = os.environ | {"OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT)}
    (tmp_path / "rank.py").write_text(RANK)
    (tmp_path / "launch.py").write_text(OUTLIVING_LAUNCHER)
    terminal, slave = pty.openpty()
    shell = subprocess.Popen(
        ["bash", "--norc", "-i"], stdin=slave, stdout=slave, stderr=slave, env=environment, cwd=tmp_path,
        preexec_fn=take_terminal, start_new_session=True,
    )  # fmt: skip
    os.close(slave)
    os.write(terminal, f"{sys.executable} launch.py\n".encode())
    deadline = time.monotonic() + 120
    while not all((tmp_path / f"pid{rank}.0").exists() for rank in range(2)):
        assert time.monotonic() < deadline, os.read(terminal, 10000)
        time.sleep(0.05)
    os.close(terminal)
    shell.wait(timeout=180)
    while not (tmp_path / "code").exists():
        assert time.monotonic() < deadline
        time.sleep(0.05)
    assert (tmp_path / "code").read_text() == "129"
    assert sorted(path.name for path in tmp_path.glob("saved*")) == ["saved0", "saved1"]
    assert (tmp_path / "saved0").read_text().split()[0] == "SIGHUP"


@pytest.mark.slow
def test_a_signal_that_comes_again_and_again_is_one(launch: Callable[..., Launched]) -> None:
    """A terminal's shell and the kernel both send SIGHUP, shortly after each other."""
    run = launch(seconds=2.0)
    run.pids()
    for _ in range(200):
        run.process.send_signal(signal.SIGHUP)
        time.sleep(0.0005)
    code, text = run.ended()
    assert code == 129 and run.written("saved*") == ["saved0", "saved1"] and "Traceback" not in text, text


def take_terminal() -> None:
    """Make standard input the session's terminal."""
    fcntl.ioctl(0, termios.TIOCSCTTY, 0)


@pytest.mark.slow
def test_nohup_ignores_a_terminal_that_hangs_up(launch: Callable[..., Launched]) -> None:
    previous = signal.signal(signal.SIGHUP, signal.SIG_IGN)  # new processes ignore it too
    try:
        run = launch()
    finally:
        signal.signal(signal.SIGHUP, previous)
    for process in (*run.pids(), run.process.pid):
        os.kill(process, signal.SIGHUP)
    time.sleep(0.5)
    assert run.process.poll() is None and run.written("asked*") == []
    run.process.terminate()
    assert run.ended()[0] == 143 and run.written("saved*") == ["saved0", "saved1"]


@pytest.mark.slow
def test_stopped_runs_are_not_restarted(launch: Callable[..., Launched]) -> None:
    """Rank 0 ends two seconds before rank 1, which a signal would end by then."""
    run = launch(*ALONE, "--max-restarts=1", seconds=2.0)
    os.kill(run.pids()[0], signal.SIGTERM)
    code, text = run.ended()
    assert code == 143 and "Traceback" not in text, text
    assert run.written("saved*") == ["saved0", "saved1"] and run.written("pid*.1") == [], text


def test_launchers_of_two_nodes_rendezvous(launch: Callable[..., Launched]) -> None:
    """A stop signal to one launcher must stop the ranks of both.

    Neither launcher then waits for the other.
    """
    where = ("--nnodes=2", "--nproc_per_node=1", "--master_addr=127.0.0.1", f"--master_port={free_port()}")
    nodes = [launch(*where, f"--node_rank={node}", seconds=2.0) for node in range(2)]
    nodes[0].pids()
    nodes[0].process.terminate()
    for code, text in [node.ended() for node in nodes]:
        assert code == 143 and "exit barrier" not in text, text
    assert nodes[0].written("saved*") == ["saved0", "saved1"]


@pytest.mark.parametrize("how", [pytest.param("kill", marks=pytest.mark.slow), "die"])
def test_other_nodes_report_a_killed_rank(launch: Callable[..., Launched], how: str) -> None:
    """Other nodes must report it before and after the rendezvous."""
    where = ("--nnodes=2", "--nproc_per_node=1", "--master_addr=127.0.0.1", f"--master_port={free_port()}")
    nodes = [launch(*where, f"--node_rank={node}", how=how, script=DEAF) for node in range(2)]
    if how == "kill":
        os.kill(nodes[0].pids()[1], signal.SIGKILL)
    (code, text), (_, other) = [node.ended() for node in nodes]
    assert code == 1 and "killed by signal 9 (Killed)" in text and "Traceback" not in text, text
    assert ("aborting because rank 1 had failed" if how == "kill" else "exited before the rendezvous") in text, text
    assert "megatron-cp: rank 1 failed first: killed by signal 9" in other, other


@pytest.mark.parametrize("rank", [0, pytest.param(1, marks=pytest.mark.slow)])
def test_ranks_exit_if_one_stops_before_the_rendezvous(launch: Callable[..., Launched], rank: int) -> None:
    """Ctrl-C in one rank while it starts must end the others."""
    started = time.monotonic()
    code, text = launch(how=f"interrupted{rank}", script=DEAF).ended()
    assert code == 130 and f"megatron-cp: rank {rank} stopped before the rendezvous" in text, text
    assert time.monotonic() - started < 60 and "Traceback" not in text, text


def test_a_launcher_reports_a_lost_store(launch: Callable[..., Launched]) -> None:
    """torchrun itself ends with a traceback."""
    port = free_port()
    where = ("--nnodes=2", "--nproc_per_node=1", "--rdzv_backend=c10d", f"--rdzv_endpoint=127.0.0.1:{port}")
    first = launch(*where)
    while port not in [each.laddr.port for each in psutil.Process(first.process.pid).net_connections()]:
        assert first.process.poll() is None, first.ended()
        time.sleep(0.02)
    second = launch(*where)
    first.pids()
    ranks = psutil.Process(first.process.pid).children()
    first.process.kill()
    for rank in ranks:
        rank.kill()
    code, text = second.ended()
    assert code == 1 and "lost contact with the launchers on other nodes (RendezvousConnectionError: " in text, text
    assert "Traceback" not in text, text


@pytest.mark.slow
def test_a_launcher_without_peers_reports_it(launch: Callable[..., Launched]) -> None:
    where = ("--nnodes=2", "--nproc_per_node=1", "--rdzv_backend=c10d", f"--rdzv_endpoint=127.0.0.1:{free_port()}")
    code, text = launch(*where, "--rdzv_conf=join_timeout=2").ended()
    assert code == 1 and "lost contact with the launchers on other nodes (RendezvousTimeoutError)" in text, text
    assert "Traceback" not in text, text


def test_a_rank_that_continues_after_others_stopped_has_failed(launch: Callable[..., Launched]) -> None:
    run = launch(seconds=60.0, patience="1")
    os.kill(run.pids()[0], signal.SIGTERM)
    code, text = run.ended()
    assert code == 1 and "rank 1 failed first: killed by signal" in text and "Traceback" not in text, text
    assert run.written("saved*") == ["saved0"], text


def test_failed_runs_are_restarted(launch: Callable[..., Launched]) -> None:
    """A run must also restart where the ranks that torch stops end with 143."""
    run = launch(*ALONE, "--max-restarts=1", how="fail")
    code, text = run.ended()
    assert code == 1 and "megatron-cp: rank 0 failed first: exit code 1; its messages are above\n" in text, text
    assert "Traceback" not in text, text
    assert run.written("pid0.*") == ["pid0.0", "pid0.1"], text


def test_a_wrong_recipe_is_reported_once(launch: Callable[..., Launched]) -> None:
    run = launch(*ALONE, "--max-restarts=2", how="refuse")
    code, text = run.ended()
    assert code == 2 and text == "", text  # the rank itself reports the error
    assert run.written("pid0.*") == ["pid0.0"], text


def test_a_rank_that_is_killed_is_named(launch: Callable[..., Launched]) -> None:
    run = launch(how="die")
    code, text = run.ended()
    assert code == 1 and "rank 0 failed first: killed by signal 9\n" in text and "Traceback" not in text, text


def test_patience_is_a_number(launch: Callable[..., Launched]) -> None:
    run = launch(patience="10m")
    code, text = run.ended()
    assert (code, text) == (
        2,
        "megatron-cp: error K35: MEGATRON_CP_STOP_SECONDS: the variable must be a number, got '10m'\n"
        "    fix: a number of whole seconds, or unset it\n",
    )
    assert run.written("pid*") == []


def test_ctrl_c_while_torch_is_imported_is_one_line() -> None:
    script = """
import os, runpy, signal, sys
class Interrupting:
    def find_spec(self, name, *others):
        if name == "torch":
            os.kill(os.getpid(), signal.SIGINT)
import megatron_cp  # which looks for torch first
sys.meta_path.insert(0, Interrupting())
runpy.run_module("megatron_cp.torchrun", run_name="__main__")
"""
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, timeout=180, check=False)
    assert (done.returncode, done.stdout, done.stderr) == (130, "", "megatron-cp: interrupted\n")
