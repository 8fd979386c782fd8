"""What ranks tell each other, through a store, when one of them cannot go on: the alarm, who is there, what was found.

One store serves all ranks, so requests are few: every rank signs once, one rank reads what they signed, and the others
read the line that it makes of it.
"""

from __future__ import annotations

import json
import time
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, NamedTuple

from megatron_cp.common.errors import shown, shown_ranks

if TYPE_CHECKING:
    import torch.distributed as dist

    from megatron_cp.launch.store_watch import BoundedStore

_ALARM, _SIGNED, _COLLECTOR, _REPORT = ("alarm", "signed", "collector", "found")
_PATIENCE = 4.0  # seconds to wait for signatures: ranks look at the alarm every second


class FailureReport(NamedTuple):
    """Why the run cannot go on, the lowest rank that lives, which reports it, and whether all ranks are well: each
    answers, none has failed, no connection broke."""

    why: str
    lowest: int
    all_well: bool


class FailureStore:
    """``rank``'s view of the board that the ``size`` ranks have in ``store``. Raises RuntimeError where that is gone.

    ``patience``: seconds that a rank has to sign once the alarm is up.
    """

    def __init__(self, store: dist.Store | BoundedStore, rank: int, size: int, patience: float = _PATIENCE) -> None:
        self._store, self._rank, self._size, self._patience = store, rank, size, patience

    def alarm(self) -> bool:
        """Whether any rank cannot go on, and so the run cannot; one request."""
        return self._store.check([_ALARM])

    def sign(self, doing: str) -> None:
        """This rank lives."""
        self._append("present", doing)

    def fell(self, why: str) -> None:
        """This rank cannot go on. Raises the alarm."""
        self._append("fallen", why)
        self._store.set(_ALARM, "")

    def find_out(self, doing: str, *, broken: bool = False) -> FailureReport:
        """Ask why the run cannot go on; takes up to a few seconds. ``broken``: this rank lost a connection.

        Raises the alarm. The first rank that asks finds out, the others are told.
        """
        self._store.set(_ALARM, "")
        if broken:
            self._append("broken", "")
        self.sign(doing)
        collector = int(self._store.compare_set(_COLLECTOR, "", str(self._rank)))
        if collector == self._rank:
            self._store.set(_REPORT, json.dumps(self._found_now()))
        deadline = time.monotonic() + 2 * self._patience
        while not self._store.check([_REPORT]):
            if time.monotonic() > deadline:
                why = f"rank {collector}, which asked who is there, is gone before it could tell"
                return FailureReport(why, self._rank, all_well=False)
            time.sleep(self._patience / 8)
        found = FailureReport(*json.loads(self._store.get(_REPORT)))
        return self._found_now() if found.all_well else found  # a rank may have failed since then

    def _append(self, kind: str, text: str) -> None:
        # torch's stub lacks append.
        self._store.append(_SIGNED, json.dumps([kind, self._rank, text]) + "\n")  # type: ignore[union-attr]

    def _found_now(self) -> FailureReport:
        """Read what ranks signed, until all have or their time is over."""
        deadline = time.monotonic() + self._patience
        while True:
            signed: dict[str, dict[int, str]] = {"present": {}, "fallen": {}, "broken": {}}
            for line in self._store.get(_SIGNED).decode().splitlines():
                kind, rank, text = json.loads(line)
                signed[kind][rank] = text
            fallen = signed["fallen"]
            present = {rank: text for rank, text in signed["present"].items() if rank not in fallen}
            missing = [rank for rank in range(self._size) if rank not in present and rank not in fallen]
            if not missing or time.monotonic() > deadline:
                break
            time.sleep(self._patience / 16)
        all_well = not missing and not fallen and not signed["broken"]
        return FailureReport(reason(present, fallen, missing), min(present, default=self._rank), all_well)


def reason(present: Mapping[int, str], fallen: Mapping[int, str], missing: Sequence[int]) -> str:
    """Say why a run cannot go on: what each fallen rank reported, and which ranks are missing.

    Where neither explains it, what each present rank was doing.
    """
    reasons = [f"rank {rank} had failed: {why}" for rank, why in sorted(fallen.items())]
    parts = [shown(reasons, "; ")] if reasons else []
    if missing:
        parts.append(f"{shown_ranks(missing)} {'is' if len(missing) == 1 else 'are'} gone (killed, crashed or frozen)")
    if parts:
        return "; ".join(parts)
    by_doing: dict[str, list[int]] = {}
    for rank, what in sorted(present.items()):
        by_doing.setdefault(what, []).append(rank)
    fewest_first = sorted(by_doing.items(), key=lambda item: (len(item[1]), item[1]))
    return (
        f"every rank still answers ({shown([f'{shown_ranks(ranks)}: {what}' for what, ranks in fewest_first], '; ')})"
    )
