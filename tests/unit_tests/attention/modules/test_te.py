"""Transformer Engine's attention gets the right groups.

The tests use a stand-in for its class, which needs a GPU. The stand-in has the group handling of megatron-core 0.19.2's
TEDotProductAttention: hierarchical groups come from global state (empty here), and a microbatch's group stays set after
the microbatch.
"""

import pytest
import torch
import torch.distributed as dist
from megatron.core.packed_seq_params import PackedSeqParams
from megatron.core.process_groups_config import ProcessGroupCollection
from megatron.core.transformer.enums import AttnMaskType

from megatron_cp.attention.context import CPContext
from megatron_cp.attention.functional import attend_in_context
from megatron_cp.attention.modules.probe import ProbeError, ProbeInputs, probe_attention
from megatron_cp.attention.modules.te import (
    _te_groups,
    have_transformer_engine,
    te_attention_class,
    te_subclass,
)
from megatron_cp.attention.tiles import Mask
from tests.ranks import run_ranks
from tests.unit_tests.attention.harness import make_groups
from tests.unit_tests.attention.modules.test_native import make_config


class TransformerEngine(torch.nn.Module):
    """Stand-in for the groups of Transformer Engine's DotProductAttention.

    It computes with our transports.
    """

    def set_context_parallel_group(self, cp_group, cp_global_ranks, cp_stream, cp_comm_type="p2p"):
        self.cp_group, self.cp_global_ranks = cp_group, cp_global_ranks
        self.cp_stream, self.cp_comm_type = cp_stream, cp_comm_type

    def forward(self, query, key, value, attention_mask, **_):
        if self.cp_group is None:  # no group means no communication, and no word about it
            context = CPContext.alone()
        else:
            context = CPContext.build(self.cp_comm_type, self.cp_group)
        return attend_in_context(context, query, key, value, mask=Mask.build(True, None)).flatten(2)


class CoreAttention(TransformerEngine):
    """megatron-core's TEDotProductAttention."""

    cp_stream = "stream"

    def __init__(self, config, layer_number, attn_mask_type, attention_type, cp_comm_type="p2p", pg_collection=None):
        super().__init__()
        self.config = config
        group = None if cp_comm_type == "a2a+p2p" else pg_collection.cp
        TransformerEngine.set_context_parallel_group(self, group, None, "stream", cp_comm_type)

    def forward(self, query, key, value, attention_mask, attn_mask_type=None, packed_seq_params=None):
        if packed_seq_params is not None and packed_seq_params.cp_group is not None:
            group = packed_seq_params.cp_group
            super().set_context_parallel_group(group, None, CoreAttention.cp_stream, self.cp_comm_type)
        return super().forward(query, key, value, attention_mask)


