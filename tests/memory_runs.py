"""Runs of the program whose live memory is counted, beside what the memory model predicts of them."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from megatron_cp.config.run_config import RunConfig
from megatron_cp.dynamic_cp.runtime.packing import PackedMicrobatch
from megatron_cp.estimate.job import Job
from megatron_cp.estimate.memory import CPU, stage_estimate
from megatron_cp.parallel.layout import layout_of
from tests.live_memory import counted
from tests.ranks import run_ranks
from tests.training_runs import VOCAB, start, tiny_config, train_step


@dataclass(frozen=True)
class Counted:
    """Of one rank: its pipeline stage, its peak by kind, tokens of its largest microbatches in a row, microbatches."""

    stage: int
    peak: Mapping[str, int]
    tokens: int
    microbatches: int
    expert_load: float


def count(overrides: dict[str, Any]) -> Counted:
    """The second step of a run, on this rank: then the optimizer has its state."""
    run, batches = start(tiny_config(**overrides))
    train_step(run, next(batches).microbatches)
    with counted(run) as memory:
        microbatches = next(batches).microbatches
        memory.see_batches(microbatches)
        train_step(run, microbatches)
    tokens = [_tokens(each) for each in microbatches]
    under_way = max(1, run.groups.pp.size() - run.groups.pp.rank())
    sums = [sum(tokens[place : place + under_way]) for place in range(max(1, len(tokens) - under_way + 1))]
    stage, load = run.groups.pp.rank(), sum(memory.loads) / max(1, len(memory.loads)) or 1.0
    run.close()
    return Counted(stage, dict(memory.peak), round(max(sums) / min(under_way, len(tokens))), len(microbatches), load)


def _tokens(microbatch: Any) -> int:
    values = vars(microbatch) if isinstance(microbatch, PackedMicrobatch) else microbatch
    return values["tokens"].numel()


def compare(world_size: int, overrides: dict[str, Any]) -> list[tuple[Counted, Mapping[str, float]]]:
    """For each pipeline stage, the rank that needs most and what is predicted of it."""
    config = tiny_config(**overrides)
    ranks = run_ranks(count, world_size, overrides)
    stages = sorted({each.stage for each in ranks})
    found = []
    for stage in stages:
        most = max((each for each in ranks if each.stage == stage), key=lambda each: sum(each.peak.values()))
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
    )


def errors(counted: Mapping[str, float], predicted: Mapping[str, float]) -> dict[str, float]:
    """Relative errors of the total and of each kind; of one below 2 % of the total, as a share of those 2 %."""
    total = sum(counted.values())
    found = {"total": sum(predicted.values()) / total - 1}
    for kind in counted.keys() | predicted.keys():
        count = counted.get(kind, 0)
        found[kind] = (predicted.get(kind, 0) - count) / max(count, 0.02 * total)
    return found
