"""megatron_cp: long-context training on released megatron-core."""

__version__ = "0.1.0"
