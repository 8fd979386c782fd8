"""Print figures of the package's complexity.

They are sizes, import cycles, and the number of files that state a fact.

python -m tests.house
"""

from __future__ import annotations

import ast
import contextlib
import dataclasses
import graphlib
import importlib
import inspect
import io
import re
import statistics
import sys
import tokenize
from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from functools import cache
from pathlib import Path

from megatron_cp.attention.transports.registry import TRANSPORTS
from megatron_cp.config.run_config import ModelConfig

PACKAGE = Path(__file__).parents[1] / "megatron_cp"
MCORE = PACKAGE / "mcore"  # modules that change megatron-core or read its private names


@cache
def modules() -> dict[str, Path]:
    """Return every module of the package by its dotted name."""
    names = {path: path.relative_to(PACKAGE.parent).with_suffix("").parts for path in sorted(PACKAGE.rglob("*.py"))}
    return {".".join(parts).removesuffix(".__init__"): path for path, parts in names.items()}


@cache
def tree(path: Path) -> ast.Module:
    return ast.parse(path.read_text())


def imported_tree(path: Path) -> ast.Module:
    """Return a module without the imports of type checkers."""
    found = ast.parse(path.read_text())
    found.body = [node for node in found.body if not ast.unparse(node).startswith("if TYPE_CHECKING:")]
    return found


def loose_modules() -> list[str]:
    return sorted(path.stem for path in PACKAGE.glob("*.py") if not path.stem.startswith("__"))


def files_of_folders() -> Counter[str]:
    """Count the modules beside ``__init__`` in each folder."""
    folders = (path.parent for path in modules().values() if path.stem != "__init__")
    return Counter(str(folder.relative_to(PACKAGE.parent)) for folder in folders)


def import_circle() -> list[str]:
    """Return modules that import each other, also within functions.

    Empty without a cycle.
    """
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
    """Return all texts of a module except docstrings."""
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
    """Return the files that contain each name as a word.

    With or without its declaration.
    """
    return {name: [path for path, words in _words().items() if name in words] for name in names}


def files_that_write_a_transport() -> list[Path]:
    """Return the files that contain a transport's name.

    The transports' own files are left out.
    """
    own = {modules()[transport.run.partition(":")[0]] for transport in TRANSPORTS.values()}
    return sorted({path for paths in files_that_write(TRANSPORTS).values() for path in paths} - own)


def files_that_name(word: str) -> list[Path]:
    return [path for path in modules().values() if re.search(rf"\b{re.escape(word)}\b", path.read_text())]


def functions_given(kind: str) -> list[str]:
    """Return functions with a parameter of this type."""
    found = []
    for name, path in modules().items():
        for node in ast.walk(tree(path)):
            if isinstance(node, ast.FunctionDef):
                kinds = [argument.annotation for argument in (*node.args.args, *node.args.kwonlyargs)]
                if any(each is not None and re.search(rf"\b{kind}\b", ast.unparse(each)) for each in kinds):
                    found.append(f"{name}.{node.name}")
    return found


def upstream_names(path: Path) -> dict[str, str]:
    """Return names from packages other than ours and Python's.

    Local name to dotted name.
    """
    found = {}
    for node in ast.walk(tree(path)):
        if isinstance(node, ast.ImportFrom) and node.module and _is_upstream(node.module):
            found |= {alias.asname or alias.name: f"{node.module}.{alias.name}" for alias in node.names}
        elif isinstance(node, ast.Import):
            for alias in filter(lambda alias: _is_upstream(alias.name), node.names):
                first = alias.name.split(".")[0]
                found |= {alias.asname: alias.name} if alias.asname else {first: first}
    for node in ast.walk(tree(path)):  # aliases in the module
        if isinstance(node, ast.Assign | ast.AnnAssign) and isinstance(node.value, ast.Name | ast.Attribute):
            targets = node.targets if isinstance(node, ast.Assign) else [node.target]
            names = [target.id for target in targets if isinstance(target, ast.Name) and _root(node.value) in found]
            found |= dict.fromkeys(names, ast.unparse(node.value))
    return found


def _is_upstream(module: str) -> bool:
    first = module.split(".")[0]
    return first not in sys.stdlib_module_names and first not in ("megatron_cp", "tests", "_typeshed")


def is_private(name: str) -> bool:
    return any(part.startswith("_") and not part.startswith("__") for part in name.split("."))


def _root(node: ast.AST) -> str:
    return ast.unparse(node).split(".")[0]


def private_upstream_names(path: Path) -> set[str]:
    """Return private names of other packages that a module uses.

    It imports them, or reads or sets them on their objects. Includes methods and attributes of other packages' classes
    that a class of the module overrides, calls or reads.
    """
    taken = upstream_names(path)
    found = {name.rpartition(".")[2] for name in taken.values() if is_private(name)} | private_reads(path)
    for node in ast.walk(tree(path)):
        if isinstance(node, ast.ClassDef):
            bases = [ast.unparse(base).partition(".") for base in node.bases]
            inherited = [_private_names_of(f"{taken[name]}{dot}{rest}") for name, dot, rest in bases if name in taken]
            found |= _used_on_self(node) & set().union(*inherited)
        elif isinstance(node, ast.Attribute) and is_private(node.attr) and ast.unparse(node.value) == "super()":
            found.add(node.attr)
    return found


