"""``megatron-cp evaluate``: measure a checkpoint's loss on held-out data or files."""

from __future__ import annotations

import argparse
import os
from collections.abc import Callable, Sequence
from typing import Any

from megatron_cp.cli.needles import add_needles, needle_request, write
from megatron_cp.cli.train import add_ranks, ranks_to_start, run_or_start, start_ranks
from megatron_cp.common.errors import EXIT_OK
from megatron_cp.common.terminal import ArgumentParser, quiet
from megatron_cp.config.flags import accept_run_folder, add_gpus_per_node, add_recipe, compose, parse
from megatron_cp.config.names import NAME
from megatron_cp.data.needles.request import NeedleRequest
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
    add_needles(parser)
    args = parse(parser, argv)
    accept_run_folder(args)
    data = [word for word in args.overrides if os.path.exists(word) or not ("=" in word or word.startswith("~"))]
    args.overrides = [word for word in args.overrides if word not in data]
    config = compose(parser, args, _SWITCH)
    request = needle_request(parser, args, config.dataset.seq_length)
    if request is not None and data:
        parser.error(f"--needles makes its own texts, and {data[0]} is given. Fix: leave one of them out")
    if request is not None and args.write:
        write(request, config.tokenizer, config.dataset, args.write)
        return EXIT_OK
    group_size = None if config.runs_packs else config.model.context_parallel_size
    if request is not None:
        longest = f"{NAME.dataset.seq_length}={request.lengths[-1]}"
        name = args.name or f"needles-{request.lengths[-1]}"
        return _measure(parser, args, argv, name, [*_overrides(group_size), longest], lambda: _retrieval(request, name))
    if data:
        from megatron_cp.evaluation.paths import find_files, name_of

        paths = find_files(data)
        name = args.name or name_of(paths, config.dataset.seq_length)
        return _measure(parser, args, argv, name, _overrides(group_size), lambda: _evaluation(paths, name))
    if args.name:
        parser.error("--name is of results on files. Fix: name files, or leave out --name")
    if not config.validation.evaluates:
        parser.error(f"{NAME.validation.eval_iters}=0: no batch to measure. Fix: {NAME.validation.eval_iters}=10")
    return run_or_start("evaluate", parser, args, argv, _SWITCH)


def _measure(
    parser: argparse.ArgumentParser,
    args: argparse.Namespace,
    argv: Sequence[str],
    name: str,
    further: Sequence[str],
    work: Callable[[], Any],
) -> int:
    """Run ``work`` here, or start ranks that do; return the exit code."""
    from megatron_cp.api import prepared
    from megatron_cp.evaluation.paths import check_name

    check_name(name)
    config = compose(parser, args, *further)
    launcher.rank()  # rejects an invalid RANK before torch is imported
    number = ranks_to_start(parser, args)
    if number is not None:
        with quiet():  # the first rank checks and logs the same again
            checked(config, number, args.gpus_per_node)
        return start_ranks("evaluate", argv, number)
    config = prepared(config, args.gpus_per_node)
    from megatron_cp.training.train import run_training  # importing torch and megatron-core takes ten seconds

    return run_training(config, work=work()).exit_code


def _evaluation(paths: Sequence[str], name: str) -> Any:
    from megatron_cp.evaluation.run import evaluation_of  # imports torch

    return evaluation_of(paths, name)


def _retrieval(request: NeedleRequest, name: str) -> Any:
    from megatron_cp.evaluation.retrieval import retrieval_of  # imports torch

    return retrieval_of(request, name)


def _overrides(group_size: int | None) -> list[str]:
    """Return overrides for an evaluation in packs.

    ``group_size``: of the groups; None if training has packs.
    """
    found = [_SWITCH, f"{NAME.validation.eval_iters}=1", f"{NAME.validation.full_validation}=false"]
    found += [f"{NAME.dataset.reset_position_ids}=false"]
    # The run's own data are not read, so their division does not matter.
    found.append(f"{NAME.dataset.split}='1,1,1'")
    found += [f"{name}=null" for name in (NAME.dataset.valid_data_path, NAME.dataset.test_data_path)]
    if group_size is not None:
        found.append(f"{NAME.dist.eval_context_parallel_size}={group_size}")
    return found
