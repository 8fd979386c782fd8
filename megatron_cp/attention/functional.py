"""``context_parallel_attention``: check arguments and run the transport."""

from __future__ import annotations

import functools
import math
import pkgutil
from numbers import Real
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from megatron_cp.attention.context import AttentionCall, CPContext, GroupOrPair
from megatron_cp.attention.eager import never_compiled
from megatron_cp.attention.placement.layout import AnyLayout, PlacedLayout
from megatron_cp.attention.sharding import Layout, read_offsets
from megatron_cp.attention.stages import StagedAttention
from megatron_cp.attention.tiles import Mask
from megatron_cp.attention.transports.all_to_all import Inner
from megatron_cp.attention.transports.comm import Peers
from megatron_cp.attention.transports.registry import RING
from megatron_cp.attention.transports.ring import ring_attention

DTYPES = (torch.float32, torch.bfloat16, torch.float16, torch.float64)
_FLOAT32 = torch.finfo(torch.float32)  # dtype in which kernels apply the scale


@never_compiled
def context_parallel_attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    *,
    group: GroupOrPair,
    comm_type: str = RING.name,
    causal: bool = True,
    window_size: tuple[int, int] | None = None,
    cu_seqlens: Tensor | None = None,
    cu_seqlens_padded: Tensor | None = None,
    placed: PlacedLayout | None = None,
    softmax_scale: float | None = None,
    softmax_offset: Tensor | None = None,
    deterministic: bool = False,
) -> Tensor:
    """Compute self-attention over a sequence sharded over ``group``; differentiable.

    Shapes: ``query`` [s_local, b, heads, d_qk], ``key`` [s_local, b, kv_heads, d_qk], ``value`` [s_local, b, kv_heads,
    d_v], where kv_heads divides heads: this rank's zigzag shards (see ``shard_sequence``). With ``cu_seqlens`` they are
    packs without the batch dimension, [t_local, heads, d], each sequence sharded separately. All three have one
    floating dtype. Returns [s_local, b, heads, d_v] or [t_local, heads, d_v] in that dtype.

    Args:
        group: the context-parallel group; for two levels (``a2a+p2p``) the pair (a2a_group, p2p_group), where the
            shard's number is ``p2p_rank * a2a_size + a2a_rank``.
        comm_type: ``p2p`` (ring), ``all_gather``, ``a2a`` (all-to-all), ``a2a+p2p``, or another registered transport.
        causal: token i sees tokens up to i; otherwise all tokens of its sequence.
        window_size: (left, right), how many tokens back and ahead a token sees, -1 for no limit; with ``causal`` none
            ahead.
        cu_seqlens: int [sequences + 1], cumulative numbers of real tokens of the whole pack, equal on every rank.
        cu_seqlens_padded: the same with each sequence's padding (default: none). Every padded length must be a multiple
            of twice the group's size. Padding, and rows after the last sequence, give zeros and get zero gradients.
        placed: a pack whose documents are not in zigzag (``PlacedLayout.balanced``), instead of ``cu_seqlens``: each
            rank has the rows of ``PlacedLayout.shard``. Every rank passes an equal one.
        softmax_scale: factor on the scores, default ``1 / sqrt(d_qk)``; may be 0 or negative.
        softmax_offset: [heads], the score per head of one more key whose value is zero (attention sink); zeros for
            ``off-by-one``. Its gradient is this rank's part: sum it over the ranks of the group.
        deterministic: the same bits on every run. CPU kernels always are; CUDA kernels are chosen for it.

    ``torch.compile`` does not trace it: a compiled caller breaks its graph here (so not with ``fullgraph=True``).

    Raises ValueError with the argument's name for invalid values, sizes, dtypes, devices or groups. With
    TORCH_DISTRIBUTED_DEBUG=INFO or DETAIL the ranks first compare their arguments, and all raise if any differ.
    """
    mask = Mask.build(causal, window_size)
    if softmax_scale is not None and not (isinstance(softmax_scale, Real) and abs(softmax_scale) <= _FLOAT32.max):
        raise ValueError(f"softmax_scale must be a finite number (of float32), got {softmax_scale!r}")
    if softmax_offset is not None and not isinstance(softmax_offset, Tensor):
        raise ValueError(f"softmax_offset must be a tensor of one number per head, got {softmax_offset!r}")
    return attend_in_context(
        CPContext.build(comm_type, group),
        query,
        key,
        value,
        mask=mask,
        cu_seqlens=cu_seqlens,
        cu_seqlens_padded=cu_seqlens_padded,
        placed=placed,
        softmax_scale=softmax_scale,
        softmax_offset=softmax_offset,
        deterministic=deterministic,
    )


