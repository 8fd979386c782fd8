"""Private names of megatron-core that other packages need: the one place where they are imported."""

from megatron.core.tensor_parallel.layers import _initialize_affine_weight_cpu as initialize_affine_weight_cpu

__all__ = ["initialize_affine_weight_cpu"]
