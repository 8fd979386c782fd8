"""``megatron-cp generate``: show text that a checkpoint generates."""

from __future__ import annotations

import argparse
import logging
import math
import os
import shlex
import sys
import time
from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

from megatron_cp.common.errors import EXIT_OK
from megatron_cp.common.terminal import ArgumentParser, say
from megatron_cp.launch import launcher

if TYPE_CHECKING:
    from megatron_cp.convert.generating import Sampling, TextModel

_TYPED = "megatron-cp generate"


def main(argv: Sequence[str]) -> int:
    args = _parse(argv)
    os.environ.pop("RANK", None)  # set by a launcher; this process reports errors itself
    # As in a run: deprecation warnings of model classes need no action by users.
    for library in ("megatron", "transformers"):
        logging.getLogger(library).setLevel(logging.ERROR)
    from megatron_cp.convert.run_exports import export_of_run  # torch: seconds

    folder = args.run
    if not (folder / "config.json").is_file():
        made = export_of_run(folder, args.iteration, _TYPED)
        _note(made.report)
        folder = made.folder
    from megatron_cp.convert.generating import Sampling, TextModel  # transformers: seconds

    model = TextModel(folder)
    encoded = [model.encode(prompt, args.chat) for prompt in args.prompts]
    model.load()
    sampling = Sampling(args.max_new_tokens, args.temperature, args.top_p, args.top_k, args.seed)
    _note(f"{_described(sampling)}; {model.describe()}")
    for number, (prompt, ids) in enumerate(zip(args.prompts, encoded, strict=True)):
        _generate(model, prompt, ids, sampling, first=number == 0)
    without = "" if model.has_tokenizer_files else " --skip-tokenizer-init"
    _note(
        f"\nThis is for a look at single texts. For serving: vllm serve {shlex.quote(str(folder))}{without} "
        "(or another server that reads Hugging Face folders)"
    )
    return EXIT_OK


def _generate(model: TextModel, prompt: str, ids: Sequence[int], sampling: Sampling, first: bool) -> None:
    """Print a prompt and its text, and measure."""
    room = model.positions - len(ids)
    if room < sampling.max_new_tokens:
        _note(
            f"--max-new-tokens={sampling.max_new_tokens}: ends after {room}, at the model's {model.positions} positions"
        )
    say(f"{'' if first else chr(10)}prompt: {prompt}\ntext: ", end="", flush=True)
    began = time.perf_counter()
    tokens = model.generate(ids, sampling, partial(say, end="", flush=True))
    say()
    seconds = time.perf_counter() - began
    _note(f"({len(ids)} tokens in the prompt, {len(tokens)} generated in {seconds:.1f} s)")


def _note(text: str) -> None:
    say(text, file=sys.stderr, flush=True)


def _described(sampling: Sampling) -> str:
    if not sampling.temperature:
        return "greedy: the most probable token each time"
    limits = [f"{name} {value:g}" for name, value in (("top-p", sampling.top_p), ("top-k", sampling.top_k)) if value]
    return ", ".join([f"sampled: temperature {sampling.temperature:g}", *limits, f"seed {sampling.seed}"])


def _stdin() -> str:
    return sys.stdin.buffer.read().decode("utf-8", errors="replace").rstrip("\n")


def _parse(argv: Sequence[str]) -> argparse.Namespace:
    parser = ArgumentParser(
        _TYPED,
        description="Show text that a checkpoint generates, for a look: one prompt at a time, in one process, on one "
        "GPU or the CPU. A run's checkpoint is exported once into RUN/exported, in Hugging Face's format, and "
        "transformers generates. Servers such as vLLM read the same folder.",
        epilog='example: megatron-cp generate runs/mine "The first rule is" --temperature 0.7 --top-p 0.9',
        allow_abbrev=False,
    )
    parser.add_argument("run", type=Path, metavar="RUN", help="a run's folder, or an exported Hugging Face folder")
    parser.add_argument("prompts", nargs="+", metavar="PROMPT", help="one or more texts to continue; -: standard input")
    parser.add_argument("--iteration", type=int, metavar="N", help="checkpoint of the run (default: the latest)")
    parser.add_argument(
        "--max-new-tokens", type=int, default=128, metavar="N", help="most tokens to generate (default: 128)"
    )
    parser.add_argument(
        "--temperature", type=float, default=0.0, metavar="T", help="0: the most probable token each time (the default)"
    )
    parser.add_argument("--top-p", type=float, metavar="P", help="sample from the tokens that have this share together")
    parser.add_argument("--top-k", type=int, metavar="K", help="sample from the K most probable tokens")
    parser.add_argument("--seed", type=int, default=0, metavar="N", help="of the sampling (default: 0)")
    parser.add_argument("--chat", action="store_true", help="put the prompt into the tokenizer's chat template")
    args = parser.parse_args(argv)
    args.prompts = [_stdin() if prompt == "-" else prompt for prompt in args.prompts]
    if (launcher.world_size() or 1) > 1:
        parser.error("generation runs in a single process. Fix: start it without torchrun")
    exported = (args.run / "config.json").is_file()
    unused = "has no effect with --temperature 0 (greedy). Fix: --temperature 1"
    for wrong, what in (
        (exported and args.iteration is not None, f"--iteration: {args.run} has no checkpoints. Fix: leave it out"),
        (
            args.max_new_tokens < 1,
            f"--max-new-tokens={args.max_new_tokens}: must be at least 1. Fix: --max-new-tokens 128",
        ),
        (
            not 0 <= args.temperature < math.inf,
            f"--temperature={args.temperature}: must be 0 or more. Fix: --temperature 0 (greedy)",
        ),
        (
            args.top_p is not None and not 0 < args.top_p <= 1,
            f"--top-p={args.top_p}: must be above 0, and at most 1. Fix: --top-p 0.9",
        ),
        (args.top_k is not None and args.top_k < 1, f"--top-k={args.top_k}: must be at least 1. Fix: --top-k 50"),
        (args.top_p is not None and args.temperature == 0, f"--top-p={args.top_p}: {unused}"),
        (args.top_k is not None and args.temperature == 0, f"--top-k={args.top_k}: {unused}"),
        (not 0 <= args.seed < 2**63, f"--seed={args.seed}: must be from 0 to 2**63 - 1. Fix: --seed 0"),
        (not all(prompt.strip() for prompt in args.prompts), "PROMPT: is empty. Fix: write a text"),
    ):
        if wrong:
            parser.error(what)
    return args
