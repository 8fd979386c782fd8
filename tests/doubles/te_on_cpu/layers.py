"""Models of Transformer Engine's layers train as our own layers do.

They are compared on one rank and on several, in float32. Not collected directly:
``tests/unit_tests/doubles/test_te_on_cpu.py`` runs this file in a process in which megatron-core finds Transformer
Engine.
"""

from __future__ import annotations

import functools
import inspect
import json
import sys
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from megatron.core.extensions.transformer_engine import te_parallel_cross_entropy
from megatron.core.process_groups_config import ProcessGroupCollection
from megatron.core.transformer.enums import AttnMaskType
from transformer_engine.common.triton import cross_entropy as triton_kernels
from transformer_engine.pytorch.triton import cross_entropy

from megatron_cp.attention.modules.probe import ProbeError
from megatron_cp.parallel.device import device
from tests.doubles.te_on_cpu import cross_entropy as stand_ins
from tests.doubles.te_on_cpu import extension
from tests.packed_runs import DYNAMIC, lengths_file, one_by_one, packed_losses
from tests.ranks import run_ranks
from tests.training_runs import train_losses, worst_difference
from tests.unit_tests.attention.harness import make_groups
from tests.unit_tests.attention.modules.test_native import make_config
from tests.unit_tests.models.gemma3 import GEMMA3
from tests.unit_tests.models.hybrids import FURTHER, HYBRID, HYBRID_EXPERTS
from tests.unit_tests.training.checkpoint.test_checkpoint import resume, save_after
from tests.unit_tests.training.layouts.cases import CP2, CP4, HCP, PP2, SP, TP2, VPP2, over
from tests.unit_tests.training.layouts.test_model_variants import (
    BALANCED,
    CLASSIC,
    EP2,
    FULL,
    HEAD_GROUPS,
    MIXED_LAYERS,
    MLA,
    MOE,
    SHARED,
    YARN,
)

Overrides = dict[str, Any]
Losses = list[tuple[float, float]]
STEPS = 3
NATIVE, TE = {"model__transformer_impl": "local"}, {"model__attention_backend": "te"}
OUR_ATTENTION = {"model__attention_backend": "native"}
DECENTRALIZED = {"dist__use_decentralized_pg": True}
ONE_BY_ONE = {"model__moe_grouped_gemm": False}
NORMS = {"model__qk_layernorm": True, "model__add_qkv_bias": True}
LEARNED = {"model__softmax_type": "learnable"}
WINDOW = {"model__window_size": [8, 0]}
TWO = {"model__num_layers": 2}
TILES = {"model__mlp_chunk_size": 5}  # divides nothing
FUSIONS = ("apply_rope_fusion", "gradient_accumulation_fusion", "cross_entropy_loss_fusion")
PLAIN_KERNELS = {f"model__{name}": False for name in FUSIONS}

