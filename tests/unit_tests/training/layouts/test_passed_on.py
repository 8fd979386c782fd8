"""Settings passed to megatron-core train like one rank, and change the training."""

from __future__ import annotations

from importlib.util import find_spec
from typing import Any

import pytest

from tests.ranks import run_ranks
from tests.training_runs import train_losses, worst_difference
from tests.unit_tests.training.checkpoint.test_checkpoint import resume, save_after
from tests.unit_tests.training.layouts.cases import CP2, PP2, SP, TP2

Overrides = dict[str, Any]
STEPS = 3
slow = pytest.mark.slow
EXPERTS = {"model__num_moe_experts": 4, "model__moe_ffn_hidden_size": 32}
ONE_EXPERT = EXPERTS | {"model__moe_router_topk": 1, "model__moe_router_pre_softmax": True}
QUICK_GELU = {"model__activation_func": "quick_gelu"}
MTP = {"model__mtp_num_layers": 2}
MUP = {"model__use_mup": True, "model__mup_base_hidden_size": 32, "model__mup_output_mult": 3.0}
PLAIN = {"optimizer__use_distributed_optimizer": False, "optimizer__lr": 1e-2}
NORMS = {"model__qk_layernorm": True, "optimizer__weight_decay": 10.0}
BUCKETS = {"ddp__num_buckets": 3, "ddp__pad_buckets_for_high_nccl_busbw": True, "ddp__overlap_grad_reduce": True}
ADDED_IN_FLOAT32 = {"ddp__grad_reduce_in_fp32": False, "ddp__reduce_scatter_with_fp32_accumulation": True}
PATTERNS = {"ddp__grad_reduce_in_fp32": False, "ddp__param_name_patterns_for_fp32_local_accumulation": ["all"]}
MUON = PLAIN | {"optimizer__optimizer": "muon"}
LION = {"optimizer__muon_scalar_optimizer": "lion"}
DIVIDED = MUON | {"optimizer__muon_tp_mode": "distributed"}
needs_muon = pytest.mark.skipif(find_spec("emerging_optimizers") is None, reason="emerging-optimizers is not installed")

# Name -> settings, settings to differ from (None: only the way of computing changes), and layouts of two ranks.
CASES: dict[str, tuple[Overrides, Overrides | None, list[Overrides]]] = {
    "output gate": ({"model__attention_output_gate": True}, {}, [TP2 | SP, CP2, PP2]),
    "norm without weights": ({"model__qk_l2_norm": True}, {}, [TP2 | SP, CP2, PP2]),
    "layers without positions": ({"model__no_rope_freq": [0, 1, 1, 0]}, {}, [TP2 | SP, CP2, PP2]),
    "every other layer without": ({"model__no_rope_freq": 2}, {"model__no_rope_freq": 4}, [CP2, PP2]),
    "clamped activation": (QUICK_GELU | {"model__activation_func_clamp_value": 0.5}, QUICK_GELU, [TP2 | SP, PP2]),
    "gate with an offset": ({"model__glu_linear_offset": 1.0}, {}, [TP2 | SP, CP2]),
    "MLP in pieces": ({"model__mlp_chunks_for_training": 3}, None, [TP2 | SP, CP2]),
    "embedding's own deviation": ({"model__embedding_init_method_std": 1.0}, {}, [TP2 | SP, PP2]),
    "muP": (MUP, MUP | {"model__mup_output_mult": 2.0}, [TP2 | SP, CP2, PP2]),
    "muP, narrow": (MUP, MUP | {"model__mup_base_hidden_size": 16}, []),
    "muP, scores": (MUP, MUP | {"model__mup_attn_scale_power": 0.5}, []),
    "muP, embedding": (MUP, MUP | {"model__mup_embedding_mult": 2.0}, []),
    "detached predictions": (MTP | {"model__mtp_detach_heads": True}, MTP, [TP2 | SP, CP2, PP2]),
    "weighted input": (ONE_EXPERT | {"model__moe_apply_probs_on_input": True}, ONE_EXPERT, [TP2 | SP, CP2]),
    "sqrtsoftplus": (EXPERTS | {"model__moe_router_score_function": "sqrtsoftplus"}, EXPERTS, [TP2 | SP, CP2]),
    "embedding's own rate": ({"optimizer__decoupled_lr": 1e-2}, {}, [TP2 | SP, CP2, PP2]),
    "decaying norms": (NORMS | {"optimizer__apply_wd_to_qk_layernorm": True}, NORMS, [{}, PP2]),
    "buckets": (BUCKETS, None, [{}, CP2]),
    "added in float32": (ADDED_IN_FLOAT32, None, [{}, CP2]),
    "patterns": (PATTERNS, None, [{}]),
}
OF_MUON: dict[str, tuple[Overrides, Overrides | None, list[Overrides]]] = {
    "muon": (MUON, PLAIN, [TP2 | SP, CP2, PP2, {}]),
    "muon, divided": (DIVIDED, PLAIN, [TP2 | SP]),
    "muon, lion": (MUON | LION, MUON, [TP2 | SP, PP2]),
    "lion": (PLAIN | {"optimizer__optimizer": "lion"}, PLAIN, [TP2 | SP, PP2]),
    "muon, experts": (MUON | EXPERTS, PLAIN | EXPERTS, [TP2 | SP, CP2, PP2]),
}
FAST = ("output gate", "muon, divided")


def check(model: Overrides, other: Overrides | None, layouts: list[Overrides]) -> None:
    """Check that two ranks train to one rank's losses and gradient norms.

    The setting must change them.
    """
    alone = run_ranks(train_losses, 1, model, STEPS)[0]
    without = run_ranks(train_losses, 1, other or {}, STEPS)[0]
    assert (worst_difference(alone, without)[0] < 1e-6) == (other is None)
    for layout in layouts:
        for result in run_ranks(train_losses, 2, model | layout, STEPS):
            assert max(worst_difference(result, alone)[:2]) < 1e-6, layout


@pytest.mark.parametrize("name", [name if name in FAST else pytest.param(name, marks=slow) for name in CASES])
def test_like_one_rank(name: str) -> None:
    check(*CASES[name])


@needs_muon
@pytest.mark.parametrize("name", [name if name in FAST else pytest.param(name, marks=slow) for name in OF_MUON])
def test_emerging_optimizers(name: str) -> None:
    check(*OF_MUON[name])


@needs_muon
@pytest.mark.parametrize(
    ("before", "after"),
    [
        pytest.param((2, PP2), (2, TP2), id="pp to tp", marks=slow),
        pytest.param((2, TP2), (2, CP2), id="tp to cp", marks=slow),
        pytest.param((2, {}), (1, {}), id="dp to one rank", marks=slow),
    ],
)
def test_muon_resumes(before: tuple[int, Overrides], after: tuple[int, Overrides], tmp_path: Any) -> None:
    whole = run_ranks(train_losses, 1, MUON, 4)[0]
    run_ranks(save_after, before[0], MUON | before[1], str(tmp_path), 2)
    resumed = run_ranks(resume, after[0], MUON | after[1], str(tmp_path), 2)[0]
    assert max(worst_difference(resumed, whole[2:])[:2]) < 2e-6
