"""Fit the devices' constants to published measurements, and check them.

The check is on sources left out of the fit.

    python scripts/fit_devices.py            # print the changes and the errors
    python scripts/fit_devices.py --write    # write to megatron_cp/estimate/devices and measurements/programs.yaml
    python scripts/fit_devices.py --validate # leave out each source in turn: minutes

A prior holds each constant near its present value. The constants are the efficiency of matrix products by format for
each generation of GPUs, a clock for each GPU, attention, memory, host, and the speeds of each source's program. A
source counts as ten rows at most, and outliers count linearly (Huber).
"""

from __future__ import annotations

import argparse
import csv
import re
import sys
from collections import Counter, defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from benchmarks import published
from benchmarks.planner_accuracy import seconds_of
from benchmarks.published import Refused, Stack, adapted, device_of, job_of, program_of, stack_of
from megatron_cp.common.terminal import say
from megatron_cp.estimate.device import PRESETS, Device, device_names, load_device
from megatron_cp.estimate.job import Job
from megatron_cp.estimate.time import time_estimate

ROWS = published.PROGRAMS.parent / "published.csv"
MOST = 10  # maximum weight of a source, in rows
NOISE = {"dense": 0.03, "experts": 0.1}
GENERATIONS = {"ampere": ["a100"], "hopper": ["h100", "h200", "h800"], "blackwell": ["b200", "gb200", "b300", "gb300"]}
HOSTS = {"x86": ["a100", "h100", "h200", "h800", "b200", "b300"], "grace": ["gb200", "gb300"]}
SPEEDS = {
    "bridge": ("host", "host_serial", "ep_overlap"),
    "nemo": ("clock",),
    "nemo_2024": ("clock", "attention"),
    "torchtitan": ("clock", "attention", "memory"),
    "megatron_2022": ("clock", "memory"),
    "megatron_deepspeed": ("clock", "memory", "host", "host_serial"),
    "xtuner": ("clock", "attention"),
    "megatron_table": ("clock",),
}


@dataclass(frozen=True)
class Measured:
    job: Job
    device: str
    program: str
    seconds: float
    source: str
    sigma: float
    launches: float  # launches of the job per launch of the device's file


@dataclass(frozen=True)
class Constant:
    """Factor on a constant, with the width of its prior in the logarithm."""

    name: str
    devices: tuple[str, ...]  # affected devices; () with a program
    program: str | None
    width: float


def constants() -> list[Constant]:
    found = []
    for generation, names in GENERATIONS.items():
        formats = load_device(names[0]).matmul_efficiency
        found += [Constant(f"matmul {each}", tuple(names), None, 0.2) for each in formats if each != "fp32"]
        found += [Constant(kind, tuple(names), None, 0.2) for kind in ("attention", "memory")]
        found += [Constant("clock", (name,), None, 0.05) for name in names[1:] if generation == "blackwell"]
    found += [Constant("launch", tuple(names), None, 0.5) for names in HOSTS.values()]
    return found + [Constant(speed, (), program, 0.3) for program, speeds in SPEEDS.items() for speed in speeds]


def changed(device: Device, found: Mapping[Constant, float]) -> Device:
    for each, factor in found.items():
        if device.name not in each.devices:
            continue
        if each.name in ("clock", *(f"matmul {key}" for key in device.matmul_efficiency)):
            keys = set(device.matmul_efficiency) - {"fp32"} if each.name == "clock" else {each.name.split()[1]}
            efficiency = {k: v * factor if k in keys else v for k, v in device.matmul_efficiency.items()}
            device = replace(device, matmul_efficiency=efficiency)
        elif each.name == "attention":
            forward, backward = device.attention_flops
            device = replace(device, attention_flops=(forward * factor, backward * factor))
        else:
            field = {"memory": "memory_bandwidth", "launch": "launch_seconds"}[each.name]
            device = replace(device, **{field: getattr(device, field) * factor})
    return device


def changed_stack(name: str, found: Mapping[Constant, float]) -> Stack:
    stack = published.STACKS[name]
    for each, factor in found.items():
        if each.program == name:
            value = getattr(stack, each.name) * factor
            stack = replace(stack, **{each.name: min(value, 0.95) if "overlap" in each.name else value})
    return stack


def measured_rows() -> list[Measured]:
    with ROWS.open(newline="") as file:
        rows = list(csv.DictReader(file))
    found, seen, counts = [], set(), Counter(row["source"] for row in rows)
    for index, row in enumerate(rows):
        what = tuple(value for key, value in row.items() if key not in ("metric", "value"))
        try:
            job, ran = job_of(row)
            seconds = seconds_of(row, job)
        except Refused:
            continue
        if not seconds or (what in seen and counts[row["source"]] < 200):
            continue
        if counts[row["source"]] > 200 and index % 8:
            continue
        seen.add(what)
        text = row["gpu_type"].lower()
        device = next(each for each in sorted(device_names(), key=len, reverse=True) if each in text)
        sigma = NOISE["experts" if job.model.num_moe_experts else "dense"]
        launches = ran.launch_seconds / device_of(row, stack_of(row)).launch_seconds
        found.append(Measured(job, device, program_of(row), seconds, row["source"], sigma, launches))
    return found


