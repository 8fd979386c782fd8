"""Imports point downward, and folders stay small.

Pure modules import neither torch nor megatron.
"""

import ast
import dataclasses
import re
import subprocess
import sys
from pathlib import Path

import pytest

from megatron_cp.config.run_config import ModelConfig
from tests import house
from tests.house import PACKAGE

# From the top down: a package imports from its own line and from those below it.
ORDER = [
    {"__main__"},
    {"cli", "quickstart"},
    {"api"},
    {"evaluation"},
    {"verify", "report", "convert", "preview"},
    {"training"},
    {"planner"},
    {"rules"},
    {"estimate"},
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
        for folder in ("estimate", "planner")
        for path in sorted((PACKAGE / folder).rglob("*.py"))
    ),
    *(
        ".".join(path.relative_to(PACKAGE.parent).with_suffix("").parts)
        for path in sorted((PACKAGE / "dynamic_cp").rglob("*.py"))
        if path.parent.name != "runtime"
    ),
    "megatron_cp.attention.sharding",
    "megatron_cp.attention.placement.layout",
    "megatron_cp.attention.placement.planner",
    "megatron_cp.attention.heads",
    "megatron_cp.attention.transports.registry",
    "megatron_cp.attention.transports.select",
    "megatron_cp.attention.modules.te_support",
    "megatron_cp.models.yarn",
    "megatron_cp.models.fusions",
    "megatron_cp.models.hybrid_pattern",
    "megatron_cp.models.layers.mamba.shape",
    "megatron_cp.models.vocabulary",
    "megatron_cp.launch.failure_store",
    *(f"megatron_cp.cli.{path.stem}" for path in sorted((PACKAGE / "cli").glob("[!_]*.py"))),
    "megatron_cp.cli.data.preview",
    *(f"megatron_cp.cli.weights.{path.stem}" for path in sorted((PACKAGE / "cli" / "weights").glob("[!_]*.py"))),
]
PATHS = sorted(PACKAGE.rglob("*.py"))


def package_of(path: Path) -> str:
    relative = path.relative_to(PACKAGE)
    if len(relative.parts) > 1:
        return relative.parts[0]
    return "" if relative.stem == "__init__" else relative.stem


def imports_of(path: Path) -> set[str]:
    """Return packages of ours that a module imports from.

    Imports for type checkers do not count.
    """
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


def listed_reach() -> dict[str, set[str]]:
    """Return each module's names in the table of 3rdparty/README.md."""
    text = (PACKAGE.parent / "3rdparty" / "README.md").read_text()
    table = text.partition("### Every private name")[2]
    rows = re.findall(r"^\| `([\w/]+\.py)` \| (.+?) \| (.+?) \|$", table, re.MULTILINE)
    return {module: set(re.findall(r"`([^`]+)`", names)) for module, names, _ in rows}


def test_every_private_name_and_patch_is_listed() -> None:
    found = {str(house.modules()[name].relative_to(PACKAGE)): names for name, names in house.reach().items() if names}
    assert found == listed_reach()


def test_megatron_core_is_changed_and_its_private_names_are_read_in_one_place() -> None:
    """Private names may be overridden where a class replaces megatron-core's class."""
    wrong = {}
    for name, path in house.modules().items():
        taken = {each: of for each, of in house.upstream_names(path).items() if of.startswith("megatron.")}
        imported = {each for each, of in taken.items() if house.is_private(of)}
        patched = {each for each in house.upstream_patches(path) if each.split(".")[0] in {*taken, "*", "sys"}}
        read = house.private_reads(path) - {"_version"} if taken else set()
        if not path.is_relative_to(house.MCORE) and (imported | patched | read):
            wrong[name] = imported | patched | read
    assert wrong == {}


def test_ranks_exchange_values_in_one_module() -> None:
    """Exceptions: attention's transports move rows, and a patch replaces gloo's."""
    places = {name for name, path in house.modules().items() if house.collectives(path)}
    exceptions = {"megatron_cp.attention.transports.comm", "megatron_cp.mcore.shards"}
    assert places == {"megatron_cp.parallel.collectives", *exceptions}


def test_files_are_written_aside_in_one_module() -> None:
    """Checkpoints are the exception: many ranks write them.

    They also replace another one (training/checkpoint/files.py).
    """
    renaming = {"os.replace", "os.rename", "os.renames", "shutil.move"}
    places = {
        name
        for name, path in house.modules().items()
        if any(each in renaming or re.search(r"\w\.rename$", each) for each in house.calls(path))
    }
    assert places == {"megatron_cp.common.atomic_files", "megatron_cp.training.checkpoint.files"}


def test_recipe_arguments_are_declared_in_one_module() -> None:
    names = r"add_argument\(\s*['\"](--recipe|--config|--world.size|--gpus.per.node|overrides)['\"]"
    for folder in (PACKAGE, PACKAGE.parent / "scripts", PACKAGE.parent / "benchmarks"):
        places = {path.stem for path in folder.rglob("*.py") if re.search(names, path.read_text())}
        assert places <= {"flags"}


def test_no_frames_and_no_mocks() -> None:
    assert not house.files_that_name("_getframe") and not house.files_that_name("unittest")


def test_transports_are_named_in_few_places() -> None:
    assert len(house.files_that_write_a_transport()) <= 4, house.files_that_write_a_transport()


def test_functions_take_what_they_read() -> None:
    """Only what needs most of the configuration may take all of it.

    Everything else takes sections or values.
    """
    assert len(house.files_that_name("RunConfig")) <= 20, house.files_that_name("RunConfig")
    assert len(house.functions_given("RunConfig")) <= 40, house.functions_given("RunConfig")


def test_pure_modules_import_neither_torch_nor_megatron() -> None:
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
def test_output_goes_through_the_terminal_module(path: Path) -> None:
    if path.name == "terminal.py":
        return
    calls = [ast.unparse(node.func) for node in ast.walk(ast.parse(path.read_text())) if isinstance(node, ast.Call)]
    assert not {"print", "argparse.ArgumentParser", "sys.stdout.write", "sys.stderr.write"} & set(calls)


@pytest.mark.parametrize("path", PATHS, ids=lambda path: str(path.relative_to(PACKAGE)))
def test_printed_text_names_no_file_of_the_clone(path: Path) -> None:
    """A wheel has none of these files.

    installation.py checks for a clone.
    """
    if path.name in ("installation.py", "document.py"):  # the latter is for docs/reference/rules.md
        return
    nodes = list(ast.walk(ast.parse(path.read_text())))
    documented = {id(node.value) for node in nodes if isinstance(node, ast.Expr)}
    texts = [node.value for node in nodes if isinstance(node, ast.Constant) and id(node) not in documented]
    named = [text for text in texts if isinstance(text, str) and re.search(r"(scripts|docs|\.venv|benchmarks)/", text)]
    assert not named


def test_settings_are_named_by_their_fields() -> None:
    """A renamed setting must be found wherever it is read.

    Text would hide it; a wrong name of a field is an error.
    """
    written = house.files_that_write(field.name for field in dataclasses.fields(ModelConfig))
    assert sum(map(len, written.values())) / len(written) <= 1.5
    assert {name: files for name, files in written.items() if len(files) > 4} == {}
