"""Our attention module: results, process groups, and refusals."""

import re

import pytest
import torch
import torch.distributed as dist
from megatron.core.packed_seq_params import PackedSeqParams
from megatron.core.process_groups_config import ProcessGroupCollection
from megatron.core.transformer.enums import AttnMaskType
from megatron.core.transformer.transformer_config import TransformerConfig

from megatron_cp.attention.context import CPContext
from megatron_cp.attention.modules.native import ContextParallelAttention
from megatron_cp.attention.reference import reference_attention
from megatron_cp.attention.sharding import partition_indices, shard_sequence
from tests.ranks import run_ranks
from tests.unit_tests.attention.harness import make_groups, reference_of_pack

HEADS, KV, DIM = 8, 4, 16


def make_config(**changes) -> TransformerConfig:
    settings = {
        "num_layers": 4,
        "hidden_size": HEADS * DIM,
        "num_attention_heads": HEADS,
        "num_query_groups": KV,
        "attention_dropout": 0.0,
        "use_cpu_initialization": True,
        "hierarchical_context_parallel_sizes": None,
    }
    return TransformerConfig(**(settings | changes))


def build(config, layer_number=1, mask=AttnMaskType.causal, **options) -> ContextParallelAttention:
    options.setdefault("pg_collection", ProcessGroupCollection())
    return ContextParallelAttention(config, layer_number, mask, "self", **options)


def draw(tokens, batch=2):
    generator = torch.Generator().manual_seed(1)
    return [torch.randn(tokens, batch, heads, DIM, generator=generator) for heads in (HEADS, KV, KV)]


