"""What a hybrid model asks of a layout."""

import pytest

from megatron_cp.errors import Violation
from megatron_cp.models.hybrid_pattern import layers_of, with_stages
from megatron_cp.recipes import load_recipe
from megatron_cp.rules import check

MODEL = {
    "model.hybrid_layer_pattern": "M-M*-M-",
    "model.num_layers": "7",
    "model.hidden_size": "128",
    "model.mamba_head_dim": "32",  # eight heads
    "model.mamba_num_groups": "2",
    "model.context_parallel_size": "4",
}


def errors(*overrides: str, world_size: int = 4) -> list[Violation]:
    settings = MODEL | dict(text.split("=", 1) for text in overrides)
    config = load_recipe("mamba_hybrid_tiny_pretrain_config", [f"{name}={value}" for name, value in settings.items()])
    found = check(config, world_size)
    return [violation for violation in found if violation.severity == "error"]


@pytest.mark.parametrize(
    "overrides",
    [
        (),
        ("model.cp_comm_type=a2a+p2p", "model.hierarchical_context_parallel_sizes=[2,2]"),
        ("model.context_parallel_size=2", "model.tensor_model_parallel_size=2", "model.sequence_parallel=true"),
        (
            "model.context_parallel_size=2",
            "model.pipeline_model_parallel_size=2",
            "model.hybrid_layer_pattern=M-M*|-M-",
        ),
        ("model.dynamic_context_parallel=true",),
        ("model.sequence_packing_scheduler=dp_balanced",),
    ],
)
def test_allowed(overrides: tuple[str, ...]) -> None:
    assert errors(*overrides) == []


@pytest.mark.parametrize(
    ("overrides", "rule", "message", "fix"),
    [
        (["model.mamba_num_heads=6"], "D7", "nheads must be evenly divisible by tp_size * cp_size: 6 by 4", "1, 2, 3"),
        (["model.mamba_num_groups=3"], "D7", "nheads must be evenly divisible by ngroups: 8 by 3", "1, 2, 4, 8"),
        (
            ["model.mamba_num_heads=24", "model.mamba_num_groups=6"], "D7",
            "ngroups must be evenly divisible by tp_size * cp_size: 6 by 4", "1, 2, 4, 8, 12, 24",
        ),
        (
            ["model.mamba_num_heads=24", "model.mamba_num_groups=3"], "D7",
            "cp_size must be evenly divisible by ngroups/tp_size: 4 by 3", "1, 2, 4, 8, 12, 24",
        ),
        (
            ["model.dynamic_context_parallel=true", "model.mamba_num_heads=2"], "D7",
            "all dp * cp = 4 ranks, and 2 heads / tp 1 = 2 can be shared by no more than 2", "at least 4",
        ),
        (
            ["dist.eval_context_parallel_size=4", "model.context_parallel_size=1", "model.mamba_num_heads=2"], "D7",
            "evaluation's groups have 4 ranks, and 2 heads / tp 1 = 2 can be", "dist.eval_context_parallel_size=2",
        ),
        (["model.account_for_loss_in_pipeline_split=true"], "K19", "its pattern gives to the stages", "and |"),
        (["model.mamba_head_dim=48"], "D12", "d_inner must be evenly divisible by headdim: 256 by 48", "1, 2, 4"),
        (["model.mamba_state_dim=0"], "D12", "at least 1, got 0", ""),
        (["model.hybrid_layer_pattern=M-M*-M"], "K14", "has 6 letters for 7 layers", "model.num_layers=6"),
        (["model.hybrid_layer_pattern=M-M*-ME"], "K14", "letters among M, * and -", "M*-"),
        (["model.mtp_num_layers=1"], "K19", "is not built into hybrid models", ""),
        (["model.num_moe_experts=4"], "K19", "is not built into hybrid models", ""),
    ],
)  # fmt: skip
def test_refused(overrides: list[str], rule: str, message: str, fix: str) -> None:
    found = [violation for violation in errors(*overrides) if violation.rule == rule]
    assert found and message in found[0].message and fix in found[0].fix, found


@pytest.mark.parametrize(("pattern", "rule"), [("M-M|*-|M-", "K14"), ("M-M*-M-|", "K14"), ("M-M*-M-", "A15")])
def test_every_pipeline_stage_has_layers(pattern: str, rule: str) -> None:
    stages = ("model.pipeline_model_parallel_size=2", "model.context_parallel_size=2")
    assert rule in {violation.rule for violation in errors(f"model.hybrid_layer_pattern={pattern}", *stages)}


@pytest.mark.parametrize(("pattern", "rules"), [("M-M*-M", {"K19"}), ("M-M*-M-", {"K19", "A15"})])
def test_stages_count_layers_only(pattern: str, rules: set[str]) -> None:
    stages = ("model.pipeline_model_parallel_size=2", "model.context_parallel_size=2")
    layers = (f"model.hybrid_layer_pattern={pattern}", f"model.num_layers={len(pattern)}")
    flag = "model.account_for_embedding_in_pipeline_split=true"
    assert {violation.rule for violation in errors(*stages, *layers, flag)} == rules


def test_stages_of_a_pattern() -> None:
    assert with_stages("M*M-", 2) == "M*|M-" and with_stages("M|*M-", 2) == "M|*M-" == with_stages("M|*M-", 2)
    assert with_stages("M|*M-", 1) == layers_of("M|*M-") == "M*M-"
    with pytest.raises(ValueError, match="do not divide over 3"):
        with_stages("M*M-", 3)
    with pytest.raises(ValueError, match="marks 2 pipeline stages, and 4"):
        with_stages("M*|M-", 4)
