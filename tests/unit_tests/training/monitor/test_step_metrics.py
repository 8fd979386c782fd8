"""Logged numbers belong to their step, and the line fits.

They include its training values and its MFU.
"""

from __future__ import annotations

import json
import os
import re
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

from megatron_cp.training.monitor.peak import Peak, find_peak
from megatron_cp.training.monitor.phases import Interval
from megatron_cp.training.monitor.step_metrics import StepMetrics, log_line
from tests.ranks import run_ranks

SCHEDULED = [
    "train.train_iters=8",
    "train.micro_batch_size=2",  # one microbatch a step: the loss is scaled once
    "model.context_parallel_size=1",
    "mixed_precision.fp32=false",
    "mixed_precision.fp16=true",
    "mixed_precision.initial_loss_scale=262144",  # overflows at first
    "mixed_precision.hysteresis=1",
    "mixed_precision.loss_scale_window=2",
    "ddp.check_for_nan_in_grad=false",
    "scheduler.lr_warmup_iters=3",
    "scheduler.start_weight_decay=0.01",
    "scheduler.end_weight_decay=0.1",
    "scheduler.weight_decay_incr_style=linear",
    "logger.tensorboard=true",
    "logger.peak_tflops_per_device=0.125",
]


class Recorded:
    """Values that the optimizer really used.

    Rank 0 of a forked run writes them down where they are used.
    """

    def __init__(self, path: Path) -> None:
        self.path = path

    def start(self) -> None:
        from megatron.core.optimizer.optimizer import MegatronOptimizer
        from torch.optim.optimizer import register_optimizer_step_pre_hook

        if os.environ["RANK"] != "0":
            return
        scale_loss = MegatronOptimizer.scale_loss

        def recording_scale(optimizer: Any, loss: torch.Tensor) -> torch.Tensor:
            self.note("scale", float(optimizer.get_loss_scale()))
            return scale_loss(optimizer, loss)

        MegatronOptimizer.scale_loss = recording_scale
        register_optimizer_step_pre_hook(
            lambda optimizer, *_: self.note(
                "step",
                [optimizer.param_groups[0]["lr"], max(group["weight_decay"] for group in optimizer.param_groups)],
            )
        )

    def note(self, what: str, value: Any) -> None:
        with self.path.open("a") as file:
            file.write(json.dumps([what, value]) + "\n")

    def steps(self) -> list[tuple[float, list[float] | None]]:
        """Return each step's loss scale, rate and weight decay.

        Rate and weight decay are there where the parameters were changed.
        """
        found: list[tuple[float, list[float] | None]] = []
        for line in self.path.read_text().splitlines():
            what, value = json.loads(line)
            if what == "scale":
                found.append((value, None))
            else:
                found[-1] = (found[-1][0], value)
        return found


def test_metrics_of_a_step_are_the_values_it_trained_with(cli: Any, tmp_path: Path) -> None:
    """Overflows, changing rates and a resume must not change them.

    Rate, weight decay and loss scale change.
    """
    recorded = Recorded(tmp_path / "recorded.jsonl")
    for more in (["train.exit_interval=5"], []):
        code, text = cli(*SCHEDULED, *more, ranks=1, before=recorded.start)
        assert code == 0, text
    used = recorded.steps()
    lines = [json.loads(line) for line in (tmp_path / "run" / "metrics.jsonl").read_text().splitlines()]
    assert len(lines) == len(used) == 8
    assert [line["skipped"] for line in lines] == [values is None for _, values in used]
    assert [line["loss_scale"] for line in lines] == [scale for scale, _ in used]
    assert len({scale for scale, _ in used}) > 2, "the scale must change for this to show anything"
    kept = [line for line in lines if not line["skipped"]]
    assert [[line["learning_rate"], line["weight_decay"]] for line in kept] == [v for _, v in used if v is not None]
    assert kept[0]["learning_rate"] == 0 and kept[1]["learning_rate"] > 0
    assert len({line["weight_decay"] for line in kept}) == len(kept)
    left_out = [i for i, line in enumerate(lines[:-1]) if line["skipped"]]
    assert left_out and all(lines[i]["learning_rate"] == lines[i + 1]["learning_rate"] for i in left_out)
    for line in lines:
        assert line["mfu_of_given_peak"] == line["tflops_per_device"] / 0.125

    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    board = EventAccumulator(str(tmp_path / "run" / "tensorboard"))
    board.Reload()
    for name in ("learning_rate", "weight_decay", "loss_scale", "mfu_of_given_peak"):
        assert [event.value for event in board.Scalars(name)] == pytest.approx([line[name] for line in lines], rel=1e-6)
    logged = re.findall(r"iteration (\d)/8 .* lr: (\S+)", text)  # of the second start
    assert [(int(i), float(rate)) for i, rate in logged] == [(x["iteration"], x["learning_rate"]) for x in lines[5:]]
    assert logged[0][1] == "0"
    assert "MFU: relative to a given peak of 0.125 TFLOP/s per device (logger.peak_tflops_per_device)" in text


