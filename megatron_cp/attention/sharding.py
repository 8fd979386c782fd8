"""Zigzag sharding of sequences over context-parallel ranks: index arithmetic only.

A sequence of length S is cut into 2*n equal chunks and rank r of n holds chunks r and 2*n-1-r, in this order. Under a
causal mask every rank then has the same number of query-key pairs (to within one chunk's diagonal). megatron-core's
rotary embedding and batch slicing assume this placement. In a pack (``thd``) every sequence is cut separately, and a
rank's rows are its two chunks of the first sequence, then of the second, and so on.

Needs no torch and no process group; tensors are used through methods that they share with NumPy arrays.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

if TYPE_CHECKING:
    import torch


class RowSpan(NamedTuple):
    """Rows [row, row + length): consecutive tokens from ``position`` on."""

    row: int
    length: int
    position: int
    sequence: int


@dataclass(frozen=True)
class Layout:
    """Sequences on ``size`` ranks, by real and padded lengths.

    One unpacked sequence is a layout of one sequence without padding. Frozen and hashable, as a cache key of plans.
    """

    lengths: tuple[int, ...]
    padded: tuple[int, ...]
    size: int

    def __post_init__(self) -> None:
        if len(self.lengths) != len(self.padded):
            raise ValueError(f"cu_seqlens has {len(self.lengths)} sequences, cu_seqlens_padded {len(self.padded)}")
        for index, (length, padded) in enumerate(zip(self.lengths, self.padded, strict=True)):
            if not 0 <= length <= padded:
                raise ValueError(
                    f"cu_seqlens: sequence {index} has {length} tokens but cu_seqlens_padded gives it {padded}"
                )
            if self.size > 1 and padded % (2 * self.size):
                raise ValueError(
                    f"cu_seqlens_padded: sequence {index} occupies {padded} tokens, which is not divisible by "
                    f"2 * context-parallel size = {2 * self.size}; pad it to {_round_up(padded, 2 * self.size)}"
                )

    @classmethod
    def dense(cls, seq_length: int, size: int) -> Layout:
        """Build the layout of one unpacked sequence of ``seq_length`` tokens in total."""
        return cls((seq_length,), (seq_length,), size)

    @classmethod
    def packed(cls, cu_seqlens: Sequence[int], cu_seqlens_padded: Sequence[int] | None, size: int) -> Layout:
        """Build a pack's layout from cumulative real and padded lengths (default: equal)."""
        padded = cu_seqlens if cu_seqlens_padded is None else cu_seqlens_padded
        _check_offsets("cu_seqlens", cu_seqlens)
        _check_offsets("cu_seqlens_padded", padded)
        return cls(_differences(cu_seqlens), _differences(padded), size)

    def resized(self, size: int) -> Layout:
        """Return the same sequences on another number of ranks."""
        return Layout(self.lengths, self.padded, size)

    @functools.cached_property
    def rows(self) -> int:
        """Rows of the sequences on each rank."""
        return sum(self.padded) // self.size

    def spans(self, rank: int) -> tuple[RowSpan, ...]:
        """Return the real tokens on ``rank``, in row order; chunks that touch join."""
        return _spans(self, rank)

    @property
    def is_dense(self) -> bool:
        """Whether the layout is one sequence without padding."""
        return len(self.lengths) == 1 and self.lengths == self.padded

    def gathered_spans(self) -> tuple[RowSpan, ...]:
        """Return the spans of all ranks' tokens after all-gather.

        Dense: all first chunks by rank, then all second chunks, as two gathers give them without a copy. Otherwise in
        the order of sequences: each of many short pieces would cost a kernel call.
        """
        if not self.is_dense or self.size == 1:
            return self.resized(1).spans(0)
        chunk = self.lengths[0] // (2 * self.size)
        places = [*range(self.size), *reversed(range(self.size, 2 * self.size))]
        return tuple(RowSpan(index * chunk, chunk, place * chunk, 0) for index, place in enumerate(places))


@functools.lru_cache(maxsize=4096)
def _spans(layout: Layout, rank: int) -> tuple[RowSpan, ...]:
    spans: list[RowSpan] = []
    row = 0
    for sequence, (length, padded) in enumerate(zip(layout.lengths, layout.padded, strict=True)):
        for start, end in _chunks(padded, rank, layout.size):
            valid = min(length, end) - start
            if valid > 0:
                last = spans[-1] if spans else None
                if last and last.sequence == sequence and last.position + last.length == start:
                    spans[-1] = RowSpan(last.row, last.length + valid, last.position, sequence)
                else:
                    spans.append(RowSpan(row, valid, start, sequence))
            row += end - start
    return tuple(spans)


