"""A byte order mark is not read as text in any file.

Another encoding is an error with a conversion command.
"""

import codecs
import gzip
import io
import json
import subprocess
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from megatron.core.datasets.indexed_dataset import IndexedDataset

from megatron_cp.cli.schedule import main
from megatron_cp.common.errors import DataError
from megatron_cp.config.recipes import load_recipe
from megatron_cp.config.run_config import TokenizerConfig
from megatron_cp.data.text.preprocess import preprocess
from megatron_cp.data.text.tokenizers import HuggingFaceTokenizer, train_bpe
from megatron_cp.dynamic_cp.distributions import read_lengths
from megatron_cp.rules import Environment
from megatron_cp.training.checkpoint.files import LATEST, latest_iteration

RECIPE = "# @package _global_\nmodel:\n  num_layers: 6\n"


def texts_of(path: Path) -> list[str]:
    prefix = preprocess([path], path.parent / "out", TokenizerConfig("ByteLevelTokenizer")).prefix
    return [bytes(ids[:-1].tolist()).decode() for ids in IndexedDataset(prefix)]


def config_file(path: Path) -> int:
    (path.parent / "recipe.yaml").write_text("train:\n  train_iters: 3\n")
    return load_recipe(path.parent / "recipe.yaml", files=[path]).model.num_layers


def group_file(path: Path) -> int:
    """Write a config group's file; its first line sets the section of its settings."""
    recipe = path.parents[1] / "recipe.yaml"
    recipe.write_text("defaults:\n- model: mine\n- _self_\n")
    return load_recipe(recipe).model.num_layers


def environment(path: Path) -> float | None:
    return Environment.describe(str(path)).gpus_per_node


# How a file is read, its name, its text, and the expected content.
READERS: dict[str, tuple[Callable[[Path], Any], str, str, Any]] = {
    "text": (texts_of, "a.txt", "A caf\u00e9.", ["A caf\u00e9."]),
    "lines": (texts_of, "a.jsonl", '{"text": "A caf\u00e9."}\n{"text": "two"}\n', ["A caf\u00e9.", "two"]),
    "lengths": (lambda path: read_lengths(str(path)).tolist(), "a.lengths", "30, 7\n", [30, 7]),
    "recipe": (lambda path: load_recipe(path).model.num_layers, "a.yaml", RECIPE, 6),
    "config": (config_file, "a.yaml", RECIPE, 6),
    "config group": (group_file, "model/mine.yaml", RECIPE, 6),
    "environment": (environment, "a.yaml", "gpus_per_node: 3\n", 3),
}


@pytest.mark.parametrize("name", READERS)
def test_a_mark_is_no_text(tmp_path: Path, name: str) -> None:
    read, file, text, expected = READERS[name]
    path = tmp_path / file
    path.parent.mkdir(exist_ok=True)
    for mark in (b"", codecs.BOM_UTF8):
        path.write_bytes(mark + text.encode())
        assert read(path) == expected


@pytest.mark.parametrize(
    ("name", "encoding"),
    [*((name, "utf-16") for name in READERS), *(("text", each) for each in ("utf-16-le", "utf-16-be", "utf-32"))],
)
def test_another_encoding_is_named_and_the_command_converts_it(tmp_path: Path, name: str, encoding: str) -> None:
    read, file, text, expected = READERS[name]
    path = tmp_path / file
    path.parent.mkdir(exist_ok=True)
    path.write_bytes(text.encode(encoding))
    with pytest.raises(ValueError, match=r"is UTF-(16|16LE|16BE|32) text; only UTF-8 is read\. Fix: iconv ") as error:
        read(path)
    command = str(error.value).partition("Fix: ")[2].splitlines()[0]
    subprocess.run(command, shell=True, check=True)
    assert read(path) == expected


def test_files_that_were_joined_have_marks_inside(tmp_path: Path) -> None:
    line = codecs.BOM_UTF8 + b'{"text": "one"}\n'
    (tmp_path / "a.jsonl").write_bytes(line * 2 + codecs.BOM_UTF8 + b"\n")
    assert texts_of(tmp_path / "a.jsonl") == ["one", "one"]


def test_a_file_of_a_mark_alone_has_no_text(tmp_path: Path) -> None:
    (tmp_path / "a.txt").write_bytes(codecs.BOM_UTF8)
    with pytest.raises(DataError, match="has no text"):
        texts_of(tmp_path / "a.txt")


def test_packed_and_piped_lengths(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "a.gz").write_bytes(gzip.compress(codecs.BOM_UTF8 + b"30 7"))
    assert read_lengths(str(tmp_path / "a.gz")).tolist() == [30, 7]
    monkeypatch.setattr("sys.stdin", io.StringIO("\ufeff30 7"))
    assert main(["--lengths", "-", "--ranks", "2", "--max-seqlen-per-rank", "64"]) == 0, capsys.readouterr().err


def test_a_tokenizers_files(tmp_path: Path) -> None:
    folder = train_bpe(["some words"] * 9, 260, tmp_path / "tokenizer")
    expected = HuggingFaceTokenizer(folder).tokenize("words")
    for file in folder.iterdir():
        file.write_bytes(codecs.BOM_UTF8 + file.read_bytes())
    assert HuggingFaceTokenizer(folder).tokenize("words") == expected
    (folder / "tokenizer.json").write_text(json.dumps({}), encoding="utf-16")
    with pytest.raises(DataError, match=r"cannot be read as a tokenizer: is UTF-16 text; only UTF-8 is read\. Fix: ic"):
        HuggingFaceTokenizer(folder)


def test_the_file_that_names_a_checkpoint(tmp_path: Path) -> None:
    (tmp_path / LATEST).write_bytes(codecs.BOM_UTF8 + b"12\r\n")
    assert latest_iteration(tmp_path) == 12
