"""Benchmarks for GPUs have configurations that a GPU can run."""

from __future__ import annotations

import argparse
import gc
import math
import subprocess
import sys
import weakref
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml

from benchmarks import device_rates, gpu_attention, gpu_pretrain, longest_sequence
from benchmarks.gpu_pretrain import MODELS, RECOMPUTE, config_of
from megatron_cp.config.overrides import override
from megatron_cp.config.recipes import load_recipe
from megatron_cp.dynamic_cp.calibration import Calibrator
from megatron_cp.estimate.device import load_device
from megatron_cp.estimate.prices import prices
from megatron_cp.report.traces import read_trace
from megatron_cp.rules import Environment, check
from megatron_cp.rules.job import job_of
from megatron_cp.rules.remedies import Case
from tests.ranks import run_ranks


@pytest.mark.parametrize("model", MODELS)
def test_gpu_pretrain_breaks_no_rule_on_one_gpu(model: str) -> None:
    options = argparse.Namespace(tokens=131072, steps=5, warm_up=3, chunk=4096, overrides=[])
    for attention in ("te", "native"):
        for recompute in RECOMPUTE:
            for size in (4096, 131072):
                config = config_of(model, size, attention, recompute, options)
                assert [v for v in check(config, 1, environment="gpu") if v.severity == "error"] == []


def test_longest_sequences_break_no_rule_and_offload_lengthens_them() -> None:
    tokens, (model, gpus) = [], ("llama32_1b", 1)
    for fixed in longest_sequence.COLUMNS.values():
        found = longest_sequence.longest(model, gpus, load_device("h100"), fixed)
        assert found is not None
        config = load_recipe(longest_sequence.recipe_of(model), [override(*each) for each in found.settings.items()])
        assert [v for v in check(config, gpus, environment="gpu") if v.severity == "error"] == []
        tokens.append(found.tokens)
    assert tokens == sorted(set(tokens))


def rows_of_a_table_with_errors(errors: list[Exception | None]) -> list[str]:
    """Return one row per error: the case fails with it in its first step."""
    options = argparse.Namespace(
        tokens=64, steps=1, warm_up=0, chunk=64, overrides=["model.num_layers=1"], profile=None
    )
    original, models, rows = gpu_pretrain.train_step, [], []
    coming = iter(errors)

    def train_step(run: Any, microbatches: Any) -> Any:
        models.append(weakref.ref(run.model[0]))
        error = next(coming)
        if error is not None:
            raise type(error)(*error.args)  # a copy, so that no other reference keeps its traceback alive
        return original(run, microbatches)

    gpu_pretrain.train_step = train_step
    for _ in errors:
        rows.append(gpu_pretrain.measure("tiny", 64, "native", "none", 1e12, options))
        gc.collect()
        assert models[-1]() is None, "the next case has less memory"
    return rows


def a_profiled_case(folder: Path) -> str:
    options = argparse.Namespace(
        tokens=128, steps=1, warm_up=1, chunk=64, overrides=["model.num_layers=2"], profile=folder
    )
    return gpu_pretrain.measure("tiny", 64, "native", "none", 1e12, options)


def test_a_profile_is_of_one_step_after_the_measured_ones(tmp_path: Path) -> None:
    (row,) = run_ranks(a_profiled_case, 1, tmp_path)
    assert float(row.split("|")[5]) > 0
    found = read_trace(tmp_path / "tiny_64_native_none" / "profile" / "rank0_iterations_3-3.json.gz")
    assert found.iterations == 1 and found.kinds["matrix products"] > 0
    calls = {kernel.name: kernel.calls for kernel in found.kernels}
    # Two microbatches through two layers.
    assert calls["aten::_scaled_dot_product_flash_attention_for_cpu"] == 4


def test_a_failed_case_does_not_stop_the_others() -> None:
    errors = [RuntimeError("CUDA out of memory. Tried to allocate 2 GiB"), ValueError("no kernel\nfor this"), None]
    (rows,) = run_ranks(rows_of_a_table_with_errors, 1, errors)
    assert "| does not fit in memory |" in rows[0] and "| failed: ValueError: no kernel |" in rows[1]
    assert float(rows[2].split("|")[5]) > 0


