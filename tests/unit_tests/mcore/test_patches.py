"""Patches of megatron-core that no test of training covers."""

import functools
import inspect
import sys
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from megatron.core.models.common.embeddings import rope_utils
from megatron.core.models.common.embeddings.rotary_pos_embedding import RotaryEmbedding
from megatron.core.models.common.embeddings.yarn_rotary_pos_embedding import YarnRotaryEmbedding
from torch.utils._python_dispatch import TorchDispatchMode

from megatron_cp.mcore import rotary
from tests.ranks import run_ranks


def norms(elements: int) -> tuple[float, float]:
    """Return megatron-core's norm of a gradient, and the exact one."""
    from megatron.core.optimizer.clip_grads import get_grad_norm_fp32

    gradient = torch.randn(elements, generator=torch.Generator().manual_seed(1))
    parts = [gradient[:7], gradient[7 : elements // 2], gradient[elements // 2 :]]
    return get_grad_norm_fp32(parts), gradient.double().norm().item()


@pytest.mark.parametrize("elements", [15, 5000, 20_000_000])
def test_gradient_norms_are_exact(elements: int) -> None:
    [(norm, truth)] = run_ranks(norms, 1, elements)
    assert norm == pytest.approx(truth, rel=1e-7)


@pytest.mark.parametrize("size", [1, 2, 4])
@pytest.mark.parametrize("lengths", [(16,), (8, 24, 0, 16), (40, 8, 8), (0, 8)], ids=str)
def test_packs_are_rotated_as_one_by_one(size: int, lengths: tuple[int, ...]) -> None:
    """The bits must be those of upstream's loop over sequences.

    No number may make the host wait.
    """
    source = inspect.getsource(sys.modules[rope_utils.__name__])
    upstream: dict[str, Any] = vars(rope_utils) | {}
    exec(source[source.index("def _apply_rotary_pos_emb_thd") : source.index("def apply_rotary_pos_emb(")], upstream)
    cu_seqlens = torch.tensor([0, *np.cumsum(lengths)], dtype=torch.int32)
    not_empty = cu_seqlens.unique()  # upstream cannot rotate the pairs of nothing
    generator = torch.Generator().manual_seed(1)
    freqs = torch.randn(max(lengths) + 3, 1, 1, 12, generator=generator)
    for rank in range(size):
        group = SimpleNamespace(rank=lambda rank=rank: rank, size=lambda: size)
        t = torch.randn(sum(lengths) // size, 3, 16, generator=generator)
        for options in ({}, {"rotary_interleaved": True}, {"mscale": 1.5}):
            expected = upstream["_apply_rotary_pos_emb_thd"](t, not_empty, freqs, cp_group=group, **options)
            with NoHostWaits():
                got = rope_utils._apply_rotary_pos_emb_thd(t, cu_seqlens, freqs, cp_group=group, **options)
            assert torch.equal(got, expected)
    with NoHostWaits(), pytest.raises(AssertionError, match="waits"):
        upstream["_apply_rotary_pos_emb_thd"](t, not_empty, freqs, cp_group=group)


def test_rows_of_a_pack_are_cached_until_its_lengths_are_modified() -> None:
    cu_seqlens = torch.tensor([0, 8, 24], dtype=torch.int32)
    first = rotary._rows_of_pack(cu_seqlens, 12, 1, 2)
    assert first.tolist() == [2, 3, 4, 5, *range(4, 12)]
    assert rotary._rows_of_pack(cu_seqlens, 12, 1, 2) is first
    cu_seqlens[1] = 16
    assert rotary._rows_of_pack(cu_seqlens, 12, 1, 2).tolist() == [*range(4, 12), 2, 3, 4, 5]
    with pytest.raises(RuntimeError, match="this rank has 10 tokens of a packed batch, not 1/2"):
        rotary._rows_of_pack(cu_seqlens, 10, 1, 2)
    with torch.inference_mode():
        assert rotary._rows_of_pack(torch.tensor([0, 4]), 4, 0, 1).tolist() == [0, 1, 2, 3]


@pytest.mark.parametrize("yarn", [False, True])
def test_packs_have_one_table_of_angles(yarn: bool) -> None:
    """Its rows must have upstream's bits, and no length or group a table of its own."""
    embedding: Any = YarnRotaryEmbedding if yarn else RotaryEmbedding
    groups: list[Any] = [SimpleNamespace(rank=lambda: 0, size=lambda size=size: size) for size in (2, 4)]
    module = embedding(16, use_cpu_initialization=True, cp_group=groups[0], **({} if yarn else {"rotary_percent": 0.5}))
    plain, seen = embedding.forward.__wrapped__.__wrapped__, set()
    for length in (24, 8, 96, 40):
        for group in groups:
            found, expected = (
                call(length, packed_seq=True, cp_group=group) for call in (module, functools.partial(plain, module))
            )
            if yarn:
                (found, scale), (expected, upstream_scale) = found, expected
                assert scale == upstream_scale
            assert torch.equal(found, expected)
            seen.add(found.untyped_storage().data_ptr())
    assert len(seen) == 2 and len(module.table_of_packs[0]) == 96  # the first, and the one of the longest


class NoHostWaits(TorchDispatchMode):
    """Mode that fails at a kernel whose result the host waits for."""

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        waiting = (torch.ops.aten._local_scalar_dense.default, torch.ops.aten.nonzero.default)
        assert func not in waiting, f"{func} waits"
        return func(*args, **(kwargs or {}))
