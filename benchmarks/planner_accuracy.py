"""Compare published memory and step times with the estimates.

The estimates come from the models of ``megatron_cp/estimate``.

    python benchmarks/planner_accuracy.py --rows benchmarks/measurements/published.csv
    python benchmarks/planner_accuracy.py --rows FILE.csv --calibrate 3 --regret

Prints by source and metric: number of rows, number of predicted rows, reasons for rows that are not predicted, mean,
90th percentile and worst error. ``--calibrate K`` first fits the devices of each source to K of its step times, and
predicts the other rows. ``--regret`` compares layouts of one job: how much slower the layout predicted to be fastest is
than the fastest measured one.
"""

from __future__ import annotations

import argparse
import csv
import sys
from collections import Counter, defaultdict
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from benchmarks import published_memory
from benchmarks.published import Refused, Row, device_of, flops_of_source, gemm_of, job_of, stack_of, transport_of
from megatron_cp.common.terminal import say
from megatron_cp.config.model_config import ModelConfig
from megatron_cp.estimate.device import Device
from megatron_cp.estimate.fit import fit_device, scaled
from megatron_cp.estimate.job import Job
from megatron_cp.estimate.links import Links
from megatron_cp.estimate.rank import Rank
from megatron_cp.estimate.time import time_estimate
from megatron_cp.estimate.work import attention_core
from megatron_cp.parallel.layout import RankLayout

Change = Callable[[Device], Device]
_SPEEDS = ("tokens_per_s_per_gpu", "model_tflops_per_gpu")


@dataclass(frozen=True)
class Outcome:
    """Row with its prediction, or the reason why it is not predicted."""

    row: Row
    predicted: float | None
    reason: str = ""

    @property
    def measured(self) -> float:
        return float(self.row["value"])

    @property
    def error(self) -> float:
        """Predicted over measured, minus 1."""
        assert self.predicted is not None
        return self.predicted / self.measured - 1


def seconds_of(row: Row, job: Job) -> float | None:
    """Return the measured seconds of a step, or None if the row does not state them."""
    try:
        value, metric = float(row["value"]), row["metric"]
    except (ValueError, KeyError):
        return None
    gpus = job.layout.world_size
    if metric == "iteration_time_s":
        return value
    if metric == "iteration_time_ms":
        return value / 1000
    if metric == "tokens_per_s_per_gpu" and value > 0:
        return job.microbatches * job.micro_batch_size * job.layout.dp * (job.model.seq_length or 0) / value / gpus
    if metric == "model_tflops_per_gpu" and value > 0:
        return flops_of_source(row, job) / value / 1e12 / gpus
    return None


def predict(row: Row, change: Change = lambda device: device) -> float:
    """Predict a row's metric. Raises Refused."""
    metric = row.get("metric") or ""
    if metric == "attention_tflops_per_gpu":
        return attention_rate(row, change)
    if "memory" in metric or "model_state" in metric or "activation" in metric:
        return published_memory.predicted(row)
    job, device = job_of(row)
    device = change(device)
    if metric == "speedup_over_tp8_full_recompute":
        return speedup(row, job, device)
    seconds, gpus = time_estimate(job, device).seconds, job.layout.world_size
    if metric == "iteration_time_s":
        return seconds
    if metric == "iteration_time_ms":
        return seconds * 1000
    tokens = job.microbatches * job.micro_batch_size * job.layout.dp * (job.model.seq_length or 0)
    if metric == "tokens_per_s_per_gpu":
        return tokens / seconds / gpus
    rate = flops_of_source(row, job) / seconds / gpus
    if metric == "model_tflops_per_gpu":
        return rate / 1e12
    if metric == "mfu_percent":
        return 100 * rate / device.matmul_flops["bf16"]
    raise Refused(
        f"{metric or 'an unnamed metric'} is not predicted" if "best" not in metric else "layout not published"
    )


def speedup(row: Row, job: Job, device: Device) -> float:
    """Return the speedup of a step on as many GPUs.

    Without pipeline, as its size is not published.
    """

    def per_gpu(tp: int, cp: int, recompute: bool) -> float:
        model = replace(
            job.model,
            tensor_model_parallel_size=tp,
            context_parallel_size=cp,
            recompute_granularity="full" if recompute else None,
            recompute_method="uniform" if recompute else None,
            recompute_num_layers=1 if recompute else None,
        )
        one = replace(job, model=model, layout=RankLayout(tp * cp, tp=tp, cp=cp), global_batch_size=16)
        return tp * cp * time_estimate(one, device).seconds

    mine = per_gpu(job.layout.tp, job.layout.cp, job.model.recompute_granularity == "full")
    return per_gpu(8, 1, True) / mine


