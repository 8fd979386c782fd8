"""Print how much each layout's training differs from one rank's.

The output is a Markdown table.

    python -m tests.functional_tests.equivalence_table

Uses the layouts of ``tests/unit_tests/training/layouts/test_equivalence.py``, and the 20 iterations of its slow part.
"""

import time

from tests.ranks import run_ranks
from tests.training_runs import train_losses, worst_difference
from tests.unit_tests.training.layouts.cases import LAYOUTS

STEPS = 20


def main() -> None:
    single_rank = run_ranks(train_losses, 1, {}, STEPS)[0]
    print(f"one rank: loss {single_rank[0][0]:.6f} -> {single_rank[-1][0]:.6f} in {STEPS} iterations, float32\n")
    print("| layout | ranks | worst loss, relative | worst gradient norm, relative | decentralized = MPU | seconds |")
    print("|---|---|---|---|---|---|")
    for name, (ranks, overrides) in LAYOUTS.items():
        start = time.perf_counter()
        mpu = run_ranks(train_losses, ranks, overrides, STEPS)[0]
        own = run_ranks(train_losses, ranks, overrides | {"dist__use_decentralized_pg": True}, STEPS)[0]
        loss, norm = worst_difference(mpu, single_rank)
        same = "bit for bit" if own == mpu else "DIFFERENT"
        print(
            f"| {name} | {ranks} | {loss:.1e} | {norm:.1e} | {same} | {time.perf_counter() - start:.0f} |", flush=True
        )


if __name__ == "__main__":
    main()
