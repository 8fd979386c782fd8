"""Features of megatron-core's GPT model that its hybrid model lacks."""

import re
from typing import Any
from unittest import mock

import pytest
import torch
from megatron.core.models.common.embeddings.rope_utils import apply_rotary_pos_emb

from megatron_cp.training.step import train_step
from tests.ranks import run_ranks
from tests.training_runs import start, tiny_config, train_losses
from tests.unit_tests.models.hybrids import FURTHER, HYBRID
from tests.unit_tests.training.layouts.cases import SP, TP2

DROPOUT = {"model__hidden_dropout": 0.3}
FULL = {"model__recompute_granularity": "full", "model__recompute_method": "uniform", "model__recompute_num_layers": 1}
MODELS: dict[str, dict[str, Any]] = {"gpt": {}, "hybrid": HYBRID}


def rotated(overrides: dict[str, Any]) -> tuple[torch.Tensor, torch.Tensor]:
    """Return a query and a key as the model rotates them at 16 positions.

    In float64.
    """
    config = tiny_config(**overrides)
    run, _ = start(config)
    angles = run.model[0].module.rotary_pos_emb(16).double()
    pair = torch.randn(2, config.model.kv_channels, dtype=torch.float64).expand(16, 1, 2, -1).contiguous()
    both = apply_rotary_pos_emb(pair, angles, config=run.core_config, cp_group=run.groups.cp)
    run.close()
    return both[:, 0, 0], both[:, 0, 1]


@pytest.mark.parametrize("interleaved", [False, True])
@pytest.mark.parametrize("model", MODELS)
def test_rotary_embeddings_rotate(model: str, interleaved: bool) -> None:
    overrides = MODELS[model] | {"model__rotary_interleaved": interleaved}
    query, key = run_ranks(rotated, 1, overrides)[0]
    torch.testing.assert_close(query.norm(dim=-1), query[0].norm().expand(16), rtol=1e-6, atol=1e-6)
    scores = query @ key.T
    torch.testing.assert_close(scores[1:, 1:], scores[:-1, :-1], rtol=1e-5, atol=1e-5)  # distances alone
    assert (scores[0] - scores[0, 0]).abs().max() > 0.1


GPT = {"model__num_layers": 2, "model__mtp_num_layers": 2}
OF_HALVES = GPT | {"model__architecture": "hybrid", "model__num_layers": 4, "model__hybrid_layer_pattern": "*-*-/*-/*-"}
HALVES = {"input_layernorm": 0, "self_attention": 0, "pre_mlp_layernorm": 1, "mlp": 1}


def name_in_hybrid(name: str) -> str:
    """Rename a GPT model's parameter as in the hybrid model.

    The hybrid model has attention and MLP layers in turn.
    """
    half = re.compile(r"(?:layers\.(\d+)|mtp_model_layer)\.(" + "|".join(HALVES) + r")\b")

    def renamed(found: re.Match[str]) -> str:
        layer, part = found.groups()
        before = "layers." if layer else "mtp_model_layer.layers."
        return f"{before}{2 * int(layer or 0) + HALVES[part]}.{part}"

    return half.sub(renamed, name).replace("decoder.final_layernorm", "decoder.final_norm")


def first_step(overrides: dict[str, Any], weights: dict[str, torch.Tensor] | None) -> Any:
    """Return losses and gradient norm of a step, and its first weights.

    The step begins with ``weights``, if given.
    """
    run, batches = start(tiny_config(**overrides))
    parameters = dict(run.model[0].module.named_parameters())
    for name, weight in (weights or {}).items():
        parameters[name].data.copy_(weight)
    run.optimizer.reload_model_params()
    begun = {name: parameter.detach().clone() for name, parameter in parameters.items()}
    result = train_step(run, next(batches).microbatches)
    run.close()
    return torch.tensor([result.loss, *result.mtp_losses, result.grad_norm], dtype=torch.float64), begun


def test_a_hybrid_of_halves_predicts_further_tokens_as_a_gpt_does() -> None:
    ((of_gpt, weights),) = run_ranks(first_step, 1, GPT, None)
    renamed = {name_in_hybrid(name): weight for name, weight in weights.items()}
    ((of_hybrid, begun),) = run_ranks(first_step, 1, OF_HALVES, renamed)
    assert begun.keys() == renamed.keys() and len(of_gpt) == 4
    torch.testing.assert_close(of_hybrid, of_gpt, rtol=1e-6, atol=0)


def test_depths_of_a_hybrid_begin_with_weights_of_their_own() -> None:
    ((_, weights),) = run_ranks(first_step, 1, FURTHER, None)
    drawn = {name: weight for name, weight in weights.items() if weight.dim() > 1 and "layers" in name}
    assert sum("mtp" in name for name in drawn) == 2 * (1 + 2 + 3)  # joined states; attention; Mamba
    for name, weight in drawn.items():
        assert not any(weight.equal(other) for also, other in drawn.items() if also != name), name


def dropped(overrides: dict[str, Any]) -> list[list[bool]]:
    """Return what each dropout of this rank's first step drops."""
    masks, dropout = [], torch.nn.functional.dropout

    def seen(x: torch.Tensor, p: float = 0.5, training: bool = True, inplace: bool = False) -> torch.Tensor:
        kept = dropout(x, p, training, inplace)
        masks.append((kept == 0).flatten().tolist())
        return kept

    run, batches = start(tiny_config(**overrides))
    with mock.patch.object(torch.nn.functional, "dropout", seen):
        train_step(run, next(batches).microbatches)
    run.close()
    return masks


@pytest.mark.parametrize("model", MODELS)
def test_dropout_differs_between_ranks_that_hold_different_tokens_and_only_there(model: str) -> None:
    first, second = run_ranks(dropped, 2, MODELS[model] | TP2 | SP | DROPOUT)
    assert len(first) == len(second) > 4 and not any(a == b for a, b in zip(first, second, strict=True))
    first, second = run_ranks(dropped, 2, MODELS[model] | TP2 | DROPOUT)
    assert first == second


def test_a_recomputed_layer_repeats_its_dropout() -> None:
    overrides = HYBRID | TP2 | SP | DROPOUT
    assert run_ranks(train_losses, 2, overrides | FULL, 2) == run_ranks(train_losses, 2, overrides, 2)
