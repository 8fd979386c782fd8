"""Time training steps with and without groups of heads, in turns.

Both sides share one model, and whole steps are timed.

    python benchmarks/head_groups.py --ranks 1 --seq 4096 --groups 2,4

Both sides recompute whole layers. Prints the median of the ratios of neighbouring steps, of the ranks' processor time:
other programs on the machine do not count.

With ``--latency`` both sides have groups, with and without overlap of their messages, and time passes on the clock.
Then each exchange arrives that many seconds after it was sent, and a wait sleeps until then: so time in which something
is computed is not waited for again.

    python benchmarks/head_groups.py --ranks 2 --transport a2a --seq 2048 --groups 4 --latency 0.02
"""

from __future__ import annotations

import argparse
import statistics
import time
from typing import Any

import torch
import torch.distributed as dist
from megatron.core.tensor_parallel.layers import ColumnParallelLinear, RowParallelLinear
from megatron.core.transformer.attention import SelfAttention

from benchmarks.gloo_ranks import run_on_ranks
from megatron_cp.attention.transports import comm
from megatron_cp.models.layers.head_groups.attention import HeadGroupsAttention
from megatron_cp.models.layers.head_groups.projections import OutputByGroups, ProjectionByGroups
from megatron_cp.parallel.collectives import sum_over_ranks
from megatron_cp.training.setup import Run
from megatron_cp.training.step import train_step
from tests.training_runs import start, tiny_config


def config(arguments: argparse.Namespace) -> Any:
    return tiny_config(
        model__num_layers=4,
        model__hidden_size=arguments.hidden,
        model__ffn_hidden_size=3 * arguments.hidden,
        model__num_attention_heads=arguments.hidden // 32,
        model__num_query_groups=arguments.kv_heads,
        model__context_parallel_size=arguments.ranks,
        model__cp_comm_type=arguments.transport,
        model__recompute_granularity="full",
        model__recompute_method="uniform",
        model__recompute_num_layers=1,
        model__cross_entropy_chunk_size=512,
        model__attention_head_groups=2,
        dataset__seq_length=arguments.seq,
        train__micro_batch_size=1,
        train__global_batch_size=1,
        train__train_iters=1000,
    )


def set_groups(run: Run, groups: int) -> None:
    """Compute by ``groups``; 1: megatron-core's attention."""
    for layer in (module for chunk in run.model for module in chunk.modules()):
        if isinstance(module := getattr(layer, "self_attention", None), SelfAttention):
            module.head_groups = groups
            module.__class__ = SelfAttention if groups == 1 else HeadGroupsAttention
            module.linear_qkv.__class__ = ColumnParallelLinear if groups == 1 else ProjectionByGroups
            module.linear_proj.__class__ = RowParallelLinear if groups == 1 else OutputByGroups
            layer.input_layernorm.__dict__.pop("forward", None)
            if groups > 1:
                module.take_norm(layer.input_layernorm)


def set_overlap(run: Run, overlap: bool) -> None:
    for module in (module for chunk in run.model for module in chunk.modules()):
        if isinstance(module, HeadGroupsAttention):
            module.overlap = overlap


class Delayed(comm.PendingReceive[Any]):
    """Messages that arrive ``latency`` seconds after they were sent, or later."""

    latency = 0.0

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self._there = time.perf_counter() + self.latency

    def wait(self) -> Any:
        time.sleep(max(0.0, self._there - time.perf_counter()))
        return super().wait()


def measure_overlap(arguments: argparse.Namespace) -> None:
    run, batches = start(config(arguments))
    Delayed.latency = arguments.latency
    comm.PendingReceive = Delayed  # type: ignore[misc]  # this process ends after it

    def seconds(overlap: bool) -> float:
        set_overlap(run, overlap)
        microbatches = next(batches).microbatches
        dist.barrier()
        begin = time.perf_counter()
        train_step(run, microbatches)
        dist.barrier()
        return time.perf_counter() - begin

    for groups in arguments.groups:
        set_groups(run, groups)
        seconds(False), seconds(True)
        pairs = [(seconds(False), seconds(True)) for _ in range(arguments.pairs)]
        report(arguments, f"{groups} groups, {1000 * arguments.latency:g} ms", "s without overlap", pairs)
    run.close()


def report(arguments: argparse.Namespace, what: str, unit: str, pairs: list[tuple[float, float]]) -> None:
    """Print the median of the first side, and of the ratios, on the first rank."""
    if dist.get_rank():
        return
    ratios = [second / first for first, second in pairs]
    quartiles = statistics.quantiles(ratios, n=4)
    print(
        f"{arguments.ranks} ranks, {arguments.transport}, {arguments.seq} tokens, {what}: "
        f"{statistics.median(first for first, _ in pairs):.2f} {unit}, ratio "
        f"{statistics.median(ratios):.3f} (quartiles {quartiles[0]:.3f} to {quartiles[2]:.3f})",
        flush=True,
    )


def measure(arguments: argparse.Namespace) -> None:
    run, batches = start(config(arguments))

    def seconds(groups: int) -> float:
        set_groups(run, groups)
        microbatches = next(batches).microbatches
        begin = time.process_time()
        train_step(run, microbatches)
        return sum_over_ranks(torch.tensor(time.process_time() - begin, dtype=torch.float64)).item()

    for groups in arguments.groups:
        seconds(1), seconds(groups)
        pairs = [(seconds(1), seconds(groups)) for _ in range(arguments.pairs)]
        report(arguments, f"{groups} groups", "s of processors without", pairs)
    run.close()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--ranks", type=int, default=1)
    parser.add_argument("--transport", default="p2p")
    parser.add_argument("--seq", type=int, default=4096)
    parser.add_argument("--hidden", type=int, default=256)
    parser.add_argument("--kv-heads", type=int, default=8)
    parser.add_argument("--groups", type=lambda text: [int(each) for each in text.split(",")], default=[2, 4])
    parser.add_argument("--pairs", type=int, default=10)
    parser.add_argument("--latency", type=float, help="seconds of each exchange; compare with and without overlap")
    arguments = parser.parse_args()
    run_on_ranks(arguments.ranks, measure if arguments.latency is None else measure_overlap, arguments)


if __name__ == "__main__":
    main()
