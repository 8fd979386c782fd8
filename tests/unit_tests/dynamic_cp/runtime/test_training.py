"""Training on packs, each with its CP size, equals one rank.

It is in float32, with long-tailed lengths and uneven masks.
"""

import contextlib
import functools
from collections.abc import Sequence
from typing import Any
from unittest import mock

import numpy as np
import pytest
import torch
import torch.distributed as dist
from megatron.core.packed_seq_params import PackedSeqParams
from megatron.core.process_groups_config import ProcessGroupCollection

from megatron_cp.data.samples.varlen import MockVarlenDataset
from megatron_cp.dynamic_cp import CostModel, Schedule, schedule, schedule_fixed_cp
from megatron_cp.dynamic_cp.buddy_tree import all_to_all_size, legal_groups
from megatron_cp.dynamic_cp.runtime.active_group import active_group
from megatron_cp.dynamic_cp.runtime.domain import DynamicGroups
from megatron_cp.dynamic_cp.runtime.iterator import DynamicBatches, _check
from megatron_cp.dynamic_cp.runtime.packing import MicrobatchParams, dummy_sample
from megatron_cp.parallel.device import device
from megatron_cp.parallel.layout import RankLayout, layout_of
from megatron_cp.training.setup import setup
from megatron_cp.training.step import train_step
from tests.packed_runs import pack
from tests.ranks import RanksFailed, run_ranks
from tests.training_runs import VOCAB, Losses, losses_of, tiny_config, worst_difference
from tests.unit_tests.training.layouts.cases import CP2, PP2, SP, TP2, VPP2

LENGTHS = [int(x) for x in np.random.default_rng(3).choice([5, 17, 40, 9, 3, 64, 100, 23, 1, 12], size=60)]
BATCH = 12
STEPS = 4


def train(
    overrides: dict[str, Any], per_rank: int, multiple: int = 1, dynamic: bool = True, skip: int = 0
) -> tuple[Losses, list[dict[int, int]]]:
    """Return (loss, gradient norm) of each step, and the CP sizes that were used.

    The first ``skip`` steps are not trained.
    """
    config = tiny_config(model__sequence_packing_scheduler="default_dynamic_cp", dataset__seq_length=128, **overrides)
    run = setup(config, VOCAB)
    layout = layout_of(config.model, config.dist, dist.get_world_size())
    groups = DynamicGroups(layout, blocks=legal_groups(layout.dp * layout.cp))
    model = config.model
    width = model.tensor_model_parallel_size if model.sequence_parallel else 1
    options: dict[str, Any] = {"microbatch_multiple": multiple, "sequence_parallel_size": width}
    if dynamic:
        options["pipeline_size"] = model.pipeline_model_parallel_size
    options |= {"num_ranks": len(groups.domain), "max_seqlen_per_rank": per_rank}
    make = schedule if dynamic else schedule_fixed_cp

    def scheduler(lengths: Sequence[int], cost: CostModel) -> Schedule:
        return make(lengths, cost=cost, **options)

    batches = DynamicBatches(
        MockVarlenDataset(LENGTHS, VOCAB, seed=5, masked_fraction=0.4),
        BATCH,
        scheduler,
        groups,
        lockstep=model.pipeline_model_parallel_size > 1,
        device=run.device,
    )
    batches.load_state_dict({"consumed_samples": skip * BATCH})
    losses, sizes = [], []
    for _ in range(STEPS - skip):
        plan = next(batches)
        result = train_step(run, batches.microbatches(plan))
        losses.append(losses_of(result))
        sizes.append(plan.cp_sizes)
    batches.close()
    groups.destroy()
    run.close()
    return losses, sizes


@functools.cache
def single_rank() -> Losses:
    return run_ranks(train, 1, {}, 128)[0][0]


