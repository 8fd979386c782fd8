"""Multi-token prediction: training against one rank and against megatron-core."""

import functools
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest import mock

import numpy as np
import pytest
import torch
import torch.distributed as dist
from megatron.core.models.gpt.gpt_model import GPTModel
from megatron.core.transformer.multi_token_prediction import MTPLossLoggingHelper
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

from megatron_cp.common.jsonl_log import read_lines
from megatron_cp.config.run_config import LoggerConfig
from megatron_cp.data.samples.datasets import build_datasets
from megatron_cp.data.samples.varlen import MockVarlenDataset
from megatron_cp.data.text.tokenizers import build_tokenizer
from megatron_cp.dynamic_cp import schedule, schedule_fixed_cp
from megatron_cp.dynamic_cp.buddy_tree import legal_groups
from megatron_cp.dynamic_cp.runtime.domain import DynamicGroups
from megatron_cp.dynamic_cp.runtime.iterator import DynamicBatches
from megatron_cp.models.language_model import LanguageModel
from megatron_cp.parallel.layout import layout_of
from megatron_cp.training import forward_backward, step
from megatron_cp.training.checkpoint.saver import load_checkpoint
from megatron_cp.training.held_out.evaluate import evaluate_part
from megatron_cp.training.monitor.metrics import Reporter
from megatron_cp.training.monitor.step_metrics import StepMetrics
from megatron_cp.training.setup import setup
from tests.ranks import RanksFailed, run_ranks
from tests.training_runs import VOCAB, save_checkpoint, start, tiny_config
from tests.unit_tests.training.layouts.cases import CP2, CP4, HCP, MIXED, PP2, SP, TP2, VPP2, batch_for, over

MTP1 = {"model__mtp_num_layers": 1, "model__mtp_loss_scaling_factor": 0.5}
MTP2 = MTP1 | {"model__mtp_num_layers": 2}
TIED = {"model__share_embeddings_and_output_weights": True}
DECENTRALIZED = {"dist__use_decentralized_pg": True}
FULL = {"model__recompute_granularity": "full", "model__recompute_method": "uniform", "model__recompute_num_layers": 1}
STEPS = 3  # the warm-up begins with a rate of zero: the third step is the first with other weights
TOLERANCE = 1e-5  # sums in another order, through a few steps of Adam, as in training/test_equivalence.py
Steps = list[tuple[float, ...]]  # loss, gradient norm and the depths' losses of each step


def train(overrides: dict[str, Any]) -> Steps:
    run, batches = start(tiny_config(**overrides))
    results = [step.train_step(run, next(batches).microbatches) for _ in range(STEPS)]
    run.close()
    return [(result.loss, result.grad_norm or 0.0, *result.mtp_losses) for result in results]


def worst_difference(a: Steps, b: Steps) -> float:
    """Return the largest relative difference of any number in any step."""
    x, y = torch.tensor(a, dtype=torch.float64), torch.tensor(b, dtype=torch.float64)
    return float(((x - y) / y).abs().max())


@functools.cache
def single_rank(depths: int, *, tied: bool = False) -> Steps:
    return run_ranks(train, 1, (MTP1 if depths == 1 else MTP2) | (TIED if tied else {}))[0]


