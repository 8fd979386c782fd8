"""Check random schedules of dynamic CP.

    python -m tests.functional_tests.dynamic_cp.fuzz_scheduler [--count N] [--seed N]

Prints each configuration that fails, and exits with 1 if there is one. A configuration depends only on its number;
--seed NUMBER --count 1 repeats a failure.
"""

import argparse
import random
import sys
import time
from dataclasses import replace
from typing import Any

from megatron_cp.dynamic_cp import schedule, schedule_fixed_cp
from megatron_cp.dynamic_cp.analysis.simulate import simulate
from megatron_cp.estimate.cost_presets import NAMES, cost_preset
from tests.unit_tests.dynamic_cp.scheduler.checks import problems


def configuration(number: int) -> tuple[list[int], dict[str, Any]]:
    """Return lengths and arguments of configuration ``number``.

    Corner cases are as frequent as ordinary ones.
    """
    rng = random.Random(number)
    ranks = rng.choice([1, 2, 3, 4, 5, 6, 7, 8, 10, 12, 14, 16, 17, 24, 30, 32, 48, 64, 100, 128])
    min_cp = min(ranks, rng.choice([1, 1, 1, 2, 3, 4, 8]))
    sequence_parallel = rng.choice([1, 1, 2, 4])
    m = rng.choice([8, 64, 100, 400, 1001, 2048, 4096, 16384])
    m = max(m, 2 * sequence_parallel)
    most = most_tokens(ranks, m, sequence_parallel)
    n = rng.choice([1, 2, 3, max(1, ranks // 2), ranks, 3 * ranks, rng.randint(1, 200), rng.randint(1, 200)])
    kind = rng.choice(["uniform", "lognormal", "equal", "maximal", "one_long", "tiny", "near_capacity"])
    if kind == "uniform":
        lengths = [rng.randint(1, most) for _ in range(n)]
    elif kind == "lognormal":
        lengths = [int(rng.lognormvariate(4, 2)) for _ in range(n)]
    elif kind == "equal":
        lengths = [rng.randint(1, most)] * n
    elif kind == "maximal":
        lengths = [most] * n
    elif kind == "one_long":
        lengths = [rng.randint(1, max(1, m // 4)) for _ in range(n - 1)] + [most]
    elif kind == "tiny":
        lengths = [rng.randint(1, 3) for _ in range(n)]
    else:
        lengths = [rng.randint(max(1, m // 2), m + 2) for _ in range(n)]
    return [max(1, min(length, most)) for length in lengths], {
        "num_ranks": ranks,
        "max_seqlen_per_rank": m,
        "min_cp_size": min_cp,
        "sync_ranks": rng.choice([d for d in range(1, ranks + 1) if ranks % d == 0]),
        "pipeline_size": rng.choice([1, 1, 2, 4]),
        "microbatch_multiple": rng.choice([1, 1, 2, 4, 8]),
        "sequence_parallel_size": sequence_parallel,
        "cost": replace(cost_preset(rng.choice(NAMES)), placement=rng.choice(["zigzag", "balanced"])),
    }


def most_tokens(ranks: int, tokens: int, sequence_parallel: int) -> int:
    """Return the longest sample that fits ``ranks`` ranks, padded.

    Each rank holds ``tokens`` tokens.
    """
    return tokens // (2 * sequence_parallel) * (2 * sequence_parallel) * ranks


def failures(number: int) -> list[str]:
    """List what is wrong with the schedules of configuration ``number``."""
    lengths, arguments = configuration(number)
    shape = {key: arguments[key] for key in ("num_ranks", "max_seqlen_per_rank", "sequence_parallel_size")}
    multiple = {"microbatch_multiple": arguments["microbatch_multiple"]}
    try:
        found = schedule(lengths, **arguments)
        placement = arguments["cost"].placement
        wrong = problems(found, lengths, **shape, **multiple, min_cp_size=arguments["min_cp_size"], placement=placement)
        keeping = {key: arguments[key] for key in ("sync_ranks", "pipeline_size")}
        step = simulate(found, lengths, arguments["cost"], **keeping)  # terminates: no group waits for itself
        if not 0.9 < step.over_bare_work < float("inf"):
            wrong.append(f"the simulated step takes {step.over_bare_work} times its bare work")
        for size in [1 << k for k in range(8) if arguments["min_cp_size"] == 1 and shape["num_ranks"] % (1 << k) == 0]:
            if max(lengths) <= most_tokens(size, shape["max_seqlen_per_rank"], shape["sequence_parallel_size"]):
                fixed = schedule_fixed_cp(lengths, **shape, **multiple, cp_size=size, cost=arguments["cost"])
                slower = step.seconds / simulate(fixed, lengths, arguments["cost"], **keeping).seconds
                if slower > 1.005:
                    wrong.append(f"{slower:.3f} times the seconds of groups of {size}")
        if number % 10 == 0:
            fixed = schedule_fixed_cp(lengths, **shape, **multiple, balanced=number % 20 == 0)
            seen = sorted(x for groups in fixed.microbatches for group in groups for x in group.sample_ids)
            if seen != list(range(len(lengths))) or fixed.num_microbatches % arguments["microbatch_multiple"]:
                wrong.append("fixed CP lost a sample or missed the multiple")
    except Exception as error:  # any crash is a failure
        wrong = [f"{type(error).__name__}: {error}"]
    return wrong


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--count", type=int, default=20_000, help="configurations to try (default: 20000)")
    parser.add_argument("--seed", type=int, default=0, help="number of the first one (default: 0)")
    args = parser.parse_args()
    start, failed, slowest = time.perf_counter(), 0, (0.0, args.seed)
    for number in range(args.seed, args.seed + args.count):
        begin = time.perf_counter()
        wrong = failures(number)
        slowest = max(slowest, (time.perf_counter() - begin, number))
        if wrong:
            failed += 1
            print(f"configuration {number}: {'; '.join(wrong[:3])}", flush=True)
    seconds = time.perf_counter() - start
    print(f"{args.count} configurations, {failed} failed, {seconds:.0f} s, slowest {slowest[0]:.2f} s ({slowest[1]})")
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
