"""Compute Transformer Engine's attention kernels in PyTorch.

They are fused attention, and the kernels for the rows of packed rings. Shapes and meanings as in Transformer Engine's
``cpp_extensions/fused_attn.py``, the rows of packs as in its ``common/fused_attn/context_parallel.cu``. Everything is
computed in float32 and rounded once.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

NAN = float("nan")


@dataclass(frozen=True)
class _Problem:
    """One call: layout of its tensors, rows that count and pairs that attend."""

    q_format: str
    kv_format: str
    mask: str
    window: tuple[int, int]
    bottom_right: bool
    scale: float
    softmax: str
    cu_q: Tensor
    cu_kv: Tensor
    padded_q: Tensor | None
    padded_kv: Tensor | None

    @classmethod
    def build(
        cls, layout: Any, mask: Any, softmax: Any, window: Any, bottom_right: bool, scale: float, *seqlens: Any
    ) -> _Problem:
        formats = layout.name.removeprefix("NVTE_").lower().split("_")
        q, kv = ("".join(c for c in f if c in "bsthd") for f in (formats[0], formats[-1]))
        name = mask.name.removeprefix("NVTE_").removesuffix("_MASK").lower()
        return cls(q, kv, name, tuple(window), bottom_right, scale, softmax.name, *seqlens)

    def rows(self, form: str, x: Tensor, i: int, kv: bool) -> Tensor:
        """Return a view [s, h, d] of a tensor's ``i``-th sequence, without its padding."""
        cu, padded = (self.cu_kv, self.padded_kv) if kv else (self.cu_q, self.padded_q)
        length = int(cu[i + 1] - cu[i])
        if form == "thd":
            start = int((cu if padded is None else padded)[i])
            return x[start : start + length]
        x = x[i] if form == "bshd" else x[:, i]
        return x[:length] if "padding" in self.mask else x

    def sequences(self, q: Tensor) -> int:
        return {"thd": len(self.cu_q) - 1, "bshd": q.shape[0], "sbhd": q.shape[1 if q.dim() == 4 else 0]}[self.q_format]

    def scores(self, q: Tensor, k: Tensor) -> Tensor:
        """Return scores [h, sq, skv], -inf where a pair does not attend."""
        heads = q.shape[1]
        k = k.float().repeat_interleave(heads // k.shape[1], dim=1)
        scores = torch.einsum("qhd,khd->hqk", q.float(), k) * self.scale
        rows, columns = (torch.arange(x.shape[0], device=q.device) for x in (q, k))
        rows, columns = rows[:, None], columns[None, :]
        diagonal = rows + (k.shape[0] - q.shape[0] if self.bottom_right else 0)
        left, right = self.window
        keep = torch.ones(q.shape[0], k.shape[0], dtype=torch.bool, device=q.device)
        if "causal" in self.mask:
            keep &= columns <= diagonal
        if left >= 0:
            keep &= columns >= diagonal - left
        if right >= 0:
            keep &= columns <= diagonal + right
        return scores.masked_fill(~keep, -torch.inf)


def _probabilities(scores: Tensor, stats: Tensor) -> Tensor:
    return torch.nan_to_num(torch.exp(scores - stats[..., None]), nan=0.0)


def _take_apart(arguments: tuple[Any, ...]) -> tuple[list[Any], list[Any], Any, list[bool], list[Any]]:
    """Split a call's arguments.

    Numbers and layout, types of mask and softmax, window, its flag, tensors and the rest. Later versions added layouts
    after the first (2.15) and another flag after the window (2.12).
    """
    at = next(i for i, value in enumerate(arguments) if isinstance(value, tuple | list))
    tensors = next(i for i, value in enumerate(arguments) if isinstance(value, Tensor))
    first = next(i for i, value in enumerate(arguments) if hasattr(value, "name"))
    window, flags = arguments[at], list(arguments[at + 1 : tensors])
    return list(arguments[: first + 1]), list(arguments[at - 2 : at]), window, flags, list(arguments[tensors:])


def _aligned_bottom_right(mask_type: Any, flags: list[bool]) -> bool:
    """Return the alignment: the flag decides if there is one, else the mask's name."""
    return flags[0] if flags else "BOTTOM_RIGHT" in mask_type.name


def fused_attn_fwd(*arguments: Any) -> list[Any]:
    """Return [output, log-sum-exp, random state], and the softmax's offset if any."""
    numbers, (mask_type, softmax_type), window, flags, tensors = _take_apart(arguments)
    max_seqlen_q, _, _, attn_scale, dropout, _, layout = numbers
    cu_q, cu_kv, q, k, v, _, padded_q, padded_kv, _, _, _, _, bias, offset, _, _, return_max_logit, _ = tensors
    assert not dropout and bias is None and not return_max_logit
    bottom_right = _aligned_bottom_right(mask_type, flags)
    problem = _Problem.build(
        layout, mask_type, softmax_type, window, bottom_right, attn_scale, cu_q, cu_kv, padded_q, padded_kv
    )
    packed = problem.q_format == "thd"
    assert not packed or (padded_q is not None and padded_kv is not None), "the extension looks there for packs' rows"
    assert all(x.is_contiguous() for x in (q, k, v)), "the extension is given addresses"
    # Packs begin as zeros, as in the extension. Other rows that no kernel writes have undefined values.
    out = q.new_full((*q.shape[:-1], v.shape[-1]), 0.0 if packed else NAN)
    heads = q.shape[-2]
    if packed:
        stats = torch.full((q.shape[0], heads, 1), NAN, device=q.device)
    else:
        stats = torch.full((problem.sequences(q), heads, max_seqlen_q, 1), NAN, device=q.device)
    for i, (rows, keys, values) in enumerate(_each(problem, q, k, v)):
        scores = problem.scores(rows, keys)
        terms = scores
        if offset is not None:
            terms = torch.cat([scores, offset.float().view(heads, 1, 1).expand(heads, len(rows), 1)], dim=-1)
        lse = torch.logsumexp(terms, dim=-1)
        values = values.float().repeat_interleave(heads // values.shape[1], dim=1)
        result = torch.einsum("hqk,khd->qhd", _probabilities(scores, lse), values)
        problem.rows(problem.q_format, out, i, kv=False).copy_(result)
        if packed:
            problem.rows("thd", stats, i, kv=False).copy_(lse.T[..., None])
        else:
            stats[i, :, : len(rows), 0] = lse
    found = [out, stats, torch.zeros(2, dtype=torch.int64, device=q.device)]
    return found if offset is None else [*found, offset]


def fused_attn_bwd(*arguments: Any) -> list[Any]:
    """Return [dq, dk, dv, None, gradient of the softmax's offset or None].

    The statistics and output may be those of a whole ring.
    """
    numbers, (mask_type, softmax_type), window, (*flags, _), tensors = _take_apart(arguments)
    _, _, attn_scale, dropout, _, layout = numbers
    cu_q, cu_kv, q, k, v, out, dout, *_, aux, padded_q, padded_kv, _, _, _, _ = tensors
    assert not dropout
    bottom_right = _aligned_bottom_right(mask_type, flags)
    problem = _Problem.build(
        layout, mask_type, softmax_type, window, bottom_right, attn_scale, cu_q, cu_kv, padded_q, padded_kv
    )
    stats, heads, packed = aux[0], q.shape[-2], problem.q_format == "thd"
    assert not packed or (padded_q is not None and padded_kv is not None), "the extension looks there for packs' rows"
    assert all(x.is_contiguous() for x in (q, k, v, out, dout, stats)), "the extension is given addresses"
    learnable = "VANILLA" not in problem.softmax
    dq, dk, dv = (torch.full_like(x, 0.0 if packed else NAN) for x in (q, k, v))
    d_offset = torch.zeros(1, heads, 1, 1, device=q.device) if learnable else None
    out, dout = out.reshape(*q.shape[:-1], -1), dout.reshape(*q.shape[:-1], -1)
    for i, (rows, keys, values) in enumerate(_each(problem, q, k, v)):
        o, do = (problem.rows(problem.q_format, x, i, kv=False).float() for x in (out, dout))
        lse = problem.rows("thd", stats, i, kv=False)[..., 0].T if packed else stats[i, :, : len(rows), 0]
        groups = heads // keys.shape[1]
        wide_k, wide_v = (x.float().repeat_interleave(groups, dim=1) for x in (keys, values))
        p = _probabilities(problem.scores(rows, keys), lse.float())
        delta = torch.einsum("qhd,qhd->hq", o, do)
        ds = p * (torch.einsum("qhd,khd->hqk", do, wide_v) - delta[..., None]) * attn_scale
        grads = {
            "q": torch.einsum("hqk,khd->qhd", ds, wide_k),
            "k": torch.einsum("hqk,qhd->khd", ds, rows.float()).unflatten(1, (-1, groups)).sum(2),
            "v": torch.einsum("hqk,qhd->khd", p, do).unflatten(1, (-1, groups)).sum(2),
        }
        problem.rows(problem.q_format, dq, i, kv=False).copy_(grads["q"])
        problem.rows(problem.kv_format, dk, i, kv=True).copy_(grads["k"])
        problem.rows(problem.kv_format, dv, i, kv=True).copy_(grads["v"])
        if d_offset is not None:
            weight = torch.exp(aux[-1].float().view(heads, 1) - lse.float())
            d_offset -= (weight * delta).sum(-1).view(1, heads, 1, 1)
    return [dq, dk, dv, None, d_offset]


def _each(problem: _Problem, q: Tensor, k: Tensor, v: Tensor) -> Iterator[tuple[Tensor, Tensor, Tensor]]:
    for i in range(problem.sequences(q)):
        yield (
            problem.rows(problem.q_format, q, i, kv=False),
            problem.rows(problem.kv_format, k, i, kv=True),
            problem.rows(problem.kv_format, v, i, kv=True),
        )


# Packs in rings. A sequence has two halves on a rank: one chunk of its beginning and one of its end.


def _halves(cu: Tensor) -> tuple[Tensor, Tensor]:
    """Return the numbers of all rows in first and in second halves, in order."""
    bounds = cu.tolist()
    first, second = [], []
    for start, end in itertools.pairwise(bounds):
        middle = start + (end - start) // 2
        first.append(torch.arange(start, middle, device=cu.device))
        second.append(torch.arange(middle, end, device=cu.device))
    return torch.cat(first), torch.cat(second)


def thd_read_half_tensor(tensor: Tensor, cu_seqlens: Tensor, half: int) -> Tensor:
    dim = 0 if tensor.dim() == 3 else 1
    rows = _halves(cu_seqlens)[half]
    found = tensor.index_select(dim, rows)
    missing = tensor.shape[dim] // 2 - len(rows)  # rows behind the last sequence
    return torch.cat([found, torch.full_like(found.narrow(dim, 0, 1), NAN).repeat_interleave(missing, dim)], dim)


def thd_second_half_lse_correction(lse: Tensor, step: Tensor, cu_seqlens: Tensor, packed: bool) -> None:
    """Add a step's [h, t/2] to the log-sum-exp [h, t] of second halves, in place."""
    assert packed, "cuDNN from 9.6 on keeps packs' statistics packed"
    rows = _halves(cu_seqlens)[1]
    lse[:, rows] = torch.logaddexp(lse[:, rows], step[:, : len(rows)])


def thd_read_second_half_lse(lse: Tensor, cu_seqlens: Tensor, packed: bool, length: int) -> Tensor:
    assert packed
    half = torch.zeros(lse.shape[0], length, device=lse.device)
    rows = _halves(cu_seqlens)[1]
    half[:, : len(rows)] = lse[:, rows]
    return half


def thd_out_correction(out: Tensor, step: Tensor, *arguments: Any) -> None:
    """Add a step's output [t or t/2, h, d] to ``out`` in place, scaled.

    The scale is its share of the whole softmax. From 2.20 on the previous sum is an argument too: the share is of the
    softmax up to this step, and ``out`` is rescaled.
    """
    *before, lse, lse_step, cu_seqlens, second, packed = arguments
    assert packed and out.dtype == step.dtype
    rows = _halves(cu_seqlens)[1] if second else torch.arange(int(cu_seqlens[-1]), device=out.device)
    share = torch.exp(lse_step[:, : len(rows)] - lse[:, rows]).T[..., None]
    part = step[: len(rows)]
    found = out[rows]
    if before:
        found = _scaled(found, torch.exp(before[0][:, rows] - lse[:, rows]).T[..., None])
    out[rows] = found + _scaled(part, share)


def _scaled(x: Tensor, share: Tensor) -> Tensor:
    """Return the product; zeros (padding, whose share may have any value) stay zero."""
    return torch.where(x == 0, torch.zeros_like(x), (x.float() * share).to(x.dtype))


def thd_grad_correction(grad: Tensor, step: Tensor, cu_seqlens: Tensor, first: str, second: str) -> None:
    """Add or copy a step's gradient to each half's rows in place, or skip a half.

    "none" twice reads nothing.
    """
    dim = 0 if grad.dim() == 3 else 1
    whole = "none" not in (first, second)
    done = 0
    for rows, action in zip(_halves(cu_seqlens), (first, second), strict=True):
        if action == "none":
            continue
        part = step.index_select(dim, rows) if whole else step.narrow(dim, 0, len(rows))
        target = grad.index_select(dim, rows)
        grad.index_copy_(dim, rows, part if action == "copy" else target + part)
        done += 1
    assert done


def thd_get_partitioned_indices(cu_seqlens: Tensor, total: int, size: int, rank: int) -> Tensor:
    """Return the rows of a packed sequence on one rank of a ring."""
    bounds, rows = cu_seqlens.tolist(), []
    for start, end in itertools.pairwise(bounds):
        chunk = (end - start) // (2 * size)
        for number in (rank, 2 * size - 1 - rank):
            rows.append(torch.arange(start + number * chunk, start + (number + 1) * chunk, device=cu_seqlens.device))
    return torch.cat(rows).to(torch.int32)


# Attention without a kernel for packs converts them: one row of a batch for each sequence, and back.


def convert_thd_to_bshd(x: Tensor, cu_seqlens: Tensor, batch: int, longest: int) -> Tensor:
    out = x.new_zeros(batch, longest, *x.shape[1:])
    for row, (start, end) in zip(out, itertools.pairwise(cu_seqlens.tolist()), strict=True):
        row[: end - start] = x[start:end]
    return out


def convert_bshd_to_thd(x: Tensor, cu_seqlens: Tensor, total: int) -> Tensor:
    out = x.new_zeros(total, *x.shape[2:])
    for row, (start, end) in zip(x, itertools.pairwise(cu_seqlens.tolist()), strict=True):
        out[start:end] = row[: end - start]
    return out


# From version 2.18 on.


def thd_cp_rank_order_to_sequence_order(x: Tensor, cu_seqlens: Tensor, size: int, total: int) -> Tensor:
    """Reorder rows from rank order to the order of the sequence."""
    out = torch.zeros_like(x)
    out[_ranks_rows(cu_seqlens, total, size)] = x
    return out


def thd_sequence_order_to_cp_rank_order(x: Tensor, cu_seqlens: Tensor, size: int, total: int) -> Tensor:
    return x[_ranks_rows(cu_seqlens, total, size)]


def _ranks_rows(cu_seqlens: Tensor, total: int, size: int) -> Tensor:
    return torch.cat([thd_get_partitioned_indices(cu_seqlens, total, size, rank) for rank in range(size)]).long()


def thd_copy_valid_tokens_from_per_split_to_rank_local(
    out: Tensor, x: Tensor, cu_seqlens_padded: Tensor, cu_seqlens: Tensor
) -> None:
    for start, length in zip(cu_seqlens_padded.tolist(), torch.diff(cu_seqlens).tolist(), strict=False):
        out[start : start + length] = x[start : start + length]
