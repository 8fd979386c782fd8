"""The environment of a run: device, libraries, node and variables, without torch."""

from __future__ import annotations

import os
import sys
from dataclasses import dataclass, field
from importlib import metadata
from pathlib import Path
from typing import Any, Literal

from megatron_cp.common.errors import ConfigError, Violation
from megatron_cp.common.yaml_files import TooLargeError, read_yaml
from megatron_cp.config.schema import build
from megatron_cp.launch import launcher
from megatron_cp.rules.nvml import read_driver

# Variables that change the behavior of libraries; compared over ranks and shown in reports.
VARIABLE_PREFIXES = (
    "NVTE_",
    "NCCL_",
    "CUDA_DEVICE_MAX_CONNECTIONS",
    "CUBLAS_WORKSPACE_CONFIG",
    "TORCH_NCCL_",
    "MAMBA_DETERMINISTIC",
    "CAUSAL_CONV1D_DETERMINISTIC",
)


@dataclass
class Environment:
    """The environment that rules read; a version is None if the library is absent."""

    device: Literal["gpu", "cpu"] = "cpu"
    gpus_per_node: int | None = None
    compute_capability: float | None = None  # 9.0 is Hopper, 10.0 Blackwell
    gpu_memory_gib: float | None = None  # of the GPU that has least
    gpu: str | None = None  # name of the first GPU
    transformer_engine: str | None = None
    flash_attn: str | None = None
    mamba_ssm: str | None = None
    causal_conv1d: str | None = None
    wandb: str | None = None
    emerging_optimizers: str | None = None
    variables: dict[str, str] = field(default_factory=dict)

    @classmethod
    def detect(cls) -> Environment:
        """Return this process's environment.

        GPUs come from torch if torch is loaded, else from the driver.
        """
        gpus, capability = _gpus()
        return cls(
            device="gpu" if gpus else "cpu",
            gpus_per_node=max(gpus, launcher.local_world_size() or 1) if gpus else None,  # a rank may see only one GPU
            compute_capability=capability,
            gpu_memory_gib=_gpu_memory() if gpus else None,
            gpu=_gpu_name() if gpus else None,
            transformer_engine=installed_version("transformer-engine"),
            flash_attn=installed_version("flash-attn"),
            mamba_ssm=installed_version("mamba-ssm"),
            causal_conv1d=installed_version("causal-conv1d"),
            wandb=installed_version("wandb"),
            emerging_optimizers=installed_version("emerging-optimizers"),
            variables={k: v for k, v in sorted(os.environ.items()) if k.startswith(VARIABLE_PREFIXES)},
        )

    @classmethod
    def of(cls, environment: Environment | str | None) -> Environment:
        """Return an environment: given, by name or file, or (None) this machine's."""
        if isinstance(environment, Environment):
            return environment
        return cls.detect() if environment is None else cls.describe(environment)

    @classmethod
    def describe(cls, text: str) -> Environment:
        """Return an environment by name or from a YAML file.

        ``gpu``: eight H100 per node, all packages. ``cpu``: no GPU.
        """
        if text in PRESETS:
            return PRESETS[text]
        path = Path(text)
        if not os.path.isfile(path):  # unlike Path.is_file, never raises
            raise _error("K35", f"'{text}' is not {' or '.join(PRESETS)}, and not a readable file")
        from yaml import YAMLError

        try:
            loaded = read_yaml(path)
        except TooLargeError as error:
            raise _error("K4", f"cannot read {path}: it {error.what}", error.fix) from error
        except (YAMLError, OSError, ValueError) as error:
            raise _error("K4", f"cannot read {path}: {error}") from error
        if not isinstance(loaded, dict):
            raise _error("K4", f"{path} does not hold a mapping")
        problems: list[Violation] = []
        environment: Environment = build(cls, loaded, problems)
        if not problems and environment.gpus_per_node is not None and environment.gpus_per_node < 1:
            message = f"must be an integer of at least 1, got {environment.gpus_per_node}"
            problems.append(Violation("A1", "error", "gpus_per_node", message, f"leave it out of {path}"))
        if problems:
            raise ConfigError(problems)
        return environment


PRESETS = {
    "cpu": Environment(device="cpu"),
    "gpu": Environment(
        device="gpu",
        gpus_per_node=8,
        compute_capability=9.0,
        gpu_memory_gib=80.0,
        transformer_engine="2.16.1",
        flash_attn="2.8.3",
        mamba_ssm="2.3.2.post1",
        causal_conv1d="1.7.0",
        emerging_optimizers="0.3.0",
    ),
}


def _error(rule: str, message: str, fix: str = "") -> ConfigError:
    return ConfigError([Violation(rule, "error", "--environment", message, fix)])


def installed_version(distribution: str) -> str | None:
    """Return the installed version of a distribution; None if not installed."""
    try:
        return metadata.version(distribution)
    except metadata.PackageNotFoundError:
        return None


def _gpus() -> tuple[int, float | None]:
    """Return the number of visible NVIDIA GPUs and the first one's compute capability."""
    cuda: Any = getattr(sys.modules.get("torch"), "cuda", None)
    if cuda is not None and not cuda.is_available():
        return 0, None  # built without CUDA, or no GPU is visible
    visible = os.environ.get("CUDA_VISIBLE_DEVICES")
    if visible is not None and visible.strip() in ("", "-1"):
        return 0, None
    driver = read_driver()  # torch would start CUDA to read the capability, which breaks later forks
    if driver is None and cuda is not None:
        return cuda.device_count(), None  # CUDA without the driver's library, as in some containers
    if driver is None or not driver.gpus:
        return 0, None
    number = len(driver.gpus)
    return number if visible is None else min(number, len(visible.split(","))), driver.gpus[0].compute_capability


def _gpu_name() -> str | None:
    """Return the name of the first GPU; None without a driver."""
    driver = read_driver()
    return driver.gpus[0].name if driver and driver.gpus else None


def _gpu_memory() -> float | None:
    """Return the GiB of the smallest GPU; None where the driver does not say."""
    driver = read_driver()
    return min(gpu.memory for gpu in driver.gpus) / 2**30 if driver and driver.gpus else None