RECOMPUTE = {
    "model__recompute_granularity": "full",
    "model__recompute_method": "uniform",
    "model__recompute_num_layers": 1,
}
Case = tuple[int, dict[str, Any], int, dict[str, Any]]  # ranks, layout, tokens per rank, options of ``train``
CASES: dict[str, Case] = {
    "2 ranks": (2, {}, 64, {}),
    "3 ranks": (3, {}, 48, {}),
    "4 ranks": (4, {}, 32, {}),
    "4 ranks, configured cp2": (4, CP2, 32, {}),
    "4 ranks, decentralized": (4, CP2 | {"dist__use_decentralized_pg": True}, 32, {}),
    "6 ranks": (6, {}, 32, {}),
    "8 ranks": (8, {}, 16, {}),
    "4 ranks, fixed size": (4, {}, 32, {"dynamic": False}),
    "tp2": (4, TP2, 64, {}),
    "tp2 sp": (4, TP2 | SP, 64, {}),
    "pp2": (4, PP2, 64, {}),
    "pp2 vpp2": (4, PP2 | VPP2, 64, {"multiple": 2}),
    "full recomputation": (4, RECOMPUTE, 32, {}),
    "selective recomputation": (4, {"model__recompute_granularity": "selective"}, 32, {}),
}


def check_case(case: Case, model: dict[str, Any], reference: Losses) -> None:
    """Check that ``model`` trains like one rank in the case's layout.

    Groups have several sizes if they may differ.
    """
    world_size, overrides, per_rank, options = case
    results = run_ranks(functools.partial(train, **options), world_size, model | overrides, per_rank)
    assert all(losses == results[0][0] for losses, _ in results), "ranks report different losses"
    worst_loss, worst_norm = worst_difference(results[0][0], reference)
    assert worst_loss < 1e-5 and worst_norm < 1e-5, (worst_loss, worst_norm)
    if options.get("dynamic", True):
        sizes = {size for step in results[0][1] for size in step}
        assert len(sizes) > 1, "a schedule with one CP size only would prove little"


# training/packed/test_equivalence.py trains the other features, alone or combined, as a run configures them.
FAST = ("4 ranks, decentralized", "tp2 sp", "full recomputation", "selective recomputation")


@pytest.mark.parametrize("name", [n if n in FAST else pytest.param(n, marks=pytest.mark.slow) for n in CASES])
def test_packed_training_equals_one_rank(name: str) -> None:
    check_case(CASES[name], {}, single_rank())


def without_the_switch() -> None:
    import contextlib

    from megatron_cp.models.layers import transformer

    transformer.active_group = lambda groups, packed: contextlib.nullcontext()
    train({"model__apply_rope_fusion": False}, 32)  # Transformer Engine's kernel does not count the tokens


def test_layers_need_the_switch() -> None:
    """Rotary positions would be cut for the configured group otherwise.

    They must be cut for the microbatch's group.
    """
    with pytest.raises(RanksFailed, match=r"tokens of a packed batch, not 1/"):
        run_ranks(without_the_switch, 4)


def test_the_group_is_restored_also_after_an_error() -> None:
    groups = ProcessGroupCollection(cp="configured")
    packed = PackedSeqParams(qkv_format="thd", cp_group="microbatch's")
    with pytest.raises(RuntimeError), active_group(groups, packed):
        assert groups.cp == "microbatch's"
        raise RuntimeError
    assert groups.cp == "configured"
    with active_group(groups, None):
        assert groups.cp == "configured"


class Router:
    cp_group, tp_cp_group, idle = "configured", "configured", False


@pytest.mark.parametrize("idle", [False, True])
def test_everything_that_keeps_a_group_is_switched_and_restored(idle: bool) -> None:
    groups, router = ProcessGroupCollection(cp="configured", tp_cp="configured"), Router()
    packed = MicrobatchParams(qkv_format="thd", cp_group="mine", tp_cp_group="wide", idle=idle)
    for failing in (False, True):
        with contextlib.suppress(RuntimeError), active_group(groups, packed, router):
            assert (groups.cp, groups.tp_cp) == (router.cp_group, router.tp_cp_group) == ("mine", "wide")
            assert router.idle is idle
            other = MicrobatchParams(qkv_format="thd", cp_group="another")  # recomputed in between
            with active_group(groups, other, router):
                assert groups.cp == "another" and router.tp_cp_group == "wide"
            assert groups.cp == "mine"
            if failing:
                raise RuntimeError
        assert (groups.cp, groups.tp_cp) == (router.cp_group, router.tp_cp_group) == ("configured", "configured")
        assert router.idle is False


