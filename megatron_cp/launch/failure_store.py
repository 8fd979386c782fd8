"""What ranks tell each other, through a store, when one of them cannot go on: the alarm, who is there, what was found.

One store serves all ranks, so requests are few: every rank signs once, one rank reads what they signed, and the others
read the line that it makes of it.
"""

from __future__ import annotations

import json
import time
from dataclasses import dataclass
from typing import NamedTuple, Protocol

from megatron_cp.common.errors import shown, shown_ranks

_ALARM, _SIGNED, _COLLECTOR, _FOUND = ("alarm", "signed", "collector", "found")
_PATIENCE = 4.0  # seconds to wait for signatures: ranks look at the alarm every second


class Store(Protocol):
    """What is used of ``torch.distributed.Store``. Every method raises RuntimeError where the store is gone."""

    def set(self, key: str, value: str, /) -> None: ...
    def get(self, key: str, /) -> bytes: ...
    def append(self, key: str, value: str, /) -> None: ...
    def check(self, keys: list[str], /) -> bool: ...
    def compare_set(self, key: str, expected: str, desired: str, /) -> bytes: ...


@dataclass(frozen=True)
class Roll:
    """Who answered: what each present rank was doing, what each fallen one said, and who said nothing.

    ``broken``: whether any rank lost a connection, or waited for the whole time limit.
    """

    present: dict[int, str]
    fallen: dict[int, str]
    missing: list[int]
    broken: bool = False

    def __str__(self) -> str:
        reasons = [f"rank {rank} had failed: {why}" for rank, why in sorted(self.fallen.items())]
        parts = [shown(reasons, "; ")] if reasons else []
        if self.missing:
            are = "is" if len(self.missing) == 1 else "are"
            parts.append(f"{shown_ranks(self.missing)} {are} gone (killed, crashed or frozen)")
        if parts:
            return "; ".join(parts)
        by_doing: dict[str, list[int]] = {}
        for rank, what in sorted(self.present.items()):
            by_doing.setdefault(what, []).append(rank)
        fewest_first = sorted(by_doing.items(), key=lambda item: (len(item[1]), item[1]))
        doing = [f"{shown_ranks(ranks)}: {what}" for what, ranks in fewest_first]
        return f"every rank still answers ({shown(doing, '; ')})"


class Found(NamedTuple):
    """Why the run cannot go on, the lowest rank that lives, which reports it, and whether all ranks are well: each
    answers, none has failed, no connection broke."""

    why: str
    lowest: int
    all_well: bool


class FailureStore:
    """``rank``'s view of the board that the ``size`` ranks have in ``store``. Raises RuntimeError where that is gone.

    ``patience``: seconds that a rank has to sign once the alarm is up.
    """

    def __init__(self, store: Store, rank: int, size: int, patience: float = _PATIENCE) -> None:
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

    def find_out(self, doing: str, *, broken: bool = False) -> Found:
        """Ask why the run cannot go on; takes up to a few seconds. ``broken``: this rank lost a connection.

        Raises the alarm. The first rank that asks finds out, the others are told.
        """
        self._store.set(_ALARM, "")
        if broken:
            self._append("broken", "")
        self.sign(doing)
        collector = int(self._store.compare_set(_COLLECTOR, "", str(self._rank)))
        if collector == self._rank:
            self._store.set(_FOUND, json.dumps(self._found_now()))
        deadline = time.monotonic() + 2 * self._patience
        while not self._store.check([_FOUND]):
            if time.monotonic() > deadline:
                why = f"rank {collector}, which asked who is there, is gone before it could tell"
                return Found(why, self._rank, all_well=False)
            time.sleep(self._patience / 8)
        found = Found(*json.loads(self._store.get(_FOUND)))
        return self._found_now() if found.all_well else found  # a rank may have failed since then

    def _found_now(self) -> Found:
        roll = self._collect()
        all_well = not roll.missing and not roll.fallen and not roll.broken
        return Found(str(roll), min(roll.present, default=self._rank), all_well)

    def _append(self, kind: str, text: str) -> None:
        self._store.append(_SIGNED, json.dumps([kind, self._rank, text]) + "\n")

    def _collect(self) -> Roll:
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
                return Roll(present, fallen, missing, bool(signed["broken"]))
            time.sleep(self._patience / 16)
