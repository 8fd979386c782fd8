"""Imports point downward, the thinking parts import neither torch nor megatron, and folders stay small."""

import ast
import re
import subprocess
import sys
from pathlib import Path

import pytest

from tests import house
from tests.house import PACKAGE

# From the top down: a package imports from its own line and from those below it.
ORDER = [
    {"__main__"},
    {"cli", "quickstart"},
    {"api"},
    {"verify", "report", "convert"},
    {"training"},
    {"rules"},
    {"data"},
    {"models"},
    {"dynamic_cp"},
    {"attention"},
    {"parallel"},
    {"config"},
    {"torchrun"},
    {"launch"},
    {"mcore", ""},
    {"common"},
]
LEVEL = {package: level for level, packages in enumerate(ORDER) for package in packages}
# Rules and the commands that answer at once use pure modules only.
PURE = [
    "megatron_cp",
    "megatron_cp.api",
    *(f"megatron_cp.common.{path.stem}" for path in sorted((PACKAGE / "common").glob("*.py"))),
    *(f"megatron_cp.config.{path.stem}" for path in sorted((PACKAGE / "config").glob("*.py"))),
    "megatron_cp.rules",
    "megatron_cp.parallel.layout",
    *(
        ".".join(path.relative_to(PACKAGE.parent).with_suffix("").parts)
        for path in sorted((PACKAGE / "dynamic_cp").rglob("*.py"))
        if path.parent.name != "runtime"
    ),
    "megatron_cp.attention.sharding",
    "megatron_cp.attention.heads",
    "megatron_cp.attention.transports.select",
    "megatron_cp.attention.modules.te_support",
    "megatron_cp.models.yarn",
    "megatron_cp.models.fusions",
    "megatron_cp.models.hybrid_pattern",
    "megatron_cp.models.layers.mamba_shape",
    "megatron_cp.models.vocabulary",
    "megatron_cp.launch.failure_store",
    *(f"megatron_cp.cli.{path.stem}" for path in sorted((PACKAGE / "cli").glob("[!_p]*.py"))),  # not preprocess
]
PATHS = sorted(PACKAGE.rglob("*.py"))


def package_of(path: Path) -> str:
    relative = path.relative_to(PACKAGE)
    if len(relative.parts) > 1:
        return relative.parts[0]
    return "" if relative.stem == "__init__" else relative.stem


def imports_of(path: Path) -> set[str]:
    """Packages of ours that a module imports from, anywhere in it but for type checkers."""
    names = set()
    for node in ast.walk(house.imported_tree(path)):
        if isinstance(node, ast.Import):
            names |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom) and node.module and not node.level:
            names |= {f"{node.module}.{alias.name}" for alias in node.names}
    parts = [name.split(".") for name in names]
    return {part[1] for part in parts if part[0] == "megatron_cp" and len(part) > 1 and part[1] in LEVEL}


@pytest.mark.parametrize("path", PATHS, ids=lambda path: str(path.relative_to(PACKAGE)))
def test_imports_point_downward(path: Path) -> None:
    package = package_of(path)
    assert package in LEVEL, f"a new package {package!r}: give it a place in ORDER"
    upward = sorted(other for other in imports_of(path) if LEVEL[other] < LEVEL[package])
    assert not upward, f"{path.relative_to(PACKAGE)} imports from above: {upward}"


def test_no_module_imports_itself_through_others() -> None:
    assert house.import_circle() == []


def test_folders_are_small() -> None:
    assert len(house.loose_modules()) <= 4, house.loose_modules()
    assert {name: count for name, count in house.files_of_folders().items() if count > 12} == {}


def test_functions_take_what_they_read() -> None:
    """The whole configuration goes to what needs most of it; everything else takes sections or values."""
    assert len(house.files_that_name("RunConfig")) <= 20, house.files_that_name("RunConfig")
    assert len(house.functions_given("RunConfig")) <= 40, house.functions_given("RunConfig")


def test_private_names_of_megatron_core_are_read_in_one_place() -> None:
    assert house.private_upstream_names() == {}


def test_thinking_parts_import_neither_torch_nor_megatron() -> None:
    code = f"""
import importlib, sys
for name in {PURE!r}:
    importlib.import_module(name)
    found = sorted({{"torch", "megatron.core"}} & sys.modules.keys())
    assert not found, (name, found)
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr[-1500:]


@pytest.mark.parametrize("path", PATHS, ids=lambda path: str(path.relative_to(PACKAGE)))
def test_what_is_printed_is_made_printable(path: Path) -> None:
    if path.name == "terminal.py":
        return
    calls = [ast.unparse(node.func) for node in ast.walk(ast.parse(path.read_text())) if isinstance(node, ast.Call)]
    assert not {"print", "argparse.ArgumentParser", "sys.stdout.write", "sys.stderr.write"} & set(calls)


@pytest.mark.parametrize("path", PATHS, ids=lambda path: str(path.relative_to(PACKAGE)))
def test_what_is_printed_names_no_file_of_the_clone(path: Path) -> None:
    """A wheel has none of them. installation.py knows whether there is a clone."""
    if path.name in ("installation.py", "document.py", "not_rules.py"):  # the latter two are for docs/constraints.md
        return
    nodes = list(ast.walk(ast.parse(path.read_text())))
    documented = {id(node.value) for node in nodes if isinstance(node, ast.Expr)}
    texts = [node.value for node in nodes if isinstance(node, ast.Constant) and id(node) not in documented]
    named = [text for text in texts if isinstance(text, str) and re.search(r"(scripts|docs|\.venv|benchmarks)/", text)]
    assert not named