def levels_of_blocks() -> list[tuple[int, list[int], list[int], list[int]]]:
    size = functools.partial(all_to_all_size, heads=8, ranks_per_node=2)
    blocks = legal_groups(4)
    groups = DynamicGroups(RankLayout(4), blocks=blocks, at_start=True, a2a_size=size, with_tensor_parallel=True)
    found = []
    for block in blocks:
        if groups.position in block:
            of_block = groups.of_block(block)
            assert of_block.levels is not None and of_block.tp_cp is of_block.cp
            ranks = [dist.get_process_group_ranks(group) for group in (*of_block.levels, of_block.cp)]
            found.append((len(block), *ranks))
    groups.destroy()
    return found


def test_a_block_has_all_to_all_groups_inside_nodes_and_a_ring_across() -> None:
    results = run_ranks(levels_of_blocks, 4)
    assert (4, [0, 1], [0, 2], [0, 1, 2, 3]) in results[0] and (4, [2, 3], [1, 3], [0, 1, 2, 3]) in results[3]
    assert (2, [2, 3], [2], [2, 3]) in results[2] and (1, [1], [1], [1]) in results[1]


@pytest.mark.parametrize(
    ("block", "heads", "node", "size"),
    [
        (range(8), 8, 8, 8),
        (range(8), 8, 4, 4),
        (range(8, 16), 4, 8, 4),
        (range(8), 6, 8, 2),
        (range(3), 8, 8, 1),
        (range(3), 6, 8, 3),
        (range(8, 14), 6, 4, 2),
        (range(2, 4), 8, 3, 1),
        (range(5, 6), 8, 4, 1),
    ],
)
def test_the_all_to_all_level_of_a_block(block: range, heads: int, node: int, size: int) -> None:
    assert all_to_all_size(tuple(block), heads, node) == size


def wide_groups() -> list[list[int]]:
    groups = DynamicGroups(RankLayout(8, tp=2, pp=2), blocks=[(0, 1)], with_tensor_parallel=True)
    groups.prepare([(0, 1)])
    blocks = [(0, 1), (groups.position,)]
    found = [dist.get_process_group_ranks(groups.of_block(block).tp_cp) for block in blocks]
    groups.destroy()
    return found


def test_a_block_with_its_tensor_parallel_ranks() -> None:
    results = run_ranks(wide_groups, 8)
    assert results[0] == [[0, 1, 2, 3], [0, 1]] and results[7] == [[4, 5, 6, 7], [6, 7]]


def connected(at_start: bool) -> list[list[list[int]]]:
    """Return the groups that NCCL would connect.

    Before the first step, and before steps that use these blocks.
    """
    found: list[list[int]] = []

    def all_reduce(tensor: torch.Tensor, group: dist.ProcessGroup) -> None:
        found.append(dist.get_process_group_ranks(group))

    with mock.patch.multiple(dist, get_backend=lambda group=None: "nccl", all_reduce=all_reduce):
        size = functools.partial(all_to_all_size, heads=8, ranks_per_node=2)
        groups = DynamicGroups(RankLayout(4), blocks=legal_groups(4), at_start=at_start, a2a_size=size)
        steps = []
        for blocks in ([], [(0, 1), (2,), (3,)], [(0, 1), (2, 3)], [(0, 1, 2, 3)], [(0, 1, 2, 3)]):
            found.clear()
            groups.prepare(blocks)
            steps.append(list(found))
    groups.destroy()
    return steps


