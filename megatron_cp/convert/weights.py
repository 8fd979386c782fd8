"""What a model's weights are called on either side, and how the one side's are made of the other's.

megatron-core keeps the query, key and value projections in one matrix, the rows of each group of heads together (its
queries', then its key's, then its value's), and the two halves of a gated MLP's first matrix, gate first.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor

from megatron_cp.config.run_config import ModelConfig
from megatron_cp.convert.families import Family

EMBEDDING, OUTPUT = "model.embed_tokens.weight", "lm_head.weight"
# Of any model: rounded, another expert would be chosen.
KEPT_IN_FLOAT32 = "gate.e_score_correction_bias"
_OUTSIDE = {
    "embedding.word_embeddings.weight": EMBEDDING,
    "decoder.final_layernorm.weight": "model.norm.weight",
    "output_layer.weight": OUTPUT,
}
_IN_A_LAYER = {
    "input_layernorm.weight": ("input_layernorm.weight",),
    "self_attention.linear_qkv.weight": (
        "self_attn.q_proj.weight",
        "self_attn.k_proj.weight",
        "self_attn.v_proj.weight",
    ),
    "self_attention.linear_qkv.bias": ("self_attn.q_proj.bias", "self_attn.k_proj.bias", "self_attn.v_proj.bias"),
    "self_attention.q_layernorm.weight": ("self_attn.q_norm.weight",),
    "self_attention.k_layernorm.weight": ("self_attn.k_norm.weight",),
    "self_attention.linear_proj.weight": ("self_attn.o_proj.weight",),
    "pre_mlp_layernorm.weight": ("post_attention_layernorm.weight",),
    "mlp.linear_fc1.weight": ("mlp.gate_proj.weight", "mlp.up_proj.weight"),
    "mlp.linear_fc2.weight": ("mlp.down_proj.weight",),
}
# Of latent attention, and of experts beside others.
_IN_A_LATENT_LAYER = _IN_A_LAYER | {
    "self_attention.linear_q_proj.weight": ("self_attn.q_proj.weight",),
    "self_attention.linear_q_down_proj.weight": ("self_attn.q_a_proj.weight",),
    "self_attention.q_layernorm.weight": ("self_attn.q_a_layernorm.weight",),
    "self_attention.linear_q_up_proj.weight": ("self_attn.q_b_proj.weight",),
    "self_attention.linear_kv_down_proj.weight": ("self_attn.kv_a_proj_with_mqa.weight",),
    "self_attention.kv_layernorm.weight": ("self_attn.kv_a_layernorm.weight",),
    "self_attention.linear_kv_up_proj.weight": ("self_attn.kv_b_proj.weight",),
    "mlp.router.expert_bias": (f"mlp.{KEPT_IN_FLOAT32}",),
    "mlp.shared_experts.linear_fc1.weight": (
        "mlp.shared_experts.gate_proj.weight",
        "mlp.shared_experts.up_proj.weight",
    ),
    "mlp.shared_experts.linear_fc2.weight": ("mlp.shared_experts.down_proj.weight",),
}
_OUTSIDE_HYBRIDS = {
    "embedding.word_embeddings.weight": "backbone.embeddings.weight",
    "decoder.final_norm.weight": "backbone.norm_f.weight",
    "output_layer.weight": OUTPUT,
}
# Of one kind each: Mamba, attention, an MLP or experts. The input projection has z, x, B, C and dt on both sides.
_IN_A_HYBRID_LAYER = {
    **dict.fromkeys(("norm.weight", "input_layernorm.weight", "pre_mlp_layernorm.weight"), ("norm.weight",)),
    **{f"mixer.{name}": (f"mixer.{name}",) for name in ("dt_bias", "A_log", "D", "norm.weight")},
    **{f"mixer.{name}.weight": (f"mixer.{name}.weight",) for name in ("in_proj", "out_proj")},
    **{f"mixer.conv1d_{name}": (f"mixer.conv1d.{name}",) for name in ("weight", "bias")},
    "self_attention.linear_qkv.weight": ("mixer.q_proj.weight", "mixer.k_proj.weight", "mixer.v_proj.weight"),
    "self_attention.linear_proj.weight": ("mixer.o_proj.weight",),
    "mlp.linear_fc1.weight": ("mixer.up_proj.weight",),
    "mlp.linear_fc2.weight": ("mixer.down_proj.weight",),
    "mlp.router.expert_bias": (f"mixer.{KEPT_IN_FLOAT32}",),
    **{f"mlp.{name}.weight": (f"mixer.{name}.weight",) for name in ("fc1_latent_proj", "fc2_latent_proj")},
    "mlp.shared_experts.linear_fc1.weight": ("mixer.shared_experts.up_proj.weight",),
    "mlp.shared_experts.linear_fc2.weight": ("mixer.shared_experts.down_proj.weight",),
}
_LAYER = re.compile(r"decoder\.layers\.(\d+)\.(.+)")
_EXPERT = re.compile(r"mlp\.experts\.local_experts\.(\d+)\.linear_fc([12])\.weight")
# Published files may hold them, and nothing is lost without: computed, or the embedding once more.
_SPARE = re.compile(r"rotary_emb\.inv_freq$")


@dataclass(frozen=True)
class Part:
    """The published tensors of which one of megatron-core's parameters is made, in order, and how."""

    published: tuple[str, ...]
    how: Literal["same", "stacked", "by group"]

    def join(self, tensors: list[Tensor], model: ModelConfig) -> Tensor:
        """The parameter, from the published tensors."""
        if self.how == "by group":
            return torch.cat([t.reshape(model.kv_heads, -1, *t.shape[1:]) for t in tensors], dim=1).flatten(0, 1)
        return torch.cat(tensors) if self.how == "stacked" else tensors[0]

    def split(self, parameter: Tensor, model: ModelConfig) -> list[Tensor]:
        """The published tensors, from the parameter; what :meth:`join` undoes."""
        if self.how == "by group":
            by_group = parameter.reshape(model.kv_heads, -1, *parameter.shape[1:])
            head = by_group.shape[1] // (model.num_attention_heads // model.kv_heads + 2)
            return [t.flatten(0, 1) for t in by_group.split([by_group.shape[1] - 2 * head, head, head], dim=1)]
        return list(parameter.chunk(2)) if self.how == "stacked" else [parameter]


