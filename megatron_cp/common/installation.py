"""Install commands of this package, from a clone or from a wheel. Pure."""

from __future__ import annotations

import re
import shlex
from importlib import metadata
from pathlib import Path

_PACKAGE = "megatron-cp"


def clone() -> Path | None:
    """Return the clone that the package runs from; None for an installed wheel."""
    folder = Path(__file__).resolve().parents[2]
    return folder if (folder / "pyproject.toml").is_file() else None


def how_to_install(extra: str) -> str:
    """Return the command that installs an extra: ``gpu``, ``mamba`` or ``wandb``."""
    if clone() is not None:
        return "in the clone: " + (
            "uv pip install -e '.[wandb]'" if extra == "wandb" else f"scripts/setup.sh --{extra}"
        )
    of_extra = re.compile(rf"""\s*;\s*extra == ["']{extra}["']""")
    named = [of_extra.sub("", each) for each in metadata.requires(_PACKAGE) or [] if of_extra.search(each)]
    return f"pip install --no-build-isolation {shlex.join(named)}"


def how_to_install_requirement(name: str) -> str:
    """Return the command that installs a required package."""
    return "in the clone: scripts/setup.sh" if clone() is not None else f"pip install {shlex.quote(name)}"
