"""Every command works from the wheel, in an empty folder.

It names no file of the clone.
"""

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from megatron_cp import cli

ROOT = Path(__file__).parents[2]
SMALL = [
    *("train.train_iters=2", "train.global_batch_size=2", "train.micro_batch_size=1", "model.num_layers=1"),
    *("dataset.seq_length=32", "scheduler.lr_warmup_iters=0", "logger.tensorboard=false"),
]
TWO = ["llama_tiny_p2p_pretrain_config", "-n", "2", "model.context_parallel_size=2", *SMALL]


class Installed:
    """The wheel in its own folder, and an empty working folder."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder / "work"
        self.folder.mkdir()
        files = subprocess.run(["git", "ls-files", "-z"], cwd=ROOT, capture_output=True, check=True).stdout
        subprocess.run(  # a build writes into its folder
            ["cp", "--parents", "-t", folder / "work", *filter(None, files.decode().split("\0"))], cwd=ROOT, check=True
        )
        self.folder.rename(source := folder / "source")
        self.folder.mkdir()
        pip = [sys.executable, "-m", "pip", "--disable-pip-version-check", "-q"]
        options = ["--no-deps", "--no-index", "--no-build-isolation"]
        subprocess.run([*pip, "wheel", *options, "-w", folder, source], check=True)
        (self.wheel,) = folder.glob("*.whl")
        subprocess.run(
            [*pip, "install", "--no-deps", "--no-index", "--target", folder / "site", self.wheel], check=True
        )
        self._program = folder / "site/bin/megatron-cp"
        self._environment = os.environ | {
            "PYTHONPATH": str(folder / "site"),
            "PATH": f"{folder / 'site/bin'}:/usr/bin:/bin",
            "OMP_NUM_THREADS": "1",
        }

    def __call__(self, *arguments: str, code: int = 0) -> str:
        """Return a command's output."""
        done = subprocess.run(
            [sys.executable, self._program, *arguments],
            cwd=self.folder, env=self._environment, capture_output=True, text=True, timeout=300, check=False,
        )  # fmt: skip
        text = done.stdout + done.stderr
        assert done.returncode == code, text[-3000:]
        named = re.findall(rf".*(?:{re.escape(str(ROOT))}(?!/\.venv)|\bscripts/|\bdocs/|Traceback).*", text)
        assert not named
        return text


@pytest.fixture(scope="module")
def installed(tmp_path_factory: pytest.TempPathFactory) -> Installed:
    return Installed(tmp_path_factory.mktemp("wheel"))


@pytest.mark.slow
@pytest.mark.timeout(1800)
def test_every_command(installed: Installed) -> None:
    commands = set(cli._MODULES)
    for command in commands:
        assert f"megatron-cp {command}" in installed(command, "--help")

    def run(command: str, *arguments: str, code: int = 0) -> str:
        commands.discard(command)
        return installed(command, *arguments, code=code)

    assert "llama_tiny_pretrain_config" in run("recipes")
    assert "no setting breaks a rule" in run("validate", "llama31_405b_pretrain_config", "--environment", "gpu")
    (installed.folder / "text.txt").write_text("some text\n" * 500)
    text = ["--input", "text.txt", "--output-prefix", "corpus", "--tokenizer-type", "ByteLevelTokenizer"]
    assert "corpus.bin, .idx: 1 documents" in run("preprocess", *text, "--workers", "2")
    trained = run("train", *TWO, "dataset.kind=mock", "checkpoint.save=run")
    assert "iteration 2 of 2: lm loss" in trained and (installed.folder / "run/iter_0000002").is_dir()
    assert "validation loss at iteration 2" in run("evaluate", "run", "-n", "2", "validation.eval_iters=1")
    assert "EQUAL" in run("verify", *TWO, "--steps", "1")
    run("report", "run")
    run("profile", "run", code=2)  # it was not profiled
    run("schedule", "--distribution", "mock", "--count", "8", "--ranks", "4")
    assert "estimates" in run("plan", "--recipe", "llama_tiny_pretrain_config", "--gpus", "2", "--gpu", "h100")
    assert "some text" in run("preview", "llama_tiny_pretrain_config", "dataset.data_path=corpus")
    run("doctor", "llama_tiny_pretrain_config", "--world-size", "4")
    run("convert", "export", "--megatron-path", "run", "--hf-path", "exported")
    screen = run("quickstart", *SMALL, "model.num_layers=2")
    (trained_on_text,) = installed.folder.glob("runs/quickstart/run-*")
    assert "some text" in run("generate", str(trained_on_text), "some text", "--max-new-tokens", "4")
    assert not commands, "not tried"
    suggested = re.findall(r"^ +(megatron-cp (?:train|preprocess|recipes)\b.*)$", screen, re.M)
    tuning = [line for line in suggested if "llama_tiny_sft_config" in line]  # minutes, so it is not run here
    assert (len(suggested), len(tuning)) == (4, 1), screen
    for line in set(suggested) - set(tuning):
        installed(*line.split()[1:])
    assert "nope.bin and nope.idx: no such file" in run("train", *TWO, "dataset.data_path=nope", code=2)
