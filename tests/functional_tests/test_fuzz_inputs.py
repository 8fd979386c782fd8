"""A few mutated inputs of every kind, and how inputs are created.

Inputs are created once, and an unchanged input exits with 0.
"""

import os
import time
from pathlib import Path

import pytest

from megatron_cp import cli
from tests.functional_tests import fuzz_inputs
from tests.functional_tests.fuzzing.kinds import KINDS
from tests.functional_tests.fuzzing.trial import Ended, Limits, Trial


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("fuzz")


def end_of(folder: Path, command: object, seconds: float = 30.0) -> Ended:
    trial = Trial(command, folder, Limits(seconds))  # type: ignore[arg-type]
    while (ended := trial.ended()) is None:
        time.sleep(0.005)
    return ended


def leave_a_process() -> int:
    if os.fork() == 0:
        os.execvp("sleep", ["sleep", "100"])
    return 0


FAULTS = {
    "ran longer than": lambda: time.sleep(100),
    "traceback: ZeroDivisionError": lambda: 1 // 0,
    "traceback: MemoryError": lambda: len(bytearray(8 << 30)),
    "wrote elsewhere: home/x": lambda: Path.home().joinpath("x").touch() or 0,
    "wrote elsewhere: tmp/x": lambda: Path(os.environ["TMPDIR"], "x").touch() or 0,
    "wrote elsewhere: work/x": lambda: Path("x").touch() or 0,
    "ended with 7": lambda: 7,
    "killed by SIGABRT": os.abort,
    "ended without a word": lambda: 2,
    "left processes": leave_a_process,
}


@pytest.mark.parametrize("problem", FAULTS)
def test_each_fault_is_detected(tmp_path: Path, problem: str) -> None:
    assert problem in "; ".join(end_of(tmp_path, FAULTS[problem], 1.0 if "longer" in problem else 30.0).problems)


def test_a_clean_exit_has_no_problems(tmp_path: Path) -> None:
    def command() -> int:
        Path("out/x").touch()
        return cli.main(["recipes"])

    assert end_of(tmp_path, command).problems == []


def test_inputs_that_are_not_changed_are_accepted(folder: Path) -> None:
    tally = fuzz_inputs.fuzz(len(KINDS), seed=1, folder=folder, valid=True)
    assert not tally.failures and sum(tally.counts.values()) == len(KINDS), tally.failures


def test_a_changed_input_of_every_kind(folder: Path) -> None:
    tally = fuzz_inputs.fuzz(len(KINDS), seed=1, folder=folder)
    assert not tally.failures and sum(tally.counts.values()) == len(KINDS), tally.failures


def test_a_case_depends_on_its_number_alone(folder: Path, tmp_path: Path) -> None:
    """A case alone must equal the same case among others."""
    arguments = []
    for number in (3, 3):
        tally = fuzz_inputs.fuzz(100, seed=9, kinds=["overrides"], folder=folder, only=number)
        assert not tally.failures
        arguments.append((folder / f"case{number}/stderr").read_text())
    assert arguments[0] == arguments[1]


@pytest.mark.slow
@pytest.mark.timeout(3600)
def test_five_hundred_changed_inputs(folder: Path) -> None:
    tally = fuzz_inputs.fuzz(500, seed=2, folder=folder, jobs=os.cpu_count() or 1)
    print(tally.table())
    assert not tally.failures
