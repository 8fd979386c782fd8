"""Measure attention on one device: our kernels, others', and blocks of a ring.

The blocks are those into which a ring divides a sequence. What they cost is measured.

    python benchmarks/gpu_attention.py                                              # a GPU: 4K to 64K tokens
    python benchmarks/gpu_attention.py --sizes 4096 --heads 32/8 --dims 128 --rings 2,4,8
    python benchmarks/gpu_attention.py --sizes 512 --heads 8/2 --dims 64 --matmul 512 --packs 8   # on a CPU, to try it

Causal attention, forward and forward plus backward, in bf16 on a GPU and float32 on a CPU. The kernels alternate in
every round. A kernel that fails is left out; its error goes to standard error.

- ``ours``: this package's attention, which chooses between ``cudnn`` and ``flash``.
- ``sdpa``: PyTorch's attention with the kernel that PyTorch chooses; ``cudnn`` and ``flash``: with cuDNN's and
  FlashAttention-2.
- ``te``: Transformer Engine's attention, where it is installed; ``ours by te``: ours with its kernels, as in its
  layers. The rings below then use its kernels too.

On a GPU the kernels' time is measured, without the host's: kernels are launched while the device is kept waiting. In
training the host is ahead of the device as well. Rates count causal attention's operations (2 a pair and channel
forward for each of two products, 2.5 times as many backward) over half the square. They are printed as a share of the
rate of large matrix products in the same run.

A ring of c ranks runs without communication: this device launches what one rank would launch, on blocks of the same
sizes, including the merging of partial results. Received blocks are available at once. Printed is c times the slowest
rank's time over the time of the whole sequence in one call. The part above 1 is the cost of the blocks.

In a pack of n sequences the longest is four times the shortest. ``one by one`` calls sdpa for each sequence. Here the
host's time counts too, because it is the cost of many launches.
"""

from __future__ import annotations

import argparse
import math
import statistics
import sys
import time
from collections.abc import Callable, Sequence
from functools import partial
from itertools import accumulate, pairwise
from pathlib import Path
from unittest import mock

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from benchmarks.gpu_pretrain import add_matmul, error_cell, print_matmul_rates, wait
from megatron_cp.attention.context import AttentionCall
from megatron_cp.attention.sharding import Layout
from megatron_cp.attention.tiles import Mask
from megatron_cp.attention.transports import comm
from megatron_cp.attention.transports.comm import Peers, PendingReceive
from megatron_cp.attention.transports.ring import ring_attention
from megatron_cp.parallel.device import device

Inputs = tuple[Tensor, Tensor, Tensor]
Attention = Callable[[Tensor, Tensor, Tensor], Tensor]
Ways = dict[str, tuple[Attention, Inputs]]

KERNELS = ("ours", "ours by te", "sdpa", "cudnn", "flash")
PAUSE = 40_000_000  # clock cycles of the device, about 20 ms: longer than the host takes to launch a pass


def inputs(rows: int, heads: int, kv_heads: int, dim: int) -> Inputs:
    """Draw query, key and value [rows, 1, heads, dim] that require gradients."""
    dtype = torch.bfloat16 if torch.cuda.is_available() else torch.float32
    query, key, value = (
        torch.randn(rows, 1, count, dim, device=device()).to(dtype).requires_grad_()
        for count in (heads, kv_heads, kv_heads)
    )
    return query, key, value


def ring_of_one(rank: int, size: int, pack: Layout | None = None, by_te: bool = False) -> Attention:
    """Return what ``rank`` of a ring of ``size`` launches for its shard.

    The shard is one of a sequence or of a ``pack``. ``by_te``: use Transformer Engine's kernels instead of PyTorch's.
    """
    peers = Peers(None, rank, size)

    def attention(query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        layout = pack or Layout.dense(query.shape[0] * size, size)
        scale = 1 / math.sqrt(query.shape[-1])
        attention_call = AttentionCall(layout, Mask(right=0), scale, transformer_engine=by_te)
        return ring_attention(query, key, value, None, attention_call, peers)

    return attention


def sdpa(query: Tensor, key: Tensor, value: Tensor, kernel: SDPBackend | None = None) -> Tensor:
    if kernel is not None:
        with sdpa_kernel(kernel):
            return sdpa(query, key, value)
    q, k, v = (x.permute(1, 2, 0, 3) for x in (query, key, value))
    out = F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=q.shape[1] != k.shape[1])
    return out.permute(2, 0, 1, 3)


