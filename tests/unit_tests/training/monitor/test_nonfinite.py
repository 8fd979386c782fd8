"""NaN and infinity are reported, and never trained on.

The report has rank, microbatch and layer. The step is skipped, or the error is fatal.
"""

import math
import os
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from megatron_cp.common.errors import RuntimeFault
from megatron_cp.training.monitor.loss_spikes import SpikeWatch
from megatron_cp.training.monitor.nonfinite import MAX_SKIPPED_IN_A_ROW, NonFiniteEvent, _ChunkWatch
from megatron_cp.training.step import train_step
from tests.ranks import run_ranks
from tests.training_runs import start, tiny_config, train_losses, worst_difference
from tests.unit_tests.training.layouts.cases import CP2, CP4, PP2, TP2, VPP2


def poison(run: Any, rank: int, name: str, microbatch: int, backward: bool) -> Any:
    """Put a NaN into a module's output, or an infinity into its gradient.

    One element on one rank is changed. Counts microbatches from zero after each pass of a step, the second pass too.
    Returns the final error.
    """
    if int(os.environ["RANK"]) != rank:
        return lambda: None
    for chunk in run.model:
        inner = chunk.module
        modules = dict(inner.named_modules())
        if name in modules:
            break
    count = [0]
    per_step = run.config.train.global_batch_size // run.groups.dp.size()

    def hook(module: Any, inputs: Any, output: Any) -> Any:
        now = count[0] % per_step
        count[0] += 1
        if now != microbatch:
            return None
        first, *rest = output if isinstance(output, tuple) else (output,)
        if backward:
            first = first * 1.0
            first.register_hook(lambda gradient: gradient.clone().index_fill_(0, torch.tensor([0]), math.inf))
        else:
            first = first.clone()
            first.view(-1)[5] = math.nan
        return (first, *rest) if isinstance(output, tuple) else first

    return modules[name].register_forward_hook(hook).remove


def poisoned_step(overrides: dict[str, Any], where: tuple, name: str) -> str:
    run, batches = start(tiny_config(**overrides))
    train_step(run, next(batches).microbatches)
    before = [parameter.detach().clone() for chunk in run.model for parameter in chunk.parameters()]
    poison(run, where[0], name, *where[1:])
    try:
        train_step(run, next(batches).microbatches)
    except RuntimeFault as fault:
        after = [parameter for chunk in run.model for parameter in chunk.parameters()]
        assert fault.on_all_ranks
        assert all(torch.equal(a, b) for a, b in zip(before, after, strict=True)), "the parameters changed"
        return str(fault)
    return "no fault"


@pytest.mark.parametrize(
    ("ranks", "overrides", "where", "name", "message"),
    [
        (1, {}, (0, 2, False), "decoder.layers.1.mlp.linear_fc1", "rank 0, microbatch 2: nan in the output of {}"),
        (
            2,
            CP2,
            (1, 1, False),
            "decoder.layers.0.self_attention.linear_qkv",
            "rank 1, microbatch 1: nan in the output",
        ),
        (2, {}, (1, 1, False), "decoder.layers.3", "rank 1, microbatch 1: nan in the output of {} "),
        (2, CP2, (1, 3, True), "decoder.layers.2.mlp", "rank 1, microbatch 3: inf in the gradient of"),
        (2, TP2, (1, 0, False), "decoder.layers.1.mlp.linear_fc2", "rank 1, microbatch 0: nan in the output of {}"),
        (2, PP2, (1, 2, False), "decoder.layers.1.mlp", "rank 1, microbatch 2: nan in the output of {}"),
        (2, PP2, (1, 2, True), "decoder.layers.1.mlp", "rank 1, microbatch 2: inf in the gradient of"),
        (2, PP2 | VPP2, (0, 1, False), "decoder.layers.0.mlp", "rank 0, microbatch 1: nan in the output of {}"),
    ],
    ids=["one", "cp", "dp", "cp gradient", "tp", "pp", "pp gradient", "vpp"],
)
def test_rank_microbatch_and_layer_are_named(
    ranks: int, overrides: dict[str, Any], where: tuple, name: str, message: str
) -> None:
    texts = run_ranks(poisoned_step, ranks, overrides, where, name)
    assert len(set(texts)) == 1, texts
    assert texts[0].startswith("iteration 1: the loss is") and message.format(name) in texts[0], texts[0]
    if not where[2]:
        assert name in texts[0], texts[0]
    assert "train.on_nonfinite=skip" in texts[0]


