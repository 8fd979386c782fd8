"""Summarize profiled steps from PyTorch profiler traces, without torch.

On a GPU: kernel time by kind, exposed communication and idle time. Without a GPU: operators of the host, each without
the operators that it called.
"""

from __future__ import annotations

import gzip
import re
import zlib
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any, NamedTuple

from megatron_cp.common.errors import DataError
from megatron_cp.common.input_files import parse_json, read_bytes

Interval = tuple[int, int]  # integer nanoseconds, so that adjacent spans do not overlap

COMMUNICATION, OTHERS, PYTHON = "communication", "others", "Python, waiting"
PHASES = ("data", "schedule", "forward_backward", "optimizer")  # in a step; names of training/monitor/phases.py
# The first match of the lower-case name counts. Names of PyTorch, cuDNN, cuBLAS, CUTLASS, NCCL, Transformer Engine,
# mamba-ssm, FlashAttention and of functions fused by PyTorch's compiler.
_KINDS = {
    COMMUNICATION: r"nccl|nvshmem|userbuffers|gloo:|c10d::",
    "state spaces": r"_chunk_|_state_passing|selective_scan|causal_conv1d|_ssd_",
    "attention": r"fmha|flash|sdpa|fused_attn|scaled_dot_product|cudnn::fusion|cudnn_generated|(^|_)attention",
    "optimizer": r"multi_tensor|adam|addcdiv|addcmul|lerp_|linalg_vector_norm|foreach",
    "matrix products": r"gemm|nvjet|cutlass|xmma|cublas|splitk|^aten::(mm|addmm|bmm|baddbmm|linear|matmul)$",
    "norms": r"rms_?norm|layer_?norm|(^|[^a-z])ln_(fwd|bwd)|l2norm",
    "loss": r"cross_?entropy|online_softmax|element_mul|nll_loss|log_?softmax|logsumexp",
    "positions": r"rope|rotary",
    "activations": r"[sg][ew]i?glu|silu|gelu|sigmoid|relu",
    "experts": r"permute_kernel|moe|router|topk|top_k|histogram|sort_chunks",
    "embedding": r"embedding|indexselect|index_select",
    "copies": r"memcpy|memset|copy|catarray|^aten::cat$|fill|zero_",
}
_PATTERNS = {kind: re.compile(pattern) for kind, pattern in _KINDS.items()}
_OPERATORS = ("aten::", "c10d::", "gloo:", "mkldnn::", "mkl::")
_DEVICE = ("kernel", "gpu_memcpy", "gpu_memset")
_RUNTIME = ("cuda_runtime", "cuda_driver")
_WAITS = re.compile(r"Synchronize$|^cudaMemcpy$")
_LATEST = 1e17  # microseconds, 3,000 years
_ITERATION = re.compile(r"^iteration \d+$")


class _Event(NamedTuple):
    """An event with a duration; ``correlation`` links a CUDA call to its work."""

    category: str
    name: str
    span: Interval
    thread: Any
    correlation: Any


@dataclass(frozen=True)
class Kernel:
    """A kernel or operator: full name, kind, calls and seconds per iteration."""

    name: str
    kind: str
    calls: float
    seconds: float


@dataclass(frozen=True)
class Breakdown:
    """Summary of one trace; seconds are means per iteration.

    name: the trace's path. device: the GPU's name, None if only the host was profiled. seconds: from an iteration's
    start to the next start, including the device's last work. kernels: longest first; concurrent kernels count twice.
    exposed: communication while nothing else ran (GPU). idle: seconds without a kernel (host: operator), by the host's
    phase at the end of the gap. waits: number and total time of host waits for the device.
    """

    name: str
    device: str | None
    iterations: int
    seconds: float
    kernels: Sequence[Kernel]
    exposed: float
    idle: dict[str, float]
    waits: tuple[float, float]

    @property
    def kinds(self) -> dict[str, float]:
        """Seconds by kind of kernel, largest first."""
        sums: dict[str, float] = defaultdict(float)
        for kernel in self.kernels:
            sums[kernel.kind] += kernel.seconds
        return dict(sorted(sums.items(), key=lambda item: -item[1]))


@cache
def kind_of(name: str, on_host: bool = False) -> str:
    """Return the kind of a kernel or host operator; unknown libraries are Python."""
    lower = name.lower()
    if on_host and not lower.startswith(_OPERATORS):
        return PYTHON
    return next((kind for kind, pattern in _PATTERNS.items() if pattern.search(lower)), OTHERS)


def read_trace(path: Path) -> Breakdown:
    """Read one trace, ``.json`` or ``.json.gz``.

    Raises:
        DataError: the file is unreadable, not a trace, or has no iteration.
    """
    try:
        raw = read_bytes(path)
        content = parse_json(gzip.decompress(raw) if path.suffix == ".gz" else raw)
    except (OSError, EOFError, zlib.error, ValueError) as error:
        raise DataError(f"{path}: cannot be read as a trace of PyTorch's profiler: {error}") from error
    listed = content.get("traceEvents") if isinstance(content, dict) else None
    if not isinstance(listed, list):
        raise DataError(f"{path}: not a trace of PyTorch's profiler: the list traceEvents is missing")
    try:
        events = [_event(each) for each in listed if isinstance(each, dict) and each.get("ph") == "X" and "ts" in each]
    except ValueError as error:
        raise DataError(f"{path}: is damaged: {error}. Fix: profile the run again") from error
    iterations = [each for each in events if each.category == "user_annotation" and _ITERATION.match(each.name)]
    if not iterations:
        raise DataError(
            f"{path}: no iteration is in this trace. Fix: profiling.use_pytorch_profiler=true (profiles training steps)"
        )
    device = _device(content) if any(each.category in _DEVICE for each in events) else None
    return _breakdown(str(path), device, events, iterations)


