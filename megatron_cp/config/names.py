"""The names of settings, for messages and fixes: ``NAME.model.num_layers`` is the text ``model.num_layers``. Pure.

Written so, a name that no setting has is an error, and every use of a setting is found by its name.
"""

from __future__ import annotations

from collections import defaultdict
from types import SimpleNamespace
from typing import Any

from megatron_cp.config.run_config import settings


def _sections() -> Any:
    """Every section's settings, by name."""
    names: dict[str, dict[str, str]] = defaultdict(dict)
    for path in settings():
        section, _, name = path.partition(".")
        names[section][name] = path
    return SimpleNamespace(**{section: SimpleNamespace(**of_it) for section, of_it in names.items()})


NAME = _sections()
