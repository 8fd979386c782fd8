"""Check that installed GPU packages work if there is a GPU.

Libraries that import these optionally fall back silently, and slowly, when the import fails with ImportError. Other
errors end in a traceback.
"""

from __future__ import annotations

import ctypes
import importlib
import importlib.util
import os
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

from megatron_cp.common.errors import ConfigError, Violation, first_line
from megatron_cp.common.installation import how_to_install


def check_transformer_engine() -> None:
    """Check that Transformer Engine imports with PyTorch's cuDNN, if installed and there is a GPU.

    Raises:
        ConfigError: the import fails, or another cuDNN is in use.
    """
    with cudnn_of_pytorch():
        if _check("Transformer Engine", ["transformer_engine.pytorch"], "gpu"):
            _check_cudnn()


def check_mamba_ssm() -> None:
    """Check that mamba-ssm and causal-conv1d import, if installed and there is a GPU.

    The imports take seconds, so this is for models that use them; mamba-ssm needs causal-conv1d.

    Raises:
        ConfigError: an import fails.
    """
    _check("mamba-ssm", ["causal_conv1d.cpp_functions", "mamba_ssm.ops.triton.ssd_combined"], "mamba")


@contextmanager
def cudnn_of_pytorch() -> Iterator[None]:
    """Let Transformer Engine use the cuDNN that PyTorch has loaded.

    Its import looks for cuDNN on the machine first (images named ``cudnn`` have it) and loads it for the whole process.
    Its own library then needs cuDNN's parts, which the machine's linker finds. Calls reach two versions, and kernels
    fail. ``CUDNN_HOME`` is where the import looks first, and parts that are loaded are not looked for. A value that is
    set stays.
    """
    folders = _folders_of_cudnn()
    if len(folders) != 1 or os.environ.get("CUDNN_HOME"):
        yield
        return
    parts = list(Path(folders[0]).glob("libcudnn*.so.[0-9]*"))
    for part in sorted(parts, key=lambda part: ("graph" not in part.name, "ops" not in part.name)):  # others need them
        ctypes.CDLL(str(part))
    os.environ["CUDNN_HOME"] = folders[0]
    try:
        yield
    finally:
        del os.environ["CUDNN_HOME"]


def _folders_of_cudnn() -> list[str]:
    """Return the folders of the cuDNN libraries that this process has loaded."""
    import torch  # noqa: F401 - loads its own

    paths = (line.split()[-1] for line in Path("/proc/self/maps").read_text(encoding="utf-8").splitlines())
    return sorted({str(Path(path).parent) for path in paths if Path(path).name.startswith("libcudnn")})


def _check_cudnn() -> None:
    import torch

    try:
        torch.backends.cudnn.version()
    except RuntimeError as error:
        reason = first_line(error).partition(". ")[0]
        message = f"{reason}; loaded from {' and '.join(_folders_of_cudnn())}"
        fix = "unset CUDNN_HOME CUDNN_PATH LD_LIBRARY_PATH (they choose the cuDNN)"
        raise ConfigError([Violation("", "error", "cuDNN", message, fix)]) from error


def _check(name: str, modules: Sequence[str], extra: str) -> bool:
    """Import ``modules`` if they are installed and there is a GPU; return whether they are."""
    import torch

    installed = all(importlib.util.find_spec(module.partition(".")[0]) is not None for module in modules)
    if not torch.cuda.is_available() or not installed:
        return False
    for module in modules:
        try:
            importlib.import_module(module)
        except Exception as error:
            message = f"is installed and {module} cannot be imported: {type(error).__name__}: {first_line(error)}"
            fix = f"{how_to_install(extra)} (compiles it for this PyTorch), or uninstall it to train without"
            raise ConfigError([Violation("", "error", name, message, fix)]) from error
    return True
