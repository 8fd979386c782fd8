"""Runs of the program whose live memory is counted and predicted.

The memory model predicts it.
"""

from __future__ import annotations

import operator
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
import torch.distributed as dist

from megatron_cp.config.run_config import RunConfig
from megatron_cp.dynamic_cp.runtime.packing import PackedMicrobatch
from megatron_cp.estimate.job import Job
from megatron_cp.estimate.memory import CPU, stage_estimate
from megatron_cp.estimate.memory.stages import backward_states
from megatron_cp.models.layers.router import routers_in
from megatron_cp.parallel.layout import layout_of
from megatron_cp.training.setup import Run
from tests.live_memory import NEAR, counted
from tests.ranks import run_ranks
from tests.training_runs import VOCAB, start, tiny_config, train_step


@dataclass(frozen=True)
class Counted:
    """Counted memory of one rank.

    It has the rank's pipeline stage, its largest moments by kind, the tokens of its largest microbatches, and the
    number of microbatches.

    moments: the peak, then other local maxima within 2 % of it. tokens: the mean of the microbatches under way at once.
    expert_load: of :func:`route`, and of other ranks' packs. pack_load: of the job.
    """

    stage: int
    moments: Sequence[Mapping[str, int]]
    tokens: int
    microbatches: int
    expert_load: float
    pack_load: float = 1.0

    @property
    def peak(self) -> int:
        return sum(self.moments[0].values())


def count(overrides: dict[str, Any], crowded: bool = False) -> Counted:
    """Measure the second step of a run on this rank: the optimizer has its state then."""
    run, batches = start(tiny_config(**overrides))
    load = route(run, crowded)
    train_step(run, next(batches).microbatches)
    with counted(run) as memory:
        microbatches = next(batches).microbatches
        memory.see_batches(microbatches)
        train_step(run, microbatches)
    tokens: list[list[int]] = [[]] * run.groups.ep.size()
    dist.all_gather_object(tokens, [_tokens(each) for each in microbatches], run.groups.ep)
    stage, own = run.groups.pp.rank(), run.groups.ep.rank()
    run.close()
    states = backward_states(run.config.model, stage, len(microbatches))
    most = max((each.under_way for each in states), key=sum)
    of_job = of_packs(tokens, own, [sum(each > place for each in most) for place in range(max(most))])
    return Counted(stage, _largest(memory.moments), of_job[0], len(microbatches), load * of_job[1], of_job[2])


def of_packs(tokens: Sequence[Sequence[int]], own: int, under_way: Sequence[int]) -> tuple[int, float, float]:
    """Return the tokens, expert load and pack load of a job: of the largest packs.

    tokens: of the microbatches of all ranks that share experts. under_way: how many chunks hold a microbatch, for each
    microbatch that is under way at once, from the oldest.
    """

    def held(start: int, rank: int) -> float:
        found = tokens[rank][start : start + len(under_way)]
        chunks = under_way[: len(found)]
        return sum(map(operator.mul, found, chunks)) / sum(chunks)

    start = max(range(max(1, len(tokens[own]) - len(under_way) + 1)), key=lambda start: held(start, own))
    mean = held(start, own)
    load = sum(held(start, rank) for rank in range(len(tokens))) / len(tokens) / mean
    return round(mean), load, tokens[own][start] / mean


def _largest(moments: Iterable[Iterable[tuple[str, int]]]) -> list[dict[str, int]]:
    found = sorted(map(dict, moments), key=lambda moment: -sum(moment.values()))
    return [each for each in found if sum(each.values()) >= (1 - NEAR) * sum(found[0].values())]


def route(run: Run, crowded: bool) -> float:
    """Send each expert as many tokens, or all tokens to the first rank's.

    Returns the load of that rank. What a router chooses cannot be known in advance, and differs by layer.
    """
    model = run.config.model
    ranks = model.expert_model_parallel_size if crowded else 1
    for router in routers_in(run.model):
        router.routing = partial(_routed, router.routing, (model.num_moe_experts or 1) // ranks, model.moe_router_topk)
    return float(ranks)


def _routed(routing: Callable[..., Any], experts: int, topk: int, logits: torch.Tensor, **inputs: Any) -> Any:
    """Route tokens to the first ``experts`` in turn."""
    with torch.no_grad():
        rows = logits.data.view(-1, logits.shape[-1])
        first = torch.arange(rows.shape[0])[:, None] * topk
        rows.scatter_(1, (first + torch.arange(topk)) % experts, 1e4)
    return routing(logits, **inputs)


def _tokens(microbatch: Any) -> int:
    values = vars(microbatch) if isinstance(microbatch, PackedMicrobatch) else microbatch
    return values["tokens"].numel()


def compare(
    world_size: int, overrides: dict[str, Any], crowded: bool = False
) -> list[tuple[Counted, Mapping[str, float]]]:
    """Return each stage's rank that needs most memory, and the predicted bytes."""
    config = tiny_config(**overrides)
    ranks = run_ranks(count, world_size, overrides, crowded)
    stages = sorted({each.stage for each in ranks})
    found = []
    for stage in stages:
        most = max((each for each in ranks if each.stage == stage), key=lambda each: each.peak)
        found.append((most, stage_estimate(job_of(config, world_size, most), stage, CPU).kinds))
    return found


def job_of(config: RunConfig, world_size: int, found: Counted) -> Job:
    layout = layout_of(config.model, config.dist, world_size)
    packed = config.model.sequence_packing_scheduler is not None
    return Job(
        config.model,
        config.optimizer,
        config.ddp,
        layout,
        1 if packed else config.train.micro_batch_size,
        found.microbatches * layout.dp * (1 if packed else config.train.micro_batch_size),
        VOCAB,
        gemm="fp32",
        lengths=(found.tokens * layout.cp,) if packed else None,
        expert_load=found.expert_load,
        pack_load=found.pack_load,
    )


def errors(counted: Counted, predicted: Mapping[str, float]) -> dict[str, float]:
    """Return relative errors of the total and of each kind.

    The error of a kind below 2 % of the total is a share of those 2 %. Where several moments hold almost as much, kinds
    are those of the moment that is most like the predicted one.
    """
    found = {"total": sum(predicted.values()) / counted.peak - 1}
    return found | min((_of_kinds(each, predicted, 0.02 * counted.peak) for each in counted.moments), key=_worst)


def _of_kinds(counted: Mapping[str, int], predicted: Mapping[str, float], least: float) -> dict[str, float]:
    kinds = counted.keys() | predicted.keys()
    return {kind: (predicted.get(kind, 0) - counted.get(kind, 0)) / max(counted.get(kind, 0), least) for kind in kinds}


def _worst(errors: Mapping[str, float]) -> float:
    return max(map(abs, errors.values()))
