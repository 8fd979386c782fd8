"""Run Triton's kernels without a GPU, in Triton's interpreter.

The interpreter runs one block after the other in NumPy.
"""

from __future__ import annotations

import os
import sys
from typing import Any

import numpy as np
import torch


def interpret() -> None:
    """Make Triton interpret kernels, on tensors in host memory.

    Call it before anything imports Triton.
    """
    if "triton" in sys.modules:
        raise RuntimeError("Triton was imported already, and compiles its kernels")
    os.environ["TRITON_INTERPRET"] = "1"
    from triton.runtime import interpreter

    _numbers_as_indices(interpreter)
    _bfloat16(interpreter)


def _numbers_as_indices(interpreter: Any) -> None:
    """Convert a kernel's numbers, arrays of one element, to indices.

    NumPy from 2.5 on rejects them.
    """
    original = interpreter._patch_lang_tensor

    def patched(tensor: Any, scope: Any) -> None:
        original(tensor, scope)
        scope.set_attr(tensor, "__index__", lambda self: int(self.handle.data.item()))

    interpreter._patch_lang_tensor = patched


def _bfloat16(interpreter: Any) -> None:
    """Compute in bfloat16.

    NumPy has no bfloat16, and the interpreter would compute with its bits as integers.
    """
    tl, builder, handle = interpreter.tl, interpreter.InterpreterBuilder, interpreter.TensorHandle
    cast, dot, binary = builder.cast_impl, builder.create_dot, builder.binary_op

    def widened(value: Any) -> Any:
        if value.dtype.scalar != tl.bfloat16:
            return value
        return handle((value.data.astype(np.uint32) << 16).view(np.float32), tl.float32)

    def cast_impl(self: Any, value: Any, dtype: Any) -> Any:
        if value.dtype.scalar == tl.float32 and dtype.scalar == tl.bfloat16:  # to the nearest; upstream cuts bits off
            rounded = torch.from_numpy(np.ascontiguousarray(value.data)).bfloat16()
            return handle(rounded.view(torch.uint16).numpy(), tl.bfloat16)
        return cast(self, widened(value), dtype)

    def binary_op(self: Any, left: Any, right: Any, operation: Any) -> Any:
        if left.dtype.scalar == tl.bfloat16:
            raise NotImplementedError("bfloat16 in anything but products of matrices")
        return binary(self, left, right, operation)

    builder.cast_impl = cast_impl
    builder.binary_op = binary_op
    builder.create_dot = lambda self, a, b, *rest: dot(self, widened(a), widened(b), *rest)
