"""Early ends of runs: signals, and ranks that die, freeze or fail.

The tests also check which rank reports the end.
"""

import os
import re
import signal
import subprocess
import time
from pathlib import Path
from typing import Any

import psutil
import pytest
import torch.distributed as dist

from megatron_cp.common.errors import RuntimeFault
from tests.ranks import RanksFailed, free_port, run_ranks
from tests.unit_tests.training.conftest import run_cli

STAGES = ["model.pipeline_model_parallel_size=2", "model.num_layers=2"]
slow = pytest.mark.slow
LATEST = "latest_checkpointed_iteration.txt"


def at_iteration(number: int, rank: int, action: Any) -> Any:
    """Return a function that makes ``rank`` do something at an iteration's start."""

    def before() -> None:
        from megatron_cp.training import loop

        original = loop.train_step

        def step(run: Any, *args: Any) -> Any:
            if run.progress.iteration == number - 1 and int(os.environ["RANK"]) == rank:
                action()
            return original(run, *args)

        loop.train_step = step

    return before


def losing_a_rank(folder: str, arguments: list[str], before: Any) -> None:
    """Run and lose a rank; messages and exit codes of the others go to files."""
    code, _ = run_cli(folder, arguments, before)
    lost = float(Path(folder, "lost").read_text())
    Path(folder, f"code{os.environ['RANK']}").write_text(f"{code} {time.time() - lost:.1f}")
    if Path(folder, "frozen").exists():
        os.kill(int(Path(folder, "frozen").read_text()), signal.SIGKILL)


def lose(tmp_path: Path, monkeypatch: Any, ranks: int, arguments: list[str], before: Any) -> tuple[str, Any]:
    monkeypatch.setenv("MEGATRON_CP_TEST_NO_INIT", "1")
    monkeypatch.setenv("MASTER_ADDR", "127.0.0.1")
    monkeypatch.setenv("MASTER_PORT", str(free_port()))
    with pytest.raises(RanksFailed) as failed:
        run_ranks(losing_a_rank, ranks, str(tmp_path), arguments, before, timeout=90, grace=40)
    codes = {path.name: path.read_text() for path in tmp_path.glob("code*")}
    # The thread that watches the store ends a process at once, and only its message has a time.
    lost = float((tmp_path / "lost").read_text())
    for rank in re.findall(r"rank (\d) of \d+: died without a report \(exit 1\)", str(failed.value)):
        codes.setdefault(f"code{rank}", f"1 {(tmp_path / f'stderr{rank}').stat().st_mtime - lost:.1f}")
    return "".join(path.read_text() for path in sorted(tmp_path.glob("stderr*"))), codes


@pytest.mark.parametrize(
    ("layout", "dying"),
    [
        pytest.param(["model.context_parallel_size=4", "dataset.seq_length=64"], 2, id="cp4"),
        pytest.param(["model.context_parallel_size=2", *STAGES], 3, id="pp2 cp2", marks=slow),
        pytest.param(["model.context_parallel_size=1", "train.global_batch_size=4"], 0, id="rank 0", marks=slow),
    ],
)
def test_a_rank_that_is_killed_is_named(tmp_path: Path, monkeypatch: Any, layout: list[str], dying: int) -> None:
    def die() -> None:
        (tmp_path / "lost").write_text(str(time.time()))
        others = [str(rank.pid) for rank in psutil.Process(os.getppid()).children() if rank.pid != os.getpid()]
        # Launchers end the remaining ranks, which must still report the lost rank.
        like_a_launcher = ["sh", "-c", f"sleep 0.5; kill -TERM {' '.join(others)}"]
        subprocess.Popen(like_a_launcher, start_new_session=True, stderr=subprocess.DEVNULL)
        os.kill(os.getpid(), signal.SIGKILL)

    kill = at_iteration(3, dying, die)
    arguments = [*layout, "train.train_iters=50", "checkpoint.save_interval=2"]
    text, codes = lose(tmp_path, monkeypatch, 4, arguments, kill)
    assert len(codes) == 3 and all(code.startswith("1 ") for code in codes.values()), (codes, text)
    assert all(float(code.split()[1]) < 30 for code in codes.values()), codes
    assert "Traceback" not in text, text
    if dying == 0:  # and with it the store
        assert "rank 0 exited, and with it the store" in text, text
    else:
        found = re.findall(r"megatron-cp: rank (\d), (\w+) of iteration 3: (.*) failed because (.*?)\. Error", text)
        assert len(found) == 1, text
        assert (
            found[0][:2] == ("0", "forward_backward")
            and found[0][3] == f"rank {dying} does not answer (killed, crashed or frozen)"
        ), found
        assert "last checkpoint" in text
    assert (tmp_path / "run" / LATEST).read_text() == "2"


