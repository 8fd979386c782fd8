"""torchrun starts a run again after a rank died; ours waits for one that was asked to stop. Both go on from there."""

import json
import os
import signal
import subprocess
import sys
import time
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
    """The ranks: the launcher's own children, without their background writers."""
    return [child for child in launcher.children() if any("run_recipe" in part for part in child.cmdline())]


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_max_restarts_resumes_by_itself(tmp_path: Path) -> None:
    environment = os.environ | {"OMP_NUM_THREADS": "1"}
    undisturbed = command(tmp_path / "undisturbed", "--standalone")
    subprocess.run(undisturbed, cwd=ROOT, env=environment, check=True, capture_output=True, timeout=500)
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
    assert "rank 1 is gone (killed, crashed or frozen)" in text, text[-3000:]
    assert losses(tmp_path / "again") == losses(tmp_path / "undisturbed")
    assert len(losses(tmp_path / "again")) == 400


@pytest.mark.slow
@pytest.mark.parametrize("module", ["torch.distributed.run", "megatron_cp.torchrun"])
def test_a_run_on_two_nodes_goes_on_when_a_rank_has_died(tmp_path: Path, module: str) -> None:
    """Both launchers keep their store, with what the dead wrote, and only one of them counts a failure."""
    environment = os.environ | {"OMP_NUM_THREADS": "1"}
    where = ("--nnodes=2", "--rdzv_backend=c10d", f"--rdzv_endpoint=127.0.0.1:{free_port()}", "--max-restarts=2")
    run = tmp_path / "run"
    with (tmp_path / "log").open("w") as log:
        launched = [
            subprocess.Popen(
                command(run, *where, module=module, processes=1, steps=100),
                cwd=ROOT,
                env=environment,
                stderr=log,
                stdout=log,
            )
            for _ in range(2)
        ]
    try:
        deadline = time.monotonic() + 240
        while max((iteration for iteration, _ in losses(run)), default=0) < 30:
            assert launched[0].poll() is None and time.monotonic() < deadline, (tmp_path / "log").read_text()[-3000:]
            time.sleep(0.05)
        workers(psutil.Process(launched[0].pid))[0].send_signal(signal.SIGKILL)
        assert [each.wait(timeout=200) for each in launched] == [0, 0], (tmp_path / "log").read_text()[-3000:]
    finally:
        for each in launched:
            each.kill()
    text = (tmp_path / "log").read_text()
    assert text.count("resumed from iteration") == 1 and "torch.distributed could not start" not in text, text[-3000:]
    assert [iteration for iteration, _ in losses(run)] == list(range(1, 101))


@pytest.mark.slow
def test_a_launcher_that_is_asked_to_stop_lets_the_run_save(tmp_path: Path) -> None:
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