# The first of each kind; the others are for the slow run.
QUICK = {
    "hierarchy, decentralized",
    "learnable offset, tp2 all-to-all",
    "experts, ep2 cp2",
    "hybrid, tp2 sp cp2",
}
CASES: dict[str, tuple[Overrides, int, Overrides]] = {
    "ring": ({}, 2, CP2 | over("p2p")),
    "all-gather": ({}, 4, CP4 | over("all_gather")),
    "hierarchy, decentralized": (TWO, 4, CP4 | HCP | DECENTRALIZED),
    "tp2 sp cp2": ({}, 4, TP2 | SP | CP2),
    "pp2 vpp2 cp2": ({}, 4, PP2 | VPP2 | CP2),
    "classic GPT, tp2 sp cp2": (CLASSIC, 4, TP2 | SP | CP2),
    "qk layernorm, hierarchy": ({"model__qk_layernorm": True}, 4, CP4 | HCP),
    "bidirectional, hierarchy": ({"model__attention_mask_type": "no_mask"}, 4, CP4 | HCP),
    "full recomputation, ring": (FULL, 2, CP2),
    "interleaved rotary, ring": ({"model__rotary_interleaved": True, "model__rotary_percent": 0.5}, 2, CP2),
    "yarn, hierarchy": (YARN, 4, CP4 | HCP),
    "no fused kernels, ring": (PLAIN_KERNELS, 2, CP2),
    "loss in pieces, tp2 sp cp2": ({"model__cross_entropy_chunk_size": 5}, 4, TP2 | SP | CP2),
    "MLP in tiles, tp2 sp cp2": ({}, 4, TP2 | SP | CP2 | TILES),
    "MLP with biases in tiles, recomputed": (CLASSIC, 2, CP2 | TILES | FULL),
    "experts in tiles, ep2 cp2": (SHARED, 4, CP2 | EP2 | TILES),
    "experts one by one in tiles, recomputed, tp2 sp": (BALANCED | ONE_BY_ONE, 2, TP2 | SP | TILES | FULL),
    "its own scale, ring": ({"model__softmax_scale": 0.3}, 2, CP2),
    "window, all-gather": (WINDOW | {"model__window_attn_skip_freq": 2}, 2, CP2 | over("all_gather")),
    "window, all-to-all": (WINDOW, 2, CP2 | over("a2a")),
    "gemma 3, all-to-all": (GEMMA3, 4, TP2 | SP | CP2 | over("a2a")),
    "learnable offset, tp2 all-to-all": (LEARNED | TWO, 4, TP2 | CP2 | over("a2a")),
    "offset of one, all-to-all": ({"model__softmax_type": "off-by-one"}, 2, CP2 | over("a2a")),
    "latent attention, hierarchy": (MLA, 4, CP4 | HCP),
    "latent attention, tp2 sp": (MLA, 2, TP2 | SP),
    "latent attention, tp2": (MLA, 2, TP2),
    "latent attention, plain queries and yarn, hierarchy": (
        MLA | YARN | {"model__q_lora_rank": None},
        4,
        CP4 | HCP | DECENTRALIZED,
    ),
    "experts, tp2 sp": (BALANCED, 2, TP2 | SP),
    "experts, ep2 cp2": (MOE | TWO, 4, CP2 | EP2),
    "experts one by one, tp2 sp": (BALANCED | ONE_BY_ONE, 2, TP2 | SP),
    "shared experts in the last layers, pp2 ep2": (MIXED_LAYERS, 4, PP2 | EP2),
    "two tokens further by one layer, pp2 cp2": (
        {"model__mtp_num_layers": 2, "model__mtp_use_repeated_layer": True, "model__mtp_loss_scaling_factor": 1.0},
        4,
        PP2 | CP2,
    ),
    "hybrid, tp2 sp cp2": (HYBRID, 4, TP2 | SP | CP2),
    "hybrid, two tokens further, tp2 sp cp2": (FURTHER, 4, TP2 | SP | CP2),
    "hybrid with experts, tp2 sp cp2": (HYBRID_EXPERTS, 4, TP2 | SP | CP2),
    "hybrid with experts in fewer dimensions, ep2 cp2": (
        HYBRID_EXPERTS | {"model__moe_latent_size": 24},
        4,
        CP2 | EP2 | DECENTRALIZED,
    ),
}