def skipping(overrides: dict[str, Any], passing: bool) -> tuple[list[float], str]:
    """Return losses of steps whose second has NaN, and the error if NaN persists."""
    run, batches = start(tiny_config(train__on_nonfinite="skip", **overrides))
    losses = [train_step(run, next(batches).microbatches).loss]
    end = poison(run, 0, "decoder.layers.1.mlp.linear_fc1", 1, True)
    skipped = train_step(run, next(batches).microbatches)
    assert skipped.skipped and skipped.grad_norm is None and math.isfinite(skipped.loss)
    if passing:
        end()
        return losses + [train_step(run, next(batches).microbatches).loss for _ in range(2)], ""
    for step in range(MAX_SKIPPED_IN_A_ROW):
        try:
            assert train_step(run, next(batches).microbatches).skipped
        except RuntimeFault as fault:
            assert step == MAX_SKIPPED_IN_A_ROW - 2
            return losses, str(fault)
    return losses, "no fault"


def without_the_second(overrides: dict[str, Any]) -> list[float]:
    run, batches = start(tiny_config(**overrides))
    losses = [train_step(run, next(batches).microbatches).loss]
    next(batches)
    return losses + [train_step(run, next(batches).microbatches).loss for _ in range(2)]


def test_a_skipped_step_equals_training_without_its_batch() -> None:
    losses, _ = run_ranks(skipping, 2, CP2, True)[0]
    assert losses == run_ranks(without_the_second, 2, CP2)[0]


def test_too_many_skipped_steps_end_the_run() -> None:
    _, text = run_ranks(skipping, 2, CP2, False)[0]
    assert f"{MAX_SKIPPED_IN_A_ROW} steps in a row were skipped" in text, text


def damaged_parameter() -> str:
    run, batches = start(tiny_config(train__on_nonfinite="skip", **CP2))
    if os.environ["RANK"] == "1":
        parameters = dict(run.model[0].module.named_parameters())
        with torch.no_grad():
            parameters["decoder.layers.2.mlp.linear_fc2.weight"][0, 0] = math.nan
    try:
        train_step(run, next(batches).microbatches)
    except RuntimeFault as fault:
        return str(fault)
    return "no fault"


def test_damaged_parameters_are_not_skipped_over() -> None:
    for text in run_ranks(damaged_parameter, 2):
        assert "the parameters are not finite: decoder.layers.2.mlp.linear_fc2.weight on rank 1" in text


def passing_fault() -> str:
    """Produce a NaN that does not come again, as bad hardware does."""
    run, batches = start(tiny_config(**CP2))
    module = dict(run.model[0].module.named_modules())["decoder.layers.1.mlp"]

    def once(module: Any, inputs: Any, output: Any) -> Any:
        handle.remove()
        return (output[0] * math.nan, output[1])

    handle = module.register_forward_hook(once)
    try:
        train_step(run, next(batches).microbatches)
    except RuntimeFault as fault:
        return str(fault)
    return "no fault"


def test_a_fault_that_does_not_repeat_is_reported_as_such() -> None:
    assert all("a second pass over the same microbatches" in text for text in run_ranks(passing_fault, 2))


def masked_losses(overrides: dict[str, Any], last_unmasked: int) -> list[tuple[float, float]]:
    """Train on samples whose tokens from ``last_unmasked`` on are masked.

    The masks are set before slicing, so they are equal in every layout.
    """
    from megatron_cp.data.batch_iterator import BatchIterator

    original = BatchIterator.__next__

    def masked(self: Any) -> Any:
        batch = original(self)
        batch["loss_mask"] = batch["loss_mask"].clone()
        batch["loss_mask"][:, last_unmasked:] = 0
        return batch

    BatchIterator.__next__ = masked
    return train_losses({"dataset__mock_masked_fraction": 0.0} | overrides, 3)


