"""Triton's kernels on a machine without a GPU: their real code, run by Triton's interpreter over numpy."""

from __future__ import annotations

import os
from typing import Any


def interpret() -> None:
    """Before any module with kernels is imported; for the rest of the process."""
    os.environ["TRITON_INTERPRET"] = "1"
    from triton.runtime import interpreter

    original = interpreter._patch_lang_tensor

    def patched(tensor: Any, scope: Any) -> None:
        original(tensor, scope)
        # Scalars are arrays of one element there, which numpy 2.5 does not convert any more.
        scope.set_attr(tensor, "__index__", lambda self: int(self.handle.data.item()))

    interpreter._patch_lang_tensor = patched
