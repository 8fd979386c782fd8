"""``megatron-cp plan``: find the fastest layout for a number of GPUs."""

from __future__ import annotations

import argparse
import json
import os
import shlex
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import yaml

from megatron_cp.common.errors import EXIT_CONFIG, EXIT_OK
from megatron_cp.common.terminal import ArgumentParser, say
from megatron_cp.config.flags import add_gpus_per_node, add_recipe, compose, given, overrides_before, parse
from megatron_cp.config.names import NAME
from megatron_cp.config.overrides import override, quoted
from megatron_cp.config.recipes import list_recipes, parse_overrides, settings_of
from megatron_cp.data.lengths import lengths_of
from megatron_cp.dynamic_cp.distributions import DISTRIBUTIONS
from megatron_cp.estimate.device import Device, device_names, load_device
from megatron_cp.parallel.layout import MOST_RANKS
from megatron_cp.planner.figures import Figures, Setup
from megatron_cp.planner.found import Found, Models, changes
from megatron_cp.planner.request import amount, check_vocabulary, environment_of, flat, laid_over, model_recipe, samples
from megatron_cp.planner.search import Search
from megatron_cp.planner.space import Settings, Space, with_settings
from megatron_cp.planner.table import as_dict, details, not_fitting, ranking
from megatron_cp.report.calibration import calibrate, write_device
from megatron_cp.rules.memory import NEARLY_FULL, gib
from megatron_cp.rules.remedies import Case

_LENGTH, _BATCH = NAME.dataset.seq_length, NAME.train.global_batch_size
_SHOWN_TOO_LARGE = 5


def _parser() -> argparse.ArgumentParser:
    parser = ArgumentParser(
        "megatron-cp plan",
        description="Rank the layouts of a model on a number of GPUs by estimated step time, within the GPU's memory.",
        epilog="example: megatron-cp plan --model llama3_8b --gpus 16 --gpu h100 --seq-length 128K "
        '--global-batch-size "4M tokens" --plot plan.png --write my_run.yaml',
        allow_abbrev=False,
        conflict_handler="resolve",
    )
    add_recipe(parser, "recipe with the model, data and optimizer settings")
    parser.set_defaults(**{_LENGTH: None, _BATCH: None})
    parser.add_argument(
        "--model", metavar="NAME|FOLDER", help="published model or Hugging Face folder, instead of --recipe"
    )

    def count(most: int) -> Any:
        def number(text: str) -> int:
            if not 1 <= int(text) <= most:
                raise argparse.ArgumentTypeError(f"{text}: must be from 1 to {most:,}")
            return int(text)

        return number

    parser.add_argument("--gpus", type=count(MOST_RANKS), help="number of GPUs")
    parser.add_argument(
        "--gpu", metavar="NAME|FILE.yaml", required=True, help=f"{', '.join(device_names())}, or a YAML file"
    )
    add_gpus_per_node(parser)
    parser.add_argument("--seq-length", "-sl", type=amount, help="tokens per sample: 131072 or 128K")
    batch = 'samples per step (512), or tokens per step (4M, "4M tokens")'
    parser.add_argument("--global-batch-size", "--global_batch_size", "-gb", dest="batch", type=amount, help=batch)
    lengths = "lengths of packed samples: a file as for 'megatron-cp schedule', or a distribution"
    parser.add_argument(
        "--lengths", metavar="FILE|DISTRIBUTION", help=f"{lengths} ({', '.join(sorted(DISTRIBUTIONS))})"
    )
    fit = "fit the GPU's constants to the step times of finished runs first"
    parser.add_argument("--calibrate", metavar="RUN", type=Path, nargs="+", help=f"{fit}; without --gpus nothing else")
    file = "file of the fitted GPU, for --gpu (default: device.yaml)"
    parser.add_argument("--device-file", metavar="FILE.yaml", type=Path, default=Path("device.yaml"), help=file)
    parser.add_argument("--top", type=count(1000), default=10, help="number of layouts to show (default: 10)")
    parser.add_argument("--detail", action="store_true", help="show time and memory by kind for each layout")
    parser.add_argument("--json", action="store_true", help="print all figures as JSON")
    parser.add_argument("--write", metavar="FILE.yaml", type=Path, help="write a recipe with the best layout")
    parser.add_argument("--plot", metavar="FILE.png", type=Path, help="plot memory against time")
    return parser


