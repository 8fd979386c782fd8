"""Collective helpers: messages, work on one rank or once per node, errors.

Errors are raised on every rank.
"""

import os
import time
from dataclasses import dataclass
from pathlib import Path

import torch

from megatron_cp.common.errors import DataError, RuntimeFault
from megatron_cp.data.formats.cache import build_cached
from megatron_cp.parallel import collectives
from megatron_cp.parallel.collectives import run_on_first_rank, run_once_per_node
from tests.ranks import run_ranks

RANKS_PER_NODE = 2


def _builds(folders: list[Path]) -> int:
    """Count how often this rank builds what its node keeps in ``folders``."""
    node, os.environ["LOCAL_RANK"] = map(str, divmod(int(os.environ["RANK"]), RANKS_PER_NODE))
    builds = []

    def fill(partial: Path) -> None:
        builds.append(partial)
        time.sleep(0.3)  # nodes that build at once would all begin before one ends
        (partial / "index").write_text("built")

    folder = folders[int(node)]
    run_once_per_node(lambda: build_cached(fill, folder))
    assert (folder / "index").read_text() == "built" and len(list(folder.parent.iterdir())) == 1
    return len(builds)


def test_nodes_of_one_file_system_build_once(tmp_path: Path) -> None:
    assert run_ranks(_builds, 6, [tmp_path / "cache" / "folder"] * 3) == [1, 0, 0, 0, 0, 0]


def test_nodes_with_file_systems_of_their_own_build_once_each(tmp_path: Path) -> None:
    assert run_ranks(_builds, 4, [tmp_path / node / "folder" for node in "ab"]) == [1, 0, 1, 0]


def _outcome(at_fault: int | None) -> str:
    """Return the result of ``run_once_per_node`` on nodes of one rank each.

    One rank fails, or each finds another value.
    """
    rank, os.environ["LOCAL_RANK"] = int(os.environ["RANK"]), "0"

    def work() -> int:
        if rank == at_fault:
            raise DataError(f"node {rank} is at fault")
        return rank if at_fault is None else 0

    try:
        return f"no error: {run_once_per_node(work)}"
    except DataError as error:
        return str(error)


def test_a_fault_of_any_node_reaches_all() -> None:
    for at_fault in (0, 1):
        assert run_ranks(_outcome, 2, at_fault) == [f"node {at_fault} is at fault"] * 2
    first, second = run_ranks(_outcome, 2, None)
    assert first == second and "nodes have different data" in first


@dataclass(frozen=True)
class Message:
    count: int
    done: bool
    seconds: dict[str, float]
    checksums: torch.Tensor


def _values(message: Message) -> tuple[int, bool, dict[str, float], list[int]]:
    assert type(message.count) is int and type(message.done) is bool and message.checksums.dtype == torch.int64
    return message.count, message.done, message.seconds, message.checksums.tolist()


def _messages_and_faults() -> tuple[Message, list[int], str, list[str]]:
    rank, world, cpu = int(os.environ["RANK"]), torch.distributed.group.WORLD, torch.device("cpu")
    mine = Message(-rank, rank == 1, {"a": 0.5, "b": 2.0 * rank}, torch.tensor([[2**32 - 1 - rank], [rank]]))
    same = collectives.unpack(collectives.pack(mine), mine)
    assert _values(same) == _values(mine), "a message is read as it was written"
    largest = collectives.max_of_messages(mine, world, cpu)
    gathered = collectives.gather_tensors(torch.tensor([rank, 7]), world)
    assert run_on_first_rank(lambda: f"of rank {rank}", "not raised") == "of rank 0"
    assert collectives.gather_on_first_rank(rank) == ([] if rank else [0, 1])
    faults = []
    for at_fault in (0, 1):
        try:
            with collectives.raised_on_all_ranks("it failed"):
                if rank == at_fault:
                    raise OSError("no space left")
        except RuntimeFault as fault:
            assert fault.on_all_ranks
            faults.append(str(fault))
    return largest, gathered.flatten().tolist(), collectives.broadcast_object(f"value of {rank}"), faults


def test_ranks_exchange_named_messages_and_raise_together() -> None:
    for largest, gathered, first, faults in run_ranks(_messages_and_faults, 2):
        assert _values(largest) == (0, True, {"a": 0.5, "b": 2.0}, [[2**32 - 1], [1]])
        assert (gathered, first) == ([0, 7, 1, 7], "value of 0")
        assert faults == [f"it failed. rank {rank}: OSError: no space left" for rank in (0, 1)]
