"""Profiles of the chosen steps and ranks, with names of phases."""

from __future__ import annotations

import gzip
import json
from collections import Counter
from pathlib import Path
from typing import Any

import pytest
import torch

from megatron_cp.config.recipes import load_recipe
from megatron_cp.config.run_config import ProfilingConfig
from megatron_cp.report.traces import read_trace
from megatron_cp.rules import check
from megatron_cp.training.monitor.phases import Phases
from megatron_cp.training.monitor.profiling import Profiler
from tests.ranks import run_ranks

STEPS = ("profiling.profile_step_start=1", "profiling.profile_step_end=3")


def names(trace: Path) -> Counter[str]:
    with gzip.open(trace, "rt") as file:
        events = json.load(file)["traceEvents"]
    return Counter(event["name"] for event in events if event.get("cat") == "user_annotation")


def test_a_trace_of_the_chosen_steps_and_ranks(cli: Any, tmp_path: Path) -> None:
    code, text = cli(
        "train.train_iters=4", "profiling.use_pytorch_profiler=true", "profiling.profile_ranks=[1]", *STEPS
    )
    assert code == 0, text
    traces = list((tmp_path / "run" / "profile").iterdir())
    assert [trace.name for trace in traces] == ["rank1_iterations_2-3.json.gz"]
    seen = names(traces[0])
    assert {name for name in seen if name.startswith("iteration")} == {"iteration 2", "iteration 3"}
    # Gradients are cleared before a step and applied after it: two stretches of the optimizer a step.
    assert seen["forward_backward"] == 2 and seen["optimizer"] == 4 and seen["data"] >= 2
    assert "evaluation" not in seen and "checkpoint" not in seen


def test_a_run_that_ends_early_writes_a_partial_trace(cli: Any, tmp_path: Path) -> None:
    code, text = cli("train.train_iters=4", "train.exit_interval=2", "profiling.use_pytorch_profiler=true", *STEPS)
    assert code == 0, text
    (trace,) = (tmp_path / "run" / "profile").iterdir()
    assert trace.name == "rank0_iterations_2-2.json.gz" and names(trace)["forward_backward"] == 1


def test_without_the_setting_there_is_no_profile(tmp_path: Path) -> None:
    profiler = Profiler(ProfilingConfig(), tmp_path, 0, Phases())
    for done in range(20):
        with profiler.step(done):
            pass
    profiler.close()
    assert not list(tmp_path.iterdir())


def test_an_unwritable_trace_does_not_stop_the_run(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    (tmp_path / "profile").write_text("in the way")
    settings = ProfilingConfig(use_pytorch_profiler=True, profile_step_start=0, profile_step_end=1)
    profiler = Profiler(settings, tmp_path, 0, Phases())
    with profiler.step(0):
        pass
    assert "could not be written" in caplog.text


class Recorder:
    """Stands in for CUDA's profiler and NVTX: what would be called, in order."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.calls: list[str] = []
        monkeypatch.setattr(torch.cuda, "cudart", lambda: self)
        monkeypatch.setattr(torch.cuda.nvtx, "range_push", lambda name: self.calls.append(f"<{name}"))
        monkeypatch.setattr(torch.cuda.nvtx, "range_pop", lambda: self.calls.append(">"))

    def cudaProfilerStart(self) -> None:
        self.calls.append("start")

    def cudaProfilerStop(self) -> None:
        self.calls.append("stop")


def steps(profiler: Profiler, phases: Phases, count: int) -> None:
    for done in range(count):
        with profiler.step(done), phases("data"):
            pass
    profiler.close()


def test_nsight_is_started_for_the_steps_with_ranges_by_phase(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    recorder, phases = Recorder(monkeypatch), Phases(on_gpu=False)
    settings = ProfilingConfig(use_nsys_profiler=True, profile_step_start=1, profile_step_end=3)
    steps(Profiler(settings, tmp_path, 0, phases), phases, 5)
    assert " ".join(recorder.calls) == "start <iteration 2 <data > > <iteration 3 <data > > stop"


def test_nvtx_ranges_in_every_step_of_the_chosen_ranks(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    recorder = Recorder(monkeypatch)
    for rank in (0, 1):
        phases = Phases(on_gpu=False)
        steps(Profiler(ProfilingConfig(nvtx_ranges=True), tmp_path, rank, phases), phases, 2)
    assert " ".join(recorder.calls) == "<data > <data >"


@pytest.mark.parametrize(
    ("overrides", "rule", "severity", "field"),
    [
        (["profiling.profile_step_start=-1"], "K40", "error", "profiling.profile_step_start"),
        (["profiling.profile_step_end=10"], "K40", "error", "profiling.profile_step_end"),
        (["profiling.profile_ranks=[0,4]"], "K40", "error", "profiling.profile_ranks"),
        (["profiling.profile_ranks=[]"], "K40", "error", "profiling.profile_ranks"),
        (["train.train_iters=10"], "K40", "warning", "profiling.profile_step_start"),
        (["profiling.use_nsys_profiler=true"], "K40", "error", "profiling.use_nsys_profiler"),
        (["profiling.nvtx_ranges=true"], "K41", "error", "profiling.nvtx_ranges"),
        (["logger.wandb_exp_name=a"], "K42", "warning", "logger.wandb_project"),
    ],
)
def test_profiles_that_cannot_work_are_refused_before_the_start(
    overrides: list[str], rule: str, severity: str, field: str
) -> None:
    config = load_recipe("llama_tiny_pretrain_config", ["profiling.use_pytorch_profiler=true", *overrides])
    found = [(v.rule, v.severity, v.field) for v in check(config, 4, environment="cpu")]
    assert (rule, severity, field) in found


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs an NVIDIA GPU")
def test_a_trace_on_a_gpu_has_its_kernels(cli: Any, tmp_path: Path) -> None:
    code, text = cli(
        "train.train_iters=4", "profiling.use_pytorch_profiler=true", "dist.distributed_backend=staged", *STEPS
    )
    assert code == 0, text
    (trace,) = (tmp_path / "run" / "profile").iterdir()
    found = read_trace(trace)
    assert [found.device] == run_ranks(torch.cuda.get_device_name, 1) and found.iterations == 2
    assert found.kinds["matrix products"] > 0 and found.kinds["copies"] > 0
    assert sum(found.kinds.values()) + sum(found.idle.values()) >= 0.999 * found.seconds
    assert found.waits[0] >= 1
