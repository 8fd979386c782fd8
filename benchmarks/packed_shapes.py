"""Count how much ``model.packed_shape_buckets`` pads real lengths.

    python benchmarks/packed_shapes.py                    # 16 buckets, about a minute; no process groups, no torch
    python benchmarks/packed_shapes.py --buckets 8

Buckets are fitted to a run's first batches, as a run does it, and counted on 40 later ones. Documents have up to 128K
tokens, on 8 ranks. Schedules are those of the cost model ``h100_8b``. The exit code is 1 if 16 buckets pad batches of
1,024 documents by more than 2 %.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import numpy as np

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from megatron_cp.dynamic_cp import Schedule, schedule, schedule_fixed_cp
from megatron_cp.dynamic_cp.analysis.report import padding_fraction
from megatron_cp.dynamic_cp.distributions import sample_lengths
from megatron_cp.dynamic_cp.token_buckets import fit_to_batches
from megatron_cp.estimate.cost_presets import cost_preset

LONGEST, RANKS, LATER = 131_072, 8, 40
COST = cost_preset("h100_8b")
# CP size (None: dynamic, sizes 1 to 8), ranks that share experts.
WAYS = {"dynamic": (None, 1), "dynamic, experts on 8 ranks": (None, 8), "CP 8": (8, 1), "CP 4": (4, 1), "CP 2": (2, 1)}


def batches(name: str, count: int, limit: int, way: str, seeds: range) -> Iterator[tuple[Schedule, np.ndarray]]:
    """Yield schedules of drawn batches, with the lengths."""
    size, sync = WAYS[way]
    for seed in seeds:
        lengths = sample_lengths(name, count, LONGEST, seed)
        if size is None:
            yield schedule(lengths, RANKS, limit, cost=COST, sync_ranks=sync), lengths
        else:
            yield schedule_fixed_cp(lengths, RANKS, limit, cp_size=size, cost=COST), lengths


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--buckets", type=int, default=16)
    parser.add_argument("--counts", type=lambda text: list(map(int, text.split(","))), default=[1024, 256])
    options = parser.parse_args()
    worst = 0.0
    print("| lengths | documents a batch | packs | tokens a rank | packs a batch | shapes before | planned | later |")
    print("|---|---|---|---|---|---|---|---|")
    for count in options.counts:
        for name in ("documents", "wikipedia"):
            for way, (size, sync) in WAYS.items():
                limit = LONGEST // (size or RANKS)
                first, later = (batches(name, count, limit, way, range(k, k + 1000)) for k in (0, 1000))
                fit = fit_to_batches(first, options.buckets, limit, placement="zigzag", lockstep=sync > 1)
                tokens = padded = 0.0
                for (made, lengths), _ in zip(later, range(LATER), strict=False):
                    tokens += lengths.sum() * (1 + padding_fraction(made, lengths))
                    padded += lengths.sum() * (1 + padding_fraction(replace(made, token_buckets=fit.tokens), lengths))
                more = padded / tokens - 1
                worst = max(worst, more) if count == 1024 else worst
                print(
                    f"| {name} | {count} | {way} | {limit} | {fit.packs / fit.batches:.1f} | {fit.distinct} | "
                    f"{fit.padding:.2%} | {more:.2%} |",
                    flush=True,
                )
    return int(worst > 0.02 and options.buckets == 16)


if __name__ == "__main__":
    sys.exit(main())
