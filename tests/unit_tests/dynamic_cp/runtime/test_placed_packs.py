"""Packs in pieces: every token is on one rank, with its label, mask and position."""

from __future__ import annotations

import random
from itertools import pairwise
from types import SimpleNamespace

import pytest
import torch

from megatron_cp.dynamic_cp import Group, Schedule
from megatron_cp.dynamic_cp.analysis.report import padding_fraction
from megatron_cp.dynamic_cp.runtime.packing import BlockGroups, HostPack, Sample, lay_out
from megatron_cp.dynamic_cp.types import padded_length, padded_tokens
from megatron_cp.mcore.rotary import _rows_of_pack
from megatron_cp.training.batch_checks import problems_of_packs
from megatron_cp.training.held_out.counts import _samples_of_tokens


def samples_of(lengths: list[int]) -> list[Sample]:
    """Return samples whose tokens all differ; labels and masks follow from them."""
    starts = [1, *(1 + sum(lengths[: i + 1]) for i in range(len(lengths)))]
    tokens = [torch.arange(start, stop) for start, stop in pairwise(starts)]
    return [{"tokens": each, "labels": each + 1000, "loss_mask": (each % 3 > 0).float()} for each in tokens]


def packs_of(lengths: list[int], size: int, width: int) -> list[HostPack]:
    samples = samples_of(lengths)
    return [lay_out(samples, rank, size, sequence_parallel_size=width, placement="balanced") for rank in range(size)]


@pytest.mark.parametrize("seed", range(20))
def test_every_token_is_on_one_rank_with_its_values(seed: int) -> None:
    draw = random.Random(seed)
    lengths = [draw.choice([1, 2, draw.randint(1, 90)]) for _ in range(draw.randint(1, 9))]
    size, width = draw.choice([2, 3, 4, 8]), draw.choice([1, 2])
    samples, found = samples_of(lengths), {}
    for rank, pack in enumerate(packs_of(lengths, size, width)):
        rows = {key: value[0] for key, value in pack.tensors.items()}
        assert len(rows["tokens"]) % width == 0
        owners = _samples_of_tokens(pack, rank)
        for row in (~rows["padding_mask"]).nonzero().flatten().tolist():
            values = (*(rows[key][row].item() for key in ("labels", "loss_mask", "position_ids")), int(owners[row]))
            assert found.setdefault(rows["tokens"][row].item(), values) is values
        assert not any(rows[key][rows["padding_mask"]].any() for key in ("tokens", "labels", "loss_mask"))
    assert found == {
        int(sample["tokens"][i]): (int(sample["labels"][i]), float(sample["loss_mask"][i]), i, number)
        for number, sample in enumerate(samples)
        for i in range(lengths[number])
    }


def test_padding_is_counted_and_the_checks_pass() -> None:
    lengths, width = [13, 1, 40, 7, 5, 30], 2
    schedule = Schedule(3, 64, [[Group((0, 1, 2), (0, 2, 5)), Group((0,), (1, 3, 4))]], width)
    packs = packs_of([13, 40, 30], 3, width)
    assert problems_of_packs(SimpleNamespace(packs=packs, schedule=schedule)) == []  # type: ignore[arg-type]
    of_three = sum(pack.tensors["tokens"].numel() for pack in packs)
    assert of_three == padded_tokens([13, 40, 30], 3, width, placement="balanced") == 84
    padded = of_three + sum(padded_length(length, 1, width) for length in (1, 7, 5))
    assert padding_fraction(schedule, lengths, "balanced") == pytest.approx(padded / sum(lengths) - 1)


def test_rotary_embeddings_take_the_positions_of_the_placement() -> None:
    pack = packs_of([5, 9], 2, 1)[1]
    microbatch = pack.on("cpu", BlockGroups(None))  # type: ignore[arg-type]
    lengths = microbatch.packed_seq_params.cu_seqlens_q_padded
    assert torch.equal(_rows_of_pack(lengths, 7, 1, 2), microbatch.position_ids[0])
    with pytest.raises(RuntimeError, match="8 tokens of a packed batch, but positions of 7"):
        _rows_of_pack(lengths, 8, 1, 2)
