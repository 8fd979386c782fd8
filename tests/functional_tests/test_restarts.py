"""Runs resume after torchrun restarts them, or after a rank is signalled.

torchrun restarts a run after a rank dies. Our launcher waits for a signalled rank.
"""

import json
import os
import signal
import subprocess
import sys
import time
from contextlib import closing
from pathlib import Path

import psutil
import pytest

from tests.ranks import free_port

ROOT = Path(__file__).parents[2]


def command(
    folder: Path, *launcher: str, module: str = "torch.distributed.run", processes: int = 2, steps: int = 400
) -> list[str]:
    return [
        *(sys.executable, "-m", module, f"--nproc_per_node={processes}", *launcher),
        *("scripts/training/run_recipe.py", "--recipe", "llama_tiny_p2p_pretrain_config"),
        *("dataset.kind=mock", "dataset.seq_length=64", "model.num_layers=2", "model.context_parallel_size=2"),
        *(f"train.train_iters={steps}", "train.global_batch_size=2", "train.micro_batch_size=1"),
        *("checkpoint.save_interval=10", "checkpoint.async_save=true", "checkpoint.most_recent_k=2"),
        *("logger.progress=none", "logger.tensorboard=false", f"checkpoint.save={folder}"),
    ]


def losses(folder: Path) -> list[tuple[int, float]]:
    path = folder / "metrics.jsonl"
    lines = [json.loads(line) for line in path.read_text().splitlines()] if path.exists() else []
    return [(line["iteration"], line["lm_loss"]) for line in lines if "lm_loss" in line]


def workers(launcher: psutil.Process) -> list[psutil.Process]:
    """Return the ranks: the launcher's own children, without their background writers."""
    return [child for child in launcher.children() if any("run_recipe" in part for part in child.cmdline())]


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_max_restarts_resumes_automatically(tmp_path: Path) -> None:
    environment = os.environ | {"OMP_NUM_THREADS": "1"}
    uninterrupted = command(tmp_path / "uninterrupted", "--standalone")
    subprocess.run(uninterrupted, cwd=ROOT, env=environment, check=True, capture_output=True, timeout=500)
    again = command(tmp_path / "again", "--standalone", "--max-restarts=2")
    with (tmp_path / "log").open("w") as log:
        launched = subprocess.Popen(again, cwd=ROOT, env=environment, stderr=log, stdout=log)
    try:
        for rank, at in ((1, 60), (0, 200)):
            deadline = time.monotonic() + 240
            while max((iteration for iteration, _ in losses(tmp_path / "again")), default=0) < at:
                assert launched.poll() is None and time.monotonic() < deadline, (tmp_path / "log").read_text()[-3000:]
                time.sleep(0.05)
            workers(psutil.Process(launched.pid))[rank].send_signal(signal.SIGKILL)
            time.sleep(3.0)  # the old ranks leave before the next ones write
        assert launched.wait(timeout=400) == 0, (tmp_path / "log").read_text()[-3000:]
    finally:
        launched.kill()
    text = (tmp_path / "log").read_text()
    assert text.count("resumed from iteration") == 2, text[-3000:]
    assert "rank 1 does not answer (killed, crashed or frozen)" in text, text[-3000:]
    assert losses(tmp_path / "again") == losses(tmp_path / "uninterrupted")
    assert len(losses(tmp_path / "again")) == 400