LAYOUTS: dict[str, tuple[int, dict[str, Any]]] = {
    "cp2": (2, CP2),
    "cp4 a2a+p2p [2,2]": (4, CP4 | HCP),
    "cp3": (3, {"model__context_parallel_size": 3}),
    "cp4 p2p": (4, CP4 | over("p2p")),
    "cp4 a2a": (4, CP4 | over("a2a")),
    "cp4 all_gather": (4, CP4 | over("all_gather")),
    "cp4 a layer each": (4, CP4 | MIXED),
    "tp2 sp cp2": (4, TP2 | SP | CP2),
    "tp2 cp2": (4, TP2 | CP2),
    "pp2 cp2": (4, PP2 | CP2),
    "pp2 vpp2 cp2": (4, PP2 | VPP2 | CP2),
    "pp2 tp2": (4, PP2 | TP2),
    "dp2 cp2": (4, CP2),
    "dp2 cp2, overlapped": (
        4,
        CP2 | {"ddp__overlap_grad_reduce": True, "ddp__overlap_param_gather": True, "ddp__bucket_size": 20000},
    ),
    "cp2, larger microbatches": (2, CP2 | {"train__micro_batch_size": 4}),
    "cp2, full recomputation": (2, CP2 | FULL),
    "tp2 sp, full recomputation": (2, TP2 | SP | FULL),
    "cp2, selective recomputation": (2, CP2 | {"model__recompute_granularity": "selective"}),
    "cp2, decentralized": (2, CP2 | DECENTRALIZED),
    "pp2 vpp2 cp2, decentralized": (4, PP2 | VPP2 | CP2 | DECENTRALIZED),
    "tp2 sp cp2, decentralized": (4, TP2 | SP | CP2 | DECENTRALIZED),
}
FAST = {("cp4 a2a+p2p [2,2]", 2, False), ("pp2 vpp2 cp2, decentralized", 2, True)}


@pytest.mark.parametrize(
    ("name", "depths", "tied"),
    [
        pytest.param(*case, marks=[] if case in FAST else pytest.mark.slow)
        for name in LAYOUTS
        for case in [(name, 1, False), (name, 2, False), (name, 2, True)]
    ],
)
def test_training_equals_one_rank(name: str, depths: int, tied: bool) -> None:
    world_size, layout = LAYOUTS[name]
    overrides = (MTP1 if depths == 1 else MTP2) | (TIED if tied else {}) | batch_for(world_size, layout) | layout
    if name == "cp3":
        overrides |= {"dataset__seq_length": 36}
    results = run_ranks(train, world_size, overrides)
    assert all(result == results[0] for result in results), "ranks report different losses"
    reference = single_rank(depths, tied=tied)
    if name == "cp3":
        without_cp = {key: value for key, value in overrides.items() if key != "model__context_parallel_size"}
        reference = run_ranks(train, 1, without_cp)[0]
    assert worst_difference(results[0], reference) < TOLERANCE


LOSS = {"model__account_for_loss_in_pipeline_split": True}
EMBEDDING_AND_LOSS = LOSS | {"model__account_for_embedding_in_pipeline_split": True}


@pytest.mark.parametrize(
    ("layers", "layout", "tied"),
    [
        (1, LOSS, False),
        (3, VPP2 | LOSS, True),
        (2, VPP2 | EMBEDDING_AND_LOSS, False),
        (4, {"model__num_layers_in_last_pipeline_stage": 1}, True),
    ],
    ids=str,
)
def test_the_last_stage_may_have_fewer_other_layers_or_none(layers: int, layout: dict[str, Any], tied: bool) -> None:
    model = MTP1 | {"model__num_layers": layers} | (TIED if tied else {})
    results = run_ranks(train, 2, model | PP2 | layout)
    assert all(result == results[0] for result in results), "ranks report different losses"
    assert worst_difference(results[0], run_ranks(train, 1, model)[0]) < TOLERANCE


def test_the_depths_learn_and_matter() -> None:
    """The comparisons would pass with untrained heads, or without an added loss."""
    assert all(later[2 + k] != earlier[2 + k] for k in (0, 1) for earlier, later in [single_rank(2)[:2]])
    small = run_ranks(train, 1, MTP2 | {"model__mtp_loss_scaling_factor": 1e-3})[0]
    assert small[0][0] == single_rank(2)[0][0], "the first forward pass is the same"
    assert abs(small[0][1] - single_rank(2)[0][1]) > 1e-2 and small[-1][0] != single_rank(2)[-1][0]


ONE_LAYER = MTP2 | {"model__mtp_use_repeated_layer": True}


