"""A corpus that every machine has: the source of the Python standard library."""

from __future__ import annotations

import sysconfig
from pathlib import Path

# Third-party packages, tests (repetitive or deliberately broken), and programs that some systems do not install.
_LEFT_OUT = frozenset(
    ("site-packages", "dist-packages", "test", "tests", "idle_test", "__pycache__", "lib2to3", "idlelib", "turtledemo")
)


def standard_library_sources() -> list[Path]:
    """Return the standard library's source files, sorted: about 500 files, 10 MB.

    Raises:
        FileNotFoundError: this Python has no source files.
    """
    library = Path(sysconfig.get_path("stdlib"))
    files = [p for p in sorted(library.rglob("*.py")) if _LEFT_OUT.isdisjoint(p.relative_to(library).parts)]
    readable = [p for p in files if _is_utf8(p)]
    if not readable:
        raise FileNotFoundError(
            f"{library}: has no source files of the standard library. Fix: install a Python that includes them"
        )
    return readable


def _is_utf8(path: Path) -> bool:
    try:
        path.read_bytes().decode("utf-8")
    except (UnicodeDecodeError, OSError):
        return False
    return True
