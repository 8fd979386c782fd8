"""Measure memory and step time by sequence length, with and without MLP tiles.

The memory is that of live tensors, on one CPU rank.

    python benchmarks/long_sequences.py                                  # all parts
    python benchmarks/long_sequences.py --part memory --lengths 2048,4096,8192,16384,32768
    python benchmarks/long_sequences.py --part layers --lengths 4096,8192
    python benchmarks/long_sequences.py --part time --rounds 15
    python benchmarks/long_sequences.py --part ranks --length 131072               # one step of four ranks, without
    python benchmarks/long_sequences.py --part ranks --length 1048576 --everything # and with all savings

A Llama of 4 layers, hidden size 256, MLP width 1024 and 8 heads, float32, with the loss in chunks. Its attention has a
window of 256 tokens: so the MLP is most of a step, and long sequences take minutes. The memory is the peak of live
tensors beyond weights, gradients and optimizer (``tests/live_memory.py``). The part ``layers`` has full recomputation,
tiles and groups of heads, by the number of layers. The time is of whole steps of two runs, in turns in one process.
"""

from __future__ import annotations

import argparse
import logging
import resource
import statistics
import sys
import time
import warnings
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))
warnings.filterwarnings("ignore")
logging.disable(logging.WARNING)

from tests.live_memory import counted  # noqa: E402
from tests.ranks import run_ranks  # noqa: E402
from tests.training_runs import start, tiny_config, train_step  # noqa: E402

HIDDEN, LAYERS = 256, 4
STATES = ("weights", "gradients", "optimizer")
RECOMPUTE: dict[str, dict[str, Any]] = {
    "none": {},
    "full": {
        "model__recompute_granularity": "full",
        "model__recompute_method": "uniform",
        "model__recompute_num_layers": 1,
    },
}


def configuration(length: int, recompute: str, tile: int | None, groups: int = 1) -> dict[str, Any]:
    return RECOMPUTE[recompute] | {
        "model__num_query_groups": 8,
        "model__attention_head_groups": groups,
        "model__num_layers": LAYERS,
        "model__hidden_size": HIDDEN,
        "model__ffn_hidden_size": 4 * HIDDEN,
        "model__init_method_std": 0.02,
        "model__window_size": [256, 0],
        "model__cross_entropy_chunk_size": 1024,
        "model__mlp_chunk_size": tile,
        "dataset__seq_length": length,
        "train__global_batch_size": 1,
        "train__train_iters": 1000,
    }


def peak(overrides: dict[str, Any]) -> int:
    """Return the peak bytes of live tensors in the second step.

    Without those that live as long as the run.
    """
    run, batches = start(tiny_config(**overrides))
    train_step(run, next(batches).microbatches)
    with counted(run) as memory:
        microbatches = next(batches).microbatches
        memory.see_batches(microbatches)
        train_step(run, microbatches)
    run.close()
    return max(sum(size for kind, size in each.items() if kind not in STATES) for each in memory.peaks.values())


def show_memory(lengths: list[int], tile: int, plot: Path | None) -> None:
    print(f"MB of live tensors beyond weights, gradients and optimizer; tiles of {tile} tokens")
    ways = [(recompute, each, 1) for recompute in RECOMPUTE for each in (None, tile)] + [("full", tile, 8)]
    names = [
        ", ".join([f"{'full' if recompute == 'full' else 'no'} recomputation"] + ["tiles"] * bool(each))
        + ", groups of heads" * (groups > 1)
        for recompute, each, groups in ways
    ]
    print("| tokens | " + " | ".join(names) + " |\n|" + "---|" * (1 + len(ways)))
    rows = []
    for length in lengths:
        rows.append([run_ranks(peak, 1, configuration(length, *way), timeout=3000)[0] for way in ways])
        print(f"| {length} | " + " | ".join(f"{size / 1e6:.1f}" for size in rows[-1]) + " |", flush=True)
    per_value = (lengths[-1] - lengths[-2]) * HIDDEN * 4
    slopes = [(last - before) / per_value for before, last in zip(*rows[-2:], strict=True)]
    print("| slope, hidden sizes a token | " + " | ".join(f"{slope:.1f}" for slope in slopes) + " |")
    if plot is not None:
        draw(plot, lengths, names, rows)


