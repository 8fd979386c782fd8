"""Overrides as text: how a setting and its value are typed. Pure."""

from __future__ import annotations

import json
import re
from typing import Any

SPECIAL = re.compile(r"""[][*?|;&<>(){}$'" \\!]""")  # special characters of a shell or Hydra


def override(setting: str, value: Any) -> str:
    """Return the override of a setting in Hydra's grammar, without shell quotes."""
    if isinstance(value, str):
        # Hydra reads unquoted text with a comma as a sweep.
        return f"{setting}='{value}'" if SPECIAL.search(value) or "," in value else f"{setting}={value}"
    if isinstance(value, list):
        return f"{setting}=[{','.join(map(str, value))}]"
    return f"{setting}={json.dumps(value, separators=(',', ':'))}"


def quoted(word: str) -> str:
    """Return a word quoted for a shell if necessary."""
    return f'"{word}"' if SPECIAL.search(word) else word


def typed(setting: str, value: Any) -> str:
    """Return the override of a setting as typed: ``"model.window_size=[64,0]"``.

    Text with a comma is quoted twice, for the shell and for Hydra.
    """
    return quoted(override(setting, value))
