"""How a setting is named and given a value where a user types it. Pure."""

from __future__ import annotations

import json
import re
from typing import Any

SPECIAL = re.compile(r"""[][*?|;&<>(){}$'" \\!]""")  # what a shell or Hydra reads otherwise than it stands


def override(setting: str, value: Any) -> str:
    """The word that gives a setting a value, as Hydra parses it; :func:`quoted` quotes it for a shell."""
    if isinstance(value, str):
        # Hydra takes text with a comma for several values.
        return f"{setting}='{value}'" if SPECIAL.search(value) or "," in value else f"{setting}={value}"
    if isinstance(value, list):
        return f"{setting}=[{','.join(map(str, value))}]"
    return f"{setting}={json.dumps(value, separators=(',', ':'))}"


def quoted(word: str) -> str:
    """A word as it is typed in a shell."""
    return f'"{word}"' if SPECIAL.search(word) else word


def typed(setting: str, value: Any) -> str:
    """The override that gives a setting a value, as it is typed: ``"model.window_size=[64,0]"``.

    Text with a comma is quoted twice, for the shell and for Hydra.
    """
    return quoted(override(setting, value))
