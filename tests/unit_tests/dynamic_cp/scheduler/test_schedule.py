import subprocess
import sys
from dataclasses import replace

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from benchmarks.dynamic_cp_baselines import greedy as greedy_rule
from megatron_cp.dynamic_cp import Group, legal_groups, padded_length, schedule, schedule_fixed_cp
from megatron_cp.dynamic_cp.analysis.report import padding_fraction, rank_tokens
from megatron_cp.dynamic_cp.analysis.simulate import simulate
from megatron_cp.dynamic_cp.distributions import sample_lengths
from megatron_cp.dynamic_cp.scheduler import fixed
from megatron_cp.dynamic_cp.scheduler.gaps import Gaps
from megatron_cp.dynamic_cp.scheduler.jobs import spread_out
from megatron_cp.dynamic_cp.scheduler.problem import make_problem
from megatron_cp.dynamic_cp.token_buckets import fit_to_batches
from megatron_cp.estimate.cost_presets import NAMES, cost_preset
from tests.functional_tests.dynamic_cp.fuzz_scheduler import configuration, failures
from tests.unit_tests.dynamic_cp.scheduler.checks import problems

COST = cost_preset("h100_8b")
MODES = {
    "dense": lambda ranks: {},
    "lock-step": lambda ranks: {"sync_ranks": 8},
    "barrier": lambda ranks: {"sync_ranks": ranks},
    "pipeline": lambda ranks: {"pipeline_size": 4},
}


