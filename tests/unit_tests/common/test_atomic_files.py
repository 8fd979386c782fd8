"""Readers find files and folders complete or unchanged."""

import os
import threading
from pathlib import Path
from typing import Any

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


def test_sets_of_two_writers_do_not_mix(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    paths, rename = (tmp_path / "x.bin", tmp_path / "x.idx"), os.replace

    def write(text: str) -> None:
        with atomic_write(*paths) as partial:
            for each in partial:
                each.write_text(text)

    other = threading.Thread(target=write, args=("second",))

    def rename_and_let_the_other_try(*names: Any) -> None:
        rename(*names)
        if other.ident is None:
            other.start()
            other.join(0.5)

    monkeypatch.setattr(os, "replace", rename_and_let_the_other_try)
    write("first")
    other.join()
    assert [path.read_text() for path in paths] == ["second", "second"]


def test_an_interrupted_set_is_not_mixed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    paths = (tmp_path / "x.bin", tmp_path / "x.idx")
    for path in paths:
        path.write_text("old")
    monkeypatch.setattr(os, "replace", lambda new, path: path.write_text("new") and 1 / 0)
    with pytest.raises(ZeroDivisionError), atomic_write(*paths) as partial:
        for each in partial:
            each.write_text("new")
    assert names(tmp_path) == ["x.bin"]
