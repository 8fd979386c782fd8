"""Track which tensors a GPU would hold, and refuse what it would refuse.

All tensors are in host memory. The storage carries a mark of its pretended place. ``tensor.device`` and similar
attributes return the mark, ``tensor.to`` changes it, and two modes maintain the marks:

- :class:`Placement` is between Python and torch: ``device="cuda"`` becomes a mark.
- :class:`Kernels` is between torch and its kernels, in backward passes too. It refuses a kernel that gets tensors of
  both places, and an NCCL message of a host tensor, as CUDA and NCCL do. It counts operations that make the host wait
  for the device, with the line that caused them.

A tensor created inside torch (autograd's zeros, numpy's memory) has no mark, and gets the mark of the first tensors
that it is used with.
"""

from __future__ import annotations

import collections
import sys
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode

from tests.doubles.pretend_gpu import messages
from tests.doubles.pretend_gpu.messages import tensors_in

GPU, HOST = "cuda", "cpu"
waits: collections.Counter[str] = collections.Counter()  # "file:line what" -> how often the host waited there


class TooEarly(RuntimeError):
    """Kernel that got a buffer which a message still reads or writes."""


class WrongPlace(RuntimeError):
    """Kernel or message that got a tensor of the wrong place."""


def place_of(tensor: Tensor) -> str | None:
    try:
        return getattr(tensor.untyped_storage(), "pretended_place", None)
    except (RuntimeError, NotImplementedError):  # a tensor without storage
        return None


def put(tensor: Tensor, place: str) -> None:
    if place == GPU:
        torch.cuda._lazy_init()
    if not tensor.is_meta:
        tensor.untyped_storage().pretended_place = place  # type: ignore[attr-defined]


def is_pinned(tensor: Tensor) -> bool:
    return getattr(tensor.untyped_storage(), "pretended_pinned", False)


def _pin(tensor: Tensor, device: Any = None) -> Tensor:
    if place_of(tensor) == GPU:
        raise RuntimeError("only dense CPU tensors can be pinned")
    if is_pinned(tensor):
        return tensor
    result = tensor.clone(memory_format=torch.contiguous_format)
    put(result, HOST)
    result.untyped_storage().pretended_pinned = True  # type: ignore[attr-defined]
    return result


def host_waits(why: str) -> None:
    waits[f"{_asked_for()} {why}"] += 1


def _asked_for() -> str:
    """Return the nearest line outside of torch and of this package."""
    frame: Any = sys._getframe(1)
    while frame is not None:
        name = frame.f_code.co_filename
        if "/torch/" not in name and "pretend_gpu" not in name and not name.startswith("<"):
            return f"{'/'.join(name.split('/')[-3:])}:{frame.f_lineno}"
        frame = frame.f_back
    return "autograd"


def _wanted(device: Any) -> str:
    """Return the place that a ``device=`` means.

    "cuda:0", 0 and torch.device("cuda") are all the GPU.
    """
    return GPU if isinstance(device, int) or torch.device(device).type == "cuda" else HOST


def _really(device: Any) -> str:
    return "meta" if str(device) == "meta" else "cpu"


def _on_gpu(tensor: Tensor) -> bool:
    return place_of(tensor) == GPU


def _device(tensor: Tensor) -> torch.device:
    if _on_gpu(tensor):
        return torch.device(GPU, torch.cuda.current_device())
    with torch._C.DisableTorchFunction():
        return torch._C.TensorBase.device.__get__(tensor)  # type: ignore[attr-defined]


def _really_call(method: str, tensor: Tensor, *args: Any, **kwargs: Any) -> Any:
    """Call torch's own method; with a mode active torch would call the replacement."""
    with torch._C.DisableTorchFunction():
        return getattr(torch._C.TensorBase, method)(tensor, *args, **kwargs)


def _type(tensor: Tensor, dtype: Any = None, **kwargs: Any) -> Any:
    if dtype is not None:
        return _really_call("type", tensor, dtype, **kwargs)
    name = _really_call("type", tensor)
    return name.replace("torch.", "torch.cuda.", 1) if _on_gpu(tensor) else name


