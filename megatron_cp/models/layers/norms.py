"""Norms of layers without Transformer Engine, and norms after layers."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from megatron.core.fusions.fused_bias_dropout import get_bias_dropout_add
from megatron.core.transformer.transformer_config import TransformerConfig
from torch import Tensor


class ZeroCenteredRMSNorm(torch.nn.RMSNorm):
    """RMSNorm that multiplies by ``1 + weight``, in float32."""

    def reset_parameters(self) -> None:
        torch.nn.init.zeros_(self.weight)

    def forward(self, x: Tensor) -> Tensor:
        return F.rms_norm(x.float(), self.normalized_shape, 1 + self.weight.float(), self.eps).type_as(x)


class ZeroCenteredLayerNorm(torch.nn.LayerNorm):
    """LayerNorm that multiplies by ``1 + weight``, in float32."""

    def reset_parameters(self) -> None:
        torch.nn.init.zeros_(self.weight)
        torch.nn.init.zeros_(self.bias)

    def forward(self, x: Tensor) -> Tensor:
        weight, bias = 1 + self.weight.float(), self.bias.float()
        return F.layer_norm(x.float(), self.normalized_shape, weight, bias, self.eps).type_as(x)


# By ``normalization`` and ``layernorm_zero_centered_gamma``.
_NORMS: dict[tuple[str, bool], Callable[..., torch.nn.Module]] = {
    ("RMSNorm", False): torch.nn.RMSNorm,
    ("RMSNorm", True): ZeroCenteredRMSNorm,
    ("LayerNorm", False): torch.nn.LayerNorm,
    ("LayerNorm", True): ZeroCenteredLayerNorm,
}


class TorchNorm:
    """torch's LayerNorm or RMSNorm, also under sequence parallelism.

    Replaces megatron-core's ``WrappedTorchNorm``. Under sequence parallelism each tensor-parallel rank normalizes its
    own tokens, so gradients are partial sums; the parameters' attribute makes megatron-core reduce them. Upstream's
    also refuses ``layernorm_zero_centered_gamma``.
    """

    def __new__(  # type: ignore[misc]
        cls, config: TransformerConfig, hidden_size: int, eps: float = 1e-5, **kwargs: Any
    ) -> torch.nn.Module:
        norm: Any = _NORMS[config.normalization, config.layernorm_zero_centered_gamma](hidden_size, eps=eps)
        for parameter in norm.parameters():
            parameter.sequence_parallel = config.sequence_parallel
        return norm.to(config.params_dtype)


class NormThenAdd(torch.nn.Module):
    """Normalize the output of attention or an MLP, then add the residual.

    Replaces megatron-core's ``get_bias_dropout_add`` in a layer spec, with the same calls.
    """

    def __init__(self, config: TransformerConfig, norm: Callable[..., torch.nn.Module]) -> None:
        super().__init__()
        self.norm = norm(config=config, hidden_size=config.hidden_size, eps=config.layernorm_epsilon)

    def forward(self, training: bool, fused: bool) -> Callable[..., Tensor]:
        add = get_bias_dropout_add(training, fused)

        def norm_then_add(output_with_bias: tuple[Tensor, Tensor | None], residual: Tensor, dropout: float) -> Tensor:
            output, bias = output_with_bias
            return add((self.norm(output if bias is None else output + bias), None), residual, dropout)

        return norm_then_add
