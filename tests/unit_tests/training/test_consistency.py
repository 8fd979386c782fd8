"""Fingerprints: those of equal runs are equal, and a difference is named.

Ranks that were started differently all end at once, with the same message.
"""

import copy
import dataclasses
import os
import shutil
import time
from pathlib import Path
from typing import Any

import pytest

from megatron_cp.config.recipes import load_recipe
from megatron_cp.rules import Environment
from megatron_cp.training import consistency
from megatron_cp.training.consistency import differences, digest, fingerprint


def test_equal_runs_have_equal_digests() -> None:
    config, environment = load_recipe("llama_tiny_pretrain_config"), Environment.detect()
    first, second = (fingerprint(dataclasses.asdict(each), environment) for each in (config, copy.deepcopy(config)))
    assert digest(first) == digest(second) and len(digest(first)) == 64
    assert differences([first, second, first]) == []
    assert first["model.context_parallel_size"] == "4" and first["version of torch"] != "None"


def test_a_difference_names_ranks_and_fields() -> None:
    config, other = load_recipe("llama_tiny_pretrain_config"), load_recipe("llama_tiny_pretrain_config", ["rng.seed=7"])
    other.env_vars["NCCL_ALGO"] = "Tree"
    environment = Environment(variables={"NVTE_FLASH_ATTN": "0"})
    ranks = [fingerprint(dataclasses.asdict(config), environment) for _ in range(6)]
    ranks[3] = fingerprint(dataclasses.asdict(other), dataclasses.replace(environment, variables={}))
    ranks[5] = fingerprint(dataclasses.asdict(load_recipe("llama_tiny_pretrain_config", ["rng.seed=8"])), environment)
    assert len({digest(entries) for entries in ranks}) == 3
    found = {v.field: v.message for v in differences(ranks)}
    assert found["rng.seed"] == "differs between ranks: 1234 on ranks 0-2, 4; 7 on rank 3; 8 on rank 5"
    assert found["variable NVTE_FLASH_ATTN"] == "differs between ranks: 0 on ranks 0-2, 4-5; not set on rank 3"
    assert found["env_vars.NCCL_ALGO"] == "differs between ranks: not set on ranks 0-2, 4-5; 'Tree' on rank 3"


def test_other_code_is_detected(monkeypatch: Any) -> None:
    config, environment = load_recipe("llama_tiny_pretrain_config"), Environment()
    first = fingerprint(dataclasses.asdict(config), environment)
    monkeypatch.setattr("megatron_cp.training.consistency._code_digest", lambda: "0123")
    assert [v.field for v in differences([first, fingerprint(dataclasses.asdict(config), environment)])] == ["code"]


def test_descriptions_of_nodes_may_differ() -> None:
    config = load_recipe("llama_tiny_pretrain_config")
    nodes = [Environment(variables={"NCCL_SOCKET_IFNAME": name}) for name in ("eth0", "eth1")]
    assert differences([fingerprint(dataclasses.asdict(config), node) for node in nodes]) == []


def test_a_fingerprint_is_cheap() -> None:
    config, environment = load_recipe("llama_tiny_pretrain_config"), Environment()
    seconds = []
    for _ in range(3):
        start = time.process_time()
        digest(fingerprint(dataclasses.asdict(config), environment))
        seconds.append(time.process_time() - start)
    assert min(seconds) < 0.1


def test_another_setting_on_one_rank(cli: Any, monkeypatch: Any) -> None:
    code, text = cli(before=other_arguments)
    assert code == 1 and text.count("ranks differ in settings, code or environment; training not started") == 1, text
    assert "variable NVTE_FLASH_ATTN=" not in text and "rng.seed" not in text
    assert "error K20: variable NVTE_FUSED_ATTN: differs between ranks: not set on rank 0; 0 on rank 1" in text, text


def other_arguments() -> None:
    if os.environ["RANK"] == "1":
        os.environ["NVTE_FUSED_ATTN"] = "0"


def test_other_code_on_one_rank(cli: Any) -> None:
    code, text = cli(before=other_code)
    assert code == 1 and "error K20: code: differs between ranks" in text, text


def other_code() -> None:
    if os.environ["RANK"] == "1":
        consistency._code_digest = lambda: "another"


def test_another_configuration_on_one_rank(cli: Any) -> None:
    code, text = cli(before=other_configuration)
    assert code == 1 and "error K20: rng.seed: differs between ranks: 1234 on rank 0; 7 on rank 1" in text, text


def other_configuration() -> None:
    from megatron_cp.config import flags as command_line

    if os.environ["RANK"] == "1":
        original = command_line.load_recipe

        def load_recipe(*args: Any, **kwargs: Any) -> Any:
            config = original(*args, **kwargs)
            config.rng.seed = 7
            return config

        command_line.load_recipe = load_recipe


def test_another_checkpoint_on_one_rank(cli: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A node may have a folder of its own, or see late what another wrote."""
    monkeypatch.chdir(tmp_path)
    assert cli("train.train_iters=2", "checkpoint.save_interval=1")[0] == 0
    for folder in ("here/begun", "there/begun"):
        shutil.copytree("run", folder)
    shutil.rmtree("there/begun/iter_0000002")
    Path("there/begun/latest_checkpointed_iteration.txt").write_text("1")
    code, text = cli(
        "checkpoint.load=begun", "checkpoint.save=../new", "train.train_iters=2", "checkpoint.save_interval=1",
        before=lambda: os.chdir("there" if os.environ["RANK"] == "1" else "here"),
    )  # fmt: skip
    assert (
        code == 1 and "iteration 2 of begun on rank 0; iteration 1 of begun on rank 1. Fix: set checkpoint.save" in text
    )
    assert not (tmp_path / "new" / "metrics.jsonl").exists()


def test_equal_ranks_pass_with_one_small_exchange(cli: Any) -> None:
    code, text = cli()
    assert code == 0 and "ranks differ in" not in text, text
