"""Check that installed GPU packages work if there is a GPU.

Libraries that import these optionally fall back silently, and slowly, when the import fails with ImportError. Other
errors end in a traceback.
"""

from __future__ import annotations

import importlib
import importlib.util
from collections.abc import Sequence

from megatron_cp.common.errors import ConfigError, Violation, first_line
from megatron_cp.common.installation import how_to_install


def check_transformer_engine() -> None:
    """Check that Transformer Engine imports, if installed and there is a GPU.

    Raises:
        ConfigError: the import fails.
    """
    _check("Transformer Engine", ["transformer_engine.pytorch"], "gpu")


def check_mamba_ssm() -> None:
    """Check that mamba-ssm and causal-conv1d import, if installed and there is a GPU.

    The imports take seconds, so this is for models that use them; mamba-ssm needs causal-conv1d.

    Raises:
        ConfigError: an import fails.
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
