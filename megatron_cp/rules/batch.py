"""Rules on a batch: shapes, keys, positions and pack lengths. Cheap per batch.

Each function takes shapes, lists or arrays (such as a CPU tensor's ``numpy()``). It returns this rank's violations; the
caller gathers them from all ranks, so that all ranks stop together.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import numpy as np
from numpy.typing import ArrayLike

from megatron_cp.common.errors import Violation

KEYS = ("tokens", "labels", "loss_mask", "position_ids")


def _error(rule: str, field: str, message: str, fix: str = "") -> Violation:
    return Violation(rule, "error", field, message, fix)


def check_batch(
    shapes: Mapping[str, Sequence[int]], *, seq_length: int, cp_size: int = 1, packed: bool = False
) -> list[Violation]:
    """Check rules B7, B9 and F15 on a batch that is already sliced for this rank.

    Args:
        shapes: key -> shape of each tensor, ``[micro_batch_size, seq_length / cp_size]``.
        seq_length: tokens of a whole sequence or pack.
        cp_size: ranks that share the sequence.
        packed: whether the batch is one pack of sequences.
    """
    found = []
    for key, shape in shapes.items():
        if key not in KEYS:
            message = f"unknown key '{key}' in the batch"
            found.append(_error("B7", key, message, f"use only the keys {', '.join(KEYS)}"))
        elif len(shape) != 2:
            found.append(_error("B7", key, f"has shape {list(shape)}, not [micro batch, sequence]"))
        elif shape[1] * cp_size != seq_length:
            times = "already sliced" if shape[1] * cp_size < seq_length else "not sliced"
            message = f"holds {shape[1]} tokens, not {seq_length} / cp {cp_size} = {seq_length // cp_size}: {times}?"
            found.append(_error("B9", key, message, "slice each batch exactly once"))
        elif packed and shape[0] != 1:
            found.append(_error("F15", key, f"has {shape[0]} rows, but a pack has one", "join the rows into one pack"))
    missing = [key for key in KEYS if key not in shapes]
    if missing:
        found.append(_error("B7", ", ".join(missing), "missing from the batch"))
    return found


def check_positions(position_ids: ArrayLike, *, cp_rank: int, cp_size: int) -> list[Violation]:
    """Check rule B10 on a batch of whole sequences.

    ``position_ids`` are this rank's, ``[micro batch, seq_length / cp_size]``.
    """
    positions = np.atleast_2d(np.asarray(position_ids))
    half = positions.shape[-1] // 2 if cp_size > 1 else positions.shape[-1]
    chunks = [cp_rank, 2 * cp_size - 1 - cp_rank] if cp_size > 1 else [0]
    expected = np.concatenate([np.arange(chunk * half, (chunk + 1) * half) for chunk in chunks])
    if positions.shape[-1] == expected.size and (positions == expected).all():
        return []
    message = (
        f"context-parallel rank {cp_rank} of {cp_size} has positions {_summary(positions[0])}, not {_summary(expected)}"
    )
    return [_error("B10", "position_ids", message, "slice the global positions together with the tokens")]


def _summary(values: np.ndarray) -> str:
    runs = np.split(values, np.flatnonzero(np.diff(values) != 1) + 1)
    texts = [f"{run[0]}..{run[-1]}" for run in runs[:3]]
    return ", ".join(texts) + (" ..." if len(runs) > 3 else "")


def check_pack(
    cu_seqlens: ArrayLike,
    cu_seqlens_padded: ArrayLike | None = None,
    *,
    num_tokens: int,
    cp_size: int = 1,
    tp_size: int = 1,
) -> list[Violation]:
    """Check rules F1, F2 and F4 on the lengths of one pack.

    Args:
        cu_seqlens: cumulative lengths without padding, ``[sequences + 1]``, of the whole pack over all ranks.
        cu_seqlens_padded: the same with each sequence's padding; None without padding.
        num_tokens: tokens of the whole pack, padding included.
        cp_size: ranks of the pack's context-parallel group.
        tp_size: tensor-parallel size under sequence parallelism, else 1.
    """
    real = np.asarray(cu_seqlens)
    padded = real if cu_seqlens_padded is None else np.asarray(cu_seqlens_padded)
    name = "cu_seqlens" if cu_seqlens_padded is None else "cu_seqlens_padded"
    for field, offsets in (("cu_seqlens", real), (name, padded)):
        if offsets.ndim != 1 or offsets.size < 1 or offsets[0] != 0 or (np.diff(offsets) < 0).any():
            return [_error("F4", field, "must be one dimension of offsets that start at 0 and do not decrease")]
    if real.shape != padded.shape:
        message = f"has {padded.size - 1} sequences, but cu_seqlens has {real.size - 1}"
        return [_error("F1", "cu_seqlens_padded", message, "pass both for the same sequences")]
    found = []
    lengths, room = np.diff(real), np.diff(padded)
    short = np.flatnonzero(lengths > room)
    if short.size:
        i = int(short[0])
        message = f"sequence {i} has {lengths[i]} tokens, but only {room[i]} with padding"
        found.append(_error("F1", "cu_seqlens_padded", message, "pad each sequence to at least its own length"))
    multiple = 2 * cp_size if cp_size > 1 else 1
    uneven = np.flatnonzero(room % multiple)
    if uneven.size:
        i = int(uneven[0])
        wanted = -(-int(room[i]) // multiple) * multiple
        message = (
            f"{uneven.size} of {room.size} sequences are not padded to a multiple of 2 * cp = {multiple}, first "
            f"sequence {i} with {room[i]}: the last tokens would be dropped"
        )
        rule = "F1" if cu_seqlens_padded is None else "F2"
        found.append(_error(rule, name, message, f"pad it to {wanted} and pass cu_seqlens_padded"))
    if int(padded[-1]) != num_tokens:
        message = f"ends at {padded[-1]}, but the pack has {num_tokens} tokens"
        found.append(_error("F4", name, message, "add padding to the last sequence, or an empty sequence at the end"))
    if num_tokens % (cp_size * tp_size):
        message = (
            f"the pack's {num_tokens} tokens are not divisible by cp * tp = {cp_size} * {tp_size} (sequence "
            "parallelism)"
        )
        found.append(_error("F2", name, message, f"pad the pack to a multiple of {cp_size * tp_size}"))
    return found
