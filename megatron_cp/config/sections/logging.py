"""Logging, metrics and profiling."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from megatron_cp.config.setting import either, equals, setting

PYTORCH = equals("profiling.use_pytorch_profiler", True)
PROFILES = either(PYTORCH, equals("profiling.use_nsys_profiler", True))
PROFILES_OR_NVTX = either(PROFILES, equals("profiling.nvtx_ranges", True))


@dataclass
class LoggerConfig:
    log_interval: int = setting(1, "steps between log lines")
    peak_tflops_per_device: float | None = setting(
        None, "peak TFLOP/s per device for the MFU; null: measured by matrix products at the start", least=1e-9
    )
    tensorboard: bool = setting(True, "write TensorBoard files")
    tensorboard_dir: str | None = setting(None, "folder of TensorBoard files; null: tensorboard/ in the run folder")
    wandb_project: str | None = setting(None, "Weights & Biases project; null: off")
    wandb_exp_name: str | None = setting(None, "name of the run in Weights & Biases")
    wandb_entity: str | None = setting(None, "owner of the project")
    progress: Literal["auto", "rich", "plain", "none"] = setting(
        "auto", "progress line and log lines (auto: on a terminal), log lines only, or neither"
    )


@dataclass
class ProfilingConfig:
    use_pytorch_profiler: bool = setting(False, "write one trace file per rank to profile/ in the run folder")
    use_nsys_profiler: bool = setting(False, "for nsys profile --capture-range=cudaProfilerApi; with NVTX ranges")
    nvtx_ranges: bool = setting(False, "mark the phases of all steps as NVTX ranges")
    profile_step_start: int = setting(10, "step after which profiling starts", when=PROFILES)
    profile_step_end: int = setting(12, "last profiled step", when=PROFILES)
    profile_ranks: list[int] = setting([0], "ranks to profile", when=PROFILES_OR_NVTX)
    pytorch_profiler_collect_shapes: bool = setting(False, "record tensor shapes", when=PYTORCH)
    pytorch_profiler_collect_callstack: bool = setting(False, "record Python call stacks", when=PYTORCH)