@settings(max_examples=150, deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(data=st.data())
def test_every_schedule_is_legal(data):
    ranks = data.draw(st.integers(1, 40))
    min_cp = data.draw(st.integers(1, min(ranks, 9)))
    m = data.draw(st.integers(2, 3000))
    most = m // 2 * 2 * ranks
    lengths = data.draw(st.lists(st.integers(1, most), min_size=0, max_size=80))
    multiple = data.draw(st.sampled_from([1, 2, 3, 4]))
    placement = data.draw(st.sampled_from(["zigzag", "balanced"]))
    found = schedule(
        lengths,
        ranks,
        m,
        min_cp_size=min_cp,
        sync_ranks=data.draw(st.sampled_from([d for d in range(1, ranks + 1) if ranks % d == 0])),
        pipeline_size=data.draw(st.sampled_from([1, 2, 4])),
        microbatch_multiple=multiple,
        cost=replace(cost_preset(data.draw(st.sampled_from(NAMES))), placement=placement),
    )
    assert problems(found, lengths, ranks, m, min_cp, multiple, placement=placement) == []


def test_a_slice_of_the_fuzz():
    failed = {number: wrong for number in range(150) if (wrong := failures(number))}
    assert failed == {}


def test_the_fuzz_covers_its_corners():
    drawn = [configuration(number) for number in range(300)]
    assert any(len(lengths) < arguments["num_ranks"] for lengths, arguments in drawn)
    assert any(len(lengths) == 1 for lengths, _ in drawn)
    assert any(len(set(lengths)) == 1 < len(lengths) for lengths, _ in drawn)
    assert any(arguments["num_ranks"] % 2 for _, arguments in drawn)


# Cases that are known to crash, hang or use groups that do not exist in other schedulers.
@pytest.mark.parametrize(
    ("lengths", "ranks", "m", "options"),
    [
        ([100, 100, 1200], 12, 400, {"microbatch_multiple": 2}),
        ([171, 764, 589, 1703, 198, 359, 376], 2, 16384, {"min_cp_size": 2, "microbatch_multiple": 2}),
        ([100, 400], 24, 400, {}),
        ([3600], 12, 400, {}),
        ([100] * 9, 8, 400, {"min_cp_size": 3}),
        ([50, 50], 14, 100, {}),
        ([6144, 2048], 2, 4096, {}),
    ],
)
def test_known_hard_cases(lengths, ranks, m, options):
    found = schedule(lengths, ranks, m, **options)
    min_cp, multiple = options.get("min_cp_size", 1), options.get("microbatch_multiple", 1)
    assert problems(found, lengths, ranks, m, min_cp, multiple) == []


def test_twelve_ranks_accept_samples_that_fit_them():
    assert schedule([3600], 12, 400).microbatches == [[Group(tuple(range(12)), (0,))]]
    schedule([4800], 12, 400)
    with pytest.raises(ValueError, match="max_seqlen_per_rank of at least 402"):
        schedule([4801], 12, 400)


def test_no_samples_no_microbatches():
    assert schedule([], 8, 100).microbatches == []


def test_same_input_same_schedule_in_another_process():
    code = (
        "from megatron_cp.dynamic_cp import schedule; from megatron_cp.dynamic_cp.distributions import sample_lengths;"
        "import hashlib, sys; assert 'torch' not in sys.modules and 'megatron.core' not in sys.modules;"
        "plan = schedule(sample_lengths('documents', 256, 131072, 3), 32, 8192, sync_ranks=8);"
        "print(hashlib.sha256(repr(plan).encode()).hexdigest())"
    )
    runs = [
        subprocess.run(
            [sys.executable, "-c", code], capture_output=True, text=True, check=True, env={"PYTHONHASHSEED": seed}
        ).stdout
        for seed in ("1", "2")
    ]
    assert runs[0] == runs[1] != ""
    lengths = sample_lengths("documents", 256, 131072, 3)
    assert schedule(lengths, 32, 8192) == schedule(lengths.tolist(), 32, 8192)


def test_microbatches_are_a_multiple_and_idle_slots_are_explicit():
    found = schedule([1000], 4, 4096, microbatch_multiple=4)
    assert found.num_microbatches == 4
    busy = set(range(4)) - set(found.idle_slots()[0])
    assert busy == set(found.microbatches[0][0].ranks)
    assert found.idle_slots()[1:] == [(0, 1, 2, 3)] * 3
    split = schedule([100] * 64, 4, 4096, microbatch_multiple=4)
    assert split.num_microbatches == 4
    assert all(groups for groups in split.microbatches), "there was enough to fill every microbatch"


@pytest.mark.parametrize("mode", MODES)
def test_packs_in_pieces_make_steps_shorter(mode):
    """Simulated, with 3K tokens a rank: many samples need several ranks."""
    lengths, keeping = sample_lengths("documents", 512, 131072, 0), MODES[mode](64)

    def simulated(placement, cost):
        made = schedule(lengths, 64, 3072, cost=replace(COST, placement=placement), **keeping)
        assert problems(made, lengths, 64, 3072, placement=placement) == []
        return simulate(made, lengths, replace(COST, placement=cost), **keeping).seconds

    in_pieces, in_zigzag = simulated("balanced", "balanced"), simulated("zigzag", "zigzag")
    assert in_pieces < 0.995 * in_zigzag
    # The scheduler must use what it knows: a schedule that was made for zigzag is slower.
    assert in_pieces < simulated("zigzag", "balanced")


@pytest.mark.parametrize("placement", ["zigzag", "balanced"])
def test_buckets_hold_every_pack_of_an_odd_limit(placement):
    cost, lengths = replace(COST, placement=placement), [25] * 240
    made = schedule(lengths, 8, 75, min_cp_size=8, cost=cost)
    fit = fit_to_batches([(made, lengths)], 4, 75, placement=placement, lockstep=False)
    tokens, _ = rank_tokens(replace(made, token_buckets=fit.tokens), lengths, placement)
    assert tokens.max() <= 74 and len(np.unique(tokens)) <= 4


def test_packs_in_pieces_are_not_padded_one_by_one():
    cost = replace(COST, placement="balanced")
    lengths = [9] * 64  # 16 tokens each in zigzag
    (groups,) = schedule(lengths, 8, 72, min_cp_size=8, cost=cost).microbatches
    assert len(groups) == 1 and len(groups[0].sample_ids) == 64
    assert schedule(lengths, 8, 72, min_cp_size=8, cost=COST).num_microbatches == 2
    longest = 8 * 78
    assert schedule([longest], 8, 81, cost=cost, sequence_parallel_size=3).num_microbatches == 1
    with pytest.raises(ValueError, match="max_seqlen_per_rank of at least 84"):
        schedule([longest + 1], 8, 81, cost=cost, sequence_parallel_size=3)
    assert schedule([longest + 1], 8, 84, cost=cost, sequence_parallel_size=3).num_microbatches == 1


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("distribution", ["documents", "wikipedia"])
def test_real_batches_are_balanced(mode, distribution):
    """A point of the benchmark's grid must stay balanced.

    It has 32 ranks and 8K tokens a rank.
    """
    limit = {"dense": 1.04, "lock-step": 1.045, "barrier": 1.10, "pipeline": 1.75}[mode]
    for seed in range(2):
        lengths = sample_lengths(distribution, 1024, 131072, seed)
        options = MODES[mode](32)
        found = schedule(lengths, 32, 8192, cost=COST, **options)
        assert problems(found, lengths.tolist(), 32, 8192) == []
        assert simulate(found, lengths, COST, **options).over_bare_work < limit


@pytest.mark.parametrize(("ranks", "count"), [(512, 4000), (1024, 8192)])
def test_large_batches_are_balanced_where_one_try_fails(ranks, count):
    """There the first limit on a microbatch leaves a quarter of the time idle."""
    lengths = sample_lengths("documents", count, 131072, 0)
    assert simulate(schedule(lengths, ranks, 16384, cost=COST), lengths, COST).over_bare_work < 1.1


@pytest.mark.parametrize("cost", ["h100_8b", "h100_moe3b", "a100_mha_slownet"])
@pytest.mark.parametrize("mode", MODES)
def test_dynamic_beats_fixed_cp(cost, mode):
    lengths, options = sample_lengths("documents", 512, 65536, 1), MODES[mode](32)
    seconds = [
        simulate(plan, lengths, cost_preset(cost), **options).seconds
        for plan in (
            schedule(lengths, 32, 8192, cost=cost_preset(cost), **options),
            schedule_fixed_cp(lengths, 32, 8192, cost=cost_preset(cost)),
        )
    ]
    assert seconds[0] < 0.95 * seconds[1]


@pytest.mark.parametrize(
    ("cost", "mode", "distribution", "ranks", "m", "count", "seed"),
    [
        # 99 % of the tokens there are fit one microbatch: the rest must not take long.
        ("a100_mha_slownet", "barrier", "wikipedia", 128, 16384, 2048, 0),
        # The estimate favours microbatches that are too short.
        ("h100_70b_tp8", "pipeline", "bimodal", 128, 8192, 2048, 0),
        # High fixed costs and exposed communication: no tokens may stay free.
        ("h100_70b_tp8", "dense", "long", 32, 3072, 256, 0),
    ],
)
def test_not_slower_than_the_greedy_rule(cost, mode, distribution, ranks, m, count, seed):
    longest = 65536 if distribution == "long" else 131072
    lengths, model, options = sample_lengths(distribution, count, longest, seed), cost_preset(cost), MODES[mode](ranks)
    greedy = greedy_rule(lengths, ranks, m, model)
    ours = schedule(lengths, ranks, m, cost=model, **options)
    seconds = [simulate(plan, lengths, model, **options).seconds for plan in (ours, greedy)]
    assert seconds[0] <= 1.01 * seconds[1]


@pytest.mark.parametrize(
    ("cost", "lengths", "ranks", "sync_ranks"),
    [
        # Over half of a rank's limit: one sample a job, however many tokens stay free.
        ("h100_moe3b", sample_lengths("long", 2048, 16384, 0), 64, 4),
        ("h100_moe3b", sample_lengths("long", 2048, 16384, 0), 64, 16),
        ("a100_moe3b", sample_lengths("long", 1500, 16384, 0), 32, 8),
        ("h100_moe3b", sample_lengths("long", 2048, 32768, 0), 64, 4),
        ("h200_8b", np.random.default_rng(1).choice([10_000, 20_000], 1500), 64, 8),
    ],
    ids=["sync 4", "sync 16", "32 ranks", "up to two ranks", "halves"],
)
def test_not_slower_than_static_where_ranks_share_experts(cost, lengths, ranks, sync_ranks):
    model = cost_preset(cost)
    found = schedule(lengths, ranks, 16384, cost=model, sync_ranks=sync_ranks)
    assert problems(found, lengths.tolist(), ranks, 16384) == []
    static = schedule_fixed_cp(lengths, ranks, 16384, cost=model)
    seconds = [simulate(plan, lengths, model, sync_ranks=sync_ranks).seconds for plan in (found, static)]
    assert seconds[0] <= 1.02 * seconds[1]


@pytest.mark.parametrize("distribution", ["documents", "wikipedia"])
@pytest.mark.parametrize(("ranks", "sequence_parallel"), [(8, 1), (64, 1), (64, 8), (256, 1), (256, 8)])
def test_late_padding_costs_little(distribution, ranks, sequence_parallel):
    lengths = sample_lengths(distribution, 16 * ranks, min(131072, 8000 * ranks), 0)
    found = schedule(lengths, ranks, 8192, sequence_parallel_size=sequence_parallel)
    assert problems(found, lengths.tolist(), ranks, 8192, sequence_parallel_size=sequence_parallel) == []
    assert padding_fraction(found, lengths) <= 0.015


def test_early_padding_would_cost_much():
    lengths = sample_lengths("wikipedia", 4096, 131072, 0).tolist()
    assert sum(padded_length(s, 256) for s in lengths) > 1.2 * sum(lengths)


def test_padding_waits_for_the_cp_size():
    assert [padded_length(101, c) for c in (1, 2, 4, 8)] == [102, 104, 104, 112]
    assert padded_length(101, 4, sequence_parallel_size=8) == 128


def test_pipelines_get_smaller_microbatches():
    lengths = sample_lengths("wikipedia", 512, 8192, 0)
    flat, piped = (schedule(lengths, 16, 8192, pipeline_size=p) for p in (1, 8))
    assert piped.num_microbatches > flat.num_microbatches
    seconds = [simulate(plan, lengths, COST, pipeline_size=8).seconds for plan in (flat, piped)]
    assert seconds[1] < 0.8 * seconds[0]


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"lengths": [10, 0]}, "sample 1 has length 0"),
        ({"lengths": [10, -5]}, "sample 1 has length -5"),
        ({"lengths": [1.5]}, "whole numbers"),
        ({"lengths": [[1, 2]]}, "one list"),
        ({"lengths": [1], "num_ranks": 0}, "num_ranks=0"),
        ({"lengths": [1], "num_ranks": 4.0}, "num_ranks=4.0: must be an integer"),
        ({"lengths": [1], "max_seqlen_per_rank": 2048.5}, "max_seqlen_per_rank=2048.5: must be an integer"),
        ({"lengths": [1], "min_cp_size": "2"}, "min_cp_size='2': must be an integer"),
        ({"lengths": [1], "max_seqlen_per_rank": 0}, "max_seqlen_per_rank=0"),
        ({"lengths": [1], "min_cp_size": 9}, "min_cp_size=9"),
        ({"lengths": [1], "sync_ranks": 3}, "sync_ranks=3"),
        ({"lengths": [1], "pipeline_size": 0}, "pipeline_size=0"),
        ({"lengths": [1], "microbatch_multiple": 0}, "microbatch_multiple=0"),
        ({"lengths": [1], "sequence_parallel_size": 0}, "sequence_parallel_size=0"),
        ({"lengths": [5, 900]}, "sample 1 of 900 tokens does not fit.*max_seqlen_per_rank of at least 114"),
    ],
)
def test_bad_input_is_named(arguments, message):
    with pytest.raises(ValueError, match=message):
        schedule(**{"num_ranks": 8, "max_seqlen_per_rank": 100} | arguments)


