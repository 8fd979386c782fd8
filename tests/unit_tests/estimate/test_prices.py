"""The cost model of dynamic CP equals the time model.

They are equal for every model, length of sample and size of group.
"""

from __future__ import annotations

from typing import Any

import pytest

from megatron_cp.config.recipes import load_recipe
from megatron_cp.config.run_config import ModelConfig, RunConfig
from megatron_cp.dynamic_cp import PRESETS, CostModel
from megatron_cp.estimate.cost_presets import cost_preset
from megatron_cp.estimate.device import Device, load_device
from megatron_cp.estimate.job import Job
from megatron_cp.estimate.prices import prices
from megatron_cp.estimate.time import microbatch_seconds
from megatron_cp.parallel.layout import layout_of
from megatron_cp.rules.environment import Environment
from megatron_cp.rules.job import job_of
from megatron_cp.rules.remedies import Case

LONGEST = 131072
LLAMA: dict[str, Any] = {"num_layers": 32, "hidden_size": 4096, "ffn_hidden_size": 14336, "num_query_groups": 8}
LATENT: dict[str, Any] = {
    "multi_latent_attention": True,
    "num_layers": 60,
    "hidden_size": 5120,
    "num_attention_heads": 128,
    "q_lora_rank": 1536,
    "kv_lora_rank": 512,
}
HYBRID: dict[str, Any] = LLAMA | {
    "architecture": "hybrid",
    "hybrid_layer_pattern": "M-M-M-M*-M-M-" * 4,
    "num_layers": 52,
}
# Experts are three quarters of its layers' operations.
HYBRID_EXPERTS = HYBRID | {
    "hybrid_layer_pattern": "MEMEMEM*EMEME" * 4,
    "num_moe_experts": 64,
    "moe_router_topk": 6,
    "moe_ffn_hidden_size": 1856,
    "moe_shared_expert_intermediate_size": 3712,
}
H100, CPU = load_device("h100"), load_device("cpu")


def job_and_cost(shape: dict[str, Any], device: Device = H100, ranks: int = 1) -> tuple[Job, CostModel]:
    """Return a packed microbatch on ``ranks`` ranks, and the cost model.

    The cost model holds for any number of ranks.
    """
    config = RunConfig()
    config.dataset.seq_length = LONGEST
    sizes = {"num_attention_heads": 32, "vocab_size": 128256, "context_parallel_size": ranks}
    config.model = ModelConfig(**(sizes | shape))
    model = config.finalize().model
    tp = model.tensor_model_parallel_size
    job = Job(model, config.optimizer, config.ddp, layout_of(model, config.dist, tp * ranks), 1, 1, 128256)
    return job, prices(job, LONGEST, device)


def seconds(job: Job, lengths: tuple[int, ...], device: Device = H100) -> float:
    return microbatch_seconds(Job(**vars(job) | {"lengths": lengths}), device)[0]


