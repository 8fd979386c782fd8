"""Saving in the background, on a full disk, and killed at any moment.

The tests check what is kept, and what is deleted.
"""

import os
import resource
import signal
import subprocess
import time
from pathlib import Path
from typing import Any

import pytest

from megatron_cp.common.errors import RuntimeFault
from megatron_cp.training.checkpoint import files as checkpoint_files
from megatron_cp.training.checkpoint.files import clean_leftovers, damage, existing_folder, latest_iteration
from megatron_cp.training.checkpoint.saver import CheckpointSaver, load_checkpoint
from megatron_cp.training.step import train_step
from tests.ranks import RanksFailed, run_ranks
from tests.training_runs import start, tiny_config, train_losses
from tests.unit_tests.training.layouts.cases import CP2, PP2

ASYNC = {"checkpoint__async_save": True}
slow = pytest.mark.slow


def names(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.iterdir())


def save_in_the_background(overrides: dict[str, Any], folder: str) -> list[tuple[float, float]]:
    """Train two steps, save, and train two more while the checkpoint is written.

    Saves wait for each other.
    """
    run, batches = start(tiny_config(**ASYNC, **overrides))
    saver = CheckpointSaver(run, folder)
    losses = []
    for step in range(6):
        result = train_step(run, next(batches).microbatches)
        losses.append((result.loss, result.grad_norm or 0.0))
        run.progress.iteration += 1
        if step in (1, 2):
            assert saver.save({"train": batches.state_dict()}) is None and saver._pending is not None
            assert latest_iteration(folder) == (None if step == 1 else 2)
    saved = saver.finish()
    assert saved is not None and saved.paused <= saved.taken and saver.finish() is None
    return losses


def test_a_writer_of_an_exited_rank_writes_no_file(tmp_path: Path) -> None:
    """The kernel does not signal the death of a parent that has died already."""
    from megatron_cp.training.checkpoint import writer as checkpoint_writer

    report = tmp_path / "report"
    pid = os.fork()
    if not pid:
        try:
            with report.open("wb") as file:
                checkpoint_writer._write(file, None, -1)
        finally:
            os._exit(0)
    assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == 1 and not report.read_bytes()


def resume_at(overrides: dict[str, Any], folder: str, iteration: int, steps: int) -> list[tuple[float, float]]:
    run, batches = start(tiny_config(**overrides))
    batches.load_state_dict(load_checkpoint(run, folder, iteration)["train"])
    results = [train_step(run, next(batches).microbatches) for _ in range(steps)]
    return [(result.loss, result.grad_norm or 0.0) for result in results]


@pytest.mark.parametrize(
    ("ranks", "overrides"), [(2, CP2), pytest.param(1, {}, marks=slow), pytest.param(2, PP2, marks=slow)]
)
def test_background_saves_write_the_state_at_the_time_of_saving(
    tmp_path: Path, ranks: int, overrides: dict[str, Any]
) -> None:
    losses = run_ranks(save_in_the_background, ranks, overrides, str(tmp_path))[0]
    assert names(tmp_path) == ["iter_0000002", "iter_0000003", "latest_checkpointed_iteration.txt"]
    assert losses == run_ranks(train_losses, ranks, overrides, 6)[0], "saving must not disturb training"
    for iteration in (2, 3):
        assert run_ranks(resume_at, ranks, overrides, str(tmp_path), iteration, 3)[0] == losses[iteration:][:3]


def slow_writer_dies(folder: str, how: str) -> str:
    """Save while the background process of rank 1 is killed, or cannot write."""
    from megatron_cp.training.checkpoint import writer as checkpoint_writer

    run, batches = start(tiny_config(**ASYNC, **CP2))
    saver = CheckpointSaver(run, folder)
    saver.save({"train": batches.state_dict()})
    saver.finish()
    run.progress.iteration = 1
    original = checkpoint_writer.FileSystemWriterAsync.write_preloaded_data

    def write(*args: Any, **kwargs: Any) -> Any:
        mine = os.environ["RANK"] == "1"
        time.sleep(60.0 if mine and how == "killed" else 1.0)  # it must not be done before it is killed
        if mine and how == "full":
            return 0, OSError(28, "No space left on device")
        return original(*args, **kwargs)

    checkpoint_writer.FileSystemWriterAsync.write_preloaded_data = write
    saver.save({"train": batches.state_dict()})
    assert saver.writing
    train_step(run, next(batches).microbatches)
    if how == "killed" and os.environ["RANK"] == "1":
        os.kill(saver._pending.writer._caller.process.pid, signal.SIGKILL)
    try:
        saver.finish()
    except RuntimeFault as fault:
        assert fault.on_all_ranks and saver._pending is None
        return str(fault)
    return "no fault"


