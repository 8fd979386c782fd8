"""Count the bytes of live tensors of a training step, by kind.

They are counted at their peak, which the memory model predicts.
"""

from __future__ import annotations

import time
import weakref
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Any

import torch
from megatron.core.parallel_state import get_global_memory_buffer
from torch.nn.modules.module import register_module_forward_hook, register_module_forward_pre_hook
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_iter

from megatron_cp.training.setup import Run

# Where a tensor is made -> its kind; the innermost module that has one decides.
_KINDS = {
    "self_attention": "activations: attention",
    "rotary_pos_emb": "activations: attention",
    "mlp": "activations: mlp",
    "experts": "activations: experts",
    "mixer": "activations: mamba",
    "output_layer": "logits",
}
RESIDUAL = "activations: residual"
WORK = "buffers"
NEAR = 0.02  # of the peak: other moments that hold almost as much
# Seconds for gloo's threads. One of them holds the tensors of a collective until it runs again, after wait() returned,
# and needs Python's lock to free them. NCCL has no such threads.
_LET_GO = 0.002


@dataclass(frozen=True)
class Origin:
    """Where a tensor's memory was first seen."""

    kind: str
    module: str
    operation: str
    shape: tuple[int, ...]


class LiveMemory(TorchDispatchMode):
    """Follow every tensor's storage from the operation that makes it to its end.

    The end is when the storage is freed.

    peaks: bytes by kind when the sum was largest in each module, forward and backward. moments: at each local maximum
    of the sum within ``NEAR`` of the largest one so far. origins: bytes by origin at the largest, to look into.
    """

    def __init__(self, run: Run) -> None:
        super().__init__()
        self._live: dict[int, tuple[weakref.ref, int, Origin]] = {}
        self._now: Counter[str] = Counter()
        self.peaks: dict[str, Counter[str]] = {}
        self._highest: Counter[str] = Counter()  # sum of each of them
        self.moments: dict[frozenset[tuple[str, int]], None] = {}  # each once
        self._peak_total = self._total = 0
        self._rises = False
        self.origins: Counter[Origin] = Counter()
        self._modules: list[tuple[str, str]] = []
        self._names = {module: name for chunk in run.model for name, module in chunk.named_modules()}
        self.detailed = False
        self._communicated = False
        for buffer in get_global_memory_buffer().buffer.values():  # that of gathered tokens stays
            self._see(buffer, Origin(WORK, "gathered", "", tuple(buffer.shape)))
        for kind, tensor in states_of(run):
            self._see(tensor, Origin(kind, "", "", tuple(tensor.shape)))

    def see_batches(self, microbatches: Any) -> None:
        """Record the tensors of a batch, which other threads have made."""
        for microbatch in microbatches:
            values = microbatch if isinstance(microbatch, dict) else vars(microbatch)
            for value in values.values():
                if isinstance(value, torch.Tensor):
                    self._see(value, Origin(WORK, "batch", "", tuple(value.shape)))

    def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        communicates = function.namespace == "c10d"
        if self._communicated and not communicates:
            time.sleep(_LET_GO)
        self._communicated = communicates
        output = function(*args, **(kwargs or {}))
        if self._modules and torch._C._current_graph_task_id() == -1:
            self._claim(args)
        for tensor in tree_iter(output):
            if isinstance(tensor, torch.Tensor):
                self._see(tensor, function)
        return output

    def _claim(self, args: Any) -> None:
        """Count a received tensor as the residual stream once a layer reads it."""
        for tensor in args:
            if isinstance(tensor, torch.Tensor):
                known = self._live.get(id(tensor.untyped_storage()))
                if known is not None and known[2].kind == WORK and known[2].operation.startswith("aten.empty"):
                    reference, size, origin = known
                    self._live[id(tensor.untyped_storage())] = reference, size, replace(origin, kind=RESIDUAL)
                    self._now[WORK] -= size
                    self._now[RESIDUAL] += size

    def _see(self, tensor: torch.Tensor, made_by: Any) -> None:
        storage = tensor.untyped_storage()
        key = id(storage)
        known = self._live.get(key)
        size = storage.nbytes()
        if known is not None and known[0]() is storage:
            if known[1] == size:
                return
            self._forget(key, known[0])
        if not size:
            return
        kind, module = self._where()
        if not isinstance(made_by, Origin):
            made_by = Origin(kind, module, str(made_by), tuple(tensor.shape))
        reference = weakref.ref(storage, lambda dead, key=key: self._forget(key, dead))
        self._live[key] = reference, size, made_by
        self._now[made_by.kind] += size
        self._total += size
        self._rises = True
        if self._total > self._highest[module]:
            self._highest[module], self.peaks[module] = self._total, self._now.copy()
        if self._total > self._peak_total:
            self._peak_total = self._total
            if self.detailed:
                self.origins = Counter()
                for _, each, origin in self._live.values():
                    self.origins[origin] += each

    def _forget(self, key: int, reference: weakref.ref) -> None:
        known = self._live.get(key)
        if known is not None and known[0] is reference:
            if self._rises and self._total >= (1 - NEAR) * self._peak_total:
                self.moments[frozenset(self._now.items())] = None
            self._rises = False
            _, size, origin = self._live.pop(key)
            self._now[origin.kind] -= size
            self._total -= size

    def _where(self) -> tuple[str, str]:
        backward = torch._C._current_graph_task_id() != -1
        kind, name = self._modules[-1] if self._modules else (WORK, "")
        return (WORK if backward else kind), name + (" backward" if backward else "")

    def _enter(self, module: torch.nn.Module, inputs: Any) -> None:
        name = self._names.get(module, "")
        kind = next((_KINDS[part] for part in reversed(name.split(".")) if part in _KINDS), RESIDUAL)
        if (kind.endswith("mlp") and hasattr(module, "router")) or (
            kind.endswith("mlp") and self._modules and self._modules[-1][0] == _KINDS["experts"]
        ):
            kind = _KINDS["experts"]
        self._modules.append((kind, name))

    def _leave(self, module: torch.nn.Module, inputs: Any, output: Any) -> None:
        for tensor in tree_iter(output):  # tables of angles, which a cache has kept since before
            if isinstance(tensor, torch.Tensor):
                self._see(tensor, "cached")
        self._modules.pop()

    def __enter__(self) -> LiveMemory:
        self._hooks = [
            register_module_forward_pre_hook(self._enter),
            register_module_forward_hook(self._leave, always_call=True),
        ]
        return super().__enter__()

    def __exit__(self, *args: Any) -> None:
        for hook in self._hooks:
            hook.remove()
        super().__exit__(*args)


def states_of(run: Run) -> Iterator[tuple[str, torch.Tensor]]:
    """Return what lives as long as the run, by kind.

    These are weights, gradients and the optimizer's state.
    """
    for chunk in run.model:
        for buffer in [*chunk.buffers, *chunk.expert_parallel_buffers]:
            if buffer.param_data is not None:
                yield "weights", buffer.param_data
            yield "gradients", buffer.grad_data
        for parameter in chunk.parameters():
            yield "weights", parameter.data
        for buffer in chunk.module.buffers():
            yield "weights", buffer
    for optimizer in getattr(run.optimizer, "chained_optimizers", [run.optimizer]):
        for group in optimizer.param_groups:
            for parameter in group["params"]:
                yield "optimizer", parameter.data
        for state in optimizer.optimizer.state.values():
            for value in state.values():
                if isinstance(value, torch.Tensor):
                    yield "optimizer", value


@contextmanager
def counted(run: Run, detailed: bool = False) -> Iterator[LiveMemory]:
    memory = LiveMemory(run)
    memory.detailed = detailed
    with memory:
        yield memory
