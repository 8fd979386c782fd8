"""A whole run from its command line, on forked ranks."""

import os
import sys
from pathlib import Path
from typing import Any

import pytest

from megatron_cp.cli import main
from megatron_cp.common.errors import EXIT_CONFIG
from megatron_cp.config.recipes import load_recipe
from megatron_cp.launch import launcher
from megatron_cp.rules import check
from megatron_cp.training import train  # noqa: F401 - no rank imports it for itself
from tests.ranks import free_port, run_ranks

TINY = [
    "train",
    "--recipe",
    "llama_tiny_p2p_pretrain_config",
    "dataset.kind=mock",
    "dataset.seq_length=32",
    "model.num_layers=1",
    "model.context_parallel_size=2",
    "train.train_iters=1",
    "train.global_batch_size=2",
    "train.micro_batch_size=1",
    "logger.progress=plain",
    "logger.tensorboard=false",
]
# Import the parser and the rules of recipes, and build the grammar, once here: they took half of a rank's time.
check(load_recipe(TINY[2], TINY[3:]), 2)


def run_cli(folder: str, arguments: list[str], before: Any, recipe: str | None = None) -> tuple[int, str]:
    """Return exit code and standard error of one rank.

    ``before`` is called first, inside the rank. Without a ``recipe`` of its own the run is tiny.
    """
    if before is not None:
        before()
    path = Path(folder) / f"stderr{os.environ['RANK']}"
    sys.stderr = path.open("w", buffering=1)
    begin = TINY if recipe is None else ["train", "--recipe", recipe]
    try:
        code = main([*begin, f"checkpoint.save={folder}/run", *arguments])
    except _EndedByTheLauncherError:
        code = EXIT_CONFIG
    return code, path.read_text()


class _EndedByTheLauncherError(BaseException): ...


def _turn_of_the_first() -> str:
    """End all ranks but the first, as a launcher would."""
    if launcher.is_first_rank():
        return ""
    raise _EndedByTheLauncherError


@pytest.fixture
def cli(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Any:
    monkeypatch.setenv("MEGATRON_CP_TEST_NO_INIT", "1")
    monkeypatch.setattr("megatron_cp.launch.failures._wait_for_turn", _turn_of_the_first)
    monkeypatch.setattr("megatron_cp.launch.failures._REPORT_DELAY", 0.0)

    def call(
        *arguments: str, ranks: int = 2, before: Any = None, same_code: bool = True, recipe: str | None = None
    ) -> tuple[Any, str]:
        monkeypatch.setenv("MASTER_ADDR", "127.0.0.1")
        monkeypatch.setenv("MASTER_PORT", str(free_port()))
        results = run_ranks(run_cli, ranks, str(tmp_path), list(arguments), before, recipe)
        codes = [code for code, _ in results]
        text = "".join(text for _, text in results)
        assert "Traceback" not in text, text
        if not same_code:
            return codes, text
        assert len(set(codes)) == 1, results
        return codes[0], text

    return call
