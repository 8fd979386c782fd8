"""The Slurm script under a real Slurm.

The cluster has two "nodes" on this machine (Debian: slurm-wlm and munge).
"""

import getpass
import os
import shutil
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from tests.ranks import free_port

ROOT = Path(__file__).parents[2]
DAEMONS = {
    name: shutil.which(name, path=f"{os.environ['PATH']}:/usr/sbin") for name in ("munged", "slurmctld", "slurmd")
}

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(None in DAEMONS.values(), reason="needs Slurm (slurmctld, slurmd, munged)"),
]

# Tasks are bound to as many cores as they request.
CONFIGURATION = """\
ClusterName=test
SlurmctldHost={host}
SlurmctldPort={ports[0]}
SlurmUser={user}
SlurmdUser={user}
AuthType=auth/munge
AuthInfo=socket={folder}/munge.socket
ProctrackType=proctrack/linuxproc
TaskPlugin=task/affinity
TaskPluginParam=autobind=cores
SelectType=select/cons_tres
SlurmdParameters=config_overrides
MpiDefault=none
SlurmctldPidFile={folder}/slurmctld.pid
SlurmdPidFile={folder}/%n.pid
SlurmdSpoolDir={folder}/%n
StateSaveLocation={folder}
SlurmctldLogFile={folder}/slurmctld.log
SlurmdLogFile={folder}/%n.log
NodeName=first NodeHostname={host} Port={ports[1]} CPUs=2
NodeName=second NodeHostname={host} Port={ports[2]} CPUs=2
PartitionName=all Nodes=ALL Default=YES
"""


@pytest.fixture
def slurm() -> Iterator[Callable[..., str]]:
    """Call a command of Slurm and return its output."""
    folder = Path(tempfile.mkdtemp(prefix="slurm"))  # sockets' paths are short
    (folder / "munge.key").write_bytes(os.urandom(1024))
    (folder / "munge.key").chmod(0o400)
    ports = [free_port() for _ in range(3)]
    configuration = CONFIGURATION.format(folder=folder, host=socket.gethostname(), user=getpass.getuser(), ports=ports)
    (folder / "slurm.conf").write_text(configuration)
    version = subprocess.run([str(DAEMONS["slurmd"]), "-V"], capture_output=True, text=True, check=True).stdout
    if int(version.split()[-1].split(".")[0]) > 22:  # older versions do not look for cgroups unless configured
        (folder / "cgroup.conf").write_text("CgroupPlugin=disabled\n")
    environment = {name: value for name, value in os.environ.items() if not name.startswith("SLURM_")}
    environment["SLURM_CONF"] = str(folder / "slurm.conf")
    # Address of the rendezvous: only Slurm can resolve the nodes' names.
    (folder / "bin").mkdir()
    (folder / "bin" / "scontrol").write_text("#!/bin/sh\necho localhost\n")
    (folder / "bin" / "scontrol").chmod(0o755)
    environment["PATH"] = f"{folder / 'bin'}:{environment['PATH']}"
    munge = [
        "--force",
        "--foreground",
        *(f"--{kind}-file={folder}/munge.{kind}" for kind in ("key", "pid", "log", "seed")),
    ]
    daemons = []

    def start(name: str, *arguments: str) -> None:
        command = [str(DAEMONS[name]), *arguments]
        daemons.append(subprocess.Popen(command, env=environment, stderr=subprocess.DEVNULL))

    def call(*command: str, **more: str) -> str:
        done = subprocess.run(command, env=environment | more, cwd=ROOT, capture_output=True, text=True, timeout=180)
        assert done.returncode == 0, done.stderr
        return done.stdout.strip()

    try:
        start("munged", *munge, f"--socket={folder}/munge.socket")
        wait_for((folder / "munge.socket").exists)
        start("slurmctld", "-D")
        for node in ("first", "second"):
            start("slurmd", "-D", "-N", node)
        wait_for(lambda: "2 idle" in call("sinfo", "--noheader", "--format=%D %t"))
        yield call
    finally:
        with suppress(AssertionError):  # a controller that did not start has no jobs
            call("scancel", f"--user={getpass.getuser()}")
            wait_for(lambda: not call("squeue", "--noheader"), seconds=60)
        for daemon in reversed(daemons):
            daemon.terminate()
        for daemon in daemons:
            daemon.wait(timeout=180)
        shutil.rmtree(folder)


