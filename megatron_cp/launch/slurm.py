"""Processes that Slurm starts itself, one task a rank (``srun --ntasks-per-node=8 ... run_recipe.py``): who they are.

srun's variables are said once more in torchrun's, which all else reads. Where torchrun or somebody else has set those,
as in ``scripts/slurm/train.sbatch``, nothing is changed.
"""

from __future__ import annotations

import os
import re

from megatron_cp.common.errors import ConfigError, Violation
from megatron_cp.launch import launcher

_FIX = "start the processes with srun or torchrun, or set RANK, WORLD_SIZE, LOCAL_RANK, MASTER_ADDR and MASTER_PORT"
# Launchers whose processes would each take itself for a run of one rank, and what they call the number of processes.
_OTHERS = {"mpirun": "OMPI_COMM_WORLD_SIZE", "mpiexec": "PMI_SIZE"}


def has_started_this() -> bool:
    """Whether this rank is a task of srun's own, and not one of a torchrun that srun has started."""
    return "SLURM_LOCALID" in os.environ and "TORCHELASTIC_RUN_ID" not in os.environ


def take_rank() -> None:
    """Set RANK, WORLD_SIZE, LOCAL_RANK, LOCAL_WORLD_SIZE, MASTER_ADDR and MASTER_PORT for a task of srun's.

    Raises:
        ConfigError: srun's variables make no sense, or several processes were started by what is not known here.
    """
    said = os.environ
    if "RANK" in said or "WORLD_SIZE" in said:
        return
    tasks = launcher.number("SLURM_STEP_NUM_TASKS", _FIX) or 1
    _refuse_others(tasks)
    if tasks == 1:
        return
    node, job, step = (launcher.number(f"SLURM_{name}", _FIX) or 0 for name in ("NODEID", "JOB_ID", "STEP_ID"))
    of_nodes = tasks_of_nodes(said.get("SLURM_STEP_TASKS_PER_NODE", str(tasks)))
    if node >= len(of_nodes):
        raise _error("SLURM_NODEID", f"there are {len(of_nodes)} nodes in SLURM_STEP_TASKS_PER_NODE", node)
    said["RANK"] = str(launcher.number("SLURM_PROCID", _FIX) or 0)
    said["WORLD_SIZE"] = str(tasks)
    said["LOCAL_RANK"] = str(launcher.number("SLURM_LOCALID", _FIX) or 0)
    said["LOCAL_WORLD_SIZE"] = str(of_nodes[node])
    said.setdefault("MASTER_ADDR", first_host(said.get("SLURM_STEP_NODELIST", "localhost")))
    # Below those that systems give to connections (from 32768 on); another for each step of a job.
    said.setdefault("MASTER_PORT", str(20000 + (job + step) % 12768))


def tasks_of_nodes(text: str) -> list[int]:
    """``8(x2),4`` is 8, 8 and 4.

    Raises:
        ConfigError: it is something else.
    """
    counts = []
    for part in text.split(","):
        match = re.fullmatch(r"([0-9]+)(?:\(x([0-9]+)\))?", part)
        if match is None:
            raise _error("SLURM_STEP_TASKS_PER_NODE", "it must be like 8(x2),4", text[:40])
        counts += int(match[2] or 1) * [int(match[1])]
    return counts


def first_host(hosts: str) -> str:
    """Of Slurm's list of hosts: ``gpu[012-015,020],login`` begins with ``gpu012``."""
    first = re.match(r"(?:[^,\[]|\[[^\]]*\])*", hosts)
    return re.sub(r"\[([^\],-]*)[^\]]*\]", r"\1", first[0] if first else hosts)


def _refuse_others(tasks: int) -> None:
    """In a job of Slurm's their own helpers are its tasks. (srun itself says PMI_SIZE, too: as many as its tasks.)"""
    for name, variable in _OTHERS.items():
        count = launcher.number(variable, _FIX) or 1
        if count not in (1, tasks):
            message = f"{name} has started so many processes and none is told its rank: each would be a run of its own"
            raise _error(variable, message, count)


def _error(variable: str, message: str, value: object) -> ConfigError:
    return ConfigError([Violation("K35", "error", variable, message, _FIX, value)])
