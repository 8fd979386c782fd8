"""A fix, typed literally, works: no rule reports an error, and a warning is gone."""

from __future__ import annotations

import re
import shlex
import subprocess

import pytest

from megatron_cp.config.recipes import load_recipe
from megatron_cp.rules import RULES, Example
from megatron_cp.rules.explain import example_violations
from megatron_cp.rules.proposals import typed
from megatron_cp.rules.remedies import Fix, parse_fix
from tests.unit_tests.rules.remedies import (  # noqa: F401  (one is a fixture)
    failures_of,
    recipes_are_composed_once,
    violations_of,
)

# What is done by hand, outside of the configuration and the shell that starts the run.
BY_HAND = r"in the clone: (scripts/setup\.sh|uv pip install) \S.*"


@pytest.mark.parametrize("rule", RULES.values(), ids=lambda rule: rule.id)
def test_every_fix_of_an_example_works(rule):
    assert failures_of(rule.example) == []
    for violation in example_violations(rule.id):
        for fix in parse_fix(violation.fix):
            assert not fix.by_hand or re.fullmatch(BY_HAND, fix.by_hand), fix
            assert str(fix) in violation.fix


@pytest.mark.parametrize(
    ("setting", "value"),
    [
        ("dataset.split", "98,2,0"),
        ("checkpoint.load", "runs/with a space"),
        ("checkpoint.ckpt_step", None),
        ("model.window_size", [64, 0]),
        ("model.cp_comm_type", ["p2p", "a2a"]),
        ("optimizer.lr", 1e-05),
        ("checkpoint.finetune", False),
    ],
)
def test_typed_overrides_give_the_value(setting, value):
    recipe = "llama_tiny_pretrain_config"
    assert load_recipe(recipe, shlex.split(typed(setting, value))).value_at(setting) == value


def test_a_shell_passes_every_override_unchanged():
    """A real shell must split the text of every fix into its overrides."""
    fixes = [fix for id in RULES for each in example_violations(id) for fix in parse_fix(each.fix) if fix.overrides]
    lines = [str(fix).removesuffix(f" ({fix.note})").rpartition(" with ")[2] for fix in fixes]
    script = "\n".join(f"printf '%s\\n' {line}" for line in lines)
    printed = subprocess.run(["bash", "-c", script], capture_output=True, text=True, check=True).stdout
    assert printed.splitlines() == [word for fix in fixes for word in fix.overrides]


def left_after(*overrides, world_size=4):
    """Return the violations, and those left after typing the first fix.

    Only the first alternative of the fix is typed.
    """
    example = Example(overrides, world_size)
    (found, *_) = violations_of(example)
    return found, violations_of(example, parse_fix(found.fix)[:1])


def test_a_fix_includes_dependent_settings():
    found, left = left_after("model.num_moe_experts=4", "model.moe_router_load_balancing_type=sinkhorn",
                             "model.moe_router_topk=1")  # fmt: skip
    assert found.rule == "K22" and left == []
    assert parse_fix(found.fix)[0].overrides == (
        "model.moe_router_load_balancing_type=aux_loss",
        "model.moe_router_pre_softmax=true",
    )


def test_a_fix_distinguishes_given_and_derived_settings():
    """A fix must change the settings that were given.

    A length of the data's alone is mended alone; where the model's was given too, both are.
    """
    for given, settings in (("dataset", ["dataset"]), ("model", ["dataset", "model"])):
        found, left = left_after(f"{given}.seq_length=250")
        assert found.rule == "B1" and left == []
        words = parse_fix(found.fix)[0].overrides
        assert words == tuple(f"{section}.seq_length=248" for section in settings)


def test_evaluation_is_not_switched_off_for_a_sign():
    found, left = left_after("validation.eval_iters=-1")
    assert parse_fix(found.fix)[0].overrides == ("validation.eval_iters=10",) and left == []


def test_a_rejected_proposal_is_not_printed():
    found, _ = left_after("model.pipeline_model_parallel_size=3", world_size=12)
    assert found.rule == "A15" and "model.pipeline_model_parallel_size=2" not in found.fix


@pytest.mark.parametrize(
    ("text", "fix"),
    [
        ('model.a=1 "model.b=[1,2]" (a note)', Fix(("model.a=1", "model.b=[1,2]"), note="a note")),
        ("export NAME=1 (wins over env_vars)", Fix(exports={"NAME": "1"}, note="wins over env_vars")),
        ("start 8 ranks with train.global_batch_size=8", Fix(("train.global_batch_size=8",), ranks=8)),
        ("in the clone: scripts/setup.sh --gpu", Fix(by_hand="in the clone: scripts/setup.sh --gpu")),
        ("check the rank's path", Fix(by_hand="check the rank's path")),
    ],
)
def test_the_form_of_a_fix(text, fix):
    assert parse_fix(text) == [fix] and str(fix) == text
    assert fix.can_be_tried == (not fix.by_hand)


def test_values_that_the_user_must_choose_are_not_tried():
    (fix,) = parse_fix("dataset.data_path=PATH")
    assert not fix.can_be_tried and parse_fix("scheduler.lr_decay_style=WSD")[0].can_be_tried