@never_compiled
def attend_in_context(context: CPContext, query: Tensor, key: Tensor, value: Tensor, **options: Any) -> Tensor:
    """Compute :func:`context_parallel_attention` in a context built before.

    ``options``: those of :func:`stages_in_context`.
    """
    packed = query.ndim == 3
    out = stages_in_context(context, query, key, value, **options).attend()
    return out.squeeze(1) if packed else out


@never_compiled
def stages_in_context(
    context: CPContext,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    *,
    mask: Mask,
    cu_seqlens: Tensor | None = None,
    cu_seqlens_padded: Tensor | None = None,
    placed: PlacedLayout | None = None,
    softmax_scale: float | None = None,
    softmax_offset: Tensor | None = None,
    deterministic: bool = False,
    transformer_engine: bool = False,
    max_logits: Tensor | None = None,
) -> StagedAttention:
    """Check a call of attention, and return it, not yet computed.

    On a GPU ``transformer_engine`` lets its kernels compute what each rank has to. ``max_logits`` [heads] is raised, in
    place, to each head's largest scaled score of the pairs that this rank computes: all ranks' maximum is the whole's.
    """
    packed = cu_seqlens is not None or placed is not None
    if context.size > 1 and dist.get_debug_level() != dist.DebugLevel.OFF:
        tensors = {"query": query, "key": key, "value": value, "softmax_offset": softmax_offset}
        facts: dict[str, Any] = {n: None if x is None else (tuple(x.shape), str(x.dtype)) for n, x in tensors.items()}
        offsets = {"cu_seqlens": cu_seqlens, "cu_seqlens_padded": cu_seqlens_padded}
        facts |= {name: None if x is None else read_offsets(x) for name, x in offsets.items()}
        facts["placed"] = placed
        facts |= {"comm_type": context.comm_type, "causal and window_size": mask, "softmax_scale": softmax_scale}
        context.check_consistency(facts)
    _check_tensors(query, key, value, packed, softmax_offset)
    layout = _layout_of(context, query.shape[0], cu_seqlens, cu_seqlens_padded, placed)
    if packed:
        query, key, value = (x.unsqueeze(1) for x in (query, key, value))
    padding = query.shape[0] - layout.rows
    scale = 1 / math.sqrt(query.shape[-1]) if softmax_scale is None else float(softmax_scale)
    query, scale = _with_positive_scale(query, scale)
    if padding:  # rows after the last sequence are excluded
        query, key, value = (x[: layout.rows] for x in (query, key, value))
    call = AttentionCall(layout, mask, scale, deterministic, transformer_engine, max_logits)
    inner, peers = _transport(context, layout.rows)
    return StagedAttention(inner, [query, key, value], softmax_offset, call, peers, padding)


def _transport(context: CPContext, rows: int) -> tuple[Inner, Peers]:
    """Return attention of exchanged heads, and the ranks that exchange them."""
    if rows == 0 or context.size == 1:
        return functools.partial(ring_attention, peers=Peers.alone()), Peers.alone()
    run = pkgutil.resolve_name(context.transport.run)
    return functools.partial(run, peers=context.p2p_peers), context.a2a_peers


