"""Measure a device's rates in training, and print them as a device file.

The format is that of the files in ``megatron_cp/estimate/devices``.

    python benchmarks/device_rates.py                                                # a GPU: the 8B model's widths
    python benchmarks/device_rates.py --model tiny --sizes 64,256,1024 --chunk 1024  # what a CPU can do, to try it

Steps of one rank over samples of each size are timed with few and with many microbatches of one sample each, taking
turns; the difference, which has no optimizer in it, is what the microbatches cost. The cost model that the time model
derives from the device's preset is fitted to these times (``Calibrator``). Printed are the preset's rates times what
its terms changed by: FLOP/s of attention; matrix products and memory bandwidth; launches. What needs several devices,
bytes a second and the latency of an exchange, stays as it was. ``--gpu FILE`` of ``megatron-cp plan`` reads the output.
"""

from __future__ import annotations

import argparse
import statistics
import sys
from functools import partial
from pathlib import Path
from typing import Any

import torch
import yaml

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from benchmarks.gpu_pretrain import MODELS, RECOMPUTE, config_of, running, seconds_of
from megatron_cp.config.flags import add_overrides
from megatron_cp.dynamic_cp.calibration import Calibrator, Fit
from megatron_cp.dynamic_cp.cost import CostModel
from megatron_cp.estimate.device import Device
from megatron_cp.parallel.device import stop_distributed
from megatron_cp.planner.scheduling import model_cost
from megatron_cp.rules.environment import Environment
from megatron_cp.rules.job import device_of
from megatron_cp.rules.remedies import Case
from megatron_cp.training.monitor.metrics import start_logging
from megatron_cp.training.step import train_step

FEW = 1
BOUND = 100.0  # times and parts of what the presets say that a rate may be, beside the whole's speed


def seconds_a_microbatch(size: int, options: argparse.Namespace) -> tuple[list[float], CostModel]:
    """Return a sample's seconds in each round, and the costs by the preset.

    The sample has ``size`` tokens.
    """
    many = argparse.Namespace(**vars(options) | {"tokens": size * options.microbatches})
    config = config_of(options.model, size, options.attention, options.recompute, many)
    found = []
    with running(config) as (run, steps, _):
        for _ in range(options.warm_up + options.steps):
            batch = next(steps).microbatches
            few, all_of_them = (seconds_of(partial(train_step, run, part)) for part in (batch[:FEW], batch))
            found.append((all_of_them - few) / (len(batch) - FEW))
    return found[options.warm_up :], model_cost(Case(run.config, 1, None, Environment.detect()))


def rates(before: Device, prior: CostModel, fit: Fit) -> dict[str, Any]:
    """Return the device file that equals the fitted cost model.

    ``prior`` was derived from ``before``.
    """

    def factor(term: str) -> float:
        return getattr(fit.cost, term) / getattr(prior, term) if getattr(prior, term) else 1.0

    efficiency = {name: value / factor("linear") for name, value in before.matmul_efficiency.items()}
    return {
        "base": before.name,
        "attention_flops": [rate / factor("quadratic") for rate in before.attention_flops],
        "matmul_efficiency": efficiency,
        "memory_bandwidth": before.memory_bandwidth / factor("linear"),
        "launch_seconds": before.launch_seconds * factor("per_microbatch"),
        "kernel_seconds": before.kernel_seconds * factor("per_microbatch"),
        "call_seconds": before.call_seconds * factor("per_sample"),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    add_overrides(parser, "settings of every case")
    parser.add_argument("--model", choices=MODELS, default="8b")
    parser.add_argument("--sizes", type=lambda text: [int(size) for size in text.split(",")])
    parser.add_argument("--attention", choices=["auto", "te", "native"], default="auto")
    parser.add_argument("--recompute", choices=RECOMPUTE, default="none")
    parser.add_argument("--microbatches", type=int, default=4, help="of a step that has many")
    parser.add_argument("--chunk", type=int, default=8192, help="model.cross_entropy_chunk_size")
    parser.add_argument("--steps", type=int, default=5, help="measured pairs of steps of each size")
    parser.add_argument("--warm-up", type=int, default=2, help="pairs of steps before them")
    options = parser.parse_args()
    start_logging(1, False)  # only warnings
    before = device_of(Environment.detect())
    calibrator, prior = None, None
    print("| tokens | seconds a microbatch |\n|---|---|")
    for size in options.sizes or [512, 1024, 2048, 4096, 8192, 16384, 32768]:
        seconds, prior = seconds_a_microbatch(size, options)
        calibrator = calibrator or Calibrator(prior, bound=BOUND)
        for each in seconds:
            calibrator.observe([([size], 1)], each)
        print(f"| {size} | {statistics.median(seconds):.4g} [{min(seconds):.4g} {max(seconds):.4g}] |", flush=True)
    assert calibrator is not None and prior is not None
    fit = calibrator.fit()
    where = torch.cuda.get_device_name() if torch.cuda.is_available() else "CPU"
    print(f"\n# {where}, torch {torch.__version__}: {100 * fit.residual:.1f} % off in the median")
    if fit.at_bound:
        print(f"# no good fit: these wanted to be further from the presets than they may: {', '.join(fit.at_bound)}")
    found = rates(before, prior, fit)
    if max(found["matmul_efficiency"].values()) > 1:
        print("# efficiencies above 1: these sizes cannot tell products from the rest; more sizes may")
    print(yaml.safe_dump(found, sort_keys=False))
    stop_distributed()


if __name__ == "__main__":
    main()