@pytest.mark.parametrize(
    ("how", "message"),
    [
        ("killed", "rank 1: OSError: the background writer exited early (exit code -9)"),
        ("full", "rank 1: OSError: [Errno 28] No space left on device"),
    ],
)
def test_a_background_writer_that_fails_is_reported_by_every_rank(tmp_path: Path, how: str, message: str) -> None:
    messages = run_ranks(slow_writer_dies, 2, str(tmp_path), how)
    assert all(message in text and "iter_0000001 could not be written" in text for text in messages), messages
    assert names(tmp_path) == ["iter_0000000", "latest_checkpointed_iteration.txt"]
    assert latest_iteration(tmp_path) == 0 and not damage(tmp_path / "iter_0000000")


@pytest.fixture
def small_disk(tmp_path: Path) -> Any:
    """Mount a file system of 3 MiB."""
    folder = tmp_path / "disk"
    folder.mkdir()
    if subprocess.run(["mount", "-t", "tmpfs", "-o", "size=3m", "tmpfs", folder], capture_output=True).returncode:
        pytest.skip("mounting needs root")
    yield folder
    subprocess.run(["umount", folder], check=True)


def save_until_full(folder: str, overrides: dict[str, Any]) -> str:
    run, batches = start(tiny_config(model__num_layers=2, **overrides))
    saver = CheckpointSaver(run, folder)
    for iteration in range(1, 6):
        run.progress.iteration = iteration
        try:
            saver.save({"train": batches.state_dict()})
            saver.finish()
        except RuntimeFault as fault:
            return f"{iteration} {fault}"
    return "no fault"


@pytest.mark.parametrize("overrides", [{}, ASYNC], ids=["waiting", "in the background"])
def test_a_full_disk_leaves_the_previous_checkpoints(small_disk: Path, overrides: dict[str, Any]) -> None:
    messages = run_ranks(save_until_full, 2, str(small_disk), CP2 | overrides)
    failed = int(messages[0].split()[0])
    assert failed >= 2
    expected = f"iter_{failed:07d} could not be written; the latest is still iteration {failed - 1}"
    assert all(expected in text and "No space left" in text for text in messages), messages
    assert latest_iteration(small_disk) == failed - 1
    assert [name for name in names(small_disk) if "iter" in name] == [
        *(f"iter_{iteration:07d}" for iteration in range(1, failed)),
        "latest_checkpointed_iteration.txt",
    ]
    assert all(not damage(small_disk / f"iter_{iteration:07d}") for iteration in range(1, failed))
    run_ranks(resume_at, 2, CP2 | {"model__num_layers": 2}, str(small_disk), failed - 1, 1)


@pytest.mark.parametrize("limit", [0, 10_000, 200_000], ids=lambda limit: f"{limit} bytes")
def test_a_file_that_cannot_grow_is_reported(tmp_path: Path, limit: int) -> None:
    """Every file counts: a rank's tensors, the index, and the name of the latest."""
    messages = run_ranks(save_with_file_limit, 2, str(tmp_path), limit)
    expected = "iter_0000001 could not be written; there is no earlier one"
    assert all(expected in text and "Error" in text for text in messages), messages
    assert names(tmp_path) == []


def save_with_file_limit(folder: str, limit: int) -> str:
    run, _ = start(tiny_config(**CP2))
    run.progress.iteration = 1
    saver = CheckpointSaver(run, folder)
    resource.setrlimit(resource.RLIMIT_FSIZE, (limit, resource.RLIM_INFINITY))
    try:
        saver.save({})
    except RuntimeFault as fault:
        return str(fault)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (resource.RLIM_INFINITY, resource.RLIM_INFINITY))
    return "no fault"


