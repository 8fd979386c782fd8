"""Interface of attention kernels, and helpers shared by several."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterable, Sequence

import torch
import torch.nn.functional as F
from torch import Tensor

from megatron_cp.attention.context import AttentionCall
from megatron_cp.attention.kernels.launches import Launch
from megatron_cp.attention.tiles import TilePlan, TileSize

Result = tuple[Tensor, Tensor]  # output and log-sum-exp
Gradients = tuple[Tensor, Tensor, Tensor]


class Kernel(ABC):
    """Computation of tiles on a device; tensors are [b, h, s, d].

    ``parts`` are dout, query, key, value and out.
    """

    @abstractmethod
    def forward_tiles(self, dtype: torch.dtype) -> TileSize: ...

    def backward_tiles(self, dtype: torch.dtype, call: AttentionCall) -> TileSize:
        return self.forward_tiles(dtype)

    def launches(self, plan: TilePlan, q: Tensor, v: Tensor) -> Iterable[Launch]:
        return map(Launch.of, plan)

    @abstractmethod
    def forward(self, q: Tensor, k: Tensor, v: Tensor, launch: Launch, call: AttentionCall) -> Result: ...

    @abstractmethod
    def backward(self, parts: Sequence[Tensor], lse: Tensor, launch: Launch, call: AttentionCall) -> Gradients: ...


def equal_head_dims(q: Tensor, k: Tensor, v: Tensor, multiple: int = 1) -> tuple[Tensor, Tensor, Tensor]:
    """Pad to one head dim, which kernels require; zero columns change no result."""
    dim = -(-max(q.shape[-1], v.shape[-1]) // multiple) * multiple
    return pad_last(q, dim), pad_last(k, dim), pad_last(v, dim)


def pad_last(x: Tensor, dim: int) -> Tensor:
    return x if x.shape[-1] == dim else F.pad(x, (0, dim - x.shape[-1]))
