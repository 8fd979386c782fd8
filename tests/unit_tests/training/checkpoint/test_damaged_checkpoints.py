"""Changed bytes are detected in every file of a checkpoint.

The error names another checkpoint.
"""

import random
import re
import shutil
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from megatron_cp.common.errors import ConfigError, UnusableCheckpoint
from megatron_cp.training.checkpoint import writer as checkpoint_writer
from megatron_cp.training.checkpoint.checksums import CHECKSUMS, read_checksums, sum_of
from megatron_cp.training.checkpoint.files import LATEST, existing_folder, latest_iteration, newer_than_latest
from megatron_cp.training.checkpoint.resume import find_resume_point, resume_fix
from megatron_cp.training.checkpoint.verification import problems_of
from megatron_cp.training.step import train_step
from tests.crafted_checkpoints import as_written_before_checksums, flip, flip_back
from tests.ranks import run_ranks
from tests.training_runs import save_checkpoint, start, tiny_config
from tests.unit_tests.training.layouts.cases import CP2

slow = pytest.mark.slow
TWO = ["train.train_iters=2", "checkpoint.save_interval=1"]
THREE = ["train.train_iters=3", "checkpoint.save_interval=1"]


def save_some(folder: str, iterations: int, overrides: dict[str, Any]) -> None:
    run, batches = start(tiny_config(model__num_layers=1, checkpoint__save=folder, **CP2, **overrides))
    for iteration in range(1, iterations + 1):
        train_step(run, next(batches).microbatches)
        run.progress.iteration = iteration
        save_checkpoint(run, folder, {"train": batches.state_dict()})
    run.close()


