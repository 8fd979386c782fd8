"""SwiGLU in one function: equal to the bit, and fewer tensors kept."""

import pytest
import torch
import torch.nn.functional as F

from megatron_cp.config.run_config import ModelConfig
from megatron_cp.models.fusions import fuses_gate
from megatron_cp.models.layers.mlp.gated_silu import gated_silu


def plain(x: torch.Tensor) -> torch.Tensor:
    gate, up = x.chunk(2, -1)
    return F.silu(gate) * (up + 0.0)


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("shape", [(5, 2, 14), (3, 130), (0, 8)])
def test_values_and_gradients_are_those_of_the_plain_operations(dtype: torch.dtype, shape: tuple[int, ...]) -> None:
    torch.manual_seed(0)
    x, weights = torch.randn(shape).to(dtype), torch.randn(*shape[:-1], shape[-1] // 2).to(dtype)
    found = []
    for function in (plain, gated_silu):
        inputs = x.clone().requires_grad_()
        output = function(inputs)
        output.backward(weights)
        found.append((output.detach(), inputs.grad))
    for expected, got in zip(*found, strict=True):
        assert torch.equal(expected, got)


def test_only_the_input_is_kept() -> None:
    x, kept = torch.randn(3, 8, requires_grad=True), []
    with torch.autograd.graph.saved_tensors_hooks(lambda each: kept.append(each) or each, lambda each: each):
        gated_silu(x)
    assert [each is x for each in kept] == [True]


def test_other_activations_are_upstreams() -> None:
    assert fuses_gate(ModelConfig())
    for other in (dict(gated_linear_unit=False), dict(activation_func="gelu"), dict(glu_linear_offset=1.0)):
        assert not fuses_gate(ModelConfig(**other))
    assert not fuses_gate(ModelConfig(activation_func="quick_gelu", activation_func_clamp_value=7.0))
