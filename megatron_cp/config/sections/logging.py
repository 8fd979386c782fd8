"""What a run shows of itself."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from megatron_cp.config.setting import either, equals, setting

PYTORCH = equals("profiling.use_pytorch_profiler", True)
PROFILES = either(PYTORCH, equals("profiling.use_nsys_profiler", True))
MARKS = either(PROFILES, equals("profiling.nvtx_ranges", True))


@dataclass
class LoggerConfig:
    log_interval: int = setting(1, "steps between log lines")
    peak_tflops_per_device: float | None = setting(
        None, "TFLOP/s that the MFU is a fraction of; null: measured with products when the run starts", least=1e-9
    )
    tensorboard: bool = setting(True, "write TensorBoard's files")
    tensorboard_dir: str | None = setting(None, "null: tensorboard/ of the run folder")
    wandb_project: str | None = setting(None, "write to this project of Weights & Biases; null: do not")
    wandb_exp_name: str | None = setting(None, "name of the run there")
    wandb_entity: str | None = setting(None, "whose project it is")
    progress: Literal["auto", "rich", "plain", "none"] = setting(
        "auto", "a moving line (auto: on a terminal) and log lines, log lines alone, or neither"
    )


@dataclass
class ProfilingConfig:
    use_pytorch_profiler: bool = setting(False, "write a trace file a rank, in profile/ of the run folder")
    use_nsys_profiler: bool = setting(False, "for nsys profile --capture-range=cudaProfilerApi; with NVTX ranges")
    nvtx_ranges: bool = setting(False, "a step's phases as NVTX ranges, in all steps")
    profile_step_start: int = setting(10, "steps before the profile", when=PROFILES)
    profile_step_end: int = setting(12, "the last profiled step", when=PROFILES)
    profile_ranks: list[int] = setting([0], "ranks that are profiled", when=MARKS)
    pytorch_profiler_collect_shapes: bool = setting(False, "with the shapes of tensors", when=PYTORCH)
    pytorch_profiler_collect_callstack: bool = setting(False, "with Python's call stacks", when=PYTORCH)
