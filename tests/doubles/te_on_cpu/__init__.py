"""Run the real Python of Transformer Engine on a machine without a GPU.

PyTorch computes its kernels. Transformer Engine is a Python package over a compiled extension,
``transformer_engine_torch``. The Python part decides what is communicated, in which order and format; the extension
computes. The Python part is published as a package of its own (``transformer-engine``, a megabyte). :func:`load`
imports it over :mod:`tests.doubles.te_on_cpu.extension`, which has the kernels' signatures and documented results. So
our use of Transformer Engine is tested against its real Python. Not covered is what the kernels themselves do: speed,
rounding, streams.

Tests run with the version that ``scripts/setup.sh`` installs. To try another version from 2.10 to 2.20 by hand::

    pip install --no-deps --target FOLDER transformer-engine==VERSION
    export MEGATRON_CP_TE_FOLDER=FOLDER CUDA_VISIBLE_DEVICES=""
    pytest tests/doubles/te_on_cpu/support.py  # the table of attention/modules/te_support.py
    pytest tests/doubles/te_on_cpu/layers.py -m "not slow"  # models train with its layers as with ours
    pytest -m gpu tests/unit_tests/attention/modules/test_te_equivalence.py -k layer  # its attention in bf16
"""

from __future__ import annotations

import functools
import importlib
import importlib.util
import os
import sys
import warnings
from collections.abc import Callable
from importlib.machinery import ModuleSpec
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any
from unittest.mock import MagicMock

import torch
from torch.overrides import TorchFunctionMode

from tests.doubles import pretend_gpu, triton_on_cpu

FOLDER = "MEGATRON_CP_TE_FOLDER"  # environment variable: folder of the package transformer-engine


# Modules that choose Transformer Engine's layers and create its stream.
_MODULES_WITH_LAYERS = ("megatron_cp.models.layer_specs", "megatron_cp.attention.modules.te")


class _OnCpu(TorchFunctionMode):
    """Mode that replaces the CUDA device by the CPU.

    Transformer Engine names the CUDA device in many places.
    """

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        device = kwargs.get("device")
        if device is not None and torch.device(device).type == "cuda":
            kwargs["device"] = torch.device("cpu")
        return func(*args, **kwargs)


def _device_of_a_hopper(device: Any = None) -> SimpleNamespace:
    return SimpleNamespace(major=9, minor=0, multi_processor_count=132, name="stand-in", total_memory=141 * 2**30)


def _is_available() -> bool:
    caller = sys._getframe(1).f_globals.get("__name__", "")
    return caller.startswith("transformer_engine") or caller in _MODULES_WITH_LAYERS


def _is_cuda(tensor: torch.Tensor) -> bool:
    return sys._getframe(1).f_globals.get("__name__", "").startswith("transformer_engine")


class _Once:
    """Message that can be waited for repeatedly, as with NCCL.

    The staged backend allows this as well. gloo allows one wait.
    """

    def __init__(self, work: Any) -> None:
        self._work = work

    def wait(self) -> None:
        if self._work is not None:
            self._work.wait()
        self._work = None


def _waiting_once(rings: Any) -> None:
    original = rings.flash_attn_p2p_communicate
    rings.flash_attn_p2p_communicate = lambda *args: [_Once(work) for work in original(*args)]


class _WithFloat32:
    """Module that Transformer Engine's attention gets as ``torch``.

    Its float16 is float32. The kernels take half precision only, so the Python part refuses all else. The kernels here
    take float32 too, and layouts differ by rounding alone.
    """

    float16 = torch.float32

    def __getattr__(self, name: str) -> Any:
        return getattr(torch, name)


class _WithPlaceholders:
    """Module that Transformer Engine's layers get as ``torch``.

    It creates placeholders on the CPU. A weight's gradient that was added to the sum has a placeholder. It is made on
    the device in the backward pass, where no mode is active.
    """

    def __getattr__(self, name: str) -> Any:
        return getattr(torch, name)

    @staticmethod
    def empty(*shape: Any, device: Any = None, **kwargs: Any) -> torch.Tensor:
        tensor = torch.empty(*shape, **kwargs)
        if pretend_gpu.loaded() and device is not None and torch.device(device).type == "cuda":
            pretend_gpu.placement.put(tensor, pretend_gpu.placement.GPU)
        return tensor


