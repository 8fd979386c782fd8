"""Mistral's families: Llama with a sliding window, and Mixtral's experts."""

from __future__ import annotations

from megatron_cp.models.families.common.base import WINDOW, Family, hf_names
from megatron_cp.models.families.common.experts import PLAIN_EXPERTS, SoftmaxExperts
from megatron_cp.models.families.common.windows import SlidingWindow
from megatron_cp.models.families.llama import LLAMA_PARTS, WEIGHTS, with_experts

_PARTS = (*LLAMA_PARTS, SlidingWindow())
EXPERTS = SoftmaxExperts(
    counts=hf_names(
        num_moe_experts="num_local_experts",
        moe_ffn_hidden_size="intermediate_size",
        moe_router_topk="num_experts_per_tok",
    ),
    needed=PLAIN_EXPERTS,
)
FAMILIES = (
    Family("mistral", "MistralForCausalLM", _PARTS, WEIGHTS, optional_features=(WINDOW,)),
    Family(
        "mixtral",
        "MixtralForCausalLM",
        (*_PARTS, EXPERTS),
        with_experts("block_sparse_moe", gate="w1", up="w3", down="w2"),
        optional_features=(WINDOW,),
    ),
)
