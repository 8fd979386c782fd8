"""Prepare megatron-core around the first import of ``megatron.core``.

Without CUDA the stand-ins must be in place before megatron-core's first line runs. An import hook cannot be forgotten,
while a forgotten call would cause an obscure crash later.
"""

from __future__ import annotations

import importlib.abc
import importlib.machinery
import logging
import sys
import warnings
from collections.abc import Callable, Sequence
from functools import partial
from types import ModuleType

from megatron_cp.mcore.packages import check_transformer_engine

_TARGET = "megatron.core"


def _silence() -> None:
    """Silence messages about optional libraries and deprecations on every rank."""
    warnings.filterwarnings("ignore", category=UserWarning, module=r"megatron\.core")
    # torch's checkpoint functions, as megatron-core calls them.
    for category in (UserWarning, FutureWarning):
        warnings.filterwarnings("ignore", category=category, module=r"torch\.distributed\.checkpoint")
    warnings.filterwarnings("ignore", category=SyntaxWarning, message="invalid escape sequence")
    logging.getLogger("torch.utils.cpp_extension").setLevel(logging.ERROR)  # "No CUDA runtime is found"


class _Finder(importlib.abc.MetaPathFinder):
    def find_spec(
        self, fullname: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> importlib.machinery.ModuleSpec | None:
        if fullname != _TARGET:
            return None
        check_transformer_engine()
        sys.meta_path.remove(self)
        spec = importlib.machinery.PathFinder.find_spec(fullname, path, target)
        if spec is not None and spec.loader is not None:
            spec.loader.exec_module = partial(_execute, spec.loader.exec_module)  # type: ignore[method-assign]
        return spec


def _execute(upstream: Callable[[ModuleType], None], module: ModuleType) -> None:
    """Run ``megatron.core``'s code with preparations before and after."""
    _silence()
    from megatron_cp.mcore import cpu, patches

    cpu.before_import()
    upstream(module)
    cpu.after_import()
    patches.apply()


def install() -> None:
    """Prepare megatron-core at its first import, or now if already imported."""
    if _TARGET in sys.modules:
        _prepare_late()
    elif not any(isinstance(finder, _Finder) for finder in sys.meta_path):
        sys.meta_path.insert(0, _Finder())


def _prepare_late() -> None:
    import torch._dynamo

    from megatron_cp.mcore import cpu, patches

    cpu.before_import()
    cpu.after_import()
    patches.apply()
    if not torch.cuda.is_available():
        # Functions are already marked for fusion; disabling dynamo still prevents their compilation.
        torch._dynamo.config.disable = True
