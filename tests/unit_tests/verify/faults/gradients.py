"""Faults of gradient reduction, and of messages between pipeline stages.

The gradients are reduced over ranks.
"""

import copy
import sys
from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import Any
from unittest import mock

import torch
from megatron.core.distributed.param_and_grad_buffer import _ParamAndGradBucketGroup as BucketGroup

from megatron_cp.parallel import pipeline
from megatron_cp.training import forward_backward, gradients, setup
from tests.unit_tests.training.layouts.cases import CP2, CP4, HCP, PP2, SP, TP2, VPP2
from tests.unit_tests.training.layouts.test_model_variants import EP2, MOE, OVERLAPPED
from tests.unit_tests.verify.faults.registry import BACKWARD, COPIES, FORWARD, NORM, changed, fault
from tests.unit_tests.verify.test_layouts import TIED

PLAIN = {"optimizer__use_distributed_optimizer": False}
# As recipes have it; verify makes several buckets of the few parameters that are left.
BUCKETS = {name: value for name, value in OVERLAPPED.items() if name != "ddp__bucket_size"}
# The package has a function of the module's name.
finalize = sys.modules["megatron.core.distributed.finalize_model_grads"]
Patch = AbstractContextManager[Any]


def _with_groups(change: Callable[[Any], None]) -> Patch:
    def wrap(original: Callable) -> Callable:
        def changed_groups(ddp: Any, core_config: Any, chunks: Any, groups: Any, *others: Any) -> Any:
            groups = copy.copy(groups)
            change(groups)
            return original(ddp, core_config, chunks, groups, *others)

        return changed_groups

    return changed(setup, "wrap_data_parallel", wrap)


@fault("gradients: not reduced over context-parallel ranks", CP4 | HCP, COPIES)
def not_reduced_over_cp() -> Patch:
    def change(groups: Any) -> None:
        groups.dp_cp = groups.intra_dp_cp = groups.dp

    return _with_groups(change)


@fault("gradients: the same with the plain optimizer", CP4 | PLAIN, COPIES)
def not_reduced_over_cp_by_the_plain_optimizer() -> Patch:
    return not_reduced_over_cp()


@fault("gradients: those of experts not reduced over the ranks that have the same ones", MOE | CP2 | EP2, COPIES)
def experts_not_reduced() -> Patch:
    def change(groups: Any) -> None:
        groups.expt_dp = groups.intra_expt_dp = groups.tp  # this rank alone

    return _with_groups(change)


@fault("gradients: the second of several buckets is not reduced", CP2 | BUCKETS, BACKWARD)
def bucket_not_reduced() -> Patch:
    def change(finish: Callable) -> Callable:
        def skipping(self: Any, *args: Any, **given: Any) -> None:
            if self.buckets[0].bucket_id == 1:
                self.param_gather_dispatched = False
                return
            finish(self, *args, **given)

        return skipping

    return changed(BucketGroup, "finish_grad_sync", change)


@fault("gradients: those of norms not summed over sequence-parallel ranks", TP2 | SP | CP2, COPIES)
def norms_not_reduced() -> Patch:
    return mock.patch.object(finalize, "_allreduce_non_tensor_model_parallel_grads", lambda *args: None)


@fault("gradients: the tied embedding's not summed over the first and the last stage", TIED | PP2 | CP2, COPIES)
def tied_embedding_not_reduced() -> Patch:
    return mock.patch.object(finalize, "_allreduce_word_embedding_grads", lambda *args: None)


@fault("gradients: those of the second virtual stage are not reduced", PP2 | VPP2 | CP2, BACKWARD)
def second_virtual_stage_not_reduced() -> Patch:
    return changed(
        setup, "finalize_model_grads", lambda of_all: lambda model, *args, **given: of_all(model[:1], *args, **given)
    )


@fault("gradients: those of all microbatches but the last are overwritten", CP4, BACKWARD)
def not_accumulated() -> Patch:
    def change(forward: Callable) -> Callable:
        def forgetting(microbatches: Any, model: Any, **given: Any) -> Any:
            model.zero_grad_buffer()
            return forward(microbatches, model, **given)

        return forgetting

    return changed(forward_backward, "forward_step", change)


@fault("gradients: their norm is this rank's own", CP4, NORM)
def norm_of_the_rank() -> Patch:
    def own(run: Any, counted: Any, norm: Any) -> Any:
        return torch.stack([norm(grads).double() ** 2 for _, grads in counted if grads]).sum(0).sqrt()

    return mock.patch.object(gradients, "_norm_of_all", own)


@fault("pipeline: activations pass between stages in bf16", PP2 | CP2, FORWARD)
def activations_in_half_precision() -> Patch:
    def change(communicate: Callable) -> Callable:
        def rounding(self: Any, *, tensor_send_next: Any, **given: Any) -> Any:
            if tensor_send_next is not None:
                tensor_send_next = tensor_send_next.bfloat16().float()
            return communicate(self, tensor_send_next=tensor_send_next, **given)

        return rounding

    return changed(pipeline.PipelineCommunicator, "_communicate", change)


@fault("pipeline: gradients pass between stages in bf16", PP2 | CP2, BACKWARD)
def gradients_in_half_precision() -> Patch:
    def change(communicate: Callable) -> Callable:
        def rounding(self: Any, *, tensor_send_prev: Any, **given: Any) -> Any:
            if tensor_send_prev is not None:
                tensor_send_prev = tensor_send_prev.bfloat16().float()
            return communicate(self, tensor_send_prev=tensor_send_prev, **given)

        return rounding

    return changed(pipeline.PipelineCommunicator, "_communicate", change)


@fault("virtual stages: one takes the microbatches in the reverse order", PP2 | VPP2 | CP2, FORWARD)
def virtual_stage_in_reverse_order() -> Patch:
    queues: dict[int, list[Any]] = {}

    def change(forward: Callable) -> Callable:
        def reordered(microbatches: Any, model: Any, **given: Any) -> Any:
            if model.module.vp_stage == 1:
                queue = queues.setdefault(id(microbatches), [])
                queue.extend(microbatches)
                microbatches = iter([queue.pop()])
            return forward(microbatches, model, **given)

        return reordered

    return changed(forward_backward, "forward_step", change)
