"""Faults of a mixture of experts and of its routers' losses."""

import sys
from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import Any

from megatron.core.transformer.moe.moe_utils import MoEAuxLossAutoScaler

from megatron_cp.dynamic_cp.runtime import iterator
from megatron_cp.models.layers import router_losses
from megatron_cp.models.layers.router import PackedRouter
from tests.unit_tests.training.layouts.cases import CP2, CP4
from tests.unit_tests.training.layouts.test_model_variants import BALANCED, BIASED, EP2, SIGMOID
from tests.unit_tests.verify.faults.registry import BACKWARD, ROUTERS, STEP, WEIGHTS, changed, fault
from tests.unit_tests.verify.test_layouts import DYNAMIC

finalize = sys.modules["megatron.core.distributed.finalize_model_grads"]
Patch = AbstractContextManager[Any]


def _without_mask(method: Callable) -> Callable:
    return lambda self, values, padding_mask=None: method(self, values, padding_mask=None)


@fault("routers' z-loss in packs: padding counts", DYNAMIC | SIGMOID, ROUTERS)
def padding_in_the_z_loss() -> Patch:
    return changed(PackedRouter, "apply_z_loss", _without_mask)


@fault("routers' balancing loss in packs: weighed by each rank's own tokens", DYNAMIC | BALANCED, ROUTERS)
def tokens_of_the_rank_in_packs() -> Patch:
    def change(attach: Callable) -> Callable:
        def own(self: Any, *args: Any, **given: Any) -> Any:
            self._real_tokens = None
            return attach(self, *args, **given)

        return own

    return changed(PackedRouter, "attach_and_log_load_balancing_loss", change)


@fault("routers' balancing loss in packs: dummy microbatches count", DYNAMIC | BALANCED | EP2, ROUTERS)
def dummies_count() -> Patch:
    def change(lay_out: Callable) -> Callable:
        return lambda *args, idle=False, **given: lay_out(*args, **given)

    return changed(iterator, "lay_out", change)


@fault("routers' balancing loss: its gradient is twice as strong", BALANCED | CP2, BACKWARD)
def balance_twice_as_strong() -> Patch:
    def change(backward: Callable) -> Any:
        def doubled(ctx: Any, gradient: Any) -> Any:
            output, aux = backward(ctx, gradient)
            return output, 2 * aux

        return staticmethod(doubled)

    return changed(MoEAuxLossAutoScaler, "backward", change)


@fault("routers' balancing loss: reported without the other ranks' part", BALANCED | CP4, ROUTERS)
def reported_by_one_rank() -> Patch:
    def change(record: Callable) -> Callable:
        def of_rank(self: Any, *args: Any, reduce_group: Any = None, **given: Any) -> None:
            record(self, *args, reduce_group=None, **given)

        return of_rank

    return changed(router_losses.RouterLosses, "record", change)


@fault("experts' biases: moved by each rank's own tokens", BIASED | CP2 | EP2, WEIGHTS)
def bias_of_the_rank() -> Patch:
    def change(updated: Callable) -> Callable:
        import torch

        def own(tokens: Any, bias: Any, rate: float, **groups: Any) -> Any:
            return bias + torch.sign(tokens.mean(dim=-1, keepdim=True) - tokens) * rate

        return own

    return changed(finalize, "get_updated_expert_bias", change)


@fault("experts' biases in packs: padding counts", DYNAMIC | BIASED, STEP)
def padding_moves_biases() -> Patch:
    return changed(PackedRouter, "_apply_expert_bias", _without_mask)
