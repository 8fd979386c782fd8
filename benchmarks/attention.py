"""Compare context-parallel attention with PyTorch's attention on one process.

The one process computes the whole sequence.

    python benchmarks/attention.py                          # two gloo ranks on this machine, all sections, sizes to 8K
    python benchmarks/attention.py --sizes 4096,8192,16384,32768 --repeats 3
    python benchmarks/attention.py --ranks 4 --only speed   # more ranks than cores: read the CPU column
    torchrun --nproc_per_node=8 benchmarks/attention.py     # on GPUs: NCCL, the flash kernel

The two sides alternate within each round, so a machine that slows down slows both. Each ratio compares the times of one
round. Printed are the median over rounds and, in brackets, the smallest and the largest:

- ``wall``: time of the slowest rank over the time of one process with as many threads as there are ranks. On GPUs: over
  the time of one GPU, divided by the number of ranks.
- ``cpu``: CPU time of the slowest rank over the CPU time of the one process, divided by the number of ranks. It does
  not include waiting. Other programs on the machine disturb it less than wall time.
- ``all``: ratio of the sums over the rounds. For ``cpu`` the rank with the largest sum counts. The slowest rank changes
  from round to round by chance, so the slowest of one round is slower than any rank is on average.
"""

from __future__ import annotations

import argparse
import ctypes
import functools
import os
import statistics
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from benchmarks.gloo_ranks import run_on_ranks
from megatron_cp.attention import context_parallel_attention
from megatron_cp.attention.context import AttentionCall
from megatron_cp.attention.kernels.cpu import CpuFlash
from megatron_cp.attention.merge import Gradient, OutputAccumulator
from megatron_cp.attention.sharding import Layout, RowSpan, shard_sequence
from megatron_cp.attention.tiles import Mask
from megatron_cp.attention.transports import comm
from megatron_cp.attention.transports.comm import Peers
from megatron_cp.attention.transports.registry import RING, TRANSPORTS
from megatron_cp.attention.transports.ring import ring_attention

DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16}
ONE_LEVEL = [name for name, each in TRANSPORTS.items() if not each.hierarchical]
SECTIONS = ("speed", "split", "window", "packed", "overlap", "where", "pytorch")


@dataclass(frozen=True)
class Sample:
    """Times of one pass.

    They are the seconds until the last rank finished, and the CPU seconds of each rank that took part.
    """

    wall: float
    cpus: tuple[float, ...]

    @property
    def cpu(self) -> float:
        return max(self.cpus)


def keep_freed_memory() -> None:
    """Make glibc keep freed memory in the process, for both sides.

    The steps of a training run are all alike, so it requests almost no memory from the system. Here different passes
    alternate, and on a virtual machine fetching a page again can take as long as the computation on it.
    """
    mallopt = getattr(ctypes.CDLL(None), "mallopt", None)
    if mallopt is not None:
        m_trim_threshold, m_mmap_threshold = -1, -3
        mallopt(m_trim_threshold, 2**31 - 1)
        mallopt(m_mmap_threshold, 2**30)


