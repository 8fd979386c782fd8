"""Requirements of hybrid models for a layout."""

import pytest

from megatron_cp.common.errors import Violation
from megatron_cp.config.recipes import load_recipe
from megatron_cp.models.hybrid_pattern import layers_of, mtp_layers_of, with_stages
from megatron_cp.rules import check

MODEL = {
    "model.hybrid_layer_pattern": "M-M*-M-",
    "model.num_layers": "7",
    "model.hidden_size": "128",
    "model.mamba_head_dim": "32",  # eight heads
    "model.mamba_num_groups": "2",
    "model.context_parallel_size": "4",
}

EXPERTS = ("model.num_moe_experts=4", "model.moe_ffn_hidden_size=48", "model.hybrid_layer_pattern=MEM*EME")
ONE_DEPTH = ("model.mtp_num_layers=1",)
TP2 = ("model.context_parallel_size=2", "model.tensor_model_parallel_size=2", "model.sequence_parallel=true")


def findings(*overrides: str, world_size: int = 4) -> list[Violation]:
    settings = MODEL | dict(text.split("=", 1) for text in overrides)
    config = load_recipe("mamba_hybrid_tiny_pretrain_config", [f"{name}={value}" for name, value in settings.items()])
    return check(config, world_size)


def errors(*overrides: str, world_size: int = 4) -> list[Violation]:
    return [violation for violation in findings(*overrides, world_size=world_size) if violation.severity == "error"]


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
        ("model.hybrid_layer_pattern=M-M*-M-/*M/*M", "model.mtp_num_layers=2", "model.dynamic_context_parallel=true"),
        (
            "model.hybrid_layer_pattern=M-M*|-M-/*M",
            "model.mtp_num_layers=1",
            "model.context_parallel_size=2",
            "model.pipeline_model_parallel_size=2",
        ),
        EXPERTS,
        (*EXPERTS, "model.expert_model_parallel_size=4", "model.dynamic_context_parallel=true"),
        # No MLP whose size must divide, and experts that are not split.
        (
            *EXPERTS,
            "model.context_parallel_size=2",
            "model.tensor_model_parallel_size=2",
            "model.sequence_parallel=true",
            "model.expert_tensor_parallel_size=1",
            "model.moe_ffn_hidden_size=97",
            "model.ffn_hidden_size=97",
        ),
    ],
)
def test_allowed(overrides: tuple[str, ...]) -> None:
    assert errors(*overrides) == []


@pytest.mark.parametrize(
    ("overrides", "rule", "message", "fix"),
    [
        (["model.mamba_num_heads=6"], "D7", "nheads must be evenly divisible by tp_size * cp_size: 6 by 4", "_heads=8"),
        (["model.mamba_num_groups=3"], "D7", "nheads must be evenly divisible by ngroups: 8 by 3", "groups=2, or"),
        (
            ["model.mamba_num_heads=24", "model.mamba_num_groups=6"], "D7",
            "ngroups must be evenly divisible by tp_size * cp_size: 6 by 4", "groups=4, or",
        ),
        (
            ["model.mamba_num_heads=24", "model.mamba_num_groups=3"], "D7",
            "cp_size must be evenly divisible by ngroups/tp_size: 4 by 3", "groups=2, or",
        ),
        (
            ["model.dynamic_context_parallel=true", "model.mamba_num_heads=2"], "D7",
            "dp * cp = 4 ranks, but 2 heads / tp 1 are enough for 2 ranks only", "model.mamba_num_heads=4",
        ),
        (
            ["dist.eval_context_parallel_size=4", "model.context_parallel_size=1", "model.mamba_num_heads=2"], "D7",
            "evaluation group has 4 ranks, but 2 heads / tp 1 are enough", "dist.eval_context_parallel_size=2",
        ),
        (["model.account_for_loss_in_pipeline_split=true"], "K19", "assigns layers to stages", "(| in the"),
        (["model.mamba_head_dim=48"], "D12", "d_inner must be evenly divisible by headdim: 256 by 48", "_dim=32, or"),
        (["model.mamba_state_dim=0"], "D12", "at least 1, got 0", ""),
        (["model.hybrid_layer_pattern=M-M*-M"], "K14", "has 6 letters for 7 layers", "model.num_layers=6"),
        (["model.hybrid_layer_pattern=M-M*-MG"], "K14", "only M, *, - and E", "M*-"),
        (["model.mtp_num_layers=2"], "K14", "has no layers for the 2 depths", "hybrid_layer_pattern=M-M*-M-/*-/*-"),
        (["model.hybrid_layer_pattern=M-M*-M-/*-"], "K14", "(after each /), not null", "model.mtp_num_layers=1"),
        (["model.hybrid_layer_pattern=M-M*-M-/M/M", *ONE_DEPTH], "K14", "has 2 depths", "model.mtp_num_layers=2"),
        (["model.hybrid_layer_pattern=M-M*-M-/M/*", "model.mtp_num_layers=2"], "K14", "the same letters", "M-/*-/*-"),
        (["model.hybrid_layer_pattern=M-M*-M-/M|*", *ONE_DEPTH], "K14", "letters of", "=M-M*-M-/*-"),
        (["model.hybrid_layer_pattern=M-M*-M-/", *ONE_DEPTH], "K14", "letters of", "=M-M*-M-/*-"),
        (["model.hybrid_layer_pattern=M-M*-M-/E", *ONE_DEPTH], "K15", "each E in model.hybrid_layer_pattern", "=8"),
        (["model.hybrid_layer_pattern=M-M*-M-/***", *ONE_DEPTH, "model.window_size=[4,0]", "model.num_layers=7",
          "model.window_attn_skip_freq=[1,1]"], "K12", "has 2 entries for 7 layers", "[1,1,1,1,1,1,1]"),
        (["model.hybrid_layer_pattern=M*/***", *ONE_DEPTH, "model.window_size=[4,0]", "model.num_layers=2",
          "model.window_attn_skip_freq=[1,1]"], "K12", "has 2 entries, but 3 layers of multi-token", "=M*/**"),
        (["model.multi_latent_attention=true"], "K19", "not supported in hybrid models", ""),
        (["model.num_moe_experts=4"], "K15", "has no layer with experts (E), but model.num_moe", "=MEM*-M-"),
        (["model.hybrid_layer_pattern=M-M*-ME"], "K15", "each E in model.hybrid_layer_pattern", "=M-M*-M-"),
        ([*EXPERTS, "model.moe_layer_freq=2"], "K19", "E in model.hybrid_layer_pattern", "model.moe_layer_freq=1"),
        (["model.moe_layer_freq=2"], "K19", "E in model.hybrid_layer_pattern", "model.moe_layer_freq=1"),
        ([*EXPERTS, *TP2, "model.moe_ffn_hidden_size=97"], "K31", "by model.expert_tensor", "=96, or"),
        (["model.ffn_hidden_size=97", *TP2], "K31", "by model.tensor_model_parallel_size", "=96, or"),
        ([*EXPERTS, "model.expert_model_parallel_size=3"], "A18", "num_moe_experts (4) should be divisible", "=2, or"),
        ([*EXPERTS, *TP2, "model.sequence_parallel=false"], "K15", "enabling sequence parallelism", "parallel=true"),
    ],
)  # fmt: skip
def test_refused(overrides: list[str], rule: str, message: str, fix: str) -> None:
    found = [violation for violation in errors(*overrides) if violation.rule == rule]
    assert found and message in found[0].message and fix in found[0].fix, found


