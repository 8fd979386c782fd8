import itertools
import multiprocessing

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from megatron_cp.attention.sharding import unshard_sequence
from megatron_cp.config.run_config import DatasetConfig
from megatron_cp.data.batch_iterator import BatchIterator, slice_for_context_parallel
from megatron_cp.data.samples.datasets import SAMPLE_KEYS, MockDataset


class Numbered(torch.utils.data.Dataset):
    """Sample i is full of i."""

    def __init__(self, length: int) -> None:
        self._length = length

    def __len__(self) -> int:
        return self._length

    def __getitem__(self, index: int) -> dict[str, torch.Tensor]:
        return {key: torch.full((2,), index) for key in SAMPLE_KEYS}


def _numbers(iterator: BatchIterator) -> list[list[int]]:
    return [batch["tokens"][:, 0].tolist() for batch in iterator]


@given(
    micro=st.integers(1, 3),
    data_parallel=st.integers(1, 4),
    microbatches=st.integers(1, 3),
    batches=st.integers(0, 3),
    rest=st.integers(0, 5),
)
def test_every_layout_has_the_same_global_batches(
    micro: int, data_parallel: int, microbatches: int, batches: int, rest: int
) -> None:
    global_batch = micro * data_parallel * microbatches
    dataset = Numbered(global_batch * batches + min(rest, global_batch - 1))
    ranks = [
        _numbers(
            BatchIterator(
                dataset,
                micro_batch_size=micro,
                global_batch_size=global_batch,
                data_parallel_rank=rank,
                data_parallel_size=data_parallel,
            )
        )
        for rank in range(data_parallel)
    ]
    assert all(len(rank) == batches * microbatches for rank in ranks)
    for i in range(batches):
        dealt = [rank[i * microbatches : (i + 1) * microbatches] for rank in ranks]
        samples = sorted(itertools.chain(*itertools.chain(*dealt)))
        assert samples == list(range(i * global_batch, (i + 1) * global_batch))


@pytest.mark.parametrize("num_workers", [0, 2])
def test_resuming_is_exact(num_workers: int) -> None:
    sizes = {"global_batch_size": 4, "micro_batch_size": 2, "num_workers": num_workers}
    whole = BatchIterator(Numbered(20), **sizes)
    before = [next(whole)["tokens"][:, 0].tolist() for _ in range(4)]
    state = {"consumed_samples": whole.consumed_samples}
    assert state == {"consumed_samples": 8}
    resumed = BatchIterator(Numbered(20), **sizes)
    resumed.load_state_dict(state)
    assert _numbers(resumed) == _numbers(whole)
    assert before == [[0, 1], [2, 3], [4, 5], [6, 7]]
    assert resumed.consumed_samples == 20


def test_resuming_under_another_layout() -> None:
    iterator = BatchIterator(Numbered(12), global_batch_size=4, micro_batch_size=4, consumed_samples=4)
    ranks = [
        BatchIterator(
            Numbered(12),
            global_batch_size=4,
            micro_batch_size=1,
            data_parallel_rank=rank,
            data_parallel_size=2,
            consumed_samples=4,
        )
        for rank in range(2)
    ]
    dealt = itertools.chain.from_iterable(_numbers(ranks[0]) + _numbers(ranks[1]))
    assert sorted(dealt) == list(itertools.chain.from_iterable(_numbers(iterator)))


@pytest.mark.parametrize("num_workers", [0, 1])
def test_the_models_random_numbers_are_unchanged(num_workers: int) -> None:
    state = torch.get_rng_state()
    next(BatchIterator(Numbered(4), global_batch_size=2, micro_batch_size=1, num_workers=num_workers))
    assert torch.equal(torch.get_rng_state(), state)


def test_workers_are_as_their_rank_is(monkeypatch: pytest.MonkeyPatch) -> None:
    """Workers must have the changes that the package made to its process.

    They are forked under every Python version.
    """

    class HereOnly(Numbered):
        """No other interpreter could make one."""

    monkeypatch.setattr(
        multiprocessing.context._default_context, "_actual_context", multiprocessing.get_context("forkserver")
    )
    batches = BatchIterator(HereOnly(4), global_batch_size=2, micro_batch_size=2, num_workers=1)
    assert next(batches)["tokens"][:, 0].tolist() == [0, 1]


@pytest.fixture
def batch() -> dict[str, torch.Tensor]:
    dataset = MockDataset(DatasetConfig(seq_length=32, mock_masked_fraction=0.3), 100, 1, 4)
    return next(BatchIterator(dataset, micro_batch_size=2, global_batch_size=4))


@pytest.mark.parametrize("cp_size", [1, 2, 4])
def test_slices_make_the_whole(batch: dict[str, torch.Tensor], cp_size: int) -> None:
    parts = [slice_for_context_parallel(batch, rank, cp_size) for rank in range(cp_size)]
    for key in SAMPLE_KEYS:
        assert parts[0][key].shape == (2, 32 // cp_size)
        assert torch.equal(unshard_sequence([part[key] for part in parts], 1), batch[key])


def test_the_slices_are_megatron_cores(batch: dict[str, torch.Tensor]) -> None:
    # Ranks hold chunks r and 2 * cp - 1 - r: the first and the last eighth on rank 0 of 4.
    positions = slice_for_context_parallel(batch, 0, 4)["position_ids"]
    assert positions[0].tolist() == [0, 1, 2, 3, 28, 29, 30, 31]


def test_a_batch_is_sliced_once(batch: dict[str, torch.Tensor]) -> None:
    with pytest.raises(ValueError, match="already sliced"):
        slice_for_context_parallel(slice_for_context_parallel(batch, 0, 1), 0, 1)


def test_unknown_keys_are_refused(batch: dict[str, torch.Tensor]) -> None:
    with pytest.raises(ValueError, match="attention_mask"):
        slice_for_context_parallel({**batch, "attention_mask": torch.ones(1)}, 0, 2)
