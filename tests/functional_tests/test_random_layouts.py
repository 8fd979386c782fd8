"""No false accept: what the rules accept builds and trains like one rank.

It also passes the probe.
"""

import pytest
from hypothesis import HealthCheck, assume, event, given, settings

from megatron_cp.config.single_rank import on_single_rank
from megatron_cp.rules import check
from megatron_cp.verify.compare import compare_with_single_rank
from megatron_cp.verify.report import diagnose
from tests.functional_tests.random_layouts import NO_SAVINGS, Overrides, configurations, saving_configurations
from tests.ranks import run_ranks
from tests.training_runs import tiny_config


def verdict(overrides: Overrides, of_one_rank: Overrides) -> tuple[bool, str]:
    """Return whether the layout trains like one rank, and what differs.

    Compares probe, two steps and all gradients. ``of_one_rank`` replaces settings of the single rank.
    """
    both = dict(train__train_iters=2, dist__attention_probe=False, scheduler__lr_warmup_iters=0)
    config, other = tiny_config(**overrides, **both), tiny_config(**overrides | of_one_rank, **both)
    result = compare_with_single_rank(config, on_single_rank(other))
    return result.equal, f"{diagnose(result)} {[row for row in result.rows() if not row.equal]}"


def accepted_layout_is_right(drawn: tuple[int, Overrides], of_one_rank: Overrides | None = None) -> None:
    world_size, overrides = drawn
    errors = [v for v in check(tiny_config(**overrides), world_size, environment="cpu") if v.severity == "error"]
    for violation in errors:
        event(f"refused by {violation.rule}")
    assume(not errors)
    results = run_ranks(verdict, world_size, overrides, of_one_rank or {})
    assert all(equal for equal, _ in results), results[0][1]


SETTINGS = settings(
    deadline=None, database=None, print_blob=False, suppress_health_check=list(HealthCheck), max_examples=6
)


@given(configurations())
@settings(SETTINGS, derandomize=True)
def test_a_fixed_sample_of_accepted_layouts_trains_like_one_rank(drawn: tuple[int, Overrides]) -> None:
    accepted_layout_is_right(drawn)


@pytest.mark.slow
@pytest.mark.timeout(3600)
@given(configurations())
@settings(SETTINGS, max_examples=200)
def test_two_hundred_new_accepted_layouts_train_like_one_rank(drawn: tuple[int, Overrides]) -> None:
    accepted_layout_is_right(drawn)


@pytest.mark.slow
@pytest.mark.timeout(3600)
@given(saving_configurations())
@settings(SETTINGS, max_examples=100)
def test_layouts_that_save_memory_train_like_one_rank_that_does_not(drawn: tuple[int, Overrides]) -> None:
    accepted_layout_is_right(drawn, NO_SAVINGS)
