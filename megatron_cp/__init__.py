"""megatron_cp: long-context training on released megatron-core.

In a notebook or a script of its own::

    from megatron_cp import check, load_recipe, train

    config = load_recipe("llama_tiny_pretrain_config", ["model.context_parallel_size=1", "train.train_iters=20"])
    for violation in check(config, world_size=1):
        print(violation)
    result = train(config)
    print(result.first_loss, "->", result.last_loss, "in", result.folder)

What cannot run raises :class:`ConfigError`, which lists every broken rule with a fix. Ranks on several processes are
started by the command line (``megatron-cp train -n 4 ...``), whose recipes and settings are the same.

All names are loaded when they are first used: importing this package imports neither torch nor megatron-core.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

from megatron_cp.mcore import hook

if TYPE_CHECKING:
    from megatron_cp.api import train
    from megatron_cp.attention import context_parallel_attention
    from megatron_cp.common.errors import ConfigError, DataError, RuntimeFault, Violation
    from megatron_cp.config.recipes import list_recipes, load_recipe
    from megatron_cp.config.run_config import RunConfig
    from megatron_cp.dynamic_cp import schedule
    from megatron_cp.rules import check

__version__ = "0.2.0"
__all__ = [
    "ConfigError",
    "DataError",
    "RunConfig",
    "RuntimeFault",
    "Violation",
    "check",
    "context_parallel_attention",
    "list_recipes",
    "load_recipe",
    "schedule",
    "train",
]
_MODULES = {
    "api": ("train",),
    "attention": ("context_parallel_attention",),
    "config.run_config": ("RunConfig",),
    "dynamic_cp": ("schedule",),
    "common.errors": ("ConfigError", "DataError", "RuntimeFault", "Violation"),
    "config.recipes": ("list_recipes", "load_recipe"),
    "rules": ("check",),
}

# megatron-core must be prepared when it is first imported, whichever of our modules (or the user's) imports it.
hook.install()


def __getattr__(name: str) -> Any:
    module = next((module for module, names in _MODULES.items() if name in names), None)
    if module is None:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(importlib.import_module(f"{__name__}.{module}"), name)


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
