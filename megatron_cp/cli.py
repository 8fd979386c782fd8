"""The command line. Everything but a real run answers without importing torch, in well under a second."""

from __future__ import annotations

import argparse
import contextlib
import errno
import importlib
import os
import socket
import sys
import time
from collections.abc import Sequence
from typing import Any

from megatron_cp import launcher, slurm
from megatron_cp.config import RunConfig
from megatron_cp.data.summary import planned_line
from megatron_cp.errors import (
    EXIT_CONFIG,
    EXIT_FAILED,
    EXIT_INTERRUPTED,
    EXIT_OK,
    ConfigError,
    DataError,
    RuntimeFault,
    format_violations,
)
from megatron_cp.flags import add_flags, given
from megatron_cp.limits import reached_limit
from megatron_cp.parallel.layout import group_lines, layout_of
from megatron_cp.process import end_with_launcher
from megatron_cp.recipes import list_recipes, load_recipe, to_yaml
from megatron_cp.rules import Environment, check, check_or_raise, resolve_auto
from megatron_cp.rules.resolve import ranks_to_check
from megatron_cp.terminal import ArgumentParser, say

_SECONDS_TO_SPEAK = 3.0
_RECIPES = "List the recipes. [mock data]: random tokens until dataset.data_path=PREFIX names real data."

# Commands with a module of their own: module and what it does.
_MODULES = {
    "report": ("megatron_cp.report.cli", "show runs side by side: loss, throughput, phases, memory, layout"),
    "profile": ("megatron_cp.report.profile_cli", "show where the time of profiled steps went, by kind of kernel"),
    "doctor": ("megatron_cp.doctor", "what is installed here, and which attention a recipe would use"),
    "verify": ("megatron_cp.verify.cli", "prove that a layout trains the same model as one rank"),
    "convert": ("megatron_cp.convert.cli", "weights from Hugging Face's format, and back to it"),
    "schedule": ("megatron_cp.schedule_cli", "schedule sequence lengths over ranks and show the balance"),
}


def _recipe_parser(command: str, description: str) -> argparse.ArgumentParser:
    parser = ArgumentParser(f"megatron-cp {command}", description=description, allow_abbrev=False)
    parser.add_argument("--recipe", metavar="NAME|FILE.yaml", help="what to run; 'megatron-cp recipes' lists the names")
    parser.add_argument("--config", metavar="FILE.yaml", action="append", default=[], help="merged over the recipe")
    parser.add_argument(
        "--world-size", "--world_size", type=int, help="ranks to check for (default: the recipe's recipe_world_size)"
    )
    parser.add_argument("--gpus-per-node", "--gpus_per_node", type=int, help="ranks that share a node")
    parser.add_argument(
        "--environment",
        metavar="gpu|cpu|FILE.yaml",
        help="check for a GPU or CPU machine, or one that a file describes (default: this one)",
    )
    parser.add_argument("--explain", metavar="RULE", help="print a rule, why it exists and an example that breaks it")
    add_flags(parser)
    parser.add_argument(
        "overrides", nargs="*", metavar="key=value", help="any setting, in Hydra's grammar; wins over all of the above"
    )
    return parser


