"""Architecture, sizes, norms, activations and initial weights"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from megatron_cp.config.setting import FUNCTION, LAYOUT, WEIGHTS, equals, positive, setting, share, size

GATED = equals("model.gated_linear_unit", True)


@dataclass
class Shape:
    architecture: Literal["gpt", "hybrid"] = setting(
        "gpt", "gpt (GPT, Llama and similar) or hybrid (Mamba-2, attention, MLPs and experts by a pattern)", WEIGHTS
    )
    hybrid_layer_pattern: str | None = setting(
        None,
        "layers of a hybrid: M Mamba-2, * attention, - MLP, E experts, | separates stages, /M* is an MTP depth",
        WEIGHTS,
    )
    num_layers: int = size(2, "number of layers", WEIGHTS)
    hidden_size: int = size(128, "width of the residual stream", WEIGHTS)
    ffn_hidden_size: int | None = size(None, "width of an MLP; null: 4 hidden_size", WEIGHTS)
    seq_length: int | None = size(None, "tokens of a sample; null: the dataset's")
    vocab_size: int | None = size(None, "vocabulary size; null: from the tokenizer or the pretrained model", WEIGHTS)
    make_vocab_size_divisible_by: int = size(128, "pad the vocabulary to a multiple of this and tp")
    share_embeddings_and_output_weights: bool = setting(
        False, "tie the output layer's weights to the embedding", WEIGHTS
    )
    scale_embeddings: bool = setting(
        False, "multiply embeddings by sqrt(hidden_size), rounded to the weights' dtype", FUNCTION
    )
    normalization: Literal["RMSNorm", "LayerNorm"] = setting("RMSNorm", "norm of all layers", WEIGHTS)
    layernorm_epsilon: float = setting(1e-5, "epsilon added to the variance", FUNCTION, least=0)
    layernorm_zero_centered_gamma: bool = setting(False, "norms multiply by 1 + weight", WEIGHTS)
    sandwich_norm: bool = setting(False, "also normalize the outputs of attention and MLP", WEIGHTS)
    activation_func: Literal["silu", "gelu", "relu", "squared_relu", "quick_gelu", "fast_gelu"] = setting(
        "silu", "activation of MLPs and experts", WEIGHTS, translated=True
    )
    gated_linear_unit: bool = setting(True, "gate the MLPs and experts", WEIGHTS)
    glu_linear_offset: float = setting(0.0, "offset of the factor that the gate multiplies", FUNCTION, when=GATED)
    activation_func_clamp_value: float | None = positive(
        None, "upper limit of the gate, and limit of the absolute value of the other factor", FUNCTION, when=GATED
    )
    add_bias_linear: bool = setting(False, "biases in linear layers", WEIGHTS)
    hidden_dropout: float = share(0.0, "dropout of a layer's output before the residual")
    init_method_std: float = setting(0.02, "standard deviation of initial weights", least=0)
    embedding_init_method_std: float | None = setting(
        None, "standard deviation of the embedding's initial weights; null: init_method_std", least=0
    )
    use_cpu_initialization: bool = setting(
        False,
        "initialize on the CPU: the same weights under every layout, but slower; always without a GPU",
        translated=True,
    )
    transformer_impl: Literal["auto", "transformer_engine", "local"] = setting(
        "auto", "layers around attention: Transformer Engine's, or local (megatron-core's)", LAYOUT, translated=True
    )