def _chunks(length: int, rank: int, size: int) -> tuple[tuple[int, int], ...]:
    """Return the token ranges of one sequence on ``rank``."""
    if size == 1:
        return ((0, length),)
    chunk = length // (2 * size)
    return tuple((index * chunk, (index + 1) * chunk) for index in (rank, 2 * size - 1 - rank))


def partition_indices(cu_seqlens_padded: Any, cp_rank: int, cp_size: int) -> Any:
    """Return the positions in the pack of the tokens of ``cp_rank``, in local order.

    ``cu_seqlens_padded``: cumulative padded lengths [num_sequences + 1] as a list, NumPy array or torch tensor; each
    sequence must be divisible by ``2 * cp_size``. Returns int64 [tokens / cp_size]: a torch tensor on the same device
    for a torch tensor, else a NumPy array. Raises ValueError for other lengths or a rank out of range.
    """
    _check_rank(cp_rank, cp_size)
    offsets = _as_list(cu_seqlens_padded, "cu_seqlens_padded")
    _check_offsets("cu_seqlens_padded", offsets)
    Layout.packed(offsets, None, cp_size)
    pieces = [
        np.arange(offset + start, offset + end, dtype=np.int64)
        for offset, following in pairwise(offsets)
        for start, end in _chunks(following - offset, cp_rank, cp_size)
    ]
    indices = np.concatenate(pieces) if pieces else np.zeros(0, dtype=np.int64)
    if hasattr(cu_seqlens_padded, "device") and not isinstance(cu_seqlens_padded, np.ndarray):
        import torch

        return torch.from_numpy(indices).to(cu_seqlens_padded.device, non_blocking=True)
    return indices


def shard_sequence(x: Any, dim: int, cp_rank: int, cp_size: int, cu_seqlens_padded: Any = None) -> Any:
    """Return the zigzag shard of ``x`` along ``dim`` on ``cp_rank``.

    With ``cu_seqlens_padded`` each sequence is sharded separately. ``x``: a torch tensor or NumPy array whose ``dim``
    holds whole sequences. Raises ValueError if ``2 * cp_size`` does not divide the length. Differentiable for tensors.
    With one rank ``x`` itself is returned.
    """
    _check_rank(cp_rank, cp_size)
    dim = _check_dim(x, dim)
    length = x.shape[dim]
    if cu_seqlens_padded is None:
        if cp_size > 1 and length % (2 * cp_size):
            raise ValueError(
                f"x has length {length} along dim {dim}, which is not divisible by 2 * cp_size = {2 * cp_size}; "
                f"pad it to {_round_up(length, 2 * cp_size)}"
            )
        offsets = [0, length]
    else:
        offsets = _as_list(cu_seqlens_padded, "cu_seqlens_padded")
        if offsets[-1] != length:
            raise ValueError(f"cu_seqlens_padded ends at {offsets[-1]} but x has length {length} along dim {dim}")
    if cp_size == 1:
        _check_offsets("cu_seqlens_padded", offsets)
        return x
    return _take(x, partition_indices(offsets, cp_rank, cp_size), dim)


def unshard_sequence(shards: Sequence[Any], dim: int, cu_seqlens_padded: Any = None) -> Any:
    """Join ``shards`` (in rank order): the inverse of :func:`shard_sequence`."""
    if not shards:
        raise ValueError("shards is empty: pass one tensor or array per context-parallel rank")
    dim = _check_dim(shards[0], dim)
    size = len(shards)
    total = sum(shard.shape[dim] for shard in shards)
    offsets = [0, total] if cu_seqlens_padded is None else _as_list(cu_seqlens_padded, "cu_seqlens_padded")
    if offsets[-1] != total:
        raise ValueError(f"cu_seqlens_padded ends at {offsets[-1]} but the shards hold {total} along dim {dim}")
    order = np.concatenate([partition_indices(offsets, rank, size) for rank in range(size)])
    if isinstance(shards[0], np.ndarray):
        joined: Any = np.concatenate(shards, axis=dim)
    else:
        import torch

        joined = torch.cat(list(shards), dim=dim)
    return _take(joined, np.argsort(order), dim)


