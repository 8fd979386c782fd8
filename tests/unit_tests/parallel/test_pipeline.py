"""What pipeline stages send each other, and whether NCCL could carry it: its messages have no tags."""

from __future__ import annotations

from collections import defaultdict, deque
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch.distributed as dist

from megatron_cp.parallel.pipeline import PipelineCommunicator
from tests.packed_runs import DYNAMIC, LONGEST, lengths_file, packed_losses
from tests.ranks import RanksFailed, run_ranks
from tests.unit_tests.training.layouts import TP2

Message = tuple[str, int, str, tuple[int, ...], bool]  # send or recv, with whom, in which group, shape, in a batch
Trace = list[list[Message]]  # of each of a rank's calls


def recorded(calls: Trace) -> Callable:
    """The communicator's call, which writes down its messages: sent one by one, or in a batch."""
    communicate = PipelineCommunicator._communicate

    def communicate_and_record(communicator: PipelineCommunicator, **kwargs: Any) -> Any:
        calls.append([])

        def write(kind: str, tensor: Any, peer: int, group: Any) -> None:
            calls[-1].append((kind, peer, group.group_name, tuple(tensor.shape), communicator.config.batch_p2p_comm))

        def one(kind: str, call: Callable) -> Callable:
            def send_or_receive(tensor: Any, group: Any = None, **peer: int) -> Any:
                write(kind, tensor, *peer.values(), group)
                return call(tensor, group=group, **peer)

            return send_or_receive

        def batch(operations: list[Any]) -> Any:
            for each in operations:
                write(each.op.__name__[1:], each.tensor, each.peer, each.group)
            return send_batch(operations)

        send_batch = dist.batch_isend_irecv
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(dist, "batch_isend_irecv", batch)
            if not communicator.config.batch_p2p_comm:
                patch.setattr(dist, "isend", one("send", dist.isend))
                patch.setattr(dist, "irecv", one("recv", dist.irecv))
            return communicate(communicator, **kwargs)

    return communicate_and_record


def traced(lengths: str, overrides: dict[str, Any]) -> Trace:
    calls: Trace = []
    PipelineCommunicator._communicate = recorded(calls)  # type: ignore[method-assign]
    packed_losses(lengths, overrides)
    return calls


def carry(traces: list[Trace], one_stream: bool) -> int:
    """Carry all messages as NCCL does, and return how many there were.

    A message waits in its stream for those before it, and for its other end: a send for the receive and the other way
    round. A stream is that of two ranks in a group, as torch.distributed makes them, or with ``one_stream`` (as where
    groups were started with a device) the group's own; messages of a batch wait for none of the others. A rank's next
    call begins when all messages of the last one have arrived.

    Raises:
        AssertionError: ranks wait for each other for ever, or the two ends of a message have other shapes.
    """
    streams: dict[tuple, deque[Message]] = defaultdict(deque)
    calls, left = [iter(trace) for trace in traces], [0] * len(traces)

    def stream(rank: int, kind: str, peer: int, group: str, batched: bool) -> deque[Message]:
        return streams[rank, group, *((peer, kind) if batched else () if one_stream else (peer,))]

    def begin(rank: int) -> None:
        while not left[rank]:
            call = next(calls[rank], None)
            if call is None:
                return
            for message in call:
                kind, peer, group, _, batched = message
                stream(rank, kind, peer, group, batched).append(message)
            left[rank] = len(call)

    for rank in range(len(traces)):
        begin(rank)
    carried, moved = 0, True
    while moved:
        moved = False
        for (rank, *_), queue in list(streams.items()):
            if not queue or queue[0][0] != "send":
                continue
            _, peer, group, shape, batched = queue[0]
            other = stream(peer, "recv", rank, group, batched)
            if other and other[0][:3] == ("recv", rank, group):
                assert other[0][3] == shape, f"{rank} sends {peer} {shape}, which expects {other[0][3]}"
                queue.popleft()
                other.popleft()
                for end in (rank, peer):
                    left[end] -= 1
                    begin(end)
                carried, moved = carried + 1, True
    waiting = {key: queue[0] for key, queue in streams.items() if queue}
    assert not waiting, f"for ever: {waiting}"
    return carried