class Bench:
    """Run calls in turn: one process on the whole problem, and ranks on shards.

    ``threads`` of the one process; None: as many as there are ranks.
    """

    def __init__(self, repeats: int, device: torch.device, threads: int | None = None) -> None:
        self.repeats, self.device = repeats, device
        self.size, self.rank = dist.get_world_size(), dist.get_rank()
        self.threads = threads or self.size

    def log(self, *words: object) -> None:
        if self.rank == 0:
            print(*words, flush=True)

    def time(self, call: Callable[[], None], alone: bool = False) -> Sample:
        """Time a call: the slowest rank, or rank 0 alone with all cores."""
        dist.barrier()
        if self.device.type == "cpu":
            torch.set_num_threads(self.threads if alone else 1)
        wall, cpu = time.perf_counter(), time.process_time()
        if self.rank == 0 or not alone:
            call()
            if self.device.type == "cuda":
                torch.cuda.synchronize()
        times = torch.tensor([time.perf_counter() - wall, time.process_time() - cpu], device=self.device)
        dist.barrier()
        every = [torch.empty_like(times) for _ in range(self.size)]
        dist.all_gather(every, times)
        walls, cpus = zip(*(one.tolist() for one in every[: 1 if alone else self.size]), strict=True)
        return Sample(max(walls), cpus)

    def compare(
        self, baseline: Callable[[], None], calls: dict[str, Callable[[], None]], whole: bool = True
    ) -> tuple[Sample, dict[str, str]]:
        """Return the ratio of each call to the baseline.

        With ``whole`` one process runs the baseline on all data.
        """
        rounds: list[tuple[Sample, dict[str, Sample]]] = []
        for _ in range(self.repeats + 1):
            rounds.append((self.time(baseline, alone=whole), {name: self.time(call) for name, call in calls.items()}))
        rounds = rounds[1:]  # the first warms up
        cpu_share = self.size if whole else 1
        wall_share = self.size if whole and self.device.type == "cuda" else 1
        best = Sample(min(base.wall for base, _ in rounds), (min(base.cpu for base, _ in rounds),))
        base_wall = sum(base.wall for base, _ in rounds) / wall_share
        base_cpu = max(map(sum, zip(*(base.cpus for base, _ in rounds), strict=True))) / cpu_share
        texts = {}
        for name in calls:
            walls = [passes[name].wall / base.wall * wall_share for base, passes in rounds]
            cpus = [passes[name].cpu / base.cpu * cpu_share for base, passes in rounds]
            all_wall = sum(passes[name].wall for _, passes in rounds) / base_wall
            all_cpu = max(map(sum, zip(*(passes[name].cpus for _, passes in rounds), strict=True))) / base_cpu
            texts[name] = f"wall {spread(walls)} all {all_wall:.3f}  cpu {spread(cpus)} all {all_cpu:.3f}"
        return best, texts


def spread(values: list[float]) -> str:
    return f"{statistics.median(values):5.3f} [{min(values):.3f} {max(values):.3f}]"


@dataclass(frozen=True)
class Shape:
    tokens: int
    heads: int = 8
    kv_heads: int = 8
    dim: int = 64
    dtype: torch.dtype = torch.float32

    def __str__(self) -> str:
        name = str(self.dtype).removeprefix("torch.")
        return f"S={self.tokens} heads={self.heads}/{self.kv_heads} dim={self.dim} {name}"

    def draw(self, device: torch.device) -> list[Tensor]:
        """Draw query, key, value and output gradient of the sequence, [s, 1, heads, dim]."""
        torch.manual_seed(0)
        heads = (self.heads, self.kv_heads, self.kv_heads, self.heads)
        return [torch.randn(self.tokens, 1, h, self.dim).to(device, self.dtype) for h in heads]


def forward_backward(attention: Callable[..., Tensor], tensors: list[Tensor]) -> None:
    *qkv, dout = tensors
    leaves = [x.detach().requires_grad_() for x in qkv]
    attention(*leaves).backward(dout)


def sdpa(q: Tensor, k: Tensor, v: Tensor, causal: bool = True) -> Tensor:
    q, k, v = (x.permute(1, 2, 0, 3) for x in (q, k, v))
    return F.scaled_dot_product_attention(q, k, v, is_causal=causal, enable_gqa=True).permute(2, 0, 1, 3)


def sharded(bench: Bench, tensors: list[Tensor]) -> list[Tensor]:
    return [shard_sequence(x, 0, bench.rank, bench.size) for x in tensors]


def transport(comm_type: str, **options: object) -> Callable[..., Tensor]:
    return functools.partial(context_parallel_attention, group=dist.group.WORLD, comm_type=comm_type, **options)


