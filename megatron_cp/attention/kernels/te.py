"""Transformer Engine's fused attention, cuDNN's, as the kernel of our transports: of whole sequences and of packs.

Its own context parallelism calls the same two functions with each block of a ring, as is done here: a block's
log-sum-exp comes out, and the whole's goes in again. PyTorch's way to cuDNN has no packs and no windows.
"""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable, Sequence
from dataclasses import dataclass, fields
from typing import Any

import torch
from torch import Tensor

from megatron_cp.attention.context import AttentionCall
from megatron_cp.attention.kernels.base import Gradients, Result
from megatron_cp.attention.kernels.cuda import CudaFlash, flash_window
from megatron_cp.attention.kernels.launches import Launch


@dataclass(frozen=True)
class _Problem:
    """What a launch asks for, but for its exact sizes: what Transformer Engine chooses a kernel by."""

    dtype: torch.dtype
    device: torch.device
    mask: str
    window: tuple[int, int]
    heads: int
    kv_heads: int
    qk_dim: int
    v_dim: int
    sequences: int
    q_length: int
    k_length: int
    q_rows: int
    k_rows: int
    packed: bool
    deterministic: bool

    @property
    def layout(self) -> str:
        return "thd_thd_thd" if self.packed else "sbhd_sbhd_sbhd"


class TeFused(CudaFlash):
    """Transformer Engine's fused attention where it would choose it itself, and FlashAttention elsewhere."""

    def forward(self, q: Tensor, k: Tensor, v: Tensor, launch: Launch, call: AttentionCall) -> Result:
        problem = _problem(q, k, v, launch, call.deterministic)
        backend = _backend(problem) if problem else None
        if problem is None or backend is None:
            return super().forward(q, k, v, launch, call)
        q, k, v = (_rows(x, launch) for x in (q, k, v))
        out, aux, *_ = _functions().forward(
            is_training=True,
            q=q,
            k=k,
            v=v,
            fused_attention_backend=backend,
            attn_scale=call.scale,
            **_arguments(problem, launch, q),
        )
        lse = aux[0].squeeze(-1)
        return _back(out, launch), lse.t().unsqueeze(0) if problem.packed else lse

    def backward(self, parts: Sequence[Tensor], lse: Tensor, launch: Launch, call: AttentionCall) -> Gradients:
        _, q, k, v, _ = parts
        problem = _problem(q, k, v, launch, call.deterministic)
        backend = _backend(problem) if problem else None
        if problem is None or backend is None:
            return super().backward(parts, lse, launch, call)
        dout, q, k, v, out = (_rows(x, launch) for x in parts)
        lse = (lse.squeeze(0).t() if problem.packed else lse).contiguous().unsqueeze(-1)
        unused = torch.empty(2, dtype=torch.int64, device=q.device)  # the random state of a dropout there is not
        dq, dk, dv, *_ = _functions().backward(
            q=q,
            k=k,
            v=v,
            o=out,
            d_o=dout,
            aux_ctx_tensors=[lse, unused],
            fused_attention_backend=backend,
            attn_scale=call.scale,
            deterministic=call.deterministic,
            **_arguments(problem, launch, q),
        )
        return _back(dq, launch), _back(dk, launch), _back(dv, launch)


def _problem(q: Tensor, k: Tensor, v: Tensor, launch: Launch, deterministic: bool) -> _Problem | None:
    """None for windows of other forms than Transformer Engine's."""
    left, right = flash_window(launch.tile)
    packed = launch.q_lengths is not None
    if (left, right) == (-1, -1):
        mask = "padding" if packed else "no_mask"
    elif right == 0:
        mask = ("padding_causal" if packed else "causal") + ("" if launch.square and left < 0 else "_bottom_right")
    else:
        return None
    q_length, k_length = _longest(launch)
    return _Problem(
        q.dtype,
        q.device,
        mask,
        (left, right),
        heads=q.shape[1],
        kv_heads=k.shape[1],
        qk_dim=q.shape[-1],
        v_dim=v.shape[-1],
        sequences=_power_of_two(launch.sequences or len(q)),
        q_length=_power_of_two(q_length),
        k_length=_power_of_two(k_length),
        q_rows=_power_of_two(q.shape[2]),
        k_rows=_power_of_two(k.shape[2]),
        packed=packed,
        deterministic=deterministic,
    )


def _power_of_two(number: int) -> int:
    """No smaller one: kernels are chosen by the kind of a size, and asking takes the host a while."""
    return 1 << max(0, number - 1).bit_length()


def _longest(launch: Launch) -> tuple[int, int]:
    if launch.q_lengths is None or launch.k_lengths is None:
        return launch.tile.q_length, launch.tile.k_length
    return launch.q_lengths.longest, launch.k_lengths.longest


