"""``megatron-cp evaluate``: measure a checkpoint's loss on held-out data or files."""

from __future__ import annotations

import argparse
import os
from collections.abc import Sequence

from megatron_cp.cli.train import add_ranks, ranks_to_start, run_or_start, start_ranks
from megatron_cp.common.terminal import ArgumentParser, quiet
from megatron_cp.config.flags import accept_run_folder, add_gpus_per_node, add_recipe, compose, parse
from megatron_cp.config.names import NAME
from megatron_cp.launch import launcher
from megatron_cp.rules import checked

_SWITCH = f"{NAME.train.skip_train}=true"


def main(argv: Sequence[str]) -> int:
    parser = ArgumentParser(
        "megatron-cp evaluate",
        description="Measure the loss of a run's latest checkpoint on files (DATA): texts, .jsonl, .parquet, .bin/.idx "
        "pairs or folders, every sample once. Results are written to evaluations/ in the run folder. Without DATA, "
        "measure it on the run's validation and test data, and append it to the run's metrics.jsonl, the same as train "
        f"with {NAME.train.skip_train}=true.",
        epilog=f"example: megatron-cp evaluate -n 4 runs/mine book.txt chats.jsonl {NAME.dataset.seq_length}=32768",
        allow_abbrev=False,
    )
    add_recipe(parser, f"a run's folder, or a recipe; the checkpoint is read from {NAME.checkpoint.load}")
    parser.add_argument("--name", help="name of the results (default: from the first file and the length)")
    add_ranks(parser)
    add_gpus_per_node(parser)
    args = parse(parser, argv)
    accept_run_folder(args)
    data = [word for word in args.overrides if os.path.exists(word) or not ("=" in word or word.startswith("~"))]
    args.overrides = [word for word in args.overrides if word not in data]
    if data:
        return _evaluate_files(parser, args, argv, data)
    if not compose(parser, args, _SWITCH).validation.eval_iters:
        parser.error(f"{NAME.validation.eval_iters}=0: no batch to measure. Fix: {NAME.validation.eval_iters}=10")
    return run_or_start("evaluate", parser, args, argv, _SWITCH)


def _evaluate_files(
    parser: argparse.ArgumentParser, args: argparse.Namespace, argv: Sequence[str], data: Sequence[str]
) -> int:
    from megatron_cp.api import prepared
    from megatron_cp.evaluation.paths import check_name, find_files, name_of

    paths = find_files(data)
    given = compose(parser, args)
    own_size = None if given.runs_packs else given.model.context_parallel_size
    config = compose(parser, args, *_overrides(own_size))
    name = args.name or name_of(paths, config.dataset.seq_length)
    check_name(name)
    launcher.rank()  # rejects an invalid RANK before torch is imported
    number = ranks_to_start(parser, args)
    if number is not None:
        with quiet():  # the first rank checks and logs the same again
            checked(config, number, args.gpus_per_node)
        return start_ranks("evaluate", argv, number)
    config = prepared(config, args.gpus_per_node)
    from megatron_cp.evaluation.run import evaluation_of  # importing torch and megatron-core takes ten seconds
    from megatron_cp.training.train import run_training

    return run_training(config, work=evaluation_of(paths, name)).exit_code


def _overrides(group_size: int | None) -> list[str]:
    """Return overrides for an evaluation in packs.

    ``group_size``: of the groups; None if training has packs.
    """
    found = [_SWITCH, f"{NAME.validation.eval_iters}=1", f"{NAME.dataset.reset_position_ids}=false"]
    if group_size is not None:
        found.append(f"{NAME.dist.eval_context_parallel_size}={group_size}")
    return found
