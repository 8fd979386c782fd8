"""Compare training steps with dynamic and static context parallelism.

Both train on the same samples, in one run, and whole steps are timed.

    python benchmarks/dynamic_cp_end_to_end.py                       # four gloo ranks on this machine
    python benchmarks/dynamic_cp_end_to_end.py --ranks 2 --distributions wikipedia --rounds 5
    torchrun --nproc_per_node=8 benchmarks/dynamic_cp_end_to_end.py  # GPUs

Methods alternate, one step each:

- ``dynamic``: one group size per microbatch.
- ``packed``: static context parallelism over all ranks, samples packed by ``dp_balanced``.
- ``padded``: static context parallelism, every sample padded to the longest allowed length.
- with ``--in-pieces`` also the first two with ``model.packed_placement=balanced``.

The token limit per rank is the same for all, and the longest sample needs all ranks. Printed are medians over rounds
and, in brackets, the smallest and the largest. ``wall`` is from barrier to barrier, ``cpu`` is the CPU time of the
busiest rank. With more ranks than cores, idle ranks leave their core to busy ones. Wall time then shows less imbalance
than a machine with enough cores would show.

``predicted`` is the simulator's ratio: both schedules under the cost model fitted to the warm-up steps, plus the time
that those steps spent outside of microbatches (gradient reduction, optimizer).

Lengths are drawn from the named distribution, divided by ``--shrink`` and limited to ``--longest``. With ``uniform``
every sample has an eighth of ``--longest``, with ``full`` all of it: dynamic CP gains nothing there. Both have fewer
samples a step.
"""

from __future__ import annotations

import argparse
import os
import statistics
import sys
import time
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np
import torch
import torch.distributed as dist
from torch.utils.data import Dataset

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from benchmarks.gloo_ranks import run_on_ranks
from megatron_cp.attention.transports.registry import RING, TRANSPORTS
from megatron_cp.config.run_config import RunConfig
from megatron_cp.data.samples.varlen import MockVarlenDataset
from megatron_cp.dynamic_cp.analysis.simulate import simulate
from megatron_cp.dynamic_cp.calibration import Calibrator, Fit
from megatron_cp.dynamic_cp.distributions import sample_lengths
from megatron_cp.dynamic_cp.runtime.iterator import StepPlan
from megatron_cp.parallel.device import start_distributed, stop_distributed
from megatron_cp.planner.scheduling import model_cost
from megatron_cp.rules.environment import Environment
from megatron_cp.rules.remedies import Case
from megatron_cp.training.batches import Steps
from megatron_cp.training.monitor.metrics import start_logging
from megatron_cp.training.open_steps import open_steps
from megatron_cp.training.setup import Run, setup
from megatron_cp.training.step import train_step

VOCAB = 256
IN_PIECES = ("dynamic in pieces", "packed in pieces")


def configuration(way: str, options: argparse.Namespace) -> RunConfig:
    config = RunConfig()
    model = config.model
    model.num_layers, model.hidden_size, model.ffn_hidden_size = options.layers, options.hidden, 3 * options.hidden
    model.num_attention_heads, model.num_query_groups = options.hidden // 32, options.hidden // 64
    model.context_parallel_size = options.ranks
    model.cp_comm_type = options.transport
    config.dataset.seq_length = options.longest
    config.train.global_batch_size, config.train.train_iters = options.batch, 10_000
    config.dist.use_decentralized_pg = True  # several runs in one process: none may own the global state
    config.tokenizer.tokenizer_type, config.tokenizer.vocab_size = "NullTokenizer", VOCAB
    if way != "padded":
        model.max_seqlen_per_dp_cp_rank = options.longest // options.ranks
        model.dynamic_context_parallel = way.startswith("dynamic")
        model.sequence_packing_scheduler = "default_dynamic_cp" if model.dynamic_context_parallel else "dp_balanced"
        model.packed_placement = "balanced" if way in IN_PIECES else "zigzag"
        # One more than the warm-up steps, so the calibrator still holds its observations when they end.
        model.dynamic_context_parallel_calibration_iters = options.calibrate + 1
    return config.finalize()


