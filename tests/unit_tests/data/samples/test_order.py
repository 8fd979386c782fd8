"""Orders that depend only on the seed, the epoch and the number of a sample."""

import numpy as np
import pytest

from megatron_cp.data.samples.order import shuffled, shuffled_all


@pytest.mark.parametrize("count", [1, 2, 3, 4, 5, 16, 17, 63, 1000, 4097])
def test_every_epoch_is_a_permutation_of_its_own(count: int) -> None:
    epochs = [[shuffled(i, count, seed=7, epoch=e) for i in range(count)] for e in range(3)]
    assert all(sorted(epoch) == list(range(count)) for epoch in epochs)
    if count >= 16:
        assert epochs[0] != epochs[1] != epochs[2] != list(range(count))
        assert [shuffled(i, count, seed=8, epoch=0) for i in range(count)] != epochs[0]


@pytest.mark.parametrize("count", [1, 2, 3, 17, 1000, 4097, 2**32 + 1, 2**40 - 1])
@pytest.mark.parametrize("seed", [0, 1234, -1, 2**63 + 5, 2**64 - 1])
def test_many_indices_at_once_equal_single_ones(count: int, seed: int) -> None:
    rng = np.random.default_rng(count)
    positions, epochs = rng.integers(0, count, 200), rng.integers(0, 50, 200)
    epochs[:20] = 2**31 + np.arange(20)
    expected = [shuffled(i, count, seed, e) for i, e in zip(positions.tolist(), epochs.tolist(), strict=True)]
    found = shuffled_all(positions, count, seed, epochs)
    assert found.dtype == np.int64 and found.tolist() == expected


def test_the_order_does_not_change_between_versions() -> None:
    """Another order would give every run that resumes other batches."""
    assert [shuffled(i, 10, seed=1234, epoch=0) for i in range(10)] == [0, 6, 9, 4, 7, 1, 3, 5, 8, 2]


def test_the_order_is_random() -> None:
    """Neighbors must be as far apart as in a random permutation.

    Places must be spread evenly, over many epochs.
    """
    count = 200
    orders = np.array([[shuffled(i, count, seed=3, epoch=e) for i in range(count)] for e in range(300)])
    distance = np.abs(np.diff(orders, axis=1)).mean()
    assert distance == pytest.approx((count + 1) / 3, rel=0.02)
    assert orders.mean(axis=0) == pytest.approx((count - 1) / 2, abs=5 * count / np.sqrt(12 * 300))
    both = np.corrcoef(orders[:-1].ravel(), orders[1:].ravel())[0, 1]
    assert abs(both) < 0.02
