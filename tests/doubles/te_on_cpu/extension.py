"""Replace ``transformer_engine_torch``, which Transformer Engine imports.

The module has the names that Transformer Engine's Python part imports. Enumerations have the real members. Kernels that
our models reach compute in PyTorch; all others raise an error with their name when called.
"""

from __future__ import annotations

import enum
from typing import Any

import torch
from torch import Tensor

from megatron_cp.attention.modules.te_support import parse_version
from tests.doubles.te_on_cpu.attention import (  # noqa: F401
    convert_bshd_to_thd,
    convert_thd_to_bshd,
    fused_attn_bwd,
    fused_attn_fwd,
    thd_copy_valid_tokens_from_per_split_to_rank_local,
    thd_cp_rank_order_to_sequence_order,
    thd_get_partitioned_indices,
    thd_grad_correction,
    thd_out_correction,
    thd_read_half_tensor,
    thd_read_second_half_lse,
    thd_second_half_lse_correction,
    thd_sequence_order_to_cp_rank_order,
)


def _enum(name: str, members: str, **numbers: int) -> Any:
    names = members.split()
    return enum.IntEnum(name, {member: numbers.get(member, i) for i, member in enumerate(names)})


DType = _enum("DType", "kByte kInt32 kFloat32 kFloat16 kBFloat16 kFloat8E4M3 kFloat8E5M2 kFloat4E2M1")
NVTE_Bias_Type = _enum("NVTE_Bias_Type", "NVTE_NO_BIAS NVTE_PRE_SCALE_BIAS NVTE_POST_SCALE_BIAS NVTE_ALIBI")
NVTE_Mask_Type = _enum(
    "NVTE_Mask_Type",
    "NVTE_NO_MASK NVTE_PADDING_MASK NVTE_CAUSAL_MASK NVTE_PADDING_CAUSAL_MASK NVTE_CAUSAL_BOTTOM_RIGHT_MASK"
    " NVTE_PADDING_CAUSAL_BOTTOM_RIGHT_MASK",
)
NVTE_Softmax_Type = _enum("NVTE_Softmax_Type", "NVTE_VANILLA_SOFTMAX NVTE_OFF_BY_ONE_SOFTMAX NVTE_LEARNABLE_SOFTMAX")
NVTE_QKV_Format = _enum(
    "NVTE_QKV_Format",
    "NVTE_BSHD NVTE_SBHD NVTE_THD NVTE_SBHD_2BSHD NVTE_BSHD_2SBHD NVTE_THD_2BSHD NVTE_THD_2SBHD NVTE_BHSD"
    " NVTE_QKV_Format_NOT_SET",
)
NVTE_QKV_Layout = _enum(
    "NVTE_QKV_Layout",
    "NVTE_SB3HD NVTE_SBH3D NVTE_SBHD_SB2HD NVTE_SBHD_SBH2D NVTE_SBHD_SBHD_SBHD NVTE_BS3HD NVTE_BSH3D"
    " NVTE_BSHD_BS2HD NVTE_BSHD_BSH2D NVTE_BSHD_BSHD_BSHD NVTE_T3HD NVTE_TH3D NVTE_THD_T2HD NVTE_THD_TH2D"
    " NVTE_THD_THD_THD NVTE_SBHD_BSHD_BSHD NVTE_BSHD_SBHD_SBHD NVTE_THD_BSHD_BSHD NVTE_THD_SBHD_SBHD"
    " NVTE_Paged_KV_BSHD_BSHD_BSHD NVTE_Paged_KV_BSHD_SBHD_SBHD NVTE_Paged_KV_SBHD_BSHD_BSHD"
    " NVTE_Paged_KV_SBHD_SBHD_SBHD NVTE_Paged_KV_THD_BSHD_BSHD NVTE_Paged_KV_THD_SBHD_SBHD NVTE_BHSD_BHSD_BHSD"
    " NVTE_QKV_Layout_NOT_SET",
)
NVTE_Fused_Attn_Backend = _enum(
    "NVTE_Fused_Attn_Backend",
    "NVTE_F16_arbitrary_seqlen NVTE_FP8 NVTE_No_Backend",
    NVTE_F16_arbitrary_seqlen=1,
    NVTE_FP8=2,
    NVTE_No_Backend=-1,
)
# A member until 2.16. From 2.19 on only these three may be members.
NVTE_Fused_Attn_Backend.NVTE_F16_max512_seqlen = 0
# Its values do not matter: no tensor here is scaled.
NVTEScalingMode = _enum(
    "NVTEScalingMode",
    "NVTE_DELAYED_TENSOR_SCALING NVTE_MXFP8_1D_SCALING NVTE_BLOCK_SCALING_1D NVTE_BLOCK_SCALING_2D"
    " NVTE_NVFP4_1D_SCALING NVTE_INVALID_SCALING",
)
NVTERoutingMapFormat = _enum("NVTERoutingMapFormat", "BYTEMAP BITMAP_U8")
Float8BlockScaleTensorFormat = _enum("Float8BlockScaleTensorFormat", "GEMM_READY COMPACT INVALID")
CommOverlapType = _enum("CommOverlapType", "RS AG")
CommOverlapAlgo = _enum("CommOverlapAlgo", "BULK_OVERLAP_AG BULK_OVERLAP_RS EXTERNAL_BULK_OVERLAP_AG")
FP8FwdTensors = _enum(
    "FP8FwdTensors",
    "GEMM1_INPUT GEMM1_WEIGHT GEMM1_OUTPUT GEMM2_INPUT GEMM2_WEIGHT GEMM2_OUTPUT GEMM3_INPUT GEMM3_WEIGHT GEMM3_OUTPUT",
)
FP8BwdTensors = _enum("FP8BwdTensors", "GRAD_OUTPUT1 GRAD_INPUT1 GRAD_OUTPUT2 GRAD_INPUT2 GRAD_OUTPUT3 GRAD_INPUT3")
NVTEQBHistogramMode = _enum("NVTEQBHistogramMode", "TWO_KERNEL FUSED_ATOMIC")


