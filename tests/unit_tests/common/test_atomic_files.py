"""Readers find files and folders complete or unchanged."""

from pathlib import Path

import pytest

from megatron_cp.common.atomic_files import atomic_write, write_text


def names(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.iterdir())


def test_all_paths_appear_or_stay_unchanged(tmp_path: Path) -> None:
    file, folder = tmp_path / "file", tmp_path / "folder"
    write_text(file, "old")
    with pytest.raises(KeyError), atomic_write(file, folder) as (partial, inside):
        partial.write_text("new")
        inside.mkdir()
        raise KeyError
    assert names(tmp_path) == ["file"] and file.read_text() == "old"
    with atomic_write(file, folder) as (partial, inside):
        partial.write_text("new")
        inside.mkdir()
        assert file.read_text() == "old" and not folder.exists()
    assert names(tmp_path) == ["file", "folder"] and file.read_text() == "new"


def test_a_folder_filled_by_another_process_is_kept(tmp_path: Path) -> None:
    folder = tmp_path / "folder"
    with pytest.raises(OSError), atomic_write(folder) as (partial,):
        partial.mkdir()
        folder.mkdir()
        (folder / "theirs").touch()
    assert names(tmp_path) == ["folder"] and names(folder) == ["theirs"]
