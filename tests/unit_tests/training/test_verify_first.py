"""``train --verify`` compares the layout with one rank, once.

This is before the first step.
"""

import json
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pytest
import torch.distributed as dist
from megatron.core import parallel_state

from megatron_cp.config.recipes import load_recipe
from megatron_cp.rules import Environment
from megatron_cp.training import consistency
from megatron_cp.verify import run
from megatron_cp.verify.reduce import comparable
from tests.ranks import run_ranks
from tests.unit_tests.training.conftest import TINY
from tests.unit_tests.verify.test_faults import planted_in_the_layout

VERIFIED, BEFORE = "layout verified in", "layout verified before, not verified again"


def losses(folder: Path) -> list[float]:
    return [json.loads(line)["lm_loss"] for line in (folder / "run" / "metrics.jsonl").read_text().splitlines()]


@pytest.mark.parametrize(
    ("ranks", "layout"),
    [
        (1, ["model.context_parallel_size=1"]),
        (2, []),
        pytest.param(4, ["model.num_moe_experts=4", "model.expert_model_parallel_size=2"], marks=pytest.mark.slow),
        pytest.param(
            4, ["model.tensor_model_parallel_size=2", "dist.use_decentralized_pg=true"], marks=pytest.mark.slow
        ),
    ],
)
def test_a_layout_is_verified_once(cli: Any, tmp_path: Path, ranks: int, layout: list[str]) -> None:
    layout = [*layout, "scheduler.lr_decay_iters=3", "scheduler.lr_warmup_iters=1"]
    code, text = cli("--verify", "train.train_iters=2", *layout, ranks=ranks)
    assert code == 0 and text.count(VERIFIED) == 1 and BEFORE not in text, text
    assert text.count("DATA_PARALLEL_GROUP [[") == 1, "the small runs log nothing"
    code, text = cli("--verify", "train.train_iters=3", *layout, ranks=ranks)
    assert code == 0 and text.count(BEFORE) == 1 and VERIFIED not in text and "resumed from" in text, text
    verified = losses(tmp_path)
    code, text = cli("train.train_iters=2", f"checkpoint.save={tmp_path}/other/run", *layout, ranks=ranks)
    assert code == 0 and losses(tmp_path / "other") == verified[:2], "a run is the same after a verification"


def plant() -> None:
    """Plant a fault for the rest of this rank's life."""
    PLANTED.enter_context(planted_in_the_layout("late_positions", {}))


PLANTED = ExitStack()


def test_a_wrong_layout_ends_the_run_with_one_message(cli: Any, tmp_path: Path) -> None:
    code, text = cli("--verify", before=plant)
    assert code == 1 and text.count("megatron-cp: ") == 1, text
    assert "layout=2 ranks (tp 1, cp 2 p2p, pp 1, ep 1, dp 1): results differ from a single rank" in text, text
    assert "the first forward pass differs in" in text and "Fix: replace 'train --verify' by 'verify'" in text
    assert not list((tmp_path / "run").glob("*.json*")), "nothing is trained, nothing remembered"


def global_state() -> dict[str, Any]:
    return {name: value for name, value in vars(parallel_state).items() if name.isupper()}


def left_behind(folder: str, layout: list[str]) -> tuple[list[str], int]:
    """Return what a verification leaves behind.

    The changed names of megatron-core's global state, and how many process groups there are more.
    """
    config = load_recipe(TINY[2], [*TINY[3:], f"checkpoint.save={folder}", *layout])
    before, groups = global_state(), len(dist.distributed_c10d._world.pg_map)
    run.verify_once(config)
    changed = [name for name, value in global_state().items() if value != before[name]]
    return changed, len(dist.distributed_c10d._world.pg_map) - groups


@pytest.mark.parametrize("layout", [[], ["model.tensor_model_parallel_size=2", "model.context_parallel_size=1"]])
def test_no_group_is_left_behind(tmp_path: Path, layout: list[str]) -> None:
    assert run_ranks(left_behind, 2, str(tmp_path), layout) == [([], 0)] * 2


def keys(variants: list[list[str]]) -> list[str]:
    configs = [load_recipe(TINY[2], [*TINY[3:], *more]) for more in variants]
    return [run._key(comparable([config], 4, 2)[0]) for config in configs]


def test_verified_layouts_are_recorded(monkeypatch: pytest.MonkeyPatch) -> None:
    """Only what influences the verified run may verify again.

    Layouts, code, versions and variables do.
    """
    same = [[], ["train.train_iters=9", "optimizer.lr=1e-2", "checkpoint.save=elsewhere", "logger.log_interval=7"]]
    other = [["model.cp_comm_type=a2a"], ["ddp.overlap_grad_reduce=true"], ["model.num_attention_heads=16"]]
    (found,) = run_ranks(keys, 1, [*same, *other])
    assert found[0] == found[1] and len(set(found)) == 1 + len(other)
    for module, name, value in (
        (consistency, "_code_digest", lambda: "other code"),
        (consistency, "installed_version", lambda name: "9.9"),
        (Environment, "detect", lambda: Environment(device="gpu")),
        (Environment, "detect", lambda: Environment(variables={"NVTE_FLASH_ATTN": "0"})),
    ):
        with monkeypatch.context() as patch:
            patch.setattr(module, name, value)
            assert run_ranks(keys, 1, [[]])[0][0] != found[0], name


@pytest.mark.parametrize("content", [None, "", "{", "[]", '{"key": 3}', '{"key": {}}'])
def test_an_unreadable_record_counts_as_empty(tmp_path: Path, content: str | None) -> None:
    file = tmp_path / run.FILE
    if content is not None:
        file.write_text(content)
    assert run._read(file) == {}