def _layout_of(
    context: CPContext,
    rows: int,
    cu_seqlens: Tensor | None,
    cu_seqlens_padded: Tensor | None,
    placed: PlacedLayout | None,
) -> AnyLayout:
    """Return the layout of ``rows`` on each rank.

    Raises ValueError if the arguments contradict each other, the rows or the ranks.
    """
    if placed is not None:
        if cu_seqlens is not None or cu_seqlens_padded is not None:
            raise ValueError("placed and cu_seqlens are both given: pass the pack's lengths by one of them")
        if placed.size != context.size or placed.rows > rows:
            raise ValueError(
                f"placed has {placed.rows} rows on each of {placed.size} ranks, but query has {rows} on "
                f"{context.size} ranks"
            )
        return placed
    if cu_seqlens is None:
        if cu_seqlens_padded is not None:
            raise ValueError("cu_seqlens_padded is given without cu_seqlens: pass the real lengths too")
        if context.size > 1 and rows % 2:
            raise ValueError(f"query has {rows} rows: a zigzag shard has two equal chunks, so rows must be even")
        return Layout.dense(rows * context.size, context.size)
    padded = None if cu_seqlens_padded is None else read_offsets(cu_seqlens_padded)
    layout = Layout.packed(read_offsets(cu_seqlens), padded, context.size)
    if layout.rows > rows:
        name = "cu_seqlens" if padded is None else "cu_seqlens_padded"
        raise ValueError(
            f"{name} ends at {sum(layout.padded)}, which is {layout.rows} rows for each of {context.size} ranks, "
            f"but query has {rows}"
        )
    return layout


def _with_positive_scale(query: Tensor, scale: float) -> tuple[Tensor, float]:
    """Return query and scale with the same scores, and a scale above 0.

    Kernels mask scores with -inf and then scale them: with a scale of 0 or less the masked ones become nan or inf.
    """
    if scale >= _FLOAT32.tiny:
        return query, scale
    return (-query, -scale) if scale <= -_FLOAT32.tiny else (query * scale, 1.0)


def _check_tensors(query: Tensor, key: Tensor, value: Tensor, packed: bool, softmax_offset: Tensor | None) -> None:
    shape = "[t_local, heads, head_dim]" if packed else "[s_local, batch, heads, head_dim]"
    for name, x in (("query", query), ("key", key), ("value", value)):
        if x.ndim != (3 if packed else 4):
            raise ValueError(f"{name} must be {shape}, got shape {tuple(x.shape)}")
        if x.dtype not in DTYPES:
            raise ValueError(f"{name} has dtype {x.dtype}; supported are {', '.join(map(str, DTYPES))}")
        if x.dtype != query.dtype:
            raise ValueError(f"{name} has dtype {x.dtype} but query has {query.dtype}")
        if x.device != query.device:
            raise ValueError(f"{name} is on {x.device} but query is on {query.device}")
        if x.shape[:-2] != query.shape[:-2]:
            raise ValueError(
                f"{name} is {tuple(x.shape[:-2])} in all but heads and head dim, query is {tuple(query.shape[:-2])}"
            )
    if key.shape[-2] != value.shape[-2]:
        raise ValueError(f"value has {value.shape[-2]} heads but key has {key.shape[-2]}")
    if key.shape[-2] == 0 or query.shape[-2] % key.shape[-2]:
        raise ValueError(f"query's {query.shape[-2]} heads are not divisible by key's {key.shape[-2]} heads")
    if key.shape[-1] != query.shape[-1]:
        raise ValueError(f"key has head dim {key.shape[-1]} but query has {query.shape[-1]}")
    if softmax_offset is not None and softmax_offset.shape != query.shape[-2:-1]:
        raise ValueError(f"softmax_offset has shape {tuple(softmax_offset.shape)}, expected ({query.shape[-2]},)")