def first_step(overrides: dict[str, Any]) -> tuple[list[float], list[torch.Tensor]]:
    """Return losses of the first step, and its gradients summed over depths.

    All depths' layers have the weights of the first.
    """
    run, batches = start(tiny_config(**overrides, optimizer__use_distributed_optimizer=False))
    mtp = run.model[0].module.mtp
    for layer in mtp.layers:
        layer.load_state_dict(mtp.layers[0].state_dict())
    run.optimizer.reload_model_params()
    result = step.train_step(run, next(batches).microbatches)
    per_layer = zip(*(layer.parameters() for layer in mtp.layers), strict=True)
    gradients = [sum(parameter.main_grad for parameter in each) for each in per_layer]
    run.close()
    return [result.loss, *result.mtp_losses], gradients


def test_a_repeated_layer_is_as_many_with_its_weights() -> None:
    ((losses, gradients),) = run_ranks(first_step, 1, ONE_LAYER | {"optimizer__clip_grad": 0.0})
    ((expected, summed),) = run_ranks(first_step, 1, MTP2 | {"optimizer__clip_grad": 0.0})
    assert losses == expected and len(gradients) == len(summed) > 8
    for gradient, other in zip(gradients, summed, strict=True):
        torch.testing.assert_close(gradient, other, rtol=1e-5, atol=1e-6 * float(other.abs().max()))


def test_a_repeated_layer_of_a_hybrid_has_its_routers_losses_once() -> None:
    """The loss must be the mean over uses, as in megatron-core's GPT.

    Layers of their own have the sum. Of the z-loss a repeated layer has the sum: the router divides what it logs, and
    not what it trains with.
    """
    overrides = MTP2 | {
        "model__architecture": "hybrid",
        "model__num_layers": 1,
        "model__hybrid_layer_pattern": "*/---E/---E",  # deep in a depth: upstream has no place for the fourth layer
        "model__num_moe_experts": 4,
        "model__moe_ffn_hidden_size": 48,
        "model__moe_router_load_balancing_type": "aux_loss",
        "optimizer__clip_grad": 0.0,
    }
    once = {"model__moe_aux_loss_coeff": 0.5, "model__mtp_use_repeated_layer": True}
    ((losses, gradients),) = run_ranks(first_step, 1, overrides | once)
    ((expected, summed),) = run_ranks(first_step, 1, overrides | {"model__moe_aux_loss_coeff": 0.25})
    ((_, without),) = run_ranks(first_step, 1, overrides)
    assert losses == expected
    for gradient, other in zip(gradients, summed, strict=True):
        torch.testing.assert_close(gradient, other, rtol=1e-5, atol=1e-6 * float(other.abs().max()))
    matter = [float((a - b).norm() / b.norm()) for a, b in zip(gradients, without, strict=True)]
    assert max(matter) > 0.1, "the routers' losses do nothing here"


@pytest.mark.parametrize(
    ("size", "layout"),
    [
        (2, {"ddp__overlap_grad_reduce": True, "ddp__bucket_size": 5000, "train__micro_batch_size": 2} | FULL),
        pytest.param(4, TP2 | SP | PP2 | TIED | DECENTRALIZED, marks=pytest.mark.slow),
        pytest.param(4, CP4 | HCP, marks=pytest.mark.slow),
    ],
    ids=str,
)
def test_a_repeated_layer_trains_as_on_one_rank(size: int, layout: dict[str, Any]) -> None:
    tied = TIED if TIED.items() <= layout.items() else {}
    results = run_ranks(train, size, ONE_LAYER | layout)
    assert all(result == results[0] for result in results), "ranks report different losses"
    assert worst_difference(results[0], run_ranks(train, 1, ONE_LAYER | tied)[0]) < TOLERANCE


def transports() -> list[str]:
    run, _ = start(tiny_config(**MTP2, **CP4, **MIXED))
    mtp = run.model[0].module.mtp
    kinds = [layer.mtp_model_layer.self_attention.core_attention.cp_comm_type for layer in mtp.layers]
    run.close()
    return kinds


def test_every_depth_has_the_last_layers_transport() -> None:
    """megatron-core would give depth 1 the first layer's."""
    assert run_ranks(transports, 4)[0] == [MIXED["model__cp_comm_type"][-1]] * 2 != MIXED["model__cp_comm_type"][:2]


