"""The Slurm script with a stand-in for srun.

The stand-in starts every "node" on this machine.
"""

import os
import random
import re
import subprocess
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
SCRIPT = ROOT / "scripts/slurm/train.sbatch"

SRUN = """#!/usr/bin/env bash
while [[ $1 == --* ]]; do export SRUN_SAW="${SRUN_SAW:-}$1 "; shift; done
pids=()
for ((node = 0; node < SLURM_NNODES; node++)); do
    SLURM_NODEID=$node "$@" & pids+=($!)
done
code=0
for pid in "${pids[@]}"; do wait "$pid" || code=$?; done
exit $code
"""


@pytest.fixture
def cluster(tmp_path: Path) -> dict[str, str]:
    """Return the environment of a job on two nodes of two processes."""
    for name, text in (("srun", SRUN), ("scontrol", "#!/bin/sh\nprintf 'localhost\\nlocalhost\\n'\n")):
        (tmp_path / "bin").mkdir(exist_ok=True)
        (tmp_path / "bin" / name).write_text(text)
        (tmp_path / "bin" / name).chmod(0o755)
    return {
        **{name: value for name, value in os.environ.items() if not name.startswith("SLURM_")},
        "PATH": f"{tmp_path / 'bin'}:{os.environ['PATH']}",
        "SLURM_JOB_ID": str(random.randrange(100_000)),
        "SLURM_JOB_NODELIST": "localhost,localhost",
        "SLURM_NNODES": "2",
        "SLURM_SUBMIT_DIR": str(ROOT),
        "PROCESSES_PER_NODE": "2",
    }


@pytest.mark.parametrize(
    ("sbatch_variables", "srun_options"),
    [
        ({"SLURM_CPUS_PER_TASK": "64"}, "--kill-on-bad-exit=1 --cpus-per-task=64 "),
        ({}, "--kill-on-bad-exit=1 "),
    ],
)
def test_each_node_gets_its_command(
    cluster: dict[str, str], tmp_path: Path, sbatch_variables: dict[str, str], srun_options: str
) -> None:
    """Options, and overrides with spaces and brackets, must arrive as given.

    Python is replaced by echo. srun gets the CPUs too if sbatch had them: it does not read sbatch's value, and would
    bind a node's processes to one core.
    """
    (tmp_path / ".venv/bin").mkdir(parents=True)
    # One write a line: both nodes print to the same pipe at the same time.
    (tmp_path / ".venv/bin/python").write_text(
        '#!/bin/sh\nline=$(printf "<%s>" "$SRUN_SAW" "$@")\nprintf "%s\\n" "$line"\n'
    )
    (tmp_path / ".venv/bin/python").chmod(0o755)
    cluster |= {"SLURM_SUBMIT_DIR": str(tmp_path), "SLURM_JOB_ID": "7", "SLURM_GPUS_ON_NODE": "8"} | sbatch_variables
    del cluster["PROCESSES_PER_NODE"]
    arguments = ["--recipe", "r", "dataset.data_path=/a b/c", "model.hierarchical_context_parallel_sizes=[2,2]"]
    done = subprocess.run([SCRIPT, *arguments], env=cluster, capture_output=True, text=True, check=True)
    lines = sorted(done.stdout.splitlines())
    assert len(lines) == 2
    for node, line in enumerate(lines):
        options, recipe = line.split("<scripts/training/run_recipe.py>")
        assert options == (
            f"<{srun_options}><-m><megatron_cp.torchrun><--nnodes=2><--node_rank={node}><--nproc_per_node=8>"
            "<--master_addr=localhost><--master_port=20007>"
        )
        assert re.findall("<(.*?)>", recipe) == arguments


@pytest.mark.slow
def test_two_nodes_train(cluster: dict[str, str], tmp_path: Path) -> None:
    arguments = ["--recipe", "llama_tiny_pretrain_config", "train.train_iters=2", f"checkpoint.save={tmp_path / 'run'}"]
    done = subprocess.run([SCRIPT, *arguments], env=cluster, capture_output=True, text=True, timeout=280)
    assert done.returncode == 0, done.stderr[-3000:]
    assert (tmp_path / "run" / "latest_checkpointed_iteration.txt").read_text().strip() == "2"
