"""Latent attention with YaRN equals Hugging Face's library.

Both have the same settings and weights.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch
from transformers import DeepseekV3Config
from transformers.models.deepseek_v3.modeling_deepseek_v3 import DeepseekV3Attention, DeepseekV3RotaryEmbedding

from tests.ranks import run_ranks
from tests.training_runs import start, tiny_config
from tests.unit_tests.training.layouts.test_model_variants import MLA

LENGTH, HIDDEN = 48, 128
# Theirs, and ours.
WEIGHTS = {
    "kv_a_proj_with_mqa": "linear_kv_down_proj",
    "kv_a_layernorm": "kv_layernorm",
    "kv_b_proj": "linear_kv_up_proj",
    "o_proj": "linear_proj",
}
QUERIES = {
    None: {"q_proj": "linear_q_proj"},
    16: {"q_a_proj": "linear_q_down_proj", "q_a_layernorm": "q_layernorm", "q_b_proj": "linear_q_up_proj"},
}


def both(settings: dict[str, Any], published: dict[str, Any]) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the output of the first layer's attention, ours and Hugging Face's."""
    run, _ = start(tiny_config(**MLA | settings))
    ours: Any = run.model[0].module.decoder.layers[0].self_attention
    theirs = DeepseekV3Attention(DeepseekV3Config(**published, attn_implementation="eager"), 0)
    names = WEIGHTS | QUERIES[published["q_lora_rank"]]
    generator = torch.Generator().manual_seed(1)
    with torch.no_grad():
        for their_name, our_name in names.items():
            weight = theirs.get_submodule(their_name).weight
            weight.copy_(torch.randn(weight.shape, generator=generator) * 0.3)
            ours.get_submodule(our_name).weight.copy_(weight)
        assert {name.rsplit(".", 1)[0] for name, _ in ours.named_parameters()} == set(names.values())
        hidden = torch.randn(LENGTH, 1, HIDDEN, generator=generator)
        positions = DeepseekV3RotaryEmbedding(theirs.config)(hidden, torch.arange(LENGTH)[None])
        mask = torch.full((LENGTH, LENGTH), -torch.inf).triu(1)[None, None]
        found, _ = ours(hidden, attention_mask=None)
        return found, theirs(hidden.transpose(0, 1), positions, mask)[0].transpose(0, 1)


@pytest.mark.parametrize("compressed", [None, 16])
@pytest.mark.parametrize(
    "scales", [{}, {"mscale": 1.0, "mscale_all_dim": 1.0}, {"mscale": 0.7, "mscale_all_dim": 1.2}], ids=str
)
def test_it_equals_published_models(scales: dict[str, float], compressed: int | None) -> None:
    yarn = {"rope_type": "yarn", "factor": 8.0, "original_max_position_embeddings": 4096, "beta_fast": 2.0}
    published = {
        "hidden_size": HIDDEN,
        "num_attention_heads": 8,
        "num_key_value_heads": 8,
        "q_lora_rank": compressed,
        "kv_lora_rank": 16,
        "qk_nope_head_dim": 8,
        "qk_rope_head_dim": 8,
        "v_head_dim": 8,
        "rms_norm_eps": 1e-5,
        "max_position_embeddings": 32768,
        "rope_parameters": {"rope_theta": 10000.0, **yarn, **scales},
    }
    settings = {
        "model__hidden_size": HIDDEN,
        "model__q_lora_rank": compressed,
        "model__position_embedding_type": "yarn",
        "model__yarn_rotary_scaling_factor": 8.0,
        "model__yarn_original_max_position_embeddings": 4096,
        "model__yarn_beta_fast": 2.0,
        **{f"model__yarn_{name}": value for name, value in scales.items()},
    }
    ((ours, theirs),) = run_ranks(both, 1, settings, published)
    torch.testing.assert_close(ours, theirs, rtol=1e-5, atol=1e-5)
