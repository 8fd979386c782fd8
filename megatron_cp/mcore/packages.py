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
from importlib import metadata
from pathlib import Path

from megatron_cp.common.errors import ConfigError, Violation, first_line
from megatron_cp.common.installation import how_to_install

# Its wheels from this version on are compiled with a newer cuDNN's headers, and set an attribute that an older cuDNN
# refuses: a reshape in the backward pass of fused attention.
_NEW_WHEELS, _CUDNN_OF_NEW_WHEELS = (2, 17), 92200


def check_transformer_engine() -> None:
    """Check that Transformer Engine imports, with a cuDNN that fits.

    Only where it is installed and there is a GPU.

    Raises:
        ConfigError: the import fails, or another cuDNN is in use.
    """
    modules = ["transformer_engine.pytorch"]
    if _are_used(modules):
        with cudnn_of_pytorch():
            _import("Transformer Engine", modules, "gpu")
        _check_cudnn()


def check_mamba_ssm() -> None:
    """Check that mamba-ssm and causal-conv1d import, if installed and there is a GPU.

    The imports take seconds, so this is for models that use them; mamba-ssm needs causal-conv1d.

    Raises:
        ConfigError: an import fails.
    """
    modules = ["causal_conv1d.cpp_functions", "mamba_ssm.ops.triton.ssd_combined"]
    if _are_used(modules):
        _import("mamba-ssm", modules, "mamba")


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

    lines = Path("/proc/self/maps").read_text(encoding="utf-8", errors="replace").splitlines()
    paths = (Path(line.split(maxsplit=5)[-1]) for line in lines if "/libcudnn" in line)
    return sorted({str(path.parent) for path in paths})


def _check_cudnn() -> None:
    """Check that one cuDNN is loaded, new enough for Transformer Engine."""
    folders = _folders_of_cudnn()
    if len(folders) > 1:
        message = f"two versions are loaded, and kernels fail: from {' and '.join(folders)}"
        if os.environ.get("CUDNN_HOME"):
            fix = "unset CUDNN_HOME"
        else:  # somebody has loaded another one before
            fix = "import megatron_cp before transformer_engine"
        raise ConfigError([Violation("", "error", "cuDNN", message, fix)])
    try:
        wheel = metadata.version("transformer-engine-cu13")
    except metadata.PackageNotFoundError:  # compiled here, with the headers that are here
        return
    library = next((path for folder in folders for path in Path(folder).glob("libcudnn.so.[0-9]*")), None)
    if library is None or tuple(int(number) for number in wheel.split(".")[:2]) < _NEW_WHEELS:
        return
    loaded: int = ctypes.CDLL(str(library)).cudnnGetVersion()
    if loaded < _CUDNN_OF_NEW_WHEELS:
        needs, has_version = (f"{n // 10000}.{n // 100 % 100}" for n in (_CUDNN_OF_NEW_WHEELS, loaded))
        message = f"{wheel} is built for cuDNN {needs}: with {has_version} its attention fails in the backward pass"
        fix = f"{how_to_install('gpu')}, or uninstall it to train without"
        raise ConfigError([Violation("", "error", "Transformer Engine", message, fix)])


def _are_used(modules: Sequence[str]) -> bool:
    """Return whether there is a GPU, and the packages of all modules are installed."""
    import torch

    installed = (importlib.util.find_spec(module.partition(".")[0]) is not None for module in modules)
    return torch.cuda.is_available() and all(installed)


def _import(name: str, modules: Sequence[str], extra: str) -> None:
    for module in modules:
        try:
            importlib.import_module(module)
        except Exception as error:
            message = f"is installed and {module} cannot be imported: {type(error).__name__}: {first_line(error)}"
            fix = f"{how_to_install(extra)} (compiles it for this PyTorch), or uninstall it to train without"
            raise ConfigError([Violation("", "error", name, message, fix)]) from error
