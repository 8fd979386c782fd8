"""Who is there, asked through one store by any number of ranks: what is found, and how many requests it takes."""

import threading
import time
from collections import Counter

import torch.distributed as dist

from megatron_cp.launch.failure_store import FailureStore, reason

RANKS = 2000


class Counting:
    """A store that counts what it is asked."""

    def __init__(self) -> None:
        self._store = dist.HashStore()
        self.asked: Counter[str] = Counter()

    def __getattr__(self, name: str) -> object:
        def ask(*arguments: object) -> object:
            self.asked[name] += 1
            return getattr(self._store, name)(*arguments)

        return ask


def boards(store: object, ranks: int = RANKS, patience: float = 0.4) -> list[FailureStore]:
    return [FailureStore(store, rank, ranks, patience) for rank in range(ranks)]


def test_a_large_world_finds_out_in_few_requests() -> None:
    store = Counting()
    world = boards(store, patience=60.0)
    lost = {7: "out of memory", 40: "[Errno 5] Input/output error"}
    for rank, why in lost.items():
        world[rank].report_failure(why)
    found: list[tuple[str, int, bool]] = []
    first = threading.Thread(target=lambda: found.append(world[1].diagnose("forward of iteration 3")))
    first.start()
    living = [board for rank, board in enumerate(world) if rank not in lost]
    for board in living:
        assert board.alarm()
        board.report_alive("forward of iteration 3")
    first.join(30.0)  # all have signed: nobody waits for a time to pass
    found += [board.diagnose("forward of iteration 3") for board in living[1:]]
    why = "rank 7 had failed: out of memory; rank 40 had failed: [Errno 5] Input/output error"
    assert set(found) == {(why, 0, False)} and len(found) == len(living)
    assert store.asked.total() < 10 * RANKS, store.asked


def test_who_does_not_sign_is_waited_for_once() -> None:
    world = boards(Counting())
    for board in world[:-3]:
        board.report_alive("")
    began = time.monotonic()
    found = [board.diagnose("") for board in world[:-3]]
    assert set(found) == {("ranks 1997-1999 do not answer (killed, crashed or frozen)", 0, False)}
    assert time.monotonic() - began < 10.0  # 0.4 seconds for each would be 13 minutes


def test_who_asked_first_is_gone_too() -> None:
    store = dist.HashStore()
    world = boards(store, 3)
    store.set("collector", "2")
    assert world[1].diagnose("") == ("rank 2 collected the reports and exited before it wrote the result", 1, False)


def test_all_are_there() -> None:
    first, second = boards(dist.HashStore(), 2)
    first.report_alive("data of iteration 1")
    why = "every rank still answers (rank 0: data of iteration 1; rank 1: set-up)"
    assert second.diagnose("set-up") == (why, 0, True)


def test_many_reasons_are_cut_short() -> None:
    text = reason({0: ""}, dict.fromkeys(range(1, 100), "out of memory"), [])
    assert text.endswith("rank 8 had failed: out of memory and 91 more")
