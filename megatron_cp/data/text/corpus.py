"""A corpus that is on every machine: the source of the Python standard library."""

from __future__ import annotations

import sysconfig
from pathlib import Path

# Third-party packages, tests (much of it repeated or deliberately broken) and programs that not every system installs.
_LEFT_OUT = frozenset(
    ("site-packages", "dist-packages", "test", "tests", "idle_test", "__pycache__", "lib2to3", "idlelib", "turtledemo")
)


def standard_library_sources() -> list[Path]:
    """The standard library's source files in a fixed order: some 500 files, 10 MB.

    Raises:
        FileNotFoundError: this Python comes without its source.
    """
    library = Path(sysconfig.get_path("stdlib"))
    files = [p for p in sorted(library.rglob("*.py")) if _LEFT_OUT.isdisjoint(p.relative_to(library).parts)]
    readable = [p for p in files if _is_utf8(p)]
    if not readable:
        raise FileNotFoundError(f"{library}: this Python comes without the source of its standard library")
    return readable


def _is_utf8(path: Path) -> bool:
    try:
        path.read_bytes().decode("utf-8")
    except (UnicodeDecodeError, OSError):
        return False
    return True