@functools.lru_cache(maxsize=16)  # megabytes each
def regroup_order(layout: Layout, group_size: int) -> np.ndarray:
    """Return the row order that joins the shards of neighbouring ranks.

    ``layout`` is over all ranks. Ranks p*A .. p*A+A-1 together hold, for every sequence, exactly the rows of rank p
    of ``layout.resized(size / A)``. Entry i is the row, in the concatenation of their shards in rank order, of row i
    of that common shard. The order is the same for every p, so it is computed for p = 0.
    """
    coarse = layout.size // group_size
    rows = layout.rows
    position_to_row = np.full(sum(layout.padded), -1, dtype=np.int64)
    offsets = np.concatenate([[0], np.cumsum(layout.padded)]).astype(np.int64).tolist()
    for rank in range(group_size):
        indices = partition_indices(offsets, rank, layout.size)
        position_to_row[indices] = rank * rows + np.arange(rows)
    order = position_to_row[partition_indices(offsets, 0, coarse)]
    order.setflags(write=False)
    return order


@dataclass(frozen=True)
class RowRun:
    """Rows [row, row + length) of a shard, at ``common_row`` in the common shard."""

    row: int
    common_row: int
    length: int

    @property
    def rows(self) -> slice:
        return slice(self.row, self.row + self.length)

    @property
    def common(self) -> slice:
        return slice(self.common_row, self.common_row + self.length)


@functools.lru_cache(maxsize=256)
def regroup_runs(layout: Layout, group_size: int) -> tuple[tuple[RowRun, ...], ...]:
    """Return :func:`regroup_order` as runs of rows for each rank; one or two if dense."""
    order = regroup_order(layout, group_size)
    starts = np.flatnonzero((np.diff(order, prepend=-1) != 1) | (order % layout.rows == 0))
    runs: list[list[RowRun]] = [[] for _ in range(group_size)]
    for start, end in pairwise([*starts.tolist(), len(order)]):
        rank, row = divmod(int(order[start]), layout.rows)
        runs[rank].append(RowRun(row, start, end - start))
    return tuple(map(tuple, runs))


def read_offsets(cu_seqlens: torch.Tensor | Sequence[int] | np.ndarray) -> tuple[int, ...]:
    """Return cumulative lengths as integers.

    The host waits for a GPU's, unless :func:`send_offsets` made them.
    """
    version, offsets = getattr(cu_seqlens, "known_offsets", (None, ()))
    if version is not None and version == getattr(cu_seqlens, "_version", None):
        return offsets
    return tuple(_as_list(cu_seqlens, "cu_seqlens"))


def send_offsets(offsets: Sequence[int], device: torch.device | str) -> torch.Tensor:
    """Send cumulative lengths as an int32 tensor to ``device``.

    :func:`read_offsets` reads them back without waiting while the tensor is unchanged.
    """
    import torch

    from megatron_cp.parallel.transfer import send

    sent: Any = send(torch.tensor(offsets, dtype=torch.int32), device)
    sent.known_offsets = sent._version, tuple(offsets)
    return sent


def _as_list(offsets: Any, name: str) -> list[int]:
    values = offsets.tolist() if hasattr(offsets, "tolist") else list(offsets)
    if not isinstance(values, list) or not all(isinstance(value, int) for value in values):
        raise ValueError(f"{name} must be a one-dimensional list of integers, got {_shorten(values)}")
    return values


def _take(x: Any, indices: np.ndarray, dim: int) -> Any:
    if isinstance(x, np.ndarray):
        return np.take(x, indices, axis=dim)
    import torch

    return x.index_select(dim, torch.from_numpy(indices).to(x.device, non_blocking=True))


def _check_offsets(name: str, offsets: Sequence[int]) -> None:
    if len(offsets) < 1 or offsets[0] != 0 or any(b < a for a, b in pairwise(offsets)):
        raise ValueError(f"{name} must start at 0 and never fall, got {_shorten(offsets)}")


def _check_rank(cp_rank: int, cp_size: int) -> None:
    if cp_size < 1:
        raise ValueError(f"cp_size must be at least 1, got {cp_size}")
    if not 0 <= cp_rank < cp_size:
        raise ValueError(f"cp_rank must be in [0, {cp_size}) for cp_size {cp_size}, got {cp_rank}")


def _check_dim(x: Any, dim: int) -> int:
    if not -x.ndim <= dim < x.ndim:
        raise ValueError(f"dim {dim} is out of range for x with {x.ndim} dimensions")
    return dim % x.ndim


def _differences(offsets: Sequence[int]) -> tuple[int, ...]:
    return tuple(b - a for a, b in pairwise(offsets))


def _round_up(value: int, multiple: int) -> int:
    return -(-value // multiple) * multiple


def _shorten(values: Any) -> str:
    text = str(list(values) if isinstance(values, tuple) else values)
    return text if len(text) <= 80 else text[:77] + "..."
