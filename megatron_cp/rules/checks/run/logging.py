"""K rules on profiling, metrics and logging."""

from __future__ import annotations

from collections.abc import Iterator

from megatron_cp.common.installation import how_to_install
from megatron_cp.config.names import NAME
from megatron_cp.rules.base import Context, Finding, broken, rule


@rule(
    "K40",
    "A profile has steps, ranks and one tool.",
    "Bridge requires the same: PyTorch's profiler and Nsight Systems cannot profile one GPU at the same time. An "
    "empty range of steps would silently profile nothing.",
    broken(profiling=dict(use_pytorch_profiler=True, profile_step_start=5, profile_step_end=5)),
)
def profile_has_steps(c: Context) -> Iterator[Finding]:
    wanted, iterations = c.config.profiling, c.config.train.train_iters
    if not (wanted.use_pytorch_profiler or wanted.use_nsys_profiler):
        return
    if wanted.use_pytorch_profiler and wanted.use_nsys_profiler:
        yield Finding(
            NAME.profiling.use_nsys_profiler,
            "Exactly one of pytorch or nsys profiler should be enabled, not both, when ProfilingConfig is active.",
            f"{NAME.profiling.use_pytorch_profiler}=false",
        )
    start, end = wanted.profile_step_start, wanted.profile_step_end
    if start < 0:
        yield Finding(NAME.profiling.profile_step_start, f"profile_step_start must be >= 0, got {start}", "=0")
    elif end <= start:
        yield Finding(
            NAME.profiling.profile_step_end,
            f"profile_step_end ({end}) must be > profile_step_start ({start})",
            f"={start + 2}",
        )
    elif iterations is not None and start >= iterations:
        yield Finding(
            NAME.profiling.profile_step_start,
            f"the run ends after {iterations} iterations, before the profile starts",
            f"={max(0, iterations - 2)} {NAME.profiling.profile_step_end}={iterations}",
            severity="warning",
        )
    missing = [rank for rank in wanted.profile_ranks if not 0 <= rank < c.world_size]
    if missing or not wanted.profile_ranks:
        yield Finding(
            NAME.profiling.profile_ranks,
            f"this run of {c.world_size} ranks does not have the ranks {missing}" if missing else "must name a rank",
            "=[0]",
        )


@rule(
    "K41",
    "Nsight Systems and NVTX ranges need a GPU.",
    "They record the CUDA runtime.",
    broken(profiling=dict(use_nsys_profiler=True)),
)
def nsight_needs_a_gpu(c: Context) -> Iterator[Finding]:
    for name in ("use_nsys_profiler", "nvtx_ranges"):
        if getattr(c.config.profiling, name) and c.environment.device == "cpu":
            yield Finding(
                f"profiling.{name}",
                "needs a GPU, but there is none",
                "=false",
                f"=false {NAME.profiling.use_pytorch_profiler}=true",
            )


@rule(
    "K42",
    "Weights & Biases is installed where it is used.",
    "Checked here, before the first metrics are sent. Without network access, export WANDB_MODE=offline.",
    broken(logger=dict(wandb_project="mine")),
)
def weights_and_biases_is_installed(c: Context) -> Iterator[Finding]:
    if c.config.logger.wandb_project and c.environment.wandb is None:
        yield Finding(
            NAME.logger.wandb_project,
            "needs Weights & Biases, which is not installed",
            how_to_install("wandb"),
            "=null",
        )
    if (c.config.logger.wandb_exp_name or c.config.logger.wandb_entity) and not c.config.logger.wandb_project:
        yield Finding(NAME.logger.wandb_project, "Please specify the wandb project name", "=NAME", severity="warning")


@rule(
    "K43",
    "The log interval is at least 1.",
    "An interval of 0 would end the first step with a ZeroDivisionError.",
    broken(logger=dict(log_interval=0)),
)
def log_interval(c: Context) -> Iterator[Finding]:
    iterations = c.config.train.train_iters
    if c.config.logger.log_interval < 1:
        yield Finding(
            NAME.logger.log_interval,
            f"must be at least 1, got {c.config.logger.log_interval}",
            "=1",
            f"={max(1, iterations or 1)} (logs the last iteration only)",
        )