@slow
@pytest.mark.parametrize(("when", "frozen"), [("step", 1), ("step", 0), ("save", 0), ("end", 0)])
def test_a_rank_that_is_frozen_is_named_after_the_timeout(
    tmp_path: Path, monkeypatch: Any, when: str, frozen: int
) -> None:
    """Rank 0 keeps the store here, as for ranks that srun or a person starts."""

    def stop() -> None:
        (tmp_path / "lost").write_text(str(time.time()))
        (tmp_path / "frozen").write_text(str(os.getpid()))
        os.kill(os.getpid(), signal.SIGSTOP)

    def freeze_outside_steps() -> None:
        from megatron_cp.training import loop
        from megatron_cp.training.checkpoint import saver as checkpoint

        module, name = (checkpoint, "put_in_place") if when == "save" else (loop, "evaluate_all")

        def freeze(*args: Any, **kwargs: Any) -> Any:
            if int(os.environ["RANK"]) == frozen:
                stop()
            return original(*args, **kwargs)

        original = getattr(module, name)
        setattr(module, name, freeze)

    freeze = at_iteration(2, frozen, stop) if when == "step" else freeze_outside_steps
    arguments = ["train.train_iters=3", "validation.eval_iters=1", "dist.distributed_timeout_minutes=0.1"]
    text, codes = lose(tmp_path, monkeypatch, 2, arguments, freeze)
    left = 1 - frozen
    assert list(codes) == [f"code{left}"] and codes[f"code{left}"].startswith("1 "), (codes, text)
    assert float(codes[f"code{left}"].split()[1]) < 30, codes
    if frozen == 0:
        assert "rank 0, which keeps torch.distributed's store at 127.0.0.1:" in text, text
    else:
        assert "failed because rank 1 does not answer (killed, crashed or frozen). Error:" in text, text
    assert text.count("megatron-cp: rank") == 1 and "Traceback" not in text, text


def fail_with(error: BaseException) -> Any:
    def fail() -> None:
        raise error

    return fail


@pytest.mark.parametrize(
    ("error", "own", "others"),
    [
        (OSError(5, "Input/output error"), "rank 1, other of iteration 2: [Errno 5] Input/output error", "[Errno 5]"),
        (KeyboardInterrupt(), "", "rank 1 had failed: KeyboardInterrupt"),
    ],
    ids=["disk", "interrupted"],
)
def test_a_rank_that_fails_is_named_with_its_reason(cli: Any, error: BaseException, own: str, others: str) -> None:
    codes, text = cli("train.train_iters=50", before=at_iteration(2, 1, fail_with(error)), same_code=False)
    assert codes[0] == 1 and codes[1] == (130 if isinstance(error, KeyboardInterrupt) else 1), text
    assert own in text and "failed because rank 1 had failed" in text and others in text, text


class LikeNccl:
    """torch.distributed as megatron_cp.parallel.device uses it, like NCCL.

    Groups stop once every rank stops them.
    """

    def __init__(self, folder: Path) -> None:
        self._folder = folder

    def __getattr__(self, name: str) -> Any:
        return getattr(dist, name)

    def get_backend(self) -> str:
        return "nccl"

    def destroy_process_group(self) -> None:
        (self._folder / f"stops{os.environ['RANK']}").touch()
        deadline = time.monotonic() + 60
        while len(list(self._folder.glob("stops*"))) < 2:
            assert time.monotonic() < deadline, "waits for ever"
            time.sleep(0.05)
        dist.destroy_process_group()


@pytest.mark.parametrize("on_all_ranks", [False, True], ids=["alone", "with all"])
def test_a_failed_rank_does_not_wait_for_the_others(cli: Any, tmp_path: Path, on_all_ranks: bool) -> None:
    fail = fail_with(RuntimeFault("it broke", on_all_ranks=on_all_ranks))

    def before() -> None:
        from megatron_cp.parallel import device

        device.dist = LikeNccl(tmp_path)
        for rank in (0, 1) if on_all_ranks else (1,):
            at_iteration(2, rank, fail)()

    code, text = cli("train.train_iters=50", before=before)
    assert code == 1 and "megatron-cp: it broke" in text, text
    assert ("rank 1 had failed: it broke" in text) is not on_all_ranks, text
    assert len(list(tmp_path.glob("stops*"))) == (2 if on_all_ranks else 0)


