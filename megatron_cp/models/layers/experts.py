"""Experts beyond megatron-core's layers: with biases, or in a latent dimension.

LatentMoE (Nemotron 3 Super) projects tokens to fewer dimensions before they are sent to experts, and back after the
results are summed. The router and shared experts use full tokens. Upstream's layer needs Transformer Engine for both
projections, and cannot save them with decentralized groups; here they are plain products.
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
    """Linear layer without bias, replicated on tensor-parallel ranks."""

    def __init__(self, inputs: int, outputs: int, config: TransformerConfig, init_method: Any) -> None:
        super().__init__()
        weight = torch.empty(outputs, inputs, dtype=config.params_dtype, device=torch.cuda.current_device())
        if config.perform_initialization:
            init_method(weight)
        self.weight = torch.nn.Parameter(weight)
        self.weight.sequence_parallel = config.sequence_parallel  # type: ignore[attr-defined]

    def forward(self, x: Tensor) -> tuple[Tensor, None]:
        """Map [..., inputs] to [..., outputs]; no bias."""
        return torch.nn.functional.linear(x, self.weight), None


class LatentMoELayer(MoELayer):
    """megatron-core's layer with its own projections."""

    def __init__(
        self, config: TransformerConfig, submodules: MoESubmodules | None = None, *args: Any, **kwargs: Any
    ) -> None:
        assert submodules is not None and config.moe_latent_size is not None
        build, outside = submodules.experts, copy.copy(config)
        outside.moe_latent_size = None  # so that upstream omits the projections; its experts get the config

        def experts(count: int, _: TransformerConfig, **more: Any) -> Any:
            return build(count, config, **more)

        super().__init__(outside, replace(submodules, experts=experts), *args, **kwargs)
        self.config = config
        hidden, latent = config.hidden_size, config.moe_latent_size
        self.fc1_latent_proj = ReplicatedLinear(hidden, latent, config, config.init_method)
        self.fc2_latent_proj = ReplicatedLinear(latent, hidden, config, config.output_layer_init_method)


class BiasedExpertOutput(RowParallelLinear):
    """An expert's second matrix with bias, not sharded (rule K15).

    megatron-core's layer reduces the product over its single rank. Its MLP then adds the bias in place (mlp.py:354),
    which autograd refuses for a reduced tensor. Under sequence parallelism it also sums the bias gradient over
    tensor-parallel ranks, which hold other experts.
    """

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.explicit_expert_comm = True
        self.bias.sequence_parallel = False
