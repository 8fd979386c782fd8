"""Compare predicted memory of random layouts with real runs on this CPU.

The rules accept all layouts. The bytes of live tensors are counted in the runs.

    python benchmarks/memory_accuracy.py                     # 100 layouts of up to four gloo ranks
    python benchmarks/memory_accuracy.py --count 10 --seed 7

Each run takes two steps; the second one's tensors are followed by ``tests/live_memory.py``. The rank that needs most
of each pipeline stage is compared. A kind of less than 2 % of the total is compared with these 2 %. Routers send each
expert as many tokens (see ``tests/memory_runs.py``).
"""

from __future__ import annotations

import argparse
import logging
import statistics
import sys
import time
import warnings
from collections import defaultdict
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))
warnings.filterwarnings("ignore")
logging.disable(logging.WARNING)

from tests.memory_runs import compare, errors  # noqa: E402
from tests.random_layouts import random_layouts  # noqa: E402
from tests.ranks import RanksFailed  # noqa: E402

TOTAL, KIND = 0.02, 0.05  # what is promised


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--count", type=int, default=100, help="layouts")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--skip", type=int, default=0, help="layouts to leave out first")
    args = parser.parse_args()
    found: dict[str, list[float]] = defaultdict(list)
    outside, failed, begin = 0, 0, time.monotonic()
    layouts = random_layouts(args.seed)
    for number in range(args.skip + args.count):
        world_size, settings = next(layouts)
        if number < args.skip:
            continue
        try:
            stages = compare(world_size, settings)
        except RanksFailed as error:
            failed += 1
            print(f"{number}: {world_size} ranks {settings} failed: {str(error)[-300:]}", flush=True)
            continue
        for counted, predicted in stages:
            each = errors(counted, predicted)
            wrong = {k: f"{v:+.1%}" for k, v in each.items() if abs(v) > (TOTAL if k == "total" else KIND)}
            outside += bool(wrong)
            for kind, error in each.items():
                found[kind].append(error)
            if wrong:
                changed = {name.partition("__")[2]: value for name, value in settings.items() if value is not None}
                print(f"{number}: stage {counted.stage} of {world_size} ranks {wrong} {changed}", flush=True)
    print(f"{'kind':26}{'stages':>7}{'mean':>8}{'90 %':>8}{'worst':>8}{'within':>8}")
    for kind in sorted(found, key=lambda kind: kind != "total"):
        sizes = sorted(map(abs, found[kind]))
        tenth = sizes[int(0.9 * (len(sizes) - 1))]
        within = sum(size <= (TOTAL if kind == "total" else KIND) for size in sizes)
        print(f"{kind:26}{len(sizes):7}{statistics.mean(sizes):8.2%}{tenth:8.2%}{sizes[-1]:8.2%}{within:8}")
    stages = len(found["total"])
    print(f"{args.count - failed} layouts, {stages} stages; {outside} outside 2 % or 5 % a kind; {failed} failed")
    print(f"{time.monotonic() - begin:.0f} s")
    return 0


if __name__ == "__main__":
    sys.exit(main())
