"""The names of settings, for messages and fixes: ``NAME.model.num_layers`` is the text ``model.num_layers``. Pure.

Written so, a name that no setting has is an error, and every use of a setting is found by its name.
"""

from __future__ import annotations

import dataclasses
from typing import TYPE_CHECKING, Any

from megatron_cp.config.run_config import RunConfig
from megatron_cp.config.schema import hints


class _Section:
    """A section's settings by name."""

    def __init__(self, section: str, kind: Any) -> None:
        self.__dict__ |= {name: f"{section}.{name}" for name in hints(kind)}

    if TYPE_CHECKING:

        def __getattr__(self, name: str) -> str: ...


class _Sections:
    def __init__(self) -> None:
        sections = {name: kind for name, kind in hints(RunConfig).items() if dataclasses.is_dataclass(kind)}
        self.__dict__ |= {name: _Section(name, kind) for name, kind in sections.items()}

    if TYPE_CHECKING:

        def __getattr__(self, name: str) -> _Section: ...


NAME = _Sections()