@pytest.mark.slow
def test_bf16_stays_close_to_float32() -> None:
    bf16 = {"mixed_precision__fp32": False, "mixed_precision__bf16": True}
    losses = [torch.tensor(run_ranks(train, 2, MTP2 | CP2 | more)[0]) for more in ({}, bf16)]
    assert 1e-6 < ((losses[0] - losses[1]) / losses[0])[:, [0, 2, 3]].abs().max() < 5e-3


def upstreams_loss(overrides: dict[str, Any]) -> Steps:
    """Return megatron-core's own loss.

    It is exact where one rank has the whole global batch in one microbatch.
    """
    run, batches = start(tiny_config(**overrides))
    results = []
    with (
        mock.patch.object(LanguageModel, "_postprocess", GPTModel._postprocess),
        mock.patch.object(forward_backward, "_depth_tokens", lambda run, window: []),
    ):
        for _ in range(STEPS):
            (microbatch,) = next(batches).microbatches
            result = step.train_step(run, [microbatch])
            depths = MTPLossLoggingHelper.tracker["loss_values"]
            results.append((result.loss, result.grad_norm or 0.0, *depths.tolist()))
            depths.zero_()
    run.close()
    return results


def test_one_rank_equals_megatron_core() -> None:
    theirs = run_ranks(upstreams_loss, 1, MTP2 | {"train__micro_batch_size": 4})[0]
    assert worst_difference(single_rank(2), theirs) < TOLERANCE


# Packed microbatches, each with a context-parallel group of its own.

LENGTHS = [int(x) for x in np.random.default_rng(3).choice([5, 17, 40, 9, 3, 64, 100, 23, 1, 12], size=60)]


def train_packed(overrides: dict[str, Any], per_rank: int, dynamic: bool = True, multiple: int = 1) -> Steps:
    """Train as ``train`` does, on documents of their own lengths.

    CP sizes are by schedule or, with packed static CP, all alike.
    """
    config = tiny_config(
        model__sequence_packing_scheduler="default_dynamic_cp" if dynamic else "dp_balanced",
        dataset__seq_length=128,
        **MTP2,
        **overrides,
    )
    run = setup(config, VOCAB)
    layout = layout_of(config.model, config.dist, dist.get_world_size())
    groups = DynamicGroups(layout, blocks=legal_groups(layout.dp * layout.cp))
    model = config.model
    options: dict[str, Any] = {
        "sequence_parallel_size": model.tensor_model_parallel_size if model.sequence_parallel else 1,
        "microbatch_multiple": multiple,
        "num_ranks": len(groups.domain),
        "max_seqlen_per_rank": per_rank,
    }
    if dynamic:
        options["pipeline_size"] = model.pipeline_model_parallel_size
    make = schedule if dynamic else schedule_fixed_cp
    batches = DynamicBatches(
        MockVarlenDataset(LENGTHS, VOCAB, seed=5, masked_fraction=0.4),
        12,
        lambda lengths, cost: make(lengths, cost=cost, **options),
        groups,
        lockstep=model.pipeline_model_parallel_size > 1,
        device=run.device,
    )
    losses, sizes = [], set()
    for _ in range(STEPS):
        plan = next(batches)
        result = step.train_step(run, batches.microbatches(plan))
        losses.append((result.loss, result.grad_norm or 0.0, *result.mtp_losses))
        sizes |= set(plan.cp_sizes)
    assert dist.get_world_size() == 1 or not dynamic or len(sizes) > 1, "one CP size only would prove little"
    batches.close()
    groups.destroy()
    run.close()
    return losses


@functools.cache
def one_rank_packed(*, tied: bool) -> Steps:
    return run_ranks(train_packed, 1, TIED if tied else {}, 128)[0]