@pytest.mark.parametrize("length", [2048, 16384, LONGEST])
@pytest.mark.parametrize(
    "shape",
    [
        pytest.param(LLAMA, id="8B"),
        pytest.param(LLAMA | {"tensor_model_parallel_size": 4, "sequence_parallel": True}, id="8B, tp 4"),
        pytest.param(LLAMA | {"recompute_granularity": "full"}, id="recomputed"),
        pytest.param(HYBRID, id="hybrid"),
        pytest.param(HYBRID_EXPERTS, id="hybrid with experts"),
        pytest.param(LATENT, id="latent"),
        pytest.param(LLAMA | {"num_layers": 2, "mtp_num_layers": 2}, id="multi-token prediction"),
        pytest.param(LLAMA | {"attention_mask_type": "no_mask"}, id="bidirectional"),
    ],
)
def test_packs_cost_what_the_time_model_estimates(shape: dict[str, Any], length: int) -> None:
    job, cost = job_and_cost(shape)
    pack = (length,) * (LONGEST // length)
    assert cost.seconds(pack, 1) == pytest.approx(seconds(job, pack), rel=0.03)


@pytest.mark.parametrize("length", [1024, 4096, 16384, LONGEST // 2, LONGEST])
@pytest.mark.parametrize(
    ("window", "error"),
    [
        ({"window_size": [512, 0]}, 0.04),
        ({"window_size": [1024, 0], "window_attn_skip_freq": 6}, 0.05),
        ({"window_size": [4096, 0]}, 0.2),
        ({"window_size": [LONGEST // 8, 0]}, 0.33),
        ({"window_size": [LONGEST // 2, 0]}, 0.2),
        ({"window_size": [LONGEST, 0]}, 0.01),
    ],
)
def test_costs_with_windows_are_near_the_time_model(window: dict[str, Any], error: float, length: int) -> None:
    """A quadratic and a linear term must come within a third of the time model.

    The worst case is a window of an eighth.
    """
    job, cost = job_and_cost(LLAMA | window)
    pack = (length,) * (LONGEST // length)
    assert cost.seconds(pack, 1) == pytest.approx(seconds(job, pack), rel=error)


@pytest.mark.parametrize("ranks", [2, 8, 16])
@pytest.mark.parametrize("transport", ["p2p", "a2a", "all_gather"])
@pytest.mark.parametrize("length", [2048, LONGEST])
def test_groups_cost_what_the_time_model_estimates(length: int, transport: str, ranks: int) -> None:
    job, cost = job_and_cost(LLAMA | {"cp_comm_type": transport}, ranks=ranks)
    pack = (length,) * (LONGEST // length)
    assert cost.seconds(pack, ranks) == pytest.approx(seconds(job, pack), rel=0.15)
    assert cost.transport == ("a2a" if transport == "a2a" else "p2p")


def test_only_layers_with_attention_move_keys_and_latent_attention_those_of_every_head() -> None:
    dense, latent = (job_and_cost(shape, CPU)[1] for shape in (LLAMA, LATENT))
    fewer = job_and_cost(LLAMA | {"num_layers": 4}, CPU)[1]
    hybrid = job_and_cost(HYBRID | {"hybrid_layer_pattern": "*---" * 4, "num_layers": 16}, CPU)[1]
    for name in ("kv_intra", "kv_inter", "ring_step", "per_sample"):
        assert getattr(fewer, name) == pytest.approx(getattr(dense, name) * 4 / 32)
        assert getattr(hybrid, name) == pytest.approx(getattr(dense, name) * 4 / 32)
    bytes_per_token = 3 * 2 * 60 * 128 * (128 + 64 + 128)  # three times in bfloat16, keys of 192 and values of 128
    assert latent.kv_intra == pytest.approx(bytes_per_token / CPU.intra_bandwidth)


def test_a_window_of_one_key_costs_nothing_that_grows() -> None:
    """No cost may grow with the length: a token sees itself alone.

    Up to rounding. No cost may be negative either.
    """
    config = load_recipe("llama_tiny_dynamic_cp_pretrain_config", ["model.window_size=[0,0]"])
    for longest in range(32, 257, 32):
        for config.model.ffn_hidden_size in range(32, 129, 16):
            job = job_of(Case(config, 4, None, Environment()))
            assert job is not None
            cost = prices(job, longest, CPU)
            assert cost.quadratic < 1e-9 * cost.linear


def test_published_costs_are_near_those_of_the_time_model() -> None:
    """The costs must be within a third, except for the launch.

    They are of other software, on other clusters.
    """
    derived, published = job_and_cost(LLAMA)[1], PRESETS["h100_8b"]
    for name in ("quadratic", "linear", "kv_intra", "kv_inter", "ring_step"):
        assert getattr(derived, name) == pytest.approx(getattr(published, name), rel=0.35), name


def test_tensor_parallelism_takes_the_node() -> None:
    assert cost_preset("h200_70b_tp8").ranks_per_node == 1
    assert cost_preset("h200_8b").ranks_per_node == 8