def _sharded(comm_type: str, changes: dict) -> list[float]:
    """Return errors of dense, dynamic and one-rank microbatches of one module.

    Dense microbatches come first and last.
    """
    rank, size = dist.get_rank(), dist.get_world_size()
    pair = make_groups(2)
    config = make_config(context_parallel_size=size, hierarchical_context_parallel_sizes=[2, size // 2], **changes)
    module = build(config, cp_comm_type=comm_type, pg_collection=ProcessGroupCollection(cp=dist.group.WORLD, hcp=pair))
    offset = None
    if module.softmax_offset is not None:
        offset = module.softmax_offset.detach()
    errors = []

    def compare(group_rank, group_size, call, **options):
        qkv = draw(16 * size)
        expected = reference_attention(
            *(x.double() for x in qkv), window_size=module.window_size, softmax_offset=offset, **options
        )
        out = call([shard_sequence(x, 0, group_rank, group_size) for x in qkv])
        want = shard_sequence(expected, 0, group_rank, group_size).flatten(2)
        assert out.shape == want.shape
        errors.append(((out.double() - want).abs().max() / expected.abs().max()).item())

    compare(rank, size, lambda qkv: module(*qkv, None))
    compare(rank, size, lambda qkv: module(*qkv, None, attn_mask_type=AttnMaskType.no_mask), causal=False)
    if comm_type != "a2a+p2p":
        dynamic = PackedSeqParams(qkv_format="sbhd", cp_group=pair[0], local_cp_size=2)
        compare(rank % 2, 2, lambda qkv: module(*qkv, None, packed_seq_params=dynamic))
    alone = PackedSeqParams(qkv_format="sbhd", local_cp_size=1)
    compare(0, 1, lambda qkv: module(*qkv, None, packed_seq_params=alone))
    compare(rank, size, lambda qkv: module(*qkv, None))
    return errors


@pytest.mark.parametrize("comm_type", ["p2p", "all_gather", "a2a", "a2a+p2p"])
def test_static_and_dynamic_groups(comm_type):
    for changes in ({}, {"window_size": (10, 0), "softmax_type": "learnable"}, {"softmax_type": "off-by-one"}):
        for errors in run_ranks(_sharded, 4, comm_type, changes):
            assert max(errors) <= 2e-6 and len(errors) >= 4


def _packed() -> float:
    rank, size = dist.get_rank(), dist.get_world_size()
    module = build(make_config(context_parallel_size=size), pg_collection=ProcessGroupCollection(cp=dist.group.WORLD))
    real, padded = torch.tensor([0, 5, 30], dtype=torch.int32), torch.tensor([0, 8, 40], dtype=torch.int32)
    params = PackedSeqParams(
        qkv_format="thd", cu_seqlens_q=real, cu_seqlens_kv=real, cu_seqlens_q_padded=padded, cu_seqlens_kv_padded=padded
    )
    qkv = [x.squeeze(1) for x in draw(40, batch=1)]
    expected = reference_of_pack(
        *(x.double() for x in qkv), cu_seqlens=real.tolist(), cu_seqlens_padded=padded.tolist()
    )
    index = partition_indices(padded, rank, size)
    out = module(*(x[index] for x in qkv), None, packed_seq_params=params)
    assert out.shape == (40 // size, HEADS * DIM), "packed output has no batch dimension"
    return ((out.double() - expected[index].flatten(1)).abs().max() / expected.abs().max()).item()


def test_packed_sequences():
    assert max(run_ranks(_packed, 2)) <= 2e-6


def _refusals() -> list[str]:
    size = dist.get_world_size()
    world, (a2a, p2p) = dist.group.WORLD, make_groups(2)
    quarter = dist.new_group([dist.get_rank()], use_local_synchronization=True)
    hierarchical = make_config(context_parallel_size=size, hierarchical_context_parallel_sizes=[2, size // 2])
    flat = make_config(context_parallel_size=size)

    def attempt(config, hcp=None, cp=world, comm_type="a2a+p2p"):
        groups = ProcessGroupCollection(cp=cp) if hcp is None else ProcessGroupCollection(cp=cp, hcp=hcp)
        build(config, cp_comm_type=comm_type, pg_collection=groups)

    attempts = [
        lambda: build(flat),
        lambda: attempt(flat, cp=quarter, comm_type="p2p"),
        lambda: attempt(hierarchical),
        lambda: attempt(hierarchical, [a2a]),
        lambda: attempt(hierarchical, [a2a, world]),
        lambda: attempt(flat, [a2a, p2p]),
        lambda: attempt(hierarchical, [p2p, a2a]),
        lambda: attempt(hierarchical, comm_type="ring"),
    ]
    messages = []
    for build_one in attempts:
        try:
            build_one()
            messages.append("built")
        except ValueError as error:
            messages.append(str(error))
    return messages


def test_groups_that_are_missing_or_of_other_sizes_are_refused():
    expected = [
        "layer 1: model.context_parallel_size=4 but pg_collection.cp, its process group, is missing",
        "pg_collection.cp has 1 ranks, but model.context_parallel_size requires 4",
        r"needs pg_collection.hcp, the a2a and p2p process groups of sizes \[2, 2\], but it is missing",
        "pg_collection.hcp must hold the a2a and the p2p process group",
        r"pg_collection.hcp's p2p group has 4 ranks, but hierarchical_context_parallel_sizes=\[2, 2\] requires 2",
        r"needs hierarchical_context_parallel_sizes=\[a2a, p2p\] with product model.context_parallel_size=4, got None",
        None,
        "comm_type 'ring' is unknown",
    ]
    for rank, messages in enumerate(run_ranks(_refusals, 4)):
        for pattern, message in zip(expected, messages, strict=True):
            if pattern is not None:
                assert re.search(pattern, message), (pattern, message)
        # Swapped levels put the middle ranks in each other's place.
        assert ("a2a groups must be neighbours" in messages[6]) == (rank in (1, 2))


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (
            {"config": {"attention_dropout": 0.1}},
            "attention_dropout=0.1 is not supported.*set attention_dropout=0",
        ),
        ({"attention_dropout": 0.2}, "attention_dropout=0.2 is not supported"),
        ({"surprise": 1}, r"unknown arguments \['surprise'\]"),
    ],
)
def test_unsupported_features_are_refused_when_built(options, message):
    with pytest.raises(ValueError, match=message):
        build(make_config(**options.pop("config", {})), **options)
    with pytest.raises(ValueError, match="attention_type 'cross' is not supported"):
        ContextParallelAttention(make_config(), 1, AttnMaskType.causal, "cross", pg_collection=ProcessGroupCollection())


def test_unsupported_features_are_refused_when_called():
    module, qkv = build(make_config()), draw(8)
    with pytest.raises(ValueError, match=r"attention_mask of shape \(1, 1, 8, 8\) is not used; pass None"):
        module(*qkv, torch.zeros(1, 1, 8, 8, dtype=torch.bool))
    with pytest.raises(ValueError, match="attention_bias is not supported"):
        module(*qkv, None, attention_bias=torch.zeros(1))
    with pytest.raises(ValueError, match=r"attn_mask_type AttnMaskType\.arbitrary is not supported; use causal"):
        module(*qkv, None, attn_mask_type=AttnMaskType.arbitrary)
    with pytest.raises(ValueError, match=r"AttnMaskType\.padding is not supported.*pack sequences"):
        module(*qkv, None, attn_mask_type=AttnMaskType.padding)
    with pytest.raises(ValueError, match="local_cp_size=2 without cp_group"):
        module(*qkv, None, packed_seq_params=PackedSeqParams(qkv_format="sbhd", local_cp_size=2))
    packed = [x[:, 0] for x in qkv]
    with pytest.raises(ValueError, match="needs cu_seqlens_q"):
        module(*packed, None, packed_seq_params=PackedSeqParams(qkv_format="thd"))
    ends = [torch.tensor([0, n, 8]) for n in (3, 4)]
    with pytest.raises(ValueError, match="cu_seqlens_q and cu_seqlens_kv differ"):
        module(
            *packed,
            None,
            packed_seq_params=PackedSeqParams(qkv_format="thd", cu_seqlens_q=ends[0], cu_seqlens_kv=ends[1]),
        )


def test_windows_skip_the_layers_megatron_core_skips():
    config = make_config(window_size=(4, 0), window_attn_skip_freq=2)
    assert [build(config, layer).window_size for layer in (1, 2, 3, 4)] == [(4, 0), None, (4, 0), None]


def test_scale_is_megatron_cores():
    assert build(make_config()).softmax_scale == DIM**-0.5
    assert build(make_config(), softmax_scale=0.5).softmax_scale == 0.5
    assert build(make_config(), k_channels=64, v_channels=16).softmax_scale == 64**-0.5


def test_scaling_by_layers_changes_nothing_as_upstream():
    """Division by the layer's number must cancel, as it does upstream.

    DotProductAttention divides by the layer's number, and its softmax multiplies by it: for the range of float16.
    """
    scaled = make_config(apply_query_key_layer_scaling=True, attention_softmax_in_fp32=True)
    assert build(scaled, layer_number=3).softmax_scale == DIM**-0.5


def _offsets(tp: int) -> tuple[list[float], bool, dict]:
    rank = dist.get_rank()
    group = dist.new_group([rank], use_local_synchronization=True) if tp == 1 else dist.group.WORLD
    torch.manual_seed(5)
    module = build(
        make_config(softmax_type="learnable", tensor_model_parallel_size=tp),
        pg_collection=ProcessGroupCollection(tp=group),
    )
    alone = dist.new_group([rank], use_local_synchronization=True)
    state = module.sharded_state_dict("attn.", metadata={"dp_cp_group": alone})
    ((name, tensor),) = state.items()
    return module.softmax_offset.tolist(), module.softmax_offset.tensor_model_parallel, {name: tensor.global_shape}


def test_learnable_offsets_are_sharded_over_tensor_parallel_ranks_and_start_the_same():
    whole = run_ranks(_offsets, 1, 1)[0][0]
    parts = run_ranks(_offsets, 2, 2)
    assert len(whole) == HEADS and len(set(whole)) == HEADS
    assert parts[0][0] + parts[1][0] == whole
    assert all(marked and state == {"attn.softmax_offset": (HEADS,)} for _, marked, state in parts)


def test_without_context_parallelism_no_group_is_needed():
    module = build(make_config())
    assert module.context == CPContext.alone("p2p")
    qkv = draw(8)
    out = module(*qkv, None)
    expected = reference_attention(*(x.double() for x in qkv)).flatten(2)
    assert torch.allclose(out.double(), expected, atol=1e-6)
