"""The hybrid model of the tests that train one: overrides for ``tests.training_runs.tiny_config``."""

# 16 Mamba heads in two groups: four ranks share a group by two, and three ranks cannot share evenly.
HYBRID = {
    "model__architecture": "hybrid",
    "model__hybrid_layer_pattern": "M*M-",
    "model__mamba_state_dim": 8,
    "model__mamba_head_dim": 8,
    "model__mamba_num_groups": 2,
}
