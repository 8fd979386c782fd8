"""Rank variables of tasks that srun starts directly.

Example: ``srun --ntasks-per-node=8 ... run_recipe.py``.

srun's variables are translated to torchrun's, which all other code reads. Nothing changes if torchrun or the user has
set those, as in ``scripts/slurm/train.sbatch``.
"""

from __future__ import annotations

import os
import re

from megatron_cp.common.errors import ConfigError, Violation
from megatron_cp.launch import launcher

_FIX = "start the processes with srun or torchrun, or set RANK, WORLD_SIZE, LOCAL_RANK, MASTER_ADDR and MASTER_PORT"
# Launchers that set no RANK, and their variable for the number of processes.
_OTHERS = {"mpirun": "OMPI_COMM_WORLD_SIZE", "mpiexec": "PMI_SIZE"}


def has_started_this() -> bool:
    """Return whether srun started this rank directly, and not through torchrun."""
    return "SLURM_LOCALID" in os.environ and "TORCHELASTIC_RUN_ID" not in os.environ


def take_rank() -> None:
    """Set torchrun's variables (RANK, ...) in a task that srun started.

    Raises:
        ConfigError: srun's variables are inconsistent, or an unsupported launcher started several processes.
    """
    environment = os.environ
    if "RANK" in environment or "WORLD_SIZE" in environment:
        return
    tasks = launcher.number("SLURM_STEP_NUM_TASKS", _FIX) or 1
    _refuse_others(tasks)
    if tasks == 1:
        return
    node, job, step = (launcher.number(f"SLURM_{name}", _FIX) or 0 for name in ("NODEID", "JOB_ID", "STEP_ID"))
    of_nodes = tasks_of_nodes(environment.get("SLURM_STEP_TASKS_PER_NODE", str(tasks)))
    if node >= len(of_nodes):
        raise _error("SLURM_NODEID", f"must be below {len(of_nodes)}, the nodes in SLURM_STEP_TASKS_PER_NODE", node)
    environment["RANK"] = str(launcher.number("SLURM_PROCID", _FIX) or 0)
    environment["WORLD_SIZE"] = str(tasks)
    environment["LOCAL_RANK"] = str(launcher.number("SLURM_LOCALID", _FIX) or 0)
    environment["LOCAL_WORLD_SIZE"] = str(of_nodes[node])
    environment.setdefault("MASTER_ADDR", first_host(environment.get("SLURM_STEP_NODELIST", "localhost")))
    # Below the system's range for outgoing connections (from 32768 on); a different port for each step of a job.
    environment.setdefault("MASTER_PORT", str(20000 + (job + step) % 12768))


def tasks_of_nodes(text: str) -> list[int]:
    """Parse Slurm's tasks per node: ``8(x2),4`` is 8, 8 and 4.

    Raises:
        ConfigError: another form.
    """
    counts = []
    for part in text.split(","):
        match = re.fullmatch(r"([0-9]+)(?:\(x([0-9]+)\))?", part)
        if match is None:
            raise _error("SLURM_STEP_TASKS_PER_NODE", "must be like 8(x2),4", text[:40])
        counts += int(match[2] or 1) * [int(match[1])]
    return counts


def first_host(hosts: str) -> str:
    """Return the first host of Slurm's list: ``gpu012`` of ``gpu[012-015,020],login``."""
    first = re.match(r"(?:[^,\[]|\[[^\]]*\])*", hosts)
    return re.sub(r"\[([^\],-]*)[^\]]*\]", r"\1", first[0] if first else hosts)


def _refuse_others(tasks: int) -> None:
    """Refuse processes of launchers that set no rank.

    srun sets PMI_SIZE too, to its number of tasks.
    """
    for name, variable in _OTHERS.items():
        count = launcher.number(variable, _FIX) or 1
        if count not in (1, tasks):
            message = f"{name} started {count} processes without RANK: each would be a separate run"
            raise _error(variable, message, count)


def _error(variable: str, message: str, value: object) -> ConfigError:
    return ConfigError([Violation("K35", "error", variable, message, _FIX, value)])
