"""Files and folders that readers find whole or as they were."""

from pathlib import Path

import pytest

from megatron_cp.common.atomic_files import write_text, written_aside


def names(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.iterdir())


def test_all_paths_appear_or_stay_unchanged(tmp_path: Path) -> None:
    file, folder = tmp_path / "file", tmp_path / "folder"
    write_text(file, "old")
    with pytest.raises(KeyError), written_aside(file, folder) as (aside, inside):
        aside.write_text("new")
        inside.mkdir()
        raise KeyError
    assert names(tmp_path) == ["file"] and file.read_text() == "old"
    with written_aside(file, folder) as (aside, inside):
        aside.write_text("new")
        inside.mkdir()
        assert file.read_text() == "old" and not folder.exists()
    assert names(tmp_path) == ["file", "folder"] and file.read_text() == "new"


def test_a_folder_that_another_process_filled_stays(tmp_path: Path) -> None:
    folder = tmp_path / "folder"
    with pytest.raises(OSError), written_aside(folder) as (aside,):
        aside.mkdir()
        folder.mkdir()
        (folder / "theirs").touch()
    assert names(tmp_path) == ["folder"] and names(folder) == ["theirs"]
