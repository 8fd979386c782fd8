"""Count and time what dynamic CP adds to a large run's first step.

``python benchmarks/host_time.py --part first``. One process is one rank of the world: torch's fake process group makes
groups without other processes. It starts no communicator (on a GPU both sides have those of NCCL), and its calls of
``new_group`` send nothing. Times are this process's processor time.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from contextlib import closing
from dataclasses import replace
from functools import partial
from typing import Any, NamedTuple
from unittest import mock

import numpy as np
import torch
import torch.distributed as dist
from megatron.core import parallel_state
from torch.testing._internal.distributed.fake_pg import FakeStore

from benchmarks.dynamic_cp_baselines import shipped_scheduler
from megatron_cp.attention.sharding import Layout
from megatron_cp.attention.tiles import Mask, TileSize, plan, plan_seen, ring_shifts
from megatron_cp.config.overrides import override
from megatron_cp.config.recipes import load_recipe
from megatron_cp.dynamic_cp.buddy_tree import configured_blocks
from megatron_cp.dynamic_cp.distributions import sample_lengths
from megatron_cp.dynamic_cp.runtime.iterator import DynamicBatches, StepPlan
from megatron_cp.dynamic_cp.runtime.packing import Sample
from megatron_cp.estimate.cost_presets import cost_preset
from megatron_cp.parallel.layout import RankLayout, layout_of
from megatron_cp.parallel.process_groups import build_process_groups, destroy_process_groups
from megatron_cp.planner.scheduling import is_lockstep, make_schedule
from megatron_cp.training.packed.groups import build_dynamic_groups

RECIPE, WORLD, SAMPLES = "llama3_8b_128k_dynamic_cp_pretrain_config", 1024, 8192
LAYOUTS = {"tp 1, pp 1": (1, 1, 8), "tp 8, pp 4": (8, 4, 2)}  # tensor-parallel, pipeline and context-parallel sizes


class Documents:
    """Samples with the lengths of pre-training documents."""

    def __init__(self, longest: int) -> None:
        self._lengths = sample_lengths("documents", 2 * SAMPLES, longest, 0)

    def lengths(self, indices: np.ndarray) -> np.ndarray:
        return self._lengths[indices]

    def __getitem__(self, index: int) -> Sample:
        tokens = torch.arange(self._lengths[index])
        return {"tokens": tokens, "labels": tokens, "loss_mask": torch.ones(len(tokens))}


class Cost(NamedTuple):
    """Calls of ``new_group``, ranks of those groups that have this one, and seconds."""

    calls: int
    ranks: list[int]
    seconds: float


def measured[T](run: Callable[[], T]) -> tuple[T, Cost]:
    """Run, and return the result with its cost."""
    ranks, new_group, calls = [], dist.new_group, 0

    def counted(*args: Any, **kwargs: Any) -> Any:
        nonlocal calls
        calls += 1
        group = new_group(*args, **kwargs)
        if isinstance(group, dist.ProcessGroup):
            ranks.append(group.size())
        return group

    with mock.patch.object(dist, "new_group", counted):
        begin = time.process_time()
        result = run()
        seconds = time.process_time() - begin
    return result, Cost(calls, ranks, seconds)


def tables(plan_: StepPlan, rank: int) -> None:
    """Make the tables of our attention (``p2p``) for both passes of a rank's packs."""
    mask, sizes = Mask.build(True, None), (TileSize(half_from=0), TileSize(half_from=0, squares=True))
    for pack, group in zip(plan_.packs, plan_.groups, strict=True):
        size, own = pack.cp_size, 0 if group is None else group.ranks.index(rank)
        layout = pack.placed or Layout.packed(pack.starts, pack.padded_starts, size)
        for stop in ring_shifts(layout, mask):
            for limits in sizes:
                if pack.placed is None or not stop:
                    plan(layout, own, (own - stop) % size, mask, limits)
                else:
                    plan_seen(layout, own, ((own - stop) % size,), mask, limits)


def of_megatron_core(layout: RankLayout, hybrid: bool) -> None:
    parallel_state.initialize_model_parallel(
        layout.tp,
        layout.pp,
        context_parallel_size=layout.cp,
        hybrid_context_parallel=hybrid,
        create_gloo_process_groups=False,
    )


def costs(name: str) -> dict[str, Cost]:
    """Measure one layout, on the rank with the widest pack of the first step."""
    tp, pp, cp = LAYOUTS[name]
    sizes = {"tensor_model_parallel_size": tp, "pipeline_model_parallel_size": pp, "context_parallel_size": cp}
    settings = [override(f"model.{key}", value) for key, value in sizes.items()]
    config = load_recipe(RECIPE, [*settings, override("train.global_batch_size", SAMPLES)])
    model, price = config.model, cost_preset("h100_8b")
    layout, documents = layout_of(model, config.dist, WORLD), Documents(model.seq_length or 0)
    first = make_schedule(model, layout, documents.lengths(np.arange(SAMPLES)).tolist(), price)
    position = max((g for row in first.microbatches for g in row), key=lambda group: group.cp_size).ranks[0]
    rank = layout.groups("dp_cp")[0][position]
    dist.init_process_group("fake", store=FakeStore(), rank=rank, world_size=WORLD)
    found: dict[str, Cost] = {}
    for hybrid in (False, True):
        what = "megatron-core's groups" + ", hybrid CP" * hybrid
        _, found[what] = measured(partial(of_megatron_core, layout, hybrid))
        destroy_process_groups()
    shipped = shipped_scheduler(layout.dp * layout.cp, model.max_seqlen_per_dp_cp_rank or 0)
    numbered = list(enumerate(documents.lengths(np.arange(SAMPLES)).tolist()))
    shipped_schedule = partial(shipped.get_groups_and_subsamples, numbered, None)
    _, found["megatron-core's schedule, hybrid CP"] = measured(shipped_schedule)
    groups, found["our groups"] = measured(partial(build_process_groups, model, config.dist))
    blocks, found["the blocks' names"] = measured(partial(configured_blocks, model, None, layout))
    build = partial(build_dynamic_groups, model, config.dist, groups, layout, blocks)
    dynamic, found["dynamic CP's groups at the start"] = measured(build)
    assert dynamic is not None
    scheduler, lockstep = partial(make_schedule, model, layout), is_lockstep(model)
    batches = DynamicBatches(documents, SAMPLES, scheduler, dynamic, lockstep=lockstep, cost=price, num_steps=1)
    with closing(batches):
        step, found["schedule and packs"] = measured(partial(next, batches))
        _, found["groups of the first step"] = measured(partial(batches.microbatches, step))
    _, found["attention's tables"] = measured(partial(tables, step, position))
    dynamic.destroy()
    distributed = replace(config.dist, dynamic_groups_at_start=True)
    build = partial(build_dynamic_groups, model, distributed, groups, layout, blocks)
    dynamic, found["all groups at the start"] = measured(build)
    assert dynamic is not None
    dynamic.destroy()
    destroy_process_groups(groups)
    dist.destroy_process_group()
    return found


def show() -> None:
    """Print the costs of all layouts."""
    print("| layout | what | calls of new_group | groups of the rank | largest | s |\n|---|---|---|---|---|---|")
    for name in LAYOUTS:
        for what, cost in costs(name).items():
            largest = max(cost.ranks, default=0)
            print(
                f"| {name} | {what} | {cost.calls} | {len(cost.ranks)} | {largest} | {cost.seconds:.4f} |", flush=True
            )
