"""Imports point downward, and the thinking parts import neither torch nor megatron."""

import ast
import re
import subprocess
import sys
from pathlib import Path

import pytest

PACKAGE = Path(__file__).parents[2] / "megatron_cp"

# From the top down: a room may import from its own line and from those below it.
ORDER = [
    {"__main__", "cli", "doctor", "quickstart", "schedule_cli", "torchrun"},
    {"api"},
    {"verify", "report", "convert"},
    {"training"},
    {"rules"},
    {"data", "models"},
    {"dynamic_cp"},
    {"attention"},
    {"parallel"},
    {"flags"},
    {"recipes"},
    {"foreign_flags", "one_rank"},
    {"recipe_names", "bridge_names"},
    {"schema"},
    {"config"},
    {"slurm"},
    {"ahead", "launcher", "limits", "process", "run_lines"},
    {"backend", ""},
    {"errors"},
    {"interpolation"},
    {"input_files", "installation", "terminal", "yaml_files"},
]
LEVEL = {room: level for level, rooms in enumerate(ORDER) for room in rooms}
# The one room that is both: what runs schedules needs torch, and all else of it thinks.
RUNNING = {"iterator", "packing", "domain", "active_group", "__init__"}
# Rooms beside the way: rules use pure modules only, and only those above them use rules.
PURE = [
    "megatron_cp",
    "megatron_cp.ahead",
    "megatron_cp.api",
    "megatron_cp.bridge_names",
    "megatron_cp.config",
    "megatron_cp.flags",
    "megatron_cp.foreign_flags",
    "megatron_cp.input_files",
    "megatron_cp.installation",
    "megatron_cp.interpolation",
    "megatron_cp.limits",
    "megatron_cp.one_rank",
    "megatron_cp.recipes",
    "megatron_cp.run_lines",
    "megatron_cp.terminal",
    "megatron_cp.yaml_files",
    "megatron_cp.rules",
    "megatron_cp.parallel.layout",
    "megatron_cp.dynamic_cp",
    *(
        f"megatron_cp.dynamic_cp.{path.stem}"
        for path in sorted((PACKAGE / "dynamic_cp").glob("*.py"))
        if path.stem not in RUNNING
    ),
    "megatron_cp.attention.sharding",
    "megatron_cp.attention.heads",
    "megatron_cp.attention.select",
    "megatron_cp.attention.te_support",
    "megatron_cp.models.yarn",
    "megatron_cp.models.fusions",
    "megatron_cp.models.hybrid_pattern",
    "megatron_cp.models.mamba_shape",
    "megatron_cp.models.vocabulary",
    "megatron_cp.training.board",
    "megatron_cp.cli",
    *(f"megatron_cp.cli.{path.stem}" for path in sorted((PACKAGE / "cli").glob("[!_p]*.py"))),  # not preprocess
    "megatron_cp.doctor",
    "megatron_cp.schedule_cli",
]


def room_of(path: Path) -> str:
    relative = path.relative_to(PACKAGE)
    if len(relative.parts) > 1:
        return relative.parts[0]
    return "" if relative.stem == "__init__" else relative.stem


def imports_of(path: Path) -> set[str]:
    """Rooms of this package that a module imports, anywhere in it but for type checkers."""
    names = set()
    tree = ast.parse(path.read_text())
    tree.body = [node for node in tree.body if not ast.unparse(node).startswith("if TYPE_CHECKING:")]
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            names |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom) and node.module and not node.level:
            names |= {f"{node.module}.{alias.name}" for alias in node.names}
    parts = [name.split(".") for name in names]
    return {part[1] for part in parts if part[0] == "megatron_cp" and len(part) > 1 and part[1] in LEVEL}


@pytest.mark.parametrize("path", sorted(PACKAGE.rglob("*.py")), ids=lambda path: str(path.relative_to(PACKAGE)))
def test_imports_point_downward(path: Path) -> None:
    room = room_of(path)
    assert room in LEVEL, f"a new room {room!r}: give it a place in ORDER"
    upward = sorted(other for other in imports_of(path) if LEVEL[other] < LEVEL[room])
    assert not upward, f"{path.relative_to(PACKAGE)} imports from above: {upward}"


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


@pytest.mark.parametrize("path", sorted(PACKAGE.rglob("*.py")), ids=lambda path: str(path.relative_to(PACKAGE)))
def test_what_is_printed_is_made_printable(path: Path) -> None:
    if path.name == "terminal.py":
        return
    calls = [ast.unparse(node.func) for node in ast.walk(ast.parse(path.read_text())) if isinstance(node, ast.Call)]
    assert not {"print", "argparse.ArgumentParser", "sys.stdout.write", "sys.stderr.write"} & set(calls)


@pytest.mark.parametrize("path", sorted(PACKAGE.rglob("*.py")), ids=lambda path: str(path.relative_to(PACKAGE)))
def test_what_is_printed_names_no_file_of_the_clone(path: Path) -> None:
    """A wheel has none of them. installation.py knows whether there is a clone."""
    if path.name in ("installation.py", "document.py", "elsewhere.py"):  # the latter two are for docs/constraints.md
        return
    nodes = list(ast.walk(ast.parse(path.read_text())))
    documented = {id(node.value) for node in nodes if isinstance(node, ast.Expr)}
    texts = [node.value for node in nodes if isinstance(node, ast.Constant) and id(node) not in documented]
    named = [text for text in texts if isinstance(text, str) and re.search(r"(scripts|docs|\.venv|benchmarks)/", text)]
    assert not named
