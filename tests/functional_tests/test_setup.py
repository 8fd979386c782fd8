"""``scripts/setup.sh`` in a copy of the files that it reads.

A stand-in for the installer records its calls. These tests themselves run in a real installation; only parts compiled
for GPUs are not covered.
"""

import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
READ = (
    "scripts/setup.sh",
    "requirements.lock",
    "pyproject.toml",
    "tests/doubles/te_on_cpu/requirements.txt",
    "tests/doubles/mamba_on_cpu/requirements.txt",
)
# Records its arguments and environment variables, one line per call.
INSTALLER = """#!/bin/sh
[ "$1" = --version ] && exit 0
[ "$1" = pip ] || exit 1
echo "$* | $(env | grep -e ^NVTE -e ^CUDA_HOME -e BUILD -e ^MAX_JOBS | sort | tr '\\n' ' ')" >>"$CALLS"
case "$*" in *".["*) exit "${COMPILER_FAILS:-0}" ;; esac
"""
# A Python of another version, which is not there when it is chosen.
PYTHON = """#!/bin/sh
[ "$1" = -c ] && exec {python} -c "import sys; sys.version_info = {version}; sys._base_executable = '/nowhere'; $2"
exit 1
"""

PYTORCH = """
import os
from types import SimpleNamespace
version = SimpleNamespace(cuda=os.environ.get("CUDA", "13.0"))
"""


@pytest.fixture
def setup(tmp_path):
    """Return a function that runs the script in a copy.

    It returns exit code, output, and calls of the installer.
    """
    clone, tools, calls = tmp_path / "clone", tmp_path / "tools", tmp_path / "calls"
    for name in READ:
        (clone / name).parent.mkdir(parents=True, exist_ok=True)
        shutil.copy(ROOT / name, clone / name)
    (tools / "torch").mkdir(parents=True)
    (tools / "torch" / "__init__.py").write_text(PYTORCH)
    (tools / "uv").write_text(INSTALLER)
    (tools / "uv").chmod(0o755)
    environment = os.environ | {
        "PATH": f"{tools}:{os.environ['PATH']}",
        "PYTHONPATH": str(tools),
        "CALLS": str(calls),
        "CXX": "true",
    }

    def run(*arguments, **variables):
        calls.write_text("")
        command = [clone / "scripts" / "setup.sh", *arguments]
        done = subprocess.run(command, env=environment | variables, capture_output=True, text=True, timeout=120)
        return done.returncode, done.stderr, calls.read_text().splitlines()

    run.clone, run.tools = clone, tools
    return run


def compiled(calls):
    return [call for call in calls if "--editable .[" in call]


def test_without_gpus(setup):
    code, _, calls = setup()
    assert code == 0 and "--requirement requirements.lock" in calls[0] and not compiled(calls)
    assert setup() == (0, "", [])
    code, reported, calls = setup("--gpus")
    assert code == 2 and reported == "setup: no option --gpus; there are --gpu and --mamba\n" and not calls


@pytest.mark.parametrize("version", [(3, 11, 9), pytest.param((3, 15, 0), marks=pytest.mark.slow)])
def test_a_python_without_wheels_is_skipped(setup, version):
    python = setup.tools / "python3.12"
    python.write_text(PYTHON.format(python=sys.executable, version=version))
    python.chmod(0o755)
    code, reported, calls = setup()
    assert code == 0 and calls, reported


@pytest.mark.parametrize("extra", ["gpu", pytest.param("mamba", marks=pytest.mark.slow)])
def test_an_extra_is_compiled_for_this_pytorch(setup, extra):
    code, _, calls = setup(f"--{extra}")
    assert code == 0 and "--requirement requirements.lock" in calls[0]
    assert any("nvidia-nvvm==13.0.*" in call for call in calls), "a compiler of the CUDA that torch is built for"
    (call,) = compiled(calls)
    arguments, variables = call.split(" | ")
    assert f"--no-build-isolation --no-cache-dir --constraint .venv/cuda/pinned.txt --editable .[{extra}]" in arguments
    assert f"CUDA_HOME={setup.clone}/.venv/" in variables
    for name in ("NVTE_PYTORCH", "MAMBA", "CAUSAL_CONV1D"):
        assert f" {name}_FORCE_BUILD=TRUE " in f" {variables} "
    assert "SKIP_CUDA_BUILD" not in variables and "UV_CONCURRENT_BUILDS=1 " in variables, (
        "or jobs would be twice as many"
    )
    assert int(re.search(r"MAX_JOBS=(\d+) ", variables).group(1)) >= 1
    # The extra stays installed without the option.
    assert setup(f"--{extra}") == (0, "", []) and setup() == (0, "", [])
    kept = setup.clone / ".venv" / "kept"
    kept.touch()
    pyproject = setup.clone / "pyproject.toml"
    pyproject.write_text(pyproject.read_text() + "\n# changed\n")
    assert not compiled(setup()[2]) and kept.exists()
    # What was compiled for one PyTorch does not work with another.
    lock = setup.clone / "requirements.lock"
    lock.write_text(lock.read_text().replace("torch==2.11.0", "torch==2.12.0"))
    assert len(compiled(setup()[2])) == 1 and not kept.exists()


@pytest.mark.slow
def test_both_extras(setup):
    assert setup("--gpu")[0] == 0
    code, _, calls = setup("--mamba", MAMBA_FORCE_BUILD="FALSE", MAX_JOBS="3")
    (call,) = compiled(calls)
    assert code == 0 and "--editable .[mamba]" in call, "the other one is kept"
    for variables in ("MAMBA_FORCE_BUILD=FALSE", "CAUSAL_CONV1D_FORCE_BUILD=FALSE", "MAX_JOBS=3"):
        assert f" {variables} " in call
    assert setup("--gpu", "--mamba") == (0, "", [])
    lock = setup.clone / "requirements.lock"
    lock.write_text(lock.read_text().replace("torch==2.11.0", "torch==2.12.0"))
    assert ["[gpu]" in call for call in compiled(setup()[2])] == [True, False]


def test_kernels_are_tried_in_the_version_that_is_installed():
    """The tests without a GPU must use the mamba-ssm that ``--mamba`` compiles."""
    tried = (ROOT / "tests" / "doubles" / "mamba_on_cpu" / "requirements.txt").read_text()
    (extra,) = re.findall(r"^mamba = (.*)$", (ROOT / "pyproject.toml").read_text(), flags=re.MULTILINE)
    assert re.findall(r"[\w-]+==[\w.]+", extra) == re.findall(r"^[\w-]+==[\w.]+", tried, flags=re.MULTILINE)


@pytest.mark.slow
def test_other_packages_are_installed_if_compilation_fails(setup):
    code, reported, calls = setup("--gpu", CXX="no-such-compiler")
    assert code == 1 and "no C++ compiler (no-such-compiler): install g++" in reported
    assert "training works without it" in reported and not compiled(calls)
    assert setup() == (0, "", [])
    code, reported, _ = setup("--gpu", CUDA="12.8")
    assert code == 1 and "--gpu needs a PyTorch for CUDA 13, not for 12.8" in reported
    assert setup("--gpu", COMPILER_FAILS="1")[0] == 1
    assert setup() == (0, "", [])
    code, _, calls = setup("--gpu")
    assert code == 0 and len(compiled(calls)) == 1