def test_the_sustained_rate_is_measured_after_some_seconds(monkeypatch: pytest.MonkeyPatch) -> None:
    """The GPU slows down by a third after two busy seconds."""
    now = [0.0]

    def matmul(a: torch.Tensor, b: torch.Tensor) -> None:
        now[0] += 0.01 if now[0] < 2 else 0.015

    monkeypatch.setattr(gpu_pretrain.time, "perf_counter", lambda: now[0])
    monkeypatch.setattr(torch, "matmul", matmul)
    first, lasting = gpu_pretrain.matmul_rates(4, 5.0)
    assert now[0] >= 5
    assert (first, lasting) == (pytest.approx(2 * 4**3 / 0.01), pytest.approx(2 * 4**3 / 0.015))


def test_kernels_that_cannot_compute_a_shape_are_left_out(capsys: pytest.CaptureFixture[str]) -> None:
    def missing(query: torch.Tensor, key: torch.Tensor, value: torch.Tensor) -> torch.Tensor:
        raise RuntimeError("No available kernel.\nAborting execution.")

    given = gpu_attention.inputs(8, 2, 1, 8)
    ways = {
        "ours": (gpu_attention.ring_of_one(0, 1), given),
        "te": (missing, given),
        "sdpa": (gpu_attention.sdpa, given),
    }
    assert list(gpu_attention.usable(ways)) == ["ours", "sdpa"]
    assert "te: RuntimeError: No available kernel." in capsys.readouterr().err
    with pytest.raises(RuntimeError, match="No available kernel"):
        gpu_attention.usable({"ours": (missing, given)})


def test_the_rates_of_a_device_are_fitted_to_its_times(tmp_path: Path) -> None:
    config = load_recipe("llama31_8b_pretrain_config", ["model.num_layers=4", "model.context_parallel_size=1"])
    job = job_of(Case(config, 1, 8, Environment.of("gpu")))
    assert job is not None
    before = load_device("h200")
    efficiency = {name: 0.8 * value for name, value in before.matmul_efficiency.items()}
    device = replace(
        before,
        attention_flops=(6e14, 4.8e14),
        matmul_efficiency=efficiency,
        memory_bandwidth=0.8 * before.memory_bandwidth,
        launch_seconds=2 * before.launch_seconds,
        kernel_seconds=2 * before.kernel_seconds,
    )
    prior, true = prices(job, 32768, before), prices(job, 32768, device)
    calibrator = Calibrator(prior, bound=device_rates.BOUND)
    for size in (512, 1024, 2048, 4096, 8192, 16384, 32768):
        for noise in (0.99, 1.0, 1.01):
            calibrator.observe([([size], 1)], noise * true.seconds([size], 1))
    path = tmp_path / "measured.yaml"
    path.write_text(yaml.safe_dump(device_rates.rates(before, prior, calibrator.fit())))
    found = load_device(str(path))
    assert found.attention_flops == pytest.approx(device.attention_flops, rel=0.12)
    assert found.matmul_efficiency["bf16"] == pytest.approx(efficiency["bf16"], rel=0.02)
    assert found.memory_bandwidth == pytest.approx(device.memory_bandwidth, rel=0.02)
    assert found.launch_seconds == pytest.approx(device.launch_seconds, rel=0.15)  # weights are read as well
    assert found.intra_bandwidth == device.intra_bandwidth and found.call_seconds == 0


def times_of_two_sizes() -> list[list[float]]:
    options = argparse.Namespace(
        model="tiny", attention="auto", recompute="none", microbatches=3, steps=2, warm_up=1, chunk=64, overrides=[]
    )
    return [device_rates.seconds_a_microbatch(size, options)[0] for size in (32, 64)]


def test_a_microbatch_is_timed_without_the_optimizer() -> None:
    for seconds in run_ranks(times_of_two_sizes, 1)[0]:
        assert len(seconds) == 2 and all(math.isfinite(each) for each in seconds)


@pytest.mark.slow
def test_retrieval_trains_extends_and_tests(tmp_path: Path) -> None:
    """A thousandth of the samples and steps."""
    script = [sys.executable, str(Path(__file__).parents[3] / "benchmarks" / "retrieval.py"), str(tmp_path / "run")]
    subprocess.run([*script, "model.num_layers=1", "--scale", "0.001"], check=True, timeout=600)
    subprocess.run(
        [*script, "model.num_layers=1", "--scale", "0.001", "--test-with-ranks", "2"], check=True, timeout=300
    )
    for run in ("short", "long"):
        assert len(list((tmp_path / "run" / run / "evaluations").glob("*.json"))) == 2
