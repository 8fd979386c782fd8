"""All constraints on a run, as data: condition, reason, example and fix.

Pure Python without torch: checking a layout of a thousand ranks takes milliseconds.
"""

from __future__ import annotations

from dataclasses import asdict, replace

from megatron_cp.common.errors import ConfigError, Violation
from megatron_cp.config.run_config import RunConfig
from megatron_cp.config.schema import build
from megatron_cp.rules import checks  # noqa: F401 - registers all rules
from megatron_cp.rules.base import RULES, SECTIONS, Context, Example, Rule, order
from megatron_cp.rules.checks.parallel.sizes import oversized
from megatron_cp.rules.environment import Environment
from megatron_cp.rules.remedies import Case, keep_working_fixes
from megatron_cp.rules.resolve import resolve_auto

__all__ = [
    "RULES",
    "Environment",
    "Example",
    "Rule",
    "Violation",
    "check",
    "check_or_raise",
    "checked",
    "refusal",
    "resolve_auto",
]


def check(
    config: RunConfig,
    world_size: int,
    gpus_per_node: int | None = None,
    environment: Environment | str | None = None,
) -> list[Violation]:
    """Return every violation of a configuration, errors first; empty if it can run.

    Args:
        config: a finalized configuration.
        world_size: number of ranks.
        gpus_per_node: ranks per node; default: from the environment.
        environment: where the run will start: this machine (None), "gpu", "cpu", a YAML file, or an Environment.

    Raises:
        ValueError: world_size or gpus_per_node is not an integer.
        ConfigError: the environment cannot be read.
    """
    for name, number in (("world_size", world_size), ("gpus_per_node", gpus_per_node or 1)):
        if isinstance(number, bool) or not isinstance(number, int):
            raise ValueError(f"{name} must be an integer, got {number!r}")
    problems: list[Violation] = []
    build(RunConfig, asdict(config), problems)
    if gpus_per_node is not None and gpus_per_node < 1:
        message = f"must be an integer of at least 1, got {gpus_per_node}"
        problems.append(Violation("A1", "error", "--gpus-per-node", message, "leave out --gpus-per-node"))
    if problems:  # the checks cannot calculate with these values
        return problems
    case = Case(config, world_size, gpus_per_node, Environment.of(environment))
    return keep_working_fixes(_violations(case), case, _violations)


def _violations(case: Case) -> list[Violation]:
    """Return the violations of a case whose values have the right types."""
    if oversized(case):
        return list(RULES["A1"].violations(Context(**vars(case))))
    config, _ = resolve_auto(**vars(case))
    context = Context(**vars(replace(case, config=config)))
    found = [violation for id in sorted(RULES, key=order) for violation in RULES[id].violations(context)]
    return sorted(found, key=lambda violation: violation.severity != "error")


def refusal(case: Case, sections: str = "".join(SECTIONS)) -> Violation | None:
    """Return the first error of a case under some sections' rules, with untested fixes"""
    context = Context(**vars(case))
    rules = (rule for id, rule in RULES.items() if id[0] in sections)
    found = (violation for rule in rules for violation in rule.violations(context))
    return next((violation for violation in found if violation.severity == "error"), None)


def checked(config: RunConfig, world_size: int, gpus_per_node: int | None = None) -> RunConfig:
    """Return the configuration for this machine with ``auto`` resolved.

    Raises:
        ConfigError: as :func:`check_or_raise`.
    """
    environment = Environment.detect()
    config, _ = resolve_auto(config, world_size, gpus_per_node, environment)
    check_or_raise(config, world_size, gpus_per_node, environment)
    return config


def check_or_raise(
    config: RunConfig,
    world_size: int,
    gpus_per_node: int | None = None,
    environment: Environment | str | None = None,
) -> list[Violation]:
    """Return the warnings of :func:`check`.

    Raises:
        ValueError: as :func:`check`.
        ConfigError: all violations, if at least one is an error; or as :func:`check`.
    """
    violations = check(config, world_size, gpus_per_node, environment)
    if any(violation.severity == "error" for violation in violations):
        raise ConfigError(violations)
    return violations