def _numpy(tensor: Tensor, **kwargs: Any) -> Any:
    if _on_gpu(tensor):
        raise TypeError("can't convert cuda:0 device type tensor to numpy. Use Tensor.cpu() first.")
    return _really_call("numpy", tensor, **kwargs)


def _tolist(tensor: Tensor) -> Any:
    if _on_gpu(tensor):
        host_waits("tolist")
    return _really_call("tolist", tensor)


def _to(tensor: Tensor, *args: Any, **kwargs: Any) -> Tensor:
    rest, device = list(args), kwargs.pop("device", None)
    if isinstance(like := kwargs.pop("other", rest[0] if rest else None), Tensor):
        device, rest = like.device, [like.dtype, *rest[1:]]
    elif rest and not isinstance(rest[0], torch.dtype):
        device = rest.pop(0)
    kwargs = dict(zip(("dtype", "non_blocking", "copy"), rest, strict=False)) | kwargs
    if device is not None and _really(device) == "meta":
        kwargs["device"] = "meta"
    result = _really_call("to", tensor, **kwargs) if kwargs else tensor
    if result.is_meta:
        return result
    place = place_of(tensor) if device is None else _wanted(device)
    if place is None or place == place_of(tensor):
        return result
    if result.untyped_storage()._cdata == tensor.untyped_storage()._cdata:
        result = result.clone()
    non_blocking = bool(kwargs.get("non_blocking"))
    _copied(place, non_blocking, tensor if place == GPU else None)
    put(result, place)
    if place == HOST and non_blocking:
        result.untyped_storage().pretended_pinned = True  # type: ignore[attr-defined]  # torch pins it by itself
    return result


_STAGED_AT_ONCE = 16  # bytes, so that a tiny model's batches are not; CUDA waits for no copy of up to 64 KB


def _copied(to: str, non_blocking: bool, on_host: Tensor | None = None) -> None:
    """Count a copy as a wait of the host.

    Also a non-blocking one of memory that is not pinned: it is staged.
    """
    where = "device" if to == GPU else "host"
    if not non_blocking:
        host_waits(f"copy to the {where}")
    elif on_host is not None and on_host.nbytes > _STAGED_AT_ONCE and not is_pinned(on_host):
        host_waits(f"copy to the {where}, not pinned")


def answer_by_place() -> None:
    """Make tensors report their pretended place, and move by changing it."""
    tensor: Any = Tensor
    tensor.device = property(_device)
    tensor.is_cuda = property(_on_gpu)
    tensor.is_cpu = property(lambda self: not _on_gpu(self))
    tensor.get_device = lambda self: torch.cuda.current_device() if _on_gpu(self) else -1
    tensor.type, tensor.numpy, tensor.tolist, tensor.to = _type, _numpy, _tolist, _to
    tensor.cuda = lambda self, device=None, non_blocking=False, **kwargs: _to(self, GPU, non_blocking=non_blocking)
    tensor.cpu = lambda self, **kwargs: _to(self, HOST)
    tensor.pin_memory = _pin
    tensor.is_pinned = lambda self, device=None: is_pinned(self)
    tensor.record_stream = lambda self, stream: None