def _choose_as_for_bf16() -> None:
    """Make ``attention_backend`` and ``transformer_impl`` choose as in bf16."""
    from megatron_cp.models import layer_specs

    def as_for_bf16(choose: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        return choose(*args, **kwargs | {"fp32": False})

    for name in ("choose_backend", "has_te_layers"):
        setattr(layer_specs, name, functools.partial(as_for_bf16, getattr(layer_specs, name)))


class _Unused(ModuleType):
    """Module whose names are imported but never called."""

    def __init__(self, name: str) -> None:
        super().__init__(name)
        self.__spec__ = ModuleSpec(name, None)

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        return MagicMock(name=name)


def _believe_in_a_gpu() -> None:
    """Report a GPU to Transformer Engine and to code that looks for it.

    All other code gets the CPU.
    """
    from megatron_cp.mcore import cpu

    cpu.before_import()  # this also keeps megatron-core from compiling
    torch.cuda.get_device_properties = _device_of_a_hopper  # type: ignore[assignment]
    torch.cuda.get_device_capability = lambda device=None: (9, 0)  # type: ignore[assignment]
    torch.cuda.is_available = _is_available
    torch.cuda.is_current_stream_capturing = lambda: False
    torch.Tensor.is_cuda = property(_is_cuda)  # type: ignore[assignment]
    _OnCpu().__enter__()


def load() -> None:
    """Import Transformer Engine from the folder in the environment.

    Imports megatron-core after it, which must find it.
    """
    if torch.cuda.is_available() and not pretend_gpu.loaded():
        raise RuntimeError("there is a GPU: use the real Transformer Engine")
    if "megatron.core.extensions.transformer_engine" in sys.modules:
        raise RuntimeError("megatron-core has looked for Transformer Engine already")
    folder = Path(os.environ[FOLDER])
    sys.path.insert(0, str(folder))  # before an installed real one

    from tests.doubles.te_on_cpu import extension
    from tests.doubles.te_on_cpu.cross_entropy import KERNELS

    if not pretend_gpu.loaded():
        _believe_in_a_gpu()
    sys.modules.pop("transformer_engine", None)  # the package must not be used without a GPU, except here
    sys.modules["transformer_engine_torch"] = extension
    triton_on_cpu.interpret()
    # Further modules of the extension's package; nothing is exported here.
    for name in ("onnx", "onnxscript"):
        sys.modules.setdefault(name, _Unused(name))
    os.environ["NVTE_PROJECT_BUILDING"] = "1"  # otherwise its libraries would be loaded
    # Otherwise each rank compiles its fused functions for the CPU, which takes half a minute.
    os.environ["NVTE_TORCH_COMPILE"] = "0"
    spec = importlib.util.find_spec("transformer_engine")
    if spec is None or spec.loader is None:
        raise FileNotFoundError(f"no transformer_engine in {folder}")
    package = importlib.util.module_from_spec(spec)
    sys.modules["transformer_engine"] = package
    common = importlib.import_module("transformer_engine.common")
    common.load_framework_extension = lambda framework: None
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        spec.loader.exec_module(package)
        importlib.import_module("transformer_engine.pytorch")
        attention = "transformer_engine.pytorch.attention.dot_product_attention"
        for name in ("utils", "backends"):
            importlib.import_module(f"{attention}.{name}").torch = _WithFloat32()
        importlib.import_module("transformer_engine.pytorch.module.base").torch = _WithPlaceholders()
        losses = importlib.import_module("transformer_engine.pytorch.triton.cross_entropy")
        for name, kernel in KERNELS.items():
            setattr(losses, name, kernel)
        _waiting_once(importlib.import_module(f"{attention}.context_parallel"))
    _choose_as_for_bf16()
