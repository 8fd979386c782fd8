import dataclasses

import numpy as np
import pytest

from megatron_cp.dynamic_cp import PRESETS, schedule
from megatron_cp.dynamic_cp.analysis.simulate import simulate
from megatron_cp.dynamic_cp.calibration import Calibrator
from megatron_cp.dynamic_cp.distributions import sample_lengths
from tests.unit_tests.dynamic_cp.scheduler.checks import problems

PRIOR = PRESETS["h100_8b"]
TRUE = dataclasses.replace(
    PRIOR, per_microbatch=0.03, quadratic=4e-9, linear=0.6e-4, kv_intra=2.6e-6, kv_inter=1.2e-5, ring_step=0.6e-3
)


def observed(true=TRUE, steps=6, noise=0.02, outliers=0.0, ranks=32, seed=0):
    """Return a calibrator that has observed every group of a few schedules.

    ``true`` gives the times, with noise.
    """
    rng = np.random.default_rng(seed)
    calibrator = Calibrator(PRIOR, window=2048)
    for step in range(steps):
        lengths = sample_lengths("documents", 256, 131072, step)
        for groups in schedule(lengths, ranks, 8192, cost=PRIOR).microbatches:
            for group in groups:
                part = lengths[list(group.sample_ids)]
                seconds = true.seconds(part, group.cp_size) * (1 + noise * rng.standard_normal())
                calibrator.observe([(part, group.cp_size)], seconds * (5.0 if rng.random() < outliers else 1.0))
    return calibrator


def test_finds_the_machine_behind_noisy_times():
    fit = observed().fit()
    assert fit.residual < 0.03 < 0.2 < fit.prior_residual
    assert fit.cost.quadratic == pytest.approx(TRUE.quadratic, rel=0.05)
    assert fit.cost.linear == pytest.approx(TRUE.linear, rel=0.05)
    assert fit.cost.per_microbatch == pytest.approx(TRUE.per_microbatch, rel=0.3)


def test_a_tenth_of_disturbed_steps_does_no_harm():
    fit = observed(outliers=0.1).fit()
    assert fit.cost.quadratic == pytest.approx(TRUE.quadratic, rel=0.1)
    assert fit.cost.linear == pytest.approx(TRUE.linear, rel=0.1)


def test_predicts_groups_it_never_saw():
    cost = observed().fit().cost
    for lengths, size in (([90_000], 16), ([3000, 2000, 1000], 1), ([30_000, 500], 4), ([60_000], 8)):
        assert cost.seconds(lengths, size) == pytest.approx(TRUE.seconds(lengths, size), rel=0.06)


@pytest.mark.parametrize(("transport", "placement"), [("p2p", "zigzag"), ("a2a", "zigzag"), ("p2p", "balanced")])
def test_finds_the_cost_of_a_kernel_call(transport, placement):
    prior = dataclasses.replace(PRIOR, transport=transport, per_sample=1e-3, placement=placement)
    true = dataclasses.replace(TRUE, transport=transport, per_sample=4e-3, placement=placement)
    calibrator, rng = Calibrator(prior), np.random.default_rng(0)
    for _ in range(400):
        lengths, c = rng.integers(20, 4000, rng.integers(1, 40)), int(rng.choice([1, 2, 4, 8]))
        calibrator.observe([(lengths, c)], true.seconds(lengths, c))
    fit = calibrator.fit()
    few_calls = placement == "balanced"  # a pack in pieces has little more than one sample's
    assert fit.residual < 0.02 and fit.cost.per_sample == pytest.approx(true.per_sample, rel=0.3 if few_calls else 0.15)


def test_whole_steps_are_enough():
    calibrator = Calibrator(PRIOR)
    for step in range(8):
        lengths = sample_lengths("documents", 256, 131072, step)
        plan = schedule(lengths, 16, 8192, cost=PRIOR)
        for rank in range(16):
            mine = [(lengths[list(g.sample_ids)], g.cp_size) for g in plan.groups_of(rank) if g]
            calibrator.observe(mine, sum(TRUE.seconds(*one) for one in mine))
    fit = calibrator.fit()
    assert fit.residual < 0.02
    assert fit.cost.seconds([8000], 1) == pytest.approx(TRUE.seconds([8000], 1), rel=0.05)