class Nodes:
    """Launchers of one rank each, with a rendezvous on this machine."""

    def __init__(self, folder: Path, module: str) -> None:
        self.run, self._log, self._module = folder / "run", folder / "log", module
        self._where = ("--nnodes=2", "--rdzv_backend=c10d", f"--rdzv_endpoint=127.0.0.1:{free_port()}")
        self.launched: list[subprocess.Popen] = []

    def launch(self) -> None:
        arguments = (*self._where, "--rdzv_conf=last_call_timeout=5", "--max-restarts=2")
        with self._log.open("a") as log:
            self.launched.append(
                subprocess.Popen(
                    command(self.run, *arguments, module=self._module, processes=1, steps=100),
                    cwd=ROOT,
                    env=os.environ | {"OMP_NUM_THREADS": "1"},
                    stderr=log,
                    stdout=log,
                )
            )

    def wait_for_step(self, step: int) -> None:
        deadline = time.monotonic() + 240
        while max((iteration for iteration, _ in losses(self.run)), default=0) < step:
            assert self.launched[0].poll() is None and time.monotonic() < deadline, self.text[-3000:]
            time.sleep(0.05)

    def rank_of(self, launcher: int) -> psutil.Process:
        return workers(psutil.Process(self.launched[launcher].pid))[0]

    @property
    def text(self) -> str:
        return self._log.read_text()

    def check_that_it_went_on(self, ended_well: list[int]) -> None:
        assert [self.launched[each].wait(timeout=200) for each in ended_well] == [0] * len(ended_well), self.text[
            -3000:
        ]
        assert self.text.count("resumed from iteration") == 1, self.text[-3000:]
        assert "torch.distributed could not start" not in self.text and "Traceback" not in self.text, self.text[-3000:]
        assert [iteration for iteration, _ in losses(self.run)] == list(range(1, 101))

    def close(self) -> None:
        for each in self.launched:
            if each.poll() is None:
                for child in psutil.Process(each.pid).children(recursive=True):
                    child.kill()
                each.kill()
                each.wait()


@pytest.mark.slow
@pytest.mark.parametrize("module", ["torch.distributed.run", "megatron_cp.torchrun"])
def test_a_run_on_two_nodes_resumes_after_a_rank_dies(tmp_path: Path, module: str) -> None:
    """Ranks must rendezvous again although one store keeps the dead rank's keys.

    torchrun keeps one store for both starts, and only one node counts the failure.
    """
    with closing(Nodes(tmp_path, module)) as nodes:
        nodes.launch()
        nodes.launch()
        nodes.wait_for_step(30)
        nodes.rank_of(0).send_signal(signal.SIGKILL)
        nodes.check_that_it_went_on([0, 1])


@pytest.mark.slow
def test_another_machine_replaces_a_lost_one(tmp_path: Path) -> None:
    with closing(Nodes(tmp_path, "megatron_cp.torchrun")) as nodes:
        nodes.launch()
        time.sleep(3.0)  # it keeps the launchers' store: without that machine no launcher can continue
        nodes.launch()
        nodes.wait_for_step(30)
        lost = nodes.rank_of(1)
        nodes.launched[1].kill()
        lost.kill()
        time.sleep(3.0)
        nodes.launch()
        nodes.check_that_it_went_on([0, 2])


@pytest.mark.slow
def test_a_signalled_launcher_lets_the_run_save(tmp_path: Path) -> None:
    environment = os.environ | {"OMP_NUM_THREADS": "1"}
    with (tmp_path / "log").open("w") as log:
        launched = subprocess.Popen(
            command(tmp_path / "run", "--standalone", module="megatron_cp.torchrun"),
            cwd=ROOT,
            env=environment,
            stderr=log,
            stdout=log,
        )
    try:
        deadline = time.monotonic() + 240
        while len(losses(tmp_path / "run")) < 3:
            assert launched.poll() is None and time.monotonic() < deadline, (tmp_path / "log").read_text()[-3000:]
            time.sleep(0.05)
        launched.terminate()
        code = launched.wait(timeout=200)
    finally:
        launched.kill()
    text = (tmp_path / "log").read_text()
    assert code == 143 and "Traceback" not in text, text[-3000:]
    stopped_at = losses(tmp_path / "run")[-1][0]
    assert (tmp_path / "run" / "latest_checkpointed_iteration.txt").read_text() == str(stopped_at) != "400"
    assert f"SIGTERM: stopping after iteration {stopped_at} and a checkpoint" in text, text[-3000:]