def main(argv: Sequence[str]) -> int:
    parser = _parser()
    args = parse(parser, overrides_before("--calibrate", argv))
    _check_files(parser, args)
    device = load_device(args.gpu)
    if args.calibrate:
        found = calibrate(args.calibrate, device, args.gpus_per_node)
        write_device(args.device_file, found.fit.device, str(found))
        say(f"{found}\nwrote {args.device_file}; plan with --gpu {args.device_file}", file=sys.stderr)
        device = found.fit.device
        if args.gpus is None:
            return EXIT_OK
    if args.gpus is None:
        parser.error("--gpus is required. Fix: --gpus 8")
    if (args.recipe is None) == (args.model is None):
        parser.error("exactly one of --recipe and --model is required. Fix: --model llama3_8b")
    return _plan(parser, args, argv, device)


def _plan(parser: argparse.ArgumentParser, args: argparse.Namespace, argv: Sequence[str], device: Device) -> int:
    begin = time.process_time()
    node = args.gpus_per_node or min(device.gpus_per_node, args.gpus)
    recipe, case, changed = _case(parser, args, environment_of(device, node), node)
    check_vocabulary(case)
    fixed = set(flat(parse_overrides(args.overrides))) | given(args).keys()
    models = Models.on(device, node)
    usable = device.memory * NEARLY_FULL
    base, train, model = flat(case.config.given()), case.config.train, case.config.model
    case = with_settings(case, {NAME.train.check_memory: False})  # the search compares memory itself
    lengths = _lengths(args, model.seq_length or 1, train.global_batch_size)
    space = Space(case, fixed, node, lengths)
    found = Search(space, usable, models).run(args.top)
    tokens = sum(lengths) if lengths else train.global_batch_size * (model.seq_length or 0)
    setup = Setup(device.name, args.gpus, node, device.memory, device.matmul_flops["bf16"], tokens)
    if not found.fitting:
        from megatron_cp.planner.limits import impossible

        say(f"megatron-cp plan: {impossible(space, usable, models, device.name)}", file=sys.stderr)
        return EXIT_CONFIG
    seconds = time.process_time() - begin
    best = changed | {
        name: value for name, value in changes(base, found.fitting[0].settings).items() if name not in fixed
    }
    _show(args, argv, setup, found, usable, best, seconds)
    if args.write:
        asked = given(args) | flat(parse_overrides(args.overrides))
        args.write.write_text(laid_over(recipe, best | asked, args.gpus))
        say(f"wrote {args.write}: megatron-cp validate {args.write} --environment gpu", file=sys.stderr)
    if args.plot:
        from megatron_cp.planner.plot import write_png

        write_png(args.plot, setup, found, usable, f"{case.config.recipe}, {model.seq_length:,} tokens per sample")
        say(f"wrote {args.plot}", file=sys.stderr)
    return EXIT_OK


def _lengths(args: argparse.Namespace, longest: int, count: int) -> tuple[int, ...] | None:
    """Return the lengths of the samples of a global batch, None without ``--lengths``."""
    return lengths_of(args.lengths, longest, count) if args.lengths else None


def _mean_length(args: argparse.Namespace, longest: int) -> float:
    """Return the mean tokens per sample."""
    drawn = _lengths(args, longest, 4096)
    return longest if drawn is None else sum(drawn) / len(drawn)


def _check_files(parser: argparse.ArgumentParser, args: argparse.Namespace) -> None:
    """Exit with an error if an output file cannot be written."""
    for option in ("write", "plot", *(["device_file"] if args.calibrate else [])):
        path, flag = getattr(args, option), f"--{option.replace('_', '-')}"
        if path is not None and (not os.path.isdir(path.parent) or os.path.isdir(path)):
            parser.error(f"{flag} {path}: folder not found, or the path is a folder. Fix: {flag} {path.name}")
        if path is not None and option != "plot" and path.suffix != ".yaml":
            parser.error(f"{flag} {path}: the file name must end in .yaml. Fix: {flag} {path.stem}.yaml")


