"""Fixes that work when they are typed: parse the text of a fix, apply it, and keep the ones that no rule refuses.

A fix is text. Alternatives are separated by ``, or ``; each is one of

- overrides as a shell takes them: ``model.cp_comm_type=a2a "model.window_size=[64,0]"``;
- ``export NAME=VALUE`` or ``start N ranks``, and ``with`` before overrides that must go with it;
- anything else, which is done by hand (install a package) and cannot be tried.

A note in parentheses may follow an alternative. PATH, PREFIX, NAME and ID stand for values that the user must give.
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

BETWEEN = ", or "
_MOST_SHOWN = 3
_MOST_STEPS = (2, 3)  # further fixes that an alternative may need: few, or more where no alternative works
_MOST_PROPOSALS = 12  # alternatives of one violation that are tried
_OVERRIDE = re.compile(r"(mixed_precision|[a-z_]+(\.\w+)+)=.*", re.DOTALL)
_PLACEHOLDER = re.compile(r"=(PATH|PREFIX|NAME|ID)$")


@dataclass(frozen=True)
class Fix:
    """One alternative of a fix. ``by_hand`` is its text where it is none of the kinds that can be tried."""

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
    return override.partition("=")[0]


def parse_fix(text: str) -> list[Fix]:
    """The alternatives of a fix's text."""
    return [_parse(part) for part in text.split(BETWEEN) if part]


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
    """Overrides as a shell hands them on; none where the text is something else."""
    try:
        words = shlex.split(text)
    except ValueError:  # an apostrophe in a sentence
        return ()
    return tuple(words) if all(map(_OVERRIDE.fullmatch, words)) else ()


@dataclass(frozen=True)
class Case:
    """A configuration and where it runs: what the rules are asked about."""

    config: RunConfig
    world_size: int
    gpus_per_node: int | None
    environment: Environment

    def out_of_range(self, kind: str) -> Iterator[tuple[str, Any, Facts]]:
        """The settings of a kind whose values are not in their range, with the values and what is known of them."""
        for name, facts in settings().items():
            value = self.config.value_at(name)
            if facts.kind == kind and not facts.allows(value):
                yield name, value, facts

    def after(self, fix: Fix) -> Case:
        """The same case once the fix was typed.

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


Ask = Callable[[Case], list[Violation]]


def with_overrides(config: RunConfig, overrides: Sequence[str]) -> RunConfig:
    """A finalized configuration as its recipe gives it with these overrides behind its own.

    Raises:
        ConfigError: the overrides cannot be parsed, or name no setting, or have wrong types.
    """
    settings = _laid_over(copy.deepcopy(config.given()), parse_overrides(overrides))
    return from_settings(settings, bridge_names.settle(settings))


def _laid_over(settings: dict[str, Any], layer: dict[str, Any]) -> dict[str, Any]:
    both = {key: _laid_over(settings[key], value) for key, value in layer.items() if isinstance(value, dict)}
    return settings | layer | both


def keep_working_fixes(found: Sequence[Violation], case: Case, ask: Ask) -> list[Violation]:
    """The violations with the alternatives of their fixes that work, in the form that is typed.

    An alternative works when the violation is gone and no error has come in its place. Where one has, its own fix is
    added, up to a few times. Where no alternative works, the text stays as the rule wrote it.

    Args:
        found: violations as the rules write them.
        case: what they were found in.
        ask: the violations of another case, as the rules write them.
    """
    return [replace(violation, fix=_working(violation, found, case, ask)) for violation in found]


def _working(violation: Violation, found: Sequence[Violation], case: Case, ask: Ask) -> str:
    others = {_key(each) for each in found if each.severity == "error"} - {_key(violation)}
    proposals = parse_fix(violation.fix)[:_MOST_PROPOSALS]
    for steps in _MOST_STEPS:
        working: list[str] = []
        for proposal in proposals:
            fix = _complete(proposal, violation, others, case, ask, steps)
            if fix is not None and str(fix) not in working:
                working.append(str(fix))
            if len(working) == _MOST_SHOWN:
                break
        if working:
            return BETWEEN.join(working)
    return violation.fix


def _complete(
    fix: Fix, violation: Violation, others: set[tuple[str, str]], case: Case, ask: Ask, steps: int
) -> Fix | None:
    """The fix, with the settings that must change with it; None where it does not work."""
    if not fix.can_be_tried:
        return fix
    try:
        left = ask(case.after(fix))
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
            if completed := _complete(joined, violation, others, case, ask, steps - 1):
                return completed
    return None


def _key(violation: Violation) -> tuple[str, str]:
    return violation.rule, violation.field
