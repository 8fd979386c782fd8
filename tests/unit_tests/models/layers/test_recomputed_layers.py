"""Recomputed layers that hold less have the same bits.

Their outputs are freed, and their inputs are in host memory. The bytes that leave the device are counted.
``tests/doubles/pretend_gpu/offload.py`` checks the copies of a GPU.
"""

from __future__ import annotations

import hashlib
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest
import torch
from megatron.core import recompute

from megatron_cp.data.text.tokenizers import build_tokenizer
from megatron_cp.estimate.memory import GPU, stage_estimate
from megatron_cp.models import builder
from megatron_cp.models.layers.recomputed_layers import free_outputs
from megatron_cp.rules import check
from megatron_cp.training.open_steps import open_steps
from megatron_cp.training.setup import Run, setup
from megatron_cp.training.step import train_step
from tests.memory_runs import Counted, job_of
from tests.packed_runs import BALANCED, DYNAMIC, lengths_file, packed_config, train_dataset
from tests.random_layouts import random_layouts
from tests.ranks import run_ranks
from tests.training_runs import losses_of, start, tiny_config
from tests.unit_tests.models.hybrids import FURTHER
from tests.unit_tests.training.layouts.cases import CP2, PP2, SP, TP2, VPP2
from tests.unit_tests.training.layouts.test_model_variants import MOE

FULL: dict[str, Any] = {
    "model__recompute_granularity": "full",
    "model__recompute_method": "uniform",
    "model__recompute_num_layers": 1,
}
BLOCK = FULL | {"model__recompute_method": "block", "model__recompute_num_layers": 3}
OFFLOAD = {"model__offload_layer_inputs": True}
INPUT = 32 * 64 * 4  # bytes of a layer's input: tokens, hidden size, float32

Seen = tuple[list[tuple[float, ...]], str, int]  # losses of each step, digest of the gradients, peak host bytes


def seen_in(run: Run, steps: Any) -> Seen:
    losses, gradients = [], hashlib.sha256()
    for _ in range(2):
        losses.append(losses_of(train_step(run, next(steps).microbatches)))
        for chunk in run.model:
            for buffer in [*chunk.buffers, *chunk.expert_parallel_buffers]:
                gradients.update(buffer.grad_data.numpy().tobytes())
        assert run.host_memory is None or run.host_memory.bytes == 0, "inputs are left on the host"
        run.progress.iteration += 1
    peak = run.host_memory.peak_bytes if run.host_memory else 0
    run.close()
    return losses, gradients.hexdigest(), peak


def of_samples(overrides: dict[str, Any]) -> Seen:
    return seen_in(*start(tiny_config(**overrides)))


def of_packs(lengths: str, overrides: dict[str, Any]) -> Seen:
    fewer = {"model__dynamic_context_parallel_calibration_iters": 0, "train__global_batch_size": 6}
    config = packed_config(lengths, fewer | overrides)
    run = setup(config, build_tokenizer(config.tokenizer).vocab_size)
    with closing(open_steps(run, train_dataset(config), 0, training=True)) as steps:
        return seen_in(run, steps)


# Ranks, settings, and the inputs that each stage has on the host at its peak. The input of the model's last layer
# stays, and so does what another stage has sent.
CASES: dict[str, tuple[int, dict[str, Any], list[int]]] = {
    "one rank": (1, FULL, [3]),
    "groups of layers": (1, FULL | {"model__recompute_num_layers": 2}, [1]),
    "some layers": (1, BLOCK, [3]),
    "multi-token prediction": (1, FULL | {"model__mtp_num_layers": 1}, [3]),
    "hybrid, two tokens further": (1, FULL | FURTHER, [3]),
    "experts": (1, FULL | MOE, [3]),
    "stages": (2, FULL | PP2, [2 * 2, 0]),
    "interleaved stages": (2, FULL | PP2 | VPP2 | {"model__num_layers": 8}, [4 * 2 + 1, 3]),
    "sequence parallel": (2, FULL | TP2 | SP, [3, 3]),
    "distributed inputs": (2, FULL | TP2 | {"model__distribute_saved_activations": True}, [3, 3]),
}
FAST = ("some layers", "hybrid, two tokens further", "interleaved stages")


def slow_but(names: tuple[str, ...], all_names: Any) -> list[Any]:
    return [name if name in names else pytest.param(name, marks=pytest.mark.slow) for name in all_names]


