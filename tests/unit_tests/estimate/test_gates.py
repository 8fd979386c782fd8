"""What gated activations keep in Transformer Engine's layers, by the memory model."""

from typing import Any

import pytest

from megatron_cp.config.run_config import ModelConfig
from megatron_cp.estimate.memory import te_layers

WIDTH, BYTES = 512, 2


def kept(experts: bool, **settings: Any) -> float:
    """Return the bytes a token that an MLP, or a layer of experts, keeps."""
    more = {"num_moe_experts": 8, "moe_router_topk": 2, "moe_ffn_hidden_size": WIDTH} if experts else {}
    model = ModelConfig(num_layers=2, hidden_size=256, num_attention_heads=4, ffn_hidden_size=WIDTH, **more, **settings)
    steps = te_layers.experts_steps(model, BYTES, 1.0) if experts else te_layers.mlp_steps(model, BYTES)
    return sum({key: size for step in steps for key, size in step.keeps.items()}.values())


@pytest.mark.parametrize(("experts", "tensors"), [(False, 2), (True, 3 * 2)], ids=["dense", "two experts a token"])
def test_a_gate_without_a_fused_function_keeps_more(experts: bool, tensors: int) -> None:
    """Two tensors, and of experts a third: the activation without its weight."""
    swiglu = kept(experts)
    assert kept(experts, activation_func="gelu") - swiglu == tensors * WIDTH * BYTES
    assert kept(experts, glu_linear_offset=1.0) - swiglu == tensors * WIDTH * BYTES
