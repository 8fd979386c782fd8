"""A corpus that every machine has: the source of the Python standard library.

Its docstrings are dialogues, too: questions about functions, answered by the first paragraph.
"""

from __future__ import annotations

import ast
import sysconfig
from collections.abc import Iterator, Sequence
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


# For tokenizers without special tokens: roles as words, and an empty line after each turn.
PLAIN_TEMPLATE = (
    "{% for message in messages %}{{ message.role + ': ' }}"
    "{% if message.role == 'assistant' %}{% generation %}{{ message.content + '\\n\\n' }}{% endgeneration %}"
    "{% else %}{{ message.content + '\\n\\n' }}{% endif %}{% endfor %}"
    "{% if add_generation_prompt %}{{ 'assistant: ' }}{% endif %}"
)


def dialogues_about(sources: Sequence[Path], most: int) -> Iterator[list[dict[str, str]]]:
    """Yield up to ``most`` dialogues about functions and classes with methods."""
    count = 0
    for path in sources:
        for node in ast.parse(path.read_bytes()).body:
            methods = node.body if isinstance(node, ast.ClassDef) else []
            turns = [turn for each in (node, *methods) for turn in _question(path.stem, each)]
            if turns:
                yield turns
                count += 1
            if count == most:
                return


def _question(module: str, node: ast.stmt) -> list[dict[str, str]]:
    """Return a question about a node and its answer; [] without docstring."""
    if not isinstance(node, ast.FunctionDef | ast.ClassDef) or not (text := ast.get_docstring(node)):
        return []
    answer = " ".join(text.partition("\n\n")[0].split())
    question = f"What is {node.name} of {module}?"
    return [{"role": "user", "content": question}, {"role": "assistant", "content": answer}] if answer else []


def _is_utf8(path: Path) -> bool:
    try:
        path.read_bytes().decode("utf-8")
    except (UnicodeDecodeError, OSError):
        return False
    return True
