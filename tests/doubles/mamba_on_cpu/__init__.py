"""Run mamba-ssm's real kernels without a GPU, in Triton's interpreter.

``mamba_split_conv1d_scan_combined`` computes Mamba layers on a GPU. It is Python over Triton kernels and over
causal-conv1d, which is Python over a compiled extension. :func:`load` imports the real Python of both packages. Triton
interprets the kernels, and :mod:`tests.doubles.mamba_on_cpu.extension` replaces the extension. Our calls are tested
against what the packages really accept and compute. Not covered: speed, Triton's compiler, the extension's kernels and
GPU memory.
"""

from __future__ import annotations

import contextlib
import importlib
import os
import sys
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import torch

from tests.doubles import pretend_gpu
from tests.doubles.triton_on_cpu import interpret

FOLDER = "MEGATRON_CP_MAMBA_FOLDER"  # environment variable: folder of mamba-ssm and causal-conv1d


def _one_of(configurations: list[Any]) -> list[Any]:
    """Choose the middle of a kernel's block sizes instead of tuning.

    These sizes are not slow here.
    """

    def work(configuration: Any) -> int:
        product = 1
        for size in configuration.kwargs.values():
            product *= size
        return product

    return [sorted(configurations, key=work)[len(configurations) // 2]]


def load() -> None:
    """Import mamba-ssm from the folder in the environment.

    It computes all Mamba layers, except those in float64. On a pretended GPU it computes the layers that it would
    compute on a real one.
    """
    pretended = pretend_gpu.loaded()
    if torch.cuda.is_available() and not pretended:
        raise RuntimeError("there is a GPU: use the real mamba-ssm")
    folder = Path(os.environ[FOLDER])
    sys.path.insert(0, str(folder))  # before an installed real one
    interpret()
    importlib.import_module("megatron.core")  # mamba-ssm hides them without a GPU, and on a pretended one
    for package in ("mamba_ssm", "causal_conv1d"):
        del sys.modules[package]
    import triton

    autotune = triton.autotune
    triton.autotune = lambda configs, *args, **kwargs: autotune(_one_of(configs), *args, **kwargs)
    if not pretended:  # launch options of kernels
        torch.cuda.device = lambda device: contextlib.nullcontext()  # type: ignore[assignment, misc]
        torch.cuda.get_device_properties = lambda device=None: SimpleNamespace(multi_processor_count=132)

    from tests.doubles.mamba_on_cpu import extension

    sys.modules["causal_conv1d_cuda"] = extension
    sys.modules["selective_scan_cuda"] = ModuleType("selective_scan_cuda")  # Mamba-1's, never called
    from megatron_cp.models.layers.mamba import kernel

    if kernel.fused_kernel is None:
        raise FileNotFoundError(f"no mamba_ssm and causal_conv1d in {folder}")
    if not pretended:
        kernel.prefers_fused_kernel = lambda x: x.dtype != torch.float64
