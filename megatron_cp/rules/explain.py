"""Explain one rule in words, with a configuration that breaks it."""

from __future__ import annotations

from dataclasses import asdict
from functools import cache

from megatron_cp.common.errors import ConfigError, Violation
from megatron_cp.config.names import NAME
from megatron_cp.config.recipes import load_recipe
from megatron_cp.rules import RULES, Environment, Example, check

EXAMPLE_RECIPE = "llama_tiny_pretrain_config"

# Ids of checks that are not rules on a configuration.
OTHER_CHECKS = {
    "B7": "A batch has only known keys, each of shape [b, s].",
    "B9": "A batch is sliced exactly once.",
    "B10": "Position ids are global and in zigzag order.",
    "F1": "Packed attention under context parallelism needs the padded cu_seqlens.",
    "F2": "Every packed sequence's padded length divides by 2 * cp.",
    "F4": "cu_seqlens cover the whole pack.",
    "F15": "A pack is one row.",
    "K1": "Every key is known, in overrides, recipes and --config files.",
    "K2": "Every value has the type of its setting. Numbers are finite, and nothing is converted silently.",
    "K3": "Every override can be parsed: Hydra's grammar, without sweeps and deletions.",
    "K4": "Every named file and recipe exists and can be read.",
    "K20": "All ranks have the same configuration, code, libraries and key variables.",
    "K35": "The launcher's variables and the values on the command line are valid.",
}


@cache
def example_violations(rule_id: str) -> list[Violation]:
    """Return the violations of a rule's example."""
    example = RULES[rule_id].example
    config = load_recipe(EXAMPLE_RECIPE, example.overrides)
    return check(config, example.world_size, example.gpus_per_node, example.environment)


def example_command(example: Example) -> str:
    """Return the command line of an example."""
    parts = [f"megatron-cp validate --recipe {EXAMPLE_RECIPE} --world-size {example.world_size}"]
    named = isinstance(example.environment, str)
    parts.append(f"--environment {example.environment if named else 'FILE'}")
    if example.gpus_per_node is not None:
        parts.append(f"--gpus-per-node {example.gpus_per_node}")
    parts += [f'"{o}"' if "[" in o else o for o in example.overrides]
    return " ".join(parts)


def explain(rule_id: str) -> str:
    """Return the text of ``--explain`` for one rule.

    Raises:
        ConfigError: unknown rule.
    """
    name = rule_id.upper()
    if name in OTHER_CHECKS:
        return f"{name} (error): {OTHER_CHECKS[name]}"
    if name not in RULES:
        fix = f"the id that a message begins with, as in 'error A2: {NAME.model.context_parallel_size}=4: ...'"
        raise ConfigError([Violation("K35", "error", "--explain", f"no rule '{rule_id}'", fix)])
    rule, found = RULES[name], [str(v) for v in example_violations(name) if v.rule == name]
    lines = [f"{name} ({rule.severity}): {rule.title}", f"why: {rule.why}", f"example: {example_command(rule.example)}"]
    if isinstance(rule.example.environment, Environment):
        file = {name: value for name, value in asdict(rule.example.environment).items() if value}
        lines.append(f"  FILE holds {file}")
    return "\n".join([*lines, *(f"  {line}" for text in found for line in text.splitlines())])
