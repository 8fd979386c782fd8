"""Type a message's fix after the overrides, and return what remains.

The overrides broke the rule. A user would type the fix in the same way.
"""

from __future__ import annotations

import functools
from collections.abc import Iterator, Sequence
from dataclasses import replace

import pytest

from megatron_cp.common.errors import Violation
from megatron_cp.config import recipes
from megatron_cp.config.recipes import load_recipe
from megatron_cp.rules import Environment, Example, check
from megatron_cp.rules.explain import EXAMPLE_RECIPE
from megatron_cp.rules.remedies import Fix, parse_fix

# What stands for the user's own names in a fix.
VALUES = {"PATH": "corpus", "PREFIX": "corpus", "NAME": "some", "ID": "0"}


@pytest.fixture(scope="module", autouse=True)
def recipes_are_composed_once() -> Iterator[None]:
    """Compose each recipe once.

    Hydra takes a third of a second, the overrides of settings none.
    """
    with pytest.MonkeyPatch.context() as patch:
        once = functools.cache(lambda name, choices: recipes_compose(name, list(choices)))
        recipes_compose = recipes._compose
        patch.setattr(recipes, "_compose", lambda name, choices: once(name, tuple(choices)))
        yield


def violations_of(example: Example, fixes: Sequence[Fix] = ()) -> list[Violation]:
    """Return the violations of an example after typing fixes behind its overrides."""
    overrides, world_size = list(example.overrides), example.world_size
    environment = Environment.of(example.environment)
    for fix in fixes:
        overrides += [_filled_in(word) for word in fix.overrides]
        world_size = fix.ranks or world_size
        environment = replace(environment, variables=environment.variables | fix.exports)
    return check(load_recipe(EXAMPLE_RECIPE, overrides), world_size, example.gpus_per_node, environment)


def _filled_in(word: str) -> str:
    setting, _, value = word.partition("=")
    return f"{setting}={VALUES.get(value, value)}"


def failures_of(example: Example, most: int = 20) -> list[str]:
    """List the alternatives of an example's fixes that do not work.

    An alternative works where its violation is gone and no error is left but those that were there from the start and
    that their own fixes mend.
    """
    found = violations_of(example)
    return [
        f"{violation.rule} {violation.field}, {fix}: {problem}"
        for violation in found
        for fix in parse_fix(violation.fix)
        if not fix.by_hand and (problem := _problem(example, found, violation, fix, most))
    ]


def _problem(example: Example, found: list[Violation], violation: Violation, fix: Fix, most: int) -> str:
    left = violations_of(example, [fix])
    errors = {_key(each) for each in left if each.severity == "error"}
    if violation.severity == "warning" and _key(violation) in {_key(each) for each in left}:
        return "the warning is still there"
    if new := errors - ({_key(each) for each in found if each.severity == "error"} - {_key(violation)}):
        return f"leads to {sorted(new)}"
    fixes = [fix]
    while errors and len(fixes) < most:
        fixes.append(parse_fix(next(each for each in left if each.severity == "error").fix)[0])
        left = violations_of(example, fixes)
        errors = {_key(each) for each in left if each.severity == "error"}
    return f"with all others leads to {sorted(errors)}" if errors else ""


def _key(violation: Violation) -> tuple[str, str]:
    return violation.rule, violation.field