PACKED: dict[str, tuple[int, dict[str, Any], int, dict[str, Any]]] = {
    "4 ranks, decentralized": (4, CP2 | DECENTRALIZED, 32, {}),
    "2 ranks": (2, {}, 64, {}),
    "3 ranks": (3, {}, 48, {}),
    "4 ranks": (4, {}, 32, {}),
    "4 ranks, fixed size": (4, {}, 32, {"dynamic": False}),
    "tp2 sp": (4, TP2 | SP, 64, {}),
    "pp2": (4, PP2, 64, {}),
    "pp2 vpp2, tied": (4, PP2 | VPP2 | TIED, 64, {"multiple": 2}),
    "full recomputation": (4, FULL, 32, {}),
    "selective recomputation": (4, {"model__recompute_granularity": "selective"}, 32, {}),
    "logits in pieces": (4, {"model__cross_entropy_chunk_size": 7}, 32, {}),
}


@pytest.mark.parametrize(
    "name", [pytest.param(n, marks=[] if n == "4 ranks, decentralized" else pytest.mark.slow) for n in PACKED]
)
def test_packed_training_equals_one_rank(name: str) -> None:
    world_size, overrides, per_rank, options = PACKED[name]
    results = run_ranks(functools.partial(train_packed, **options), world_size, overrides, per_rank)
    assert all(result == results[0] for result in results), "ranks report different losses"
    assert worst_difference(results[0], one_rank_packed(tied="tied" in name)) < TOLERANCE


# Checkpoints and metrics.


def save_after(overrides: dict[str, Any], folder: str) -> None:
    run, batches = start(tiny_config(**overrides))
    for _ in range(2):
        step.train_step(run, next(batches).microbatches)
    run.progress.iteration = 2
    save_checkpoint(run, folder, {"train": batches.state_dict()})
    run.close()


def resume(overrides: dict[str, Any], folder: str) -> Steps:
    run, batches = start(tiny_config(**overrides))
    batches.load_state_dict(load_checkpoint(run, folder, 2)["train"])
    results = [step.train_step(run, next(batches).microbatches) for _ in range(STEPS - 2)]
    run.close()
    return [(result.loss, result.grad_norm or 0.0, *result.mtp_losses) for result in results]


def evaluated(overrides: dict[str, Any]) -> list[float]:
    """Return losses on held-out samples after each of two steps."""
    settings = dict(scheduler__lr_warmup_iters=0, optimizer__adam_eps=1e-3, validation__eval_iters=1)
    config = tiny_config(**overrides, **settings)
    run, batches = start(config)
    held_out, _, _ = build_datasets(config.dataset, build_tokenizer(config.tokenizer), 8)
    losses: list[float] = []
    reporter: Any = SimpleNamespace(writes=False, evaluation=lambda i, name, loss, s: losses.append(loss.per_token))
    watch: Any = SimpleNamespace(read=lambda: 0)
    for _ in range(2):
        step.train_step(run, next(batches).microbatches)
        evaluate_part(run, "validation", held_out, reporter, watch)
    run.close()
    return losses


def test_an_evaluation_has_the_weights_of_its_step() -> None:
    """The last stage's output layer must have the new embedding.

    It holds a copy, which no forward pass gathers without further tokens.
    """
    model = MTP1 | TIED | {"model__num_layers": 2}
    overlapped = {"ddp__overlap_grad_reduce": True, "ddp__overlap_param_gather": True}
    several = run_ranks(evaluated, 4, model | PP2 | CP2 | overlapped)[0]
    assert several == pytest.approx(run_ranks(evaluated, 1, model)[0], rel=2e-6)


@pytest.mark.parametrize(
    ("before", "after", "tied"),
    [
        ((4, PP2 | VPP2 | CP2 | DECENTRALIZED), (2, TP2 | SP), True),
        pytest.param((4, CP4 | HCP), (4, PP2 | TP2), False, marks=pytest.mark.slow),
        pytest.param((1, {}), (4, PP2 | VPP2 | CP2), True, marks=pytest.mark.slow),
        pytest.param((4, PP2 | CP2), (1, {}), False, marks=pytest.mark.slow),
    ],
)
def test_resuming_under_another_layout(tmp_path: Path, before: Any, after: Any, tied: bool) -> None:
    model = MTP2 | (TIED if tied else {})
    run_ranks(save_after, before[0], model | before[1], str(tmp_path))
    rest = run_ranks(resume, after[0], model | after[1], str(tmp_path))[0]
    assert worst_difference(rest, single_rank(2, tied=tied)[2:]) < TOLERANCE


