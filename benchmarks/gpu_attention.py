"""Attention alone on one device: our kernels beside others', and what a ring's cutting into blocks costs.

    python benchmarks/gpu_attention.py                                              # a GPU: 4K to 64K tokens
    python benchmarks/gpu_attention.py --sizes 4096 --heads 32/8 --dims 128 --rings 2,4,8
    python benchmarks/gpu_attention.py --sizes 512 --heads 8/2 --dims 64 --matmul 512 --packs 8   # on a CPU, to try it

Causal, forward and forward plus backward, in bf16 on a GPU and float32 on a CPU, the ways taking turns in every round.
``sdpa`` is PyTorch's own with the kernel that it chooses, ``cudnn`` and ``flash`` with cuDNN's and FlashAttention-2,
between which ours chooses. Where Transformer Engine is installed ``te`` is its attention and ``ours by te`` ours with
its kernels, as in its layers, which the rings below have then too. A way that fails is left out, its error on standard
error. On a GPU the kernels' time is taken and not the host's: they are launched while the device is kept waiting, as in
training, where the host is ahead of it. Rates count causal attention's operations (2 a pair and channel forward for
each of two products, 2.5 times that backward) over half the square, and stand beside the rate of large matrix products
in the same run.

A ring of c ranks is run without its communication: this device does what one rank would launch, on blocks of the same
sizes, with the merging of partial results; a visitor is there when it is asked for. Printed is c times the slowest
rank's time over the time of the whole sequence in one call: what is above 1 is the price of the blocks.

A pack holds as many sequences as it says, the longest four times the shortest. Beside our attention of it, on a GPU one
launch, and Transformer Engine's, ``one by one`` is sdpa of each sequence; here the host's time counts too, for it is
what many launches cost.
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

from benchmarks.gpu_pretrain import told, told_rates_of_products, wait
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
PAUSE = 40_000_000  # clock cycles of the device, some 20 ms: longer than the host takes to launch a pass


def inputs(rows: int, heads: int, kv_heads: int, dim: int) -> Inputs:
    """Query, key and value [rows, 1, heads, dim] that want gradients."""
    dtype = torch.bfloat16 if torch.cuda.is_available() else torch.float32
    query, key, value = (
        torch.randn(rows, 1, count, dim, device=device()).to(dtype).requires_grad_()
        for count in (heads, kv_heads, kv_heads)
    )
    return query, key, value


def ring_of_one(rank: int, size: int, pack: Layout | None = None, by_te: bool = False) -> Attention:
    """What ``rank`` of a ring of ``size`` launches for its shard of a sequence, or of a ``pack``.

    ``by_te``: Transformer Engine's kernels, and not PyTorch's.
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
    """sdpa of each sequence of a pack."""

    def attention(query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        sequences = zip(*(x.split(list(lengths)) for x in (query, key, value)), strict=True)
        return torch.cat([sdpa(*sequence) for sequence in sequences])

    return attention


def uneven(size: int, count: int) -> tuple[int, ...]:
    """Lengths of ``count`` sequences, ``size`` tokens in all, the longest about four times the shortest."""
    step = next(step for step in (7, 5, 3, 1) if math.gcd(step, count) == 1)
    shares = [1 + 3 * (step * index % count) / max(1, count - 1) for index in range(count)]
    ends = [round(size * end / sum(shares)) for end in accumulate(shares)]
    return tuple(end - start for start, end in pairwise([0, *ends]))


def transformer_engine(heads: int, kv_heads: int, dim: int, pack: Sequence[int] | None = None) -> Attention | None:
    """Transformer Engine's attention, of a ``pack`` of such lengths; None where it is not there or there is no GPU."""
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
    """Seconds forward, and forward plus backward, of one run: of a GPU, unless ``with_host``."""
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


def those_that_work(ways: Ways) -> Ways:
    """The first, whose error is the case's, and of the others those that can compute it; each runs once and is warm."""
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
    """Seconds of each way in each round, forward and both; one round before is not counted."""
    found: dict[str, tuple[list[float], list[float]]] = {name: ([], []) for name in ways}
    for index in range(repeats + 1):
        for name, (attention, given) in ways.items():
            for total, seconds in zip(found[name], seconds_of(attention, given, with_host), strict=True):
                total.extend([seconds] if index else [])
    return found


def ratio(times: list[float], others: list[float], factor: float = 1.0) -> str:
    """``factor`` times the one over the other: median of the rounds, least and most."""
    each = [factor * a / b for a, b in zip(times, others, strict=True)]
    return f"{statistics.median(each):.3f} [{min(each):.3f} {max(each):.3f}]"


def case(size: int, heads: int, kv_heads: int, dim: int, rings: list[int], repeats: int, peak: float) -> None:
    """The rows of one shape."""
    whole = inputs(size, heads, kv_heads, dim)
    ways: Ways = {"ours": (ring_of_one(0, 1), whole), "sdpa": (sdpa, whole)}
    if torch.cuda.is_available():
        ways["cudnn"] = (partial(sdpa, kernel=SDPBackend.CUDNN_ATTENTION), whole)
        ways["flash"] = (partial(sdpa, kernel=SDPBackend.FLASH_ATTENTION), whole)
    engine = transformer_engine(heads, kv_heads, dim)
    if engine is not None:
        ways |= {"te": (engine, whole), "ours by te": (ring_of_one(0, 1, by_te=True), whole)}
    ways = those_that_work(ways)
    for count in rings:
        shard = inputs(size // count, heads, kv_heads, dim)
        by_te = engine is not None
        ways |= {
            f"ring {count}, rank {rank}": (ring_of_one(rank, count, by_te=by_te), shard) for rank in {0, count - 1}
        }
    found = measure(ways, repeats)
    name = f"| {size} | {heads}/{kv_heads} | {dim} |"
    told_rates(found, name, size * size / 2 * heads * dim * 4, peak, (*KERNELS, "te"), ("te", "sdpa"))
    for count in rings:
        ranks = [found[f"ring {count}, rank {rank}"] for rank in {0, count - 1}]
        slowest = [[max(times) for times in zip(*part, strict=True)] for part in zip(*ranks, strict=True)]
        alone = found.get("ours by te", found["ours"])
        forward, both = (ratio(part, whole, count) for part, whole in zip(slowest, alone, strict=True))
        print(f"{name} ring of {count} | {forward} | {both} | |", flush=True)


def pack_case(size: int, count: int, heads: int, kv_heads: int, dim: int, repeats: int, peak: float) -> None:
    """The rows of a pack of ``count`` sequences."""
    lengths, given = uneven(size, count), inputs(size, heads, kv_heads, dim)
    layout = Layout(lengths, lengths, 1)
    ways: Ways = {
        "ours": (ring_of_one(0, 1, layout), given),
        "one by one": (one_by_one(lengths), given),
    }
    engine = transformer_engine(heads, kv_heads, dim, lengths)
    if engine is not None:
        ways |= {"te": (engine, given), "ours by te": (ring_of_one(0, 1, layout, by_te=True), given)}
    found = measure(those_that_work(ways), repeats, with_host=True)
    pairs = sum(length**2 for length in lengths) / 2 * heads * dim * 4
    name = f"| {size} in {count} | {heads}/{kv_heads} | {dim} |"
    told_rates(found, name, pairs, peak, ("ours", "ours by te", "one by one", "te"), ("te", "one by one"))


def told_rates(
    found: dict[str, tuple[list[float], list[float]]],
    name: str,
    pairs: float,
    peak: float,
    ways: Sequence[str],
    beside: Sequence[str],
) -> None:
    """The rows of those ``ways`` that were measured, each over the first of ``beside`` that was."""
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
    parser.add_argument("--packs", **numbers, default=[8, 64], help="how many sequences a pack of each size has")
    parser.add_argument("--repeats", type=int, default=10)
    parser.add_argument("--matmul", type=int, default=8192, help="rows and columns of the matrices")
    parser.add_argument("--matmul-seconds", type=float, default=5.0, help="of products, before the rate that lasts")
    options = parser.parse_args()
    peak = told_rates_of_products(options.matmul, options.matmul_seconds)
    print("| tokens | heads | dim | way | forward | both | both, over te's (sdpa's, or one by one, without it) |")
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
                        except Exception as error:  # the other shapes are measured all the same
                            print(f"| {size} | {heads} | {dim} | {told(error)} | | | |", flush=True)
                            failed = True
    sys.exit(failed)


if __name__ == "__main__":
    main()
