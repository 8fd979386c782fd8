"""The cost in seconds of a packed microbatch on ``c`` context parallel ranks.

The scheduler needs nothing of a microbatch but three sums: its tokens, and its lengths squared and cubed.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
from numpy.typing import ArrayLike

from megatron_cp.attention.transports.registry import RING, TRANSPORTS, CostTerms
from megatron_cp.dynamic_cp.types import is_in_pieces

# The coefficients of a cost model that measured times can be fitted to.
FITTED = ("per_microbatch", "quadratic", "linear", "kv_intra", "kv_inter", "ring_step", "per_sample")


class GroupCost(NamedTuple):
    """The cost model for one group size.

    With T = tokens of the microbatch, S and C = sums of the squared and cubed lengths, and X = C / S for packs in
    pieces, otherwise T: ``seconds = fixed + square * S + token * T + cut * X
    + max(0, comm * X - hide_square * S - hide_token * T - hide_cut * X)``.
    """

    fixed: float
    square: float
    token: float
    comm: float
    hide_square: float
    hide_token: float
    cut: float = 0.0
    hide_cut: float = 0.0
    in_pieces: bool = False

    def seconds(self, squares: float, tokens: float, cubes: float) -> float:
        cut = cubes / squares if self.in_pieces and squares else tokens
        exposed = self.comm * cut - self.hide_square * squares - self.hide_token * tokens - self.hide_cut * cut
        compute = self.fixed + self.square * squares + self.token * tokens + self.cut * cut
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
    placement: as ``model.packed_placement``. ``zigzag`` cuts every sample over all c ranks. With ``balanced`` most are
    whole on one rank. Only sum s_i^3 / sum s_i^2 tokens count as cut: as many as the samples have on average, weighted
    by their attention. One sample alone is cut like in zigzag, and c equal ones are one rank's each. Only cut tokens
    have small tiles on all ranks, messages, and several calls.
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
    placement: str = "zigzag"

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
        if self.placement not in ("zigzag", "balanced"):
            raise ValueError(f"CostModel.placement={self.placement!r}: must be zigzag or balanced")
        if self.quadratic == 0 and self.linear == 0:
            raise ValueError("CostModel: quadratic and linear are both 0, so no sample would cost anything")

    @property
    def messages(self) -> CostTerms:
        return TRANSPORTS[self.transport].cost

    def in_pieces(self, c: int) -> bool:
        """Return whether a group of ``c`` ranks keeps most samples of a pack whole.

        An all-to-all sends all tokens, and then has whole samples anyway.
        """
        return is_in_pieces(self.placement, c) and not self.messages.by_heads

    def for_size(self, c: int) -> GroupCost:
        """Return the coefficients for groups of ``c`` ranks."""
        if not c >= 1:
            raise ValueError(f"c={c}: a group has at least 1 rank")
        square, tile = self.quadratic / c, self.quadratic * self.small_tile
        if c == 1:
            return GroupCost(self.per_microbatch, square, tile + self.linear, 0.0, 0.0, 0.0)
        kv = (self.kv_intra if c <= self.ranks_per_node else self.kv_inter) * (c - 1) / c
        kv = kv / c if self.messages.by_heads else kv
        whole, cut, in_pieces = tile, 0.0, self.in_pieces(c)
        if in_pieces:
            whole, cut = tile / c, tile * (c - 1) / c
        steps, hidden = (c - 1, self.overlap) if self.messages.hops else (1, 0.0)
        return GroupCost(
            self.per_microbatch + steps * self.ring_step,
            square,
            whole + self.linear / c,
            kv,
            hidden * square,
            hidden * whole,
            cut,
            hidden * cut,
            in_pieces,
        )

    def seconds(self, lengths: Sequence[int] | np.ndarray, c: int) -> float:
        """Return the seconds of a microbatch that packs samples of ``lengths`` tokens.

        ValueError for ``c`` below 1.
        """
        s = np.asarray(lengths, dtype=np.float64)
        calls = self.per_sample * self.calls_of_pack(len(s), c)
        return self.for_size(c).seconds(float(s @ s), float(s.sum()), float((s * s) @ s)) + calls

    def calls_of_pack(self, samples: int, c: int) -> float:
        """Count one rank's kernel calls for a pack of ``samples``."""
        calls = float(self.calls(c))
        return (samples - 1) / c + calls if self.in_pieces(c) else samples * calls

    def calls(self, c: ArrayLike) -> np.ndarray:
        """Count one rank's kernel calls for one sample, in the shape of ``c``."""
        ranks = np.asarray(c)
        return np.where((ranks > 1) & self.messages.hops, ranks + 2, 1)

    def sample_seconds(self, lengths: ArrayLike, c: int) -> np.ndarray:
        """Return the seconds of each sample alone on ``c`` ranks, shaped as ``lengths``."""
        s = np.asarray(lengths, dtype=np.float64)
        k = self.for_size(c)
        exposed = np.maximum(0.0, (k.comm - (k.hide_token + k.hide_cut) - k.hide_square * s) * s)
        return k.fixed + (k.square * s + (k.token + k.cut)) * s + exposed + self.per_sample * self.calls(c)

    def added_seconds(self, lengths: ArrayLike, c: int) -> np.ndarray:
        """Return the seconds that each sample adds to a pack on ``c`` ranks."""
        if not self.in_pieces(c):
            return self.sample_seconds(lengths, c) - self.for_size(c).fixed
        return (self.sample_seconds(lengths, 1) - self.per_microbatch) / c

    def ideal_seconds(self, lengths: ArrayLike) -> float:
        """Return the rank-seconds of compute alone, without overhead or communication."""
        s = np.asarray(lengths, dtype=np.float64)
        return float(np.sum((self.quadratic * (s + self.small_tile) + self.linear) * s))


# Published numbers; estimate/prices.py derives others from the time model.
PRESETS: Mapping[str, CostModel] = {
    # Llama-8B-like, attention near 350 TFLOP/s, the rest near 400, NVLink 300 GB/s, one 400 Gb/s NIC a GPU.
    "h100_8b": CostModel(0.015, 2.6e-9, 1.2e-4, 256, 1.3e-6, 8.7e-6, 1.2e-3, 0.9, 8),
    # A mixture of experts with 3B active parameters: a light linear part makes attention weigh more.
    "h100_moe3b": CostModel(0.025, 3.9e-9, 4.5e-5, 256, 1.0e-6, 6.5e-6, 1.8e-3, 0.9, 8),
    # FlexSP's published fit for A100s and full multi-head attention on a slow network, nothing overlapped.
    "a100_mha_slownet": CostModel(0.02, 5.128e-9, 1.84e-4, 256, 8.7e-6, 8.5e-5, 1.2e-3, 0.0, 8),
}
DEFAULT_COST = PRESETS["h100_8b"]