def private_reads(path: Path) -> set[str]:
    """Return private attributes of objects of neither the package nor Python."""
    public = {"_replace", "_asdict", "_fields", "_make"}  # NamedTuple's
    return {
        node.attr
        for node in ast.walk(tree(path))
        if isinstance(node, ast.Attribute)
        and is_private(node.attr)
        and node.attr not in _own_names() | public
        and ast.unparse(node.value) not in ("self", "cls", "super()")
        and _root(node.value) not in sys.stdlib_module_names
    }


def _used_on_self(kind: ast.ClassDef) -> set[str]:
    defined = {each.name for each in kind.body if isinstance(each, ast.FunctionDef)}
    attributes = (each for each in ast.walk(kind) if isinstance(each, ast.Attribute))
    return defined | {each.attr for each in attributes if ast.unparse(each.value) == "self"}


@cache
def _own_names() -> frozenset[str]:
    """Return names that the package itself defines or sets."""
    found = set()
    for node in (node for path in modules().values() for node in ast.walk(tree(path))):
        if isinstance(node, ast.FunctionDef | ast.ClassDef):
            found.add(node.name)
        elif isinstance(node, ast.Attribute) and isinstance(node.ctx, ast.Store) and _root(node.value) == "self":
            found.add(node.attr)
    return frozenset(found)


@cache
def _private_names_of(dotted: str) -> frozenset[str]:
    """Return private methods of a class and its bases.

    Also the attributes that they set on ``self``.
    """
    module, _, name = dotted.rpartition(".")
    kind = getattr(importlib.import_module(module), name)
    found = {each for each in dir(kind) if is_private(each)}
    for base in kind.__mro__:
        with contextlib.suppress(OSError, TypeError):  # written in C
            found |= set(re.findall(r"self\.(_[a-z]\w*)\b[^=\n]*=[^=]", inspect.getsource(base)))
    return frozenset(found)


def upstream_patches(path: Path) -> set[str]:
    """Return names that a module sets in other packages, or in ``sys.modules``.

    In modules and classes of those packages. ``*`` stands for several names.
    """
    found, taken = set(), upstream_names(path).keys()
    for node in ast.walk(tree(path)):
        if isinstance(node, ast.Attribute) and isinstance(node.ctx, ast.Store):
            if _root(node) in taken:
                found.add(ast.unparse(node))
            elif ast.unparse(node).startswith("importlib.import_module("):
                found.add(f"*.{node.attr}")
        elif isinstance(node, ast.Subscript) and isinstance(node.ctx, ast.Store | ast.Del):
            found |= {"sys.modules"} & {ast.unparse(node.value)}
        elif isinstance(node, ast.Call) and ast.unparse(node.func) in ("sys.modules.setdefault", "sys.modules.update"):
            found.add("sys.modules")
        elif isinstance(node, ast.Call) and ast.unparse(node.func) == "setattr" and _root(node.args[0]) in taken:
            found.add(f"{ast.unparse(node.args[0])}.*")
    return found


@cache
def reach() -> dict[str, set[str]]:
    """Return the private names that each module uses and sets.

    They are names of other packages.
    """
    return {name: private_upstream_names(path) | upstream_patches(path) for name, path in modules().items()}


def collectives(path: Path) -> list[str]:
    """Return the functions of torch.distributed that exchange values between ranks.

    Only those that the module uses.
    """
    exchange = re.compile(
        r"(?:\bdist|torch\.distributed)\."
        r"((?:all_|batch_|broadcast|gather|i?recv|i?send|monitored_|reduce|scatter|barrier)\w*|all_to_all\w*)"
    )
    names = (ast.unparse(node) for node in ast.walk(tree(path)) if isinstance(node, ast.Attribute))
    return [name for name in names if exchange.fullmatch(name)]


def calls(path: Path) -> list[str]:
    """Return the functions that a module calls, as written."""
    return [ast.unparse(node.func) for node in ast.walk(tree(path)) if isinstance(node, ast.Call)]


def code_lines(path: Path) -> int:
    """Count lines that are neither blank, nor a comment, nor part of a docstring."""
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
        "collectives outside parallel/collectives.py": sum(
            len(collectives(path)) for name, path in modules().items() if not name.endswith(".collectives")
        ),
        "modules that reach into other packages": sum(map(bool, reach().values())),
        "... of those outside mcore": sum(bool(names) for name, names in reach().items() if ".mcore." not in name),
    }


if __name__ == "__main__":
    for name, value in figures().items():
        print(f"{name}: {value}")
