"""Faults that verify cannot detect, for its documentation."""

from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import Any
from unittest import mock

from megatron_cp.attention import tiles
from megatron_cp.dynamic_cp.runtime import iterator
from megatron_cp.training import gradients, setup, step
from tests.unit_tests.training.layouts.cases import CP2, CP4
from tests.unit_tests.verify.faults.registry import NOT_CAUGHT, changed, fault
from tests.unit_tests.verify.test_layouts import PACKED

Patch = AbstractContextManager[Any]


@fault("dropout: context-parallel ranks drop the same units (verify trains without dropout)", CP4, NOT_CAUGHT)
def same_dropout_on_all_ranks() -> Patch:
    return changed(setup, "seed_everything", lambda seed: lambda config, groups, **given: seed(config, groups))


@fault("packs: wrong position ids where nothing reads them (rule B10 does not look at packs)", PACKED | CP2, NOT_CAUGHT)
def positions_of_packs() -> Patch:
    def change(lay_out: Callable) -> Callable:
        def shifted(*args: Any, **given: Any) -> Any:
            pack = lay_out(*args, **given)
            pack.tensors["position_ids"] += 1
            return pack

        return shifted

    return changed(iterator, "lay_out", change)


@fault("attention: tiles of more than 256 rows (verify's sequences are shorter)", CP4, NOT_CAUGHT)
def large_tiles() -> Patch:
    def change(split: Callable) -> Callable:
        return lambda tile, *parts: split(tile, *parts) if tile.q_length <= 256 else iter(())

    return changed(tiles, "_split", change)


@fault("fp16: gradients keep the loss scale (verify trains in float32)", CP2, NOT_CAUGHT)
def loss_scale_left() -> Patch:
    return mock.patch.object(step, "unscale_gradients", exact_norm_of_scaled)


def exact_norm_of_scaled(run: Any) -> float:
    return gradients.exact_norm(run, float("inf"))