class Placement(TorchFunctionMode):
    """Mode for Python's view: the place of new tensors."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = dict(kwargs or {})
        if isinstance(func, torch._ops.OpOverload):  # a kernel, called by the mode below
            return func(*args, **kwargs)
        pinned = kwargs.pop("pin_memory", False)
        device, place = kwargs.get("device"), None
        if device is not None:
            kwargs["device"], place = _really(device), _wanted(device)
        result = func(*args, **kwargs)
        if pinned:
            return _pin(result)
        given = list(tensors_in([args, kwargs]))
        if place is None and not given and isinstance(result, Tensor) and place_of(result) is None:
            place = HOST
        if place is not None and isinstance(result, Tensor):
            if func is torch.as_tensor and given:
                return _to(result, place)
            if func in (torch.tensor, torch.as_tensor) and place == GPU:
                _copied(GPU, non_blocking=False)  # a list, or numpy's memory
            put(result, place)
        return result


_COPIES = {"copy_", "_to_copy", "_copy_from", "set_", "_foreach_copy_"}
_INDEXING = {"index", "index_put", "index_put_", "_index_put_impl_", "_unsafe_index", "_unsafe_index_put"}
_WAITING = {"_local_scalar_dense", "nonzero", "masked_select", "equal", "_unique2", "unique_dim", "unique_consecutive",
            "is_nonzero", "bincount"}  # fmt: skip


class Kernels(TorchDispatchMode):
    """Mode for the kernels: no kernel gets tensors of two places."""

    def __init__(self, gpu_kernels: dict[Any, Callable], goes_by_nccl: Callable[[Any], bool]) -> None:
        super().__init__()
        self._gpu_kernels = gpu_kernels
        self._goes_by_nccl = goes_by_nccl

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = dict(kwargs or {})
        namespace, name = func.namespace, func._schema.name.split("::")[1]
        placed = [(x, place_of(x)) for x in tensors_in([args, kwargs])]
        places = [place for _, place in placed]
        made_on_gpu = kwargs.get("device") is not None and _wanted(kwargs["device"]) == GPU  # where no mode was asked
        if made_on_gpu:
            kwargs["device"] = HOST
        if kwargs.get("pin_memory"):
            kwargs["pin_memory"] = False
        if namespace == "c10d":
            self._check_message(name, func, args, placed)
            return func(*args, **kwargs)
        if not func.is_view:
            self._check_time(name, func, args, kwargs)
        if GPU in places and name in _COPIES:
            if name != "_to_copy" and HOST in places:
                non_blocking = bool(kwargs.get("non_blocking") or args[-1] is True)
                _copied(places[0] or GPU, non_blocking, next(x for x, place in placed if place == HOST))
        elif GPU in places:
            self._check_kernel(name, args, placed)
        result = self._gpu_kernels.get(func, func)(*args, **kwargs)
        if made_on_gpu or GPU in places or HOST in places:
            for tensor in tensors_in(result):
                if place_of(tensor) is None:
                    put(tensor, GPU if made_on_gpu or GPU in places else HOST)
        return result

    def _check_time(self, name: str, func: Any, args: tuple, kwargs: dict[str, Any]) -> None:
        given: list[tuple[Tensor, bool]] = []
        for index, argument in enumerate(func._schema.arguments):
            value = args[index] if index < len(args) else kwargs.get(argument.name)
            written = argument.alias_info is not None and argument.alias_info.is_write
            given += [(tensor, written) for tensor in tensors_in(value)]
        if (why := messages.too_early(given)) is not None:
            raise TooEarly(f"{name} {why}, at {_asked_for()}")

    def _check_message(self, name: str, func: Any, args: tuple, placed: list[tuple[Tensor, str | None]]) -> None:
        group = next((x for x in args if isinstance(x, torch.ScriptObject) and "ProcessGroup" in str(x._type())), None)
        if group is None or not self._goes_by_nccl(group):
            return
        if name != "barrier" and any(place == HOST for _, place in placed):
            raise WrongPlace(f"NCCL was given a tensor in host memory: {_describe(name, placed)}")
        messages.write_down(name, func, args, dist.ProcessGroup.unbox(group))

    def _check_kernel(self, name: str, args: tuple, placed: list[tuple[Tensor, str | None]]) -> None:
        elsewhere = [x for x, place in placed if place == HOST]
        if name in _INDEXING and placed[0][1] == GPU:
            masks = any(x.dtype in (torch.bool, torch.uint8) for x in tensors_in(args[1]))
            if elsewhere:
                host_waits(f"{name} by what is on the host")
            if masks and not ("put" in name and args[2].numel() == 1):  # that is a masked fill
                host_waits(f"{name} by a mask")
        elif any(x.dim() or name in ("cat", "stack") for x in elsewhere):
            raise WrongPlace(f"Expected all tensors to be on the same device: {_describe(name, placed)}")
        elif name in _WAITING:
            host_waits(name)


def _describe(name: str, placed: list[tuple[Tensor, str | None]]) -> str:
    given = ", ".join(f"{tuple(x.shape)} on {place or 'either'}" for x, place in placed)
    return f"{name} of {given}, at {_asked_for()}"
