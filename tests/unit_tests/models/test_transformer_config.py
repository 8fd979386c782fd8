"""megatron-core's configuration as on a GPU, checked without one."""

from __future__ import annotations

from typing import Any, get_args, get_type_hints

import pytest
import torch
import torch.nn.functional as F
from megatron.core.transformer.transformer_config import TransformerConfig

from megatron_cp.config.run_config import ModelConfig, RunConfig
from megatron_cp.models import transformer_config as module
from megatron_cp.models.build import uses_te_layers
from megatron_cp.models.layers.mlp.gated_silu import gated_silu
from megatron_cp.models.transformer_config import transformer_config as of_sections
from megatron_cp.planner.scheduling import model_cost
from megatron_cp.rules.environment import Environment
from megatron_cp.rules.remedies import Case
from tests.training_runs import tiny_config

ACTIVATIONS = get_args(get_type_hints(ModelConfig)["activation_func"])


def transformer_config(config: RunConfig) -> TransformerConfig:
    return of_sections(config.model, config.mixed_precision)


@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize("gated", [False, True])
@pytest.mark.parametrize("function", ACTIVATIONS)
def test_only_swiglu_is_fused(function: str, gated: bool, bias: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """megatron-core's other fused functions refuse some of these settings.

    They approximate gelu where a CPU does not.
    """
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    model = {"activation_func": function, "gated_linear_unit": gated, "add_bias_linear": bias}
    config: Any = transformer_config(tiny_config(**{f"model__{name}": value for name, value in model.items()}))
    assert config.bias_activation_fusion == (function == "silu" and gated)
    assert config.bias_dropout_fusion == bias  # without one it is an addition
    assert config.activation_func is {"silu": F.silu, "gelu": F.gelu}.get(function, config.activation_func)


def test_activations_match_their_names() -> None:
    x = torch.linspace(-4, 4, 33, dtype=torch.float64)
    formulas = {
        "silu": x * torch.sigmoid(x),
        "gelu": x * (1 + torch.erf(x / 2**0.5)) / 2,
        "relu": x.clamp(min=0),
        "squared_relu": x.clamp(min=0) ** 2,
        "quick_gelu": x * torch.sigmoid(1.702 * x),
        "fast_gelu": x * (1 + torch.tanh((2 / torch.pi) ** 0.5 * (x + 0.044715 * x**3))) / 2,
    }
    assert formulas.keys() == set(ACTIVATIONS)
    for name, expected in formulas.items():
        config: Any = transformer_config(tiny_config(model__activation_func=name, model__gated_linear_unit=False))
        torch.testing.assert_close(config.activation_func(x), expected)


@pytest.mark.parametrize(("on_gpu", "te_layers"), [(False, False), (True, False), (False, True)])
def test_swiglu_is_one_function_where_no_kernel_is(
    monkeypatch: pytest.MonkeyPatch, on_gpu: bool, te_layers: bool
) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: on_gpu)
    monkeypatch.setattr("megatron_cp.models.transformer_config.use_te_layers", lambda *given: te_layers)
    config: Any = transformer_config(tiny_config(model__apply_rope_fusion=False))
    own = not (on_gpu or te_layers)
    assert (config.activation_func is gated_silu, config.use_te_activation_func) == (own, own)


def test_the_device_of_weight_initialization(monkeypatch: pytest.MonkeyPatch) -> None:
    for on_gpu, wanted, on_cpu in ((True, False, False), (True, True, True), (False, False, True)):
        monkeypatch.setattr(torch.cuda, "is_available", lambda: on_gpu)  # noqa: B023 - called at once
        config: Any = transformer_config(tiny_config(model__use_cpu_initialization=wanted))
        assert config.use_cpu_initialization == on_cpu


def test_the_experts_of_a_model_without_any_do_not_matter() -> None:
    """megatron-core asks for pre-softmax if one expert is chosen, router or not."""
    assert transformer_config(tiny_config(model__moe_router_topk=1)).num_moe_experts is None
    experts: dict[str, Any] = {"model__num_moe_experts": 4, "model__moe_router_topk": 1}
    with pytest.raises(ValueError, match="Please use --moe-router-pre-softmax when topk is 1"):
        transformer_config(tiny_config(**experts))
    config = transformer_config(tiny_config(**experts, model__moe_router_pre_softmax=True))
    assert (config.moe_router_topk, config.moe_router_pre_softmax) == (1, True)


def test_latent_attention_has_keys_for_every_head() -> None:
    """Upstream passes ``num_query_groups``, which is not the number of key heads."""
    assert transformer_config(tiny_config(model__num_query_groups=2)).num_query_groups == 2
    latent: dict[str, Any] = {"model__num_query_groups": 2, "model__multi_latent_attention": True}
    assert transformer_config(tiny_config(**latent)).num_query_groups == 8
    every = latent | {"model__num_query_groups": 8}
    first, second = (model_cost(Case(tiny_config(**each), 1, None, Environment())) for each in (latent, every))
    assert first == second


@pytest.mark.parametrize("theirs", [True, False])
def test_the_choice_of_layers_is_passed_down(theirs: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """megatron-core's own default is Transformer Engine, installed or not."""
    monkeypatch.setattr(module, "use_te_layers", lambda *_: theirs)
    assert uses_te_layers(transformer_config(tiny_config(model__apply_rope_fusion=False))) is theirs
