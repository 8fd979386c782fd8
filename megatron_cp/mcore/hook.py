"""Prepare megatron-core around the first import of ``megatron.core``.

Without CUDA the stand-ins must be in place before megatron-core's first line runs. An import hook cannot be forgotten,
while a forgotten call would cause an obscure crash later.

The garbage collector pauses during the imports of torch and megatron-core. They make a million objects that stay, and
the collector would go through them again and again: up to a third of the imports' CPU time (benchmarks/start_time.py).
"""

from __future__ import annotations

import gc
import importlib.abc
import importlib.machinery
import logging
import sys
import warnings
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
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
    """Run a package's import by ``execute(exec_module, module)``, once."""

    def __init__(self, target: str, execute: Callable[[Callable[[ModuleType], None], ModuleType], None]) -> None:
        self.target, self.execute = target, execute

    def find_spec(
        self, fullname: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> importlib.machinery.ModuleSpec | None:
        if fullname != self.target:
            return None
        if fullname == _TARGET:
            check_transformer_engine()
        sys.meta_path.remove(self)
        spec = importlib.machinery.PathFinder.find_spec(fullname, path, target)
        if spec is not None and spec.loader is not None:
            spec.loader.exec_module = partial(self.execute, spec.loader.exec_module)  # type: ignore[method-assign]
        return spec


@contextmanager
def _collector_paused() -> Iterator[None]:
    """Pause the garbage collector, unless it is off already."""
    enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if enabled:
            gc.enable()


def _execute_torch(upstream: Callable[[ModuleType], None], module: ModuleType) -> None:
    with _collector_paused():
        upstream(module)
        gc.freeze()  # later collections, and the one at exit, leave torch out; no tensor can be among these objects


def _execute_megatron_core(upstream: Callable[[ModuleType], None], module: ModuleType) -> None:
    """Run ``megatron.core``'s code with preparations before and after."""
    _silence()
    from megatron_cp.mcore import cpu, patches

    with _collector_paused():
        cpu.before_import()
        upstream(module)
        cpu.after_import()
        patches.apply()


def install() -> None:
    """Prepare megatron-core at its first import, or now if already imported."""
    if "torch" not in sys.modules:
        _add(_Finder("torch", _execute_torch))
    if _TARGET in sys.modules:
        _prepare_late()
    else:
        _add(_Finder(_TARGET, _execute_megatron_core))


def _add(finder: _Finder) -> None:
    if not any(isinstance(each, _Finder) and each.target == finder.target for each in sys.meta_path):
        sys.meta_path.insert(0, finder)


def _prepare_late() -> None:
    import torch._dynamo

    from megatron_cp.mcore import cpu, patches

    cpu.before_import()
    cpu.after_import()
    patches.apply()
    if not torch.cuda.is_available():
        # Functions are already marked for fusion; disabling dynamo still prevents their compilation.
        torch._dynamo.config.disable = True