def part_of(name: str, family: Family) -> Part:
    """What makes up the parameter that a whole, undivided model calls ``name``."""
    outside = _OUTSIDE_HYBRIDS if family.hybrid else _OUTSIDE
    if name in outside:
        return Part((outside[name],), "same")
    layer = _LAYER.fullmatch(name)
    assert layer, name
    published = _in_a_layer(layer[2], family)
    how: Literal["same", "stacked", "by group"] = "same"
    if len(published) > 1:
        how = "by group" if "linear_qkv" in name else "stacked"
    layers = "backbone.layers" if family.hybrid else "model.layers"
    return Part(tuple(f"{layers}.{layer[1]}.{inner}" for inner in published), how)


def _in_a_layer(name: str, family: Family) -> tuple[str, ...]:
    usual = _IN_A_HYBRID_LAYER if family.hybrid else _IN_A_LATENT_LAYER if family.latent else _IN_A_LAYER
    if family.experts is None or name in usual:
        return usual[name]
    experts = family.experts
    if name == "mlp.router.weight":
        return (f"{experts.module}.gate.weight",)
    expert = _EXPERT.fullmatch(name)
    assert expert, name
    matrices = (experts.gate, experts.up) if expert[2] == "1" else (experts.down,)
    return tuple(f"{experts.module}.experts.{expert[1]}.{matrix}.weight" for matrix in matrices if matrix)


def further_ahead(names: set[str]) -> set[str]:
    """Of published tensors those of layers for multi-token prediction, after the last layer or apart from all."""
    marks = re.compile(r"(model\.layers\.\d+\.)eh_proj\.weight")
    prefixes = tuple(found[1] for found in map(marks.fullmatch, names) if found)
    return {name for name in names if name.startswith((*prefixes, "mtp."))}


def is_spare(published: str, model: ModelConfig) -> bool:
    """Whether a published tensor may be left where it is."""
    tied = model.share_embeddings_and_output_weights and published == OUTPUT
    return tied or _SPARE.search(published) is not None