def _arguments(problem: _Problem, launch: Launch, q: Tensor) -> dict[str, Any]:
    """What both passes are told."""
    rows, columns = _longest(launch)
    if launch.q_lengths is not None and launch.k_lengths is not None:
        ends = launch.q_lengths.ends, launch.k_lengths.ends
    else:
        ends = _dense_ends(q.shape[1], rows, q.device), _dense_ends(q.shape[1], columns, q.device)
    form = problem.layout.partition("_")[0]
    starts = {"cu_seqlens_q_padded": ends[0], "cu_seqlens_kv_padded": ends[1]}  # where sequences lie in memory
    return dict(
        **(starts if problem.packed else {}),
        max_seqlen_q=rows,
        max_seqlen_kv=columns,
        cu_seqlens_q=ends[0],
        cu_seqlens_kv=ends[1],
        fake_dtype=problem.dtype,
        dropout=0.0,
        qkv_layout=problem.layout,
        o_format=form,
        do_format=form,
        dqkv_layout=problem.layout,
        attn_mask_type=problem.mask,
        window_size=problem.window,
        bottom_right_diagonal="bottom_right" in problem.mask,
    )


@functools.lru_cache(maxsize=64)
@torch.inference_mode(False)  # it may be needed in a backward pass later
def _dense_ends(batch: int, rows: int, device: torch.device) -> Tensor:
    return torch.arange(0, (batch + 1) * rows, rows, dtype=torch.int32, device=device)


def _rows(x: Tensor, launch: Launch) -> Tensor:
    """[b, h, s, d] as the kernel takes it, contiguous: [s, b, h, d], or [s, h, d] of many sequences."""
    x = x.permute(2, 0, 1, 3)
    return (x if launch.q_lengths is None else x.squeeze(1)).contiguous()


def _back(x: Tensor, launch: Launch) -> Tensor:
    return (x if launch.q_lengths is None else x.unsqueeze(1)).permute(1, 2, 0, 3)


@dataclass(frozen=True)
class _Functions:
    forward: Callable[..., Any]
    backward: Callable[..., Any]


@functools.cache
def _functions() -> _Functions:
    """Its two functions, each told what it knows of what it is told: versions have added arguments."""
    from transformer_engine.pytorch.constants import TE_DType
    from transformer_engine.pytorch.cpp_extensions.fused_attn import fused_attn_bwd, fused_attn_fwd

    def told(function: Callable[..., Any]) -> Callable[..., Any]:
        known = inspect.signature(function).parameters

        def call(**arguments: Any) -> Any:
            if "dqkv_dtype" in known:
                arguments["dqkv_dtype"] = TE_DType[arguments["fake_dtype"]]
            return function(**{name: value for name, value in arguments.items() if name in known})

        return call

    return _Functions(told(fused_attn_fwd), told(fused_attn_bwd))


@functools.lru_cache(maxsize=1024)
def _backend(problem: _Problem) -> Any:
    """The kernel that Transformer Engine would choose for a training step; None if none of its fused ones.

    It knows cuDNN's versions and faults, and heeds NVTE_FUSED_ATTN and the like. Before cuDNN 9.15 it may refuse
    lengths that it allows here, where they are rounded; on compute capability 12.0 the log-sum-exp of a pack comes in
    another shape.
    """
    if (torch.backends.cudnn.version() or 0) < 91500 or torch.cuda.get_device_capability(problem.device) == (12, 0):
        return None
    from transformer_engine.pytorch.attention.dot_product_attention import utils

    wanted = dict(
        qkv_dtype=problem.dtype,
        nominal_dtype=problem.dtype,
        qkv_layout=problem.layout,
        batch_size=problem.sequences,
        num_heads=problem.heads,
        num_gqa_groups=problem.kv_heads,
        max_seqlen_q=problem.q_length,
        max_seqlen_kv=problem.k_length,
        num_tokens_q=problem.q_rows if problem.packed else None,
        num_tokens_kv=problem.k_rows if problem.packed else None,
        head_dim_qk=problem.qk_dim,
        head_dim_v=problem.v_dim,
        attn_mask_type=problem.mask,
        window_size=problem.window,
        core_attention_bias_requires_grad=False,
        deterministic=problem.deterministic,
        bottom_right_diagonal="bottom_right" in problem.mask,
    )
    known = {field.name for field in fields(utils.AttentionParams)}
    chosen = utils.get_attention_backend(
        utils.AttentionParams(**{name: value for name, value in wanted.items() if name in known})
    )
    _, _, fused, backend, *_ = chosen
    return backend if fused else None