@pytest.mark.parametrize("name", slow_but(FAST, CASES))
def test_the_same_bits_with_outputs_freed(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    ranks, overrides, _ = CASES[name]
    freed = run_ranks(of_samples, ranks, overrides)
    monkeypatch.setattr(builder, "free_outputs", lambda block: None)
    assert run_ranks(of_samples, ranks, overrides) == freed


class Block(torch.nn.Module):
    """Two layers as megatron-core recomputes them."""

    def forward(self, states: torch.Tensor) -> torch.Tensor:
        for _ in range(2):
            states, _ = recompute.tensor_parallel.checkpoint(lambda x: (x.sin(), None), False, states)
        return states


def test_the_gradient_of_an_output_is_freed() -> None:
    """Freed outputs are counted in tests/unit_tests/estimate/test_memory.py."""
    block, states, gradient = Block(), torch.linspace(0, 1, 100, requires_grad=True), torch.linspace(1, 2, 100)
    free_outputs(block)
    held = gradient.clone()
    output = block(states)
    assert torch.equal(output, states.sin().sin())
    output.backward(held)
    assert states.grad is not None
    torch.testing.assert_close(states.grad, gradient * states.sin().cos() * states.cos())
    assert held.shape == gradient.shape and held.untyped_storage().nbytes() == 4


@pytest.mark.parametrize("name", slow_but(FAST, CASES))
def test_the_same_bits_with_inputs_on_the_host(name: str) -> None:
    ranks, overrides, inputs = CASES[name]
    without, offloaded = run_ranks(of_samples, ranks, overrides), run_ranks(of_samples, ranks, overrides | OFFLOAD)
    assert [each[:2] for each in offloaded] == [each[:2] for each in without]
    each = INPUT // overrides.get("model__tensor_model_parallel_size", 1)
    assert [peak for *_, peak in offloaded] == [count * each for count in inputs]
    assert all(peak == 0 for *_, peak in without)


@pytest.mark.parametrize("name", CASES)
def test_the_host_holds_what_the_memory_model_predicts(name: str) -> None:
    ranks, overrides, inputs = CASES[name]
    job = job_of(tiny_config(**overrides | OFFLOAD), ranks, Counted(0, (), 32, 4, 1.0))
    stages = job.model.pipeline_model_parallel_size
    each = INPUT // job.model.tensor_model_parallel_size
    predicted = [stage_estimate(job, stage, GPU).host for stage in range(stages)]
    assert predicted == [count * each for count in inputs[:stages]]


@pytest.mark.parametrize(
    ("ranks", "overrides"),
    [
        (4, DYNAMIC | PP2 | {"model__max_seqlen_per_dp_cp_rank": 64}),
        pytest.param(2, DYNAMIC, marks=pytest.mark.slow),
        pytest.param(2, BALANCED | CP2, marks=pytest.mark.slow),
    ],
    ids=["dynamic, stages", "dynamic", "static"],
)
def test_the_same_bits_of_packs(ranks: int, overrides: dict[str, Any], tmp_path: Path) -> None:
    lengths = lengths_file(tmp_path)
    without, offloaded = (run_ranks(of_packs, ranks, lengths, overrides | FULL | more) for more in ({}, OFFLOAD))
    assert [each[:2] for each in offloaded] == [each[:2] for each in without]
    assert max(peak for *_, peak in offloaded) > 0


@pytest.mark.slow
def test_the_same_bits_of_random_layouts() -> None:
    layouts, compared = random_layouts(seed=5), 0
    while compared < 8:
        ranks, settings = next(layouts)
        settings |= FULL | {"model__recompute_modules": None}
        if any(each.severity == "error" for each in check(tiny_config(**settings), ranks, environment="cpu")):
            continue
        without, offloaded = (run_ranks(of_samples, ranks, settings | more) for more in ({}, OFFLOAD))
        assert [each[:2] for each in offloaded] == [each[:2] for each in without], settings
        compared += 1


@pytest.mark.parametrize(
    ("settings", "fix"),
    [
        (OFFLOAD, "model.recompute_granularity=full"),
        ({"model__cpu_offloading": True}, "model.cpu_offloading=false model.offload_layer_inputs=true"),
    ],
)
def test_rules_name_what_offloads(settings: dict[str, Any], fix: str) -> None:
    [found] = [each for each in check(tiny_config(**settings), 1, environment="cpu") if each.severity == "error"]
    assert found.fix.startswith(fix), found.fix
