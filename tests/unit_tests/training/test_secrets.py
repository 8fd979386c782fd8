"""A run with a secret in its environment writes and prints the secret nowhere."""

import os
import sys
from pathlib import Path
from typing import Any

import pytest
import yaml

from megatron_cp.common import terminal

SECRETS = ("hunter2-hunter2", "another-secret")
ALONE = ["model.context_parallel_size=1", "scheduler.lr_warmup_iters=0"]
SETTINGS = [
    "logger.wandb_exp_name=${oc.env:SECRET}",
    "logger.wandb_entity='with ${logger.wandb_exp_name}'",
    "logger.tensorboard=true",
    "env_vars.NVTE_DEBUG=${oc.env:SECRET}",
    "validation.eval_interval='${oc.decode:${oc.env:NUMBER}}'",
    "validation.eval_iters=1",
    *ALONE,
    "checkpoint.save_interval=1",
]


def files_with(text: str, folder: Path) -> list[str]:
    return [str(path) for path in folder.rglob("*") if path.is_file() and text.encode() in path.read_bytes()]


def stdout_to(folder: Path) -> Any:
    def redirect() -> None:
        sys.stdout = open(folder / f"stdout{os.environ['RANK']}", "a", buffering=1)  # noqa: SIM115

    return redirect


def test_a_run_and_its_continuation(cli: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(terminal, "_hidden", {})
    monkeypatch.setenv("NUMBER", "1")
    recipe = tmp_path / "run" / "config.yaml"
    for steps, secret in enumerate(SECRETS, start=1):
        monkeypatch.setenv("SECRET", secret)
        arguments = [*(SETTINGS if steps == 1 else ()), f"train.train_iters={steps}", "scheduler.lr_decay_iters=5"]
        code, text = cli(*arguments, ranks=1, before=stdout_to(tmp_path), recipe=None if steps == 1 else str(recipe))
        assert code == 0, text
        assert ("resumed from iteration 1" in text) == (steps == 2)
        assert not files_with(secret, tmp_path), secret
        written = yaml.safe_load(recipe.read_text())
        assert written["logger"]["wandb_exp_name"] == "${oc.env:SECRET}"
        assert written["logger"]["wandb_entity"] == "with ${logger.wandb_exp_name}"
        assert written["env_vars"]["NVTE_DEBUG"] == "${oc.env:SECRET}"
        assert written["validation"]["eval_interval"] == 1
    assert files_with("${oc.env:SECRET}", tmp_path / "run" / "iter_0000002")  # the checkpoint's own configuration
    assert (tmp_path / "stdout0").exists()


def test_a_run_that_fails(cli: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(terminal, "_hidden", {})
    monkeypatch.setenv("SECRET", SECRETS[0])
    for setting in ("tokenizer.tokenizer_model", "dataset.mock_lengths"):
        more = ["tokenizer.tokenizer_type=HuggingFaceTokenizer"] if setting.startswith("tok") else []
        more += ["dataset.kind=mock_documents"] if setting.endswith("lengths") else []
        code, text = cli(f"{setting}='${{oc.env:SECRET}}'", *more, *ALONE, ranks=1)
        assert code == 2, text
        assert SECRETS[0] not in text and "${oc.env:SECRET}" in text
        assert not files_with(SECRETS[0], tmp_path)
