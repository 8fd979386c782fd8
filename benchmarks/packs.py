"""Compare zigzag with packs in pieces: balance, rows, CPU time, time to plan.

    python benchmarks/packs.py                                   # plans of drawn packs: no process groups, no torch
    python benchmarks/packs.py --part attention --ranks 4        # forward and backward on gloo ranks
    python benchmarks/packs.py --part planning                   # 1,000 documents on 16 ranks

``attention`` prints the CPU time of the slowest rank, times the number of ranks, over the CPU time of one rank that has
the whole pack. Communication counts where it takes CPU time; waiting does not. All sides alternate within each round,
each rank with one thread, so more ranks than cores are fine. The time of a rank is its sum over the rounds.
"""

from __future__ import annotations

import argparse
import math
import os
import sys
import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from itertools import accumulate
from pathlib import Path

import numpy as np

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from benchmarks.packs_bound import lower_bound, rows_received
from megatron_cp.attention.placement.layout import PlacedLayout
from megatron_cp.attention.placement.planner import causal_pairs, place
from megatron_cp.dynamic_cp.distributions import sample_lengths
from megatron_cp.dynamic_cp.types import padded_length

NAMES = ("wikipedia", "documents", "lognormal", "pareto")
HEADS, KV_HEADS, DIM = 8, 4, 64


def drawn_pack(name: str, tokens: int, seed: int, longest: int) -> list[int]:
    """Return the lengths of a pack of ``tokens``; the last document is cut off."""
    rng = np.random.default_rng(seed)
    lengths = sample_lengths(name, 4000, longest, seed=1)
    pack: list[int] = []
    while (room := tokens - sum(pack)) > 0:
        pack.append(min(room, int(rng.choice(lengths))))
    return pack


@dataclass
class Totals:
    """Sums over the packs of one distribution and number of ranks."""

    imbalances: list[float] = field(default_factory=list)
    rows: int = 0
    bound: int = 0
    zigzag: float = 0.0
    documents: int = 0
    cut: int = 0

    def add(self, pack: list[int], size: int) -> None:
        placement = place(pack, size)
        work = [sum(causal_pairs(start, stop) for _, start, stop in pieces) for pieces in placement]
        self.imbalances.append(max(work) * size / sum(work))
        self.rows += rows_received(placement)
        self.bound += lower_bound(pack, size, max(work))
        self.zigzag += 0.75 * (size - 1) * sum(pack)
        self.documents += len(pack)
        holders = [document for pieces in placement for document in {piece.document for piece in pieces}]
        self.cut += sum(holders.count(document) > 1 for document in set(holders))

    def __str__(self) -> str:
        mean = math.exp(np.mean(np.log(self.imbalances)))
        return (
            f"{mean:.4f} | {max(self.imbalances):.3f} | {self.rows / max(1, self.bound):.3f} | "
            f"{self.rows / self.zigzag:.3f} | {self.cut / self.documents:.1%}"
        )


def show_plans(count: int, longest: int) -> None:
    """Print balance and rows of packs of 4 to 64 times the mean length."""
    print("| lengths | ranks | slowest / mean | largest | rows / bound | rows / zigzag | documents cut |")
    print("|---|---|---|---|---|---|---|")
    every: list[float] = []
    for name in NAMES:
        mean = float(sample_lengths(name, 4000, longest, seed=1).mean())
        packs = [
            drawn_pack(name, int(mean * times), 10 * times + seed, longest)
            for times in (4, 8, 16, 32, 64)
            for seed in range(count)
        ]
        for size in (2, 3, 4, 6, 8, 12, 16):
            totals = Totals()
            for pack in packs:
                totals.add(pack, size)
            every += totals.imbalances
            print(f"| {name} | {size} | {totals} |", flush=True)
    print(f"geometric mean of all: {math.exp(np.mean(np.log(every))):.4f}")


def show_planning(repeats: int, longest: int) -> None:
    """Print the CPU time of a plan, and of an empty loop as a measure of the core."""

    def best(call: object, *args: object) -> float:
        times = []
        for _ in range(repeats):
            start = time.process_time()
            call(*args)  # type: ignore[operator]
            times.append(time.process_time() - start)
        return min(times) * 1e3

    def loop() -> None:
        for _ in range(100_000):
            pass

    for name in NAMES:
        lengths = sample_lengths(name, 1000, longest, seed=3).tolist()
        print(f"{name}: {best(place, lengths, 16):.2f} ms; a loop of 100,000: {best(loop):.2f} ms", flush=True)