def counting(train: Callable[..., Any], *args: Any) -> tuple[Losses, Counter[str]]:
    """Return losses, gradient norms, and calls of Transformer Engine's kernels."""
    calls: Counter[str] = Counter()

    def counted(name: str, kernel: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        if name != "generic_gemm":
            calls[name] += 1
        elif (
            inspect.signature(kernel).bind(*args, **kwargs).arguments["accumulate"]
        ):  # other losses include the router's
            calls["gradients summed"] += 1
        return kernel(*args, **kwargs)

    for module, name in (
        (extension, "fused_attn_fwd"),
        (extension, "fused_rope_forward"),
        (extension, "fused_rope_backward"),
        (extension, "generic_gemm"),
        (extension, "te_general_grouped_gemm"),
        (cross_entropy, "cross_entropy_forward"),
    ):
        setattr(module, name, functools.partial(counted, name, getattr(module, name)))
    result = train(*args)
    return result[0] if isinstance(result, tuple) else result, calls


def trained(overrides: Overrides) -> tuple[Losses, Counter[str]]:
    result = counting(train_losses, overrides, STEPS)
    assert "torch._inductor.compile_fx" not in sys.modules, "each rank would compile for half a minute"
    return result


def in_packs(lengths: str, overrides: Overrides) -> tuple[Losses, Counter[str]]:
    return counting(functools.partial(packed_losses, steps=STEPS), lengths, overrides)


@functools.cache
def on_single_rank(model: str) -> Losses:
    """Return the results of our own layers on one rank."""
    losses, calls = run_ranks(trained, 1, NATIVE | json.loads(model))[0]
    assert not calls
    return losses


@pytest.mark.parametrize(
    "case", [pytest.param(name, marks=() if name in QUICK else pytest.mark.slow) for name in CASES]
)
def test_layers_train_as_ours_do_on_one_rank(case: str) -> None:
    model, size, layout = CASES[case]
    for ranks, changes in ((1, {}), (size, layout)):
        results = run_ranks(trained, ranks, TE | model | changes)
        assert all(losses == results[0][0] for losses, _ in results), "ranks report different losses"
        for _, calls in results:
            assert calls["fused_attn_fwd"], "another attention was used"
            assert bool(calls["fused_rope_forward"]) == bool(calls["fused_rope_backward"]) == rotates(model)
            assert bool(calls["gradients summed"]) == (model is not PLAIN_KERNELS)
        with_fused_loss = any(calls["cross_entropy_forward"] for _, calls in results)  # on the last stage
        assert with_fused_loss == (model is not PLAIN_KERNELS)
        with_shared_products = any(calls["te_general_grouped_gemm"] for _, calls in results)  # on a stage with experts
        assert with_shared_products == ("model__num_moe_experts" in model and not model.items() >= ONE_BY_ONE.items())
        differences = worst_difference(results[0][0], on_single_rank(json.dumps(model)))
        assert max(differences) < 2e-6, (ranks, differences)


# Transformer Engine's attention supports none of the first eight.
AROUND_OURS: dict[str, tuple[Overrides, int, Overrides]] = {
    "groups of heads, tp2 sp cp2": (NORMS | TWO, 4, TP2 | SP | CP2 | over("a2a") | HEAD_GROUPS),
    "groups of heads, full recomputation, ring": (LEARNED, 2, CP2 | FULL | HEAD_GROUPS),
    "groups of heads, hybrid, tp2": (HYBRID, 2, TP2 | HEAD_GROUPS),
    "window, ring": (WINDOW, 2, CP2),
    "learnable offset, tp2 sp cp2": (LEARNED, 4, TP2 | SP | CP2),
    "gemma 3, hierarchy": (GEMMA3, 4, CP4 | HCP | DECENTRALIZED),
    "window, hierarchy": (WINDOW, 4, CP4 | HCP | DECENTRALIZED),
    "fewer key/value heads than ranks": ({"model__num_query_groups": 1}, 4, CP4 | over("a2a")),
    "latent attention, tp2 sp cp2": (MLA, 4, TP2 | SP | CP2),
    "recomputed attention, pp2 vpp2": ({"model__recompute_granularity": "selective"}, 2, PP2 | VPP2),
    "hybrid, tp2 sp cp2": (HYBRID, 4, TP2 | SP | CP2),
}
QUICK_AROUND_OURS = {"window, ring", "groups of heads, tp2 sp cp2"}


@pytest.mark.parametrize(
    "case", [pytest.param(name, marks=() if name in QUICK_AROUND_OURS else pytest.mark.slow) for name in AROUND_OURS]
)
def test_layers_train_the_same_around_our_attention(case: str) -> None:
    model, size, layout = AROUND_OURS[case]
    wanted: Overrides = OUR_ATTENTION if list(AROUND_OURS).index(case) > 7 else {}  # otherwise auto chooses it
    for losses, calls in run_ranks(trained, size, wanted | model | layout):
        assert not calls["fused_attn_fwd"] and calls["gradients summed"]
        assert bool(calls["fused_rope_forward"]) == rotates(model)
        assert max(worst_difference(losses, on_single_rank(json.dumps(model)))) < 2e-6


def rotates(model: Overrides) -> bool:
    """Return whether a kernel rotates queries and keys."""
    rope = model.get("model__position_embedding_type", "rope") == "rope"
    return rope and not model.get("model__multi_latent_attention") and model is not PLAIN_KERNELS


def test_our_layers_use_requested_kernels() -> None:
    wanted = {"apply_rope_fusion": True, "cross_entropy_loss_fusion": True, "cross_entropy_fusion_impl": "te"}
    asked = {f"model__{name}": value for name, value in wanted.items()}
    for losses, calls in run_ranks(trained, 2, NATIVE | CP2 | asked):
        assert set(calls) == {"fused_rope_forward", "fused_rope_backward", "cross_entropy_forward"}
        assert max(worst_difference(losses, on_single_rank("{}"))) < 2e-6


@pytest.fixture(scope="module")
def documents(tmp_path_factory: pytest.TempPathFactory) -> tuple[str, Losses]:
    """Return lengths, and our layers' losses one document at a time.

    The losses are those of one rank.
    """
    lengths = lengths_file(tmp_path_factory.mktemp("documents"))
    return lengths, run_ranks(one_by_one, 1, lengths, NATIVE, None, STEPS)[0]


def test_dynamic_packs_train_as_ours_do_one_by_one(documents: tuple[str, Losses]) -> None:
    lengths, alone = documents
    results = run_ranks(in_packs, 4, lengths, DYNAMIC | CP2)
    for losses, calls in results:
        assert min(calls["fused_attn_fwd"], calls["fused_rope_forward"], calls["gradients summed"]) > 0
        assert max(worst_difference(losses, alone)) < 2e-6


def test_dynamic_packs_on_a_hierarchy_have_te_layers_around_our_attention(documents: tuple[str, Losses]) -> None:
    lengths, alone = documents
    for losses, calls in run_ranks(in_packs, 4, lengths, DYNAMIC | CP4 | HCP):
        assert not calls["fused_attn_fwd"] and min(calls["fused_rope_forward"], calls["gradients summed"]) > 0
        assert max(worst_difference(losses, alone)) < 2e-6


def losses_and_gradients() -> list[torch.Tensor]:
    """Compute half a vocabulary on each rank.

    By kernels in Triton's interpreter, and by their stand-ins.
    """
    group, found = make_groups(2)[0], []
    torch.manual_seed(3)
    made = torch.randn(5, 2, 14), torch.randint(14, (5, 2)), torch.rand(5, 2)
    logits, labels, weights = (tensor.to(device()) for tensor in made)
    for kernels in (vars(triton_kernels), stand_ins.KERNELS):
        for name in stand_ins.KERNELS:
            setattr(cross_entropy, name, kernels[name])
        part = logits.chunk(2, -1)[group.rank()].contiguous().requires_grad_()
        losses = te_parallel_cross_entropy(part.clone(), labels, group, True)
        (losses * weights).sum().backward()
        found += [losses, part.grad]
    return found


def test_stand_in_losses_equal_the_real_kernels() -> None:
    for losses, gradients, *by_stand_ins in run_ranks(losses_and_gradients, 2):
        torch.testing.assert_close(by_stand_ins, [losses, gradients], rtol=1e-6, atol=1e-6)
        assert gradients.abs().max() > 0.1


@functools.cache
def uninterrupted(model: str) -> Losses:
    """Return the results of our own layers on one rank, for resumed runs."""
    return run_ranks(train_losses, 1, NATIVE | json.loads(model), 4)[0]


MODELS = {
    "dense": TWO,
    "experts": MOE,
    "experts one by one": MOE | ONE_BY_ONE | TWO,
    "some": MIXED_LAYERS,
    "latent": MLA | TWO,
    "hybrid": HYBRID,
    "hybrid further": FURTHER,
    "hybrid with experts": HYBRID_EXPERTS,
}
IN_OTHERS = ("experts", "some", "hybrid", "hybrid further")
WAYS = {"ours to te": (NATIVE, TE), "te to ours": (TE, NATIVE)}


@pytest.mark.parametrize(
    "model", [pytest.param(MODELS[n], id=n, marks=pytest.mark.slow if n in IN_OTHERS else ()) for n in MODELS]
)
@pytest.mark.parametrize(
    ("before", "after"),
    [pytest.param(*way, marks=() if way[0] is NATIVE else pytest.mark.slow) for way in WAYS.values()],
    ids=WAYS,
)
def test_a_run_resumes_with_the_other_layers(
    tmp_path: Path, before: Overrides, after: Overrides, model: Overrides
) -> None:
    run_ranks(save_after, 1, before | model, str(tmp_path), 2)
    rest = run_ranks(resume, 2, after | model | CP2, str(tmp_path), 2)[0]
    assert max(worst_difference(rest, uninterrupted(json.dumps(model))[2:])) < 2e-6


@pytest.mark.parametrize(
    ("before", "after"),
    [(TE, HEAD_GROUPS), pytest.param(HEAD_GROUPS, NATIVE, marks=pytest.mark.slow)],
    ids=["", "back"],
)
def test_a_run_resumes_with_groups_of_heads(tmp_path: Path, before: Overrides, after: Overrides) -> None:
    """Groups have the projection's norm beside it, the fused layers inside it."""
    run_ranks(save_after, 1, before | TWO, str(tmp_path), 2)
    rest = run_ranks(resume, 2, after | TWO | CP2, str(tmp_path), 2)[0]
    assert max(worst_difference(rest, uninterrupted(json.dumps(TWO))[2:])) < 2e-6


@pytest.mark.parametrize(
    ("before", "after"), [(ONE_BY_ONE, {}), pytest.param({}, ONE_BY_ONE, marks=pytest.mark.slow)], ids=["", "back"]
)
def test_a_run_resumes_with_grouped_products_of_experts(tmp_path: Path, before: Overrides, after: Overrides) -> None:
    """A run from before this was the default must resume."""
    model = MOE | TWO
    run_ranks(save_after, 2, TE | model | EP2 | before, str(tmp_path), 2)
    rest = run_ranks(resume, 2, TE | model | CP2 | after, str(tmp_path), 2)[0]
    assert max(worst_difference(rest, uninterrupted(json.dumps(model))[2:])) < 2e-6


@pytest.mark.parametrize("sp", [{}, pytest.param(SP, marks=pytest.mark.slow)], ids=["", "sp"])
def test_latent_attention_is_saved_once_by_decentralized_groups(tmp_path: Path, sp: Overrides) -> None:
    """Each tensor-parallel rank used to save the weights that all ranks have in full."""
    layout = TE | MLA | TWO | TP2 | sp | DECENTRALIZED
    run_ranks(save_after, 2, layout, str(tmp_path), 1)
    rest = run_ranks(resume, 2, layout, str(tmp_path), 2)[0]
    assert max(worst_difference(rest, uninterrupted(json.dumps(MLA | TWO))[1:3])) < 2e-6


def test_its_optimizer_counts_the_steps_of_groups_that_the_first_stage_lacks(tmp_path: Path) -> None:
    """Steps of a group that rank 0 lacks must be counted and saved.

    Transformer Engine's Adam counts steps per parameter group, which rank 0 saves: here it has an embedding only.
    """
    layout = TE | PP2 | {"model__num_layers": 1, "model__account_for_embedding_in_pipeline_split": True}
    layout |= {"optimizer__use_distributed_optimizer": False}
    uninterrupted = run_ranks(train_losses, 2, layout, 4)[0]
    run_ranks(save_after, 2, layout, str(tmp_path), 2)
    assert run_ranks(resume, 2, layout, str(tmp_path), 2)[0] == uninterrupted[2:]


def attention_without_its_group() -> str:
    """Return the probe's result for upstream's class.

    It reads a missing hierarchy from global state.
    """
    from megatron_cp.attention.modules.probe import probe_attention
    from megatron_cp.attention.modules.te import te_attention_class

    ring, levels = make_groups(4)[0], list(make_groups(2))
    config = make_config(
        context_parallel_size=4, hierarchical_context_parallel_sizes=[2, 2], bf16=True, params_dtype=torch.bfloat16
    )
    groups = ProcessGroupCollection(cp=ring, hcp=levels, tp=make_groups(1)[0])
    module = te_attention_class()(config, 1, AttnMaskType.causal, "self", cp_comm_type="a2a+p2p", pg_collection=groups)
    probe_attention([module])
    module.cp_group = None
    try:
        probe_attention([module])
    except ProbeError as error:
        return str(error)
    return "nothing"


def test_the_probe_finds_attention_that_lost_its_group() -> None:
    for reported in run_ranks(attention_without_its_group, 4):
        assert "differs from the one-rank answer" in reported