def one_by_one(lengths: Sequence[int]) -> Attention:
    """Return attention that calls sdpa for each sequence of a pack."""

    def attention(query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        sequences = zip(*(x.split(list(lengths)) for x in (query, key, value)), strict=True)
        return torch.cat([sdpa(*sequence) for sequence in sequences])

    return attention


def uneven(size: int, count: int) -> tuple[int, ...]:
    """Return lengths of ``count`` sequences, ``size`` tokens in total.

    The longest is about four times the shortest.
    """
    step = next(step for step in (7, 5, 3, 1) if math.gcd(step, count) == 1)
    shares = [1 + 3 * (step * index % count) / max(1, count - 1) for index in range(count)]
    ends = [round(size * end / sum(shares)) for end in accumulate(shares)]
    return tuple(end - start for start, end in pairwise([0, *ends]))


def transformer_engine(heads: int, kv_heads: int, dim: int, pack: Sequence[int] | None = None) -> Attention | None:
    """Return Transformer Engine's attention, of a ``pack`` of these lengths.

    None without it or without a GPU.
    """
    if not torch.cuda.is_available():
        return None
    try:
        from transformer_engine.pytorch import DotProductAttention
    except ImportError:
        return None
    module = DotProductAttention(
        heads,
        dim,
        num_gqa_groups=kv_heads,
        attention_dropout=0.0,
        qkv_format="thd" if pack else "sbhd",
        attn_mask_type="padding_causal" if pack else "causal",
    )
    if pack is None:
        return lambda query, key, value: module(query, key, value)
    ends = torch.tensor([0, *accumulate(pack)], dtype=torch.int32, device=device())
    offsets = {"cu_seqlens_q": ends, "cu_seqlens_kv": ends, "max_seqlen_q": max(pack), "max_seqlen_kv": max(pack)}

    def attention(query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        out = module(query.squeeze(1), key.squeeze(1), value.squeeze(1), **offsets)
        return out.unsqueeze(1)

    return attention


def seconds_of(attention: Attention, given: Inputs, with_host: bool = False) -> tuple[float, float]:
    """Return seconds of one run, forward and forward plus backward.

    They are the GPU's, unless ``with_host``.
    """
    for x in given:
        x.grad = None
    if torch.cuda.is_available() and not with_host:
        return _device_seconds_of(attention, given)
    wait()
    began = time.perf_counter()
    out = attention(*given)
    wait()
    forward = time.perf_counter() - began
    dout = torch.ones_like(out)
    wait()
    began = time.perf_counter()
    out.backward(dout)
    wait()
    return forward, forward + time.perf_counter() - began


def _device_seconds_of(attention: Attention, given: Inputs) -> tuple[float, float]:
    borders = [torch.cuda.Event(enable_timing=True) for _ in range(4)]
    wait()
    torch.cuda._sleep(PAUSE)
    borders[0].record()
    out = attention(*given)
    borders[1].record()
    dout = torch.ones_like(out)
    borders[2].record()
    out.backward(dout)
    borders[3].record()
    wait()
    forward, backward = (borders[i].elapsed_time(borders[i + 1]) / 1e3 for i in (0, 2))
    return forward, forward + backward


def usable(ways: Ways) -> Ways:
    """Return the kernels that can compute their inputs, after one warm-up run each.

    Raises the first kernel's error. Errors of the others are printed.
    """
    first, works = next(iter(ways)), {}
    for name, way in ways.items():
        try:
            seconds_of(*way)
        except (RuntimeError, ValueError, AssertionError) as error:
            if name == first:
                raise
            print(f"{name}: {type(error).__name__}: {(str(error).splitlines() or [''])[0]}", file=sys.stderr)
        else:
            works[name] = way
    return works


def measure(ways: Ways, repeats: int, with_host: bool = False) -> dict[str, tuple[list[float], list[float]]]:
    """Return seconds of each kernel in each round, forward and both.

    There is one warm-up round.
    """
    found: dict[str, tuple[list[float], list[float]]] = {name: ([], []) for name in ways}
    for index in range(repeats + 1):
        for name, (attention, given) in ways.items():
            for total, seconds in zip(found[name], seconds_of(attention, given, with_host), strict=True):
                total.extend([seconds] if index else [])
    return found


def ratio(times: list[float], others: list[float], factor: float = 1.0) -> str:
    """Format ``factor`` times the ratio of times.

    Median of the rounds, smallest and largest.
    """
    each = [factor * a / b for a, b in zip(times, others, strict=True)]
    return f"{statistics.median(each):.3f} [{min(each):.3f} {max(each):.3f}]"


def case(size: int, heads: int, kv_heads: int, dim: int, rings: list[int], repeats: int, peak: float) -> None:
    """Print the rows of one shape."""
    whole = inputs(size, heads, kv_heads, dim)
    ways: Ways = {"ours": (ring_of_one(0, 1), whole), "sdpa": (sdpa, whole)}
    if torch.cuda.is_available():
        ways["cudnn"] = (partial(sdpa, kernel=SDPBackend.CUDNN_ATTENTION), whole)
        ways["flash"] = (partial(sdpa, kernel=SDPBackend.FLASH_ATTENTION), whole)
    engine = transformer_engine(heads, kv_heads, dim)
    if engine is not None:
        ways |= {"te": (engine, whole), "ours by te": (ring_of_one(0, 1, by_te=True), whole)}
    ways = usable(ways)
    for count in rings:
        shard = inputs(size // count, heads, kv_heads, dim)
        by_te = engine is not None
        ways |= {
            f"ring {count}, rank {rank}": (ring_of_one(rank, count, by_te=by_te), shard) for rank in {0, count - 1}
        }
    found = measure(ways, repeats)
    name = f"| {size} | {heads}/{kv_heads} | {dim} |"
    print_rates(found, name, size * size / 2 * heads * dim * 4, peak, (*KERNELS, "te"), ("te", "sdpa"))
    for count in rings:
        ranks = [found[f"ring {count}, rank {rank}"] for rank in {0, count - 1}]
        slowest = [[max(times) for times in zip(*part, strict=True)] for part in zip(*ranks, strict=True)]
        alone = found.get("ours by te", found["ours"])
        forward, both = (ratio(part, whole, count) for part, whole in zip(slowest, alone, strict=True))
        print(f"{name} ring of {count} | {forward} | {both} | |", flush=True)


def pack_case(size: int, count: int, heads: int, kv_heads: int, dim: int, repeats: int, peak: float) -> None:
    """Print the rows of a pack of ``count`` sequences."""
    lengths, given = uneven(size, count), inputs(size, heads, kv_heads, dim)
    layout = Layout(lengths, lengths, 1)
    ways: Ways = {
        "ours": (ring_of_one(0, 1, layout), given),
        "one by one": (one_by_one(lengths), given),
    }
    engine = transformer_engine(heads, kv_heads, dim, lengths)
    if engine is not None:
        ways |= {"te": (engine, given), "ours by te": (ring_of_one(0, 1, layout, by_te=True), given)}
    found = measure(usable(ways), repeats, with_host=True)
    pairs = sum(length**2 for length in lengths) / 2 * heads * dim * 4
    name = f"| {size} in {count} | {heads}/{kv_heads} | {dim} |"
    print_rates(found, name, pairs, peak, ("ours", "ours by te", "one by one", "te"), ("te", "one by one"))


def print_rates(
    found: dict[str, tuple[list[float], list[float]]],
    name: str,
    pairs: float,
    peak: float,
    ways: Sequence[str],
    beside: Sequence[str],
) -> None:
    """Print the rows of the measured ``ways``.

    Each is relative to the first measured one of ``beside``.
    """
    for way in ways:
        if way in found:
            forward, both = found[way]
            rates = [pairs / statistics.median(forward) / peak, 3.5 * pairs / statistics.median(both) / peak]
            over = ratio(both, found[next(other for other in (*beside, "ours") if other in found)][1])
            print(f"{name} {way} | {100 * rates[0]:.0f} % | {100 * rates[1]:.0f} % | {over} |", flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    numbers = {"type": lambda text: [int(part) for part in text.split(",")]}
    parser.add_argument("--sizes", **numbers, default=[4096, 8192, 16384, 32768, 65536])
    parser.add_argument("--heads", type=lambda text: text.split(","), default=["32/32", "32/8"])
    parser.add_argument("--dims", **numbers, default=[64, 128])
    parser.add_argument("--rings", **numbers, default=[2, 4, 8])
    parser.add_argument("--packs", **numbers, default=[8, 64], help="numbers of sequences per pack")
    parser.add_argument("--repeats", type=int, default=10)
    add_matmul(parser)
    options = parser.parse_args()
    peak = print_matmul_rates(options.matmul, options.matmul_seconds)
    print("| tokens | heads | dim | kernel | forward | both | both, over te's (or sdpa's, or one by one) |")
    print("|---|---|---|---|---|---|---|")

    def arrived(
        pair: tuple[Tensor, Tensor], distance: int, peers: Peers, tag: int
    ) -> PendingReceive[tuple[Tensor, Tensor]]:
        return PendingReceive(pair, [])

    failed = False
    with mock.patch.object(comm, "hop", arrived):
        for dim in options.dims:
            for heads in options.heads:
                count, kv_count = (int(part) for part in heads.split("/"))
                for size in options.sizes:
                    cases = [partial(case, size, count, kv_count, dim, options.rings)]
                    cases += [partial(pack_case, size, n, count, kv_count, dim) for n in options.packs]
                    for one in cases:
                        try:
                            one(options.repeats, peak)
                        except Exception as error:  # continue with the other shapes
                            print(f"| {size} | {heads} | {dim} | {error_cell(error)} | | | |", flush=True)
                            failed = True
    sys.exit(failed)


if __name__ == "__main__":
    main()
