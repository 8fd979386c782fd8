"""Which ranks must run equally many microbatches, and what a model's microbatches cost before anything was measured."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from megatron_cp.config.recipes import load_recipe
from megatron_cp.config.run_config import ModelConfig, RunConfig
from megatron_cp.dynamic_cp.cost import DEVICES, CostModel
from megatron_cp.estimate.flops import training_flops
from megatron_cp.parallel.layout import RankLayout
from megatron_cp.training.packed.scheduling import keeps_step, model_cost, sync_ranks, what_keeps_step


@pytest.mark.parametrize(
    ("tp", "pp", "ep", "etp", "in_step", "neighbours"),
    [
        (1, 1, 1, 1, False, 1),
        (2, 1, 1, 2, False, 1),
        (2, 1, 1, 1, False, 1),
        (1, 2, 1, 1, True, 1),
        (1, 1, 4, 1, True, 4),
        (2, 1, 4, 1, True, 2),
        (1, 1, 1, 2, True, 2),  # an expert's parts lie on two data-parallel ranks
        (1, 1, 2, 2, True, 4),
    ],
)
def test_ranks_that_share_experts_keep_step(
    tp: int, pp: int, ep: int, etp: int, in_step: bool, neighbours: int
) -> None:
    model = ModelConfig(
        tensor_model_parallel_size=tp,
        pipeline_model_parallel_size=pp,
        expert_model_parallel_size=ep,
        expert_tensor_parallel_size=etp,
        num_moe_experts=4,
    )
    assert keeps_step(model) == in_step
    assert sync_ranks(RankLayout(8 * tp * pp, tp=tp, pp=pp, ep=ep, etp=etp)) == neighbours


@pytest.mark.parametrize(("group", "multiple"), [(None, 2), (4, 4)])
def test_what_the_scheduler_is_told(group: int | None, multiple: int) -> None:
    model = ModelConfig(
        pipeline_model_parallel_size=2,
        virtual_pipeline_model_parallel_size=2,
        microbatch_group_size_per_vp_stage=group,
        expert_model_parallel_size=2,
    )
    found = what_keeps_step(model, RankLayout(8, pp=2, ep=2))
    assert found == {"microbatch_multiple": multiple, "sync_ranks": 2, "pipeline_size": 2}


LONGEST = 131072
LLAMA: dict[str, Any] = {"num_layers": 32, "hidden_size": 4096, "ffn_hidden_size": 14336, "num_query_groups": 8}
LATENT: dict[str, Any] = {
    "multi_latent_attention": True,
    "num_layers": 60,
    "hidden_size": 5120,
    "num_attention_heads": 128,
    "q_lora_rank": 1536,
    "kv_lora_rank": 512,
    "context_parallel_size": 2,
}
HYBRID: dict[str, Any] = LLAMA | {
    "architecture": "hybrid",
    "hybrid_layer_pattern": "M-M-M-M*-M-M-" * 4,
    "num_layers": 52,
}
# Three parts of four of its layers' operations are those of experts.
HYBRID_EXPERTS = HYBRID | {
    "hybrid_layer_pattern": "MEMEMEM*EMEME" * 4,
    "num_moe_experts": 64,
    "moe_router_topk": 6,
    "moe_ffn_hidden_size": 1856,
    "moe_shared_expert_intermediate_size": 3712,
}


def cost_and_work(length: int, **shape: Any) -> tuple[CostModel, float, float]:
    """The cost model, and the seconds of attention and of the rest that a sample's counted operations take."""
    config = RunConfig()
    config.dataset.seq_length = LONGEST
    config.model = ModelConfig(**({"num_attention_heads": 32, "vocab_size": 128256} | shape))
    model, device = config.finalize().model, DEVICES["cpu"]
    one, two = (training_flops(model, 128256, [tokens]) for tokens in (1, 2))
    pair = two - 2 * one if model.attention_mask_type == "causal" else (two - 2 * one) / 2
    attention = training_flops(model, 128256, [length]) - length * (one - pair)
    # Operations count a backward pass as two forward ones; a kernel of attention computes the scores once more.
    cost = model_cost(model, LONGEST)
    return cost, attention * 3.5 / 3 / device.attention_flops, length * (one - pair) / device.matmul_flops


@pytest.fixture
def no_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)


@pytest.mark.parametrize("length", [2048, 16384, LONGEST])
@pytest.mark.parametrize(
    "shape",
    [
        pytest.param(LLAMA, id="8B"),
        pytest.param(HYBRID, id="hybrid"),
        pytest.param(HYBRID_EXPERTS, id="hybrid with experts"),
        pytest.param(LATENT, id="latent"),
        pytest.param(LLAMA | {"num_layers": 2, "mtp_num_layers": 2}, id="multi-token prediction"),
        pytest.param(LLAMA | {"attention_mask_type": "no_mask"}, id="bidirectional"),
    ],
)
def test_costs_are_the_operations_counted(no_gpu: None, shape: dict[str, Any], length: int) -> None:
    cost, attention, rest = cost_and_work(length, **shape)
    assert cost.quadratic * length**2 == pytest.approx(attention, rel=0.01)
    assert cost.linear * length == pytest.approx(rest, rel=0.01)


@pytest.mark.parametrize("length", [1024, 4096, 16384, LONGEST // 2, LONGEST])
@pytest.mark.parametrize(
    ("window", "error"),
    [
        ({"window_size": [512, 0]}, 0.03),
        ({"window_size": [1024, 0], "window_attn_skip_freq": 6}, 0.05),
        ({"window_size": [4096, 0]}, 0.2),
        ({"window_size": [LONGEST // 8, 0]}, 0.33),
        ({"window_size": [LONGEST // 2, 0]}, 0.2),
        ({"window_size": [LONGEST, 0]}, 0.01),
    ],
)
def test_costs_with_windows_are_near_the_operations_counted(
    no_gpu: None, window: dict[str, Any], error: float, length: int
) -> None:
    """As near as a quadratic and a linear term come: within a third at the worst, a window of an eighth."""
    cost, attention, rest = cost_and_work(length, **LLAMA | window)
    assert cost.quadratic * length**2 + cost.linear * length == pytest.approx(attention + rest, rel=error)


def test_only_layers_with_attention_move_keys_and_latent_attention_those_of_every_head(no_gpu: None) -> None:
    dense, hybrid, latent = (cost_and_work(2048, **shape)[0] for shape in (LLAMA, HYBRID, LATENT))
    for name in ("kv_intra", "kv_inter", "ring_step", "per_sample"):
        assert getattr(hybrid, name) == pytest.approx(getattr(dense, name) * 4 / 32)
    bytes_per_token = 3 * 2 * 60 * 128 * (128 + 64 + 128)  # three times in bfloat16, keys of 192 and values of 128
    assert latent.kv_intra == pytest.approx(bytes_per_token / DEVICES["cpu"].intra_bytes)


def test_a_window_of_one_key_costs_nothing_that_grows() -> None:
    """A token sees itself, whatever the length: what grows is zero, give or take rounding, and no cost is negative."""
    config = load_recipe("llama_tiny_dynamic_cp_pretrain_config", ["model.window_size=[0,0]"])
    for config.dataset.seq_length in range(32, 257, 32):
        for config.model.ffn_hidden_size in range(32, 129, 16):
            cost = model_cost(config.model, config.dataset.seq_length)
            assert cost.quadratic < 1e-9 * cost.linear