class CommOverlapHelper: ...


class CommOverlap: ...


class CommOverlapP2P: ...


class FP8TensorMeta: ...


_TORCH = {
    DType.kByte: torch.uint8,
    DType.kInt32: torch.int32,
    DType.kFloat32: torch.float32,
    DType.kFloat16: torch.float16,
    DType.kBFloat16: torch.bfloat16,
}


def get_cublasLt_version() -> int:
    return 130000


def get_cudnn_version() -> int:
    return int(torch.backends.cudnn.version() or 91900)


def get_num_cublas_streams() -> int:
    return 4


def get_fused_attn_backend(*arguments: Any) -> Any:
    """Return what cuDNN 9.19 supports on a Hopper GPU.

    Covers the features that our layers use. From 2.20 on it takes one object, and returns a reason for a refusal.
    """
    if len(arguments) > 1:
        _, dtype, _, layout, _, mask, _, _, _, _, _, _, dim_qk, dim_v, left, right, *_ = arguments
        return _backend(dtype, layout, mask, dim_qk, dim_v, left, right)
    p = arguments[0]
    found = _backend(
        p.qkv_dtype, p.qkv_layout, p.attn_mask_type, p.head_dim_qk, p.head_dim_v, p.window_size_left,
        p.window_size_right,
    )  # fmt: skip
    return found, "" if found == NVTE_Fused_Attn_Backend.NVTE_F16_arbitrary_seqlen else "not here"


def _backend(dtype: Any, layout: Any, mask: Any, dim_qk: int, dim_v: int, left: int, right: int) -> Any:
    packed = "THD" in layout.name
    possible = (
        int(dtype) in (DType.kFloat16, DType.kBFloat16, DType.kFloat32)  # float32: see tests.doubles.te_on_cpu
        and max(dim_qk, dim_v) <= 256
        and dim_qk % 8 == 0 == dim_v % 8
        and (dim_qk == dim_v or dim_v < 128 or (dim_qk, dim_v) == (192, 128) or dim_qk < 128)
        and (not packed or "PADDING" in mask.name)
        and ((left == -1 and right in (-1, 0)) or _window_is_possible(mask.name, right))
    )
    backends = NVTE_Fused_Attn_Backend
    return backends.NVTE_F16_arbitrary_seqlen if possible else backends.NVTE_No_Backend


def _window_is_possible(mask: str, right: int) -> bool:
    """Return whether the version has the window.

    Non-causal windows came later, those of packs first.
    """
    import transformer_engine

    version = parse_version(transformer_engine.__version__)
    since = parse_version("2.10" if "CAUSAL" in mask else "2.12" if "PADDING" in mask or right == 0 else "2.16")
    return version >= since


