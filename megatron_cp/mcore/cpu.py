"""Run megatron-core 0.19.2 without CUDA.

megatron-core refers to the CUDA device in about two hundred places. Without CUDA, every name replaced here raises (or,
in one case, queues a callback for ever), so nothing that works changes. With CUDA this module does nothing.
``torch.cuda.is_available`` and ``device_count`` keep their answers.
"""

from __future__ import annotations

import contextlib
import functools
import importlib
import logging
import sys
import time
from collections.abc import Callable
from typing import Any

import torch

_CPU = torch.device("cpu")

# Modules whose functions create tensors with a literal device="cuda" or pinned memory.
_MODULES_WITH_CUDA_LITERALS = (
    "megatron.core.dist_checkpointing.exchange_utils",
    "megatron.core.dist_checkpointing.strategies.state_dict_saver",
    "megatron.core.models.common.embeddings.rope_utils",
    "megatron.core.models.hybrid.hybrid_block",
    "megatron.core.optimizer.clip_grads",
    "megatron.core.optimizer.grad_scaler",
    "megatron.core.optimizer.optimizer",
    "megatron.core.pipeline_parallel.schedules",
    "megatron.core.transformer.moe.token_dispatcher",
    "megatron.core.utils",
)
_TENSOR_FACTORIES = ("tensor", "empty", "empty_like", "zeros", "zeros_like", "ones", "full", "arange")

# megatron-core uses fused optimizers and norms of the first three whenever they import, on any device. Without a driver
# the first raises another error than the expected ImportError. The others take seconds to import.
PACKAGES_FOR_GPUS = ("transformer_engine", "apex", "amp_C", "mamba_ssm", "causal_conv1d")

_torch_compile, _tensor_type = torch.compile, torch.Tensor.type


class _Stream:
    """A stream of the single CPU queue; never waits."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        self.device = _CPU

    def synchronize(self, *awaited: object) -> None: ...

    wait_stream = wait_event = synchronize

    def record_event(self, event: _Event | None = None) -> _Event:
        event = event or _Event()
        event.record()
        return event

    def query(self) -> bool:
        return True


class _Event:
    """An event with wall time, so that event-based timers work."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        self._time = 0.0

    def record(self, stream: _Stream | None = None) -> None:
        self._time = time.perf_counter()

    def synchronize(self, stream: _Stream | None = None) -> None: ...

    wait = synchronize

    def query(self) -> bool:
        return True

    def elapsed_time(self, end: _Event) -> float:
        return (end._time - self._time) * 1e3


class _TorchOnCpu:
    """A stand-in for the ``torch`` module.

    Tensor factories read "cuda" as "cpu" and ignore pinning.
    """

    def __getattr__(self, name: str) -> Any:
        value = getattr(torch, name)
        if name in _TENSOR_FACTORIES:
            value = _on_cpu(value)
        if name in _TENSOR_FACTORIES or isinstance(value, type):
            setattr(self, name, value)  # later look-ups are plain attributes
        return value


def _on_cpu(factory: Callable) -> Callable:
    @functools.wraps(factory)
    def create(*args: Any, **kwargs: Any) -> torch.Tensor:
        device = kwargs.get("device")
        if device is not None and torch.device(device).type == "cuda":
            kwargs["device"] = _CPU
        kwargs.pop("pin_memory", None)
        return factory(*args, **kwargs)

    return create


def _rng_state(device: Any = None) -> torch.Tensor:
    return torch.get_rng_state()


def _set_rng_state(new_state: torch.Tensor, device: Any = None, graph_safe: bool = False) -> None:
    torch.set_rng_state(new_state)


_default_stream = _Stream()

_CUDA_STAND_INS: dict[str, Any] = {
    "current_device": lambda: _CPU,
    "set_device": lambda device: None,
    "synchronize": lambda device=None: None,
    "empty_cache": lambda: None,
    "current_stream": lambda device=None: _default_stream,
    "default_stream": lambda device=None: _default_stream,
    "stream": lambda stream: contextlib.nullcontext(stream),
    "Stream": _Stream,
    "Event": _Event,
    "get_rng_state": _rng_state,
    "set_rng_state": _set_rng_state,
    "manual_seed": torch.manual_seed,
}


class _TypeName(str):
    """Type name of a host tensor that also equals the CUDA type of the same dtype.

    megatron-core's optimizers compare ``tensor.type()`` with the CUDA name.
    """

    __hash__ = str.__hash__

    def __eq__(self, other: object) -> bool:
        return other in (str(self), self.replace("torch.", "torch.cuda.", 1))

    def __ne__(self, other: object) -> bool:
        return not self == other


def _type(self: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
    found = _tensor_type(self, *args, **kwargs)
    return _TypeName(found) if isinstance(found, str) else found


def before_import() -> None:
    """Install the stand-ins; does nothing with CUDA."""
    if torch.cuda.is_available():
        return
    for package in PACKAGES_FOR_GPUS:
        sys.modules.setdefault(package, None)  # type: ignore[arg-type]  # how Python marks a failed import
    for name, stand_in in _CUDA_STAND_INS.items():
        setattr(torch.cuda, name, stand_in)
    torch.cuda.random.get_rng_state = _rng_state
    torch.Tensor.cuda = lambda self, *args, **kwargs: self  # type: ignore[method-assign]
    torch.Tensor.type = _type  # type: ignore[assignment,method-assign]
    # Compiling fused functions would take half a minute and a C++ compiler, for no gain.
    torch.compile = _identity  # type: ignore[assignment]


def _identity(function: Callable, *args: Any, **kwargs: Any) -> Callable:
    return function


def after_import() -> None:
    """Finish after the import of megatron.core; does nothing with CUDA."""
    if torch.cuda.is_available():
        return
    torch_on_cpu = _TorchOnCpu()
    for name in _MODULES_WITH_CUDA_LITERALS:
        importlib.import_module(name).torch = torch_on_cpu  # type: ignore[attr-defined]

    from megatron.core import jit
    from megatron.core.tensor_parallel import random
    from megatron.core.transformer.moe import token_dispatcher

    jit.disable_jit_fuser()  # for the modules that are imported later
    torch.compile = _torch_compile
    # Upstream queues the new state with CUDA's lazy initialization, which never comes.
    random._set_cuda_rng_state = _set_rng_state
    # Host and device are the same generator here, so a fork of the "device" state always changes the host's.
    logging.getLogger(random.__name__).addFilter(lambda record: "CPU RNG state changed" not in record.getMessage())
    token_dispatcher.maybe_move_tensor_to_cpu = _host_splits


def _host_splits(tensor: torch.Tensor | None, as_numpy: bool = False, record_stream: bool = False) -> Any:
    """Return split sizes as host integers for the all-to-all.

    Upstream converts device tensors only.
    """
    if isinstance(tensor, torch.Tensor) and as_numpy:
        return tensor.numpy()
    return tensor
