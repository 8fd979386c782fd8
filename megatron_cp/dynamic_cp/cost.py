"""The cost in seconds of a packed microbatch on ``c`` context parallel ranks.

The scheduler needs nothing of a microbatch but two sums, its tokens and its squared lengths, so every function here
has a form that takes those sums, as scalars or as numpy arrays.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
from numpy.typing import ArrayLike

from megatron_cp.attention.transports.registry import ALL_TO_ALL, RING, TRANSPORTS, CostTerms

# The coefficients of a cost model that measured times can be fitted to.
FITTED = ("per_microbatch", "quadratic", "linear", "kv_intra", "kv_inter", "ring_step", "per_sample")


class GroupCost(NamedTuple):
    """The cost model for one group size.

    With S = sum of squared lengths and T = tokens of the microbatch:
    ``seconds = fixed + square * S + token * T + max(0, comm * T - hide_square * S - hide_token * T)``.
    """

    fixed: float
    square: float
    token: float
    comm: float
    hide_square: float
    hide_token: float

    def seconds(self, squares: float, tokens: float) -> float:
        exposed = self.comm * tokens - self.hide_square * squares - self.hide_token * tokens
        compute = self.fixed + self.square * squares + self.token * tokens
        return compute + exposed if exposed > 0 else compute


@dataclass(frozen=True)
class CostModel:
    """Seconds of one packed microbatch, forward and backward, on ``c`` ranks.

    ``seconds = per_microbatch + sum_i [quadratic * s_i^2 / c * (1 + small_tile * c / s_i) + linear * s_i / c]
    + (c > 1) * (max(0, kv * T * (c - 1) / c - overlap * attention) + (c - 1) * ring_step) + per_sample * n * calls(c)``

    where the s_i are the lengths of the packed samples in tokens, T their sum, ``attention`` the quadratic term, and
    kv is ``kv_intra`` for ``c <= ranks_per_node`` and ``kv_inter`` beyond.

    per_microbatch: seconds a microbatch costs whatever it holds (kernel launches, host work).
    quadratic: seconds per squared token of causal attention. linear: seconds per token of everything else.
    small_tile: tokens; attention loses efficiency when a rank's share ``s / c`` comes near it.
    kv_intra, kv_inter: seconds per token for moving keys and values once around the group, inside and across nodes.
    ring_step: seconds of latency per ring step. overlap: the fraction of attention that hides communication.
    ranks_per_node: CP ranks that share a node's fast links (GPUs per node / tensor parallel size).
    transport: the registered one whose messages are counted. The formula is a ring's, which ``hops``; others send once,
    with nothing to hide behind, and ``by_heads`` a rank moves only its share (kv / c per token).
    per_sample: seconds per packed sample and kernel call, where a kernel is called for each sample of a pack: on CPUs,
    and by our own attention on GPUs, for which nobody has measured it and the models here have 0.
    The n samples need ``calls(c)`` of them each: one on one rank, and on a ring of c ranks two on the diagonal, one
    between them and one for each other rank. The scheduler sees it in the price of a sample, not in that of a pack.
    """

    per_microbatch: float
    quadratic: float
    linear: float
    small_tile: float = 256
    kv_intra: float = 0.0
    kv_inter: float = 0.0
    ring_step: float = 0.0
    overlap: float = 0.9
    ranks_per_node: int = 8
    transport: str = RING.name
    per_sample: float = 0.0

    def __post_init__(self) -> None:
        for name in ("small_tile", *FITTED):
            if not 0 <= getattr(self, name) < math.inf:
                raise ValueError(f"CostModel.{name}={getattr(self, name)}: must be a finite number >= 0")
        if not 0 <= self.overlap <= 1:
            raise ValueError(f"CostModel.overlap={self.overlap}: must be between 0 (nothing hidden) and 1")
        if not 1 <= self.ranks_per_node < math.inf:
            raise ValueError(f"CostModel.ranks_per_node={self.ranks_per_node}: must be a finite number of at least 1")
        if self.transport not in TRANSPORTS:
            raise ValueError(f"CostModel.transport={self.transport!r}: must be one of {', '.join(TRANSPORTS)}")
        if self.quadratic == 0 and self.linear == 0:
            raise ValueError("CostModel: quadratic and linear are both 0, so no sample would cost anything")

    @property
    def messages(self) -> CostTerms:
        return TRANSPORTS[self.transport].cost

    def for_size(self, c: int) -> GroupCost:
        """Return the coefficients for groups of ``c`` ranks."""
        if not c >= 1:
            raise ValueError(f"c={c}: a group has at least 1 rank")
        square, tile = self.quadratic / c, self.quadratic * self.small_tile
        if c == 1:
            return GroupCost(self.per_microbatch, square, tile + self.linear, 0.0, 0.0, 0.0)
        kv = (self.kv_intra if c <= self.ranks_per_node else self.kv_inter) * (c - 1) / c
        kv = kv / c if self.messages.by_heads else kv
        if not self.messages.hops:
            return GroupCost(self.per_microbatch + self.ring_step, square, tile + self.linear / c, kv, 0.0, 0.0)
        fixed = self.per_microbatch + (c - 1) * self.ring_step
        return GroupCost(fixed, square, tile + self.linear / c, kv, self.overlap * square, self.overlap * tile)

    def seconds(self, lengths: Sequence[int] | np.ndarray, c: int) -> float:
        """Return the seconds of a microbatch that packs samples of ``lengths`` tokens.

        ValueError for ``c`` below 1.
        """
        s = np.asarray(lengths, dtype=np.float64)
        calls = self.per_sample * len(s) * float(self.calls(c))
        return self.for_size(c).seconds(float(s @ s), float(s.sum())) + calls

    def calls(self, c: ArrayLike) -> np.ndarray:
        """Kernel calls of one rank for one sample, of the same shape as ``c``."""
        ranks = np.asarray(c)
        return np.where((ranks > 1) & self.messages.hops, ranks + 2, 1)

    def sample_seconds(self, lengths: ArrayLike, c: int) -> np.ndarray:
        """Return the seconds of each sample alone on ``c`` ranks, shaped as ``lengths``."""
        s = np.asarray(lengths, dtype=np.float64)
        k = self.for_size(c)
        exposed = np.maximum(0.0, (k.comm - k.hide_token - k.hide_square * s) * s)
        return k.fixed + (k.square * s + k.token) * s + exposed + self.per_sample * self.calls(c)

    def ideal_seconds(self, lengths: ArrayLike) -> float:
        """Return the rank-seconds of compute alone, without overhead or communication."""
        s = np.asarray(lengths, dtype=np.float64)
        return float(np.sum((self.quadratic * (s + self.small_tile) + self.linear) * s))


@dataclass(frozen=True)
class ModelShape:
    """The sizes that a model's cost depends on.

    active_parameters: parameters that process a token (MoE: of active experts only).

    head_dim: channels of a head; where keys and values differ, the mean of the two.
    attention_layers: layers with attention, all of them by default; only these move keys and values.
    causal_share, seen_keys: a token of a sample of s tokens sees ``causal_share * s / 2 + seen_keys`` keys on average
    over the layers with attention; the defaults are a causal mask's. Sliding windows have less of the first.
    """

    layers: int
    attention_heads: int
    kv_heads: int
    head_dim: float
    active_parameters: float
    attention_layers: int | None = None
    causal_share: float = 1.0
    seen_keys: float = 0.0


@dataclass(frozen=True)
class Device:
    """Sustained rates of one GPU, in FLOP/s and bytes/s.

    launch_seconds: what a microbatch costs a layer whatever it holds; hop_seconds: latency of an exchange.
    call_seconds: what a kernel call for one sample costs a layer, 0 where one call does a whole pack or nobody knows.
    """

    attention_flops: float
    matmul_flops: float
    intra_bytes: float
    inter_bytes: float
    gpus_per_node: int = 8
    launch_seconds: float = 0.5e-3
    hop_seconds: float = 12.5e-6
    call_seconds: float = 0.0


def cost_model(
    shape: ModelShape,
    device: Device,
    *,
    tensor_parallel_size: int = 1,
    transport: str = RING.name,
) -> CostModel:
    """Derive a :class:`CostModel` from first principles.

    Attention is 4 FLOPs a channel, layer with attention, query and key that it sees (causally 2 a squared token)
    forward, and 2.5 times that backward; keys that a token sees however long its sample is go to the linear term. The
    rest is 6 FLOPs a token and parameter. Keys and values in bfloat16 travel once forward and twice backward (with
    their gradients); an all-to-all moves queries and outputs as well. A ring step costs 12.5 microseconds of latency a
    layer with attention, three times (one forward, two backward); a microbatch costs 0.5 milliseconds of launches a
    layer, whatever the layer is.
    Tensor parallelism divides work and traffic, and takes GPUs of a node away from CP.
    """
    tp = tensor_parallel_size
    channels = shape.attention_heads * shape.head_dim
    attending = shape.layers if shape.attention_layers is None else shape.attention_layers
    per_key = 4 * 3.5 * channels * attending / tp / device.attention_flops
    moved = 2 * shape.kv_heads * shape.head_dim + (2 * channels if TRANSPORTS[transport].cost.by_heads else 0)
    bytes_per_token = 3 * 2 * moved * attending / tp
    return CostModel(
        per_microbatch=device.launch_seconds * shape.layers,
        quadratic=per_key * shape.causal_share / 2,
        linear=6 * shape.active_parameters / tp / device.matmul_flops + per_key * shape.seen_keys,
        small_tile=256,
        kv_intra=bytes_per_token / device.intra_bytes,
        kv_inter=bytes_per_token / device.inter_bytes,
        ring_step=3 * device.hop_seconds * attending,
        overlap=0.9,
        ranks_per_node=max(1, device.gpus_per_node // tp),
        transport=transport,
        per_sample=device.call_seconds * attending,
    )


_8B = ModelShape(layers=32, attention_heads=32, kv_heads=8, head_dim=128, active_parameters=8.0e9)
_70B = ModelShape(layers=80, attention_heads=64, kv_heads=8, head_dim=128, active_parameters=70.6e9)
_MOE_3B = ModelShape(layers=48, attention_heads=32, kv_heads=4, head_dim=128, active_parameters=3.0e9)
_A100 = Device(attention_flops=170e12, matmul_flops=200e12, intra_bytes=200e9, inter_bytes=22e9)
_H100 = Device(attention_flops=350e12, matmul_flops=400e12, intra_bytes=300e9, inter_bytes=45e9)
_H200 = Device(attention_flops=380e12, matmul_flops=430e12, intra_bytes=300e9, inter_bytes=45e9)
# One core a rank, gloo over the loopback: orders of magnitude, for calibration to start from.
_CPU = Device(1e10, 3e10, 5e8, 5e8, launch_seconds=3e-3, hop_seconds=2e-4, call_seconds=2e-4)
# By a part of the device's name.
DEVICES: Mapping[str, Device] = {"A100": _A100, "H100": _H100, "H200": _H200, "cpu": _CPU}

PRESETS: Mapping[str, CostModel] = {
    # Llama-8B-like, attention near 350 TFLOP/s, the rest near 400, NVLink 300 GB/s, one 400 Gb/s NIC a GPU.
    "h100_8b": CostModel(0.015, 2.6e-9, 1.2e-4, 256, 1.3e-6, 8.7e-6, 1.2e-3, 0.9, 8),
    # A mixture of experts with 3B active parameters: a light linear part makes attention weigh more.
    "h100_moe3b": CostModel(0.025, 3.9e-9, 4.5e-5, 256, 1.0e-6, 6.5e-6, 1.8e-3, 0.9, 8),
    # FlexSP's published fit for A100s and full multi-head attention on a slow network, nothing overlapped.
    "a100_mha_slownet": CostModel(0.02, 5.128e-9, 1.84e-4, 256, 8.7e-6, 8.5e-5, 1.2e-3, 0.0, 8),
    "h100_70b_tp8": cost_model(_70B, _H100, tensor_parallel_size=8),
    "h200_8b": cost_model(_8B, _H200),
    "h200_70b_tp8": cost_model(_70B, _H200, tensor_parallel_size=8),
    "h200_moe3b": cost_model(_MOE_3B, _H200),
    "a100_8b": cost_model(_8B, _A100),
    "a100_moe3b": cost_model(_MOE_3B, _A100),
    "h100_8b_a2a": cost_model(_8B, _H100, transport=ALL_TO_ALL.name),
}
DEFAULT_COST = PRESETS["h100_8b"]
