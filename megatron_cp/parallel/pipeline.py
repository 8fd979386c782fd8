"""Point-to-point communication between pipeline stages."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import torch
import torch.distributed as dist
from megatron.core.pipeline_parallel.p2p_communication import P2PCommunicator
from megatron.core.pipeline_parallel.schedules import get_schedule_table

from megatron_cp.common.errors import RuntimeFault

Shape = tuple[int, int, int]
_NOTHING = (0, 0, 0)


class PipelineCommunicator(P2PCommunicator):
    """``P2PCommunicator`` with locally computed shapes and sends that overlap compute.

    Upstream sends each tensor's shape first if microbatches differ in length, and the host waits for it. In the
    interleaved schedule shapes may then be mixed up, or their receives never end. But all stages run the same
    microbatches in an order that the schedule fixes, so shapes follow from the local microbatches.

    With ``overlap_p2p_comm`` upstream waits for each sent output before it frees the output, which swaps the tensor's
    memory. Here a second tensor of the same memory is sent, and kept until the next send in that direction starts.

    Args:
        shapes: [sequence, batch, hidden] that stages pass on, for each microbatch.
    """

    def __init__(self, pp_group: dist.ProcessGroup, config: Any, shapes: Sequence[Shape]) -> None:
        super().__init__(pp_group, config)
        first, last = self.is_pp_first_stage, self.is_pp_last_stage
        # Order: forward from previous, forward to next, backward from next, backward to previous.
        self._from_prev, self._to_next, self._from_next, self._to_prev = (
            self._in_order(shapes, wraps_around) for wraps_around in (first, last, last, first)
        )
        # By direction: pending work and sent tensor.
        self._pending_sends: dict[str, tuple[Any, torch.Tensor | None]] = {}

    def _in_order(self, shapes: Sequence[Shape], wraps_around: bool) -> Iterator[Shape]:
        """Return shapes in schedule order.

        Around the pipeline's end only virtual stages pass tensors on.
        """
        chunks, group_size = self.virtual_pipeline_model_parallel_size or 1, len(shapes)
        if chunks > 1:
            group_size = self.config.microbatch_group_size_per_vp_stage
        table = get_schedule_table(len(shapes), chunks, group_size)
        return iter([shapes[number] for number, chunk in table if not (wraps_around and chunk == chunks - 1)])

    def _communicate(
        self,
        *,
        tensor_send_next: torch.Tensor | None,
        tensor_send_prev: torch.Tensor | None,
        wait_on_reqs: bool = True,
        **received: Any,
    ) -> tuple[torch.Tensor | None, torch.Tensor | None, Any]:
        sent = {"send_next": tensor_send_next, "send_prev": tensor_send_prev}
        if not wait_on_reqs:
            sent = {direction: None if tensor is None else tensor.detach() for direction, tensor in sent.items()}
        from_prev, from_next, works = super()._communicate(
            tensor_send_next=sent["send_next"],
            tensor_send_prev=sent["send_prev"],
            wait_on_reqs=wait_on_reqs,
            **received,
        )
        if wait_on_reqs:  # for example in the last call of a schedule
            for direction in sent:
                self._wait_for_send(direction)
        else:
            for direction in sent.keys() & works.keys():
                self._wait_for_send(direction)
                self._pending_sends[direction] = works.pop(direction), sent[direction]
        return from_prev, from_next, works

    def _wait_for_send(self, direction: str) -> None:
        if direction in self._pending_sends:
            work, _ = self._pending_sends.pop(direction)
            work.wait()

    def _communicate_shapes(
        self,
        tensor_send_next: torch.Tensor | None,
        tensor_send_prev: torch.Tensor | None,
        recv_prev: bool,
        recv_next: bool,
    ) -> tuple[Shape, Shape]:
        for tensor, order in ((tensor_send_next, self._to_next), (tensor_send_prev, self._to_prev)):
            if tensor is not None and (found := tuple(tensor.shape)) != (expected := self._next(order)):
                raise self._out_of_order(f"sends {found} to a stage that expects {expected}")
        return (
            self._next(self._from_prev) if recv_prev else _NOTHING,
            self._next(self._from_next) if recv_next else _NOTHING,
        )

    def _next(self, order: Iterator[Shape]) -> Shape:
        shape = next(order, None)
        if shape is None:
            raise self._out_of_order("sends or receives more than there is")
        return shape

    def _out_of_order(self, what: str) -> RuntimeFault:
        return RuntimeFault(
            f"pipeline rank {self.pp_group.rank()} {what}: megatron-core's schedule does not follow its table. "
            "Fix: report this with the layout and the number of microbatches"
        )