def _train(argv: Sequence[str]) -> int:
    parser = _recipe_parser("train", "Train a recipe; under torchrun or Slurm, one process a rank.")
    parser.add_argument("--dry-run", "--dry_run", action="store_true", help="compose, check and show; start nothing")
    parser.add_argument("--list-recipes", "--list_recipes", action="store_true", help="list the recipes")
    parser.add_argument("--print-config", "--print_config", action="store_true", help="print the composed YAML")
    parser.add_argument("--verify", action="store_true", help="first compare the layout with one rank, in small, once")
    args = parser.parse_intermixed_args(argv)
    if args.list_recipes:
        return _recipes(())
    if args.explain:
        return _explain(args.explain)
    config = _load(parser, args)
    if args.print_config:
        say(to_yaml(config), end="")
        return EXIT_OK
    if args.dry_run:
        say(to_yaml(config))
        return _report(config, args)
    if args.environment or args.world_size is not None:
        parser.error("--environment and --world-size are for --dry-run; a run has the ones it is started with")
    launcher.rank()  # a wrong one is told before torch is imported
    environment, world_size = Environment.detect(), launcher.world_size() or 1
    config, choice = resolve_auto(config, world_size, args.gpus_per_node, environment)
    warnings = check_or_raise(config, world_size, args.gpus_per_node, environment)
    if launcher.is_first_rank():
        say("\n".join([*([choice] if choice else []), *map(str, warnings)]), end="\n" if choice or warnings else "")
    launcher.add_variables(config.env_vars)  # before torch, which reads some as it is imported
    # Where a rank is lost we say so; torch would add a C++ stack for each rank and store operation.
    os.environ.setdefault("TORCH_CPP_LOG_LEVEL", "ERROR")
    from megatron_cp.training.train import run  # torch and megatron-core: ten seconds

    if not args.verify:
        return run(config)
    from megatron_cp.verify.before_training import verify_once

    return run(config, verify_once)


def _validate(argv: Sequence[str]) -> int:
    parser = _recipe_parser("validate", "Check a recipe against every rule and show the process groups.")
    args = parser.parse_intermixed_args(argv)
    if args.explain:
        return _explain(args.explain)
    config = _load(parser, args)
    return _report(config, args)


def _recipes(argv: Sequence[str]) -> int:
    ArgumentParser("megatron-cp recipes", description=_RECIPES).parse_args(argv)
    recipes = list_recipes()
    width = max(map(len, recipes))
    for name, description in recipes.items():
        say(f"{name:{width}}  {description}")
    return EXIT_OK


def _explain(rule_id: str) -> int:
    from megatron_cp.rules.explain import explain  # all that is known about constraints: only where it is asked for

    say(explain(rule_id))
    return EXIT_OK


def _load(parser: argparse.ArgumentParser, args: argparse.Namespace) -> RunConfig:
    if not args.recipe:
        parser.error("--recipe is needed; 'megatron-cp recipes' lists them")
    return load_recipe(args.recipe, args.overrides, files=args.config, flags=given(args))


def _report(config: RunConfig, args: argparse.Namespace) -> int:
    """Print what auto settings come to, the process groups and the violations."""
    world_size, environment = ranks_to_check(config, args.world_size), Environment.of(args.environment)
    violations = check(config, world_size, args.gpus_per_node, environment)
    config, choice = resolve_auto(config, world_size, args.gpus_per_node, environment)
    say(f"# {config.recipe} on {world_size} ranks\n{planned_line(config)}", *([choice] if choice else []), sep="\n")
    with contextlib.suppress(ValueError):  # an impossible layout: the violations below say why
        layout = layout_of(config, world_size)
        say("\n".join(group_lines(layout)))
        if config.runs_packs:
            from megatron_cp.dynamic_cp.groups import configured_blocks, group_line

            say(group_line(configured_blocks(config, layout), at_start=config.dist.dynamic_groups_at_start))
    sys.stdout.flush()
    errors = [v for v in violations if v.severity == "error"]
    if violations:
        say(format_violations(violations), file=sys.stderr)
    if not errors:
        say(f"{'no errors' if violations else 'no setting breaks a rule'}; memory is not checked")
    return EXIT_CONFIG if errors else EXIT_OK


def _commands() -> dict[str, tuple[Any, str]]:
    own = {
        "train": (_train, "train a recipe, or show what would run (--dry-run)"),
        "recipes": (_recipes, "list the recipes"),
        "validate": (_validate, "check a recipe against every rule"),
    }
    return own | {name: (None, text) for name, (_, text) in _MODULES.items()}


def _usage() -> str:
    commands = "\n".join(f"  {name:10} {text}" for name, (_, text) in _commands().items())
    return f"usage: megatron-cp COMMAND ...\n\ncommands:\n{commands}\n\n'megatron-cp COMMAND --help' tells more."


