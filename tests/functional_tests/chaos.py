"""Kill, freeze and signal real launched runs at random moments.

Each run must end, and resume to bit-identical losses.

    python -m tests.functional_tests.chaos --count 200 --seed 1 [--keep FOLDER]

A tiny model trains under each launcher in turn: ``megatron_cp.torchrun`` and ``torchrun`` with two ranks, and
``megatron-cp train`` with one. It saves every tenth iteration, alternately in the foreground and in the background.
Each restart tests the recovery from the previous strike, and is the target of the next. A finished run is compared with
an uninterrupted run, and a new one begins. The exit code is 1 if anything failed.
"""

from __future__ import annotations

import argparse
import itertools
import random
import shutil
import signal
import sys
import tempfile
import time
from collections import defaultdict
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path

from tests.functional_tests.chaos_runs import ENDS_WITHIN, LAUNCHERS, Life, ranks_of, send
from tests.functional_tests.soak import losses_of, paragraphs

THAW, FREEZE_AND_KILL = "SIGSTOP, SIGCONT", "SIGSTOP, SIGKILL"
ACTIONS = ("SIGKILL", "SIGTERM", "SIGINT", "SIGHUP", THAW, FREEZE_AND_KILL)
TARGETS = ("rank", "launcher", "all")
MOMENTS = ("start-up", "training", "saving")


@dataclass
class Strike:
    """One strike at a run, and the problems after it."""

    action: str
    target: str
    moment: str
    launcher: str
    problems: list[str] = field(default_factory=list)
    seconds: float = 0.0  # from the strike to the end of all processes

    @property
    def kind(self) -> tuple[str, str, str, str]:
        return (self.action, self.target, self.moment, self.launcher)


@dataclass
class Chain:
    """Launches in one run folder, one after the other.

    All have the same number of ranks.
    """

    home: Path
    ranks: int
    data: tuple[str, ...]
    reference: list[float] = field(default_factory=list)
    unproven: list[Strike] = field(default_factory=list)  # strikes whose recovery is not yet tested
    lives: int = 0
    folders: int = 1
    seconds_to_train: float = 8.0  # from the start of the last launch that got this far

    @property
    def folder(self) -> Path:
        return self.home / f"ranks{self.ranks}-{self.folders:03}"

    def start(self, launcher: str) -> Life:
        self.lives += 1
        asynchronous = f"checkpoint.async_save={str(self.lives % 2 == 0).lower()}"
        log = self.home / f"{self.folder.name}-life{self.lives:04}.log"
        return Life(launcher, self.folder, log, *self.data, asynchronous)

    def run_uninterrupted(self) -> None:
        launcher = LAUNCHERS[0] if self.ranks == 2 else LAUNCHERS[2]
        folder = self.home / f"uninterrupted{self.ranks}"
        life = Life(launcher, folder, folder.with_suffix(".log"), *self.data, "checkpoint.save_interval=null")
        life.wait_for_the_end(600)
        assert life.code == 0, f"the uninterrupted run failed: {life}\n{life.text[-3000:]}"
        self.reference = losses_of(folder)

    def has_ended(self, life: Life, problems: list[str], strike: Strike | None, log: Callable[[str], None]) -> bool:
        """Judge an ended launch, and begin a new folder if this one is complete or broken."""
        problems = problems + life.problems_of_the_end(self.reference)
        came_to_train = life.trains or life.code == 0
        if strike is None and life.code != 0:
            problems.append(f"ended by itself with exit code {life.code}")
        if problems:
            blamed = strike or (self.unproven[-1] if self.unproven else Strike("nothing", "", "", life.launcher))
            blamed.problems += [f"{'; '.join(problems)}\n    folder {life.folder}\n    {life}"]
            log(f"  FAILED: {'; '.join(problems)}")
        if came_to_train or problems:
            self.unproven = []
        if life.code == 0 or problems:
            self.folders += 1
        return not problems


def deck(draw: random.Random) -> Iterator[tuple[str, str, str]]:
    """Yield all kinds of strikes in random order, endlessly."""
    while True:
        kinds = list(itertools.product(ACTIONS, TARGETS, MOMENTS))
        draw.shuffle(kinds)
        yield from kinds


def strike_down(life: Life, strike: Strike, chain: Chain, draw: random.Random) -> bool:
    """Wait for the moment and strike; return False if the launch ended before."""
    if strike.moment == "start-up":
        pause = draw.uniform(0.1, chain.seconds_to_train)
        life.wait_until(lambda: life.trains, pause)
    elif not life.wait_until(lambda: life.trains):
        return False
    else:
        chain.seconds_to_train = min(time.monotonic() - life.started, 60.0)
        if strike.moment == "saving" and not life.wait_until(lambda: life.saves):
            return False
        time.sleep(draw.uniform(0, 0.05 if strike.moment == "saving" else 1.0))
    victims = life.targets(strike.target)
    if life.code is not None or not victims:
        return False
    if strike.target == "rank":
        victims = [draw.choice(victims)]
    if "," not in strike.action:
        send(victims, signal.Signals[strike.action])
        return True
    send(victims, signal.SIGSTOP)
    time.sleep(draw.uniform(0.2, 2.0))
    send(victims, signal.SIGCONT if strike.action == THAW else signal.SIGKILL)
    return True