def test_a_node_that_has_lost_the_folder_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The other ranks have begun to plan the writing, and would wait for the node."""
    (tmp_path / "elsewhere").mkdir()
    monkeypatch.chdir(tmp_path)
    messages = run_ranks(save_without_folder, 2)
    assert len(set(messages)) == 1 and "the latest is still iteration 1. rank 1: FileNotFound" in messages[0]
    assert names(tmp_path / "shared") == ["iter_0000001", "latest_checkpointed_iteration.txt"]


def save_without_folder() -> str:
    run, _ = start(tiny_config(**CP2))
    saver = CheckpointSaver(run, "shared")
    run.progress.iteration = 1
    saver.save({})
    run.progress.iteration = 2
    if os.environ["RANK"] == "1":
        os.chdir("elsewhere")
    try:
        saver.save({})
    except RuntimeFault as fault:
        return str(fault).replace("there is no earlier one", "the latest is still iteration 1")  # as each sees it
    return "no fault"


@pytest.mark.parametrize("when", ["at the start", "later"])
def test_a_read_only_folder_is_reported(tmp_path: Path, when: str) -> None:
    folder = tmp_path / "disk"
    folder.mkdir()
    if subprocess.run(["mount", "-t", "tmpfs", "tmpfs", folder], capture_output=True).returncode:
        pytest.skip("mounting needs root")
    try:
        messages = run_ranks(save_read_only, 2, str(folder), when == "later")
        assert all("rank 0: OSError: [Errno 30] Read-only file system" in text for text in messages), messages
        assert latest_iteration(folder) == (1 if when == "later" else None)
    finally:
        subprocess.run(["umount", folder], check=True)


def save_read_only(folder: str, later: bool) -> str:
    run, _ = start(tiny_config(**CP2))
    saver = CheckpointSaver(run, folder)
    run.progress.iteration = 1
    if later:
        saver.save({})
        run.progress.iteration = 2
    if os.environ["RANK"] == "0":
        subprocess.run(["mount", "-o", "remount,ro", folder], check=True)
    try:
        saver.save({})
    except RuntimeFault as fault:
        return str(fault)
    return "no fault"


def save_twice_and_die(folder: str, moment: int, overrides: dict[str, Any]) -> int:
    """Save iteration 1, then 2, then 2 again, and kill every rank on the way.

    A rank is killed at its ``moment``-th file operation after the first save. Returns the number of operations if they
    were fewer.
    """
    run, batches = start(tiny_config(model__num_layers=1, checkpoint__most_recent_k=1, **overrides))
    saver = CheckpointSaver(run, folder)
    for iteration in (1, 2, 2):
        if run.progress.iteration < iteration:
            train_step(run, next(batches).microbatches)
        run.progress.iteration = iteration
        if iteration == 2:
            operations = _die_at(moment)
        saver.save({"train": batches.state_dict()})
        saver.finish()
    return len(operations)


def _die_at(moment: int) -> list[str]:
    """Kill this process's group of ranks before the given call that changes files."""
    import shutil

    done: list[str] = []

    def counted(name: str, original: Any) -> Any:
        def call(*args: Any, **kwargs: Any) -> Any:
            done.append(name)
            if len(done) == moment:
                os.killpg(0, signal.SIGKILL)
            return original(*args, **kwargs)

        return call

    os.rename = counted("rename", os.rename)
    os.replace = counted("replace", os.replace)
    os.mkdir = counted("mkdir", os.mkdir)
    os.fsync = counted("fsync", os.fsync)
    os.unlink = counted("unlink", os.unlink)
    os.rmdir = counted("rmdir", os.rmdir)
    shutil.rmtree = counted("rmtree", shutil.rmtree)
    Path.write_text = counted("write_text", Path.write_text)
    return done


def in_own_group(fn: Any, *args: Any) -> Any:
    """Call in a process group that rank 0 leads.

    Killing rank 0 kills all ranks and their writers, as a machine's crash does.
    """
    os.setpgid(0, 0)
    return fn(*args)