def bench_speed(bench: Bench, shapes: list[Shape]) -> None:
    bench.log("\n## Each transport against one process with as many threads as ranks (causal, forward and backward)")
    for shape in shapes:
        whole = shape.draw(bench.device)
        mine = sharded(bench, whole)
        calls = {name: functools.partial(forward_backward, transport(name), mine) for name in ONE_LEVEL}
        base, ratios = bench.compare(lambda: forward_backward(sdpa, whole), calls)  # noqa: B023
        bench.log(f"{shape}: one process {base.wall * 1e3:.0f} ms wall, {base.cpu * 1e3:.0f} ms cpu")
        for name, ratio in ratios.items():
            bench.log(f"  {name:10}  {ratio}")


class Contiguous(Layout):
    """Layout in which rank r has the r-th part of the sequence.

    It is compared with zigzag.
    """

    def spans(self, rank: int) -> tuple[RowSpan, ...]:
        return (RowSpan(0, self.rows, rank * self.rows, 0),)


def bench_split(bench: Bench, shape: Shape) -> None:
    bench.log("\n## Ring over contiguous shards, relative to the same ring over zigzag shards")
    whole = shape.draw(bench.device)
    peers = Peers.of(dist.group.WORLD)

    def ring(kind: type[Layout], q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        layout = kind((shape.tokens,), (shape.tokens,), bench.size)
        return ring_attention(q, k, v, None, AttentionCall(layout, Mask(None, 0), shape.dim**-0.5), peers)

    parts = [x.chunk(bench.size)[bench.rank] for x in whole]
    zigzag = functools.partial(forward_backward, functools.partial(ring, Layout), sharded(bench, whole))
    contiguous = functools.partial(forward_backward, functools.partial(ring, Contiguous), parts)
    _, ratios = bench.compare(zigzag, {"contiguous": contiguous}, whole=False)
    bench.log(f"{shape}: {ratios['contiguous']}")


def bench_window(bench: Bench, shape: Shape) -> None:
    bench.log("\n## Sliding window, relative to full causal attention on the same transport")
    mine = sharded(bench, shape.draw(bench.device))
    for name in ONE_LEVEL:
        full = functools.partial(forward_backward, transport(name), mine)
        windows = {
            f"window {shape.tokens // part}": functools.partial(
                forward_backward, transport(name, window_size=(shape.tokens // part, 0)), mine
            )
            for part in (4, 16)
        }
        for what, ratio in bench.compare(full, windows, whole=False)[1].items():
            bench.log(f"{shape} {name:10} {what:12} {ratio}")


def bench_packed(bench: Bench, shape: Shape) -> None:
    bench.log("\n## Pack of sequences of very different lengths, relative to a batch padded to the longest")
    unit = 2 * bench.size
    lengths = [max(unit, shape.tokens >> shift) for shift in (1, 2, 3, 4, 5, 5)]
    ends = torch.tensor([0, *lengths]).cumsum(0).to(bench.device)
    total, longest = int(ends[-1]), max(lengths)
    heads = (shape.heads, shape.kv_heads, shape.kv_heads, shape.heads)

    def draw(*lead: int) -> list[Tensor]:
        return [torch.randn(*lead, h, shape.dim).to(bench.device, shape.dtype) for h in heads]

    pack, padded = draw(total // bench.size), draw(longest // bench.size, len(lengths))
    for name in ONE_LEVEL:
        batch = functools.partial(forward_backward, transport(name), padded)
        packed = functools.partial(forward_backward, transport(name, cu_seqlens=ends), pack)
        ratio = bench.compare(batch, {"packed": packed}, whole=False)[1]["packed"]
        bench.log(f"{lengths} tokens, {name:10} {ratio}  (tokens {total / longest / len(lengths):.2f})")


@contextmanager
def slow_network(seconds: float, overlap: bool) -> Iterator[None]:
    """Delay every hop by ``seconds``.

    Without ``overlap`` the rank waits for it before it computes.
    """
    original = comm.hop

    class Late(comm.PendingReceive):
        def __init__(self, arrival: comm.PendingReceive) -> None:
            self.arrival, self.due = arrival, time.perf_counter() + seconds

        def wait(self) -> object:
            content = self.arrival.wait()
            time.sleep(max(0.0, self.due - time.perf_counter()))
            return content

    def hop(*arguments: object) -> comm.PendingReceive:
        late = Late(original(*arguments))
        return late if overlap else comm.PendingReceive(late.wait(), [])

    comm.hop = hop
    try:
        yield
    finally:
        comm.hop = original


def bench_overlap(bench: Bench, shape: Shape) -> None:
    bench.log("\n## Ring with every message delayed: share of the delay hidden behind compute")
    mine = sharded(bench, shape.draw(bench.device))
    run = functools.partial(forward_backward, transport(RING.name), mine)

    def delayed(seconds: float, overlap: bool) -> None:
        with slow_network(seconds, overlap):
            run()

    run()
    plain = min(bench.time(run).wall for _ in range(bench.repeats))
    messages = 2 * (bench.size - 1) + bench.size - 1
    for share in (0.05, 0.1, 0.2):
        delay = share * plain
        on, off = (
            min(bench.time(functools.partial(delayed, delay, overlap)).wall for _ in range(bench.repeats))
            for overlap in (True, False)
        )
        bench.log(
            f"{shape}: {plain * 1e3:.0f} ms; {messages} messages delayed by {delay * 1e3:.0f} ms: {on * 1e3:.0f} ms "
            f"with overlap, {off * 1e3:.0f} ms without: {1 - max(0.0, on - plain) / max(off - plain, 1e-9):.0%} hidden"
        )


def bench_where(bench: Bench, shapes: list[Shape]) -> None:
    bench.log("\n## Where the time goes (share of one forward and backward pass, slowest rank)")
    for shape in shapes:
        mine = sharded(bench, shape.draw(bench.device))
        for name in ONE_LEVEL:
            run = functools.partial(forward_backward, transport(name), mine)
            run()
            with stopwatches() as spent:
                total = bench.time(run).wall
            kernel, summed = spent["kernel"], spent["add"]
            rows = {
                "kernels": kernel,
                "merging, adding": summed,
                "sending, waiting": spent["exchange"],
                "copies, other": total - kernel - summed - spent["exchange"],
            }
            shares = ", ".join(f"{what} {seconds / total:.1%}" for what, seconds in rows.items())
            bench.log(f"{shape} {name:10} {total * 1e3:.0f} ms: {shares}")


@contextmanager
def stopwatches() -> Iterator[dict[str, float]]:
    """Measure seconds in kernels, in merging results and in exchanges.

    Exchanges count while they are started and awaited.
    """
    spent = {"kernel": 0.0, "add": 0.0, "exchange": 0.0}
    watched = [
        (CpuFlash, "forward", "kernel"),
        (CpuFlash, "backward", "kernel"),
        (OutputAccumulator, "add", "add"),
        (OutputAccumulator, "finish", "add"),
        (Gradient, "add", "add"),
        (Gradient, "add_all", "add"),
        (comm, "hop", "exchange"),
        (comm, "exchange", "exchange"),
        (comm.PendingReceive, "wait", "exchange"),
    ]

    def timed(function: Callable, name: str) -> Callable:
        def call(*arguments: object, **options: object) -> object:
            start = time.perf_counter()
            try:
                return function(*arguments, **options)
            finally:
                spent[name] += time.perf_counter() - start

        return call

    originals = [(owner, attribute, getattr(owner, attribute)) for owner, attribute, _ in watched]
    for (owner, attribute, name), (_, _, function) in zip(watched, originals, strict=True):
        setattr(owner, attribute, timed(function, name))
    try:
        yield spent
    finally:
        for owner, attribute, function in originals:
            setattr(owner, attribute, function)


def bench_pytorch(bench: Bench, shape: Shape) -> None:
    """Time PyTorch's ring template.

    PyTorch has no CPU path for it, so it gets the CPU kernel here.
    """
    bench.log("\n## PyTorch's own ring template with the same kernel, relative to our ring")
    if bench.device.type != "cpu":
        bench.log("on CPUs only: elsewhere use PyTorch's context_parallel")
        return
    from torch.distributed.tensor.experimental._context_parallel import _attention as theirs

    kernel = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu
    kernel_backward = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu_backward

    def forward_op(q: Tensor, k: Tensor, v: Tensor, is_causal: bool = False, **_: object) -> tuple[Tensor, ...]:
        return kernel(q, k, v, 0.0, is_causal)

    def backward_op(
        grad_out: Tensor, query: Tensor, key: Tensor, value: Tensor, out: Tensor, logsumexp: Tensor, is_causal: bool
    ) -> tuple[Tensor, ...]:
        return kernel_backward(grad_out, query, key, value, out, logsumexp, 0.0, is_causal)

    q, k, v, dout = (x.permute(1, 2, 0, 3) for x in sharded(bench, shape.draw(bench.device)))
    mine = sharded(bench, shape.draw(bench.device))

    def run(method: str) -> None:
        theirs.set_rotate_method(method)
        out, lse = theirs._templated_ring_attention(dist.group.WORLD, 2, forward_op, q, k, v, is_causal=True)[:2]
        theirs._templated_ring_attention_backward(
            dist.group.WORLD, 2, backward_op, dout, "grad_out", q, k, v, out.to(q.dtype), lse, True
        )

    calls = {f"rotate by {method}": functools.partial(run, method) for method in ("alltoall", "allgather")}
    ours = functools.partial(forward_backward, transport(RING.name), mine)
    for name, ratio in bench.compare(ours, calls, whole=False)[1].items():
        bench.log(f"{shape} {name:20} {ratio}")


def run(options: argparse.Namespace) -> None:
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    keep_freed_memory()
    bench = Bench(options.repeats, device)
    bench.log(f"{bench.size} ranks on {device.type}, {os.cpu_count()} cores, load {os.getloadavg()[0]:.1f}")
    shapes = [
        Shape(tokens, 8, kv_heads, dim, dtype)
        for tokens in options.sizes
        for dim in options.dims
        for dtype in (DTYPES[name] for name in options.dtypes)
        for kv_heads in (8, 2)
    ]
    usual = Shape(options.sizes[-1] if len(options.sizes) == 1 else options.sizes[1])
    if "speed" in options.only:
        bench_speed(bench, shapes)
    for name, section in (
        ("split", bench_split),
        ("window", bench_window),
        ("packed", bench_packed),
        ("overlap", bench_overlap),
        ("pytorch", bench_pytorch),
    ):
        if name in options.only:
            section(bench, usual)
    if "where" in options.only:
        bench_where(bench, [usual, Shape(usual.tokens, dtype=torch.bfloat16)])


def main() -> None:
    def numbers(text: str) -> list[int]:
        return [int(number) for number in names(text)]

    def names(text: str) -> list[str]:
        return text.split(",")

    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--ranks", type=int, default=2, help="number of gloo ranks to start; ignored under torchrun")
    parser.add_argument("--sizes", type=numbers, default=[4096, 8192], help="sequence lengths")
    parser.add_argument("--dims", type=numbers, default=[64, 128], help="head dims")
    parser.add_argument("--dtypes", type=names, default=[*DTYPES], help=", ".join(DTYPES))
    parser.add_argument("--repeats", type=int, default=5, help="measured rounds, after one warm-up round")
    parser.add_argument("--only", type=names, default=[*SECTIONS], help=", ".join(SECTIONS))
    options = parser.parse_args()
    for what, given, known in (("section", options.only, SECTIONS), ("dtype", options.dtypes, DTYPES)):
        if unknown := set(given) - set(known):
            parser.error(f"unknown {what} {', '.join(sorted(unknown))}; choose from {', '.join(known)}")
    if "RANK" in os.environ:
        dist.init_process_group()
        if torch.cuda.is_available():
            torch.cuda.set_device(int(os.environ["LOCAL_RANK"]))
        run(options)
        dist.destroy_process_group()
        return
    run_on_ranks(options.ranks, run, options)


if __name__ == "__main__":
    main()