def pp(stages: int, virtual: int | None = None, **more: Any) -> dict[str, Any]:
    """A pipeline whose microbatches are packs, with two layers a (virtual) stage at most."""
    return DYNAMIC | {
        "model__pipeline_model_parallel_size": stages,
        "model__virtual_pipeline_model_parallel_size": virtual,
        "model__num_layers": max(4, stages * (virtual or 1)),
        "model__max_seqlen_per_dp_cp_rank": LONGEST,
        **more,
    }


PIPELINES = {
    "pp2 vpp2, two groups' ranks": (4, pp(2, 2, model__max_seqlen_per_dp_cp_rank=64)),
    "pp4": (4, pp(4)),
    "pp3 vpp2": (3, pp(3, 2)),
    "pp2 vpp3, tp2 sp": (4, pp(2, 3, **TP2, model__sequence_parallel=True)),
    "pp4 vpp3": (4, pp(4, 3)),
    "pp2 vpp2, groups of four": (2, pp(2, 2, model__microbatch_group_size_per_vp_stage=4)),
}
QUICK = ("pp2 vpp2, two groups' ranks", "pp4", "pp3 vpp2")


@pytest.mark.parametrize("name", [n if n in QUICK else pytest.param(n, marks=pytest.mark.slow) for n in PIPELINES])
def test_nccl_could_carry_packs_through_a_pipeline(name: str, tmp_path: Path) -> None:
    world_size, overrides = PIPELINES[name]
    traces = run_ranks(traced, world_size, lengths_file(tmp_path), overrides)
    shapes = {message[3] for trace in traces for call in trace for message in call}
    assert len(shapes) > 5 and all(len(shape) == 3 for shape in shapes), "lengths that do not differ prove little"
    sent = sum(message[0] == "send" for trace in traces for call in trace for message in call)
    assert carry(traces, one_stream=False) == carry(traces, one_stream=True) == sent > 100


def test_what_nccl_could_not_carry_is_noticed() -> None:
    """Guards the test above."""
    a, b = (2, 1, 8), (4, 1, 8)

    def trace(peer: int, *calls: str, batched: bool = False) -> Trace:
        """``calls`` of messages: < receives, > sends, small or LARGE letters for the shape."""
        kinds = {"<": "recv", ">": "send"}
        pairs = [[call[i : i + 2] for i in range(0, len(call), 2)] for call in calls]
        return [[(kinds[x[0]], peer, "g", a if x[1] == "s" else b, batched) for x in call] for call in pairs]

    assert carry([trace(1, ">s", "<L"), trace(0, "<s", ">L")], one_stream=True) == 2
    assert carry([trace(1, ">s<L", batched=True), trace(0, ">L<s", batched=True)], one_stream=True) == 2
    with pytest.raises(AssertionError, match="for ever"):
        carry([trace(1, ">s", "<L"), trace(0, ">L", "<s")], one_stream=False)
    with pytest.raises(AssertionError, match="which expects"):
        carry([trace(1, ">s>L", batched=True), trace(0, "<L<s", batched=True)], one_stream=False)


def out_of_order(lengths: str, overrides: dict[str, Any]) -> None:
    from megatron_cp.parallel import pipeline

    pipeline.get_schedule_table = lambda count, chunks, together: [
        (number, chunk) for chunk in range(chunks) for number in reversed(range(count))
    ]
    packed_losses(lengths, overrides)


def test_a_schedule_in_another_order_is_told(tmp_path: Path) -> None:
    with pytest.raises(RanksFailed, match=r"RuntimeFault.*send its next stage a tensor .* the schedule's order"):
        run_ranks(out_of_order, 2, lengths_file(tmp_path), pp(2))
