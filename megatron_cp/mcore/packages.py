"""Packages for GPUs: what is installed for a GPU that is there must work, or it is said that it does not.

Whoever takes them where they can be imported goes on without them and says nothing, many times slower, where the import
fails with an ImportError, and ends in a traceback where it fails otherwise.
"""

from __future__ import annotations

import importlib
import importlib.util
from collections.abc import Sequence

from megatron_cp.common.errors import ConfigError, Violation, first_line
from megatron_cp.common.installation import how_to_install


def check_transformer_engine() -> None:
    """
    Raises:
        ConfigError: it is installed and cannot be imported, and there is a GPU.
    """
    _check("Transformer Engine", ["transformer_engine.pytorch"], "gpu")


def check_mamba_ssm() -> None:
    """And causal-conv1d, without which it is not used. They take seconds to import: only for models that use them.

    Raises:
        ConfigError: both are installed, one cannot be imported, and there is a GPU.
    """
    _check("mamba-ssm", ["causal_conv1d.cpp_functions", "mamba_ssm.ops.triton.ssd_combined"], "mamba")


def _check(name: str, modules: Sequence[str], extra: str) -> None:
    import torch

    installed = all(importlib.util.find_spec(module.partition(".")[0]) is not None for module in modules)
    if not torch.cuda.is_available() or not installed:
        return
    for module in modules:
        try:
            importlib.import_module(module)
        except Exception as error:
            message = f"is installed and {module} cannot be imported: {type(error).__name__}: {first_line(error)}"
            fix = f"{how_to_install(extra)} (compiles it for this PyTorch), or uninstall it to train without"
            raise ConfigError([Violation("", "error", name, message, fix)]) from error
