"""What a tensor's difference is compared with."""

import torch
from megatron.core.dist_checkpointing.mapping import ShardedTensor

from megatron_cp.verify.tensors import compare_tensors
from tests.ranks import run_ranks

FULL_STEP, TOLERANCE = 0.02, 1e-3


def wrong_tensors(least: float) -> list[tuple[str, ...]]:
    """Compare changes of an expert with few tokens beside another tensor's."""
    changes = {"expert": torch.full((4,), 0.003), "other": torch.full((4,), FULL_STEP)}
    rounded = changes | {"expert": changes["expert"] + torch.tensor([0, 1e-5, 0, 0])}
    halved = changes | {"expert": changes["expert"] / 2}
    return [
        compare_tensors(_shards(changes), _shards(measured), TOLERANCE, least=least).wrong
        for measured in (changes, rounded, halved)
    ]


def _shards(tensors: dict[str, torch.Tensor]) -> list[ShardedTensor]:
    return [ShardedTensor.from_rank_offsets(name, tensor) for name, tensor in tensors.items()]


def test_rounding_is_not_compared_with_an_expert_that_hardly_changes() -> None:
    alone, of_full_step = run_ranks(_both, 1)[0]
    assert alone == [(), ("expert",), ("expert",)]
    assert of_full_step == [(), (), ("expert",)]


def _both() -> list[list[tuple[str, ...]]]:
    return [wrong_tensors(0.0), wrong_tensors(FULL_STEP)]
