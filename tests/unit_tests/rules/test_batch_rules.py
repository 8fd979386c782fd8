"""Rules on batches: faults found, and the cost of checking."""

import time

import numpy as np
import pytest

from megatron_cp.rules.batch import KEYS, check_batch, check_pack, check_positions


def rules(violations):
    assert all(v.severity == "error" and v.message and v.field for v in violations)
    return [v.rule for v in violations]


class TestBatch:
    GOOD = dict.fromkeys(KEYS, (2, 16))

    def test_a_good_batch(self):
        assert check_batch(self.GOOD, seq_length=64, cp_size=4) == []
        assert check_batch(dict.fromkeys(KEYS, (1, 16)), seq_length=64, cp_size=4, packed=True) == []

    def test_unknown_missing_and_misshapen_keys(self):
        assert rules(check_batch(self.GOOD | {"weights": (2, 16)}, seq_length=64, cp_size=4)) == ["B7"]
        assert rules(check_batch(dict.fromkeys(KEYS[1:], (2, 16)), seq_length=64, cp_size=4)) == ["B7"]
        assert rules(check_batch(self.GOOD | {"labels": (16,)}, seq_length=64, cp_size=4)) == ["B7"]
        assert rules(check_batch(self.GOOD | {"labels": (2, 1, 16, 64)}, seq_length=64, cp_size=4)) == ["B7"]

    @pytest.mark.parametrize(("length", "guess"), [(4, "already sliced"), (64, "not sliced")])
    def test_sliced_twice_or_not_at_all(self, length, guess):
        found = check_batch(self.GOOD | {"tokens": (2, length)}, seq_length=64, cp_size=4)
        assert rules(found) == ["B9"] and guess in found[0].message and found[0].field == "tokens"

    def test_a_pack_of_two_rows(self):
        assert set(rules(check_batch(self.GOOD, seq_length=64, cp_size=4, packed=True))) == {"F15"}


class TestPositions:
    def test_zigzag(self):
        for batch in (1, 3):
            positions = np.tile([4, 5, 6, 7, 8, 9, 10, 11], (batch, 1))
            assert check_positions(positions, cp_rank=1, cp_size=2) == []
        assert check_positions(np.arange(16), cp_rank=0, cp_size=1) == []
        assert check_positions([0, 1, 6, 7], cp_rank=0, cp_size=2) == []

    @pytest.mark.parametrize(
        "positions", [[0, 1, 2, 3], [2, 3, 4, 5], [0, 1, 6], [[0, 1, 6, 7], [0, 1, 6, 8]]], ids=str
    )
    def test_other_faults_of_a_batch(self, positions):
        found = check_positions(positions, cp_rank=0, cp_size=2)
        assert rules(found) == ["B10"] and "rank 0 of 2" in found[0].message

    def test_the_message_is_short(self):
        found = check_positions(np.random.default_rng(0).permutation(4096), cp_rank=1, cp_size=4)
        assert len(found[0].message) < 200


class TestPack:
    def test_good_packs(self):
        assert check_pack([0, 8, 24], num_tokens=24, cp_size=4) == []
        assert check_pack([0, 5, 12], [0, 8, 16], num_tokens=16, cp_size=4) == []
        assert check_pack([0, 5, 12], num_tokens=12) == []
        assert check_pack([0, 5, 5], [0, 8, 16], num_tokens=16, cp_size=2, tp_size=4) == []  # an empty tail
        assert check_pack([0, 0], [0, 0], num_tokens=0, cp_size=4) == []

    @pytest.mark.parametrize(
        ("real", "padded", "more", "rule", "text"),
        [
            ([0, 5, 12], None, {}, "F1", "sequence 0 with 5"),
            ([0, 5, 12], [0, 6, 14], {"num_tokens": 14}, "F2", "1 of 2 sequences are not padded to a multiple"),
            ([0, 5, 12], [0, 4, 12], {}, "F1", "sequence 0 has 5 tokens, but only 4"),
            ([0, 5], [0, 8, 12], {}, "F1", "has 2 sequences, but cu_seqlens has 1"),
            ([0, 4, 8], [0, 4, 8], {}, "F4", "ends at 8, but the pack has 12 tokens"),
            ([1, 4, 12], None, {}, "F4", "start at 0"),
            ([0, 8, 4], None, {}, "F4", "do not decrease"),
            ([[0, 12]], None, {}, "F4", "one dimension"),
            ([0, 12], None, {"tp_size": 4}, "F2", "cp * tp = 2 * 4"),
        ],
    )
    def test_bad_packs(self, real, padded, more, rule, text):
        found = check_pack(real, padded, **({"num_tokens": 12, "cp_size": 2} | more))
        assert rules(found) == [rule] and text in found[0].message

    def test_ten_thousand_sequences_cost_less_than_a_millisecond(self):
        offsets = np.arange(10_001) * 64
        seconds = []
        for _ in range(10):
            start = time.process_time()
            assert check_pack(offsets, offsets, num_tokens=640_000, cp_size=8) == []
            seconds.append(time.process_time() - start)
        assert min(seconds) < 1e-3