def wait_for(done: Callable[[], Any], seconds: float = 240) -> Any:
    end = time.monotonic() + seconds
    while not (value := done()):
        assert time.monotonic() < end
        time.sleep(0.5)
    return value


def cores_of_ranks(job: str) -> list[int]:
    """Return the number of cores available to each rank process of this job."""
    found = []
    for process in Path("/proc").glob("[0-9]*"):
        try:
            environment = (process / "environ").read_bytes().split(b"\0")
            if f"SLURM_JOB_ID={job}".encode() in environment and any(each.startswith(b"RANK=") for each in environment):
                found.append(len(os.sched_getaffinity(int(process.name))))
        except OSError:  # another user's, or gone
            continue
    return found


def has_trained(log: Path) -> bool:
    return log.exists() and " iteration " in log.read_text()


def test_a_signalled_job_saves_and_the_next_resumes(slurm: Callable[..., str], tmp_path: Path) -> None:
    """A job that Slurm signals before its time limit must save; the next one resumes.

    There are two nodes of two ranks, each rank on any core of its node. A second job starts after the first has ended
    for any reason.
    """
    run, saved = tmp_path / "run", 0
    options = ["--parsable", "--nodes=2", "--gpus-per-node=0", "--cpus-per-task=2", "--dependency=singleton"]
    settings = ["--recipe", "llama_tiny_pretrain_config", f"checkpoint.save={run}", "train.train_iters=5000"]
    script = ["scripts/slurm/train.sbatch", *settings]
    logs = [tmp_path / f"{number}.log" for number in range(2)]
    jobs = [slurm("sbatch", *options, f"--output={log}", *script, PROCESSES_PER_NODE="2") for log in logs]
    for number, (job, log) in enumerate(zip(jobs, logs, strict=True)):
        wait_for(partial(has_trained, log))
        assert not any(has_trained(later) for later in logs[number + 1 :])
        assert cores_of_ranks(job) == [min(2, len(os.sched_getaffinity(0)))] * 4

        slurm("scancel", "--signal=TERM", job)
        wait_for(lambda job=job: job not in slurm("squeue", "--noheader", "--format=%i").split())
        reported = log.read_text()
        assert reported.count("SIGTERM: sent to the ranks, which exited with 143\n") == 2, reported
        assert (f"resumed from iteration {saved} " in reported) == (number > 0)
        before, saved = saved, int((run / "latest_checkpointed_iteration.txt").read_text())
        assert saved > before


def test_ranks_that_slurm_starts_itself(slurm: Callable[..., str], tmp_path: Path) -> None:
    """Ranks must start as Megatron-Bridge's scripts start them.

    There is one task per rank, without torchrun.
    """
    run, log = tmp_path / "run", tmp_path / "log"
    train = f"{sys.executable} scripts/training/run_recipe.py --recipe llama_tiny_pretrain_config checkpoint.save={run}"
    options = ["--parsable", "--nodes=2", "--ntasks-per-node=2", f"--output={log}"]
    wrapped = f"srun --kill-on-bad-exit=1 {train} train.train_iters=5000"
    # Slurm alone knows its nodes' names here.
    job = slurm("sbatch", *options, f"--wrap={wrapped}", MASTER_ADDR="localhost", OMP_NUM_THREADS="1")
    wait_for(partial(has_trained, log))
    slurm("scancel", "--signal=TERM", job)
    wait_for(lambda: not slurm("squeue", "--noheader"))
    reported = log.read_text()
    assert "HIERARCHICAL_CONTEXT_PARALLEL_GROUPS a2a=[[0,1],[2,3]] p2p=[[0,2],[1,3]]" in reported, reported
    assert "SIGTERM: stopping after iteration" in reported and "Traceback" not in reported, reported
    assert (run / "latest_checkpointed_iteration.txt").exists()