@pytest.mark.parametrize("at_start", [False, True])
def test_groups_are_connected_before_the_step_that_uses_them_first(at_start: bool) -> None:
    """All members must connect in the same order.

    Unused groups are not connected, because connections take GPU memory.
    """
    results = run_ranks(connected, 4, at_start)
    assert results[0] == [[], [[0, 1]], [], [[0, 1, 2, 3], [0, 1], [0, 2]], []]
    assert results[3] == [[], [], [[2, 3]], [[0, 1, 2, 3], [2, 3], [1, 3]], []]


def created() -> list[list[int]]:
    with mock.patch.object(dist, "new_group", wraps=dist.new_group) as new_group:
        groups = DynamicGroups(RankLayout(4), blocks=legal_groups(4))
        groups.prepare([(0,), (2, 3), (1,)])
    groups.destroy()
    return [call.args[0] for call in new_group.call_args_list]


def test_a_rank_creates_no_group_of_another_rank_alone() -> None:
    """Groups of several ranks are created by all."""
    assert run_ranks(created, 4) == [[[rank], [2, 3]] for rank in range(4)]


def packed_values() -> dict[str, list]:
    group = dist.new_group([0, 1])
    if dist.get_rank() > 1:
        return {}
    samples = [
        {"tokens": torch.arange(1, 6), "labels": torch.arange(2, 7), "loss_mask": torch.ones(5)},
        {"tokens": torch.arange(11, 15), "labels": torch.arange(12, 16), "loss_mask": torch.tensor([0.0, 1, 1, 1])},
    ]
    batch = pack(samples, group)
    parameters = batch.packed_seq_params
    return {
        "tokens": batch.tokens.tolist(),
        "labels": batch.labels.tolist(),
        "mask": batch.loss_mask.tolist(),
        "positions": batch.position_ids.tolist(),
        "real": parameters.cu_seqlens_q.tolist(),
        "padded": parameters.cu_seqlens_q_padded.tolist(),
    }


def test_a_pack_is_zigzag_within_each_sample_and_padded_to_twice_the_group() -> None:
    first, second = run_ranks(packed_values, 2)
    assert first["padded"] == second["padded"] == [0, 8, 12] and first["real"] == [0, 5, 9]
    assert first["tokens"] == [[1, 2, 0, 0, 11, 14]] and second["tokens"] == [[3, 4, 5, 0, 12, 13]]
    assert first["labels"] == [[2, 3, 0, 0, 12, 15]]
    assert first["mask"] == [[1, 1, 0, 0, 0, 1]] and second["mask"] == [[1, 1, 1, 0, 1, 1]]
    assert first["positions"] == [[0, 1, 0, 0, 0, 3]]


def test_a_sample_with_a_wrong_length_is_named() -> None:
    sample = dummy_sample()
    sample["labels"] = sample["labels"][:-1]
    with pytest.raises(ValueError, match="sample 1 of the data set has 1 labels, but 2 are required"):
        _check(1, sample, 2)


def groups_of_a_domain() -> tuple[int, list]:
    blocks = legal_groups(2)
    groups = DynamicGroups(RankLayout(4, pp=2), blocks=blocks, at_start=True)
    with pytest.raises(ValueError, match="not a legal group"):
        groups.prepare([(1, 0)])
    sums = []
    for positions in blocks:
        if groups.position in positions:
            total = torch.tensor(2 ** dist.get_rank(), device=device())
            dist.all_reduce(total, group=groups.get(positions))
            sums.append(int(total))
        else:
            with pytest.raises(ValueError, match="not a member"):
                groups.get(positions)
    groups.destroy()
    return groups.position, sums


def test_groups_stay_inside_their_domain() -> None:
    results = run_ranks(groups_of_a_domain, 4)
    assert results == [(0, [3, 1]), (1, [3, 2]), (0, [12, 4]), (1, [12, 8])]


def test_the_schedule_is_prefetched_and_resuming_is_exact() -> None:
    losses, uninterrupted = run_ranks(train, 2, {}, 64)[0]
    # The same samples again, from the second step on: only the data position is restored here.
    sizes = run_ranks(functools.partial(train, skip=1), 2, {}, 64)[0][1]
    assert len(sizes) == STEPS - 1 and sizes == uninterrupted[1:]
    assert len(losses) == STEPS
