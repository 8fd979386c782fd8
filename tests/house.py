"""Figures that say how hard the package is to take over: sizes, circles, and in how many places a fact stands.

python -m tests.house
"""

from __future__ import annotations

import ast
import dataclasses
import graphlib
import io
import re
import statistics
import tokenize
from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from functools import cache
from pathlib import Path

from megatron_cp.attention.transports.registry import TRANSPORTS
from megatron_cp.config.run_config import ModelConfig

PACKAGE = Path(__file__).parents[1] / "megatron_cp"
MCORE = PACKAGE / "mcore"  # what changes megatron-core, or reads its private names


@cache
def modules() -> dict[str, Path]:
    """Every module of the package by its dotted name."""
    names = {path: path.relative_to(PACKAGE.parent).with_suffix("").parts for path in sorted(PACKAGE.rglob("*.py"))}
    return {".".join(parts).removesuffix(".__init__"): path for path, parts in names.items()}


@cache
def tree(path: Path) -> ast.Module:
    return ast.parse(path.read_text())


def imported_tree(path: Path) -> ast.Module:
    """A module without what only type checkers import."""
    found = ast.parse(path.read_text())
    found.body = [node for node in found.body if not ast.unparse(node).startswith("if TYPE_CHECKING:")]
    return found


def loose_modules() -> list[str]:
    return sorted(path.stem for path in PACKAGE.glob("*.py") if not path.stem.startswith("__"))


def files_of_folders() -> Counter[str]:
    """How many modules beside ``__init__`` each folder has."""
    folders = (path.parent for path in modules().values() if path.stem != "__init__")
    return Counter(str(folder.relative_to(PACKAGE.parent)) for folder in folders)


def import_circle() -> list[str]:
    """Modules that import each other, also within functions; empty where there is no circle."""
    graph = {name: _imports(name) for name in modules()}
    try:
        graphlib.TopologicalSorter(graph).prepare()
    except graphlib.CycleError as error:
        return list(error.args[1])
    return []


def _imports(name: str) -> set[str]:
    found = set()
    for node in ast.walk(imported_tree(modules()[name])):
        if isinstance(node, ast.ImportFrom) and node.module:
            taken = {f"{node.module}.{alias.name}" for alias in node.names} & modules().keys()
            found |= taken or {node.module}
    return (found & modules().keys()) - {name}


def _strings(path: Path) -> Iterator[str]:
    """All texts of a module but docstrings."""
    documented = (ast.Module, ast.ClassDef, ast.FunctionDef, ast.AsyncFunctionDef)
    docstrings = set()
    for node in ast.walk(tree(path)):
        if isinstance(node, documented) and node.body and isinstance(node.body[0], ast.Expr):
            docstrings.add(id(node.body[0].value))
    for node in ast.walk(tree(path)):
        if isinstance(node, ast.Constant) and isinstance(node.value, str) and id(node) not in docstrings:
            yield node.value


@cache
def _words() -> dict[Path, frozenset[str]]:
    return {
        path: frozenset(word for text in _strings(path) for word in re.findall(r"[a-z0-9_+]+", text))
        for path in modules().values()
    }


def files_that_write(names: Iterable[str]) -> dict[str, list[Path]]:
    """The files in whose texts each name stands as a word, with its declaration's or without."""
    return {name: [path for path, words in _words().items() if name in words] for name in names}


def files_that_write_a_transport() -> list[Path]:
    """The files in whose texts a transport's name stands, also as a part of a fix, but for the transports' own."""
    own = {modules()[transport.run.partition(":")[0]] for transport in TRANSPORTS.values()}
    return sorted({path for paths in files_that_write(TRANSPORTS).values() for path in paths} - own)


def files_that_name(word: str) -> list[Path]:
    return [path for path in modules().values() if re.search(rf"\b{re.escape(word)}\b", path.read_text())]


def functions_given(kind: str) -> list[str]:
    """Functions with a parameter of this type."""
    found = []
    for name, path in modules().items():
        for node in ast.walk(tree(path)):
            if isinstance(node, ast.FunctionDef):
                kinds = [argument.annotation for argument in (*node.args.args, *node.args.kwonlyargs)]
                if any(each is not None and re.search(rf"\b{kind}\b", ast.unparse(each)) for each in kinds):
                    found.append(f"{name}.{node.name}")
    return found


def private_upstream_names() -> dict[str, list[str]]:
    """Names with an underscore in front that a module outside :data:`MCORE` imports from megatron-core."""
    found: dict[str, list[str]] = {}
    for name, path in modules().items():
        if path.is_relative_to(MCORE):
            continue
        for node in ast.walk(tree(path)):
            if isinstance(node, ast.ImportFrom) and (node.module or "").startswith("megatron.core"):
                private = [alias.name for alias in node.names if alias.name.startswith("_")]
                if private or "._" in (node.module or ""):
                    found.setdefault(name, []).extend(private or [str(node.module)])
    return found


def code_lines(path: Path) -> int:
    """Lines that are neither blank, nor a comment, nor part of a docstring."""
    skipped = {tokenize.COMMENT, tokenize.NL, tokenize.NEWLINE, tokenize.INDENT, tokenize.DEDENT, tokenize.ENDMARKER}
    lines: set[int] = set()
    begins = True
    for token in tokenize.generate_tokens(io.StringIO(path.read_text()).readline):
        if token.type in skipped:
            begins = begins or token.type in (tokenize.NEWLINE, tokenize.INDENT, tokenize.DEDENT)
            continue
        if not (begins and token.type == tokenize.STRING and token.line.strip().startswith(('"""', 'r"""', '"'))):
            lines |= set(range(token.start[0], token.end[0] + 1))
        begins = False
    return len(lines)


def figures() -> dict[str, object]:
    fields = [field.name for field in dataclasses.fields(ModelConfig)]
    writers = {name: len(paths) for name, paths in files_that_write(fields).items()}
    folders, handed = files_of_folders(), functions_given("RunConfig")
    longest = sorted(((len(path.read_text().splitlines()), name) for name, path in modules().items()), reverse=True)
    where: Callable[[str], int] = lambda word: len(files_that_name(word))  # noqa: E731
    return {
        "code lines": sum(map(code_lines, modules().values())),
        "lines": sum(lines for lines, _ in longest),
        "modules": len(modules()),
        "loose modules at the top": len(loose_modules()),
        "folders with more than 12 files": {name: count for name, count in folders.items() if count > 12},
        "files of more than 250 lines": sum(lines > 250 for lines, _ in longest),
        "import circle": " -> ".join(import_circle()) or "none",
        "files in whose texts a model setting's name stands, mean": round(statistics.mean(writers.values()), 2),
        "... most": dict(Counter(writers).most_common(3)),
        "files that write a transport's name": len(files_that_write_a_transport()),
        "files that name RunConfig": where("RunConfig"),
        "functions that are handed a RunConfig": len(handed),
        "files with unittest.mock": where("unittest"),
        "files with sys._getframe": where("_getframe"),
        "private names of megatron-core outside its package": private_upstream_names(),
    }


if __name__ == "__main__":
    for name, value in figures().items():
        print(f"{name}: {value}")