def build(base, comm_type, hcp=None):
    size = dist.get_world_size()
    config = make_config(context_parallel_size=size, hierarchical_context_parallel_sizes=[2, size // 2])
    groups = ProcessGroupCollection(cp=dist.group.WORLD)
    if hcp is not None:
        groups.hcp = hcp
    return base(config, 3, AttnMaskType.causal, "self", cp_comm_type=comm_type, pg_collection=groups)


def probed(module):
    """Return the result of a probe with inputs that a CPU can take."""
    module.probe_inputs = lambda: ProbeInputs(4, 4, torch.float32, torch.device("cpu"))
    try:
        probe_attention([torch.nn.ModuleList([module])])
    except ProbeError as error:
        return str(error)
    return "passed"


def _groups() -> dict:
    hcp = list(make_groups(2))
    ours = te_subclass(CoreAttention)
    hierarchical, flat = build(ours, "a2a+p2p", hcp), build(ours, "a2a")
    report = {
        "types": (hierarchical.cp_comm_type, flat.cp_comm_type, build(ours, None).cp_comm_type),
        "groups": hierarchical.cp_group == hcp and flat.cp_group is dist.group.WORLD,
        "ranks": (hierarchical.cp_global_ranks, flat.cp_global_ranks),
        "streams": (hierarchical.cp_stream, flat.cp_stream),
        "probe": (probed(hierarchical), probed(flat)),
    }
    # The case that the probe is for: the unchanged class, silently without its groups.
    silent = build(ours, "a2a+p2p", hcp)
    TransformerEngine.set_context_parallel_group(silent, None, None, "stream", "a2a+p2p")
    report["silent"] = probed(silent)
    return report


def test_groups_transport_and_stream_are_the_given_ones():
    for report in run_ranks(_groups, 4):
        assert report["types"] == ("a2a+p2p", "a2a", "p2p")
        assert report["groups"]
        assert report["ranks"] == ([0, 1, 2, 3], [0, 1, 2, 3])
        assert report["streams"] == ("stream", "stream")
        assert report["probe"] == ("passed", "passed")
        assert "layer 3, a2a+p2p" in report["silent"] and "differs from the one-rank answer" in report["silent"]


def _dynamic() -> dict:
    hcp = make_groups(2)
    module = build(te_subclass(CoreAttention), "p2p")
    qkv = [torch.randn(8, 1, 4, 16) for _ in range(3)]
    module(*qkv, None, packed_seq_params=PackedSeqParams(qkv_format="sbhd", cp_group=hcp[0], local_cp_size=2))
    report = {"after a microbatch": module.cp_group is dist.group.WORLD}
    before = module.set_context_parallel_group(hcp[0])
    report["set"] = module.cp_group is hcp[0] and module.cp_comm_type == "p2p"
    report["kept"] = before.size == 4 and module.context.size == 2
    module.set_context_parallel_group(before)
    report["restored"] = module.cp_group is dist.group.WORLD
    module.set_context_parallel_group(hcp[1])
    module.set_context_parallel_group(None)
    report["configured"] = module.cp_group is dist.group.WORLD
    try:
        module.set_context_parallel_group(hcp[0], None, None, "a2a")
    except ValueError as error:
        report["another transport"] = "was built for 'p2p', got 'a2a'" in str(error)
    two_level = build(te_subclass(CoreAttention), "a2a+p2p", list(hcp))
    try:
        two_level(*qkv, None, packed_seq_params=PackedSeqParams(qkv_format="sbhd", cp_group=hcp[0], local_cp_size=2))
    except ValueError as error:
        report["one group for two levels"] = "takes two process groups" in str(error)
    return report


def test_a_microbatch_group_does_not_outlive_the_microbatch():
    for report in run_ranks(_dynamic, 4):
        assert all(report.values()) and len(report) == 7, report


def _set() -> list:
    """Return the transports after upstream's and our class were given a group.

    Upstream sets a group by position, without a transport.
    """
    a2a, _ = make_groups(2)
    upstream, ours = build(CoreAttention, "a2a"), build(te_subclass(CoreAttention), "a2a")
    kept = []
    for module in (upstream, ours):
        module.set_context_parallel_group(a2a, [0, 1], "stream")
        kept.append(module.cp_comm_type)
    return kept


def test_setting_a_group_keeps_the_transport():
    assert run_ranks(_set, 4) == [["p2p", "a2a"]] * 4


def test_the_stream_is_there_where_groups_may_change(monkeypatch):
    class Unconfigured(CoreAttention):
        """As upstream's class is before any layer was built with context parallelism."""

        cp_stream = None

    config = make_config()
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "Stream", lambda: "made")
    ours = te_subclass(Unconfigured)
    ours(config, 1, AttnMaskType.causal, "self", cp_comm_type="p2p", pg_collection=ProcessGroupCollection(cp=None))
    assert Unconfigured.cp_stream == "made"


def _refused() -> list[str]:
    a2a, _ = make_groups(2)
    ours = te_subclass(CoreAttention)
    messages = []
    for hcp in (None, [a2a], [a2a, dist.group.WORLD]):
        try:
            build(ours, "a2a+p2p", hcp)
            messages.append("built")
        except ValueError as error:
            messages.append(str(error))
    try:
        ours(make_config(context_parallel_size=4), 3, AttnMaskType.causal, "self")
    except ValueError as error:
        messages.append(str(error))
    return messages


def test_missing_groups_are_refused():
    for messages in run_ranks(_refused, 4):
        assert "TEDotProductAttention, layer 3: model.cp_comm_type 'a2a+p2p' needs pg_collection.hcp" in messages[0]
        assert "must hold the a2a and the p2p process group" in messages[1]
        assert "p2p group has 4 ranks" in messages[2]
        assert "pg_collection is None; pass the process groups" in messages[3]


def _order() -> list[int]:
    """Return ranks in the order of their place in the sequence.

    The hierarchy covers every second rank of the world.
    """
    rank = dist.get_rank()
    levels = [[[0, 2], [4, 6], [1, 3], [5, 7]], [[0, 4], [2, 6], [1, 5], [3, 7]]]
    pair = [next(g for g, r in [(dist.new_group(r), r) for r in level] if rank in r) for level in levels]
    dist.barrier()
    return _te_groups(CPContext.build("a2a+p2p", pair))[1]


def test_global_ranks_are_in_sequence_order_with_tensor_parallel_ranks_between():
    assert run_ranks(_order, 8) == [[0, 2, 4, 6], [1, 3, 5, 7]] * 4


def test_the_transport_is_the_configured_one_if_upstream_passes_none():
    """Upstream passes None where the model is not split, but microbatches may be.

    It then asks for both levels' groups.
    """

    class Asking(CoreAttention):
        def __init__(self, *args, cp_comm_type="p2p", pg_collection=None):
            assert cp_comm_type != "a2a+p2p" or hasattr(pg_collection, "hcp")
            super().__init__(*args, cp_comm_type=cp_comm_type, pg_collection=pg_collection)

    groups = ProcessGroupCollection(cp=None)
    kinds = ["a2a", "all_gather", "p2p", "a2a+p2p"]
    for configured, layer, expected in (("a2a", 1, "a2a"), (kinds, 2, "all_gather"), (kinds, 5, "a2a+p2p")):
        config = make_config(cp_comm_type=configured)
        module = te_subclass(Asking)(config, layer, AttnMaskType.causal, "self", pg_collection=groups)
        assert module.cp_comm_type == module.context.comm_type == expected


@pytest.mark.skipif(have_transformer_engine(), reason="Transformer Engine is installed")
def test_without_transformer_engine_the_error_has_a_fix():
    with pytest.raises(ImportError, match=r"Fix: .*, or model\.attention_backend=native"):
        te_attention_class()


@pytest.mark.gpu
@pytest.mark.skipif(not have_transformer_engine(), reason="needs Transformer Engine")
def test_the_real_class_can_be_derived_from():
    assert te_attention_class().__mro__[1].__name__ == "TEDotProductAttention"