def _event(found: Mapping[str, Any]) -> _Event:
    begin, arguments = _nanoseconds(found, "ts", -_LATEST), found.get("args")
    correlation = arguments.get("correlation") if isinstance(arguments, dict) else None
    return _Event(
        category=str(found.get("cat")),
        name=str(found.get("name")),
        span=(begin, begin + (_nanoseconds(found, "dur", 0) if "dur" in found else 0)),
        thread=found.get("tid"),
        correlation=correlation if isinstance(correlation, int | str) else None,
    )


def _nanoseconds(found: Mapping[str, Any], field: str, least: float) -> int:
    """Convert an event's time from microseconds; raises ValueError if invalid."""
    time = found[field]
    if type(time) not in (int, float) or not least <= time <= _LATEST:  # rejects nan
        what = f"{field}={str(time)[:40]} is not a number of microseconds"
        raise ValueError(f"the event {str(found.get('name'))[:80]!r}: {what} from {least:g} to {_LATEST:g}")
    return round(1e3 * time)


def _device(content: Mapping[str, Any]) -> str:
    properties = content.get("deviceProperties")
    first = properties[0] if isinstance(properties, list) and properties else None
    return str(first.get("name", "a GPU")) if isinstance(first, dict) else "a GPU"


def _breakdown(name: str, device: str | None, events: Sequence[_Event], iterations: Sequence[_Event]) -> Breakdown:
    count, thread = len(iterations), iterations[0].thread
    on_device = [each for each in events if each.category in _DEVICE]
    begin = min(each.span[0] for each in iterations)
    end = max(each.span[1] for each in (*iterations, *on_device))
    if end <= begin:
        raise DataError(f"{name}: is damaged: its iterations take no time. Fix: profile the run again")
    if device is not None:
        timed = [each for each in on_device if each.span[1] > begin]
        own = [each.span[1] - max(each.span[0], begin) for each in timed]
    else:
        operators = [each for each in events if each.category == "cpu_op" and each.thread == thread]
        # Callers before called operators, which may begin at the same time.
        timed = sorted((e for e in operators if begin <= e.span[0] < end), key=lambda e: (e.span[0], -e.span[1]))
        own = _self_times([each.span for each in timed])
    busy = _union((each.span for each in timed), begin, end)
    others = _union((each.span for each in timed if kind_of(each.name) != COMMUNICATION), begin, end)
    calls = {each.correlation: each.span for each in events if each.category in _RUNTIME}
    launched = {each.span[0]: calls[each.correlation][0] for each in on_device if each.correlation in calls}
    phases = [e for e in events if e.category == "user_annotation" and e.thread == thread and e.name in PHASES]
    idle: dict[str, float] = defaultdict(float)
    for first, last in _gaps(busy, begin, end):  # the phase that launched the next kernel kept the device waiting
        idle[_phase_at(launched.get(last, last), phases)] += (last - first) / 1e9 / count
    # After the last step the profiler itself waits for the device.
    stepped = max(each.span[1] for each in iterations)
    waits = [
        e.span for e in events if e.category in _RUNTIME and _WAITS.search(e.name) and begin <= e.span[0] < stepped
    ]
    return Breakdown(
        name=name,
        device=device,
        iterations=count,
        seconds=(end - begin) / 1e9 / count,
        kernels=_kernels(zip((each.name for each in timed), own, strict=True), count, device is None),
        exposed=(_length(busy) - _length(others)) / 1e9 / count,
        idle=dict(sorted(idle.items(), key=lambda item: -item[1])),
        waits=(len(waits) / count, _length(waits) / 1e9 / count),
    )


def _kernels(own: Iterable[tuple[str, int]], count: int, on_host: bool) -> list[Kernel]:
    calls: dict[str, int] = defaultdict(int)
    spent: dict[str, int] = defaultdict(int)
    for name, each in own:
        calls[name] += 1
        spent[name] += each
    found = [Kernel(name, kind_of(name, on_host), calls[name] / count, spent[name] / 1e9 / count) for name in calls]
    return sorted(found, key=lambda kernel: -kernel.seconds)


def _self_times(spans: Sequence[Interval]) -> list[int]:
    """Return nanoseconds of one thread's operators, without called ones."""
    own: list[int] = []
    callers: list[int] = []
    for index, (begin, end) in enumerate(spans):
        while callers and spans[callers[-1]][1] <= begin:
            callers.pop()
        if callers:
            own[callers[-1]] -= end - begin
        callers.append(index)
        own.append(end - begin)
    return [max(0, left) for left in own]


def _union(spans: Iterable[Interval], begin: int, end: int) -> list[Interval]:
    """Merge spans between begin and end into disjoint, ordered intervals."""
    merged: list[Interval] = []
    for first, last in sorted(spans):
        first, last = max(first, begin), min(last, end)
        if first >= last:
            continue
        if merged and first <= merged[-1][1]:
            merged[-1] = (merged[-1][0], max(merged[-1][1], last))
        else:
            merged.append((first, last))
    return merged


def _gaps(busy: Sequence[Interval], begin: int, end: int) -> list[Interval]:
    borders = [begin, *(border for span in busy for border in span), end]
    return [(a, b) for a, b in zip(borders[::2], borders[1::2], strict=True) if b > a]


def _length(spans: Iterable[Interval]) -> int:
    return sum(end - begin for begin, end in spans)


def _phase_at(moment: int, phases: Sequence[_Event]) -> str:
    """Return the innermost phase of the host at a moment."""
    around = [(end - begin, name) for _, name, (begin, end), *_ in phases if begin <= moment < end]
    return min(around)[1] if around else "other"