class Padded(Dataset):
    """Dataset that pads each sample to one length."""

    def __init__(self, samples: MockVarlenDataset, length: int) -> None:
        self._samples, self._length = samples, length

    def __len__(self) -> int:
        return len(self._samples)

    def __getitem__(self, index: int) -> dict[str, torch.Tensor]:
        sample = self._samples[index]
        missing = self._length - len(sample["tokens"])
        padded = {key: torch.nn.functional.pad(value, (0, missing)) for key, value in sample.items()}
        return padded | {"position_ids": torch.arange(self._length)}


@dataclass
class Way:
    run: Run
    steps: Steps
    walls: list[float] = field(default_factory=list)
    cpus: list[float] = field(default_factory=list)
    losses: list[float] = field(default_factory=list)
    outside: list[float] = field(default_factory=list)  # warm-up steps: seconds outside of microbatches
    plans: list[StepPlan] = field(default_factory=list)

    @classmethod
    def start(cls, way: str, lengths: np.ndarray, options: argparse.Namespace) -> Way:
        run = setup(configuration(way, options), VOCAB)
        samples = MockVarlenDataset(lengths, VOCAB, seed=1)
        dataset = Padded(samples, options.longest) if way == "padded" else samples
        return cls(run, open_steps(run, dataset, 0, training=True))

    def step(self, measured: bool) -> None:
        dist.barrier()
        wall, cpu = time.perf_counter(), time.process_time()
        step = next(self.steps)
        result = train_step(self.run, step.microbatches)
        cpu = time.process_time() - cpu
        dist.barrier()
        wall = time.perf_counter() - wall
        self.run.progress.iteration += 1
        self.steps.observe()
        clock = self.run.work_clock
        slowest = torch.tensor([cpu, clock.seconds if clock else 0.0], dtype=torch.float64, device=self.run.device)
        dist.all_reduce(slowest, dist.ReduceOp.MAX)
        busiest, microbatches = slowest.tolist()
        self.losses.append(result.loss)
        if not measured:
            self.outside.append(wall - microbatches)
        else:
            self.walls.append(wall)
            self.cpus.append(busiest)
            if step.plan is not None:
                self.plans.append(step.plan)


def spread(values: list[float]) -> str:
    return f"{statistics.median(values):.2f} [{min(values):.2f} {max(values):.2f}]"


def calibrated(*ways: Way) -> Fit:
    """Fit the cost model to the measurements of several methods.

    Together they ran samples of all lengths on groups of all sizes.
    """
    states = [way.steps.state_dict()["calibration"] for way in ways]
    run = ways[0].run
    calibrator = Calibrator(model_cost(Case(run.config, run.layout.world_size, None, Environment.detect())))
    for work, seconds in (one for state in states for one in state["observed"]):
        calibrator.observe(work, seconds)
    return calibrator.fit()


