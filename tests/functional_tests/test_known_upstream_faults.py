"""Silent faults of upstream's context parallelism are corrected or refused.

Faults with tests in other files:

- groups of an earlier run that outlive it: ``unit_tests/training/layouts/test_decentralized_pg.py``,
  ``test_nothing_stale_remains_after_another_initialization``;
- hierarchical groups ignored by Transformer Engine's attention: ``unit_tests/attention/modules/test_te.py``,
  ``test_groups_transport_and_stream_are_the_given_ones`` and ``test_missing_groups_are_refused``;
- multi-token prediction that rolls packed tokens by unpadded lengths and averages its loss per rank:
  ``unit_tests/models/layers/test_mtp_targets.py`` and ``test_mtp.py``;
- batches sliced twice, gradients not reduced over context-parallel ranks, losses averaged per rank:
  ``unit_tests/verify/test_faults.py``.
"""

from contextlib import closing
from typing import Any

import pytest
import torch

from megatron_cp.data.samples.datasets import build_datasets
from megatron_cp.data.text.tokenizers import build_tokenizer
from megatron_cp.rules import check
from megatron_cp.training.open_steps import open_steps
from megatron_cp.training.setup import setup
from megatron_cp.training.step import train_step
from tests.ranks import run_ranks
from tests.training_runs import VOCAB, start, tiny_config, train_losses
from tests.unit_tests.training.layouts.cases import CP2, CP4, HCP

DYNAMIC = {"model__dynamic_context_parallel": True, "dataset__kind": "mock_documents"}


def refusals(**overrides: Any) -> set[str]:
    return {v.rule for v in check(tiny_config(**overrides), 4, environment="cpu") if v.severity == "error"}


def test_unused_hierarchical_sizes_are_refused() -> None:
    sizes = {"model__hierarchical_context_parallel_sizes": [2, 2]}
    assert refusals(**CP4, **sizes, model__cp_comm_type="p2p") == {"C9"}
    assert refusals(**CP4, **sizes, model__cp_comm_type=["p2p", "a2a", "p2p", "all_gather"]) == {"C9"}
    assert refusals(**CP4, **sizes, model__cp_comm_type=["p2p", "a2a+p2p", "p2p", "all_gather"]) == set()


def dropped_and_weights(overrides: dict[str, Any]) -> tuple[list[float], list[float]]:
    """Return this rank's next dropout mask, and sums of all weights.

    The sums are those before and after two steps with dropout.
    """
    run = setup(tiny_config(**overrides, model__hidden_dropout=0.3), VOCAB)
    dataset = build_datasets(run.config.dataset, build_tokenizer(run.config.tokenizer), 8).train
    mask = torch.nn.functional.dropout(torch.ones(64), 0.5).tolist()
    sums = [p.double().sum().item() for chunk in run.model for p in chunk.parameters()]
    with closing(open_steps(run, dataset, 0, training=True)) as steps:
        for _ in range(2):
            train_step(run, next(steps).microbatches)
    sums += [p.double().sum().item() for chunk in run.model for p in chunk.parameters()]
    run.close()
    return mask, sums


@pytest.mark.parametrize("layout", [CP4 | HCP, DYNAMIC, DYNAMIC | CP2], ids=["cp4", "dynamic", "dynamic cp2"])
def test_dropout_differs_between_cp_ranks_and_weights_do_not(layout: dict[str, Any]) -> None:
    """Dynamic groups spread a sample over all data- and context-parallel ranks."""
    results = run_ranks(dropped_and_weights, 4, layout)
    masks = [mask for mask, _ in results]
    assert all(masks[i] != masks[j] for i in range(4) for j in range(i)), "two ranks drop the same hidden units"
    assert all(weights == results[0][1] for _, weights in results)


def test_dropout_repeats_with_the_seed() -> None:
    overrides = CP2 | {"model__hidden_dropout": 0.3}
    first, again = (run_ranks(train_losses, 2, overrides, 2)[0] for _ in range(2))
    assert first == again != run_ranks(train_losses, 2, overrides | {"model__hidden_dropout": 0.0}, 2)[0]


def test_ignored_masks_and_restarted_positions_are_refused() -> None:
    """Context parallelism ignores a document mask, and RoPE ignores position ids."""
    assert refusals(**CP4, dataset__reset_attention_mask=True) == {"E8"}
    assert refusals(**CP4, dataset__reset_position_ids=True) == {"E9"}
    assert refusals(dataset__reset_attention_mask=True) == {"E8"}


def mask_in_the_model() -> str:
    run, _ = start(tiny_config(**CP2))
    tokens = torch.zeros(1, 16, dtype=torch.int64)
    mask = torch.zeros(1, 1, 16, 16, dtype=torch.bool)
    try:
        run.model[0](input_ids=tokens, position_ids=tokens, attention_mask=mask, labels=tokens)
    except ValueError as error:
        return str(error)
    finally:
        run.close()
    return "accepted"


def test_attention_refuses_a_mask_that_it_would_ignore() -> None:
    for text in run_ranks(mask_in_the_model, 2):
        assert "attention_mask of shape (1, 1, 16, 16) is not used" in text