def _case(
    parser: argparse.ArgumentParser, args: argparse.Namespace, environment: Any, node: int
) -> tuple[dict[str, Any], Case, Settings]:
    """Return the recipe, its case, and the settings changed by arguments."""
    with tempfile.TemporaryDirectory() as folder:
        recipe = _recipe(args)
        path = Path(folder) / f"{Path(args.recipe or args.model).stem}.yaml"
        path.write_text(yaml.safe_dump(recipe))
        args.recipe = args.recipe or str(path)
        config = compose(parser, args)
        changed: Settings = {}
        length = args.seq_length.number if args.seq_length else config.dataset.seq_length
        if args.seq_length:
            changed[_LENGTH] = length
        if args.batch:
            changed[_BATCH] = samples(args.batch, _mean_length(args, length))
        longest, kind = config.model.max_position_embeddings or length, config.model.position_embedding_type
        if args.lengths and not config.runs_packs:
            changed[NAME.model.sequence_packing_scheduler] = "dp_balanced"
        if length > longest and kind in ("rope", "none"):
            changed[NAME.model.max_position_embeddings] = length
        if changed:
            config = compose(parser, args, *(override(name, value) for name, value in changed.items()))
    return recipe, Case(config, args.gpus, node, environment), changed


def _recipe(args: argparse.Namespace) -> dict[str, Any]:
    """Return the recipe that ``--write`` merges the best layout over."""
    if args.model and os.path.isdir(args.model):
        from megatron_cp.convert.hf_folder import read_model  # imports torch

        return {"defaults": [{"pretrain": "llama"}, "_self_"], "model": read_model(Path(args.model))}
    if args.model:
        return model_recipe(args.model)
    if args.recipe in list_recipes():
        return {"defaults": [args.recipe, "_self_"]}
    from megatron_cp.config.recipes import load_recipe

    return settings_of(load_recipe(args.recipe))


def _show(
    args: argparse.Namespace,
    argv: Sequence[str],
    setup: Setup,
    found: Found,
    usable: float,
    best: Settings,
    seconds: float,
) -> None:
    """Print the plan."""
    overrides = [quoted(override(*item)) for item in best.items()]
    ranked = [Figures(setup, each) for each in found.fitting]
    too_large = [
        (
            Figures(setup, each.layout),
            [override(*item) for item in changes(each.layout.settings, each.remedy or {}).items()],
        )
        for each in found.too_large
    ]
    if args.json:
        frontier = [Figures(setup, each) for each in found.frontier]
        content = as_dict(setup, ranked, frontier, too_large, usable)
        rest = {"overrides": overrides, "estimates": found.examined, "seconds": seconds}
        say(json.dumps(content | rest, indent=2))
        return
    say(f"# {setup.gpus} {setup.gpu}, {setup.gpus_per_node} per node, {setup.tokens:,} tokens per step; estimates\n")
    say(ranking(ranked))
    for number, each in enumerate(ranked[: None if args.detail else 1], start=1):
        say(f"\n{number}: {each.words}\n{details(each)}")
    if too_large:
        say(f"\n{not_fitting(too_large[:_SHOWN_TOO_LARGE], usable)}")
    flags = [quoted(override(*item)) for item in given(args).items()]
    words = " ".join([*overrides, *flags, *map(quoted, args.overrides)])
    if args.write or args.model is None:
        train = f"megatron-cp train {args.write or f'--recipe {args.recipe} {words}'}"
    else:
        train = f"megatron-cp plan {shlex.join(argv)} --write plan.yaml && megatron-cp train plan.yaml"
        say(f"\nsettings of layout 1: {words}")
    say(f"\ntrain layout 1: {train}".rstrip())
    say(f"{found.examined} estimates in {seconds:.1f} s of CPU time; memory limit {gib(usable)} GiB per GPU")
