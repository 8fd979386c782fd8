"""The ``staged`` torch.distributed backend: GPU tensors over gloo via host memory.

NCCL refuses two ranks on one GPU. With ``dist.distributed_backend=staged`` any number of ranks may share one, so all
communication can be tested on a single GPU. It is slow, for correctness and debugging: every message crosses the bus
twice and waits for the host.

How an operation runs:

1. The caller's stream copies the sent tensors into pinned memory, and the host waits for the copy. The caller may then
use its streams, but must not touch the tensors, as with any backend.
2. gloo carries the host copies, in its own threads.
3. ``wait`` waits for gloo on the host, and adds the copy to the device to the stream that is current *then*. Later work
in that stream sees the result, as after NCCL's ``wait``.

Only operations that this package and megatron-core call are implemented. Host tensors take the same path. Moved data
travel as bytes, in any dtype; reductions use gloo's dtypes. An average is a divided sum.
"""

# torch.distributed calls these methods in one way; the stub lists others.
# mypy: disable-error-code="override"

from __future__ import annotations

from collections.abc import Callable, Sequence
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed import Work

NAME = "staged"

Start = Callable[[list[Tensor], list[Tensor]], Any]


def register() -> None:
    """Register the backend with torch.distributed; repeated calls are harmless."""
    if not hasattr(dist.Backend, NAME.upper()):
        dist.Backend.register_backend(NAME, _create, devices=["cpu", "cuda"])


def to_host(tensors: Sequence[Tensor]) -> list[Tensor]:
    """Copy tensors to contiguous (pinned) host memory; complete on return."""
    copies = [host_like(tensor).copy_(tensor.detach(), non_blocking=True) for tensor in tensors]
    for device in {tensor.device for tensor in tensors if tensor.is_cuda}:
        torch.cuda.current_stream(device).synchronize()
    return copies


def host_like(tensor: Tensor) -> Tensor:
    """Return uninitialized contiguous host memory, pinned for a GPU tensor."""
    return torch.empty(tensor.shape, dtype=tensor.dtype, pin_memory=tensor.is_cuda)


def to_device(host: Tensor, tensor: Tensor) -> None:
    """Copy into ``tensor`` in the current stream of its device."""
    # ``data``: a receive is outside autograd, even if the tensor requires gradients. The allocator keeps pinned memory
    # until the copy is done.
    tensor.data.copy_(host, non_blocking=True)
    if tensor.is_cuda:
        # Keep the memory alive for this stream if the tensor belongs to another one.
        tensor.record_stream(torch.cuda.current_stream(tensor.device))


def as_bytes(tensor: Tensor) -> Tensor:
    """View contiguous memory as bytes [..., itemsize]; gloo knows fewer dtypes."""
    return tensor.unsqueeze(-1).view(torch.uint8)


class StagedWork(Work):
    """Pending operations and received tensors; ``wait`` may be called repeatedly.

    Args:
        works: pending work of gloo, or of this class.
        arriving: pairs of host memory and target tensor.
        divide_by: divisor of received values.
        kept: tensors that gloo reads until then.
    """

    def __init__(
        self,
        works: Sequence[Any],
        arriving: Sequence[tuple[Tensor, Tensor]] = (),
        divide_by: int = 1,
        kept: Sequence[Tensor] = (),
    ) -> None:
        super().__init__()
        self._works, self._kept = list(works), kept
        self._arriving, self._divide_by = list(arriving), divide_by
        self._received = [tensor for _, tensor in arriving]
        # ``wait`` copies only after the caller's earlier work on the receive memory.
        self._posted = [
            torch.cuda.current_stream(device).record_event()
            for device in {tensor.device for tensor in self._received if tensor.is_cuda}
        ]

    def wait(self, timeout: timedelta = timedelta()) -> bool:
        while self._works:
            self._works[0].wait(timeout)
            self._works.pop(0)  # gloo hangs if asked twice about a receive
        for event in self._posted:
            event.wait()
        for host, tensor in self._arriving:
            to_device(host.div_(self._divide_by) if self._divide_by > 1 else host, tensor)
        self._kept, self._posted, self._arriving = (), [], []
        return True

    def is_completed(self) -> bool:
        return all(work.is_completed() for work in self._works) and self.wait()

    is_success = is_completed

    def synchronize(self) -> None:
        self.wait()

    def result(self) -> list[Tensor]:
        return self._received

    def get_future(self) -> torch.futures.Future:
        self.wait()
        future: torch.futures.Future = torch.futures.Future()
        future.set_result(self.result())
        return future