def draw(path: Path, lengths: list[int], names: list[str], rows: list[list[int]]) -> None:
    """Draw peaks by length, and the layers' inputs alone."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(7.5, 4.5), layout="constrained")
    axes = figure.subplots()
    for name, peaks in zip(names, zip(*rows, strict=True), strict=True):
        axes.plot(lengths, [each / 1e6 for each in peaks], "o-", label=name)
    inputs = [LAYERS * HIDDEN * 4 * length / 1e6 for length in lengths]
    axes.plot(lengths, inputs, "--", color="grey", label="inputs of the layers alone")
    axes.set(xscale="log", yscale="log", xlabel="tokens", ylabel="MB of live tensors at the peak, without states")
    axes.set_xticks(lengths, [f"{length // 1024}K" for length in lengths], minor=False)
    axes.set_xticks([], minor=True)
    axes.set_ylim(top=10 * max(rows[-1]) / 1e6)  # room for the legend
    axes.grid(alpha=0.3)
    axes.legend(frameon=False, ncols=2, loc="upper left")
    figure.savefig(path, dpi=130)


def show_layers(lengths: list[int], tile: int, layers: list[int]) -> None:
    """Print slopes by the number of layers, with all savings."""
    short, long = lengths[-2:]
    print(f"peak of {long} less that of {short} tokens, in inputs of a layer; everything on, tiles of {tile} tokens")
    print("| layers | a token | a token and layer |\n|---|---|---|")
    for count in layers:
        ways = [configuration(each, "full", tile, 8) | {"model__num_layers": count} for each in (short, long)]
        less, most = (run_ranks(peak, 1, each, timeout=3000)[0] for each in ways)
        slope = (most - less) / ((long - short) * HIDDEN * 4)
        print(f"| {count} | {slope:.2f} | {slope / count:.2f} |", flush=True)


def times(length: int, recompute: str, tile: int, rounds: int) -> tuple[list[float], list[float]]:
    """Return seconds of steps without and with tiles, of two runs that alternate."""
    runs = [start(tiny_config(**configuration(length, recompute, each))) for each in (None, tile)]
    found: tuple[list[float], list[float]] = ([], [])
    for number in range(rounds + 1):
        order = (0, 1) if number % 2 else (1, 0)
        for place in order:
            run, batches = runs[place]
            microbatches = next(batches).microbatches
            begin = time.process_time()  # of one thread: other programs take turns with it
            train_step(run, microbatches)
            if number:  # the first step allocates
                found[place].append(time.process_time() - begin)
    return found


def show_times(length: int, tile: int, rounds: int) -> None:
    print(f"CPU seconds of a step of {length} tokens, medians of {rounds} rounds; tiles of {tile} tokens")
    print("| recomputation | without | with tiles | ratio: median, smallest, largest |\n|---|---|---|---|")
    for recompute in RECOMPUTE:
        without, tiled = run_ranks(times, 1, length, recompute, tile, rounds, timeout=3000)[0]
        ratios = [b / a for a, b in zip(without, tiled, strict=True)]
        middle = statistics.median(without), statistics.median(tiled)
        print(
            f"| {recompute} | {middle[0]:.2f} | {middle[1]:.2f} | {statistics.median(ratios):.3f}, {min(ratios):.3f}, "
            f"{max(ratios):.3f} |",
            flush=True,
        )


def first_step(overrides: dict[str, Any]) -> tuple[int, float]:
    """Return the largest resident bytes of this rank, and seconds of the step."""
    run, batches = start(tiny_config(**overrides))
    microbatches, begin = next(batches).microbatches, time.monotonic()
    train_step(run, microbatches)
    seconds = time.monotonic() - begin
    run.close()
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024, seconds


def show_ranks(length: int, tile: int, everything: bool) -> None:
    """Print what one step of four ranks takes.

    Pages that ranks share count for each of them.
    """
    way = configuration(length, "full", tile, 2) if everything else configuration(length, "none", None)
    way |= {"model__context_parallel_size": 4, "model__cp_comm_type": "a2a"}
    if not everything:
        way["model__cross_entropy_chunk_size"] = None
    found = run_ranks(first_step, 4, way, timeout=3000)
    total = sum(each for each, _ in found) / 1e9
    print(f"{length} tokens on 4 ranks: {total:.1f} GB resident at most, {max(each for _, each in found):.0f} s")


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--part", choices=("memory", "layers", "time", "ranks", "all"), default="all")
    parser.add_argument("--lengths", default="2048,4096,8192,16384", help="tokens of memory; the last two: of layers")
    parser.add_argument("--layers", default="4,16,32", help="numbers of layers")
    parser.add_argument("--length", type=int, default=8192, help="tokens of the parts time and ranks")
    parser.add_argument("--tile", type=int, default=1024, help="model.mlp_chunk_size")
    parser.add_argument("--rounds", type=int, default=9)
    parser.add_argument("--plot", type=Path, metavar="PNG", help="part memory: also draw the peaks")
    parser.add_argument("--everything", action="store_true", help="part ranks: recomputation, tiles, groups, chunks")
    args = parser.parse_args()
    lengths = [int(each) for each in args.lengths.split(",")]
    if args.part in ("memory", "all"):
        show_memory(lengths, args.tile, args.plot)
    if args.part in ("layers", "all"):
        show_layers(lengths, args.tile, [int(each) for each in args.layers.split(",")])
    if args.part in ("time", "all"):
        show_times(args.length, args.tile, args.rounds)
    if args.part == "ranks":
        show_ranks(args.length, args.tile, args.everything)
    return 0


if __name__ == "__main__":
    sys.exit(main())
