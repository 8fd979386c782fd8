"""The last stage's copy of the embedding in checkpoints.

The checkpoints are written without the MPU's global state.
"""

from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from megatron.core import parallel_state
from megatron.core.utils import get_attr_wrapped_model

from megatron_cp.training.checkpoint.saver import load_checkpoint
from megatron_cp.training.setup import Run
from megatron_cp.training.step import train_step
from tests.ranks import run_ranks
from tests.training_runs import save_checkpoint, start, tiny_config, train_losses, worst_difference
from tests.unit_tests.training.layouts.cases import CP2, PP2, TP2, VPP2

TIED = {"model__share_embeddings_and_output_weights": True}
DECENTRALIZED = {"dist__use_decentralized_pg": True}
Losses = list[tuple[float, float]]


def assert_copies_agree(run: Run) -> None:
    """Check that first and last stage hold the same embedding, bit for bit."""
    ends = [
        chunk for chunk in run.model for end in ("pre_process", "post_process") if get_attr_wrapped_model(chunk, end)
    ]
    for chunk in ends:
        weight = get_attr_wrapped_model(chunk, "shared_embedding_or_output_weight")().detach()
        copies = [torch.empty_like(weight) for _ in range(run.groups.embd.size())]
        dist.all_gather(copies, weight, group=run.groups.embd)
        assert all(torch.equal(copy, weight) for copy in copies)


def two_steps(overrides: dict[str, Any], folder: str, after: int) -> Losses:
    """Return (loss, gradient norm) of two steps.

    They begin with the checkpoint ``after`` so many steps, or (0) from the beginning.
    """
    run, batches = start(tiny_config(**overrides))
    assert not parallel_state.is_initialized()
    if after:
        batches.load_state_dict(load_checkpoint(run, folder, after)["train"])
        assert_copies_agree(run)
    results = [train_step(run, next(batches).microbatches) for _ in range(2)]
    assert_copies_agree(run)
    run.progress.iteration = after + 2
    save_checkpoint(run, folder, {"train": batches.state_dict()})
    run.close()
    return [(result.loss, result.grad_norm or 0.0) for result in results]


@pytest.mark.parametrize(
    ("layout", "other_size", "other"),
    [
        pytest.param(PP2 | CP2, 1, {}, id="pp2 cp2, then one rank", marks=pytest.mark.slow),
        pytest.param(PP2 | VPP2 | CP2, 4, TP2 | PP2, id="pp2 vpp2 cp2, then tp2 pp2"),
    ],
)
def test_tied_embeddings_are_saved_and_loaded(tmp_path: Path, layout: dict, other_size: int, other: dict) -> None:
    """Each resumed run must train like one rank without a stop.

    On four ranks, then on the same again, then on others.
    """
    uninterrupted = run_ranks(train_losses, 1, TIED, 6)[0]
    losses: Losses = []
    for world_size, overrides, after in ((4, layout, 0), (4, layout, 2), (other_size, other, 4)):
        losses += run_ranks(two_steps, world_size, TIED | DECENTRALIZED | overrides, str(tmp_path), after)[0]
    worst_loss, worst_norm = worst_difference(losses, uninterrupted)
    assert worst_loss < 2e-6 and worst_norm < 2e-6, (worst_loss, worst_norm)