@pytest.mark.parametrize(
    ("ranks", "moment", "overrides"),
    [pytest.param(1, at, {}, marks=[] if at % 11 == 1 else slow, id=f"one rank, {at}") for at in range(1, 48)]
    + [pytest.param(2, at, ASYNC | CP2, marks=slow, id=f"in the background, {at}") for at in range(1, 40, 2)],
)
def test_killed_at_any_file_operation_of_a_save(
    tmp_path: Path, ranks: int, moment: int, overrides: dict[str, Any]
) -> None:
    """Rank 0 makes all the file operations but the writing of tensors."""
    killed = False
    try:
        operations = run_ranks(in_own_group, ranks, save_twice_and_die, str(tmp_path), moment, overrides)
    except RanksFailed as failed:
        killed = "SIGKILL" in str(failed)
        assert killed, failed
    if not killed:
        assert operations[0] < moment
        pytest.skip("a save has fewer operations")
    iteration = latest_iteration(tmp_path)
    assert iteration in (1, 2)
    folder = existing_folder(tmp_path, iteration)
    assert folder is not None and not damage(folder)
    clean_leftovers(tmp_path)
    assert existing_folder(tmp_path, iteration) == checkpoint_files.checkpoint_folder(tmp_path, iteration)
    assert not [name for name in names(tmp_path) if name.startswith(".iter")]
    for name in names(tmp_path):
        assert name.startswith(("latest", ".latest")) or not damage(tmp_path / name), name
    if moment % 7 == 1:
        layout = overrides | {"model__num_layers": 1}
        assert len(run_ranks(resume_at, ranks, layout, str(tmp_path), iteration, 1)[0]) == 1


def test_existing_files_match_the_index(tmp_path: Path) -> None:
    run_ranks(save_once, 2, CP2, str(tmp_path))
    folder = tmp_path / "iter_0000001"
    assert damage(folder) == []
    shard = sorted(folder.glob("__1_*.distcp"))[0]
    content = shard.read_bytes()
    shard.write_bytes(content[:-1])
    assert damage(folder) == [f"{shard} has {len(content) - 1} bytes, expected {len(content)}"]
    shard.unlink()
    assert damage(folder) == [f"{shard} is missing"]
    with pytest.raises(RanksFailed, match=rf"{shard.name} is missing"):
        run_ranks(resume_at, 2, CP2, str(tmp_path), 1, 1)


def save_once(overrides: dict[str, Any], folder: str) -> None:
    run, batches = start(tiny_config(**overrides))
    run.progress.iteration = 1
    CheckpointSaver(run, folder).save({"train": batches.state_dict()})


@pytest.mark.parametrize(
    ("count", "interval", "kept"),
    [
        (-1, None, [2, 4, 6, 8, 10, 99]),
        (2, None, [8, 10, 99]),
        (2, 6, [6, 8, 10, 99]),
        (-1, 4, [4, 8, 10, 99]),
        (1, 20, [10, 99]),
    ],
)
def test_which_checkpoints_are_kept(tmp_path: Path, count: int, interval: int | None, kept: list[int]) -> None:
    for iteration in (2, 4, 6, 8, 10, 99):  # 99: of a run that went back to an older checkpoint
        checkpoint_files.checkpoint_folder(tmp_path, iteration).mkdir()
    checkpoint_files.keep_most_recent(tmp_path, 10, count, interval)
    assert checkpoint_files.saved_iterations(tmp_path) == kept


def without_optimizer(folder: str) -> list[float]:
    run, batches = start(tiny_config(checkpoint__save_optim=False))
    train_step(run, next(batches).microbatches)
    run.progress.iteration = 1
    run.progress.consumed_samples = 4
    CheckpointSaver(run, folder).save({"train": batches.state_dict()})
    return [run.optimizer.param_groups[0]["lr"]]


def resume_without_optimizer(folder: str) -> list[float]:
    run, _ = start(tiny_config(checkpoint__load_optim=False))
    load_checkpoint(run, folder, 1)
    return [run.optimizer.param_groups[0]["lr"]]


def test_weights_alone(tmp_path: Path) -> None:
    rate = run_ranks(without_optimizer, 1, str(tmp_path))
    with pytest.raises(RanksFailed, match=r"holds no optimizer state.*checkpoint.load_optim=false"):
        run_ranks(resume_at, 1, {}, str(tmp_path), 1, 1)
    assert run_ranks(resume_without_optimizer, 1, str(tmp_path)) == rate, "the schedule goes on where it was"
