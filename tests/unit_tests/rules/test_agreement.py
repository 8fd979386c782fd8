"""Fingerprints: equal runs agree, and a difference is named."""

import copy
import dataclasses
import time

from megatron_cp.recipes import load_recipe
from megatron_cp.rules import Environment
from megatron_cp.rules.agreement import differences, digest, fingerprint


def test_equal_runs_have_equal_digests():
    config, environment = load_recipe("llama_tiny_pretrain_config"), Environment.detect()
    first, second = fingerprint(config, environment), fingerprint(copy.deepcopy(config), environment)
    assert digest(first) == digest(second) and len(digest(first)) == 64
    assert differences([first, second, first]) == []
    assert first["model.context_parallel_size"] == "4" and first["version of torch"] != "None"


def test_a_difference_names_ranks_and_fields():
    config, other = load_recipe("llama_tiny_pretrain_config"), load_recipe("llama_tiny_pretrain_config", ["rng.seed=7"])
    other.env_vars["NCCL_ALGO"] = "Tree"
    environment = Environment(variables={"NVTE_FLASH_ATTN": "0"})
    ranks = [fingerprint(config, environment) for _ in range(6)]
    ranks[3] = fingerprint(other, dataclasses.replace(environment, variables={}))
    ranks[5] = fingerprint(load_recipe("llama_tiny_pretrain_config", ["rng.seed=8"]), environment)
    assert len({digest(entries) for entries in ranks}) == 3
    found = {v.field: v.message for v in differences(ranks)}
    assert found["rng.seed"] == "differs between ranks: 1234 on ranks 0-2, 4; 7 on rank 3; 8 on rank 5"
    assert found["variable NVTE_FLASH_ATTN"] == "differs between ranks: 0 on ranks 0-2, 4-5; not set on rank 3"
    assert found["env_vars.NCCL_ALGO"] == "differs between ranks: not set on ranks 0-2, 4-5; 'Tree' on rank 3"


def test_other_code_is_found_out(monkeypatch):
    config, environment = load_recipe("llama_tiny_pretrain_config"), Environment()
    first = fingerprint(config, environment)
    monkeypatch.setattr("megatron_cp.rules.agreement._code_digest", lambda: "0123")
    assert [v.field for v in differences([first, fingerprint(config, environment)])] == ["code"]


def test_what_describes_a_node_may_differ():
    config = load_recipe("llama_tiny_pretrain_config")
    nodes = [Environment(variables={"NCCL_SOCKET_IFNAME": name}) for name in ("eth0", "eth1")]
    assert differences([fingerprint(config, node) for node in nodes]) == []


def test_a_fingerprint_is_cheap():
    config, environment = load_recipe("llama_tiny_pretrain_config"), Environment()
    seconds = []
    for _ in range(3):
        start = time.process_time()
        digest(fingerprint(config, environment))
        seconds.append(time.process_time() - start)
    assert min(seconds) < 0.1
