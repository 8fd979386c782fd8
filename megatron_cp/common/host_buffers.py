"""Sizes of buffers in pinned host memory. Pure."""

from __future__ import annotations


def buffer_bytes(size: int) -> int:
    """Return the bytes of a buffer: the next power of two.

    PyTorch's allocator of pinned memory rounds in this way.
    """
    return 1 << max(0, size - 1).bit_length()