def compare(distribution: str, options: argparse.Namespace) -> None:
    """Train on one distribution with all methods and print the ratios."""
    equal = {"uniform": options.longest // 8, "full": options.longest}.get(distribution)
    if equal:
        batch = max(options.ranks, 64 * options.batch // equal)
        options = argparse.Namespace(**vars(options) | {"batch": batch, "padded": False})
    count = options.batch * (options.calibrate + options.rounds)
    if equal:
        lengths = np.full(count, equal)
    else:
        drawn = sample_lengths(distribution, count, options.longest * options.shrink, seed=options.seed)
        lengths = np.maximum(2, drawn // options.shrink)
    names = ["dynamic", "packed", *IN_PIECES * options.in_pieces, *["padded"] * options.padded]
    ways = {name: Way.start(name, lengths, options) for name in names}
    for index in range(options.calibrate + options.rounds):
        for name, way in ways.items():
            if name != "padded" or index < options.padded_rounds:
                way.step(measured=name == "padded" or index >= options.calibrate)
        if index + 1 == options.calibrate:
            fit = calibrated(ways["dynamic"], ways["packed"])
    dynamic, packed = ways["dynamic"], ways["packed"]
    seconds = {
        name: sum(simulate(p.schedule, p.lengths, fit.cost).seconds + statistics.median(way.outside) for p in way.plans)
        for name, way in (("dynamic", dynamic), ("packed", packed))
    }
    worst = max(
        abs(a - b) / abs(b)
        for name, way in ways.items()
        if name != "padded"
        for a, b in zip(way.losses, dynamic.losses, strict=True)
    )
    if dist.get_rank() == 0:
        tokens = sum(sum(plan.lengths) for plan in dynamic.plans) / sum(dynamic.walls)
        measured = lengths[options.batch * options.calibrate :]
        print(
            f"\n## {distribution}: {options.batch} samples a step, mean {measured.mean():.0f}, longest {measured.max()}"
            f"; dynamic: {tokens:.0f} tokens/s"
        )
        for name, way in ways.items():
            if name == "dynamic":
                continue
            pairs = range(len(way.walls)) if name != "padded" else None
            wall = _ratios(way.walls, dynamic.walls, pairs)
            cpu = _ratios(way.cpus, dynamic.cpus, pairs)
            print(f"  {name:17} / dynamic   wall {spread(wall)}   cpu {spread(cpu)}")
        gain = sum(packed.walls) / sum(dynamic.walls)
        gain_cpu = sum(packed.cpus) / sum(dynamic.cpus)
        predicted = seconds["packed"] / seconds["dynamic"]
        print(
            f"  packed, all steps             wall {gain:.2f}   cpu {gain_cpu:.2f}   predicted {predicted:.2f}"
            f" (error of the cost model: {fit.residual:.0%} of a rank's step)"
        )
        print(f"  losses of packs differ from those of dynamic by at most {worst:.1e}", flush=True)
    for way in ways.values():
        way.steps.close()
        way.run.close()


def _ratios(theirs: list[float], ours: list[float], pairs: range | None) -> list[float]:
    """Return ratios of each round on the same samples.

    Ratios are to the median where ``theirs`` ran other rounds.
    """
    if pairs is not None:
        return [theirs[index] / ours[index] for index in pairs]
    return [seconds / statistics.median(ours) for seconds in theirs]


def compare_all(options: argparse.Namespace) -> None:
    torch.set_num_threads(1)
    start_logging(1, False)  # only warnings, so the results stay readable
    for distribution in options.distributions:
        compare(distribution, options)


def compare_on_this_machine(options: argparse.Namespace) -> None:
    """Compare on a rank that no launcher started: set the launcher's variables first."""
    rank, size = str(dist.get_rank()), str(options.ranks)
    os.environ |= {"RANK": rank, "LOCAL_RANK": rank, "WORLD_SIZE": size, "LOCAL_WORLD_SIZE": size}
    compare_all(options)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--ranks", type=int, default=4, help="number of gloo ranks to start; ignored under torchrun")
    parser.add_argument(
        "--distributions", type=lambda text: text.split(","), default=["wikipedia", "documents", "uniform", "full"]
    )
    parser.add_argument("--longest", type=int, default=2048, help="maximum tokens of a sample")
    parser.add_argument("--shrink", type=int, default=16, help="divisor of the drawn lengths")
    parser.add_argument("--batch", type=int, default=48, help="samples per step")
    parser.add_argument("--calibrate", type=int, default=8, help="warm-up steps, to which the cost model is fitted")
    parser.add_argument("--rounds", type=int, default=8, help="measured steps of each method")
    parser.add_argument("--padded", action=argparse.BooleanOptionalAction, default=True)
    parser.add_argument("--in-pieces", action="store_true", help="also packs in pieces")
    parser.add_argument("--padded-rounds", type=int, default=1, help="measured steps of the slow padded method")
    parser.add_argument("--layers", type=int, default=2)
    parser.add_argument("--hidden", type=int, default=256)
    parser.add_argument("--transport", default=RING.name, choices=TRANSPORTS)
    parser.add_argument("--seed", type=int, default=0)
    options = parser.parse_args()
    if "RANK" in os.environ:
        options.ranks = int(os.environ["WORLD_SIZE"])
        start_distributed(configuration("dynamic", options).dist)
        compare_all(options)
        stop_distributed()
    else:
        run_on_ranks(options.ranks, compare_on_this_machine, options)


if __name__ == "__main__":
    main()
