"""Patches of megatron-core 0.19.2's rotary embeddings in packs; see patches.py."""

from __future__ import annotations

import functools
from typing import Any

import torch


def apply() -> None:
    _packs_are_rotated_without_waiting()
    _packs_have_one_table_of_angles()


def _packs_are_rotated_without_waiting() -> None:
    """Apply rotary embeddings to packs without host waits.

    models/common/embeddings/rope_utils.py:189. Upstream reads the sequence lengths from the device four times per
    layer, which synchronizes, and rotates sequences one by one. Here table rows are looked up on the device once per
    microbatch, and all sequences are rotated at once. Upstream's mode for a table as long as the pack (positions that
    continue across sequences) is left out: it depends on the table's length alone, even if equal by chance. Test:
    tests/unit_tests/mcore/test_patches.py.
    """
    from megatron.core.models.common.embeddings import rope_utils, rotary_pos_embedding

    def rotate(
        t: torch.Tensor, cu_seqlens: torch.Tensor, freqs: torch.Tensor, *, cp_group: Any, **options: Any
    ) -> torch.Tensor:
        """Rotate a pack.

        t: [t_local, h, d]. cu_seqlens: [b + 1], padded, of the whole pack. freqs: [longest, 1, 1, d].
        """
        rows = _rows_of_pack(cu_seqlens, t.shape[0], cp_group.rank(), cp_group.size())
        angles = freqs.index_select(0, rows)
        return rope_utils._apply_rotary_pos_emb_bshd(t.unsqueeze(1), angles, **options).squeeze(1)

    rope_utils._apply_rotary_pos_emb_thd = rotate
    rotary_pos_embedding._apply_rotary_pos_emb_thd = rotate


def _packs_have_one_table_of_angles() -> None:
    """Keep one table of rotary angles for packs.

    models/common/embeddings/rotary_pos_embedding.py:177 and yarn_rotary_pos_embedding.py:159. The table is as long as
    the longest document so far. Upstream keeps the tables of the last 32 lengths and groups: packs have a longest
    document each, and dynamic context parallelism a group each. A table for 1M tokens and heads of 128 takes 512 MiB.
    Rows do not depend on the length. Test: tests/unit_tests/mcore/test_patches.py.
    """
    from megatron.core.models.common.embeddings.rotary_pos_embedding import RotaryEmbedding
    from megatron.core.models.common.embeddings.yarn_rotary_pos_embedding import YarnRotaryEmbedding

    for embedding in (RotaryEmbedding, YarnRotaryEmbedding):
        embedding.forward = _with_one_table_for_packs(embedding.forward)


def _with_one_table_for_packs(original: Any) -> Any:
    @functools.wraps(original)
    def forward(
        self: Any, max_seq_len: int, offset: int = 0, packed_seq: bool = False, cp_group: Any = None
    ) -> torch.Tensor | tuple[torch.Tensor, float]:
        if offset or not packed_seq:
            return original(self, max_seq_len, offset, packed_seq, cp_group)
        table, *scale = getattr(self, "table_of_packs", (torch.empty(0),))
        if len(table) < max_seq_len:
            found = self.get_emb(max_seq_len)  # YaRN's has a factor
            table, *scale = self.table_of_packs = found if isinstance(found, tuple) else (found,)
        rows = table[:max_seq_len]
        return (rows, *scale) if scale else rows

    forward.cache_clear = original.cache_clear  # type: ignore[attr-defined]  # YaRN's constructor calls it
    return forward


def _rows_of_pack(cu_seqlens: torch.Tensor, count: int, rank: int, size: int) -> torch.Tensor:
    """Return positions [count] in their sequences of one rank's tokens.

    They are in zigzag, or ``cu_seqlens.placed_rows``. Cached on ``cu_seqlens``, which all layers of a microbatch share.
    Raises RuntimeError (on a GPU, later) if the pack does not have ``size`` times ``count`` tokens.
    """
    placed = getattr(cu_seqlens, "placed_rows", None)
    if placed is not None:
        if len(placed) != count:
            raise RuntimeError(f"this rank has {count} tokens of a packed batch, but positions of {len(placed)}")
        return placed
    # Inference tensors have no version counter.
    cut = None if cu_seqlens.is_inference() else (cu_seqlens._version, count, rank, size)
    kept = getattr(cu_seqlens, "kept_rows", None)
    if cut is not None and kept is not None and kept[0] == cut:
        return kept[1]
    starts = cu_seqlens.long() // size  # start of each sequence on this rank
    torch._assert_async(starts[-1] == count, f"this rank has {count} tokens of a packed batch, not 1/{size} of it")
    tokens = torch.arange(count, device=cu_seqlens.device)
    sequence = torch.searchsorted(starts[1:], tokens, right=True)
    offset = tokens - starts[sequence]
    chunk = (starts.diff() // 2)[sequence]
    first, second = rank * chunk + offset, (2 * size - 1 - rank) * chunk + offset - chunk
    rows = offset if size == 1 else torch.where(offset < chunk, first, second)
    cu_seqlens.kept_rows = cut, rows  # type: ignore[attr-defined]
    return rows