def test_a_signal_during_a_save(cli: Any, tmp_path: Path) -> None:
    def signal_in_the_save() -> None:
        from megatron_cp.training.checkpoint import writer as checkpoint_writer

        original = checkpoint_writer.Writer.start

        def start(self: Any, *args: Any, **kwargs: Any) -> None:
            if os.environ["RANK"] == "1":
                os.kill(os.getpid(), signal.SIGTERM)
            original(self, *args, **kwargs)

        checkpoint_writer.Writer.start = start

    code, text = cli(
        "train.train_iters=50", "checkpoint.save_interval=2", "checkpoint.async_save=true", before=signal_in_the_save
    )
    assert code == 143 and "SIGTERM: stopping after iteration 3 and a checkpoint" in text, text
    assert (tmp_path / "run" / LATEST).read_text() == "3"
    assert sorted(path.name for path in (tmp_path / "run").glob("*iter*")) == [
        "iter_0000002",
        "iter_0000003",
        LATEST,
    ]


def interrupt_twice() -> None:
    from megatron_cp.training import loop

    original = loop.train_step

    def step(run: Any, *args: Any) -> Any:
        if run.progress.iteration == 2:
            os.kill(os.getpid(), signal.SIGINT)
            time.sleep(1.2)
            os.kill(os.getpid(), signal.SIGINT)
        return original(run, *args)

    loop.train_step = step


def test_a_second_interrupt_stops_at_once(cli: Any, tmp_path: Path) -> None:
    code, text = cli("train.train_iters=50", "checkpoint.save_interval=1", before=interrupt_twice)
    assert code == 130, text
    assert (tmp_path / "run" / LATEST).read_text() == "2"


@slow
def test_a_repeated_signal_of_one_key_press_counts_once(cli: Any, tmp_path: Path) -> None:
    def twice() -> None:
        os.kill(os.getpid(), signal.SIGINT)
        os.kill(os.getpid(), signal.SIGINT)
        os.kill(os.getpid(), signal.SIGTERM)

    code, text = cli("train.train_iters=50", before=at_iteration(3, 1, twice))
    assert code == 130, text
    assert (tmp_path / "run" / LATEST).read_text() == "3"


@pytest.mark.parametrize("background", ["true", pytest.param("false", marks=pytest.mark.slow)])
def test_exit_interval_and_a_save_in_the_background(cli: Any, tmp_path: Path, background: str) -> None:
    arguments = ["train.train_iters=6", "checkpoint.save_interval=1", f"checkpoint.async_save={background}"]
    code, text = cli(*arguments, "train.exit_interval=4", "checkpoint.most_recent_k=2")
    assert code == 0 and "training paused" in text, text
    assert (tmp_path / "run" / LATEST).read_text() == "4"
    code, text = cli(*arguments, "checkpoint.most_recent_k=2")
    assert code == 0 and "resumed from iteration 4" in text, text
    assert sorted(path.name for path in (tmp_path / "run").glob("*iter_*")) == ["iter_0000005", "iter_0000006"]


@pytest.mark.parametrize(("name", "ended"), [("TERM", 143), ("HUP", 129)])
def test_data_workers_leave_a_signal_to_their_rank(cli: Any, tmp_path: Path, name: str, ended: int) -> None:
    """Launchers send the signal to both."""

    def ask_all() -> None:
        workers = [str(each.pid) for each in psutil.Process().children()]
        assert workers
        # By another process: torch obeys where it is the rank that asks.
        subprocess.run(["sh", "-c", f'kill -{name} "$@"', "sh", *workers, str(os.getpid())], check=True)
        time.sleep(0.5)

    arguments = ["train.train_iters=50", "dataset.num_workers=1"]
    code, text = cli(*arguments, before=at_iteration(2, 1, ask_all))
    assert code == ended and f"SIG{name}: stopping after iteration 2 and a checkpoint" in text, text
    assert (tmp_path / "run" / LATEST).read_text() == "2"


@pytest.mark.parametrize("last", [50, 2], ids=["on the way", "at the end"])
def test_a_signal_during_an_evaluation(cli: Any, tmp_path: Path, last: int) -> None:
    """The evaluation must end after the current batch.

    The trained state has been saved before.
    """

    def ask_in_the_second_batch() -> None:
        from megatron_cp.training.held_out import evaluate

        original, batches = evaluate.forward_backward, []

        def counted(run: Any, microbatches: Any, forward_only: bool) -> Any:
            if forward_only:
                batches.append(run)
                assert (tmp_path / "run" / LATEST).read_text() == "2"
                if len(batches) == 2 and os.environ["RANK"] == "1":
                    os.kill(os.getpid(), signal.SIGTERM)
                assert len(batches) <= 2
            return original(run, microbatches, forward_only)

        evaluate.forward_backward = counted

    evaluation = ["validation.eval_interval=2", "validation.eval_iters=20"]
    arguments = [f"train.train_iters={last}", "checkpoint.save_interval=2", *evaluation]
    code, text = cli(*arguments, before=ask_in_the_second_batch)
    assert code == 143 and "SIGTERM: stopping after iteration 2 and a checkpoint" in text, text
    assert "validation loss" not in text, text
