"""Failure reports through one store, of any number of ranks."""

import threading
import time
from collections import Counter

import torch.distributed as dist

from megatron_cp.launch.failure_store import FailureStore, reason

RANKS = 2000


class Counting:
    """Store that counts requests."""

    def __init__(self) -> None:
        self._store = dist.HashStore()
        self.asked: Counter[str] = Counter()

    def __getattr__(self, name: str) -> object:
        def ask(*arguments: object) -> object:
            self.asked[name] += 1
            return getattr(self._store, name)(*arguments)

        return ask


def stores(store: object, ranks: int = RANKS, patience: float = 0.4) -> list[FailureStore]:
    return [FailureStore(store, rank, ranks, patience) for rank in range(ranks)]


def test_a_large_world_reports_in_few_requests() -> None:
    store = Counting()
    world = stores(store, patience=60.0)
    lost = {7: "out of memory", 40: "[Errno 5] Input/output error"}
    for rank, why in lost.items():
        world[rank].report_failure(why)
    found: list[tuple[str, int, bool]] = []
    first = threading.Thread(target=lambda: found.append(world[1].diagnose("forward of iteration 3")))
    first.start()
    living = [failures for rank, failures in enumerate(world) if rank not in lost]
    for failures in living:
        assert failures.alarm()
        failures.report_alive("forward of iteration 3")
    first.join(30.0)  # all have reported: no rank waits for a timeout
    found += [failures.diagnose("forward of iteration 3") for failures in living[1:]]
    why = "rank 7 had failed: out of memory; rank 40 had failed: [Errno 5] Input/output error"
    assert set(found) == {(why, 0, False)} and len(found) == len(living)
    assert store.asked.total() < 10 * RANKS, store.asked


def test_missing_reports_are_awaited_once() -> None:
    world = stores(Counting())
    for failures in world[:-3]:
        failures.report_alive("")
    began = time.monotonic()
    found = [failures.diagnose("") for failures in world[:-3]]
    assert set(found) == {("ranks 1997-1999 do not answer (killed, crashed or frozen)", 0, False)}
    assert time.monotonic() - began < 10.0  # 0.4 seconds for each would be 13 minutes


def test_a_lost_collector_is_named() -> None:
    store = dist.HashStore()
    world = stores(store, 3)
    store.set("collector", "2")
    assert world[1].diagnose("") == ("rank 2 collected the reports and exited before it wrote the result", 1, False)


def test_all_ranks_answer() -> None:
    first, second = stores(dist.HashStore(), 2)
    first.report_alive("data of iteration 1")
    why = "every rank still answers (rank 0: data of iteration 1; rank 1: set-up)"
    assert second.diagnose("set-up") == (why, 0, True)


def test_many_reasons_are_cut_short() -> None:
    text = reason({0: ""}, dict.fromkeys(range(1, 100), "out of memory"), [])
    assert text.endswith("rank 8 had failed: out of memory and 91 more")