def continues(life: Life) -> bool:
    """Return whether a run writes the numbers of another iteration.

    False if it ends instead.
    """
    now = time.time_ns()
    return life.wait_until(lambda: life.has_trained_since(now))


def chaos(count: int, seed: int, home: Path, log: Callable[[str], None] = print) -> list[Strike]:
    """Strike ``count`` times; return all strikes with their problems."""
    draw = random.Random(seed)
    kinds, launchers = deck(draw), itertools.cycle(LAUNCHERS)
    data = (f"dataset.data_path={paragraphs(home)}",)
    chains = {ranks: Chain(home, ranks, data) for ranks in (1, 2)}
    for chain in chains.values():
        chain.run_uninterrupted()
    strikes: list[Strike] = []
    life: Life | None = None
    try:
        while len(strikes) < count:
            if life is None:
                launcher = next(launchers)
                chain = chains[ranks_of(launcher)]
                life = chain.start(launcher)
            action, target, moment = next(kinds)
            if life.launcher == LAUNCHERS[2] and target == "launcher":
                target = "rank"  # which is one process
            if life.trains and moment == "start-up":
                moment = "training"
            strike = Strike(action, target, moment, life.launcher)
            struck = strike_down(life, strike, chain, draw)
            struck_at = time.monotonic()
            if struck:
                strikes.append(strike)
                chain.unproven.append(strike)
                if action == THAW and continues(life):
                    log(f"{len(strikes)}: {', '.join(strike.kind)}: continues")
                    continue
            left = life.wait_for_the_end(ENDS_WITHIN if struck else ENDS_WITHIN + 60)
            problems = [f"{len(left)} processes left: {', '.join(left)}"] if left else []
            if struck and action == THAW and life.code != 0:
                problems.append(f"exit code {life.code} after it was frozen for a moment")
            if struck:
                strike.seconds = time.monotonic() - struck_at
                log(f"{len(strikes)}: {', '.join(strike.kind)}: exit code {life.code} after {strike.seconds:.1f} s")
            chain.has_ended(life, problems, strike if struck else None, log)
            life = None
        for chain in chains.values():  # the last recoveries
            if chain.unproven:
                life = chain.start(LAUNCHERS[0] if chain.ranks == 2 else LAUNCHERS[2])
                left = life.wait_for_the_end(600)
                chain.has_ended(life, [f"still ran after 600 s: {left}"] if left else [], None, log)
    finally:
        if life is not None:
            life.kill()
    return strikes


def table(strikes: list[Strike]) -> str:
    """List strikes and recoveries by kind, and each failure."""
    by_kind: dict[tuple[str, ...], list[Strike]] = defaultdict(list)
    for strike in strikes:
        by_kind[strike.kind].append(strike)
    lines = [
        "| signal | target | moment | launcher | tried | held | slowest end (s) |",
        "|---|---|---|---|---|---|---|",
    ]
    for kind, of_kind in sorted(by_kind.items()):
        lines.append(f"| {' | '.join(kind)} | {_counts(of_kind)} |")
    lines.append(f"| all | | | | {_counts(strikes)} |")
    for strike in strikes:
        lines += [f"failed: {', '.join(strike.kind)}: {problem}" for problem in strike.problems]
    return "\n".join(lines)


def _counts(strikes: list[Strike]) -> str:
    held = sum(not strike.problems for strike in strikes)
    return f"{len(strikes)} | {held} | {max((strike.seconds for strike in strikes), default=0.0):.1f}"


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--count", type=int, default=200, help="number of strikes (200)")
    parser.add_argument("--seed", type=int, default=1, help="seed of the random kinds and moments (1)")
    parser.add_argument(
        "--keep",
        type=Path,
        metavar="FOLDER",
        help="keep run folders and output there, also without failures",
    )
    options = parser.parse_args(argv)
    # In the background or under nohup this process ignores signals, and the runs would inherit that.
    for number in (signal.SIGINT, signal.SIGHUP):
        signal.signal(number, signal.default_int_handler)
    home = Path(options.keep or tempfile.mkdtemp(prefix="chaos-")).absolute()
    home.mkdir(parents=True, exist_ok=True)
    began = time.monotonic()
    strikes = chaos(options.count, options.seed, home)
    seconds, failed = time.monotonic() - began, any(strike.problems for strike in strikes)
    print(table(strikes))
    print(f"{len(strikes)} strikes in {seconds / 60:.1f} minutes, {seconds / max(1, len(strikes)):.1f} s each")
    if options.keep or failed:
        print(f"run folders and output: {home}")
    else:
        shutil.rmtree(home)
    return int(failed)


if __name__ == "__main__":
    sys.exit(main())
