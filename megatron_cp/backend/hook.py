"""Run our preparations around the first import of ``megatron.core``.

An import hook rather than a function that everybody must remember to call: without CUDA, the stand-ins have to be in
place before the first line of megatron-core runs, and a forgotten call would show as an obscure crash much later.
"""

from __future__ import annotations

import importlib.abc
import importlib.machinery
import sys
from collections.abc import Sequence
from types import ModuleType

_TARGET = "megatron.core"


class _PreparingLoader(importlib.abc.Loader):
    """megatron.core's own loader, with our preparations before and after it."""

    def __init__(self, loader: importlib.abc.Loader):
        self._loader = loader

    def create_module(self, spec: importlib.machinery.ModuleSpec) -> ModuleType | None:
        return self._loader.create_module(spec)

    def exec_module(self, module: ModuleType) -> None:
        from megatron_cp.backend import cpu, patches

        cpu.before_import()
        self._loader.exec_module(module)
        cpu.after_import()
        patches.apply()


class _Finder(importlib.abc.MetaPathFinder):
    def find_spec(
        self, fullname: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> importlib.machinery.ModuleSpec | None:
        if fullname != _TARGET:
            return None
        sys.meta_path.remove(self)
        spec = importlib.machinery.PathFinder.find_spec(fullname, path, target)
        if spec is not None and spec.loader is not None:
            spec.loader = _PreparingLoader(spec.loader)
        return spec


def install() -> None:
    """Prepare megatron-core at its first import.

    Raises:
        ImportError: megatron-core was imported before this package, so that it can no longer be prepared.
    """
    if _TARGET in sys.modules:
        raise ImportError("import megatron_cp before megatron.core: it prepares megatron-core while that is imported")
    if not any(isinstance(finder, _Finder) for finder in sys.meta_path):
        sys.meta_path.insert(0, _Finder())
