"""``megatron-cp verify`` from the command line: table, verdict, exit code."""

import contextlib
import io
from typing import Any

import pytest

from megatron_cp.cli import main
from megatron_cp.common.errors import RuntimeFault
from tests.ranks import run_ranks
from tests.unit_tests.verify.faults import FAULTS

RECIPE = ["verify", "--recipe", "llama_tiny_pretrain_config"]


def verify(arguments: list[str], fault: str | None = None) -> tuple[int, str, str]:
    """Return exit code, standard output and standard error of one rank."""
    out, err = io.StringIO(), io.StringIO()
    planted = FAULTS[fault].plant() if fault else contextlib.nullcontext()
    with contextlib.redirect_stdout(out), contextlib.redirect_stderr(err), planted:
        code = main([*RECIPE, *arguments])
    return code, out.getvalue(), err.getvalue()


def of_all_ranks(*arguments: str, fault: str | None = None) -> tuple[int, str, str]:
    results = run_ranks(verify, 4, list(arguments), fault)
    assert len({code for code, _, _ in results}) == 1, results
    assert all(out == "" for _, out, _ in results[1:]), "only rank 0 speaks"
    return results[0][0], results[0][1], "".join(err for _, _, err in results)


def test_a_correct_layout_exits_with_zero() -> None:
    code, out, err = of_all_ranks()
    assert code == 0 and "EQUAL: results match the reference" in out, (out, err)
    for row in ("worst gradient, step 1: ", "loss, step 3", "gradient norm", "learning rates"):
        assert row in out and "WRONG" not in out, out
    assert "HIERARCHICAL_CONTEXT_PARALLEL_GROUPS a2a=[[0,1],[2,3]] p2p=[[0,2],[1,3]]" in err


def test_a_fault_exits_with_one_and_a_diagnosis() -> None:
    code, out, _ = of_all_ranks("--steps", "1", fault="skipped_hop")
    text = " ".join(out.split())
    assert code == 1 and "DIFFERENT" in text and "WRONG" in text and "EQUAL" not in text, out
    assert "attention probe failed" in text and "the groups do not communicate correctly" in text, out


def test_batches_that_cannot_be_used_are_the_verdict() -> None:
    code, out, _ = of_all_ranks("--steps", "1", fault="batch_sliced_twice")
    text = " ".join(out.split())
    assert code == 1 and "the layout did not run: the batches of step 1 cannot be used" in text, out


def test_two_layouts_against_each_other() -> None:
    p2p = "model.cp_comm_type=p2p model.hierarchical_context_parallel_sizes=null"
    code, out, _ = of_all_ranks("--against", p2p + " model.tensor_model_parallel_size=2 model.context_parallel_size=2")
    assert code == 0 and "EQUAL" in out, out
    code, out, _ = of_all_ranks("--against", p2p, "--steps", "1", fault="skipped_exchange")
    assert code == 1 and "DIFFERENT" in out, out


def test_the_flags_of_a_run_lay_out_both_sides() -> None:
    """Flags must work as in ``train``.

    Overrides take precedence, also those of ``--against``.
    """
    flags = ["-cp", "2", "-tp", "2", "--micro-batch-size", "2"]
    p2p = ["model.cp_comm_type=p2p", "model.hierarchical_context_parallel_sizes=null"]
    code, out, err = of_all_ranks(*flags, "--steps", "1", "--against", "model.cp_comm_type=a2a", *p2p)
    assert code == 0 and "EQUAL" in out, (out, err)
    assert err.count("TENSOR_MODEL_PARALLEL_GROUP [[0,1],[2,3]]") == 2, err


def test_the_full_size() -> None:
    code, out, _ = of_all_ranks(
        "--full", "--steps", "1", "dataset.seq_length=64", "train.micro_batch_size=1", "model.num_layers=2"
    )
    assert code == 0 and "EQUAL" in out, out


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--against", "model.num_query_groups=8"], "model.num_query_groups: differs between the two"),
        pytest.param(["--steps", "0"], "--steps must be at least 1", marks=pytest.mark.slow),
        pytest.param(["model.tensor_model_parallel_size=4"], "world size (4) is not divisible", marks=pytest.mark.slow),
        pytest.param(["model.cp_comm_type=ring"], "Unsupported communication type: ring", marks=pytest.mark.slow),
    ],
)
def test_invalid_runs_exit_with_two(arguments: list[str], message: str) -> None:
    results: list[Any] = run_ranks(verify, 4, arguments)
    code, _, err = results[0]
    assert code == 2 and message in err and "Traceback" not in err, (code, err)


def test_experts_in_packs_are_compared_with_the_routers_loss() -> None:
    experts = ["model.num_moe_experts=4", "model.moe_ffn_hidden_size=32", "model.moe_aux_loss_coeff=0.01"]
    packs = ["model.dynamic_context_parallel=true", "model.max_seqlen_per_dp_cp_rank=32", "dataset.seq_length=128"]
    layout = [*experts, *packs, "model.expert_model_parallel_size=2"]
    code, out, err = of_all_ranks(*layout, "--steps", "1")
    assert code == 0 and "EQUAL" in out and "load_balancing_loss, step 1" in out, (out, err)
    assert "note" not in err
    code, out, err = of_all_ranks(*layout, "--steps", "1", "--against", "model.expert_model_parallel_size=1")
    assert code == 0 and "EQUAL" in out, (out, err)
    assert err.count("note: compared without the router auxiliary loss") == 1


@pytest.mark.parametrize("on_all_ranks", [False, True])
def test_groups_are_stopped_as_the_error_allows(monkeypatch: pytest.MonkeyPatch, on_all_ranks: bool) -> None:
    """A rank that fails alone must not wait for ranks that wait for it.

    NCCL's groups would wait as they stop.
    """
    alone: list[bool] = []

    def fail(config: Any) -> None:
        raise RuntimeFault("it broke", on_all_ranks=on_all_ranks)

    monkeypatch.setenv("RANK", "0")
    monkeypatch.setenv("WORLD_SIZE", "4")
    monkeypatch.setattr("megatron_cp.verify.run.start_logging", lambda rank, live: None)
    monkeypatch.setattr("megatron_cp.verify.run.start_distributed", lambda config: None)
    monkeypatch.setattr("megatron_cp.verify.run.check_consistency", fail)
    monkeypatch.setattr("megatron_cp.verify.run.stop_distributed", lambda **given: alone.append(given["alone"]))
    assert main(RECIPE) == 1 and alone == [not on_all_ranks]