def test_factors_stay_within_their_bounds_of_the_scaled_prior():
    """The fit may only take a part of a 20 times slower attention.

    The machine is 100 times as slow as the prior, and attention 20 times slower still.
    """
    true = dataclasses.replace(PRIOR, quadratic=20 * PRIOR.quadratic)
    calibrator = Calibrator(PRIOR, bound=2.0)
    for length in np.geomspace(100, 60_000, 80).astype(int):
        calibrator.observe([([length], 1)], 100 * true.seconds([length], 1))
    fit = calibrator.fit()
    for name in ("per_microbatch", "quadratic", "linear"):
        factor = getattr(fit.cost, name) / getattr(PRIOR, name) / fit.scale
        assert 0.5 * (1 - 1e-9) <= factor <= 2.0 * (1 + 1e-9)
    assert "quadratic" in fit.at_bound and "kv_inter" not in fit.at_bound
    assert fit.prior_residual > 0.9 and fit.residual > 0.1  # and the residual is large


def test_unobserved_terms_stay_proportional_to_the_prior():
    calibrator = Calibrator(PRIOR)
    for length in range(500, 9000, 250):
        calibrator.observe([([length], 1)], 1.5 * PRIOR.seconds([length], 1))
    fit = calibrator.fit()
    assert fit.scale == pytest.approx(1.5) and fit.at_bound == ()
    for name in ("per_microbatch", "quadratic", "linear", "kv_intra", "kv_inter", "ring_step"):
        assert getattr(fit.cost, name) == pytest.approx(1.5 * getattr(PRIOR, name), rel=0.02)


def test_a_fit_no_better_than_the_scaled_prior_is_not_taken():
    """Three fifths of the times are the prior's, and must stay so.

    Least squares would give some of that up for the rest of them.
    """
    calibrator = Calibrator(PRIOR)
    for index, length in enumerate(range(500, 9000, 100)):
        calibrator.observe([([length], 1)], PRIOR.seconds([length], 1) * (10.0 if index % 5 < 2 else 1.0))
    fit = calibrator.fit()
    assert fit.cost.quadratic / fit.cost.linear == pytest.approx(PRIOR.quadratic / PRIOR.linear)


@pytest.mark.parametrize("times", [0.05, 3, 30])
def test_a_machine_of_any_speed_is_found(times):
    """The fit must find any speed of a machine.

    It has twice the attention and a third of the rest, far from the prior's speed.
    """
    own = {"linear": 1 / 3, "quadratic": 2.0}
    names = ("per_microbatch", "quadratic", "linear", "kv_intra", "kv_inter", "ring_step")
    true = dataclasses.replace(PRIOR, **{name: getattr(PRIOR, name) * times * own.get(name, 1.0) for name in names})
    fit = observed(true=true).fit()
    assert fit.residual < 0.03 and fit.at_bound == ()
    assert fit.cost.quadratic / fit.cost.linear == pytest.approx(true.quadratic / true.linear, rel=0.1)
    lengths = sample_lengths("documents", 512, 131072, 100)
    mine, best = (simulate(schedule(lengths, 64, 8192, cost=cost), lengths, true).seconds for cost in (fit.cost, true))
    assert mine < 1.03 * best


def test_only_the_window_counts():
    calibrator = Calibrator(PRIOR, window=20)
    for factor in (3.0, 1.0):
        for length in range(500, 10_500, 500):
            calibrator.observe([([length], 1)], factor * PRIOR.seconds([length], 1))
    assert calibrator.fit().residual < 1e-3


def test_nothing_observed_gives_the_prior():
    assert Calibrator(PRIOR).fit().cost == PRIOR


def test_bad_measurements_are_refused():
    with pytest.raises(ValueError, match="seconds=0"):
        Calibrator(PRIOR).observe([([100], 1)], 0)
    with pytest.raises(ValueError, match="0 microbatches"):
        Calibrator(PRIOR).observe([], 1.0)


def test_calibration_makes_steps_faster_and_a_stale_model_stays_correct():
    """Schedules must adapt once the cost is known.

    The machine has a third of the assumed linear cost and twice the attention.
    """
    true = dataclasses.replace(PRIOR, linear=PRIOR.linear / 3, quadratic=PRIOR.quadratic * 2)
    calibrated = observed(true=true, noise=0.01).fit().cost
    stale_total = fitted_total = 0.0
    for seed in range(100, 104):
        lengths = sample_lengths("documents", 512, 131072, seed)
        stale, fitted = (schedule(lengths, 64, 8192, cost=cost) for cost in (PRIOR, calibrated))
        assert problems(stale, lengths.tolist(), 64, 8192) == problems(fitted, lengths.tolist(), 64, 8192) == []
        stale_total += simulate(stale, lengths, true).seconds
        fitted_total += simulate(fitted, lengths, true).seconds
    assert fitted_total < 0.95 * stale_total