def attention_rate(row: Row, change: Change) -> float:
    note = (row.get("note") or "").lower()
    if "varlen" in note:
        raise Refused("lengths of the pack not published")
    heads, kv, cp, length = (int(row[name]) for name in ("heads", "kv_heads", "cp", "seq_len"))
    shape = {"num_attention_heads": heads}
    transport, levels = transport_of(row, cp, shape, 1)
    device = change(device_of(row, stack_of(row)))
    model = ModelConfig(
        hidden_size=heads * 128, num_attention_heads=heads, num_query_groups=kv, kv_channels=128, cp_comm_type=transport
    )
    pairs = length * length / 2
    rank = Rank(
        device=device,
        links=Links(device, device.gpus_per_node),
        gemm=gemm_of(row, device),
        tokens=length / cp,
        pairs=pairs,
        square=2 * pairs,
        longest=length,
        tp=1,
        cp=cp,
        ep=1,
        etp=1,
        levels=tuple(levels) if levels else None,
        split=1,
    )
    backward = "bwd" in note
    work = attention_core(model, rank, heads, kv, backward)
    return 4 * 128 * heads * pairs * (2.5 if backward else 1) / cp / work.seconds / 1e12


def outcomes(rows: Sequence[Row], calibrate: int) -> list[Outcome]:
    changes = calibrated(rows, calibrate) if calibrate else {}
    found = []
    for row in rows:
        change, used = changes.get(row["source"], (lambda device: device, frozenset()))
        if id(row) in used:
            found.append(Outcome(row, None, "calibrated with"))
            continue
        try:
            if not float(row.get("value") or "nan") > 0:
                raise Refused("no value above 0")
            found.append(Outcome(row, predict(row, change)))
        except Refused as error:
            found.append(Outcome(row, None, str(error)))
        except (ValueError, ArithmeticError, KeyError, TypeError, IndexError) as error:  # a row with unexpected content
            found.append(Outcome(row, None, f"not understood: {error}"))
    return found


def calibrated(rows: Sequence[Row], count: int) -> dict[str, tuple[Change, frozenset[int]]]:
    """Fit the devices of each source to ``count`` rows spread over its times.

    Returns by source how to change a device, and the ids of the rows used.
    """
    by_source: dict[str, list[tuple[float, Row, Job, Device]]] = defaultdict(list)
    for row in rows:
        try:
            job, device = job_of(row)
            seconds = seconds_of(row, job)
        except (Refused, ValueError, ArithmeticError, KeyError, TypeError):
            continue
        if seconds:
            by_source[row["source"]].append((seconds, row, job, device))
    found = {}
    for source, every in by_source.items():
        common = Counter(each[3].name for each in every).most_common(1)[0][0]
        measured = [each for each in every if each[3].name == common]  # the other devices are scaled as this one
        if len(measured) <= 2 * count:
            continue
        measured.sort(key=lambda each: each[0] * each[2].layout.world_size)
        places = [round((index + 0.5) / count * (len(measured) - 1)) for index in range(count)]
        chosen = [measured[place] for place in places]
        jobs = [each[2] for each in chosen]
        predict = lambda device, jobs=jobs: [time_estimate(job, device).seconds for job in jobs]  # noqa: E731
        speeds = fit_device(chosen[0][3], predict, [each[0] for each in chosen]).speeds
        change = lambda device, speeds=speeds: scaled(device, speeds)  # noqa: E731 - others change as this one does
        found[source] = (change, frozenset(id(each[1]) for each in chosen))
    return found


def table(found: Sequence[Outcome]) -> list[str]:
    groups: dict[tuple[str, str], list[Outcome]] = defaultdict(list)
    for each in found:
        groups[each.row.get("source") or "", each.row.get("metric") or ""].append(each)
    lines = ["| source | metric | rows | predicted | mean | p90 | worst |", "|---|---|---|---|---|---|---|"]
    for (source, metric), members in groups.items():
        errors = [abs(each.error) for each in members if each.predicted is not None]
        figures = _shares(errors) if errors else " | | "
        lines.append(f"| {source} | {metric} | {len(members)} | {len(errors)} | {figures} |")
        reasons = Counter(each.reason for each in members if each.predicted is None)
        lines += [f"|   refused: {reason} | | {count} | | | | |" for reason, count in reasons.most_common()]
    return lines


