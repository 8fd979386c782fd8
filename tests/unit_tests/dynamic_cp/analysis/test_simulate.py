import numpy as np
import pytest

from megatron_cp.dynamic_cp import CostModel, Group, Schedule, schedule_fixed_cp
from megatron_cp.dynamic_cp.analysis.simulate import simulate

UNIT = CostModel(per_microbatch=0.0, quadratic=0.0, linear=1.0, small_tile=0)  # a token is a second


def plan(ranks, *microbatches):
    return Schedule(ranks, 100, [[Group(tuple(r), tuple(ids)) for r, ids in groups] for groups in microbatches])


def test_a_group_waits_for_its_last_member():
    step = simulate(plan(2, [([0], [0]), ([1], [1])], [([0, 1], [2])]), [3, 7, 4], UNIT)
    assert [(span.start, span.stop) for span in step.spans] == [(0, 3), (0, 7), (7, 9)]
    assert step.seconds == 9
    assert step.over_bare_work == pytest.approx(9 * 2 / 14)


def test_dense_ranks_do_not_wait_for_each_other():
    microbatches = [([0], [0]), ([1], [1])], [([0], [2]), ([1], [3])]
    assert simulate(plan(2, *microbatches), [5, 1, 1, 5], UNIT).seconds == 6
    assert simulate(plan(2, *microbatches), [5, 1, 1, 5], UNIT, sync_ranks=2).seconds == 10


def test_domains_keep_step_and_wide_groups_join_them():
    microbatches = [([0], [0]), ([2], [1])], [([0, 1, 2, 3], [2])]
    assert simulate(plan(4, *microbatches), [5, 3, 8], UNIT, sync_ranks=2).seconds == 7


@pytest.mark.parametrize("stages", [1, 2, 4, 8])
@pytest.mark.parametrize("count", [1, 2, 5, 16])
def test_equal_microbatches_have_the_textbook_bubble(stages, count):
    microbatches = [[([0], [k]), ([1], [count + k])] for k in range(count)]
    step = simulate(plan(2, *microbatches), [6] * (2 * count), UNIT, pipeline_size=stages)
    assert step.seconds == pytest.approx(6 * (count + stages - 1))


def test_a_long_microbatch_holds_up_the_pipeline():
    even = simulate(plan(1, *[[([0], [k])] for k in range(4)]), [5, 5, 5, 5], UNIT, pipeline_size=4)
    uneven = simulate(plan(1, *[[([0], [k])] for k in range(4)]), [2, 2, 14, 2], UNIT, pipeline_size=4)
    assert uneven.seconds > even.seconds


@pytest.mark.parametrize("balanced", [True, False])
def test_fixed_cp_packs_everything_within_memory(balanced):
    rng = np.random.default_rng(0)
    lengths = rng.integers(1, 300, size=200)
    found = schedule_fixed_cp(lengths, 8, 200, cp_size=2, balanced=balanced, microbatch_multiple=3)
    assert sorted(x for groups in found.microbatches for g in groups for x in g.sample_ids) == list(range(200))
    assert found.num_microbatches % 3 == 0
    for groups in found.microbatches:
        for group in groups:
            assert len(group.ranks) == 2 and group.ranks[0] % 2 == 0
            assert sum(-(-lengths[x] // 4) * 4 for x in group.sample_ids) <= 400


def test_balancing_helps_and_the_smallest_cp_size_is_found():
    rng = np.random.default_rng(1)
    lengths = rng.lognormal(5, 1, size=300).astype(int) + 1
    plans = [schedule_fixed_cp(lengths, 8, 4096, balanced=balanced) for balanced in (True, False)]
    assert {len(g.ranks) for groups in plans[0].microbatches for g in groups} == {1}
    assert {len(g.ranks) for groups in schedule_fixed_cp([9000], 8, 4096).microbatches for g in groups} == {4}
    even, plain = (simulate(found, lengths, UNIT, sync_ranks=8).seconds for found in plans)
    assert even < plain


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"cp_size": 3}, "cp_size=3: must divide"),
        ({"cp_size": 1}, "sample 1 of 900 tokens does not fit: 1 ranks.*at least 900"),
        ({"max_seqlen_per_rank": 100}, "the longest sample of 900 tokens does not fit"),
    ],
)
def test_fixed_cp_errors_name_the_setting(arguments, message):
    with pytest.raises(ValueError, match=message):
        schedule_fixed_cp([5, 900], **{"num_ranks": 8, "max_seqlen_per_rank": 500} | arguments)
