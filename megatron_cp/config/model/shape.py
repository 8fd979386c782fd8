"""Architecture, sizes, norms, activations and initial weights."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from megatron_cp.config.setting import FUNCTION, LAYOUT, WEIGHTS, equals, positive, setting, share, size

GATED = equals("model.gated_linear_unit", True)


@dataclass
class Shape:
    architecture: Literal["gpt", "hybrid"] = setting(
        "gpt", "gpt (GPT, Llama and the like) or hybrid (Mamba-2, attention, MLPs and experts by a pattern)", WEIGHTS
    )
    hybrid_layer_pattern: str | None = setting(
        None,
        "a hybrid's layers: M Mamba-2, * attention, - an MLP, E experts, | between stages, /M* looks ahead",
        WEIGHTS,
    )
    num_layers: int = size(2, "layers", WEIGHTS)
    hidden_size: int = size(128, "width of the residual stream", WEIGHTS)
    ffn_hidden_size: int | None = size(None, "width of an MLP; null: 4 hidden_size", WEIGHTS)
    seq_length: int | None = size(None, "tokens of a sample; null: the dataset's")
    vocab_size: int | None = size(
        None, "tokens of the vocabulary; null: the tokenizer's, or that of the model to begin with", WEIGHTS
    )
    make_vocab_size_divisible_by: int = size(128, "the vocabulary is padded to a multiple of this and tp")
    share_embeddings_and_output_weights: bool = setting(False, "the output layer has the embedding's weights", WEIGHTS)
    scale_embeddings: bool = setting(
        False, "embeddings are multiplied with sqrt(hidden_size), rounded to the weights' dtype", FUNCTION
    )
    normalization: Literal["RMSNorm", "LayerNorm"] = setting("RMSNorm", "norm of all layers", WEIGHTS)
    layernorm_epsilon: float = setting(1e-5, "added to a norm's variance", FUNCTION, least=0)
    layernorm_zero_centered_gamma: bool = setting(False, "norms multiply with 1 + weight", WEIGHTS)
    sandwich_norm: bool = setting(False, "also norms of what attention and MLP add to the residual stream", WEIGHTS)
    activation_func: Literal["silu", "gelu", "relu", "squared_relu", "quick_gelu", "fast_gelu"] = setting(
        "silu", "activation of MLPs and experts", WEIGHTS, translated=True
    )
    gated_linear_unit: bool = setting(True, "MLPs and experts multiply the activation with a gate", WEIGHTS)
    glu_linear_offset: float = setting(0.0, "added to what the gate multiplies", FUNCTION, when=GATED)
    activation_func_clamp_value: float | None = positive(
        None, "the gate is at most this, what it multiplies within plus and minus it", FUNCTION, when=GATED
    )
    add_bias_linear: bool = setting(False, "linear layers have biases", WEIGHTS)
    hidden_dropout: float = share(0.0, "dropout of what a layer adds to the residual stream")
    init_method_std: float = setting(0.02, "standard deviation of initial weights", least=0)
    embedding_init_method_std: float | None = setting(
        None, "standard deviation of the embedding's initial weights; null: init_method_std", least=0
    )
    use_cpu_initialization: bool = setting(
        False, "slower: the same initial weights under every layout; without a GPU always so", translated=True
    )
    transformer_impl: Literal["auto", "transformer_engine", "local"] = setting(
        "auto", "whose the layers around attention are", LAYOUT, translated=True
    )