def show_attention(options: argparse.Namespace) -> None:
    """Run the comparison on gloo ranks."""
    from benchmarks.gloo_ranks import run_on_ranks

    run_on_ranks(options.ranks, _time_attention, options)


def _time_attention(options: argparse.Namespace) -> None:
    import torch
    import torch.distributed as dist

    from benchmarks.attention import Bench, Sample, forward_backward, keep_freed_memory, transport
    from megatron_cp.attention.context import CPContext
    from megatron_cp.attention.functional import attend_in_context
    from megatron_cp.attention.sharding import shard_sequence
    from megatron_cp.attention.tiles import Mask

    keep_freed_memory()
    bench = Bench(options.repeats, torch.device("cpu"), threads=1)
    size, rank = bench.size, bench.rank
    bench.log(f"{size} ranks, {os.cpu_count()} cores, load {os.getloadavg()[0]:.1f}, torch {torch.__version__}")
    ratios: dict[tuple[str, str], list[float]] = {}

    def slowest(samples: list[Sample]) -> float:
        return max(map(sum, zip(*(sample.cpus for sample in samples), strict=True)))

    def offsets(lengths: list[int]) -> torch.Tensor:
        return torch.tensor([0, *accumulate(lengths)], dtype=torch.int32)

    for name, seed in _packs(options):
        pack = drawn_pack(name, options.tokens, seed, options.tokens)
        padded = [padded_length(length, size) for length in pack]
        placed = PlacedLayout.balanced(pack, size)
        torch.manual_seed(0)
        heads = (HEADS, KV_HEADS, KV_HEADS, HEADS)
        whole = [torch.randn(sum(pack), n, DIM) for n in heads]
        spread = [
            torch.cat([torch.nn.functional.pad(x, (0, 0, 0, 0, 0, p - n)) for x, n, p in zip(each, pack, padded)])  # noqa: B905
            for each in (x.split(pack) for x in whole)
        ]
        zigzag = [shard_sequence(x, 0, rank, size, offsets(padded)) for x in spread]
        pieces = [placed.shard(x, rank) for x in whole]
        context, ends = CPContext.alone(), offsets(pack)

        def alone(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
            return attend_in_context(context, q, k, v, mask=Mask(None, 0), cu_seqlens=ends)  # noqa: B023

        calls = {"one rank": (alone, whole)}
        for comm_type in options.transports:
            cut = {"cu_seqlens": offsets(pack), "cu_seqlens_padded": offsets(padded)}
            calls[f"{comm_type} zigzag"] = transport(comm_type, **cut), zigzag
            calls[f"{comm_type} placed"] = transport(comm_type, placed=placed), pieces
        samples: dict[str, list[Sample]] = {what: [] for what in calls}
        for turn in range(options.repeats + 1):  # the first warms up
            for what, (attention, tensors) in calls.items():
                sample = bench.time(lambda: forward_backward(attention, tensors), alone=what == "one rank")  # noqa: B023
                samples[what] += [sample] if turn else []
        base = samples.pop("one rank")
        found = {what: slowest(each) * size / slowest(base) for what, each in samples.items()}
        for what, ratio in found.items():
            ratios.setdefault((name, what), []).append(ratio)
        bench.log(
            f"{name} {options.tokens} tokens, {len(pack)} documents, longest {max(pack)}: "
            + ", ".join(f"{what} {ratio:.3f}" for what, ratio in found.items())
        )
    for (name, what), each in ratios.items():
        bench.log(f"geometric mean: {name}, {what}: {math.exp(np.mean(np.log(each))):.3f} of {len(each)} packs")
    dist.barrier()


def _packs(options: argparse.Namespace) -> Iterator[tuple[str, int]]:
    return ((name, seed) for name in ("wikipedia", "documents") for seed in range(options.count))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--part", choices=("plans", "attention", "planning"), default="plans")
    parser.add_argument("--count", type=int, default=8, help="packs of each kind")
    parser.add_argument("--longest", type=int, default=32768, help="longest document")
    parser.add_argument("--ranks", type=int, default=4, help="gloo ranks of --part attention")
    parser.add_argument("--tokens", type=int, default=8192, help="tokens of a pack of --part attention")
    parser.add_argument("--transports", type=lambda text: text.split(","), default=["p2p", "all_gather"])
    parser.add_argument("--repeats", type=int, default=3, help="measured rounds, after one warm-up round")
    options = parser.parse_args()
    if options.part == "plans":
        show_plans(options.count, options.longest)
    elif options.part == "planning":
        show_planning(max(20, options.repeats), options.longest)
    else:
        show_attention(options)


if __name__ == "__main__":
    main()