LAST = StepMetrics(
    iteration=7,
    consumed_samples=56,
    consumed_tokens=1792,
    consumed_loss_tokens=1200,
    loss_tokens=170,
    lm_loss=5.0,
    grad_norm=1.25,
    learning_rate=3e-4,
    weight_decay=0.1,
    step_time_s=0.25,
    tokens_per_s=1024.0,
    tokens_per_s_per_device=256.0,
    tflops_per_device=0.5,
    num_microbatches=2,
    skipped=False,
)
INTERVAL = Interval({"data": 0.001, "forward_backward": 0.2, "optimizer": 0.0125}, 1_500_000_000)


def parse(line: str) -> dict[str, float]:
    found = re.match(r"iteration\s+(\d+)/(\d+) \| (.*)$", line)
    assert found
    values = {name: float(value) for name, value in re.findall(r"([^|:]+): (\S+)", found[3])}
    return {"iteration": float(found[1])} | {name.strip(): value for name, value in values.items()}


def test_a_log_line() -> None:
    line = log_line([LAST], 100, 93.0, Peak(2.0, "measured"), INTERVAL)
    expected = {
        "iteration": 7,
        "lm loss": 5,
        "lr": 3e-4,
        "grad norm": 1.25,
        "TFLOP/s/GPU": 0.5,
        "MFU (measured)": 0.25,
    }
    assert expected.items() <= parse(line).items() and "left 0:01:33" in line


def test_the_first_rate_of_a_warmup_is_logged_as_zero() -> None:
    assert "| lr: 0 |" in log_line([replace(LAST, learning_rate=0.0)], 100, 93.0)


def test_a_log_line_has_the_loss_of_its_step_and_the_times_of_its_interval() -> None:
    steps = [
        replace(LAST, step_time_s=0.1, tokens_per_s=2000.0, lm_loss=6.0),
        replace(LAST, step_time_s=0.3, tokens_per_s=1000.0, lm_loss=float("nan"), grad_norm=None, skipped=True),
        replace(LAST, step_time_s=0.2, tokens_per_s=1500.0, lm_loss=4.5),
    ]
    fields = parse(log_line(steps, 100, 0.0))
    assert fields["lm loss"] == 4.5 and fields["skipped"] == 1 and fields["nan"] == 1
    # Work by time, not the mean of the rates.
    fields = parse(log_line([replace(s, skipped=False) for s in steps[::2]], 9, 0.0))
    assert fields["tokens/s"] == round(500 / 0.3) and fields["step ms"] == pytest.approx(150)


def test_every_line_fits_160_characters_and_keeps_what_matters_most() -> None:
    """The line has everything that there can be, and long numbers."""
    widest = replace(
        LAST,
        iteration=10_000_000,
        consumed_samples=10**12,
        consumed_tokens=10**16,
        consumed_loss_tokens=10**16,
        lm_loss=123456.789,
        grad_norm=1.23456789e30,
        learning_rate=1.23456789e-12,
        loss_scale=2.0**32,
        step_time_s=123456.789,
        tokens_per_s=123456789012.0,
        tflops_per_device=12345.678,
        mtp_losses=(123456.789, 123456.789),
        router_losses={"load_balancing_loss": 1.23456, "z_loss": 123456.789},
        schedule_time_s=12.5,
        imbalance=1.0023,
        padding_fraction=0.0012,
        cp_sizes={1: 1000, 2: 1000, 4: 1000},
    )
    stamp = len("[2026-01-31 12:00:00] ")
    for step in (LAST, widest, replace(widest, lm_loss=float("nan"), skipped=True)):
        for peak in (None, Peak(1e-3, "measured"), Peak(2500.0, "given")):
            line = log_line([step] * 1000, 10_000_000, 1e7, peak, INTERVAL)
            assert stamp + len(line) <= 160, line
            wanted = {"skipped", "nan"} if step.skipped else {"TFLOP/s/GPU"}
            assert {"iteration", "lm loss", "lr", "grad norm"} | wanted <= parse(line).keys(), line
    assert parse(log_line([LAST], 10_000_000, 1e7, Peak(2500.0, "measured")))["MFU (measured)"] == 0
    # What the line leaves out is in metrics.jsonl.
    values = widest.values(Peak(2500.0, "given"))
    assert {"mtp_1 loss", "mtp_2 loss", "z_loss", "imbalance", "cp_sizes", "mfu_of_given_peak"} <= values.keys()


def measured_peaks() -> tuple[float, float, bool]:
    """Return float32 peaks: the measured one and one of products timed here.

    The third value is whether torch's random state is unchanged.
    """
    import time

    before = torch.random.get_rng_state()
    peak = find_peak(None, torch.float32, torch.device("cpu"), dist.group.WORLD)
    kept = torch.equal(before, torch.random.get_rng_state())
    assert peak.source == "measured" and peak.name == "mfu_of_measured_peak"
    a, rates = torch.randn(512, 512), []
    for _ in range(20):
        begin = time.perf_counter()
        a @ a
        rates.append(2 * 512**3 / (time.perf_counter() - begin) / 1e12)
    return peak.tflops, max(rates), kept


def test_a_peak_is_measured_by_all_ranks_together() -> None:
    (first, timed, kept), (second, _, _) = run_ranks(measured_peaks, 2)
    assert first == second and kept
    assert timed / 20 < first < timed * 20  # the ranks share cores with others


def test_a_given_peak_is_not_measured() -> None:
    assert find_peak(989.0, torch.bfloat16, torch.device("cpu"), None).mfu(494.5) == 0.5  # type: ignore[arg-type]