class StagedGroup(dist.ProcessGroup):
    """torch.distributed's operations over one gloo group, with torch's method names."""

    def __init__(self, gloo: dist.ProcessGroupGloo, rank: int, size: int) -> None:
        super().__init__(rank, size)  # type: ignore[call-arg]
        self._gloo: Any = gloo
        self._size = size
        self._name = ""
        self._coalesced: list[Any] | None = None

    def getBackendName(self) -> str:
        return NAME

    def _set_group_name(self, name: str) -> None:
        self._name = name

    @property
    def group_name(self) -> str:
        return self._name

    # Reductions.

    def allreduce(self, tensors: list[Tensor], opts: Any = None) -> Any:
        opts, divide_by = self._without_average(dist.AllreduceOptions(), opts)
        copies = to_host(tensors)
        arriving = list(zip(copies, tensors, strict=True))
        return self._note(StagedWork([self._gloo.allreduce(copies, opts)], arriving, divide_by))

    def allreduce_coalesced(self, tensors: list[Tensor], opts: Any = None) -> Any:
        return StagedWork([self.allreduce([tensor], opts) for tensor in tensors])

    def _reduce_scatter_base(self, output: Tensor, input: Tensor, opts: Any = None) -> Any:
        opts, divide_by = self._without_average(dist.ReduceScatterOptions(), opts)
        return self._carry(
            lambda sent, received: self._gloo._reduce_scatter_base(received[0].view(-1), sent[0].view(-1), opts),
            [input],
            [output],
            divide_by,
        )

    def reduce_scatter_tensor_coalesced(self, outputs: list[Tensor], inputs: list[Tensor], opts: Any = None) -> Any:
        return StagedWork([self._reduce_scatter_base(o, i, opts) for o, i in zip(outputs, inputs, strict=True)])

    def reduce_scatter(self, outputs: list[Tensor], inputs: list[list[Tensor]], opts: Any = None) -> Any:
        if len({tensor.shape for tensor in inputs[0]}) > 1:
            raise ValueError("reduce_scatter: the inputs have different shapes, but all must have the same shape")
        return self._reduce_scatter_base(outputs[0], torch.stack(list(inputs[0])), opts)

    # Data movement.

    def broadcast(self, tensors: list[Tensor], opts: Any) -> Any:
        sent, received = (tensors, []) if opts.rootRank == self.rank() else ([], tensors)
        return self._carry(lambda s, r: self._gloo.broadcast(list(map(as_bytes, s or r)), opts), sent, received)

    def _allgather_base(self, output: Tensor, input: Tensor, opts: Any = None) -> Any:
        return self._carry(
            lambda sent, received: self._gloo._allgather_base(as_bytes(received[0]), as_bytes(sent[0])),
            [input],
            [output],
        )

    def allgather_into_tensor_coalesced(self, outputs: list[Tensor], inputs: list[Tensor], opts: Any = None) -> Any:
        return StagedWork([self._allgather_base(o, i) for o, i in zip(outputs, inputs, strict=True)])

    def allgather(self, outputs: list[list[Tensor]], inputs: list[Tensor], opts: Any = None) -> Any:
        return self._carry(
            lambda sent, received: self._gloo.allgather([list(map(as_bytes, received))], [as_bytes(sent[0])]),
            inputs,
            outputs[0],
        )

    def gather(self, outputs: list[list[Tensor]], inputs: list[Tensor], opts: Any) -> Any:
        def start(sent: list[Tensor], received: list[Tensor]) -> Any:
            lists = [list(map(as_bytes, received))] if received else []
            return self._gloo.gather(lists, [as_bytes(sent[0])], opts)

        return self._carry(start, inputs, outputs[0] if outputs else [])

    def scatter(self, outputs: list[Tensor], inputs: list[list[Tensor]], opts: Any) -> Any:
        def start(sent: list[Tensor], received: list[Tensor]) -> Any:
            lists = [list(map(as_bytes, sent))] if sent else []
            return self._gloo.scatter([as_bytes(received[0])], lists, opts)

        return self._carry(start, inputs[0] if inputs else [], outputs)

    def alltoall_base(
        self, output: Tensor, input: Tensor, output_splits: list[int], input_splits: list[int], opts: Any = None
    ) -> Any:
        def start(sent: list[Tensor], received: list[Tensor]) -> Any:
            plain = dist.AllToAllOptions()
            return self._gloo.alltoall_base(
                as_bytes(received[0]), as_bytes(sent[0]), output_splits, input_splits, plain
            )

        return self._carry(start, [input], [output])

    def send(self, tensors: list[Tensor], destination: int, tag: int) -> Any:
        return self._carry(lambda sent, _: self._gloo.send(list(map(as_bytes, sent)), destination, tag), tensors, [])

    def recv(self, tensors: list[Tensor], source: int, tag: int) -> Any:
        return self._carry(lambda _, received: self._gloo.recv(list(map(as_bytes, received)), source, tag), [], tensors)

    def barrier(self, opts: Any = None) -> Any:
        if torch.cuda.is_available() and torch.cuda.is_initialized():
            torch.cuda.current_stream().synchronize()  # include this rank's earlier device work
        return self._gloo.barrier(opts or dist.BarrierOptions())

    def _start_coalescing(self, device: torch.device) -> None:
        self._coalesced = []

    def _end_coalescing(self, device: torch.device) -> Any:
        works, self._coalesced = self._coalesced or [], None
        return StagedWork(works)

    # Names of torch 2.14 for the same operations.

    all_gather_single = _allgather_base
    all_gather_single_coalesced = allgather_into_tensor_coalesced
    all_to_all_single = alltoall_base
    reduce_scatter_single = _reduce_scatter_base
    reduce_scatter_single_coalesced = reduce_scatter_tensor_coalesced

    def _get_backend(self, device: torch.device) -> Any:
        return self._gloo

    # Shutdown.

    def shutdown(self) -> None:
        self._gloo = None  # drops the last reference, which ends gloo's threads

    def abort(self) -> None:
        if self._gloo is not None:
            self._gloo.abort()

    # Transport of all operations.

    def _carry(self, start: Start, sent: Sequence[Tensor], received: Sequence[Tensor], divide_by: int = 1) -> Any:
        """Start ``start(host copies of sent, host memory for received)``; return the work."""
        copies, memory = to_host(sent), list(map(host_like, received))
        arriving = list(zip(memory, received, strict=True))
        return self._note(StagedWork([start(copies, memory)], arriving, divide_by, copies))

    def _note(self, work: Any) -> Any:
        if self._coalesced is not None:
            self._coalesced.append(work)
        return work

    def _without_average(self, plain: Any, opts: Any) -> tuple[Any, int]:
        """Return ``plain`` options for a sum, and the divisor; gloo has no average."""
        if opts is None or opts.reduceOp == dist.ReduceOp.AVG:
            return plain, 1 if opts is None else self._size
        plain.reduceOp = opts.reduceOp
        return plain, 1


def _create(store: Any, rank: int, size: int, timeout: timedelta) -> StagedGroup:
    return StagedGroup(dist.ProcessGroupGloo(store, rank, size, timeout), rank, size)