@pytest.mark.parametrize("unmasked", [8, 1, 0], ids=["one slice", "one token", "none"])
def test_ranks_without_an_unmasked_token_are_exact(unmasked: int) -> None:
    """Ranks 2 and 3 have none of the first eight tokens.

    Of 32 tokens on four ranks, rank 0 holds the first four and the last four, rank 1 the next.
    """
    one = run_ranks(masked_losses, 1, {}, unmasked)[0]
    four = run_ranks(masked_losses, 4, CP4, unmasked)[0]
    if not unmasked:
        assert [loss for loss, _ in one] == [loss for loss, _ in four] == [0.0] * 3
        assert all(math.isfinite(norm) for _, norm in one + four)
    else:
        worst_loss, worst_norm = worst_difference(one, four)
        assert worst_loss < 2e-6 and worst_norm < 2e-6


def test_a_step_without_a_loss_changes_no_weights() -> None:
    """Not even a router may change, whose losses would be divided by zero tokens."""
    router = {"model__num_moe_experts": 4, "model__moe_ffn_hidden_size": 48, "model__moe_aux_loss_coeff": 0.1}

    def trained(unmasked: int) -> tuple[bool, float]:
        config = tiny_config(**router, dataset__mock_masked_fraction=0.0, scheduler__lr_warmup_iters=0)
        run, batches = start(config)
        before = [p.detach().clone() for p in run.model[0].parameters()]
        microbatches = next(batches).microbatches
        for batch in microbatches:
            batch["loss_mask"][:, unmasked:] = 0
        result = train_step(run, microbatches)
        moved = max(float((p - q).abs().max()) for p, q in zip(run.model[0].parameters(), before, strict=True))
        run.close()
        return result.skipped, moved

    assert run_ranks(trained, 1, 0)[0] == (True, 0.0)
    skipped, moved = run_ranks(trained, 1, 1)[0]
    assert not skipped and moved > 0


@pytest.mark.parametrize(("added", "total", "found"), [(True, 1.0, 0), (True, math.nan, 1), (False, 1.0, 1)])
def test_a_gradient_that_a_layer_has_added_itself_is_looked_at_in_the_sum(
    added: bool, total: float, found: int
) -> None:
    """Transformer Engine hands on a placeholder, which may hold anything."""
    run: Any = SimpleNamespace(all_ranks=SimpleNamespace(rank=lambda: 0), groups=SimpleNamespace(pp=None))
    run.groups.pp = SimpleNamespace(size=lambda: 1, rank=lambda: 0)
    weight = SimpleNamespace(grad_added_to_main_grad=added, main_grad=torch.full((2,), total))
    seen: list[NonFiniteEvent] = []
    _ChunkWatch(run, 0, seen).weight("output_layer.weight", weight, torch.full((2,), math.nan))
    assert [sighting.where for sighting in seen] == ["nan in the gradient of output_layer.weight"] * found


def test_spikes_are_distinguished_from_noise_and_trends() -> None:
    torch.manual_seed(0)
    noise = torch.randn(2000).tolist()
    falling = SpikeWatch(10.0)
    assert not any(falling.is_spike(10 * math.exp(-i / 500) + 0.05 * noise[i]) for i in range(2000))
    watch = SpikeWatch(10.0)
    assert [i for i in range(300) if watch.is_spike(3 + 0.05 * noise[i] + 2 * (i in (150, 151, 250)))] == [
        150,
        151,
        250,
    ]
    assert watch.usual == pytest.approx(3, abs=0.05)
    constant = SpikeWatch(10.0)
    assert not any(constant.is_spike(2.0 + 0.001 * (i % 50 == 49)) for i in range(300))
    assert not any(SpikeWatch(None).is_spike(loss) for loss in [1.0] * 50 + [99.0])
    assert not any(SpikeWatch(10.0).is_spike(loss) for loss in (1.0, 99.0, math.nan)), "too few to judge by"