def begin_with(overrides: dict[str, Any], folder: str | None) -> Steps:
    """Train from a checkpoint's weights, or from a model's first weights."""
    run, batches = start(tiny_config(**overrides, scheduler__lr_warmup_iters=0))
    if folder is not None:
        load_checkpoint(run, folder, 2, finetune=True)
    results = [step.train_step(run, next(batches).microbatches) for _ in range(STEPS - 1)]
    run.close()
    return [(result.loss, result.grad_norm or 0.0, *result.mtp_losses) for result in results]


FURTHER = {
    "model__architecture": "hybrid",
    "model__num_layers": 2,
    "model__hybrid_layer_pattern": "*-/*-/*-",
    "model__mtp_num_layers": 2,
    "model__mtp_use_repeated_layer": True,
}


@pytest.mark.parametrize(
    ("model", "without", "layout"),
    [
        (MTP2, {"model__mtp_num_layers": None}, (4, PP2 | VPP2 | CP2)),
        pytest.param(
            FURTHER,
            {
                "model__hybrid_layer_pattern": "*-",
                "model__mtp_num_layers": None,
                "model__mtp_use_repeated_layer": False,
            },
            (4, PP2 | TP2 | TIED | DECENTRALIZED),
            marks=pytest.mark.slow,
        ),
    ],
    ids=["gpt", "hybrid"],
)
def test_a_model_may_begin_with_the_weights_of_one_that_predicts_no_further_tokens(
    tmp_path: Path, model: dict[str, Any], without: dict[str, Any], layout: tuple[int, dict[str, Any]]
) -> None:
    tied = TIED if TIED.items() <= layout[1].items() else {}
    run_ranks(save_after, 1, model | without | tied, str(tmp_path / "without"))
    begun = run_ranks(begin_with, 1, model | tied, str(tmp_path / "without"))[0]
    plain = run_ranks(begin_with, 1, model | without | tied, str(tmp_path / "without"))[0]
    assert begun[0][0] == plain[0][0] != run_ranks(begin_with, 1, model | tied, None)[0][0][0]
    ranks, parallel = layout
    assert (
        worst_difference(run_ranks(begin_with, ranks, model | parallel, str(tmp_path / "without"))[0], begun)
        < TOLERANCE
    )
    # And the other way round: further tokens are left out.
    run_ranks(save_after, ranks, model | parallel, str(tmp_path / "with"))
    left_out = run_ranks(begin_with, 1, model | without | tied, str(tmp_path / "with"))[0]
    assert left_out[0][0] == pytest.approx(
        run_ranks(begin_with, 1, model | tied, str(tmp_path / "with"))[0][0][0], 1e-6
    )
    with pytest.raises(RanksFailed, match="is of a different model: model"):
        run_ranks(resume, 1, model | tied, str(tmp_path / "without"))


def test_each_depth_is_a_metric_of_its_own(tmp_path: Path) -> None:
    metrics = StepMetrics(1, 4, 128, 128, 32, 5.0, 1.0, 1e-3, 0.1, 1.0, 1.0, 1.0, 1.0, 4, False, mtp_losses=(5.5, 6.0))
    reporter = Reporter(LoggerConfig(), 10, tmp_path)
    reporter.step(metrics)
    reporter.close()
    (line,) = read_lines(tmp_path / "metrics.jsonl")
    assert (line["mtp_1 loss"], line["mtp_2 loss"]) == (5.5, 6.0) and "mtp_losses" not in line
    events = EventAccumulator(str(tmp_path / "tensorboard")).Reload()
    assert [event.value for event in events.Scalars("mtp_1 loss")] == [5.5]
