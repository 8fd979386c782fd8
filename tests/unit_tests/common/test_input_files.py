"""Files of other programs: reading never blocks, and endless files are not read."""

import os
import threading
from pathlib import Path

import pytest

from megatron_cp.cli import main
from megatron_cp.common.errors import ConfigError
from megatron_cp.common.input_files import parse_json, read_bytes, special_files
from megatron_cp.config.recipes import load_recipe
from megatron_cp.training.checkpoint.files import LATEST, latest_iteration


def test_a_pipe_is_read_without_waiting_for_a_writer(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "pipe")
    with pytest.raises(OSError, match="Is a pipe without a writer"):
        read_bytes(tmp_path / "pipe")
    reader, writer = os.pipe()
    threading.Timer(0.2, lambda: (os.write(writer, b"late"), os.close(writer))).start()
    assert read_bytes(f"/dev/fd/{reader}") == b"late"
    os.close(reader)


NO_FILES = [("/dev/zero", "Is a device"), ("/", "Is a directory"), ("/none", "No such")]


@pytest.mark.parametrize(("path", "says"), NO_FILES)
def test_devices_and_folders_are_refused(path: str, says: str) -> None:
    with pytest.raises(OSError, match=says):
        read_bytes(path)


def test_special_files_are_found(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    (tmp_path / "folder").mkdir()
    (tmp_path / "nowhere").symlink_to("none")
    (tmp_path / "device").symlink_to("/dev/zero")
    os.mkfifo(tmp_path / "pipe")
    assert [path.name for path in special_files(tmp_path)] == ["device", "pipe"]


@pytest.mark.parametrize("text", ["[" * 100_000, '{"a":' * 100_000, "9" * 5000, "", b"\xff", "{"])
def test_json_has_one_kind_of_error(text: str | bytes) -> None:
    with pytest.raises(ValueError):
        parse_json(text)


@pytest.mark.parametrize("make", [os.mkfifo, lambda path: path.symlink_to("/dev/zero")], ids=["pipe", "device"])
def test_a_number_of_a_checkpoint_that_has_no_end_is_refused(tmp_path: Path, make: object) -> None:
    make(tmp_path / LATEST)  # type: ignore[operator]
    with pytest.raises(ConfigError, match="does not hold an iteration number"):
        latest_iteration(tmp_path)


@pytest.mark.parametrize("make", [os.mkfifo, lambda path: path.symlink_to("/dev/zero")], ids=["pipe", "device"])
def test_a_config_file_that_has_no_end_is_refused(tmp_path: Path, make: object) -> None:
    make(tmp_path / "x.yaml")  # type: ignore[operator]
    with pytest.raises(ConfigError, match=r"x\.yaml"):
        load_recipe("llama_tiny_pretrain_config", files=[tmp_path / "x.yaml"])


@pytest.mark.parametrize(
    "arguments",
    [
        ("profile", "{}"),
        ("convert", "import", "--hf-model", "{}", "--megatron-path", "out"),
        ("schedule", "--from-run", "{}"),
        ("schedule", "--lengths", "{}", "--ranks", "4"),
        ("report", "{}"),
        ("validate", "--recipe", "llama_tiny_pretrain_config", "--config", "{}"),
        ("validate", "--recipe", "llama_tiny_pretrain_config", "--environment", "{}"),
    ],
)
def test_a_name_that_is_too_long_is_one_message(arguments: tuple[str, ...], capsys: pytest.CaptureFixture[str]) -> None:
    assert main([each.replace("{}", "x" * 300) for each in arguments]) == 2
    assert "xxx" in capsys.readouterr().err
