"""The estimated peak memory of a case, and its line in the log. Pure."""

from __future__ import annotations

from megatron_cp.estimate.job import MemoryEstimate
from megatron_cp.estimate.memory import memory_estimate
from megatron_cp.rules.job import job_of
from megatron_cp.rules.remedies import Case

NEARLY_FULL = 0.9  # share of a GPU's memory that estimates should stay below: they are a few percent off


def estimated(case: Case) -> MemoryEstimate | None:
    """Return the peak memory of a case; None for impossible or unknown sizes."""
    try:
        job = job_of(case)
        return None if job is None else memory_estimate(job)
    except (ValueError, ArithmeticError, LookupError):  # sizes that other rules refuse
        return None


def memory_line(case: Case) -> str | None:
    """Return the memory line, for instance ``estimated peak 61 of 80 GiB a GPU``.

    None without an estimate.
    """
    peak = estimated(case)
    return None if peak is None else format_peak(peak, case.environment.gpu_memory_gib, case.environment.device)


def format_peak(peak: MemoryEstimate, memory: float | None, device: str = "gpu") -> str:
    """Return an estimate in a line; ``memory`` is what a GPU has, in GiB."""
    kinds = by_group(peak)
    largest = max(kinds, key=kinds.__getitem__)
    of = f" of {gib(memory * 2**30)}" if memory else ""
    where = "GPU" if device == "gpu" else "rank"
    host = f", and {gib(peak.host)} GiB of host memory" if peak.host else ""
    return f"estimated peak {gib(peak.total)}{of} GiB a {where} (largest: {largest} {gib(kinds[largest])}){host}"


def by_group(peak: MemoryEstimate) -> dict[str, float]:
    """Return the bytes of each kind, those of activations together."""
    kinds: dict[str, float] = {}
    for kind, size in peak.kinds.items():
        group = kind.partition(":")[0]
        kinds[group] = kinds.get(group, 0.0) + size
    return kinds


def gib(size: float) -> str:
    """Return bytes as GiB with two or three digits."""
    number = size / 2**30
    return f"{number:.0f}" if number >= 10 else f"{number:.2g}"
