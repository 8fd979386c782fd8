"""Overrides of ``tests.training_runs.tiny_config`` for a tiny Gemma 3."""

# Layers with and without a window in turn, and sequences that are longer than the window.
GEMMA3 = {
    "model__window_size": [8, 0],
    "model__window_attn_skip_freq": 2,
    "model__rotary_base": 1e6,
    "model__rotary_base_local": 1e4,
    "model__seq_len_interpolation_factor": 8.0,  # of the layers without a window
    "model__layernorm_zero_centered_gamma": True,
    "model__layernorm_epsilon": 1e-6,
    "model__sandwich_norm": True,
    "model__qk_layernorm": True,
    "model__scale_embeddings": True,
    "model__share_embeddings_and_output_weights": True,
    "model__activation_func": "fast_gelu",
    "model__kv_channels": 16,
    "model__softmax_scale": 0.3,
}
