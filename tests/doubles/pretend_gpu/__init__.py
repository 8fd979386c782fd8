"""Pretend that the machine has a GPU: the code for a GPU runs on the CPU.

See :mod:`tests.doubles.pretend_gpu.placement`. Call ``load()`` before megatron-core is imported. From then on
``torch.cuda.is_available()`` is true, recipes choose bf16, CUDA and NCCL, our attention calls PyTorch's CUDA kernels,
and models are built on ``cuda``: in this process and in processes forked from it. gloo carries the messages. Not
covered is what only a device does: streams that overtake each other, rounding of kernels, memory, speed.
"""

from __future__ import annotations

import contextlib
import functools
import os
import sys
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed import distributed_c10d

from megatron_cp.mcore import cpu
from tests.doubles.pretend_gpu import messages, placement
from tests.doubles.pretend_gpu.kernels import KERNELS, cudnn_can
from tests.doubles.pretend_gpu.placement import Kernels, Placement

VARIABLE = "MEGATRON_CP_PRETEND_GPU"
GPUS = 8
_index = 0
# The process that started CUDA: this one, or one that it was forked from.
_started_in: int | None = None
_backward_in: int | None = None
_nccl: set[str] = set()  # names of the groups requested from NCCL


def _start() -> None:
    """Start CUDA at the first request to a device.

    It fails in a process forked after that.
    """
    global _started_in
    if _started_in not in (None, os.getpid()):
        raise RuntimeError("Cannot re-initialize CUDA in forked subprocess")
    _started_in = os.getpid()


def _starts(answer: Callable[..., Any]) -> Callable[..., Any]:
    def asked(*args: Any, **kwargs: Any) -> Any:
        _start()
        return answer(*args, **kwargs)

    return asked


def _set_device(device: Any) -> None:
    global _index
    _index = device if isinstance(device, int) else torch.device(device).index or 0


def _properties(device: Any = None) -> SimpleNamespace:
    return SimpleNamespace(major=9, minor=0, multi_processor_count=132, name="pretended GPU", total_memory=141 * 2**30)


def _stand_ins() -> dict[str, Any]:
    @_starts
    def wait(device: Any = None) -> None:
        placement.host_waits("synchronize")

    class Stream(cpu._Stream):
        def synchronize(self) -> None:
            placement.host_waits("synchronize a stream")

        def record_event(self, event: Any = None) -> Any:
            return super().record_event(event or Event())

        def is_capturing(self) -> bool:
            return False

    class Event(cpu._Event):
        def synchronize(self) -> None:
            placement.host_waits("synchronize an event")

    stream = Stream()
    return {
        **cpu._CUDA_STAND_INS,
        "Stream": Stream,
        "Event": Event,
        "current_stream": _starts(lambda device=None: stream),
        "default_stream": _starts(lambda device=None: stream),
        "synchronize": wait,
        "_lazy_init": _start,
        "_lazy_call": lambda function, **kwargs: function(),
        "default_generators": (torch.default_generator,) * GPUS,
        "is_available": lambda: True,
        "is_initialized": lambda: _started_in == os.getpid(),
        "device_count": lambda: GPUS,
        "current_device": _starts(lambda: _index),
        "set_device": _starts(_set_device),
        "device": lambda device: contextlib.nullcontext(),
        "get_device_name": _starts(lambda device=None: "pretended GPU"),
        "get_device_capability": _starts(lambda device=None: (9, 0)),
        "get_device_properties": _starts(_properties),
        "is_current_stream_capturing": lambda: False,
        "is_bf16_supported": lambda *args: True,
        "max_memory_allocated": lambda device=None: 2**20,
        "memory_allocated": lambda device=None: 2**20,
        "memory_reserved": lambda device=None: 2**20,
        "max_memory_reserved": lambda device=None: 2**20,
        "memory_stats": lambda device=None: {},
        "mem_get_info": _starts(lambda device=None: (2**37, 2**37)),
        "reset_peak_memory_stats": lambda device=None: None,
    }


def _named_nccl(backend: Any) -> bool:
    return backend is None or "nccl" in str(backend).lower()


