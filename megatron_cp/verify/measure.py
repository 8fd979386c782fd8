"""Run a few steps and record losses, first gradients and weight updates."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import closing, contextmanager
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any

import torch
from megatron.core.dist_checkpointing.mapping import ShardedTensor
from megatron.core.process_groups_config import ProcessGroupCollection

from megatron_cp.attention.modules.probe import ProbeError, probe_attention
from megatron_cp.config.run_config import ModelConfig, RunConfig
from megatron_cp.data.samples.datasets import build_datasets
from megatron_cp.data.text.tokenizers import build_tokenizer
from megatron_cp.dynamic_cp.cost import CostModel
from megatron_cp.dynamic_cp.runtime.iterator import Scheduler
from megatron_cp.dynamic_cp.types import Group, Schedule
from megatron_cp.parallel.collectives import sum_over_ranks
from megatron_cp.parallel.layout import RankLayout
from megatron_cp.planner.scheduling import is_lockstep, lockstep_sizes, make_schedule, model_cost
from megatron_cp.rules.environment import Environment
from megatron_cp.rules.remedies import Case
from megatron_cp.training.open_steps import open_steps
from megatron_cp.training.setup import Run, setup
from megatron_cp.training.step import StepResult, train_step
from megatron_cp.verify.shards import copy_shards, gather_gradients, load_parameters, parameter_shards


@dataclass
class Measurement:
    """Results of one rank.

    Step results are equal on all ranks; tensors are this rank's shards.
    """

    steps: list[StepResult] = field(default_factory=list)
    rates: list[tuple[float, ...]] = field(default_factory=list)  # distinct learning rates of each step
    # Sums of the first step's token losses by label: [losses of a token, labels], float64. Empty on ranks without a
    # loss.
    token_losses: torch.Tensor = field(default_factory=lambda: torch.zeros(0, 0))
    weights: list[ShardedTensor] = field(default_factory=list)  # before the first step
    gradients: list[ShardedTensor] = field(default_factory=list)  # first step, reduced and scaled, not clipped
    updates: list[ShardedTensor] = field(default_factory=list)  # change of the weights over all steps
    probe: str | None = None  # error of the attention probe, if any


def measure(
    config: RunConfig,
    groups: ProcessGroupCollection | None = None,
    weights: list[ShardedTensor] | None = None,
    scheduler: Scheduler | None = None,
) -> Measurement:
    """Train ``train.train_iters`` steps and record results. Collective.

    Args:
        groups: the run's process groups; built over all ranks by default.
        weights: shards of the initial weights that this rank holds; drawn from the seed by default.
        scheduler: schedules packs; the configured one by default.
    """
    tokenizer = build_tokenizer(config.tokenizer)
    train_iters = config.train.iterations
    dataset = build_datasets(config.dataset, tokenizer, train_iters * config.train.global_batch_size).train
    assert dataset is not None
    run = setup(config, tokenizer.vocab_size, groups)
    try:
        result = Measurement(probe=_probe(run) if groups is None else None)
        if weights is not None:
            load_parameters(run, weights)
        before = copy_shards(parameter_shards(run, lambda parameter: parameter))
        result.weights = before if weights is None else []
        _keep_first_gradients(run, result)
        with closing(open_steps(run, dataset, 0, training=True, scheduler=scheduler)) as steps:
            for index in range(train_iters):
                result.rates.append(tuple(sorted({group["lr"] for group in run.optimizer.param_groups})))
                microbatches = next(steps).microbatches
                with _losses_kept(run, tokenizer.vocab_size, result, wanted=index == 0):
                    result.steps.append(train_step(run, microbatches))
        result.updates = _changes(run, before)
        return result
    finally:
        run.close()


def same_packs(config: RunConfig, layout: RankLayout) -> Scheduler | None:
    """Return a single-rank scheduler with the packs of ``layout``, if it packs.

    A router's balancing loss depends on which samples share a pack.
    """
    model = config.model
    if model.sequence_packing_scheduler is None:
        return None
    make = partial(make_schedule, model, layout)
    cost = model_cost(Case(config, layout.world_size, None, Environment.detect()))

    def schedule(lengths: Any, _: CostModel) -> Schedule:
        packs = [group.sample_ids for row in make(lengths, cost).microbatches for group in row]
        return Schedule(1, sum(lengths), [[Group((0,), sample_ids)] for sample_ids in packs])

    return schedule


def add_dummies(model: ModelConfig, layout: RankLayout) -> Scheduler | None:
    """Return the configured scheduler plus dummy microbatches for lockstep ranks.

    Small steps may have no dummies otherwise. None: use the configured scheduler.
    """
    if model.sequence_packing_scheduler is None or not is_lockstep(model):
        return None
    empty: list[list[Group]] = [[] for _ in range(lockstep_sizes(model, layout)["microbatch_multiple"])]

    def schedule(lengths: Any, cost: CostModel) -> Schedule:
        made = make_schedule(model, layout, lengths, cost)
        return replace(made, microbatches=[*made.microbatches, *empty])

    return schedule


def _probe(run: Run) -> str | None:
    try:
        probe_attention(run.model)
    except ProbeError as error:
        return str(error)
    return None


def _keep_first_gradients(run: Run, result: Measurement) -> None:
    """Copy gradients after reduction, before the optimizer clips them in place."""
    finalize = run.core_config.finalize_model_grads_func

    def finalize_and_keep(*args: Any, **kwargs: Any) -> None:
        finalize(*args, **kwargs)
        if not result.gradients:
            gather_gradients(run)
            result.gradients = copy_shards(parameter_shards(run, _gradient))

    run.core_config.finalize_model_grads_func = finalize_and_keep


def _gradient(saved: torch.Tensor) -> torch.Tensor | None:
    return saved.main_grad if isinstance(saved, torch.nn.Parameter) else None  # type: ignore[attr-defined]


@contextmanager
def _losses_kept(run: Run, vocab_size: int, result: Measurement, *, wanted: bool) -> Iterator[None]:
    """Sum token losses of the last stage by label. Collective over the stage's ranks.

    The placement of tokens depends on the layout; labels do not.
    """
    if not wanted or not run.is_last_stage:
        yield
        return
    depths = run.config.model.mtp_num_layers or 0
    sums = torch.zeros(1 + depths, vocab_size, dtype=torch.float64, device=run.device)

    def add(module: Any, args: Any, kwargs: dict[str, Any], losses: torch.Tensor) -> None:
        labels = kwargs["labels"].flatten()
        main, *mtp = losses.detach().double() if depths else [losses.detach().double()]
        for row, values in zip(sums, (main * kwargs["loss_mask"], *mtp), strict=True):
            row.index_add_(0, labels, values.flatten())

    hook = run.model[-1].register_forward_hook(add, with_kwargs=True)
    try:
        yield
    finally:
        hook.remove()
    result.token_losses = sum_over_ranks(sums, run.groups.dp_cp).cpu()


def _changes(run: Run, before: list[ShardedTensor]) -> list[ShardedTensor]:
    for chunk in run.model:
        if chunk.ddp_config.overlap_param_gather:  # otherwise the next forward pass gathers the weights
            chunk.start_param_sync(force_sync=True)
    after = copy_shards(parameter_shards(run, lambda parameter: parameter))
    return [replace(new, data=new.data - old.data) for new, old in zip(after, before, strict=True)]
