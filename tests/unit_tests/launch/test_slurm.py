"""Ranks that Slurm starts itself get their rank from Slurm's variables."""

import os

import pytest

from megatron_cp.cli import main
from megatron_cp.common.errors import ConfigError
from megatron_cp.launch import slurm

# Variables of srun (22.05) for the sixth of eight tasks, on the second of three nodes.
TASK = {
    "SLURM_STEP_NUM_TASKS": "8",
    "SLURM_STEP_TASKS_PER_NODE": "3(x2),2",
    "SLURM_STEP_NODELIST": "gpu[012-013,020]",
    "SLURM_NODEID": "1",
    "SLURM_PROCID": "5",
    "SLURM_LOCALID": "2",
    "SLURM_JOB_ID": "12770",
    "SLURM_STEP_ID": "1",
}
EXPECTED = {
    "RANK": "5",
    "WORLD_SIZE": "8",
    "LOCAL_RANK": "2",
    "LOCAL_WORLD_SIZE": "3",
    "MASTER_ADDR": "gpu012",
    "MASTER_PORT": "20003",
}


@pytest.fixture(autouse=True)
def environment(monkeypatch: pytest.MonkeyPatch) -> None:
    """Restore the variables that a test sets."""
    kept = {name: value for name, value in os.environ.items() if name not in EXPECTED and not name.startswith("SLURM_")}
    monkeypatch.setattr(os, "environ", kept)


def rank_variables() -> dict[str, str]:
    return {name: os.environ[name] for name in EXPECTED if name in os.environ}


@pytest.mark.parametrize("more", [{}, {"PMI_SIZE": "8"}], ids=["", "srun --mpi=pmi2"])
def test_a_task_of_srun_takes_its_rank_from_slurm(more: dict[str, str]) -> None:
    os.environ.update(TASK | more)
    slurm.take_rank()
    assert rank_variables() == EXPECTED


def test_commands_take_it(capsys: pytest.CaptureFixture[str]) -> None:
    os.environ.update(TASK)
    assert main(["recipes"]) == 0 and rank_variables() == EXPECTED
    for name in (*TASK, *EXPECTED):
        del os.environ[name]
    os.environ["OMPI_COMM_WORLD_SIZE"] = "4"
    assert main(["recipes"]) == 2 and "OMPI_COMM_WORLD_SIZE=4: mpirun" in capsys.readouterr().err


def test_a_users_master_address_is_kept() -> None:
    os.environ.update(TASK | {"MASTER_ADDR": "10.0.0.1", "MASTER_PORT": "29500"})
    slurm.take_rank()
    assert rank_variables() == EXPECTED | {"MASTER_ADDR": "10.0.0.1", "MASTER_PORT": "29500"}


@pytest.mark.parametrize("name", ["RANK", "WORLD_SIZE"])
def test_ranks_of_a_torchrun_that_srun_has_started_stay_theirs(name: str) -> None:
    os.environ.update(TASK | {name: "0"})
    slurm.take_rank()
    assert rank_variables() == {name: "0"}


@pytest.mark.parametrize("more", [{}, {"SLURM_STEP_NUM_TASKS": "1"}, {"SLURM_NTASKS": "8", "SLURM_PROCID": "0"}])
def test_one_process_is_a_run_of_its_own(more: dict[str, str]) -> None:
    """The script of a job of several tasks is no task."""
    os.environ.update(more)
    slurm.take_rank()
    assert rank_variables() == {}


@pytest.mark.parametrize(
    ("hosts", "first"),
    [
        ("localhost", "localhost"),
        ("node-3,node-4", "node-3"),
        ("gpu[012-015,020],login", "gpu012"),
        ("a[7]", "a7"),
        ("rack[1-2]node[30-40],b", "rack1node30"),
        ("n[1,3].cluster", "n1.cluster"),
    ],
)
def test_the_first_of_slurms_hosts(hosts: str, first: str) -> None:
    assert slurm.first_host(hosts) == first


@pytest.mark.parametrize(
    ("variables", "message"),
    [
        (TASK | {"SLURM_NODEID": "3"}, "SLURM_NODEID=3: must be below 3, the nodes in SLURM_STEP_TASKS_PER_NODE"),
        (TASK | {"SLURM_STEP_TASKS_PER_NODE": "3*2"}, r"SLURM_STEP_TASKS_PER_NODE=3\*2: must be like 8\(x2\),4"),
        (TASK | {"SLURM_PROCID": "first"}, "SLURM_PROCID: the variable must be a number, got 'first'"),
        (
            {"OMPI_COMM_WORLD_SIZE": "4"},
            "OMPI_COMM_WORLD_SIZE=4: mpirun started 4 processes without RANK",
        ),
        (TASK | {"OMPI_COMM_WORLD_SIZE": "16"}, "OMPI_COMM_WORLD_SIZE=16: mpirun started"),
        ({"PMI_SIZE": "2"}, "PMI_SIZE=2: mpiexec started 2 processes"),
    ],
)
def test_invalid_variables_are_refused(variables: dict[str, str], message: str) -> None:
    os.environ.update(variables)
    with pytest.raises(ConfigError, match=message):
        slurm.take_rank()
    assert rank_variables() == {}
