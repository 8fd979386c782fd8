"""Experts that megatron-core's own layers do not build: with biases, and in fewer dimensions than the model has.

Experts in fewer dimensions are LatentMoE's, of Nemotron 3 Super. Before tokens are sent to their experts one matrix
makes them smaller, and after their sums came back another makes them as large as before; the router and shared experts
see whole ones. Upstream's layer needs Transformer Engine for both matrices, and cannot save them with decentralized
groups. Here they are ordinary products.
"""

from __future__ import annotations

import copy
from dataclasses import replace
from typing import Any

import torch
from megatron.core.tensor_parallel.layers import RowParallelLinear
from megatron.core.transformer.moe.moe_layer import MoELayer, MoESubmodules
from megatron.core.transformer.transformer_config import TransformerConfig
from torch import Tensor


class ReplicatedLinear(torch.nn.Module):
    """A product without a bias, computed whole by each tensor-parallel rank, of its own tokens."""

    def __init__(self, inputs: int, outputs: int, config: TransformerConfig, init_method: Any) -> None:
        super().__init__()
        weight = torch.empty(outputs, inputs, dtype=config.params_dtype, device=torch.cuda.current_device())
        if config.perform_initialization:
            init_method(weight)
        self.weight = torch.nn.Parameter(weight)
        self.weight.sequence_parallel = config.sequence_parallel  # type: ignore[attr-defined]

    def forward(self, x: Tensor) -> tuple[Tensor, None]:
        """[..., inputs] -> [..., outputs], and no bias."""
        return torch.nn.functional.linear(x, self.weight), None


class LatentMoELayer(MoELayer):
    """megatron-core's layer, with both matrices of its own."""

    def __init__(
        self, config: TransformerConfig, submodules: MoESubmodules | None = None, *args: Any, **kwargs: Any
    ) -> None:
        assert submodules is not None and config.moe_latent_size is not None
        build, outside = submodules.experts, copy.copy(config)
        outside.moe_latent_size = None  # so that upstream leaves out the matrices; its experts are told

        def experts(count: int, _: TransformerConfig, **more: Any) -> Any:
            return build(count, config, **more)

        super().__init__(outside, replace(submodules, experts=experts), *args, **kwargs)
        self.config = config
        hidden, latent = config.hidden_size, config.moe_latent_size
        self.fc1_latent_proj = ReplicatedLinear(hidden, latent, config, config.init_method)
        self.fc2_latent_proj = ReplicatedLinear(latent, hidden, config, config.output_layer_init_method)


class BiasedExpertOutput(RowParallelLinear):
    """An expert's second matrix and its bias, undivided: rule K15 requires expert_tensor_parallel_size=1.

    megatron-core's layer reduces the product over the one rank that has it. Its MLP then adds the bias in place
    (mlp.py:354), which autograd refuses for a reduced tensor. And under sequence parallelism it sums the bias' gradient
    over the tensor-parallel ranks, which hold other experts.
    """

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.explicit_expert_comm = True
        self.bias.sequence_parallel = False
