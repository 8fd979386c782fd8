"""Show where the start of a run spends its CPU time, up to its first step.

    python benchmarks/start_time.py                 # the tiny recipe; three rounds
    python benchmarks/start_time.py --rounds 1 --ranks 4

Printed are CPU seconds (user and system, the least of all rounds) and their share. CPU time is disturbed less by other
programs than wall time, but a busy second thread of a core still makes it longer: compare figures of one call only.
Imports are measured in one process each, in turns. Each part also imports the part before it, and the difference is
printed. The stages of a rank are measured in a rank, without profiler.
"""

from __future__ import annotations

import argparse
import importlib
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from functools import wraps
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))

RECIPE = "llama_tiny_pretrain_config"
ONE_STEP = ("--recipe", RECIPE, "train.train_iters=1", "scheduler.lr_warmup_iters=0")
ONE_RANK = ("context_parallel_size=1", "cp_comm_type=p2p", "hierarchical_context_parallel_sizes=null")
IMPORTS = {
    "launcher": {"interpreter": "pass", "torch": "import megatron_cp, torch", "ours": "import megatron_cp.torchrun"},
    "rank": {
        "interpreter": "pass",
        "torch": "import megatron_cp, torch",
        "megatron-core": "import megatron_cp, megatron.core.models.gpt.gpt_model",
        "ours": "import megatron_cp.training.train",
    },
}
COMMANDS = ("--help", f"train --recipe {RECIPE} --dry-run", f"validate --recipe {RECIPE}", "recipes")
STAGES = {  # functions of a rank, called in this order
    "rules, with the recipe": [("megatron_cp.cli.train", "compose"), ("megatron_cp.cli.train", "prepared")],
    "rendezvous": [("megatron_cp.training.train", "start_distributed")],
    "comparison of ranks": [("megatron_cp.training.train", "check_consistency")],
    "data": [("megatron_cp.training.train", "build_datasets")],
    "groups": [("megatron_cp.training.setup", "build_process_groups")],
    "model": [("megatron_cp.training.setup", "build_model"), ("megatron_cp.training.setup", "probe_attention")],
    "optimizer (torch imports its compiler)": [("megatron_cp.training.setup", "build_optimizer")],
    "first step": [("megatron_cp.training.loop", "train_step")],
}


def cpu_seconds(*command: str) -> float:
    """Return the CPU time of a command and the processes that it waited for."""
    before = os.times()
    subprocess.run(command, cwd=ROOT, check=True, capture_output=True)
    after = os.times()
    return after.children_user + after.children_system - before.children_user - before.children_system


def least(rounds: int, commands: dict[str, tuple[str, ...]]) -> dict[str, float]:
    """Return the least CPU time of each command; the commands run in turns."""
    taken = [{name: cpu_seconds(*command) for name, command in commands.items()} for _ in range(rounds)]
    return {name: min(each[name] for each in taken) for name in commands}


def show(title: str, parts: dict[str, float]) -> None:
    total = sum(parts.values())
    print(f"\n{title}: {total:.2f} s of CPU time")
    for name, seconds in parts.items():
        print(f"  {seconds:6.2f} s  {seconds / total:4.0%}  {name}")


def differences(nested: dict[str, float]) -> dict[str, float]:
    """Return what each part adds to the one before it."""
    before = [0.0, *nested.values()]
    return {name: seconds - less for (name, seconds), less in zip(nested.items(), before, strict=False)}


def rank_stages() -> None:
    """Train one step in this process and print the CPU time of each stage."""
    taken = dict.fromkeys(STAGES, 0.0)

    def timed(function: Callable[..., Any], stage: str) -> Callable[..., Any]:
        @wraps(function)
        def run(*args: Any, **kwargs: Any) -> Any:
            begun = time.process_time()
            try:
                return function(*args, **kwargs)
            finally:
                taken[stage] += time.process_time() - begun

        return run

    for stage, functions in STAGES.items():
        for name, function in functions:
            module = importlib.import_module(name)
            setattr(module, function, timed(getattr(module, function), stage))
    from megatron_cp.cli import main

    begun = time.process_time()
    with tempfile.TemporaryDirectory() as folder:
        overrides = [f"model.{each}" for each in ONE_RANK]
        arguments = [*ONE_STEP, f"checkpoint.save={folder}", *overrides]
        if main(["train", *arguments]) != 0:
            raise SystemExit("the run failed")
    rest = time.process_time() - begun - sum(taken.values())
    show("one rank, after its imports", taken | {"the rest, with a checkpoint": rest})


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=3, help="how often each part is measured")
    parser.add_argument("--ranks", type=int, default=4, help="ranks of the whole run")
    parser.add_argument("--stages", action="store_true", help="only the stages of one rank, in this process")
    args = parser.parse_args()
    if args.stages:
        rank_stages()
        return
    python = (sys.executable, "-c")
    for process, parts in IMPORTS.items():
        nested = least(args.rounds, {name: (*python, code) for name, code in parts.items()})
        show(f"{process}, imports", differences(nested))
    subprocess.run([sys.executable, __file__, "--stages"], cwd=ROOT, check=True, stderr=subprocess.DEVNULL)
    cli = (sys.executable, "-m", "megatron_cp")
    print("\ncommands without torch")
    for name, seconds in least(args.rounds, {each: (*cli, *each.split()) for each in COMMANDS}).items():
        print(f"  {seconds:6.2f} s  {name}")
    with tempfile.TemporaryDirectory() as folder:
        run = (*cli, "train", "-n", str(args.ranks), *ONE_STEP, f"checkpoint.save={folder}")
        print(f"\nlauncher and {args.ranks} ranks: {cpu_seconds(*run):.2f} s of CPU time")


if __name__ == "__main__":
    main()
