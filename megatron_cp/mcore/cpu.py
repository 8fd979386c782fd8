"""megatron-core 0.19.2 on a machine without CUDA.

megatron-core names the CUDA device in some two hundred places. On a machine without one each of the names replaced
here could only have raised (or, in one case, queued a callback for ever), so nothing that worked is changed, and
where CUDA is present this module does nothing. ``torch.cuda.is_available`` and ``device_count`` keep answering truly.
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

# megatron-core takes the fused optimizers and norms of the first three where they can be imported, whatever device its
# tensors are on; and without a driver importing the first one raises something else than the ImportError that is
# expected. The others take seconds to import.
PACKAGES_FOR_GPUS = ("transformer_engine", "apex", "amp_C", "mamba_ssm", "causal_conv1d")

_torch_compile: Callable | None = None


class _Stream:
    """A CPU has one queue: streams wait for nothing."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        self.device = _CPU

    def wait_stream(self, stream: _Stream) -> None: ...

    def wait_event(self, event: _Event) -> None: ...

    def record_event(self, event: _Event | None = None) -> _Event:
        event = event or _Event()
        event.record()
        return event

    def synchronize(self) -> None: ...

    def query(self) -> bool:
        return True

    def __enter__(self) -> _Stream:
        return self

    def __exit__(self, *exc: object) -> None: ...


class _Event:
    """Keeps wall time, so that timers built on events still measure."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        self._time = 0.0

    def record(self, stream: _Stream | None = None) -> None:
        self._time = time.perf_counter()

    def wait(self, stream: _Stream | None = None) -> None: ...

    def synchronize(self) -> None: ...

    def query(self) -> bool:
        return True

    def elapsed_time(self, end: _Event) -> float:
        return (end._time - self._time) * 1e3


class _TorchOnCpu:
    """What a module sees as ``torch``: the same, but its tensor factories read "cuda" as "cpu" and pin nothing."""

    def __getattr__(self, name: str) -> Any:
        value = getattr(torch, name)
        if name in _TENSOR_FACTORIES:
            value = _on_cpu(value)
        if name in _TENSOR_FACTORIES or isinstance(value, type):
            setattr(self, name, value)  # the next look-up is a plain attribute
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
    """The name of a host tensor's type, which also equals the name of the CUDA type of the same dtype.

    megatron-core's optimizers compare ``tensor.type()`` with the latter.
    """

    __hash__ = str.__hash__

    def __eq__(self, other: object) -> bool:
        return other in (str(self), self.replace("torch.", "torch.cuda.", 1))

    def __ne__(self, other: object) -> bool:
        return not self == other


def _named_for_both(original: Callable) -> Callable:
    """``Tensor.type()``, as optimizers ask for it."""

    def type_(self: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
        found = original(self, *args, **kwargs)
        return _TypeName(found) if isinstance(found, str) else found

    return type_


def before_import() -> None:
    """Put the stand-ins in place; nothing where CUDA is present."""
    global _torch_compile
    if torch.cuda.is_available():
        return
    for package in PACKAGES_FOR_GPUS:
        sys.modules.setdefault(package, None)  # type: ignore[arg-type]  # how Python itself writes "cannot be imported"
    for name, stand_in in _CUDA_STAND_INS.items():
        setattr(torch.cuda, name, stand_in)
    torch.cuda.random.get_rng_state = _rng_state
    torch.Tensor.cuda = lambda self, *args, **kwargs: self  # type: ignore[method-assign]
    torch.Tensor.type = _named_for_both(torch.Tensor.type)  # type: ignore[method-assign]
    # Functions marked for fusion would be compiled in the first step: half a minute and a C++ compiler, for no gain.
    _torch_compile, torch.compile = torch.compile, _identity  # type: ignore[assignment]


def _identity(function: Callable, *args: Any, **kwargs: Any) -> Callable:
    return function


def after_import() -> None:
    """Finish once megatron.core's own modules exist; nothing where CUDA is present."""
    if torch.cuda.is_available():
        return
    torch_on_cpu = _TorchOnCpu()
    for name in _MODULES_WITH_CUDA_LITERALS:
        importlib.import_module(name).torch = torch_on_cpu  # type: ignore[attr-defined]

    from megatron.core import jit
    from megatron.core.tensor_parallel import random
    from megatron.core.transformer.moe import token_dispatcher

    jit.disable_jit_fuser()  # for the modules that are imported later
    if _torch_compile is not None:
        torch.compile = _torch_compile
    # Upstream queues the new state with CUDA's lazy initialization, which never comes.
    random._set_cuda_rng_state = _set_rng_state
    # Host and device are the same generator here, so a fork of the "device" state always changes the host's.
    logging.getLogger(random.__name__).addFilter(lambda record: "CPU RNG state changed" not in record.getMessage())
    token_dispatcher.maybe_move_tensor_to_cpu = _host_splits


def _host_splits(tensor: torch.Tensor | None, as_numpy: bool = False, record_stream: bool = False) -> Any:
    """The all-to-all needs its split sizes as host integers; upstream converts device tensors only."""
    if isinstance(tensor, torch.Tensor) and as_numpy:
        return tensor.numpy()
    return tensor