def _dispatch(argv: Sequence[str]) -> int:
    if not argv or argv[0] in ("-h", "--help"):
        say(_usage(), file=sys.stdout if argv else sys.stderr)
        return EXIT_OK if argv else EXIT_CONFIG
    name, rest = argv[0], argv[1:]
    if name not in _commands():
        from megatron_cp.schema import nearest

        say(f"megatron-cp: unknown command '{name}'{nearest(name, list(_commands()))}\n{_usage()}", file=sys.stderr)
        return EXIT_CONFIG
    if name in _MODULES:
        return importlib.import_module(_MODULES[name][0]).main(rest)
    return _commands()[name][0](rest)


def main(argv: Sequence[str] | None = None) -> int:
    """Run a command. Exit codes: 0 done, 1 failed while running, 2 usage or configuration, 129, 130 and 143 stopped."""
    for name in ("stdout", "stderr"):
        if getattr(sys, name) is None:  # closed by whoever started us (>&-), and thus None in Python
            setattr(sys, name, open(os.devnull, "w", encoding="utf-8"))  # noqa: SIM115
    end_with_launcher()
    try:
        slurm.take_rank()
        code = _dispatch(sys.argv[1:] if argv is None else list(argv))
        sys.stdout.flush()  # here, where a full disk or a reader that went away can still be answered
        return code
    except (ConfigError, DataError) as error:
        what = "the configuration cannot run\n" if isinstance(error, ConfigError) else ""
        say(f"megatron-cp: {_its_turn()}{what}{error}", file=sys.stderr, flush=True)
        _tell_other_nodes(error)
        return EXIT_CONFIG
    except RuntimeFault as fault:
        if fault.on_all_ranks and not launcher.is_first_rank():
            time.sleep(_SECONDS_TO_SPEAK)
        else:
            say(f"megatron-cp: {fault}", file=sys.stderr, flush=True)
        _tell_other_nodes(fault)
        return EXIT_CONFIG if fault.of_data else EXIT_FAILED
    except KeyboardInterrupt:
        if launcher.is_first_rank():
            say("megatron-cp: interrupted", file=sys.stderr, flush=True)
        return EXIT_INTERRUPTED
    except SystemExit as stop:  # argparse
        return stop.code if isinstance(stop.code, int) else EXIT_CONFIG
    except BrokenPipeError:  # the reader (head, less) went away
        _drop_output()
        return EXIT_OK
    except OSError as error:
        if error.errno not in (errno.ENOSPC, errno.EDQUOT, errno.EIO) or error.filename is not None:
            if _is_limit(error):
                return EXIT_FAILED
            raise
        _drop_output()
        say(f"megatron-cp: the output cannot be written: {error.strerror}", file=sys.stderr, flush=True)
        return EXIT_FAILED
    except Exception as error:
        if _is_limit(error):
            return EXIT_FAILED
        raise


def _is_limit(error: Exception) -> bool:
    """Report an error to the other nodes, and print the system's limit behind it; returns whether there is one."""
    limit = reached_limit(error)
    if limit is not None:
        rank = launcher.number("RANK") or 0
        say(f"megatron-cp: rank {rank}, on {socket.gethostname()}: {limit}", file=sys.stderr, flush=True)
    _tell_other_nodes(error if limit is None else RuntimeFault(limit))
    return limit is not None


def _its_turn() -> str:
    """Wait until this rank is to say what all ranks have found, as a rule; returns who it says that it is.

    The first rank does at once, and its launcher stops the ranks of its node. Another node may be alone with it (a file
    that only this one lacks): so the first of each node does after a while, and then any that is still there.
    """
    if launcher.is_first_rank():
        return ""
    time.sleep(_SECONDS_TO_SPEAK * (2 if launcher.local_rank() else 1))
    return f"rank {launcher.rank()}, on {socket.gethostname()}: "


def _tell_other_nodes(error: Exception) -> None:
    """Their ranks may wait for this one, where only this node lacks something or is set up otherwise."""
    if launcher.can_tell_other_nodes():
        with contextlib.suppress(ImportError, OSError):  # torch itself may be what is broken
            from megatron_cp.parallel.meeting import tell_those_who_wait

            tell_those_who_wait(error)


def _drop_output() -> None:
    """What is still to be printed goes nowhere: Python would try again as it ends, and trace the same error."""
    os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
