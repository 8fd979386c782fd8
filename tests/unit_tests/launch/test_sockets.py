"""Addresses of launchers and ranks, and what ends with a launcher.

A port in use is an error. Ranks end with their launcher.
"""

import base64
import os
import pickle
import re
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from datetime import timedelta
from pathlib import Path
from typing import Any

import psutil
import pytest
import torch.distributed as dist

from megatron_cp.common.errors import RuntimeFault
from megatron_cp.launch import sockets
from tests.ranks import free_port, run_ranks

ROOT = Path(__file__).parents[3]
RANK = """
import os, sys, time
from datetime import timedelta
from pathlib import Path

import torch.distributed as dist

from megatron_cp.launch.rendezvous import rendezvous
from megatron_cp.launch.sockets import use_one_interface
from megatron_cp.launch.process import end_with_launcher

end_with_launcher()
use_one_interface()
store, rank, size = rendezvous("gloo", timedelta(minutes=2))
dist.init_process_group("gloo", store=store, rank=rank, world_size=size)
dist.barrier()
Path(f"ready{rank}").touch()
time.sleep(300)
"""

Launch = Callable[..., subprocess.Popen]


@pytest.fixture
def launch(tmp_path: Path) -> Iterator[Launch]:
    """Start a launcher of ranks that rendezvous and wait, in its own folder."""
    launched: list[subprocess.Popen] = []

    def start(*options: str, module: str = "megatron_cp.torchrun", folder: str = "run") -> subprocess.Popen:
        (tmp_path / folder).mkdir(exist_ok=True)
        (tmp_path / folder / "rank.py").write_text(RANK)
        environment = os.environ | {"OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT)}
        command = [sys.executable, "-m", module, *options, "rank.py"]
        launched.append(
            subprocess.Popen(command, env=environment, cwd=tmp_path / folder, stderr=subprocess.PIPE, text=True)
        )
        return launched[-1]

    yield start
    for each in launched:
        if each.poll() is None:
            for child in psutil.Process(each.pid).children(recursive=True):
                child.kill()
            each.kill()
        each.wait()
        each.stderr.close()


def wait_for(folder: Path, ranks: int, *launched: subprocess.Popen) -> None:
    deadline = time.monotonic() + 120
    while not all((folder / f"ready{rank}").exists() for rank in range(ranks)):
        for each in launched:
            assert each.poll() is None, each.communicate()
        assert time.monotonic() < deadline
        time.sleep(0.05)


def listeners(process: psutil.Process) -> set[tuple[str, int]]:
    """Return the addresses and ports on which a process and its children listen."""
    tree = [process, *process.children(recursive=True)]
    found = [each.laddr for one in tree for each in one.net_connections("inet") if each.status == "LISTEN"]
    return {(each.ip, each.port) for each in found}


def listening(process: psutil.Process) -> set[str]:
    """Return the addresses on which a process and its children listen."""
    found = {ip for ip, _ in listeners(process)}
    assert found
    return found


def test_two_runs_on_this_machine(launch: Launch, tmp_path: Path) -> None:
    """Each run must find ports of its own, and listen on the loopback alone.

    If one launcher is killed, its ranks end.
    """
    runs = {name: launch("--nproc_per_node=2", folder=name) for name in ("a", "b")}
    for name, run in runs.items():
        wait_for(tmp_path / name, 2, run)
        assert listening(psutil.Process(run.pid)) == {"127.0.0.1"}
    ranks = {name: psutil.Process(run.pid).children() for name, run in runs.items()}
    runs["a"].kill()
    gone, left = psutil.wait_procs(ranks["a"], timeout=30.0)
    assert len(gone) == 2 and left == [] and all(rank.is_running() for rank in ranks["b"])


@pytest.mark.parametrize("backend", ["c10d", pytest.param("static", marks=pytest.mark.slow)])
def test_launchers_of_two_nodes_listen_on_the_given_address(launch: Launch, tmp_path: Path, backend: str) -> None:
    port, where = free_port(), ["--nnodes=2", "--nproc_per_node=1"]
    if backend == "c10d":
        where += ["--rdzv_backend=c10d", f"--rdzv_endpoint=127.0.0.2:{port}", "--rdzv_conf=is_host={}"]
    else:
        where += ["--node_rank={}", "--master_addr=127.0.0.2", f"--master_port={port}"]
    nodes = [launch(*(each.format(node) for each in where)) for node in ((1, 0) if backend == "c10d" else (0, 1))]
    wait_for(tmp_path / "run", 2, *nodes)
    found = set.union(*(listening(psutil.Process(node.pid)) for node in nodes))
    assert "127.0.0.2" in found and found <= {"127.0.0.1", "127.0.0.2"}


@pytest.mark.slow
def test_ranks_end_with_torchs_launcher(launch: Launch, tmp_path: Path) -> None:
    run = launch("--standalone", "--nproc_per_node=2", module="torch.distributed.run")
    wait_for(tmp_path / "run", 2, run)
    ranks = psutil.Process(run.pid).children()
    assert len(ranks) == 2
    run.kill()
    assert psutil.wait_procs(ranks, timeout=30.0)[1] == []


def test_a_rank_whose_launcher_ended_first_ends(tmp_path: Path) -> None:
    """The launcher ends before the rank has registered for the kernel's signal."""
    environment = os.environ | {"TORCHELASTIC_RUN_ID": "1"}
    rank = "from megatron_cp.launch.process import *; {}; end_with_launcher(); print('goes on')"
    gone = "import os; pid = os.fork(); pid or os._exit(0); os.waitpid(pid, 0)"
    lost = f"{gone}; announce_launcher(); import os; os.environ['MEGATRON_CP_LAUNCHER'] = "
    lost += "str(pid) + os.environ['MEGATRON_CP_LAUNCHER'].lstrip('0123456789')"
    for before, code, text in (
        (lost, 1, "megatron-cp: the launcher was killed; aborting\n"),
        ("announce_launcher()", 0, ""),
    ):
        command = [sys.executable, "-c", rank.format(before)]
        ended = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True)
        assert (ended.returncode, ended.stderr) == (code, text)


