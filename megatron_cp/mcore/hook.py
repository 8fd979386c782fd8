"""Run our preparations around the first import of ``megatron.core``.

An import hook rather than a function that everybody must remember to call: without CUDA, the stand-ins have to be in
place before the first line of megatron-core runs, and a forgotten call would show as an obscure crash much later.
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


def _quieten() -> None:
    """Drop what megatron-core and torch say on every rank about optional libraries and their own deprecations."""
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
    """Run ``megatron.core``'s own code, with our preparations before and after it."""
    _quieten()
    from megatron_cp.mcore import cpu, patches

    cpu.before_import()
    upstream(module)
    cpu.after_import()
    patches.apply()


def install() -> None:
    """Prepare megatron-core at its first import, or at once where it was imported before this package."""
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
        # Functions that are marked for fusion already: too late to leave them unmarked, in time not to compile them.
        torch._dynamo.config.disable = True
