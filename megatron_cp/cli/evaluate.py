"""``megatron-cp evaluate``: measure a checkpoint's loss on held-out data."""

from __future__ import annotations

from collections.abc import Sequence

from megatron_cp.cli.needles import add_needles, needle_request, write
from megatron_cp.cli.train import add_ranks, run_or_start
from megatron_cp.common.errors import EXIT_OK
from megatron_cp.common.terminal import ArgumentParser
from megatron_cp.config.flags import accept_run_folder, add_gpus_per_node, add_recipe, compose, parse
from megatron_cp.config.names import NAME

_SWITCH = f"{NAME.train.skip_train}=true"


def main(argv: Sequence[str]) -> int:
    parser = ArgumentParser(
        "megatron-cp evaluate",
        description="Measure the loss of a run's latest checkpoint on its validation and test data, and append it to "
        f"the run's metrics.jsonl. Same as train with {NAME.train.skip_train}=true.",
        epilog=f"example: megatron-cp evaluate -n 4 runs/mine {NAME.validation.eval_iters}=100",
        allow_abbrev=False,
    )
    add_recipe(parser, f"a run's folder, or a recipe; the checkpoint is read from {NAME.checkpoint.load}")
    add_ranks(parser)
    add_gpus_per_node(parser)
    add_needles(parser)
    args = parse(parser, argv)
    accept_run_folder(args)
    config = compose(parser, args, _SWITCH)
    if request := needle_request(parser, args, config.dataset.seq_length):
        if not args.write:
            parser.error("--needles needs a file. Fix: --write FILE.jsonl")
        write(request, config, args.write)
        return EXIT_OK
    if not config.validation.eval_iters:
        parser.error(f"{NAME.validation.eval_iters}=0: no batch to measure. Fix: {NAME.validation.eval_iters}=10")
    return run_or_start("evaluate", parser, args, argv, _SWITCH)
