"""Fuzz inputs: every command exits with 0, 1 or 2, and leaves no stray files.

It does so quickly, in little memory and without a traceback.

``python -m tests.functional_tests.fuzz_inputs --count 5000 --seed 1`` creates a small valid input of each kind once.
Each case changes one or two files (or arguments) and runs the command that reads them in a process forked from this
one. A case depends only on the seed and its number. A failure prints the command that repeats it, and keeps its folder.
"""

from __future__ import annotations

import argparse
import gc
import importlib
import os
import random
import shlex
import shutil
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path

os.environ.setdefault("OMP_NUM_THREADS", "1")

from megatron_cp import cli
from tests.functional_tests.fuzzing import examples
from tests.functional_tests.fuzzing.case import Case
from tests.functional_tests.fuzzing.kinds import KINDS
from tests.functional_tests.fuzzing.trial import Ended, Limits, Trial

_LIMITS = Limits()


@dataclass(frozen=True)
class Failure:
    """Case that did not end as required."""

    number: int
    kind: str
    arguments: list[str]
    ended: Ended


@dataclass
class Tally:
    """Results of the cases of each kind: exit codes (None for failures)."""

    counts: Counter[tuple[str, int | None]]
    failures: list[Failure]

    def table(self) -> str:
        rows = [("kind", "tried", "exit 0", "exit 1", "exit 2", "failed")]
        for kind in [*KINDS, "all"]:
            found: Counter[int | None] = Counter()
            for (of, code), count in self.counts.items():
                found[code] += count * (kind in (of, "all"))
            if found.total():
                rows.append((kind, *(str(n) for n in (found.total(), found[0], found[1], found[2], found[None]))))
        return "\n".join(f"{row[0]:12}" + "".join(f"{cell:>8}" for cell in row[1:]) for row in rows)


def fuzz(
    count: int,
    seed: int,
    kinds: Sequence[str] = tuple(KINDS),
    *,
    folder: Path,
    jobs: int = 1,
    only: int | None = None,
    valid: bool = False,
    limits: Limits = _LIMITS,
    on_failure: Callable[[Failure], None] = lambda failure: None,
) -> Tally:
    """Run ``count`` cases, or only case ``only``; keep failed cases in ``folder``.

    ``valid``: change nothing, so each case must exit with 0.
    """
    _warm()
    made = folder / "examples"
    if not made.is_dir():
        _make_examples(made)
    tally, running = Tally(Counter(), []), dict[int, tuple[Trial, list[str]]]()
    gc.freeze()
    numbers = iter([only] if only is not None else range(count))
    while True:
        while len(running) < jobs and (number := next(numbers, None)) is not None:
            place = folder / f"case{number}"
            shutil.rmtree(place, ignore_errors=True)
            case = Case(random.Random(f"{seed}:{number}"), place / "work", made, valid)
            arguments = KINDS[kinds[number % len(kinds)]](case)
            running[number] = (Trial(partial(cli.main, arguments), place, limits), arguments)
        if not running:
            gc.unfreeze()
            return tally
        for number, ended in [(n, end) for n, (trial, _) in running.items() if (end := trial.ended())]:
            _, arguments = running.pop(number)
            if valid and ended.code:
                ended.problems.append(f"ended with {ended.code} though nothing was changed")
            kind = kinds[number % len(kinds)]
            tally.counts[kind, None if ended.problems else ended.code] += 1
            if ended.problems:
                tally.failures.append(failure := Failure(number, kind, arguments, ended))
                on_failure(failure)
            elif only is None:
                shutil.rmtree(folder / f"case{number}")
        time.sleep(0.002)


def _make_examples(valid: Path) -> None:
    aside = valid.with_name("making")
    shutil.rmtree(aside, ignore_errors=True)

    def make() -> int:
        examples.make(aside / "work/out")
        return 0

    trial = Trial(make, aside, Limits(seconds=300))
    while (ended := trial.ended()) is None:
        time.sleep(0.05)
    if ended.code:
        raise RuntimeError(f"the examples could not be made: {(aside / 'stderr').read_text()[-2000:]}")
    (aside / "work/out").rename(valid)
    shutil.rmtree(aside)


def _warm() -> None:
    """Import what the commands import, so that forked processes need not."""
    for name in _MODULES:
        importlib.import_module(name)


_MODULES = (
    "hydra",
    "hydra.core.override_parser.overrides_parser",
    "tokenizers",
    "transformers",
    "megatron.core.datasets.indexed_dataset",
    "torch._dynamo",
    "torch.profiler",
    "megatron_cp.training.train",
    "megatron_cp.convert.importing",
    "megatron_cp.convert.exporting",
    "megatron_cp.report.page",
    "megatron_cp.report.figures",
    "megatron_cp.rules.explain",
    *(module for module, _ in cli._MODULES.values()),
)


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser("fuzz_inputs", description=(__doc__ or "").partition("\n\n")[0])
    parser.add_argument("--count", type=int, default=100)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--kind", nargs="+", choices=list(KINDS), default=list(KINDS))
    parser.add_argument("--only", type=int, metavar="NUMBER", help="run this case only, and keep its folder")
    parser.add_argument("--keep", type=Path, metavar="FOLDER", help="folder for examples and failed cases")
    parser.add_argument("--jobs", type=int, default=1)
    parser.add_argument("--valid", action="store_true", help="change nothing: each case must exit with 0")
    parser.add_argument("--seconds", type=float, default=60.0, help="time limit of a case")
    args = parser.parse_args(argv)
    folder = (args.keep or Path(tempfile.mkdtemp(prefix="fuzz-"))).resolve()
    folder.mkdir(parents=True, exist_ok=True)
    kinds = [] if args.kind == list(KINDS) else ["--kind", *args.kind]

    def report_failure(failure: Failure) -> None:
        again = ["--seed", str(args.seed), "--only", str(failure.number), *kinds, "--keep", str(folder)]
        print(f"case {failure.number}, {failure.kind}: {'; '.join(failure.ended.problems)}")
        print(f"    {shlex.join(failure.arguments)[:400]}\n    in {folder / f'case{failure.number}'}")
        print(f"    repeat: python -m tests.functional_tests.fuzz_inputs {shlex.join(again)}", flush=True)

    began = time.monotonic()
    tally = fuzz(
        args.count,
        args.seed,
        args.kind,
        folder=folder,
        jobs=args.jobs,
        only=args.only,
        valid=args.valid,
        limits=Limits(seconds=args.seconds),
        on_failure=report_failure,
    )
    print(f"{tally.table()}\nseed {args.seed}, {time.monotonic() - began:.0f} s")
    if not tally.failures and args.keep is None and args.only is None:
        shutil.rmtree(folder)
    return 1 if tally.failures else 0


if __name__ == "__main__":
    sys.exit(main())
