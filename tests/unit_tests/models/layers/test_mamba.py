"""The Mamba mixer computes the same on any number of ranks.

It is tested on packs too, and with garbage in the padding.
"""

import functools
from collections.abc import Sequence
from itertools import accumulate
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as dist
from megatron.core.packed_seq_params import PackedSeqParams

from megatron_cp.attention.modules.native import ContextParallelAttention
from megatron_cp.attention.sharding import partition_indices
from megatron_cp.models.layers.mamba.shape import MambaShape
from megatron_cp.models.transformer_config import transformer_config
from megatron_cp.parallel.process_groups import build_process_groups
from tests.ranks import RanksFailed, run_ranks
from tests.training_runs import tiny_config
from tests.unit_tests.models.hybrids import HYBRID

LENGTHS = [5, 17, 1, 70]


def mixer_of(overrides: dict[str, Any]) -> tuple[Any, Any]:
    """Build a mixer in float64 and its groups.

    The world is one context-parallel group.
    """
    from megatron_cp.models.build import Build
    from megatron_cp.models.hybrid import hybrid_stack_spec

    config = tiny_config(**HYBRID | {"model__context_parallel_size": dist.get_world_size()} | overrides)
    groups = build_process_groups(config.model, config.dist)
    core_config = transformer_config(config.model, config.mixed_precision)
    spec = hybrid_stack_spec(
        Build(config.model, core_config, groups, 1, ContextParallelAttention)
    ).submodules.mamba_layer
    layer = spec.module(core_config, spec.submodules, layer_number=1, pg_collection=groups, **spec.params)
    return layer.mixer.double(), groups


def packed(lengths: list[int], padded: list[int], **group: Any) -> PackedSeqParams:
    real, occupied = (torch.tensor([0, *accumulate(each)], dtype=torch.int32) for each in (lengths, padded))
    return PackedSeqParams(qkv_format="thd", cu_seqlens_q=real, cu_seqlens_q_padded=occupied, **group)


