"""GPUs of this machine as the NVIDIA driver reports them, without a CUDA context."""

from __future__ import annotations

import ctypes
from dataclasses import dataclass
from typing import Any

_SUCCESS = 0


@dataclass(frozen=True)
class Gpu:
    name: str
    compute_capability: float  # 9.0 is Hopper, 10.0 Blackwell
    memory: int  # bytes


@dataclass(frozen=True)
class Driver:
    """The driver: version, newest CUDA version it supports, all GPUs, visible or not."""

    version: str
    cuda: tuple[int, int]
    gpus: tuple[Gpu, ...]


class _Memory(ctypes.Structure):
    _fields_ = [(name, ctypes.c_ulonglong) for name in ("total", "free", "used")]


def read_driver() -> Driver | None:
    """Return the driver; None without a driver or without an answer."""
    try:
        library = ctypes.CDLL("libnvidia-ml.so.1")
        if library.nvmlInit_v2() != _SUCCESS:
            return None
    except (OSError, AttributeError):  # no such library, or no such function in it
        return None
    try:
        return _read(library)
    except AttributeError:
        return None
    finally:
        library.nvmlShutdown()


def _read(nvml: Any) -> Driver | None:
    version, cuda, count = ctypes.create_string_buffer(96), ctypes.c_int(), ctypes.c_uint()
    nvml.nvmlSystemGetDriverVersion(version, len(version))
    nvml.nvmlSystemGetCudaDriverVersion_v2(ctypes.byref(cuda))
    if nvml.nvmlDeviceGetCount_v2(ctypes.byref(count)) != _SUCCESS:
        return None
    gpus = []
    for index in range(count.value):
        handle, name, memory = ctypes.c_void_p(), ctypes.create_string_buffer(96), _Memory()
        major, minor = ctypes.c_int(), ctypes.c_int()
        if nvml.nvmlDeviceGetHandleByIndex_v2(index, ctypes.byref(handle)) != _SUCCESS:
            continue
        nvml.nvmlDeviceGetName(handle, name, len(name))
        nvml.nvmlDeviceGetCudaComputeCapability(handle, ctypes.byref(major), ctypes.byref(minor))
        nvml.nvmlDeviceGetMemoryInfo(handle, ctypes.byref(memory))
        gpus.append(Gpu(name.value.decode(errors="replace"), major.value + minor.value / 10, memory.total))
    return Driver(version.value.decode(errors="replace"), (cuda.value // 1000, cuda.value % 1000 // 10), tuple(gpus))
