"""K rule on environment variables that a recipe sets."""

from __future__ import annotations

import re
from collections.abc import Iterator

from megatron_cp.rules.base import Context, Finding, broken, rule

# Variables that tune a library. All others are errors, since no list of harmful variables is complete.
_PREFIXES = (
    "CAUSAL_CONV1D_",
    "CUBLAS_",
    "CUBLASLT_",
    "CUDNN_",
    "GLOO_",
    "KMP_",
    "MAMBA_",
    "MKL_",
    "NCCL_",
    "NVTE_",
    "OMP_",
    "TORCH_NCCL_",
    "UB_",
)
_NAMES = frozenset(
    [
        "CUDA_DEVICE_MAX_CONNECTIONS",
        "CUDA_DEVICE_ORDER",
        "CUDA_LAUNCH_BLOCKING",
        "CUDA_MODULE_LOADING",
        "CUDA_SCALE_LAUNCH_QUEUES",
        "CUDA_VISIBLE_DEVICES",
        "HF_HUB_OFFLINE",
        "PYTORCH_ALLOC_CONF",
        "PYTORCH_CUDA_ALLOC_CONF",
        "TOKENIZERS_PARALLELISM",
        "TORCH_CPP_LOG_LEVEL",
        "TORCH_DISTRIBUTED_DEBUG",
        "TORCH_SHOW_CPP_STACKTRACES",
        "TRANSFORMERS_OFFLINE",
        "WANDB_MODE",
    ]
)
# Words in variables that name a library to load, a file to read or write, or an address: NCCL_NET_PLUGIN,
# NCCL_CONF_FILE, NCCL_COMM_ID, OMP_TOOL_LIBRARIES, NVTE_CUDA_INCLUDE_DIR, CUDNN_LOGDEST_DBG.
_RESOURCE_WORDS = frozenset(
    ["COMMAND", "COMM", "DIR", "FILE", "LIB", "LIBRARIES", "LIBRARY", "LOGDEST", "PATH", "PLUGIN", "TOOL"]
)


def may_set(name: str) -> bool:
    """Return whether a recipe may set this environment variable."""
    tunes = name.startswith(_PREFIXES) and re.fullmatch("[A-Z0-9_]+", name)
    return name in _NAMES or (bool(tunes) and _RESOURCE_WORDS.isdisjoint(name.split("_")))


@rule(
    "K59",
    "env_vars holds only variables that tune libraries.",
    "Others choose the code that runs (LD_PRELOAD, PYTHONPATH, PATH, NCCL_NET_PLUGIN), the addresses that receive data "
    "(HTTPS_PROXY, HF_ENDPOINT, MASTER_ADDR) or a file to overwrite (NCCL_DEBUG_FILE). A recipe may come from another "
    "person, so export those in the shell. Prefixes that a recipe may set: "
    + ", ".join(_PREFIXES)
    + " (but no plugin, library, file, folder or address). Names: "
    + ", ".join(sorted(_NAMES))
    + ".",
    broken("env_vars.LD_PRELOAD=/tmp/library.so"),
)
def variables_tune(c: Context) -> Iterator[Finding]:
    for name, value in c.config.env_vars.items():
        field = f"env_vars.{name}"
        if not may_set(name):
            message = "a recipe may set only variables that tune a library"
            fix = f"{field}=null (if you need it: export {name}=VALUE in the shell, before you start the launcher)"
            yield Finding(field, message, fix)
        elif "\0" in value:
            yield Finding(field, "a variable's value cannot contain a NUL character", "=1")
