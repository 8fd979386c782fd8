"""Text from files cannot move the cursor or reverse text in a terminal.

It cannot set the terminal's title either.
"""

import json
import logging
import re
from pathlib import Path

import pytest

from megatron_cp.cli import main
from megatron_cp.common import terminal
from megatron_cp.common.errors import EXIT_CONFIG, EXIT_OK, ConfigError, Violation
from megatron_cp.common.terminal import in_a_line, printable
from megatron_cp.config.recipes import load_recipe
from megatron_cp.training.monitor.metrics import start_logging

TINY = "llama_tiny_pretrain_config"
ESCAPES = {
    "title": "\x1b]0;x\x07",
    "clear": "\x1b[2J",
    "carriage return": "a\rb",
    "backspace": "a\bb",
    "right to left": "a\u202eb",
    "isolate": "a\u2067b",
    "C1 CSI": "a\x9b2Jb",
    "next line": "a\x85b",
    "delete": "a\x7fb",
    "line separator": "a\u2028b",
}
UNSAFE = re.compile("[\x00-\x08\x0b-\x1f\x7f-\x9f\u061c\u200e\u200f\u2028-\u202e\u2066-\u2069]")


def printed(capfd: pytest.CaptureFixture[str]) -> str:
    text = "".join(capfd.readouterr())
    assert not UNSAFE.search(text), ascii(text)
    return text


@pytest.mark.parametrize("name", ESCAPES)
def test_escapes_are_shown(name: str) -> None:
    shown = printable(f"one\ttwo\n{ESCAPES[name]}é中")
    assert shown.startswith("one\ttwo\n") and shown.endswith("é中") and "\\" in shown and not UNSAFE.search(shown)
    assert in_a_line("a\nb") == "a\\nb"
    assert printable("\udcff") == "\\udcff"  # a byte of a file name


def test_keys_values_and_names_of_a_recipe(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    everything = "".join(ESCAPES.values())
    folder = tmp_path / everything
    folder.mkdir()
    file = folder / "mine.yaml"
    name = json.dumps(everything)
    for content in (
        f"model: {{{name}: 1}}",
        f"{name}: {{a: 1}}",
        f"model: {{num_layers: {name}}}",
        f"model: {{cp_comm_type: {name}}}",
        f"env_vars: {{{name}: a}}",
        f"defaults: [{name}]",
        f"defaults: [model: {name}]",
        f"tokenizer: {{tokenizer_model: {name}}}\nrecipe: {name}\nmodel: {{num_layers: 0}}",
        "\x1b[2J",
        "a: [",
    ):
        file.write_text(content)
        assert main(["validate", "--recipe", str(file), "--world-size", "4"]) == EXIT_CONFIG, content
        assert printed(capfd)
    file.write_text(f"defaults: [{TINY}, _self_]\nlogger: {{wandb_entity: {name}}}\nrecipe: {name}\n")
    for command in (["validate"], ["train", "--dry-run"], ["train", "--print-config"], ["doctor"]):
        assert main([*command, "--recipe", str(file)]) == EXIT_OK
        assert printed(capfd)


@pytest.mark.parametrize(
    "arguments",
    [
        ["{}"],
        ["train", "--recipe", "{}"],
        ["train", "--recipe", "{}/a.yaml"],
        ["train", "--recipe", TINY, "--config", "{}"],
        ["train", "--recipe", TINY, "--{}"],
        ["train", "--recipe", TINY, "{}"],
        ["train", "--recipe", TINY, "model.num_layers={}"],
        ["train", "--recipe", TINY, "--environment", "{}", "--dry-run"],
        ["train", "--explain", "{}"],
        ["schedule", "--lengths", "{}", "--ranks", "4"],
        ["report", "{}"],
        ["profile", "{}"],
    ],
    ids=" ".join,
)
def test_names_on_the_command_line(arguments: list[str], capfd: pytest.CaptureFixture[str]) -> None:
    everything = "".join(ESCAPES.values()) + "\udcff"
    assert main([text.format(everything) for text in arguments]) == EXIT_CONFIG
    assert "\\x1b" in printed(capfd)


def test_a_report_of_foreign_runs(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    run = tmp_path / ("".join(ESCAPES.values()) + "\nline")
    run.mkdir()
    (run / "metrics.jsonl").write_text('{"iteration": 1, "lm_loss": 1.0, "timers_s": {"\\u001b[2J": 1.0}}\n')
    (run / "config.yaml").write_text('recipe: "\\e[2J\\n\\u202e"\nmodel: {cp_comm_type: "\\e[2J"}\n')
    assert main(["report", str(run)]) == EXIT_OK
    text = printed(capfd)
    assert text.count("\\x1b[2J") >= 2 and "\\nline" in text and "\\u202e" in text


def test_a_message_cannot_end_before_its_end() -> None:
    violation = Violation("K1", "error", "a\nmegatron-cp: every rule holds", "unknown\r\n", "b\nc", "d\ne")
    assert str(violation) == ("error K1: a\\nmegatron-cp: every rule holds=d\\ne: unknown\\r\\n\n    fix: b\\nc")
    with pytest.raises(ConfigError) as error:
        load_recipe(TINY, files=["no\nfile.yaml"])
    assert len(str(error.value).splitlines()) == 2


def test_log_lines(capfd: pytest.CaptureFixture[str]) -> None:
    handlers, level = logging.getLogger().handlers[:], logging.getLogger().level
    try:
        for live in (False, True):
            start_logging(0, live)
            logging.getLogger("megatron_cp.anything").warning("see %s and\nthis", "\x1b[2J")
            text = capfd.readouterr().err
            assert "see \\x1b[2J and" in text and "\x1b[2J" not in text
    finally:
        logging.getLogger().handlers[:] = handlers
        logging.getLogger().setLevel(level)


def test_values_are_hidden(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(terminal, "_hidden", {})
    terminal.hide("hunter2hunter2", "${oc.env:SECRET}")
    terminal.hide("short", "${oc.env:SHORT}")
    terminal.hide(str(tmp_path), "${oc.env:FOLDER}")
    assert printable(f"hunter2hunter2 short {tmp_path}") == f"${{oc.env:SECRET}} short {tmp_path}"
