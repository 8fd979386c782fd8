"""Transformer Engine's fused attention (cuDNN) as a kernel of our transports.

For whole sequences and packs. Transformer Engine's context parallelism calls the same two functions with each block of
a ring, and likewise returns a block's log-sum-exp and passes in the total. PyTorch's cuDNN call supports no packs and
no windows.
"""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable, Sequence
from dataclasses import fields
from typing import Any

import torch
from torch import Tensor

from megatron_cp.attention.context import AttentionCall
from megatron_cp.attention.kernels.base import Gradients, Result
from megatron_cp.attention.kernels.cuda import CudaFlash, flash_window
from megatron_cp.attention.kernels.launches import Launch, Lengths


class TeFused(CudaFlash):
    """Transformer Engine's fused attention, with FlashAttention as the fallback."""

    def forward(self, q: Tensor, k: Tensor, v: Tensor, launch: Launch, call: AttentionCall) -> Result:
        arguments = _arguments(q, k, v, launch, call)
        if arguments is None:
            return super().forward(q, k, v, launch, call)
        q, k, v = (_rows(x, launch) for x in (q, k, v))
        forward, _ = _functions()
        out, aux, *_ = forward(is_training=True, q=q, k=k, v=v, **arguments)
        lse = aux[0].squeeze(-1)
        return _back(out, launch), lse if launch.q_lengths is None else lse.t().unsqueeze(0)

    def backward(self, parts: Sequence[Tensor], lse: Tensor, launch: Launch, call: AttentionCall) -> Gradients:
        _, q, k, v, _ = parts
        arguments = _arguments(q, k, v, launch, call)
        if arguments is None:
            return super().backward(parts, lse, launch, call)
        dout, q, k, v, out = (_rows(x, launch) for x in parts)
        lse = (lse if launch.q_lengths is None else lse.squeeze(0).t()).contiguous().unsqueeze(-1)
        unused = torch.empty(2, dtype=torch.int64, device=q.device)  # random state of dropout, which is 0
        _, backward = _functions()
        dq, dk, dv, *_ = backward(
            q=q,
            k=k,
            v=v,
            o=out,
            d_o=dout,
            aux_ctx_tensors=[lse, unused],
            deterministic=call.deterministic,
            **arguments,
        )
        return _back(dq, launch), _back(dk, launch), _back(dv, launch)


def _arguments(q: Tensor, k: Tensor, v: Tensor, launch: Launch, call: AttentionCall) -> dict[str, Any] | None:
    """Build the arguments of both passes; None without a fused kernel."""
    left, right = window = flash_window(launch.tile)
    packed = launch.q_lengths is not None
    if window == (-1, -1):
        mask = "padding" if packed else "no_mask"
    elif right == 0:
        mask = ("padding_causal" if packed else "causal") + ("" if launch.square and left < 0 else "_bottom_right")
    else:  # unsupported form of windows
        return None
    form = "thd" if packed else "sbhd"
    of_both = dict(
        qkv_layout=f"{form}_{form}_{form}",
        attn_mask_type=mask,
        window_size=window,
        bottom_right_diagonal="bottom_right" in mask,
    )
    queries = launch.q_lengths or _dense_lengths(len(q), launch.tile.q_length, q.device)
    keys = launch.k_lengths or _dense_lengths(len(q), launch.tile.k_length, q.device)
    backend = _backend(
        q.device,
        qkv_dtype=q.dtype,
        nominal_dtype=q.dtype,
        batch_size=_power_of_two(launch.sequences or len(q)),
        num_heads=q.shape[1],
        num_gqa_groups=k.shape[1],
        max_seqlen_q=_power_of_two(queries.longest),
        max_seqlen_kv=_power_of_two(keys.longest),
        num_tokens_q=_power_of_two(q.shape[2]) if packed else None,
        num_tokens_kv=_power_of_two(k.shape[2]) if packed else None,
        head_dim_qk=q.shape[-1],
        head_dim_v=v.shape[-1],
        core_attention_bias_requires_grad=False,
        deterministic=call.deterministic,
        **of_both,
    )
    if backend is None:
        return None
    starts = {"cu_seqlens_q_padded": queries.ends, "cu_seqlens_kv_padded": keys.ends}  # positions in memory
    return dict(
        **of_both,
        **(starts if packed else {}),
        fused_attention_backend=backend,
        attn_scale=call.scale,
        max_seqlen_q=queries.longest,
        max_seqlen_kv=keys.longest,
        cu_seqlens_q=queries.ends,
        cu_seqlens_kv=keys.ends,
        fake_dtype=q.dtype,
        dropout=0.0,
        o_format=form,
        do_format=form,
        dqkv_layout=of_both["qkv_layout"],
    )


def _power_of_two(number: int) -> int:
    """Round up to a power of two: rough sizes select a kernel, checks are slow."""
    return 1 << max(0, number - 1).bit_length()


@functools.lru_cache(maxsize=64)
@torch.inference_mode(False)  # may be used in a backward pass
def _dense_lengths(batch: int, rows: int, device: torch.device) -> Lengths:
    return Lengths(torch.arange(0, (batch + 1) * rows, rows, dtype=torch.int32, device=device), rows)


def _rows(x: Tensor, launch: Launch) -> Tensor:
    """Convert [b, h, s, d] to contiguous [s, b, h, d], or [s, h, d] of a pack."""
    x = x.permute(2, 0, 1, 3)
    return (x if launch.q_lengths is None else x.squeeze(1)).contiguous()


def _back(x: Tensor, launch: Launch) -> Tensor:
    return (x if launch.q_lengths is None else x.unsqueeze(1)).permute(1, 2, 0, 3)


@functools.cache
def _functions() -> tuple[Callable[..., Any], Callable[..., Any]]:
    """Return TE's fused forward and backward, filtered to this version's arguments."""
    from transformer_engine.pytorch.constants import TE_DType
    from transformer_engine.pytorch.cpp_extensions.fused_attn import fused_attn_bwd, fused_attn_fwd

    def filtered(function: Callable[..., Any]) -> Callable[..., Any]:
        known = inspect.signature(function).parameters

        def call(**arguments: Any) -> Any:
            if "dqkv_dtype" in known:
                arguments["dqkv_dtype"] = TE_DType[arguments["fake_dtype"]]
            return function(**{name: value for name, value in arguments.items() if name in known})

        return call

    return filtered(fused_attn_fwd), filtered(fused_attn_bwd)


@functools.lru_cache(maxsize=1024)
def _backend(device: torch.device, **wanted: Any) -> Any:
    """Return the fused kernel that Transformer Engine would choose, or None.

    ``wanted`` are fields of ``AttentionParams``, with rounded sizes. Transformer Engine's check covers cuDNN's versions
    and faults, and NVTE_FUSED_ATTN and similar variables. cuDNN before 9.15 may refuse actual lengths although their
    rounded values are accepted; on compute capability 12.0 a pack's log-sum-exp has another shape.
    """
    if (torch.backends.cudnn.version() or 0) < 91500 or torch.cuda.get_device_capability(device) == (12, 0):
        return None
    from transformer_engine.pytorch.attention.dot_product_attention import utils

    known = {field.name for field in fields(utils.AttentionParams)}
    chosen = utils.get_attention_backend(
        utils.AttentionParams(**{name: value for name, value in wanted.items() if name in known})
    )
    _, _, fused, backend, *_ = chosen
    return backend if fused else None
