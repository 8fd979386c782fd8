"""Failure reports of all ranks, read when a rank cannot continue.

One store serves all ranks, so requests are few. Every rank writes one report, one rank collects the reports, and the
others read the result.
"""

from __future__ import annotations

import json
import time
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, NamedTuple

from megatron_cp.common.errors import format_ranks, join_limited

if TYPE_CHECKING:
    import torch.distributed as dist

    from megatron_cp.launch.store_watch import BoundedStore

_ALARM, _REPORTS, _COLLECTOR, _RESULT = ("alarm", "signed", "collector", "found")
_PATIENCE = 4.0  # seconds to wait for reports: ranks check the alarm every second


class FailureReport(NamedTuple):
    """Cause of a stopped run.

    ``lowest`` is the lowest living rank, which prints the message. ``all_well``: every rank answered, no rank failed
    and no connection broke.
    """

    why: str
    lowest: int
    all_well: bool


class FailureStore:
    """Access of one ``rank`` to the failure reports of ``size`` ranks in ``store``.

    ``patience``: seconds for a rank to report after the alarm. Methods raise RuntimeError if the store is lost.
    """

    def __init__(self, store: dist.Store | BoundedStore, rank: int, size: int, patience: float = _PATIENCE) -> None:
        self._store, self._rank, self._size, self._patience = store, rank, size, patience

    def alarm(self) -> bool:
        """Return whether any rank raised the alarm; one request."""
        return self._store.check([_ALARM])

    def report_alive(self, doing: str) -> None:
        """Report that this rank is alive."""
        self._append("present", doing)

    def report_failure(self, why: str) -> None:
        """Report that this rank cannot continue, and raise the alarm."""
        self._append("fallen", why)
        self._store.set(_ALARM, "")

    def diagnose(self, doing: str, *, broken: bool = False) -> FailureReport:
        """Raise the alarm and return why the run cannot continue; takes a few seconds.

        The first rank that calls collects the reports; the others read the result. ``broken``: this rank lost a
        connection.
        """
        self._store.set(_ALARM, "")
        if broken:
            self._append("broken", "")
        self.report_alive(doing)
        collector = int(self._store.compare_set(_COLLECTOR, "", str(self._rank)))
        if collector == self._rank:
            self._store.set(_RESULT, json.dumps(self._collect()))
        deadline = time.monotonic() + 2 * self._patience
        while not self._store.check([_RESULT]):
            if time.monotonic() > deadline:
                why = f"rank {collector} collected the reports and exited before it wrote the result"
                return FailureReport(why, self._rank, all_well=False)
            time.sleep(self._patience / 8)
        found = FailureReport(*json.loads(self._store.get(_RESULT)))
        return self._collect() if found.all_well else found  # a rank may have failed since then

    def _append(self, kind: str, text: str) -> None:
        # torch's stub lacks append.
        self._store.append(_REPORTS, json.dumps([kind, self._rank, text]) + "\n")  # type: ignore[union-attr]

    def _collect(self) -> FailureReport:
        """Read the reports until all ranks have reported or ``patience`` is over."""
        deadline = time.monotonic() + self._patience
        while True:
            reports: dict[str, dict[int, str]] = {"present": {}, "fallen": {}, "broken": {}}
            for line in self._store.get(_REPORTS).decode().splitlines():
                kind, rank, text = json.loads(line)
                reports[kind][rank] = text
            failed = reports["fallen"]
            present = {rank: text for rank, text in reports["present"].items() if rank not in failed}
            missing = [rank for rank in range(self._size) if rank not in present and rank not in failed]
            if not missing or time.monotonic() > deadline:
                break
            time.sleep(self._patience / 16)
        all_well = not missing and not failed and not reports["broken"]
        return FailureReport(reason(present, failed, missing), min(present, default=self._rank), all_well)


def reason(present: Mapping[int, str], failed: Mapping[int, str], missing: Sequence[int]) -> str:
    """Describe why a run cannot continue: failed ranks, then missing ranks.

    If no rank failed or is missing, describe what each rank was doing.
    """
    reasons = [f"rank {rank} had failed: {why}" for rank, why in sorted(failed.items())]
    parts = [join_limited(reasons, "; ")] if reasons else []
    if missing:
        parts.append(
            f"{format_ranks(missing)} {'does' if len(missing) == 1 else 'do'} not answer (killed, crashed or frozen)"
        )
    if parts:
        return "; ".join(parts)
    by_doing: dict[str, list[int]] = {}
    for rank, what in sorted(present.items()):
        by_doing.setdefault(what, []).append(rank)
    fewest_first = sorted(by_doing.items(), key=lambda item: (len(item[1]), item[1]))
    groups = [f"{format_ranks(ranks)}: {what}" for what, ranks in fewest_first]
    return f"every rank still answers ({join_limited(groups, '; ')})"
