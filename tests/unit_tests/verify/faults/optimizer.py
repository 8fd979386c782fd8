"""Faults of the optimizer, of its schedule, and of gathering updated weights."""

from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist
from megatron.core.distributed.param_and_grad_buffer import _ParamAndGradBucketGroup as BucketGroup
from megatron.core.optimizer import clip_grads

from megatron_cp.training import setup, step
from tests.unit_tests.training.layouts.cases import CP2, CP4, PP2
from tests.unit_tests.verify.faults.gradients import BUCKETS, PLAIN
from tests.unit_tests.verify.faults.registry import RATE, STEP, WEIGHTS, changed, fault

Patch = AbstractContextManager[Any]


def _scheduler(change: Callable[[Any], None]) -> Patch:
    """Patch the scheduler of a run, and let it set the changed values."""

    def wrap(build: Callable) -> Callable:
        def built(*args: Any, **settings: Any) -> Any:
            scheduler = build(*args, **settings)
            change(scheduler)
            scheduler.step(increment=0)
            return scheduler

        return built

    return changed(setup, "OptimizerParamScheduler", wrap)


@fault("optimizer: one rank's learning rate is halved", CP2, RATE)
def rate_of_one_rank() -> Patch:
    def change(scheduler: Any) -> None:
        of_group = scheduler.get_lr
        scheduler.get_lr = lambda group: of_group(group) * (0.5 if dist.get_rank() == 1 else 1.0)

    return _scheduler(change)


@fault("optimizer: the learning rate of one group of parameters is halved", CP2, RATE)
def rate_of_one_group() -> Patch:
    def change(scheduler: Any) -> None:
        of_group = scheduler.get_lr
        first = scheduler.optimizer.param_groups[0]
        scheduler.get_lr = lambda group: of_group(group) * (0.5 if group is first else 1.0)

    return _scheduler(change)


@fault("optimizer: the schedule advances once a rank", CP2, RATE)
def schedule_too_fast() -> Patch:
    def change(scheduler: Any) -> None:
        advance = scheduler.step
        scheduler.step = lambda increment: advance(increment=increment * dist.get_world_size())

    return _scheduler(change)


@fault("optimizer: weight decay for norms, too", CP2, STEP)
def decay_of_norms() -> Patch:
    def change(scheduler: Any) -> None:
        for group in scheduler.optimizer.param_groups:
            group["wd_mult"] = 1.0

    return _scheduler(change)


@fault("optimizer: gradients are clipped by the norm of the rank's own", CP4, STEP)
def clipped_by_own_norm() -> Patch:
    def change(apply: Callable) -> Callable:
        def by_own_norm(optimizer: Any, norm: float) -> bool:
            grads = [grad for each in optimizer.chained_optimizers for grad in each.get_grads_for_grad_norm()]
            return apply(optimizer, float(torch.nn.utils.get_total_norm(grads)))

        return by_own_norm

    return changed(step, "apply_gradients", change)


@fault("optimizer: gradients are not clipped", CP4 | PLAIN, STEP)
def not_clipped() -> Patch:
    return mock.patch.object(clip_grads, "clip_grad_by_total_norm_fp32", lambda *args, **given: None)


@fault("optimizer: one stage's step is left out", PP2 | CP2, STEP)
def step_left_out() -> Patch:
    def change(apply: Callable) -> Callable:
        def skipping(optimizer: Any, norm: float) -> bool:
            if dist.get_rank() < 2:
                return True
            return apply(optimizer, norm)

        return skipping

    return changed(step, "apply_gradients", change)


@fault("weights: not gathered after the step", CP2, WEIGHTS)
def weights_not_gathered() -> Patch:
    return mock.patch.object(BucketGroup, "start_param_sync", lambda *args, **given: None)


@fault("weights: those of one bucket are not gathered before the forward pass (stale)", CP2 | BUCKETS, STEP)
def stale_weights() -> Patch:
    def change(start: Callable) -> Callable:
        def stale(self: Any, force_sync: bool = False) -> None:
            if self.buckets[0].bucket_id == 1 and not force_sync:
                self.param_gather_dispatched = True
                return
            start(self, force_sync=force_sync)

        return stale

    return changed(BucketGroup, "start_param_sync", change)
