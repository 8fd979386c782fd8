"""Clipping of queries' and keys' weights on one rank and under every layout.

On one rank it is like megatron-core's. Under every layout it is like one rank's.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest
import torch
from megatron.core.transformer.attention import Attention

from megatron_cp.mcore.private_names import main_part
from megatron_cp.training import gradients, step
from megatron_cp.training.batches import Microbatch
from megatron_cp.training.open_steps import open_steps
from megatron_cp.training.setup import Run, setup
from megatron_cp.training.step import StepResult, train_step
from tests.packed_runs import BALANCED, BATCH, lengths_file, pack, packed_config, train_dataset
from tests.ranks import run_ranks
from tests.training_runs import VOCAB, start, tiny_config, worst_difference
from tests.unit_tests.models.hybrids import HYBRID
from tests.unit_tests.training.layouts.cases import CP2, HCP, MIXED, PP2, SP, TP2, over
from tests.unit_tests.training.layouts.test_model_variants import MLA

Overrides = dict[str, Any]
Weights = dict[str, torch.Tensor]
STEPS = 4
CLIP = {"model__qk_clip": True, "model__qk_clip_threshold": 1.0, "model__qk_clip_alpha": 0.3}
# An optimizer whose steps are as exact as the gradients. Adam's steps for gradients near 0 are not.
SGD = {"optimizer__optimizer": "sgd", "optimizer__use_distributed_optimizer": False, "optimizer__lr": 0.1}
ADAM = {"optimizer__optimizer": "adam", "optimizer__use_distributed_optimizer": True, "optimizer__lr": 1e-3}
FAST = {"scheduler__lr_warmup_iters": 0, "model__num_layers": 2} | SGD
CP4 = {"model__context_parallel_size": 4}
GATE = {"model__attention_output_gate": True}
BIASES = {"model__add_qkv_bias": True}
WINDOW = {"model__window_size": [5, 0], "model__window_attn_skip_freq": 2}
MTP = {"model__mtp_num_layers": 1}
PLAIN_QUERIES = MLA | {"model__q_lora_rank": None}
OVERLAPPED = {"ddp__overlap_param_gather": True, "ddp__overlap_grad_reduce": True}
BFLOAT16 = {"mixed_precision__fp32": False, "mixed_precision__bf16": True}
RECOMPUTED = {
    "model__recompute_granularity": "full",
    "model__recompute_method": "uniform",
    "model__recompute_num_layers": 1,
}
slow = pytest.mark.slow


def attention_layers(run: Run) -> Iterator[tuple[str, Attention]]:
    for chunk in run.model:
        yield from ((name, each) for name, each in chunk.named_modules() if isinstance(each, Attention))


def weights_of(run: Run) -> Weights:
    """Return the weights of all projections to queries, keys and values.

    Names are made of layer and projection.
    """
    layers = (layer for _, layer in attention_layers(run))
    projections = [
        (f"{layer.layer_number} {name}", getattr(layer, name))
        for layer in layers
        for name in ("linear_qkv", "linear_q_proj", "linear_q_up_proj", "linear_kv_up_proj")
        if hasattr(layer, name)
    ]
    return {name: projection.weight.detach().clone() for name, projection in projections}


Trained = tuple[list[tuple[float, float]], list[float], Weights]


def train(run: Run, steps: Iterable[Sequence[Microbatch]]) -> Trained:
    """Train; return losses and norms, the largest score of each step, and weights."""
    results: list[StepResult] = []
    for microbatches in steps:
        results.append(train_step(run, microbatches))
        assert (results[-1].max_attention_logit or 0) > run.core_config.qk_clip_threshold, len(results)
        run.core_config.qk_clip_threshold *= 0.4  # or the next step would have little left to clip
    logits = [each.max_attention_logit or 0.0 for each in results]
    return [(each.loss, each.grad_norm or 0.0) for each in results], logits, weights_of(run)


def trained(overrides: Overrides) -> Trained:
    run, batches = start(tiny_config(**CLIP | FAST | overrides))
    found = train(run, (next(batches).microbatches for _ in range(STEPS)))
    run.close()
    return found


def trained_on_packs(lengths: str, overrides: Overrides) -> Trained:
    config = packed_config(lengths, CLIP | FAST | overrides)
    run = setup(config, VOCAB)
    with closing(open_steps(run, train_dataset(config), 0, training=True)) as batches:
        found = train(run, (next(batches).microbatches for _ in range(STEPS)))
    run.close()
    return found


def trained_one_by_one(lengths: str) -> Trained:
    config = packed_config(lengths, CLIP | FAST | BALANCED)
    run, source = setup(config, VOCAB), train_dataset(config)
    found = train(run, ([pack([source[BATCH * n + i]], run.groups.cp) for i in range(BATCH)] for n in range(STEPS)))
    run.close()
    return found


def check_like(alone: Trained, results: list[Trained], tp: int = 1, tolerance: float = 2e-6, sgd: bool = True) -> None:
    """Check all ranks' numbers and weights against one rank's.

    Weights of neighboring tensor-parallel ranks are joined.
    """
    for losses, logits, _ in results:
        assert max(worst_difference(losses, alone[0])) < tolerance
        assert logits == pytest.approx(alone[1], rel=1e-5)
    for first in range(0, len(results) if sgd else 0, tp):
        for name in results[first][2]:
            whole = torch.cat([result[2][name] for result in results[first : first + tp]])
            torch.testing.assert_close(whole, alone[2][name], rtol=1e-5, atol=1e-6, msg=name)


# Name -> model, ranks and layout.
CASES: dict[str, tuple[Overrides, int, Overrides]] = {
    "a layer each, cp4": ({"model__num_layers": 4}, 4, CP4 | MIXED),
    "tp2 sp cp2": ({}, 4, TP2 | SP | CP2),
    **{f"{name}, cp4": ({}, 4, CP4 | over(name)) for name in ("p2p", "all_gather", "a2a")},
    "a2a+p2p, cp4": ({}, 4, CP4 | HCP),
    "tp2": ({}, 2, TP2),
    "dp2": ({}, 2, {}),
    "adam, dp2": (ADAM, 2, {}),
    "adam, gathered meanwhile": (ADAM, 2, OVERLAPPED),
    "pp2 cp2": ({}, 4, PP2 | CP2),
    "recomputed, cp2": ({}, 2, CP2 | RECOMPUTED),
    "multi-query, a2a": ({"model__num_query_groups": 1}, 2, CP2 | over("a2a")),
    "groups of heads, a2a": (BIASES, 2, CP2 | over("a2a") | {"model__attention_head_groups": 4}),
    "windows, cp2": (WINDOW, 2, CP2),
    "output gate, tp2 cp2": (GATE, 4, TP2 | CP2),
    "biases, tp2 cp2": (BIASES, 4, TP2 | CP2),
    "latent attention, tp2 cp2": (MLA, 4, TP2 | CP2),
    "latent attention with plain queries, hcp": (PLAIN_QUERIES, 4, CP4 | HCP),
    "further tokens, cp2": (MTP, 2, CP2),
    "hybrid, cp2": (HYBRID | {"model__num_layers": 4}, 2, CP2),
}
QUICK = ("a layer each, cp4", "tp2 sp cp2")


@pytest.mark.parametrize("name", [name if name in QUICK else pytest.param(name, marks=slow) for name in CASES])
def test_like_one_rank(name: str) -> None:
    model, ranks, layout = CASES[name]
    alone = run_ranks(trained, 1, model)[0]
    results = run_ranks(trained, ranks, model | layout)
    check_like(alone, results, layout.get("model__tensor_model_parallel_size", 1), sgd=model is not ADAM)


@pytest.mark.parametrize(
    "layout",
    [
        CP2 | over("all_gather"),
        pytest.param(CP2 | over("p2p"), marks=slow),
        pytest.param(CP2 | over("a2a"), marks=slow),
        pytest.param({"model__dynamic_context_parallel": True}, marks=slow),
    ],
)
def test_packs(layout: Overrides, tmp_path: Path) -> None:
    """Packs must train like samples one by one on one rank."""
    lengths = lengths_file(tmp_path)
    scheduler = "default_dynamic_cp" if "model__dynamic_context_parallel" in layout else "dp_balanced"
    packed = layout | {"model__sequence_packing_scheduler": scheduler, "model__max_seqlen_per_dp_cp_rank": 64}
    alone = run_ranks(trained_one_by_one, 1, lengths)[0]
    check_like(alone, run_ranks(trained_on_packs, 2, lengths, packed))


def like_upstreams(overrides: Overrides) -> None:
    """Check each step against scores computed from attention's queries and keys."""
    run, batches = start(tiny_config(**CLIP | FAST | overrides))
    layers = {id(layer.core_attention): layer for _, layer in attention_layers(run)}
    largest: dict[int, list[torch.Tensor]] = {each: [] for each in layers}

    def written_out(core: torch.nn.Module, args: Any, kwargs: Any) -> None:
        query, key = args[:2]
        key = key.repeat_interleave(query.shape[2] // key.shape[2], dim=2)
        scores = torch.einsum("qbhd,kbhd->bhqk", query, key) * core.softmax_scale
        hidden = torch.ones(scores.shape[-2:]).triu(1).bool()
        largest[id(core)].append(scores.detach().masked_fill(hidden, -torch.inf).amax((0, 2, 3)))

    for layer in layers.values():
        layer.core_attention.register_forward_pre_hook(written_out, with_kwargs=True)
    clip, clipped = gradients.clip_queries_and_keys, []

    def both(run: Run) -> None:
        before = weights_of(run)
        clip(run)
        ours = weights_of(run)
        _restore(run, before)
        for each, layer in layers.items():
            layer.core_attention.current_max_attn_logits = torch.stack(largest[each]).amax(0)
            torch.testing.assert_close(layer.core_attention.max_logits, layer.core_attention.current_max_attn_logits)
            largest[each].clear()
            layer.clip_qk()  # megatron-core's
        for name, weight in weights_of(run).items():
            assert not torch.equal(weight, before[name])
            torch.testing.assert_close(ours[name], weight, rtol=1e-6, atol=0, msg=name)
        clipped.append(True)

    step.clip_queries_and_keys = both
    train(run, (next(batches).microbatches for _ in range(STEPS)))
    assert len(clipped) == STEPS
    run.close()


def _restore(run: Run, before: Weights) -> None:
    for _, layer in attention_layers(run):
        for name in ("linear_qkv", "linear_q_proj", "linear_q_up_proj", "linear_kv_up_proj"):
            if hasattr(layer, name):
                getattr(layer, name).weight.data.copy_(before[f"{layer.layer_number} {name}"])


@pytest.mark.parametrize(
    "model", [{}, MLA, pytest.param(PLAIN_QUERIES, marks=slow), pytest.param(MLA | PP2, marks=slow)]
)
def test_like_upstreams(model: Overrides) -> None:
    run_ranks(like_upstreams, model.get("model__pipeline_model_parallel_size", 1), model)


def halved(overrides: Overrides) -> tuple[list[tuple[float, float]], list[int]]:
    """Return losses and norms of a bfloat16 run with Adam.

    Also where this rank's float32 parts begin.
    """
    # With these sizes, the border between the data-parallel ranks' parts lies in the weights of queries and keys.
    small = {"model__num_layers": 1, "model__ffn_hidden_size": 32}
    run, batches = start(tiny_config(**CLIP | FAST | ADAM | BFLOAT16 | small | overrides))
    beginnings = []
    losses, _, _ = train(run, (next(batches).microbatches for _ in range(STEPS)))
    for _, layer in attention_layers(run):
        part = main_part(run.optimizer, layer.linear_qkv.weight)
        if part is not None:
            main, first = part
            beginnings.append(first)
            model = layer.linear_qkv.weight.detach().flatten()[first : first + main.numel()]
            torch.testing.assert_close(model.float(), main.flatten(), rtol=2**-7, atol=0)
    run.close()
    return losses, beginnings


@pytest.mark.parametrize("layout", [{}, pytest.param(OVERLAPPED, marks=slow)])
def test_float32_weights_that_are_divided(layout: Overrides) -> None:
    """The optimizer's float32 copies of 16-bit weights must be clipped.

    Whole ones, and those that ranks have parts of.
    """
    whole, _ = run_ranks(halved, 2, {"optimizer__use_distributed_optimizer": False})[0]
    divided = run_ranks(halved, 2, layout)
    assert any(first > 0 for _, beginnings in divided for first in beginnings)
    for losses, _ in divided:
        assert max(worst_difference(losses, whole)) < 1e-3  # a last bit of a norm may round a weight otherwise


def skipped(threshold: float) -> list[bool]:
    run, batches = start(tiny_config(optimizer__grad_norm_skip_threshold=threshold))
    found = [train_step(run, next(batches).microbatches).skipped for _ in range(2)]
    run.close()
    return found


def test_steps_with_large_gradients_are_skipped() -> None:
    assert run_ranks(skipped, 1, 0.01) == [[True, True]] and run_ranks(skipped, 1, 1e4) == [[False, False]]
