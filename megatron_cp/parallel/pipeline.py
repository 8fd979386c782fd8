"""Point-to-point communication between pipeline stages."""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from megatron.core.pipeline_parallel.p2p_communication import P2PCommunicator

from megatron_cp.parallel import staged
from megatron_cp.parallel.device import device

_DIMENSIONS = 3  # [sequence, batch, hidden]
# Messages between the same two ranks are told apart by what they carry, so that their order does not matter.
_FORWARD_SHAPE, _FORWARD, _BACKWARD_SHAPE, _BACKWARD = range(101, 105)


class PipelineCommunicator(P2PCommunicator):
    """megatron-core's communicator; where microbatches differ in length, over gloo, with an exchange of its own.

    Upstream first exchanges the shapes of all tensors of a call and then the tensors. In the interleaved schedule the
    two ends of a call are not always one call: a rank's forward and backward messages can be answered in two calls of
    the other rank, the second of which needs the first one's tensor; and with two stages, where the previous and the
    next rank are the same one, shapes are matched by order and taken for each other. Here each message has a tag,
    a shape and its tensor are sent together, and nobody waits for a send before the step is over.
    """

    def __init__(self, pp_group: dist.ProcessGroup, config: Any) -> None:
        super().__init__(pp_group, config)
        self._own_exchange = config.variable_seq_lengths and dist.get_backend(pp_group) in ("gloo", staged.NAME)
        self._sent: list[tuple[dist.Work | None, torch.Tensor]] = []

    def _communicate(
        self,
        *,
        tensor_send_next: torch.Tensor | None,
        tensor_send_prev: torch.Tensor | None,
        recv_prev: bool,
        recv_next: bool,
        tensor_shape: Any,
        wait_on_reqs: bool = True,
    ) -> tuple[torch.Tensor | None, torch.Tensor | None, Any]:
        if not self._own_exchange:
            return super()._communicate(
                tensor_send_next=tensor_send_next,
                tensor_send_prev=tensor_send_prev,
                recv_prev=recv_prev,
                recv_next=recv_next,
                tensor_shape=tensor_shape,
                wait_on_reqs=wait_on_reqs,
            )
        if tensor_send_next is not None:
            self._send(tensor_send_next, self.next_rank, _FORWARD_SHAPE, _FORWARD)
        if tensor_send_prev is not None:
            self._send(tensor_send_prev, self.prev_rank, _BACKWARD_SHAPE, _BACKWARD)
        from_prev = self._receive(self.prev_rank, _FORWARD_SHAPE, _FORWARD) if recv_prev else None
        from_next = self._receive(self.next_rank, _BACKWARD_SHAPE, _BACKWARD) if recv_next else None
        return from_prev, from_next, None if wait_on_reqs else {}

    def _send(self, tensor: torch.Tensor, to: int | None, shape_tag: int, tag: int) -> None:
        shape = torch.tensor(tensor.shape, dtype=torch.int64)
        for message, kind in ((shape, shape_tag), (tensor.detach().contiguous(), tag)):
            self._sent.append((dist.isend(message, to, group=self.pp_group, tag=kind), message))

    def _receive(self, source: int | None, shape_tag: int, tag: int) -> torch.Tensor:
        shape = torch.empty(_DIMENSIONS, dtype=torch.int64)
        dist.recv(shape, source, group=self.pp_group, tag=shape_tag)
        tensor = torch.empty(shape.tolist(), dtype=self.config.pipeline_dtype, device=device())
        dist.recv(tensor, source, group=self.pp_group, tag=tag)
        return tensor.requires_grad_()

    def finish(self) -> None:
        """Wait until everything sent has left; call it once the schedule is through."""
        for work, _ in self._sent:
            if work is not None:
                work.wait()
        self._sent.clear()
