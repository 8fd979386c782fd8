"""Checkpoints have the same tensors with and without Transformer Engine.

The names of the layers' tensors are the same too.
"""

from pathlib import Path
from typing import Any

import pytest

from megatron_cp.models import layer_specs
from megatron_cp.training.checkpoint.saver import load_checkpoint
from tests.ranks import RanksFailed, run_ranks
from tests.training_runs import save_checkpoint, start, tiny_config
from tests.unit_tests.models.hybrids import HYBRID

LATENT = {
    "model__multi_latent_attention": True,
    "model__q_lora_rank": 32,
    "model__kv_lora_rank": 32,
    "model__qk_head_dim": 16,
    "model__qk_pos_emb_head_dim": 8,
    "model__v_head_dim": 16,
}
EXPERTS = {"model__num_moe_experts": 2, "model__moe_ffn_hidden_size": 32}
ATTENTION_NORM, MLP_NORM = "self_attention.linear_qkv.layer_norm_weight", "mlp.linear_fc1.layer_norm_weight"
QUERY, KEY_VALUE = (
    "self_attention.linear_q_up_proj.layer_norm_weight",
    "self_attention.linear_kv_up_proj.layer_norm_weight",
)
# Of each kind of model the names of its layers' norms as Transformer Engine's modules save them
# (models/gpt/gpt_layer_specs.py:237-356 upstream): a norm before a matrix is part of it, others are modules.
MODELS: dict[str, tuple[dict[str, Any], set[str]]] = {
    "dense": ({}, {ATTENTION_NORM, MLP_NORM}),
    "normalized queries": (
        {"model__qk_layernorm": True},
        {ATTENTION_NORM, MLP_NORM, "self_attention.q_layernorm.weight", "self_attention.k_layernorm.weight"},
    ),
    "experts": (EXPERTS, {ATTENTION_NORM, "pre_mlp_layernorm.weight"}),
    "experts in some layers": (
        EXPERTS | {"model__moe_layer_freq": [0, 1, 1, 0]},
        {
            *(f"{layer}.{ATTENTION_NORM}" for layer in range(4)),
            *(f"{layer}.{MLP_NORM}" for layer in (0, 3)),
            *(f"{layer}.pre_mlp_layernorm.weight" for layer in (1, 2)),
        },
    ),
    # As upstream's own hybrid spec saves them (models/hybrid/hybrid_layer_specs.py:119-215): every layer is one part.
    "hybrid with experts": (
        HYBRID | EXPERTS | {"model__hybrid_layer_pattern": "ME*-"},
        {
            "0.mixer.norm.weight",
            "0.mixer.in_proj.layer_norm_weight",
            "1.pre_mlp_layernorm.weight",
            f"2.{ATTENTION_NORM}",
            f"3.{MLP_NORM}",
        },
    ),
    "latent": (LATENT, {"input_layernorm.weight", MLP_NORM}),
    "latent, normalized": (
        LATENT | {"model__qk_layernorm": True},
        {"input_layernorm.weight", QUERY, KEY_VALUE, MLP_NORM},
    ),
    "latent, normalized, plain queries": (
        LATENT | {"model__qk_layernorm": True, "model__q_lora_rank": None},
        {"input_layernorm.weight", KEY_VALUE, MLP_NORM},
    ),
    "latent, normalized, experts": (
        LATENT | EXPERTS | {"model__qk_layernorm": True},
        {"input_layernorm.weight", QUERY, KEY_VALUE, "pre_mlp_layernorm.weight"},
    ),
}


def saved_norms(overrides: dict[str, Any]) -> set[str]:
    run, _ = start(tiny_config(**overrides))
    state = run.model[0].module.sharded_state_dict(metadata={"dp_cp_group": run.groups.dp_cp})
    keys = {tensor.key for tensor in state.values() if hasattr(tensor, "key")}
    run.close()
    prefix = "decoder.layers."
    return {key.removeprefix(prefix) for key in keys if key.startswith(prefix) and "norm" in key}


@pytest.mark.parametrize("name", MODELS)
def test_norms_are_saved_as_transformer_engines_layers_save_them(name: str) -> None:
    overrides, expected = MODELS[name]
    assert run_ranks(saved_norms, 1, overrides) == [expected]


def written_before(folder: str) -> None:
    """Save a checkpoint as a version that took upstream's names did, and load it."""
    experts = tiny_config(**EXPERTS)
    with pytest.MonkeyPatch.context() as patch:
        names = {"input_layernorm.": "self_attention.linear_qkv.layer_norm_", "pre_mlp_layernorm.": MLP_NORM[:-6]}
        patch.setattr(layer_specs, "_saved_names", lambda *_: names)
        run, _ = start(experts)
        save_checkpoint(run, folder, {})
        run.close()
    run, _ = start(experts)
    load_checkpoint(run, folder, 0)


def test_a_checkpoint_with_other_names_lists_missing_ones(tmp_path: Path) -> None:
    with pytest.raises(
        RanksFailed, match=r"4 of the model's tensors are missing \(decoder.layers.pre_mlp_layernorm.weight"
    ):
        run_ranks(written_before, 1, str(tmp_path))