def shared_against_alone(
    overrides: dict[str, Any],
    rubbish: float = 3.0,
    dtype: torch.dtype = torch.float64,
    lengths: Sequence[int] = LENGTHS,
) -> tuple[float, float, bool]:
    """Return the largest differences of outputs and gradients from one rank's.

    One rank computes sequence by sequence in float64. Returns also whether what comes out for padding is zero.
    """
    mixer, groups = mixer_of(overrides)
    mixer.to(dtype).double()
    size, rank = groups.cp.size(), groups.cp.rank()
    generator = torch.Generator().manual_seed(1)

    def draw(length: int) -> torch.Tensor:
        return torch.randn(length, 1, 64, generator=generator, dtype=torch.float64).to(dtype).double()

    inputs, douts = ([draw(length) for length in lengths] for _ in range(2))
    wanted = []
    for x, dout in zip(inputs, douts, strict=True):
        out, _ = mixer(x.requires_grad_(), packed_seq_params=packed([len(x)], [len(x)], local_cp_size=1))
        out.backward(dout)
        wanted.append(out.detach())
    exact = [parameter.grad for parameter in mixer.parameters()]
    mixer.zero_grad()
    mixer.to(dtype)

    padded = [-(-length // (2 * size)) * 2 * size for length in lengths]
    starts = [0, *accumulate(padded)]
    mine = torch.from_numpy(partition_indices(np.array(starts), rank, size))

    def laid_out(parts: list[torch.Tensor], padding: float) -> torch.Tensor:
        whole = torch.full((starts[-1], 1, 64), padding, dtype=torch.float64)
        for start, part in zip(starts, parts, strict=False):
            whole[start : start + len(part)] = part.detach()
        return whole[mine]

    def difference(got: torch.Tensor, expected: torch.Tensor) -> float:
        return float((got.double() - expected).abs().max() / expected.abs().max())

    real = laid_out([torch.ones_like(x) for x in inputs], 0.0).bool()
    local = laid_out(inputs, rubbish).to(dtype).requires_grad_()
    out, _ = mixer(local, packed_seq_params=packed(list(lengths), padded, cp_group=groups.cp))
    out.backward(laid_out(douts, 0.0).to(dtype))
    output = difference(out[real], laid_out(wanted, 0.0)[real]) if real.any() else 0.0
    gradient = difference(local.grad[real], laid_out([x.grad for x in inputs], 0.0)[real]) if real.any() else 0.0
    for (name, parameter), expected in zip(mixer.named_parameters(), exact, strict=True):
        if rubbish == rubbish or not name.startswith("in_proj"):  # a matrix product of nan is beyond repair
            total = parameter.grad.double()
            dist.all_reduce(total, group=groups.cp)
            gradient = max(gradient, difference(total, expected))
            assert total.isfinite().all(), name
    return output, gradient, bool((out[~real] == 0).all())


SHARED: dict[str, tuple[int, dict[str, Any]]] = {
    "two ranks, a group each": (2, {}),
    "four ranks, two to a group": (4, {}),
    "three ranks, unevenly": (3, {}),
    "five ranks, eight groups": (5, {"model__mamba_num_groups": 8}),
    "one group": (3, {"model__mamba_num_groups": 1}),
    "a group a head": (4, {"model__mamba_num_groups": 16}),
}


@pytest.mark.parametrize("name", SHARED)
def test_shared_and_packed_is_one_by_one_on_one_rank(name: str) -> None:
    for output, gradient, padding_is_zero in run_ranks(shared_against_alone, *SHARED[name]):
        assert output < 1e-12 and gradient < 1e-12 and padding_is_zero, (output, gradient)


def test_nan_in_padding_does_not_spread() -> None:
    for output, gradient, padding_is_zero in run_ranks(shared_against_alone, 2, {}, float("nan")):
        assert output < 1e-12 and gradient < 1e-12 and padding_is_zero, (output, gradient)


def bad_call(kind: str) -> None:
    mixer, groups = mixer_of({"model__mamba_num_heads": 2} if kind == "heads" else {})
    x = torch.zeros(6 if kind != "odd" else 5, 1, 64, dtype=torch.float64)
    mixer(x, packed_seq_params=packed([9], [12 * 3], cp_group=groups.cp) if kind == "rows" else None)


@pytest.mark.parametrize(
    ("kind", "message"),
    [
        ("heads", "2 Mamba heads .* cannot be split over 3 context-parallel ranks; the largest group is 2"),
        ("rows", "6 rows do not match the pack, whose sequences have 36 padded tokens, 12 on each of 3 ranks"),
        ("odd", "5 rows are odd; a zigzag shard has two equal chunks"),
    ],
)
def test_sizes_that_cannot_be_divided_are_refused_on_every_rank(kind: str, message: str) -> None:
    with pytest.raises(RanksFailed, match=f"ValueError: .*{message}") as failed:
        run_ranks(bad_call, 3, kind)
    assert str(failed.value).count("ValueError: ") == 3


@pytest.mark.parametrize("groups", [1, 2, 4, 8])
@pytest.mark.parametrize("size", range(1, 9))
def test_shares_are_all_heads_once_with_their_groups(groups: int, size: int) -> None:
    shape = MambaShape(heads=8, groups=groups, head_dim=4, state_dim=3)
    shares = [shape.share(rank, size) for rank in range(size)]
    assert [head for share in shares for head in share.heads] == list(range(8))
    assert max(len(share.heads) for share in shares) - min(len(share.heads) for share in shares) <= 1
    for share in shares:
        each = len(share.heads) // share.scanned.groups
        local = share.group_of_head or [index // each for index in range(len(share.heads))]
        assert [share.groups[index] for index in local] == [head // (8 // groups) for head in share.heads]
        if 8 % size == 0 and (groups % size == 0 or size % groups == 0):
            assert share.group_of_head is None, "upstream's cases need no copies of groups"


def fused_arguments() -> dict[str, Any]:
    """Return the arguments that mamba-ssm's kernel gets.

    A stand-in follows the kernel's documentation.
    """
    from megatron_cp.models.layers.mamba import kernel as mamba
    from megatron_cp.models.layers.mamba.ssd import conv_and_scan

    seen: dict[str, Any] = {}

    def kernel(
        zxbcdt: Any, weight: Any, bias: Any, dt_bias: Any, a: Any, d: Any, chunk_size: int, **options: Any
    ) -> Any:
        seen.update(options, chunk_size=chunk_size, contiguous=zxbcdt.is_contiguous(), shapes=(weight.shape, d.shape))
        return conv_and_scan(
            zxbcdt, weight, bias, dt_bias, a, d,
            head_dim=options["headdim"], groups=options["ngroups"], seq_idx=options["seq_idx"],
        )  # fmt: skip

    mixer, _ = mixer_of({})
    x = torch.randn(30, 1, 64, dtype=torch.float64)
    parameters = packed([7, 9], [14, 16], local_cp_size=1)
    ours, _ = mixer(x, packed_seq_params=parameters)
    mamba.fused_kernel, mamba.prefers_fused_kernel = kernel, lambda tensor: True
    theirs, _ = mixer(x, packed_seq_params=parameters)
    seen["equal"] = torch.equal(ours, theirs)
    return seen


def test_mamba_ssms_kernel_gets_supported_arguments() -> None:
    """The kernel needs [channels, width] weights and contiguous int32 ``seq_idx``.

    ``seq_idx`` is [b, l]. Group and head sizes are passed by keyword.
    """
    seen = run_ranks(functools.partial(fused_arguments), 1)[0]
    seq_idx = seen.pop("seq_idx")
    assert seq_idx.dtype == torch.int32 and seq_idx.is_contiguous() and seq_idx.shape == (1, 30)
    assert seen == {
        "activation": "silu",
        "headdim": 8,
        "ngroups": 2,
        "norm_before_gate": False,
        "chunk_size": 128,
        "contiguous": True,
        "shapes": ((160, 4), (16,)),
        "equal": True,
    }