def _with_gloo_for_nccl() -> None:
    """Create groups of NCCL with gloo, and record their names."""
    init, new = dist.init_process_group, dist.new_group

    def init_process_group(backend: Any = None, *args: Any, **kwargs: Any) -> None:
        nccl = _named_nccl(backend)
        kwargs.pop("device_id", None)
        init("gloo" if nccl else backend, *args, **kwargs)
        if nccl:
            _nccl.add(dist.group.WORLD.group_name)

    def new_group(ranks: Any = None, timeout: Any = None, backend: Any = None, *args: Any, **kwargs: Any) -> Any:
        asked = backend if backend is not None else dist.get_backend()
        nccl = _named_nccl(asked)
        kwargs.pop("device_id", None)
        kwargs.pop("pg_options", None)
        group = new(ranks, timeout, "gloo" if nccl else backend, *args, **kwargs)
        if nccl and isinstance(group, dist.ProcessGroup):
            _nccl.add(group.group_name)
        return group

    get_backend = dist.get_backend

    def backend_of(group: Any = None) -> str:
        found = group or dist.group.WORLD
        return "nccl" if found.group_name in _nccl else get_backend(group)

    for module in (dist, distributed_c10d):
        module.init_process_group = init_process_group
        module.new_group = new_group
        module.get_backend = backend_of
    object_device = distributed_c10d._get_object_coll_device
    distributed_c10d._get_object_coll_device = lambda group=None: (
        "cuda" if backend_of(group) == "nccl" else object_device(group)
    )


def _goes_by_nccl(group: Any) -> bool:
    return dist.ProcessGroup.unbox(group).group_name in _nccl


def loaded() -> bool:
    return bool(os.environ.get("MEGATRON_CP_TEST_BACKEND"))


def load() -> None:
    if torch.version.cuda is not None and torch._C._cuda_getDeviceCount() > 0:
        raise RuntimeError("there is a GPU: use it")
    os.environ["MEGATRON_CP_TEST_BACKEND"] = "nccl"
    for package in cpu.PACKAGES_FOR_GPUS:
        sys.modules.setdefault(package, None)  # type: ignore[arg-type]  # their kernels want a real one
    for name, stand_in in _stand_ins().items():
        setattr(torch.cuda, name, stand_in)
    torch.accelerator.current_stream = torch.cuda.current_stream
    torch.backends.cuda.can_use_cudnn_attention = cudnn_can
    torch.cuda.random.get_rng_state = torch.cuda.get_rng_state
    torch.cuda.nvtx = SimpleNamespace(range_push=lambda name: None, range_pop=lambda: None)
    placement.answer_by_place()
    torch.from_numpy = _of_the_host(torch.from_numpy)
    torch.frombuffer = _of_the_host(torch.frombuffer)
    torch.compile = lambda function=None, *args, **kwargs: function or (lambda f: f)
    _with_gloo_for_nccl()
    messages.observe()
    Kernels(KERNELS, _goes_by_nccl).__enter__()
    Placement().__enter__()
    _in_backward_passes_too()


def _in_backward_passes_too() -> None:
    """Intercept backward passes too.

    Torch calls what it intercepts without a mode, and a backward pass is such a call. On a GPU machine the first
    backward pass starts CUDA and a thread for it, even if all tensors are on the host. In a process forked from one
    with such threads it fails.
    """
    run = torch.autograd.graph._engine_run_backward

    @functools.wraps(run)
    def run_backward(*args: Any, **kwargs: Any) -> Any:
        global _backward_in
        if _backward_in not in (None, os.getpid()):
            raise RuntimeError("Unable to handle autograd's threading in combination with fork-based multiprocessing")
        _start()
        _backward_in = os.getpid()
        with contextlib.nullcontext() if torch._C._len_torch_function_stack() else Placement():
            return run(*args, **kwargs)

    for module in (torch.autograd, torch.autograd.graph):
        module._engine_run_backward = run_backward


def _of_the_host(function: Any) -> Any:
    @functools.wraps(function)
    def made(*args: Any, **kwargs: Any) -> Any:
        tensor = function(*args, **kwargs)
        placement.put(tensor, placement.HOST)
        return tensor

    return made
