"""The fix of a refused checkpoint lets the run start.

It is typed after the configuration.
"""

from pathlib import Path
from typing import Any

import pytest

from megatron_cp.common.errors import ConfigError
from megatron_cp.config.run_config import RunConfig
from megatron_cp.rules.remedies import parse_fix, with_overrides
from megatron_cp.training.checkpoint.differences import new_run_fix
from megatron_cp.training.checkpoint.resume import check_fits, find_resume_point
from megatron_cp.training.step import train_step
from tests.ranks import run_ranks
from tests.training_runs import save_checkpoint, start, tiny_config

SAVED: dict[str, dict[str, Any]] = {"run": {}, "no optimizer": {"checkpoint__save_optim": False}}
SAVED["plain"] = {"optimizer__use_distributed_optimizer": False}
VOCABULARY = {"model__vocab_size": 255}
# Settings of the saved run, settings now, and the number of alternatives in the message.
REFUSED: dict[str, tuple[str, dict[str, Any], int]] = {
    "layers": ("run", {"model__num_layers": 2}, 1),
    "several weights": ("run", {"model__hidden_size": 32, "model__window_size": [3, 0]}, 1),
    "function": ("run", {"model__window_size": [3, 0], "model__rope_scaling": True}, 2),
    "yarn": (
        "run",
        {
            "model__position_embedding_type": "yarn",
            "model__yarn_rotary_scaling_factor": 2.0,
            "model__yarn_original_max_position_embeddings": 32,
        },
        2,
    ),
    "padding": ("run", {"model__make_vocab_size_divisible_by": 500}, 1),
    "padding and tp": ("run", {"model__make_vocab_size_divisible_by": 500, "model__tensor_model_parallel_size": 3}, 1),
    "optimizer": ("run", {"optimizer__optimizer": "sgd"}, 2),
    "precision": ("plain", {"mixed_precision__fp32": False, "mixed_precision__bf16": True, **SAVED["plain"]}, 2),
    "no optimizer": ("no optimizer", {}, 2),
    "schedule": ("run", {"optimizer__lr": 3e-3}, 2),
    "no such step": ("run", {"checkpoint__ckpt_step": 7}, 1),
    "a checkpoint's folder": ("run/iter_0000001", {}, 1),
    "folder of runs": ("", {"checkpoint__load_optim": False}, 1),
    "nothing there": ("nowhere", {}, 1),
    "no weights there": ("nowhere", {"checkpoint__pretrained_checkpoint": "nowhere"}, 1),
}


def save_all(root: str) -> None:
    for name, overrides in SAVED.items():
        run, batches = start(tiny_config(**VOCABULARY, **overrides, checkpoint__save=f"{root}/{name}"))
        train_step(run, next(batches).microbatches)
        run.progress.iteration += 1
        save_checkpoint(run, f"{root}/{name}", {})
        run.close()


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> Path:
    root = tmp_path_factory.mktemp("the runs")  # with a space, as a user's folder may have
    run_ranks(save_all, 1, str(root))
    return root


def asked_for(runs: Path, name: str, changes: dict[str, Any]) -> RunConfig:
    folders = {
        "checkpoint__load": f"{runs}/{name}".rstrip("/"),
        "checkpoint__save": f"{runs}/{name if name in SAVED else 'new'}",
    }
    if "checkpoint__pretrained_checkpoint" in changes:
        folders["checkpoint__load"] = None
    return tiny_config(**VOCABULARY | folders | changes)


@pytest.mark.parametrize("name", REFUSED)
def test_every_alternative_begins_a_run(runs: Path, name: str) -> None:
    config = asked_for(runs, *REFUSED[name][:2])
    with pytest.raises(ConfigError) as refused:
        find_resume_point(config)
    message = str(refused.value)
    fixes = parse_fix(message.partition(" Fix: ")[2])
    assert len(fixes) == REFUSED[name][2] and not any(fix.by_hand for fix in fixes), message
    for fix in fixes:
        find_resume_point(with_overrides(config, fix.overrides))


def test_weights_alone_begin_a_new_run(runs: Path) -> None:
    config = asked_for(runs, "run", {})
    weights = {"format": 1, "config": {"model": config.as_written()["model"]}}
    with pytest.raises(ConfigError, match="holds weights only") as refused:
        check_fits(config, weights, runs / "run/iter_0000001", finetune=False)
    (fix,) = parse_fix(str(refused.value).partition(" Fix: ")[2])
    found = find_resume_point(with_overrides(config, fix.overrides))
    assert found is not None and found.finetune and found.root == str(runs / "run")
    assert new_run_fix(config.checkpoint.save, runs / "run/iter_0000001") == str(fix)