@pytest.fixture(scope="module")
def original(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Save iterations 1 to 11 of a small run, the last one in the background."""
    folder = tmp_path_factory.mktemp("original")
    run_ranks(save_some, 2, str(folder), 2, {})
    run_ranks(save_some, 2, str(folder / "async"), 2, {"checkpoint__async_save": True})
    (folder / "iter_0000001").rename(folder / "iter_0000010")
    (folder / "async/iter_0000001").rename(folder / "iter_0000001")
    (folder / "async/iter_0000002").rename(folder / "iter_0000011")
    shutil.rmtree(folder / "async")
    (folder / LATEST).write_text("11")
    return folder


@pytest.fixture
def root(original: Path, tmp_path: Path) -> Path:
    return Path(shutil.copytree(original, tmp_path / "root"))


def detected(root: Path, path: Path) -> bool:
    """Return whether a run, or ``convert``, reports a changed file."""
    if path.name != LATEST:
        return bool(problems_of(path.parent, verify=True))
    try:
        latest = latest_iteration(root)
    except ConfigError:
        return True
    assert latest is not None
    return existing_folder(root, latest) is None or newer_than_latest(root) is not None


@pytest.mark.parametrize(("count", "seed"), [(130, 1), pytest.param(2000, 2, marks=slow)])
def test_every_flipped_bit_is_detected(root: Path, count: int, seed: int) -> None:
    """Every kind of file must be covered, saved in the background or not."""
    chosen, undetected, kinds = random.Random(seed), [], set()
    files = [root / LATEST]
    files += [path for name in ("iter_0000002", "iter_0000011") for path in sorted((root / name).iterdir())]
    assert not any(detected(root, path) for path in files)
    for number in range(count):
        path = files[number % len(files)]
        kinds.add(path.name)
        place = flip(path, chosen)
        if not detected(root, path):
            undetected.append((path, place))
        flip_back(path, *place)
    assert not undetected
    assert kinds == {LATEST, CHECKSUMS, ".metadata", "metadata.json", "__0_0.distcp", "__1_0.distcp"}
    assert not any(detected(root, path) for path in files)


def test_without_checksums_a_flipped_bit_ends_in_no_other_error(root: Path) -> None:
    chosen = random.Random(3)
    for path in sorted((root / "iter_0000002").iterdir()) * 20:
        place = flip(path, chosen)
        problems_of(path.parent, verify=False)
        flip_back(path, *place)


def save_on_a_bad_disk(folder: str) -> None:
    """Save, and change bytes after they were written and before the end."""
    original = checkpoint_writer.write_checksums

    def write_checksums(folder: Path, files: Any) -> None:
        flip(folder / "__1_0.distcp", random.Random(4))
        original(folder, files)

    checkpoint_writer.write_checksums = write_checksums
    save_some(folder, 1, {})


def test_checksums_cover_written_bytes_not_reread_ones(tmp_path: Path) -> None:
    run_ranks(save_on_a_bad_disk, 2, str(tmp_path))
    assert problems_of(tmp_path / "iter_0000001", verify=True) == [
        f"{tmp_path}/iter_0000001/__1_0.distcp is corrupted (checksum mismatch)"
    ]


def test_every_file_has_its_checksum(root: Path) -> None:
    for folder in root.glob("iter_*"):
        sums = read_checksums(folder)
        assert sums is not None
        assert sums.files == {path.name: sum_of(path) for path in folder.iterdir() if path.name != CHECKSUMS}


def test_missing_and_extra_files_are_named(root: Path) -> None:
    folder = root / "iter_0000002"
    (folder / "common.pt").write_bytes(b"")
    assert any("common.pt does not belong to this checkpoint" in each for each in problems_of(folder, verify=True))
    (folder / "common.pt").unlink()
    (folder / CHECKSUMS).unlink()
    assert problems_of(folder, verify=True) == [f"{folder / CHECKSUMS} is missing"]
    assert problems_of(folder, verify=False) == []
    as_written_before_checksums(root / "iter_0000001")
    assert problems_of(root / "iter_0000001", verify=True) == []


@pytest.mark.parametrize("content", ["", "soon", "1 ", " 1", "-1", "1.0", "1_0", "9" * 5000, "\u0662", "\x80", "1\n2"])
def test_the_tracker_must_contain_a_number(root: Path, content: str) -> None:
    (root / LATEST).write_text(content)
    with pytest.raises(ConfigError, match=f"does not hold an iteration number.* Fix: echo 11 > {root}/{LATEST}"):
        latest_iteration(root)


def test_a_checkpoint_newer_than_the_tracker_is_reported(root: Path) -> None:
    assert latest_iteration(root) == 11 and newer_than_latest(root) is None
    (root / LATEST).write_text("10\n")
    assert latest_iteration(root) == 10 and newer_than_latest(root) == 11
    (root / LATEST).unlink()
    assert latest_iteration(root) == 11 and newer_than_latest(root) is None


def config_of(root: Path, **checkpoint: Any) -> Any:
    config = tiny_config(model__num_layers=1, checkpoint__save=str(root), **CP2)
    return replace(config, checkpoint=replace(config.checkpoint, **checkpoint))


@pytest.mark.parametrize(
    ("settings", "advice"),
    [
        ({}, ""),
        ({"load": "elsewhere"}, "checkpoint.load={root} "),
        ({"pretrained_checkpoint": "elsewhere"}, "checkpoint.load={root} checkpoint.pretrained_checkpoint=null "),
        ({"load": "elsewhere", "finetune": True},
         "checkpoint.load={root} checkpoint.pretrained_checkpoint=null checkpoint.finetune=false "),
        ({"load": "elsewhere", "ckpt_step": 2}, "checkpoint.load={root} "),
    ],
)  # fmt: skip
def test_the_fix_loads_the_other_checkpoint(root: Path, settings: dict[str, Any], advice: str) -> None:
    """A damaged checkpoint of the run itself must not be skipped silently.

    This holds for any settings.
    """
    elsewhere = shutil.copytree(root, root.parent / "elsewhere")
    changed = {name: str(elsewhere) if value == "elsewhere" else value for name, value in settings.items()}
    with (root / "iter_0000011/.metadata").open("r+b") as file:
        file.write(b"damage")
    config = config_of(root, **changed)
    begun = find_resume_point(config)
    assert begun is not None and (begun.root, begun.iteration) == (str(root), 11)
    assert resume_fix(config, str(root), 10) == advice.format(root=root) + "checkpoint.ckpt_step=10"


def test_a_run_names_the_damaged_file_and_its_fix_works(cli: Any, tmp_path: Path) -> None:
    """The checkpoint before the damaged one is damaged as well.

    So the one before that must be named.
    """
    run = tmp_path / "run"
    assert cli(*THREE)[0] == 0
    data, index = run / "iter_0000003/__1_0.distcp", run / "iter_0000002/.metadata"
    flip(data, random.Random(5))
    flip(index, random.Random(5))
    code, text = cli(*THREE)
    assert code == 1 and text.count("cannot be read") == 1, text
    assert f"{data} is corrupted (checksum mismatch)" in text
    fix = re.search(r"Iteration 1 is complete. Fix: (\S+)$", text, re.MULTILINE)
    assert fix is not None and fix[1] == "checkpoint.ckpt_step=1", text
    code, text = cli(*THREE, fix[1])
    assert code == 0 and f"resumed from iteration 1 of {run}" in text, text
    assert not problems_of(run / "iter_0000003", verify=True), "written again"


@slow
@pytest.mark.parametrize("name", ["__0_0.distcp", ".metadata", "metadata.json", CHECKSUMS])
def test_a_run_names_the_damaged_file(cli: Any, tmp_path: Path, name: str) -> None:
    assert cli(*TWO)[0] == 0
    flip(tmp_path / "run/iter_0000002" / name, random.Random(6))
    measured = ["train.skip_train=true", "validation.eval_iters=1"]
    for more in ([], measured, ["checkpoint.finetune=true", f"checkpoint.save={tmp_path}/other"]):
        code, text = cli(*TWO, *more, f"checkpoint.load={tmp_path}/run")
        assert code == 1 and f"iter_0000002/{name}" in text and "Fix: checkpoint.ckpt_step=1\n" in text, text


def test_checksums_need_not_be_compared(cli: Any, tmp_path: Path) -> None:
    assert cli(*TWO)[0] == 0
    data = tmp_path / "run/iter_0000002/__1_0.distcp"
    content = bytearray(data.read_bytes())
    content[len(content) // 2] ^= 1  # inside of a tensor
    data.write_bytes(content)
    more = ["train.train_iters=3", "scheduler.override_opt_param_scheduler=true"]
    code, text = cli(*more, "checkpoint.verify_checksums=false")
    assert code == 0 and "resumed from iteration 2" in text and "has no checksums" not in text, text


def test_an_older_versions_checkpoint_loads_and_a_newer_one_is_named(cli: Any, tmp_path: Path) -> None:
    run = tmp_path / "run"
    assert cli(*TWO)[0] == 0
    as_written_before_checksums(run / "iter_0000001")
    (run / LATEST).write_text("1")
    code, text = cli(*TWO)
    assert code == 0 and f"resumed from iteration 1 of {run}" in text, text
    assert text.count("iter_0000001 has no checksums (an earlier version wrote it)") == 1, text
    assert f"{run}/{LATEST} names iteration 1, but iteration 2 is newer. To use it: checkpoint.ckpt_step=2" in text, (
        text
    )


def test_damaged_checksums_are_refused(root: Path) -> None:
    path = root / "iter_0000002" / CHECKSUMS
    for content in (b"", b"[]", b"{}", b"\xff", b"[" * 100_000, path.read_bytes() + b" ", path.read_bytes()[1:]):
        path.write_bytes(content)
        with pytest.raises(UnusableCheckpoint, match=rf"{CHECKSUMS} is damaged"):
            read_checksums(path.parent)