class Code:
    """What runs code where it is unpickled."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def __reduce__(self) -> Any:
        return os.mkdir, (str(self.path),)


def test_values_in_the_launchers_store_run_no_code(launch: Launch, tmp_path: Path) -> None:
    port = free_port()
    where = ("--nnodes=2", "--rdzv_backend=c10d", f"--rdzv_endpoint=127.0.0.1:{port}")
    run = launch(*where)
    store = dist.TCPStore("127.0.0.1", port, is_master=False, timeout=timedelta(seconds=60))
    store.set("torch.rendezvous.none", base64.b64encode(pickle.dumps(Code(tmp_path / "code ran"))).decode())
    text = run.communicate(timeout=180)[1]
    assert run.returncode == 1 and "RendezvousStateError" in text and "Traceback" not in text, text
    assert not (tmp_path / "code ran").exists()


@pytest.fixture
def taken() -> Iterator[int]:
    """Yield a port of a program that listens but never answers."""
    with socket.socket() as other:
        other.bind(("127.0.0.1", 0))
        other.listen()
        yield other.getsockname()[1]


@pytest.mark.parametrize(
    "where",
    [
        "--rdzv_backend=c10d --rdzv_endpoint=localhost:{}",
        pytest.param("--master_port={}", marks=pytest.mark.slow),
        "--nnodes=2 --node_rank=0 --master_addr=127.0.0.1 --master_port={}",
    ],
)
def test_a_launcher_names_a_port_that_is_taken(launch: Launch, tmp_path: Path, taken: int, where: str) -> None:
    run = launch(*where.format(taken).split())
    text = run.communicate(timeout=180)[1]
    expected = f"megatron-cp: port {taken} of 127.0.0.1: another process listens there. Fix: "
    assert run.returncode == 1 and text.startswith(expected) and text.count("\n") == 1, text


@pytest.mark.slow
def test_the_named_fix_works(launch: Launch, tmp_path: Path, taken: int) -> None:
    text = launch(f"--master_port={taken}").communicate(timeout=180)[1]
    (fix,) = re.findall(r"Fix: (\S+),", text)
    wait_for(tmp_path / "run", 1, launch(fix))


def keep_the_store(address: str, seconds: float) -> tuple[str, set[str]]:
    """Return the message of a rank started without a launcher, and its addresses.

    A forked rank inherits the sockets of the test process, where an earlier test may have left a store.
    """
    inherited = listeners(psutil.Process())
    os.environ["MASTER_ADDR"] = address
    if address != "localhost":
        os.environ["LOCAL_WORLD_SIZE"] = "1"
    try:
        store, rank, size = sockets.environment_store(timedelta(seconds=seconds))
    except RuntimeFault as fault:
        return str(fault), set()
    store.set(f"here{rank}", "")
    store.wait([f"here{each}" for each in range(size)])
    return "", {ip for ip, _ in listeners(psutil.Process()) - inherited} if rank == 0 else set()


@pytest.fixture
def without_launcher(monkeypatch: pytest.MonkeyPatch) -> pytest.MonkeyPatch:
    monkeypatch.setenv("MEGATRON_CP_TEST_NO_INIT", "1")
    monkeypatch.setenv("MASTER_PORT", str(free_port()))
    return monkeypatch


@pytest.mark.parametrize("address", ["localhost", "127.0.0.2"])
def test_rank_0_keeps_the_store_on_one_address(without_launcher: pytest.MonkeyPatch, address: str) -> None:
    (_, found), _ = run_ranks(keep_the_store, 2, address, 60.0)
    assert found == {"127.0.0.1" if address == "localhost" else address}


def test_ranks_without_a_launcher_name_a_port_that_is_taken(without_launcher: pytest.MonkeyPatch, taken: int) -> None:
    without_launcher.setenv("MASTER_PORT", str(taken))
    ((text, _),) = run_ranks(keep_the_store, 1, "localhost", 1.0)
    assert text.startswith(f"MASTER_ADDR=127.0.0.1, MASTER_PORT={taken}: port {taken} of 127.0.0.1: another process")


def test_an_address_of_another_machine_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    """An address behind a translation of addresses must be named.

    The fix lets others connect.
    """
    port = free_port()
    with pytest.raises(RuntimeFault, match=f"port {port} of 192.0.2.1: Cannot .* or set MEGATRON_CP_LISTEN=0.0.0.0"):
        sockets._store_at("192.0.2.1", port, 2, True, timedelta(seconds=5))
    monkeypatch.setenv("MEGATRON_CP_LISTEN", "0.0.0.0")
    with sockets._listen("192.0.2.1", port):
        assert listening(psutil.Process()) >= {"0.0.0.0"}


def test_a_silent_program_on_the_port_times_out(taken: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sockets, "_SECONDS_TO_ANSWER", 0.5)
    with pytest.raises(sockets.PortError, match=f"port {taken} of 127.0.0.1: no store answered within 2 "):
        sockets.tcp_store("127.0.0.1", taken, timeout=timedelta(seconds=1))


def test_a_rank_does_not_wait_for_an_exited_launcher(
    without_launcher: pytest.MonkeyPatch, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sockets, "_SECONDS_REFUSED", 0.3)
    without_launcher.setenv("TORCHELASTIC_USE_AGENT_STORE", "True")
    ((text, _),) = run_ranks(keep_the_store, 1, "127.0.0.1", 60.0, timeout=55.0)
    assert "the launcher exited, and with it the store of torch.distributed. Fix: start the run again" in text
