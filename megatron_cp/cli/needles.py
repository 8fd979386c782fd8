"""Options of ``megatron-cp evaluate`` for retrieval tasks."""

from __future__ import annotations

import argparse

from megatron_cp.common.terminal import say
from megatron_cp.config.names import NAME
from megatron_cp.config.run_config import DatasetConfig, TokenizerConfig
from megatron_cp.data.needles.request import NeedleRequest
from megatron_cp.data.needles.tasks import TASKS, find_task
from megatron_cp.data.needles.written import write_rows
from megatron_cp.data.text.tokenizers import build_tokenizer
from megatron_cp.planner.request import amount

_ALL = ",".join(TASKS)
_DEPTHS = ",".join(str(depth) for depth in range(0, 101, 10))


def add_needles(parser: argparse.ArgumentParser) -> None:
    """Add the options."""
    group = parser.add_argument_group("retrieval")
    tasks = "; ".join(f"{task.name}: {task.what} ({task.count})" for task in TASKS.values())
    group.add_argument(
        "--needles",
        nargs="?",
        const=_ALL,
        metavar="TASK,...",
        help=f"measure retrieval instead of the loss; {tasks}. NAME:COUNT changes the number (default: all tasks)",
    )
    group.add_argument("--lengths", metavar="N,...", help=f"tokens, such as 4K,8K (default: {NAME.dataset.seq_length})")
    group.add_argument("--depths", metavar="N,...", help=f"needle depths in percent (default: {_DEPTHS})")
    group.add_argument("--samples", type=int, metavar="N", help="samples of each task, length and depth (default: 10)")
    group.add_argument("--haystack", metavar="FILE", help="text around the needles (default: noise)")
    group.add_argument("--seed", type=int, metavar="N", help="seed of the samples (default: 0)")
    group.add_argument(
        "--write", metavar="FILE.jsonl", help="write other such samples to train on, and measure nothing"
    )


def needle_request(parser: argparse.ArgumentParser, args: argparse.Namespace, length: int) -> NeedleRequest | None:
    """Return the request of parsed arguments, None without ``--needles``.

    Args:
        length: tokens of the samples without ``--lengths``.

    Raises:
        UsageError: an option needs ``--needles``, or a value is not possible.
        DataError: a task is unknown.
    """
    if args.needles is None:
        for option in ("lengths", "depths", "samples", "haystack", "seed", "write"):
            if getattr(args, option) is not None:
                parser.error(f"--{option} needs --needles. Fix: add --needles")
        return None
    tasks = tuple(dict.fromkeys(args.needles.split(",")))
    for name in tasks:
        find_task(name)
    try:
        lengths = {amount(text).number for text in args.lengths.split(",")} if args.lengths else {length}
    except ValueError as error:
        parser.error(f"--lengths {args.lengths}: {error}. Fix: --lengths 4K,8K")
    depths = _DEPTHS if args.depths is None else args.depths
    if not all(text.isdecimal() and int(text) <= 100 for text in depths.split(",")):
        parser.error(f"--depths {depths}: must be whole numbers from 0 to 100. Fix: --depths 0,50,100")
    samples = 10 if args.samples is None else args.samples
    if samples < 1:
        parser.error(f"--samples {samples}: must be at least 1. Fix: --samples 10")
    seed = args.seed or 0
    if seed < 0:
        parser.error(f"--seed {seed}: must be at least 0. Fix: --seed 0")
    numbers = tuple(sorted({int(text) for text in depths.split(",")}))
    return NeedleRequest(tasks, tuple(sorted(lengths)), numbers, samples, args.haystack, seed)


def write(request: NeedleRequest, tokenizer: TokenizerConfig, data: DatasetConfig, path: str) -> None:
    """Write samples to train on, for ``--write``."""
    source = request.source(build_tokenizer(tokenizer), for_training=True)
    rows = write_rows(path, source, data)
    say(f"{path}: {rows} rows of {', '.join(request.tasks)}, of {request.lengths[0]} to {request.lengths[-1]} tokens")