def generic_gemm(
    A: Tensor, transA: bool, B: Tensor, transB: bool, D: Tensor | None, quantizer: Any, output_dtype: Any,
    bias: Tensor | None, bias_type: Any, gelu: bool, gelu_in: Any, grad: bool, workspace: Any, workspace_size: int,
    accumulate: bool, use_split_accumulator: bool, comm_overlap: Any = None, comm_type: Any = None,
    extra_output: Any = None, bulk_overlap: bool = False, alpha: float = 1.0, beta: float | None = None,
) -> tuple[Any, ...]:  # fmt: skip
    """Compute op(B) @ op(A): cuBLAS stores columns first.

    With ``grad`` a bias requests its gradient.
    """
    assert quantizer is None and comm_overlap is None and not gelu
    shape = None if transB else (*B.shape[:-1], A.shape[-2 if transA else -1])
    a, b = A.reshape(-1, A.shape[-1]).float(), B.reshape(-1, B.shape[-1]).float()
    result = (b.T if transB else b) @ (a.T if transA else a) * alpha
    bias_grad = None
    if bias is not None and grad:
        bias_grad = b.sum(0).to(bias.dtype)
    elif bias is not None:
        result = result + bias.float()
    if shape is not None:
        result = result.view(shape)
    if D is None:
        dtype = B.dtype if output_dtype is None else _TORCH[output_dtype]
        return result.to(dtype), bias_grad, None, extra_output
    D.copy_(D.float() + result.view(D.shape) if accumulate else result.view(D.shape))
    return D, bias_grad, None, extra_output


def te_general_grouped_gemm(
    A: list[Tensor], transA: bool, B: list[Tensor], transB: bool, D: list[Tensor] | None, dtype: Any,
    m_splits: list[int], bias: list[Tensor], bias_type: Any, single_output: bool, pre_gelu: Any, grad: bool,
    workspace: Any, workspace_size: int, accumulate: bool, *rest: Any,
) -> list[Tensor]:  # fmt: skip
    """Compute one product per expert.

    With ``single_output`` the first output has the rows of all.
    """
    outputs = list(D[0].split(m_splits)) if single_output else D
    for a, b, out, extra in zip(A, B, outputs, bias, strict=True):
        if b.numel() == 0 or a.numel() == 0:
            out.zero_() if not accumulate else None
            continue
        wanted = extra if extra.numel() else None
        _, found, _, _ = generic_gemm(
            a, transA, b, transB, out, None, None, wanted, None, False, None, grad, None, 0, accumulate, False
        )
        if grad and wanted is not None:
            wanted.copy_(found)
    return bias


def _weight(gamma: Tensor, zero_centered: bool) -> Tensor:
    return gamma.float() + 1.0 if zero_centered else gamma.float()


def rmsnorm_fwd(
    x: Tensor, gamma: Tensor, eps: float, out: Any, quantizer: Any, dtype: Any, sm_margin: int, zero_centered: bool
) -> list[Any]:
    assert quantizer is None
    wide = x.float()
    rsigma = torch.rsqrt(wide.square().mean(-1) + eps)
    result = (wide * rsigma[..., None] * _weight(gamma, zero_centered)).to(_TORCH[dtype])
    return [result if out is None else out.copy_(result), None, rsigma]


def rmsnorm_bwd(
    dz: Tensor, x: Tensor, rsigma: Tensor, gamma: Tensor, sm_margin: int, zero_centered: bool
) -> list[Tensor]:
    wide, dz = x.float(), dz.view_as(x).float()
    normed = wide * rsigma.view(*x.shape[:-1], 1)
    d_normed = dz * _weight(gamma, zero_centered)
    dx = (d_normed - normed * (d_normed * normed).mean(-1, keepdim=True)) * rsigma.view(*x.shape[:-1], 1)
    return [dx.to(x.dtype), (dz * normed).flatten(0, -2).sum(0).to(gamma.dtype)]


def layernorm_fwd(
    x: Tensor, gamma: Tensor, beta: Tensor | None, eps: float, out: Any, quantizer: Any, dtype: Any, sm_margin: int,
    zero_centered: bool,
) -> list[Any]:  # fmt: skip
    assert quantizer is None
    wide = x.float()
    mu = wide.mean(-1)
    rsigma = torch.rsqrt(wide.var(-1, unbiased=False) + eps)
    result = (wide - mu[..., None]) * rsigma[..., None] * _weight(gamma, zero_centered)
    result = (result if beta is None else result + beta.float()).to(_TORCH[dtype])
    return [result if out is None else out.copy_(result), mu, rsigma]


def layernorm_bwd(
    dz: Tensor, x: Tensor, mu: Tensor, rsigma: Tensor, gamma: Tensor, sm_margin: int, zero_centered: bool
) -> list[Tensor]:
    wide, dz = x.float(), dz.view_as(x).float()
    mu, rsigma = mu.view(*x.shape[:-1], 1), rsigma.view(*x.shape[:-1], 1)
    normed = (wide - mu) * rsigma
    d_normed = dz * _weight(gamma, zero_centered)
    means = d_normed.mean(-1, keepdim=True) + normed * (d_normed * normed).mean(-1, keepdim=True)
    d_gamma, d_beta = ((t.flatten(0, -2).sum(0)).to(gamma.dtype) for t in (dz * normed, dz))
    return [((d_normed - means) * rsigma).to(x.dtype), d_gamma, d_beta]


