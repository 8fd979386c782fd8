"""Documents in a pack do not attend to each other.

This is tested under context parallelism and without.
"""

from typing import Any

import pytest
import torch

from megatron_cp.data.samples.varlen import MockVarlenDataset
from megatron_cp.dynamic_cp.runtime.packing import Sample
from megatron_cp.training.setup import setup
from megatron_cp.training.step import train_step
from tests.packed_runs import pack
from tests.ranks import run_ranks
from tests.training_runs import VOCAB, tiny_config, worst_difference
from tests.unit_tests.training.layouts.cases import CP2

LENGTHS = (37, 50, 50, 9)


def document(index: int) -> Sample:
    return MockVarlenDataset(LENGTHS, VOCAB, seed=5)[index]


def without_loss(sample: Sample) -> Sample:
    return sample | {"loss_mask": torch.zeros(len(sample["tokens"]))}


def joined(first: Sample, second: Sample) -> Sample:
    """Join two samples to one, as a window over a token stream does."""
    return {key: torch.cat([first[key], second[key]]) for key in first}


PACKS = {
    "alone": lambda: [document(0)],
    "before another": lambda: [document(0), without_loss(document(1))],
    "before a third": lambda: [document(0), without_loss(document(2))],
    "after another": lambda: [without_loss(document(1)), document(0)],
    "between two": lambda: [without_loss(document(3)), document(0), without_loss(document(2))],
    "in one window after another": lambda: [joined(without_loss(document(1)), document(0))],
}


def losses_of(names: list[str], overrides: dict[str, Any]) -> list[tuple[float, float]]:
    """Return (loss, gradient norm) of one step on each pack.

    All steps begin with the same weights.
    """
    results = []
    for name in names:
        config = tiny_config(model__sequence_packing_scheduler="dp_balanced", dataset__seq_length=128, **overrides)
        run = setup(config, VOCAB)
        result = train_step(run, [pack(PACKS[name](), run.groups.cp)])
        results.append((result.loss, result.grad_norm or 0.0))
        run.close()
    return results


@pytest.mark.parametrize(("ranks", "overrides"), [(1, {}), (2, CP2)], ids=["1 rank", "cp2"])
def test_the_loss_of_a_document_is_what_it_is_alone(ranks: int, overrides: dict[str, Any]) -> None:
    alone, *packed, window = run_ranks(losses_of, ranks, list(PACKS), overrides)[0]
    assert packed[0] == packed[1], "another neighbour of the same length changes nothing at all"
    for result in packed:
        assert max(worst_difference([result], [alone])) < 1e-6
    assert max(worst_difference([window], [alone])) > 1e-3, "the test can tell: in one window it is another loss"
