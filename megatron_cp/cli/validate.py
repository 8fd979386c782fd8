"""``megatron-cp validate``: check a recipe against every rule."""

from __future__ import annotations

import argparse
import contextlib
import sys
from collections.abc import Sequence
from dataclasses import replace

from megatron_cp.common.errors import EXIT_CONFIG, EXIT_OK, format_violations
from megatron_cp.common.terminal import ArgumentParser, say
from megatron_cp.config.flags import add_gpus_per_node, add_recipe, add_world_size, compose, parse
from megatron_cp.config.recipes import to_yaml
from megatron_cp.config.sections.training import TrainConfig
from megatron_cp.data.summary import planned_line
from megatron_cp.parallel.layout import group_lines, layout_of
from megatron_cp.rules import Environment, check, resolve_auto
from megatron_cp.rules.memory import memory_line
from megatron_cp.rules.remedies import Case
from megatron_cp.rules.resolve import ranks_to_check


def main(argv: Sequence[str]) -> int:
    parser = recipe_parser("validate", "Check a recipe against every rule and show the process groups.")
    args = parse(parser, argv)
    if args.explain:
        return explain(args.explain)
    return report(parser, args)


def recipe_parser(command: str, description: str) -> argparse.ArgumentParser:
    """Build the parser of a command that checks a recipe."""
    parser = ArgumentParser(f"megatron-cp {command}", description=description, allow_abbrev=False)
    add_recipe(parser, "what to run")
    add_world_size(parser, "ranks to check for (default: the recipe's recipe_world_size)")
    add_gpus_per_node(parser)
    parser.add_argument(
        "--environment",
        metavar="gpu|cpu|FILE.yaml",
        help="machine to check for: GPU, CPU or a description in a file (default: this machine)",
    )
    parser.add_argument("--explain", metavar="RULE", help="print a rule, its reason and an example that breaks it")
    return parser


def explain(rule_id: str) -> int:
    """Print a rule's full description; return the exit code."""
    from megatron_cp.rules.explain import explain  # imports every rule's texts: only on request

    say(explain(rule_id))
    return EXIT_OK


def report(parser: argparse.ArgumentParser, args: argparse.Namespace, *, with_settings: bool = False) -> int:
    """Print auto settings, groups and violations; return the exit code.

    With ``with_settings``, print all settings first.
    """
    given = config = compose(parser, args)
    if with_settings:
        say(to_yaml(config))
    world_size, environment = ranks_to_check(config, args.world_size), Environment.of(args.environment)
    violations = check(config, world_size, args.gpus_per_node, environment)
    config, choice = resolve_auto(config, world_size, args.gpus_per_node, environment)
    data = planned_line(config.dataset, config.train)
    if environment.device == "gpu":
        memory = memory_line(Case(config, world_size, args.gpus_per_node, environment))
    else:  # CPU ranks share the memory of their machine
        case = Case(given, world_size, args.gpus_per_node, environment)
        memory = None if args.environment else _memory_on_gpus(case)
    say(f"# {config.recipe} on {world_size} ranks\n{data}", *filter(None, [choice, memory]), sep="\n")
    with contextlib.suppress(ValueError):  # the violations below explain an impossible layout
        layout = layout_of(config.model, config.dist, world_size)
        say("\n".join(group_lines(layout)))
        if config.runs_packs:
            from megatron_cp.dynamic_cp.buddy_tree import configured_blocks, group_line

            blocks = configured_blocks(config.model, config.dist.eval_context_parallel_size, layout)
            say(group_line(blocks, at_start=config.dist.dynamic_groups_at_start))
    sys.stdout.flush()
    errors = [v for v in violations if v.severity == "error"]
    if violations:
        say(format_violations(violations), file=sys.stderr)
    if not errors:
        say(f"{'no errors' if violations else 'no setting breaks a rule'}; {_about_memory(environment, config.train)}")
    return EXIT_CONFIG if errors else EXIT_OK


def _memory_on_gpus(case: Case) -> str | None:
    """Return the memory line of ``--environment gpu``, on a machine without GPUs."""
    gpus = Environment.of("gpu")
    config, _ = resolve_auto(case.config, case.world_size, case.gpus_per_node, gpus)
    line = memory_line(replace(case, config=config, environment=gpus))
    return line and f"with --environment gpu: {line}"


def _about_memory(environment: Environment, train: TrainConfig) -> str:
    """Describe the memory check, for the last line."""
    if not environment.gpu_memory_gib:
        return "memory is not checked"
    return "the estimated memory fits" if train.check_memory else "memory is not checked (--no-memory-check)"
