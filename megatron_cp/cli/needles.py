"""Options of ``megatron-cp evaluate`` for retrieval tasks."""

from __future__ import annotations

import argparse
from dataclasses import dataclass

from megatron_cp.common.terminal import say
from megatron_cp.config.names import NAME
from megatron_cp.config.run_config import RunConfig
from megatron_cp.data.needles.haystack import NOISE, read_haystack
from megatron_cp.data.needles.source import NeedleSource, cells_of
from megatron_cp.data.needles.tasks import TASKS, find_task
from megatron_cp.data.needles.written import write_rows
from megatron_cp.data.text.tokenizers import Tokenizer, build_tokenizer
from megatron_cp.planner.request import amount

_ALL = ",".join(TASKS)
_DEPTHS = ",".join(str(depth) for depth in range(0, 101, 10))


@dataclass(frozen=True)
class NeedleRequest:
    """The tasks, lengths (in tokens) and depths (in percent) of the command line."""

    tasks: tuple[str, ...]
    lengths: tuple[int, ...]
    depths: tuple[int, ...]
    samples: int
    haystack: str | None
    seed: int

    def source(self, tokenizer: Tokenizer, for_training: bool = False) -> NeedleSource:
        """Build the samples.

        Raises:
            DataError: a task is unknown, a length too short, or the haystack cannot be read.
        """
        cells = cells_of([find_task(name) for name in self.tasks], self.lengths, self.depths)
        haystack = read_haystack(self.haystack) if self.haystack else NOISE
        return NeedleSource(cells, self.samples, haystack, tokenizer, self.seed, for_training)


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


def write(request: NeedleRequest, config: RunConfig, path: str) -> None:
    """Write samples to train on, for ``--write``."""
    source = request.source(build_tokenizer(config.tokenizer), for_training=True)
    rows = write_rows(path, source, config.dataset)
    say(f"{path}: {rows} rows of {', '.join(request.tasks)}, of {request.lengths[0]} to {request.lengths[-1]} tokens")
