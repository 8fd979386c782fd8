"""Device constants of the time model: sustained speeds of a GPU and its links.

Presets are the YAML files in ``devices/``. Pure.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field, fields, replace
from pathlib import Path
from typing import Any

from megatron_cp.common.errors import ConfigError
from megatron_cp.common.yaml_files import read_yaml
from megatron_cp.config.schema import nearest_first

PRESETS = Path(__file__).parent / "devices"
FORMATS = ("fp32", "bf16", "fp8", "mxfp8", "nvfp4")
GROUPS = ("tp", "cp", "ep", "dp", "pp")


@dataclass(frozen=True)
class Device:
    """A GPU in a cluster.

    Bandwidths are one-directional rates sustained in training, not data-sheet peaks.

    memory: bytes.
    gpus_per_node: GPUs connected by intra-node links.
    cores: processor cores that the ranks of a node share; 0 if each rank has a device of its own.
    matmul_flops: peak FLOP/s of dense matrix products by number format.
    matmul_efficiency: fraction of the peak sustained by large products in training, by number format.
    attention_flops: FLOP/s of long causal attention, (forward, backward), counting visible pairs only.
    attention_half: sequence (or chunk) length in tokens at which attention reaches half of ``attention_flops``.
    score_bytes: bytes moved per query-key pair and head in the forward pass; 0 for fused (flash) attention.
    memory_bandwidth: bytes/s of elementwise kernels and of matrix product operands.
    kernel_seconds: gap between two kernels on the GPU.
    launch_seconds: host time per kernel launch; limits the step when kernels are shorter.
    host_serial: fraction of host time during which the GPU is idle, for example in synchronizing layers; 1 on a CPU.
    step_seconds: constant overhead per step (data loading, gradient norm, logging).
    intra_bandwidth, inter_bandwidth: bytes/s per GPU within a node and between nodes.
    host_bandwidth: bytes/s of copies to host memory and of copies back, each; the data sheet's. 0: nothing is copied.
    intra_latency, inter_latency: seconds per message or two-rank collective; n ranks take log2(n) times as long.
    message_serial: fraction of the latency that each further tensor of an all-to-all adds: 0 where one kernel sends all
        (NCCL), 1 where each is a message of its own (gloo).
    overlap: fraction of each group's communication that computation can hide.
    call_seconds: host time of an attention call and layer, if each sample of a pack needs calls of its own (on CPUs).
    """

    name: str
    memory: float
    gpus_per_node: int
    matmul_flops: Mapping[str, float]
    matmul_efficiency: Mapping[str, float]
    attention_flops: tuple[float, float]
    memory_bandwidth: float
    intra_bandwidth: float
    inter_bandwidth: float
    host_bandwidth: float = 6.4e10
    cores: int = 0
    attention_half: float = 500.0
    score_bytes: float = 0.0
    kernel_seconds: float = 2e-6
    launch_seconds: float = 8e-6
    host_serial: float = 0.3
    step_seconds: float = 5e-3
    intra_latency: float = 18e-6
    inter_latency: float = 30e-6
    message_serial: float = 0.0
    overlap: Mapping[str, float] = field(default_factory=lambda: dict.fromkeys(GROUPS, 0.0))
    call_seconds: float = 0.0

    def matmul_rate(self, number_format: str) -> float:
        """Return the sustained FLOP/s of large matrix products.

        A format that the device does not support runs in the nearest preceding supported format of :data:`FORMATS`.
        """
        known = [each for each in FORMATS[: FORMATS.index(number_format) + 1] if each in self.matmul_flops]
        chosen = known[-1]
        return self.matmul_flops[chosen] * self.matmul_efficiency[chosen]


def device_names() -> list[str]:
    """Return the names of the presets."""
    return sorted(path.stem for path in PRESETS.glob("*.yaml"))


def preset_for(name: str | None, capability: float | None, memory_gib: float | None) -> str:
    """Return the preset for a GPU: by its name, else by compute capability and memory.

    Unknown GPUs get ``h100``.
    """
    if found := [preset for preset in device_names() if name and preset in name.lower()]:
        return max(found, key=len)  # gb200 also contains b200
    memory = memory_gib or 0.0
    if capability is not None and capability < 9:
        return "a100"
    if capability is not None and capability >= 10:
        return "b300" if memory > 200 else "b200"
    return "h200" if memory > 100 else "h100"


def load_device(name_or_path: str) -> Device:
    """Load a device preset by name, or a YAML file with :class:`Device` fields.

    ``base: NAME`` in a file selects the preset for all omitted fields.

    Raises:
        ConfigError: unknown device name, or invalid file.
    """
    path = Path(name_or_path)
    if path.suffix in (".yaml", ".yml"):
        return _read(path)
    name = name_or_path.lower()
    if name not in device_names():
        near = nearest_first(name, device_names())[0]
        known = ", ".join(device_names())
        raise ConfigError(f"gpu={name_or_path}: unknown; known are {known}, or a YAML file. Fix: --gpu {near}")
    return _read(PRESETS / f"{name}.yaml")


def _read(path: Path) -> Device:
    import yaml

    try:
        found = read_yaml(path)
    except (OSError, ValueError, yaml.YAMLError) as error:
        raise ConfigError(f"{path}: cannot be read: {error}. Fix: name a YAML file of a device") from error
    if not isinstance(found, dict):
        raise ConfigError(f"{path}: not a device description. Fix: write fields as in {PRESETS / 'h100.yaml'}")
    base = found.pop("base", None)
    known = [each.name for each in fields(Device)]
    for key in found:
        if key not in known:
            near = nearest_first(str(key), known)[0]
            raise ConfigError(f"{path}: {key}: unknown device field. Fix: name it {near}, or remove it")
    try:
        values = {key: _value(found[key]) for key in found}
        device = replace(load_device(str(base)), **values) if base else Device(**values)
        return _checked(device)
    except (TypeError, ValueError, KeyError) as error:
        fix = "add the missing fields, or base: h100"
        raise ConfigError(f"{path}: invalid device: {error}. Fix: {fix}") from error


def _value(value: Any) -> Any:
    """Convert a YAML value to device field types.

    Numbers such as ``1e12`` arrive as text; lists become tuples.
    """
    if isinstance(value, dict):
        return {str(key): _value(each) for key, each in value.items()}
    if isinstance(value, list):
        return tuple(_value(each) for each in value)
    if isinstance(value, str):
        try:
            return float(value)
        except ValueError:
            return value
    return value


def _checked(device: Device) -> Device:
    """Validate a device and fill ``overlap`` for all groups.

    Raises:
        ValueError: a number is negative, not finite or missing.
    """
    for each in fields(Device):
        value = getattr(device, each.name)
        numbers = value.values() if isinstance(value, Mapping) else value if isinstance(value, tuple) else [value]
        for number in numbers:
            if each.name != "name" and not (isinstance(number, int | float) and 0 <= number < math.inf):
                raise ValueError(f"{each.name}={value} must be finite numbers of at least 0")
    for name in ("memory", "gpus_per_node", "memory_bandwidth", "intra_bandwidth", "inter_bandwidth"):
        if not getattr(device, name) > 0:
            raise ValueError(f"{name} must be more than 0")
    if not {"bf16"} <= set(device.matmul_flops) & set(device.matmul_efficiency):
        raise ValueError("matmul_flops and matmul_efficiency need bf16")
    if len(device.attention_flops) != 2 or not min(device.attention_flops) > 0:
        raise ValueError("attention_flops must be two numbers, forward and backward")
    return replace(device, overlap={**dict.fromkeys(GROUPS, 0.0), **device.overlap})
