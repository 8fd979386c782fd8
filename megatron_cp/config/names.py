"""Names of settings for messages: ``NAME.model.num_layers`` is the text. Pure.

An unknown setting is an AttributeError, and a search for a name finds every use.
"""

from __future__ import annotations

from collections import defaultdict
from types import SimpleNamespace
from typing import Any

from megatron_cp.config.run_config import settings


def _sections() -> Any:
    """Return a namespace of sections, each with the dotted names of its settings."""
    names: dict[str, dict[str, str]] = defaultdict(dict)
    for path in settings():
        section, _, name = path.partition(".")
        names[section][name] = path
    return SimpleNamespace(**{section: SimpleNamespace(**settings) for section, settings in names.items()})


NAME = _sections()
