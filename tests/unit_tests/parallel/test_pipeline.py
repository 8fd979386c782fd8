"""Messages between pipeline stages have the shape that the receiver computes.

They are freed. See also ``tests/doubles/pretend_gpu/order.py``.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch.distributed as dist
from megatron.core.pipeline_parallel import schedules
from torch.multiprocessing.reductions import StorageWeakRef

from megatron_cp.parallel import pipeline
from megatron_cp.training.step import train_step
from tests.packed_runs import DYNAMIC, LONGEST, lengths_file, packed_losses
from tests.ranks import RanksFailed, run_ranks
from tests.training_runs import Losses, losses_of, start, tiny_config
from tests.unit_tests.training.layouts.cases import PP2, VPP2
from tests.unit_tests.training.layouts.test_model_variants import FULL


def out_of_order(lengths: str, overrides: dict[str, Any]) -> None:
    pipeline.get_schedule_table = lambda count, chunks, together: [
        (number, chunk) for chunk in range(chunks) for number in reversed(range(count))
    ]
    packed_losses(lengths, overrides)


def test_a_schedule_in_another_order_is_reported(tmp_path: Path) -> None:
    packs = DYNAMIC | PP2 | {"model__max_seqlen_per_dp_cp_rank": LONGEST}
    with pytest.raises(RanksFailed, match=r"RuntimeFault: pipeline rank 0 sends .* to a stage that expects"):
        run_ranks(out_of_order, 2, lengths_file(tmp_path), packs)


def outputs_in_memory(overrides: dict[str, Any], freed: bool) -> tuple[Losses, int]:
    """Return losses of two steps, and the most sent outputs held at a send."""
    sent: list[StorageWeakRef] = []
    most = 0
    communicate = pipeline.PipelineCommunicator._communicate

    def counted(self: Any, *, tensor_send_next: Any, **what: Any) -> Any:
        nonlocal most
        if tensor_send_next is not None:
            most = max(most, sum(not each.expired() for each in sent))
            sent.append(StorageWeakRef(tensor_send_next.untyped_storage()))
        return communicate(self, tensor_send_next=tensor_send_next, **what)

    pipeline.PipelineCommunicator._communicate = counted  # type: ignore[method-assign]
    run, batches = start(tiny_config(**overrides))
    if not freed:
        run.core_config.deallocate_pipeline_outputs = False
    losses = [losses_of(train_step(run, next(batches).microbatches)) for _ in range(2)]
    run.close()
    return losses, most


PP4 = {"model__pipeline_model_parallel_size": 4}


ONE_BY_ONE = {"model__overlap_p2p_comm": False}


@pytest.mark.parametrize(
    ("layout", "ranks", "kept", "otherwise"),
    [
        (PP2, 2, 0, 1),
        (PP4 | FULL, 4, 0, 3),
        (PP2 | VPP2 | ONE_BY_ONE, 2, 0, 3),
        (PP2 | VPP2, 2, 1, 4),  # the one that is on its way meanwhile
    ],
    ids=["pp2", "pp4, recomputed", "pp2 vpp2, not overlapped", "pp2 vpp2"],
)
def test_what_was_sent_is_freed(layout: dict[str, Any], ranks: int, kept: int, otherwise: int) -> None:
    """Each of a pipeline's many microbatches has its stage's output."""
    freed, held = (run_ranks(outputs_in_memory, ranks, layout, freed)[0] for freed in (True, False))
    assert freed[0] == held[0]
    assert (freed[1], held[1]) == (kept, otherwise)


def sent_while_computing(overrides: dict[str, Any]) -> tuple[Losses, int]:
    """Return losses of a step, and a count of messages that overlap with compute.

    These are the messages that this rank waited for only after it had computed something else.
    """
    events: list[Any] = []
    send, forward, backward = dist.isend, schedules.forward_step, schedules.backward_step

    class Work(NamedTuple):
        number: int
        work: Any

        def wait(self) -> None:
            events.append(self.number)
            self.work.wait()

    def isend(*args: Any, **kwargs: Any) -> Work:
        events.append("send")
        return Work(len(events), send(*args, **kwargs))

    def computed(step: Callable) -> Callable:
        def compute(*args: Any, **kwargs: Any) -> Any:
            events.append("compute")
            return step(*args, **kwargs)

        return compute

    run, batches = start(tiny_config(**overrides))
    dist.isend = isend
    schedules.forward_step, schedules.backward_step = computed(forward), computed(backward)
    losses = losses_of(train_step(run, next(batches).microbatches))
    run.close()
    waits = {event: index for index, event in enumerate(events) if isinstance(event, int)}
    assert len(waits) == events.count("send"), "nobody waited for them"
    return [losses], sum("compute" in events[sent:waited] for sent, waited in waits.items())


def test_virtual_stages_compute_while_messages_are_on_their_way() -> None:
    """Messages of ranks that go forward and back in turns must overlap with compute.

    The first rank takes turns for four of its eight virtual microbatches, whose outputs and two gradients it sends, the
    last one for six, with two outputs and all gradients.
    """
    overlapped = run_ranks(sent_while_computing, 2, PP2 | VPP2)
    one_by_one = run_ranks(sent_while_computing, 2, PP2 | VPP2 | ONE_BY_ONE)
    assert [losses for losses, _ in overlapped] == [losses for losses, _ in one_by_one]
    assert [count for _, count in one_by_one] == [0, 0]
    assert [count for _, count in overlapped] == [4 + 2, 2 + 6]