@pytest.mark.parametrize(("pattern", "rule"), [("M-M|*-|M-", "K14"), ("M-M*-M-|", "K14"), ("M-M*-M-", "A15")])
def test_every_pipeline_stage_has_layers(pattern: str, rule: str) -> None:
    stages = ("model.pipeline_model_parallel_size=2", "model.context_parallel_size=2")
    assert rule in {violation.rule for violation in errors(f"model.hybrid_layer_pattern={pattern}", *stages)}


def test_attention_alone_has_windows() -> None:
    listed = ("model.num_layers=2", "model.window_size=[4,0]", "model.window_attn_skip_freq=[1,1]", *ONE_DEPTH)
    assert findings("model.hybrid_layer_pattern=M*/M*MM-", *listed) == []


def test_a_pattern_without_layers_is_reported_once() -> None:
    found = [each.message for each in errors("model.hybrid_layer_pattern=|/M", *ONE_DEPTH) if each.rule == "K14"]
    assert found == ["must contain only M, *, - and E"]


@pytest.mark.parametrize(("pattern", "rules"), [("M-M*-M", {"K19"}), ("M-M*-M-", {"K19", "A15"})])
def test_stages_count_layers_only(pattern: str, rules: set[str]) -> None:
    stages = ("model.pipeline_model_parallel_size=2", "model.context_parallel_size=2")
    layers = (f"model.hybrid_layer_pattern={pattern}", f"model.num_layers={len(pattern)}")
    flag = "model.account_for_embedding_in_pipeline_split=true"
    assert {violation.rule for violation in errors(*stages, *layers, flag)} == rules


def test_stages_of_a_pattern() -> None:
    assert with_stages("M*M-", 2) == "M*|M-" and with_stages("M|*M-", 2) == "M|*M-" == with_stages("M|*M-", 2)
    assert with_stages("M|*M-", 1) == layers_of("M|*M-") == "M*M-"
    with pytest.raises(ValueError, match="not divisible by 3"):
        with_stages("M*M-", 3)
    with pytest.raises(ValueError, match="has 2 pipeline stages; 4"):
        with_stages("M*|M-", 4)
    assert with_stages("M*M-/*M/*M", 2) == "M*|M-/*M/*M" and with_stages("M|*M-/*", 1) == "M*M-/*"
    assert (
        layers_of("M|*M-/*M/*M") == "M*M-" and mtp_layers_of("M|*M-/*M/*M") == ["*M", "*M"] and not mtp_layers_of("M*")
    )


@pytest.mark.parametrize(
    ("overrides", "module", "severity", "message"),
    [
        (EXPERTS, "mlp", "warning", "no layer has an MLP"),
        (("model.hybrid_layer_pattern=MMM*MMM",), "mlp", "warning", "no layer has an MLP"),
        ((), "moe", "error", "Invalid choices for recompute_modules: moe"),
    ],
    ids=["experts alone", "neither", "no experts"],
)
def test_only_layers_of_the_pattern_are_recomputed(
    overrides: tuple[str, ...], module: str, severity: str, message: str
) -> None:
    found = findings(*overrides, "model.recompute_granularity=selective", f"model.recompute_modules=[{module}]")
    ((reported, text),) = [(each.severity, each.message) for each in found if each.rule == "K7"]
    assert reported == severity and message in text


def test_settings_of_experts_are_read_with_experts_alone() -> None:
    given = ("model.moe_aux_loss_coeff=0.01", "model.moe_router_score_function=sigmoid")
    assert [each.severity for each in findings(*given) if each.rule == "K19"] == ["warning", "warning"]
    assert findings(*given, *EXPERTS) == []