def test_legal_groups_are_aligned_and_complete():
    assert legal_groups(4) == ((0, 1, 2, 3), (0, 1), (2, 3), (0,), (1,), (2,), (3,))
    assert (8, 9) in legal_groups(10) and tuple(range(10)) in legal_groups(10)
    assert legal_groups(6, 4) == (tuple(range(6)),)
    assert legal_groups(12, 3) == tuple(
        tuple(range(a, b)) for a, b in [(0, 12), (0, 6), (6, 12), (0, 3), (3, 6), (6, 9), (9, 12)]
    )
    assert legal_groups(3) == ((0, 1, 2), (0, 1), (0,), (1,), (2,))
    assert max(sum(rank in group for group in legal_groups(1024)) for rank in range(1024)) == 11
    for ranks in range(1, 40):
        for least in {1, 2, 3, ranks} - set(range(ranks + 1, 41)):
            groups = legal_groups(ranks, least)
            assert len(set(groups)) == len(groups) < 2 * ranks + 1
            assert all(len(group) >= least for group in groups)
            assert {rank for group in groups for rank in group} == set(range(ranks))
            assert all(group == tuple(range(group[0], group[-1] + 1)) for group in groups)
            # Aligned: whole multiples of the largest power of two of narrowest blocks within the size.
            whole = [group for group in groups if group[-1] + 1 < ranks // least * least]
            widths = {group: len(group) // least for group in whole}
            assert all(len(group) == width * least for group, width in widths.items())
            assert all(group[0] // least % (1 << (width - 1).bit_length()) == 0 for group, width in widths.items())


@settings(max_examples=200, deadline=None)
@given(leaves=st.integers(1, 70), widths=st.lists(st.sampled_from([1, 2, 4, 8, 16, 32, 64]), max_size=40))
def test_gaps_are_filled_with_legal_blocks(leaves, widths):
    legal, gaps, taken = set(legal_groups(leaves)), Gaps(leaves), set()
    for width in widths:
        start = gaps.take(width)
        if start >= 0:
            block = tuple(range(start, start + width))
            assert block in legal and not taken & set(block)
            taken.update(block)
        assert gaps.free == leaves - len(taken)
    while gaps.free:
        start = gaps.take(1)
        assert 0 <= start < leaves and start not in taken
        taken.add(start)
    assert taken == set(range(leaves)) and gaps.take(1) == -1


def test_remaining_samples_are_spread_over_all_ranks():
    """A few samples more than full ranks must take a moment of all ranks.

    There are ten full ranks' worth and a little; one rank alone would take long.
    """
    lengths = [8000] * 10 + [191] * 20
    found = schedule(lengths, 8, 8192, sync_ranks=8)
    assert problems(found, lengths, 8, 8192) == []
    problem = make_problem(lengths, 8, 8192, 1, COST, 1)
    bins = spread_out(problem, list(range(10, 30)), 8)
    assert [[len(items) for items in microbatch] for microbatch in bins] == [[3, 3, 3, 3, 2, 2, 2, 2]]


def test_time_grows_like_n_log_n():
    """16 times the samples must take far less than 256 times the CPU time.

    The time is the best of three.
    """
    import time

    def seconds(count):
        lengths = np.resize(sample_lengths("wikipedia", 2000, 131072, 0), count)
        times = []
        for _ in range(3):
            begin = time.process_time()
            schedule(lengths, 64, 8192, sync_ranks=8)
            times.append(time.process_time() - begin)
        return min(times)

    assert seconds(24_000) < 60 * seconds(1_500)


@settings(max_examples=60, deadline=None)
@given(
    lengths=st.lists(st.integers(1, 400) | st.integers(195, 215), min_size=1, max_size=60),
    cp_size=st.sampled_from([1, 2, 4]),
    replicas=st.integers(1, 4),
    multiple=st.sampled_from([1, 2]),
)
def test_static_packing_has_as_few_microbatches_as_will_do(lengths, cp_size, replicas, multiple):
    """No smaller number of microbatches may fit, counting up from one."""
    found = schedule_fixed_cp(lengths, cp_size * replicas, 400, cp_size=cp_size, microbatch_multiple=multiple)
    assert problems(found, lengths, cp_size * replicas, 400, microbatch_multiple=multiple) == []
    order = sorted(lengths, reverse=True)
    tokens = [padded_length(s, cp_size) // cp_size for s in order]
    work = (COST.sample_seconds(order, cp_size) - COST.for_size(cp_size).fixed).tolist()
    step = replicas * multiple
    fewest = next(k for k in range(step, 10_000, step) if -1 not in fixed.most_room(work, tokens, [0.0] * k, 400))
    assert found.num_microbatches == fewest // replicas


@pytest.mark.parametrize("center", [0.6, 0.45, 0.3])
def test_static_packing_is_tried_a_few_times_only(monkeypatch, center):
    """Tokens do not determine the bins of samples over a half or a third of the limit.

    The limit is that of a group.
    """
    tries = []
    pack = fixed.most_room
    monkeypatch.setattr(fixed, "most_room", lambda *arguments: tries.append(1) or pack(*arguments))
    lengths = np.random.default_rng(0).normal(center, 0.05, 2000).clip(0.01, 1) * 65536
    schedule_fixed_cp(lengths.astype(int), 8, 8192, cp_size=8)
    assert len(tries) <= 16


@pytest.mark.parametrize(
    ("lengths", "ranks", "tokens", "preset", "mode"),
    [
        ([4096] * 64, 64, 8192, "h100_moe3b", {"pipeline_size": 4, "microbatch_multiple": 4}),
        (list(range(2042, 2058)), 8, 2048, "h100_8b", {}),
        ([2048], 16, 2048, "h200_moe3b", {}),
        ([1025] * 1000, 8, 2048, "h200_moe3b", {"pipeline_size": 4}),
        ([5000, *range(1, 200)], 16, 1024, "a100_8b", {"sync_ranks": 4}),
        ([131072] * 2302, 12, 16384, "h100_8b", {"sync_ranks": 2}),
        ([49152] * 2 + [24576] * 2001, 12, 4096, "h100_moe3b", {"pipeline_size": 4}),
    ],
    ids=[
        "alike, in virtual stages",
        "alike, some just too long",
        "one sample",
        "half a microbatch each",
        "one giant",
        "many, on a number of ranks that is no power of two",
        "many, of two lengths",
    ],
)
def test_samples_are_never_slower_than_with_groups_of_one_size(lengths, ranks, tokens, preset, mode):
    cost, multiple = cost_preset(preset), mode.get("microbatch_multiple", 1)
    step = {name: value for name, value in mode.items() if name != "microbatch_multiple"}
    found = schedule(lengths, ranks, tokens, cost=cost, **mode)
    assert problems(found, lengths, ranks, tokens, 1, multiple) == []
    dynamic = simulate(found, lengths, cost, **step).seconds
    for size in (k for k in (1, 2, 4, 8, ranks) if ranks % k == 0 and max(lengths) <= k * tokens):
        fixed = schedule_fixed_cp(lengths, ranks, tokens, cp_size=size, cost=cost, microbatch_multiple=multiple)
        assert dynamic <= simulate(fixed, lengths, cost, **step).seconds * (1 + 1e-9), size