def errors(rows: Sequence[Measured], found: Mapping[Constant, float]) -> np.ndarray:
    """Return the logarithms of predicted over measured seconds."""
    devices = {name: changed(load_device(name), found) for name in {row.device for row in rows}}
    stacks = {name: changed_stack(name, found) for name in {row.program for row in rows}}
    pairs = {(r.device, r.program): adapted(devices[r.device], stacks[r.program]) for r in rows}
    found_seconds = []
    for row in rows:
        device = pairs[row.device, row.program]
        device = replace(device, launch_seconds=device.launch_seconds * row.launches)
        found_seconds.append(time_estimate(row.job, device).seconds / row.seconds)
    return np.log(np.array(found_seconds))


def fit(rows: Sequence[Measured], rounds: int = 6) -> dict[Constant, float]:
    chosen = [
        each for each in constants() if any(row.program == each.program or row.device in each.devices for row in rows)
    ]
    counts = Counter(row.source for row in rows)
    weight = np.array([min(1.0, MOST / counts[row.source]) / row.sigma**2 for row in rows])
    sigma = np.array([row.sigma for row in rows])
    prior = np.array([1 / each.width**2 for each in chosen])
    logs, step = np.zeros(len(chosen)), 1e-2
    for _ in range(rounds):
        factors = dict(zip(chosen, np.exp(logs).tolist(), strict=True))
        now, slopes = errors(rows, factors), np.zeros((len(rows), len(chosen)))
        for column, each in enumerate(chosen):
            places = [i for i, row in enumerate(rows) if row.program == each.program or row.device in each.devices]
            moved = {**factors, each: factors[each] * float(np.exp(step))}
            slopes[places, column] = (errors([rows[i] for i in places], moved) - now[places]) / step
        robust = weight / np.maximum(1, np.abs(now) / (2 * sigma))
        normal = slopes.T @ (robust[:, None] * slopes) + np.diag(prior)
        logs = logs + np.clip(np.linalg.solve(normal, -(slopes.T @ (robust * now) + prior * logs)), -0.3, 0.3)
    return dict(zip(chosen, np.exp(logs).tolist(), strict=True))


def report(rows: Sequence[Measured], ratios: np.ndarray) -> list[str]:
    groups: dict[tuple[str, str], list[float]] = defaultdict(list)
    for row, ratio in zip(rows, ratios.tolist(), strict=True):
        kind = "experts" if row.job.model.num_moe_experts else "dense"
        groups[row.source, f"{kind}, {row.device}"].append(abs(float(np.expm1(-ratio))))
    lines = ["| source | kind | rows | mean | p90 | worst |", "|---|---|---|---|---|---|"]
    for (source, kind), values in groups.items():
        figures = " | ".join(f"{100 * x:.1f} %" for x in (np.mean(values), np.quantile(values, 0.9), max(values)))
        lines.append(f"| {source} | {kind} | {len(values)} | {figures} |")
    return lines


def write(found: Mapping[Constant, float]) -> None:
    for name in device_names():
        device, path = changed(load_device(name), found), PRESETS / f"{name}.yaml"
        text = path.read_text()
        pairs = ", ".join(f"{key}: {value:.3g}" for key, value in device.matmul_efficiency.items())
        lines = {
            "matmul_efficiency": f"{{{pairs}}}",
            "attention_flops": "[{:.4g}, {:.4g}]".format(*device.attention_flops),
            "memory_bandwidth": f"{device.memory_bandwidth:.3g}",
            "launch_seconds": f"{device.launch_seconds:.2g}",
        }
        for key, value in lines.items():
            text = re.sub(rf"^{key}: .*$", f"{key}: {value}", text, flags=re.MULTILINE)
        path.write_text(text)
    text = published.PROGRAMS.read_text()
    for name, speeds in SPEEDS.items():
        stack = changed_stack(name, found)
        for speed in speeds:
            value = f"{speed}: {getattr(stack, speed):.3g}"
            line = next(line for line in text.splitlines() if line.startswith(f"{name}:"))
            new = re.sub(rf"{speed}: [\d.e-]+", value, line) if f"{speed}:" in line else line[:-1] + f", {value}}}"
            text = text.replace(line, new)
    published.PROGRAMS.write_text(text)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--write", action="store_true", help="write the fitted constants to the files")
    parser.add_argument("--validate", action="store_true", help="leave out each source in turn")
    options = parser.parse_args()
    rows = measured_rows()
    if options.validate:
        ratios = np.zeros(len(rows))
        for source in dict.fromkeys(row.source for row in rows):
            out = [i for i, row in enumerate(rows) if row.source == source]
            found = fit([row for row in rows if row.source != source], rounds=4)
            ratios[out] = errors([rows[i] for i in out], found)
        for line in report(rows, ratios):
            say(line)
        return 0
    found = fit(rows)
    for each, factor in found.items():
        say(f"{each.program or '/'.join(each.devices)} {each.name}: times {factor:.3f}")
    for line in report(rows, errors(rows, found)):
        say(line)
    if options.write:
        write(found)
    return 0


if __name__ == "__main__":
    sys.exit(main())
