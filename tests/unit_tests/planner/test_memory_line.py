"""The estimated peak in dry runs, and the rule that refuses what does not fit."""

import pytest

from megatron_cp import cli
from megatron_cp.rules import Environment

RECIPE = "llama31_405b_pretrain_config"


@pytest.fixture
def validate(capsys):
    def run(*argv):
        code = cli.main(["validate", RECIPE, *argv])
        captured = capsys.readouterr()
        return code, captured.out, captured.err

    return run


def test_a_recipe_fits_at_its_own_size(validate):
    code, out, _ = validate("--environment", "gpu")
    assert code == 0 and "of 80 GiB a GPU (largest: " in out and out.endswith("; the estimated memory fits\n")


def test_what_does_not_fit_is_refused_unless_it_is_not_checked(validate):
    few = ("--environment", "gpu", "--world-size", "1", "-tp", "1", "-pp", "1", "-cp", "1", "-vp", "1")
    assert "error K66" in validate(*few)[2]
    code, out, err = validate(*few[:4], "-tp", "1", "-pp", "1", "-cp", "1", "--no-memory-check",
                              "model.virtual_pipeline_model_parallel_size=null", "model.sequence_parallel=false",
                              "model.account_for_embedding_in_pipeline_split=false",
                              "model.account_for_loss_in_pipeline_split=false")  # fmt: skip
    assert code == 0, err
    assert "estimated peak" in out and out.endswith("memory is not checked (--no-memory-check)\n")


def test_ranks_on_cpus_get_no_memory_line(validate):
    code, out, _ = validate("--environment", "cpu")
    assert code == 0 and "estimated peak" not in out and out.endswith("; memory is not checked\n")


def test_a_machine_without_gpus_gets_the_line_of_gpus(validate, monkeypatch):
    monkeypatch.setattr(Environment, "detect", lambda: Environment.of("cpu"))
    code, out, _ = validate()
    (line,) = [line for line in out.splitlines() if "estimated peak" in line]
    assert code == 0 and out.endswith("; memory is not checked\n")
    assert line.removeprefix("with --environment gpu: ") in validate("--environment", "gpu")[1].splitlines()