def by_gpu(found: Sequence[Outcome], part: str) -> list[str]:
    """Return the errors of step times and speeds by GPU.

    part: in the names of the sources.
    """
    groups: dict[tuple[str, str], list[float]] = defaultdict(list)
    for each in found:
        whole_steps = each.row["metric"] in ("iteration_time_s", "iteration_time_ms", *_SPEEDS)
        if part in each.row["source"] and each.predicted is not None and whole_steps:
            experts = job_of(each.row)[0].model.num_moe_experts
            groups["experts" if experts else "dense", each.row["gpu_type"]].append(abs(each.error))
    lines = ["", "| models | GPU | figures | mean | p90 | worst |", "|---|---|---|---|---|---|"]
    return lines + [
        f"| {' | '.join(key)} | {len(errors)} | {_shares(errors)} |" for key, errors in sorted(groups.items())
    ]


def _shares(errors: Sequence[float]) -> str:
    figures = (np.mean(errors), np.quantile(errors, 0.9), np.max(errors))
    return " | ".join(f"{100 * value:.1f} %" for value in figures)


def regrets(found: Sequence[Outcome]) -> list[str]:
    """Compare the predicted fastest layout of each job with the measured one."""
    same = ("source", "metric", "model", "hidden", "layers", "seq_len", "gpus", "gpu_type", "gbs", "precision")
    groups: dict[tuple[str, ...], list[Outcome]] = defaultdict(list)
    for each in found:
        metric = each.row.get("metric") or ""
        if each.predicted is not None and ("time" in metric or "per_gpu" in metric) and "attention" not in metric:
            groups[tuple(each.row.get(column) or "" for column in same)].append(each)
    by_source: dict[str, list[float]] = defaultdict(list)
    for key, members in groups.items():
        if len({tuple(each.row.get(c) or "" for c in ("tp", "cp", "pp", "vpp", "ep", "mbs")) for each in members}) < 2:
            continue
        sign = 1 if "time" in key[1] else -1
        chosen = min(members, key=lambda each: sign * (each.predicted or 0.0))
        best = min(members, key=lambda each: sign * each.measured)
        by_source[key[0]].append((chosen.measured / best.measured) ** sign - 1)
    lines = ["", "| source | groups | regret, mean | worst |", "|---|---|---|---|"]
    for source, values in by_source.items():
        lines.append(f"| {source} | {len(values)} | {100 * np.mean(values):.1f} % | {100 * max(values):.1f} % |")
    return lines


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rows", required=True, type=Path, help="CSV file with the columns of published.csv")
    parser.add_argument("--calibrate", type=int, default=0, metavar="K", help="rows of each source to fit to first")
    parser.add_argument("--regret", action="store_true", help="also compare the choice among layouts of one job")
    parser.add_argument("--by-gpu", metavar="PART", help="also a table by GPU of sources with PART in their names")
    parser.add_argument("--each", metavar="PART", help="also print each row of sources with PART in their names")
    options = parser.parse_args(arguments)
    try:
        with options.rows.open(newline="", encoding="utf-8-sig") as file:
            rows = [{key: value or "" for key, value in row.items() if key} for row in csv.DictReader(file)]
    except (OSError, UnicodeDecodeError, csv.Error) as error:
        say(f"--rows={options.rows}: cannot be read: {error}. Fix: name a CSV file")
        return 2
    for row in rows:
        row.setdefault("source", "")
    found = outcomes(rows, max(0, options.calibrate))
    for each in found:
        if options.each is not None and options.each in each.row["source"] and each.predicted is not None:
            cells = ("model", "seq_len", "gpus", "gpu_type", "tp", "cp", "pp", "vpp", "ep", "mbs", "gbs", "precision")
            text = " ".join(each.row.get(cell) or "-" for cell in cells)
            what = f"{each.predicted:.5g} for {each.measured:.5g}  {each.row['metric']}"
            say(f"{100 * each.error:+6.1f} %  {what}  {text}")
    lines = table(found)
    if options.by_gpu is not None:
        lines += by_gpu(found, options.by_gpu)
    for line in lines + (regrets(found) if options.regret else []):
        say(line)
    return 0


if __name__ == "__main__":
    sys.exit(main())