def fused_rope_forward(
    t: Tensor, freqs: Tensor, start_positions: Any, form: Any, interleaved: bool, cu_seqlens: Tensor | None,
    cp_size: int, cp_rank: int,
) -> Tensor:  # fmt: skip
    """Rotate heads by the angles of the positions of their tokens.

    For a pack the kernel computes the positions: ``freqs`` is [longest sequence, 1, 1, d], and a rank has two chunks of
    each sequence in zigzag order.
    """
    return _rotated(t, freqs, start_positions, form, interleaved, cu_seqlens, cp_size, cp_rank, 1.0)


def fused_rope_backward(grad: Tensor, *args: Any) -> Tensor:
    """Rotate back."""
    return _rotated(grad, *args, -1.0)


def _rotated(
    t: Tensor, freqs: Tensor, start_positions: Any, form: Any, interleaved: bool, cu_seqlens: Tensor | None,
    cp_size: int, cp_rank: int, direction: float,
) -> Tensor:  # fmt: skip
    assert start_positions is None and freqs.dtype == torch.float32 and freqs.is_contiguous()
    if "THD" in form.name:
        assert cu_seqlens is not None and cu_seqlens.dtype == torch.int32 and t.dim() == 3
        rows = []
        for length in cu_seqlens.diff().tolist():
            chunk = length // cp_size // 2
            first, last = cp_rank * chunk, length - (cp_rank + 1) * chunk
            whole = [torch.arange(length)] if cp_size == 1 else []
            rows += whole or [torch.arange(first, first + chunk), torch.arange(last, last + chunk)]
        angles = freqs[torch.cat(rows).to(freqs.device)].squeeze(1)
    else:
        assert form.name.endswith("SBHD") and t.dim() == 4
        angles = freqs[: t.shape[0]]
    size = freqs.shape[-1]
    wide, rest = t[..., :size].float(), t[..., size:]
    if interleaved:
        turned = torch.stack((-wide[..., 1::2], wide[..., ::2]), -1).flatten(-2)
    else:
        low, high = wide.chunk(2, -1)
        turned = torch.cat((-high, low), -1)
    return torch.cat(((wide * angles.cos() + direction * turned * angles.sin()).to(t.dtype), rest), -1)


def multi_tensor_scale(chunk: int, noop: Tensor, lists: list[list[Tensor]], scale: float) -> None:
    for source, target in zip(*lists, strict=True):
        if not torch.isfinite(source).all():
            noop.fill_(1)
        target.copy_(source.float() * scale)


def multi_tensor_scale_tensor(chunk: int, noop: Tensor, lists: list[list[Tensor]], scale: Tensor) -> None:
    multi_tensor_scale(chunk, noop, lists, float(scale))


def multi_tensor_l2norm(
    chunk: int, noop: Tensor, lists: list[list[Tensor]], per_tensor: bool | None = False
) -> tuple[Tensor, Tensor]:
    squares = [t.double().square().sum() for t in lists[0]]
    each = torch.stack(squares).sqrt().float() if per_tensor else torch.empty(0, device=noop.device)
    return torch.stack(squares).sum().sqrt().float().view(1), each


def multi_tensor_adam(
    chunk: int, noop: Tensor, lists: list[list[Tensor]], lr: float, beta1: float, beta2: float, eps: float, step: int,
    mode: int, bias_correction: int, weight_decay: float,
) -> None:  # fmt: skip
    """Run Adam (mode 0: weight decay in the gradient; 1: decoupled).

    Arguments are lists of gradients, parameters, moments and, as an optional fifth list, float32 copies of the
    parameters.
    """
    correction1, correction2 = (1 - beta1**step, 1 - beta2**step) if bias_correction else (1.0, 1.0)
    for grad, param, m, v, *master in zip(*lists, strict=True):
        weight = (master[0] if master else param).float()
        g = grad.float() + (weight_decay * weight if mode == 0 else 0.0)
        m.copy_(beta1 * m.float() + (1 - beta1) * g)
        v.copy_(beta2 * v.float() + (1 - beta2) * g * g)
        update = (m.float() / correction1) / ((v.float() / correction2).sqrt() + eps)
        weight = weight - lr * (update + (weight_decay * weight if mode == 1 else 0.0))
        param.copy_(weight)
        if master:
            master[0].copy_(weight)


def _missing(name: str) -> Any:
    def kernel(*args: Any, **kwargs: Any) -> Any:
        raise NotImplementedError(f"transformer_engine_torch.{name} has no stand-in (tests/doubles/te_on_cpu)")

    kernel.__name__ = name
    return kernel


def __getattr__(name: str) -> Any:
    if name.startswith("__"):
        raise AttributeError(name)
    return _missing(name)
