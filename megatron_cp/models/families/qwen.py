"""Qwen's families: Qwen 2, Qwen 3 and its experts."""

from __future__ import annotations

from megatron_cp.models.families.common.base import WINDOW, Family, Settings, hf_names
from megatron_cp.models.families.common.experts import PLAIN_EXPERTS, SoftmaxExperts
from megatron_cp.models.families.common.windows import SwitchedWindow
from megatron_cp.models.families.llama import ATTENTION_BIAS, LLAMA_PARTS, WEIGHTS, with_experts

_BIAS, _NORM = Settings(needed=dict(add_qkv_bias=True)), Settings(needed=dict(qk_layernorm=True))
_EXPERTS = SoftmaxExperts(
    counts=hf_names(
        num_moe_experts="num_experts",
        moe_ffn_hidden_size="moe_intermediate_size",
        moe_router_topk="num_experts_per_tok",
    ),
    needed=PLAIN_EXPERTS,
    normalizes=True,
)
FAMILIES = (
    Family("qwen2", "Qwen2ForCausalLM", (*LLAMA_PARTS, _BIAS, SwitchedWindow()), WEIGHTS, optional_features=(WINDOW,)),
    Family(
        "qwen3",
        "Qwen3ForCausalLM",
        (*LLAMA_PARTS, _NORM, SwitchedWindow(), ATTENTION_BIAS),
        WEIGHTS,
        optional_features=(WINDOW,),
    ),
    Family(
        "qwen3_moe",
        "Qwen3MoeForCausalLM",
        (*LLAMA_PARTS, _NORM, SwitchedWindow(reads_first_layer=False), ATTENTION_BIAS, _EXPERTS),
        with_experts("mlp", gate="gate_proj", up="up_proj", down="down_proj"),
        optional_features=(WINDOW, "moe_router_pre_softmax"),
    ),
)
