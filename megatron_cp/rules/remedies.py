"""Fixes that work when typed: parse a fix, apply it, keep what no rule rejects.

A fix is text. Alternatives are separated by ``, or ``. Each is one of:

- overrides as a shell reads them: ``model.cp_comm_type=a2a "model.window_size=[64,0]"``;
- ``export NAME=VALUE`` or ``start N ranks``, optionally with ``with`` and overrides;
- any other text: a manual step, such as installing a package, which is not tried.

A note in parentheses may follow an alternative. PATH, PREFIX, NAME and ID are placeholders for the user's values.
"""

from __future__ import annotations

import copy
import re
import shlex
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from megatron_cp.common.errors import ConfigError, Violation
from megatron_cp.config import bridge_names
from megatron_cp.config.overrides import quoted
from megatron_cp.config.recipes import from_settings, parse_overrides
from megatron_cp.config.run_config import RunConfig, settings
from megatron_cp.config.setting import Facts
from megatron_cp.rules.environment import Environment

ALTERNATIVES = ", or "
_MOST_SHOWN = 3
_MOST_STEPS = (2, 3)  # extra fixes per alternative; the larger limit if no alternative works with the smaller
_MOST_PROPOSALS = 12  # alternatives tried per violation
_OVERRIDE = re.compile(r"(mixed_precision|[a-z_]+(\.\w+)+)=.*", re.DOTALL)
_PLACEHOLDER = re.compile(r"=(PATH|PREFIX|NAME|ID)$")


@dataclass(frozen=True)
class Fix:
    """One alternative of a fix. ``by_hand`` is the text of a manual step."""

    overrides: tuple[str, ...] = ()
    exports: dict[str, str] = field(default_factory=dict)
    ranks: int | None = None
    by_hand: str = ""
    note: str = ""

    def __str__(self) -> str:
        first = self.by_hand or " ".join(f"export {name}={value}" for name, value in self.exports.items())
        if self.ranks is not None:
            first = f"start {self.ranks} ranks"
        overrides = " ".join(map(quoted, self.overrides))
        text = " with ".join(filter(None, [first, overrides]))
        return f"{text} ({self.note})" if self.note else text

    @property
    def can_be_tried(self) -> bool:
        return not self.by_hand and not any(_PLACEHOLDER.search(word) for word in self.overrides)


def setting_of(override: str) -> str:
    """Return the setting of an override."""
    return override.partition("=")[0]


def parse_fix(text: str) -> list[Fix]:
    """Return the alternatives of a fix."""
    return [_parse(part) for part in text.split(ALTERNATIVES) if part]


def _parse(text: str) -> Fix:
    action, note = text, ""
    if found := re.fullmatch(r"(.*\S)\s+\(([^()]*)\)", text):
        action, note = found.groups()
    if found := re.fullmatch(r"(?:start (\d+) ranks|export (\w+)=(\S*))(?: with (.*))?", action):
        ranks, name, value, more = found.groups()
        exports = {name: value} if name else {}
        return Fix(_words(more or ""), exports, int(ranks) if ranks else None, note=note)
    words = _words(action)
    return Fix(words, note=note) if words else Fix(by_hand=action, note=note)


def _words(text: str) -> tuple[str, ...]:
    """Return overrides as a shell splits them; empty for other text."""
    try:
        words = shlex.split(text)
    except ValueError:  # an apostrophe in a sentence
        return ()
    return tuple(words) if all(map(_OVERRIDE.fullmatch, words)) else ()


@dataclass(frozen=True)
class Case:
    """A configuration and the place it runs in: the input of the rules."""

    config: RunConfig
    world_size: int
    gpus_per_node: int | None
    environment: Environment

    def out_of_range(self, kind: str) -> Iterator[tuple[str, Any, Facts]]:
        """Yield settings of a kind with values out of range: name, value, facts."""
        for name, facts in settings().items():
            if facts.kind == kind and not facts.allows(value := self.config.value_at(name)):
                yield name, value, facts

    def after(self, fix: Fix) -> Case:
        """Return this case with a fix applied.

        Raises:
            ConfigError: the overrides do not compose.
        """
        variables = {**self.environment.variables, **fix.exports}
        return Case(
            with_overrides(self.config, fix.overrides) if fix.overrides else self.config,
            fix.ranks or self.world_size,
            self.gpus_per_node,
            replace(self.environment, variables=variables) if fix.exports else self.environment,
        )


CheckCase = Callable[[Case], list[Violation]]


def with_overrides(config: RunConfig, overrides: Sequence[str]) -> RunConfig:
    """Return a finalized configuration with overrides added to the recipe's own.

    Raises:
        ConfigError: overrides that cannot be parsed, unknown settings, or wrong types.
    """
    settings = _merged(copy.deepcopy(config.given()), parse_overrides(overrides))
    return from_settings(settings, bridge_names.settle(settings))


def _merged(settings: dict[str, Any], layer: dict[str, Any]) -> dict[str, Any]:
    both = {key: _merged(settings[key], value) for key, value in layer.items() if isinstance(value, dict)}
    return settings | layer | both


def keep_working_fixes(found: Sequence[Violation], case: Case, check: CheckCase) -> list[Violation]:
    """Return the violations with only the alternatives that work, as typed text.

    An alternative works if it removes the violation and causes no other error. If it causes one, the fix of that error
    is added, up to a few times. If no alternative works, the rule's text is kept.

    Args:
        found: violations as the rules write them.
        case: the case that has these violations.
        check: returns the violations of another case, as the rules write them.
    """
    return [replace(violation, fix=_working(violation, found, case, check)) for violation in found]


def _working(violation: Violation, found: Sequence[Violation], case: Case, check: CheckCase) -> str:
    others = {_key(each) for each in found if each.severity == "error"} - {_key(violation)}
    proposals = parse_fix(violation.fix)[:_MOST_PROPOSALS]
    for steps in _MOST_STEPS:
        working: list[str] = []
        for proposal in proposals:
            fix = _complete(proposal, violation, others, case, check, steps)
            if fix is not None and str(fix) not in working:
                working.append(str(fix))
            if len(working) == _MOST_SHOWN:
                break
        if working:
            return ALTERNATIVES.join(working)
    return violation.fix


def _complete(
    fix: Fix, violation: Violation, others: set[tuple[str, str]], case: Case, check: CheckCase, steps: int
) -> Fix | None:
    """Return the fix with settings that must change as well; None if it does not work."""
    if not fix.can_be_tried:
        return fix
    try:
        left = check(case.after(fix))
    except ConfigError:
        return None
    again = [each for each in left if _key(each) == _key(violation)]
    if any(violation.severity == "warning" or each.message == violation.message for each in again):
        return None
    new = [each for each in left if each.severity == "error" and _key(each) not in others]
    if not new:
        return fix
    for more in parse_fix(new[0].fix)[:_MOST_SHOWN] if steps else ():
        if more.overrides and more.can_be_tried:
            kept = tuple(word for word in fix.overrides if setting_of(word) not in map(setting_of, more.overrides))
            joined = replace(fix, overrides=kept + more.overrides)
            if completed := _complete(joined, violation, others, case, check, steps - 1):
                return completed
    return None


def _key(violation: Violation) -> tuple[str, str]:
    return violation.rule, violation.field
