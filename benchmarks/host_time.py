"""Compare the host's work for a microbatch with megatron-core's ``GPTModel``.

No GPU is needed.

    python benchmarks/host_time.py                    # the counts of all kinds of steps
    python benchmarks/host_time.py --rounds 20        # also processor time, on a machine without other work
    python benchmarks/host_time.py --part first       # what dynamic CP adds to a first step on 1,024 ranks

Both sides have Transformer Engine's layers and attention: its real Python part over stand-ins for its kernels
(``tests/doubles/te_on_cpu``). Widths are tiny, because the host's work does not depend on them. Counts of kernels and
of Python functions do not depend on the machine's load. Times are taken in turns, without the stand-ins' time.
"""

from __future__ import annotations

import argparse
import os
import statistics
import sys
import tempfile
from pathlib import Path

import torch.distributed as dist

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from benchmarks.gloo_ranks import run_on_ranks
from tests.doubles import te_on_cpu

MODELS = {"1B": 16, "8B": 32}  # layers of Llama 3


def measure(kind: str, lengths: str, rounds: int) -> None:
    """Print the table of one kind of step."""
    from tests.doubles.te_on_cpu.bare_model import BARE, OURS, both_sides, counts
    from tests.doubles.te_on_cpu.host_work import calls_of, launches_of, seconds_of

    prints = dist.get_rank() == 0
    names = ("kernels", "Python functions")
    for name, (layer, rest) in zip(names, counts(kind, lengths, (launches_of, calls_of)), strict=True):
        rows = {"a layer": [layer[side].total() for side in (OURS, BARE)]}
        rows["the rest"] = [rest[side].total() for side in (OURS, BARE)]
        for model, layers in MODELS.items():
            rows[f"{model}, {layers} layers"] = [
                rest_ + layers * layer_ for rest_, layer_ in zip(rows["the rest"], rows["a layer"], strict=True)
            ]
        for what, (ours, bare) in rows.items():
            if prints:
                print(f"| {kind} | {name} | {what} | {ours} | {bare} | {ours / bare:.3f} |", flush=True)
    if not rounds:
        return
    with both_sides(kind, MODELS["1B"], lengths) as passes:
        pairs = []
        for number in range(rounds + 2):
            sides = list(passes) if number % 2 else list(passes)[::-1]
            seconds = {side: seconds_of(lambda run=passes[side]: run(2)) for side in sides}
            pairs.append(seconds[OURS] / seconds[BARE])
        ratios = sorted(pairs[2:])
        if prints:
            spread = f"{statistics.median(ratios):.3f} [{ratios[0]:.3f} {ratios[-1]:.3f}]"
            print(f"| {kind} | processor time | two microbatches of 16 layers | | | {spread} |", flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=0, help="pairs of timed steps; 0: counts only")
    parser.add_argument("--part", choices=["steps", "first"], default="steps", help="counts of steps, or a first step")
    arguments = parser.parse_args()
    os.environ["CUDA_VISIBLE_DEVICES"] = ""
    if arguments.part == "first":
        from benchmarks.first_step import show

        show()
        return
    os.environ.setdefault(te_on_cpu.FOLDER, str(Path(sys.prefix) / "te"))
    te_on_cpu.load()
    from tests.doubles.te_on_cpu.bare_model import KINDS, write_lengths

    print("| step | count | of | ours | megatron-core | ratio |\n|---|---|---|---|---|---|", flush=True)
    with tempfile.TemporaryDirectory() as folder:
        lengths = write_lengths(Path(folder))
        for kind, (ranks, _) in KINDS.items():
            run_on_ranks(ranks, measure, kind, lengths, arguments.rounds)


if __name__ == "__main__":
    main()
