"""Run training steps as on a GPU: the host's waits, and what is refused.

``tests/unit_tests/doubles/test_pretend_gpu.py`` runs this file in a process with a pretended GPU.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Container, Iterable
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from megatron.core.models.common.embeddings import rope_utils
from megatron.core.pipeline_parallel.schedules import custom_backward

from megatron_cp.config.run_config import LoggerConfig
from megatron_cp.data.samples.datasets import build_datasets
from megatron_cp.data.text.tokenizers import build_tokenizer
from megatron_cp.dynamic_cp.runtime.iterator import StepPlan
from megatron_cp.training.loop import train
from megatron_cp.training.monitor.metrics import Reporter
from megatron_cp.training.monitor.phases import Interval
from megatron_cp.training.monitor.step_metrics import StepMetrics
from megatron_cp.training.open_steps import open_steps
from megatron_cp.training.setup import setup
from megatron_cp.training.signals import SignalWatch
from megatron_cp.training.step import train_step
from tests.doubles.pretend_gpu import placement
from tests.packed_runs import BALANCED, DYNAMIC, lengths_file, packed_config, train_dataset
from tests.ranks import RanksFailed, run_ranks
from tests.training_runs import start, tiny_config
from tests.unit_tests.models.hybrids import FURTHER, HYBRID_EXPERTS
from tests.unit_tests.models.layers.test_recomputed_layers import FULL, OFFLOAD
from tests.unit_tests.training.layouts.cases import CP2, CP4, HCP, PP2, SP, TP2, VPP2
from tests.unit_tests.training.layouts.test_model_variants import MLA, MOE, OVERLAPPED

pytestmark = pytest.mark.gpu  # chosen with those of other files
BF16 = {"mixed_precision__fp32": False, "mixed_precision__bf16": True}
MTP = {"model__mtp_num_layers": 1}
TWO = {"model__num_layers": 2}
# A step waits for its device this often, for any number of microbatches and layers: for values that ranks exchange
# before it, and at its end for losses, gradient norm, finiteness and the other values that ranks exchange.
OF_A_STEP = {"collectives.py copy to the host": 1, "step.py copy to the host": 1}

# Upstream's: experts' all-to-all, which needs its sizes.
SPREAD = MOE | {"model__expert_model_parallel_size": 2}
DEPTHS = {"forward_backward.py tolist": 1}  # how many tokens each depth of multi-token prediction has
Case = tuple[int, dict[str, Any], dict[str, int]]  # ranks, settings, what else they wait for
DENSE: dict[str, Case] = {
    "hierarchy": (4, TWO | CP4 | HCP, {}),
    "tp2 sp cp2": (4, TWO | TP2 | SP | CP2 | {"train__micro_batch_size": 2}, {}),
    "pp2 vpp2 cp2": (4, PP2 | VPP2 | CP2, {}),
    "pp2": (2, PP2, {}),
    "pp2, layer inputs on the host": (2, PP2 | FULL | OFFLOAD, {}),
    "experts": (2, CP2 | MOE, {"synchronize an event": 16}),
    "experts, spread": (2, SPREAD, {"synchronize an event": 8}),
    "overlapped": (2, OVERLAPPED, {}),
    "latent": (2, CP2 | MLA, {}),
    "hybrid, two tokens further": (2, CP2 | FURTHER, DEPTHS),
    "hybrid with experts": (2, CP2 | HYBRID_EXPERTS, {"synchronize an event": 8}),
    "multi-token prediction": (2, TWO | CP2 | MTP, DEPTHS),
}
PACKED: dict[str, Case] = {
    "dynamic": (4, TWO | DYNAMIC, {}),
    "static": (2, BALANCED | CP2, {}),
    "static, all-to-all": (2, BALANCED | CP2 | {"model__cp_comm_type": "a2a"}, {}),
    "dynamic, multi-token prediction, all-to-all": (4, DYNAMIC | MTP | {"model__cp_comm_type": "a2a"}, DEPTHS),
    "dynamic, gathered": (4, DYNAMIC | {"model__cp_comm_type": "all_gather"}, {}),
    "dynamic hybrid, two tokens further": (4, DYNAMIC | FURTHER, DEPTHS),
    "dynamic, pp2 vpp2": (4, DYNAMIC | PP2 | VPP2 | {"model__max_seqlen_per_dp_cp_rank": 64}, {}),
}

# Variants that other cases or the loop cover; for the slow run.
LIKE_OTHERS = {"pp2 vpp2 cp2", "overlapped", "static", "latent", "hybrid, two tokens further", "hybrid with experts"}
LIKE_OTHERS |= {
    "dynamic, multi-token prediction, all-to-all",
    "dynamic, gathered",
    "static, all-to-all",
    "dynamic",
    "pp2",
    "experts",
}


def some(names: Iterable[str], slow: Container[str] = LIKE_OTHERS) -> list[Any]:
    """Return parameters of these names."""
    return [pytest.param(name, marks=pytest.mark.slow) if name in slow else name for name in names]


def without_places(waits: dict[str, int]) -> dict[str, int]:
    """Count by file of ours (or none) and kind.

    Upstream's files and all line numbers may change.
    """
    found: dict[str, int] = {}
    for entry, count in waits.items():
        place, kind = entry.split(" ", 1)
        if "te_on_cpu" in place:  # the kernels' stand-ins read their arguments
            continue
        ours = re.search(r"megatron_cp/.*?([a-z_]+\.py)", place)
        name = f"{ours[1]} {kind}" if ours else kind
        found[name] = found.get(name, 0) + count
    return found


def waits_of_a_dense_step(overrides: dict[str, Any]) -> dict[str, int]:
    run, batches = start(tiny_config(**overrides))
    train_step(run, next(batches).microbatches)
    placement.waits.clear()
    train_step(run, next(batches).microbatches)
    run.close()
    return without_places(placement.waits)


def waits_of_a_packed_step(lengths: str, overrides: dict[str, Any]) -> dict[str, int]:
    fewer = {"model__dynamic_context_parallel_calibration_iters": 0, "train__global_batch_size": 6}
    config = packed_config(lengths, fewer | overrides)
    run = setup(config, build_tokenizer(config.tokenizer).vocab_size)
    with closing(open_steps(run, train_dataset(config), 0, training=True)) as steps:
        for _ in range(2):
            placement.waits.clear()
            train_step(run, next(steps).microbatches)
            run.progress.iteration += 1
            steps.observe()
    run.close()
    return without_places(placement.waits)


@pytest.mark.parametrize("case", some(DENSE))
def test_a_step_waits_for_no_layer_and_no_microbatch(case: str) -> None:
    ranks, overrides, more = DENSE[case]
    for waits in run_ranks(waits_of_a_dense_step, ranks, BF16 | overrides):
        assert waits == OF_A_STEP | more


def test_a_single_rank_waits_at_the_end_of_a_step_only() -> None:
    """It has no other rank to compare its samples with."""
    assert run_ranks(waits_of_a_dense_step, 1, BF16 | TWO) == [{"step.py copy to the host": 1}]


@pytest.mark.parametrize("case", some(PACKED))
def test_a_packed_step_waits_for_no_layer_and_no_microbatch(case: str, tmp_path: Path) -> None:
    ranks, overrides, more = PACKED[case]
    for waits in run_ranks(waits_of_a_packed_step, ranks, lengths_file(tmp_path), BF16 | overrides):
        assert waits == OF_A_STEP | more


class Enough(Exception):
    """Raised to end a run."""


class CountingReporter(Reporter):
    """Record how often the host waited since the last report.

    It works as the first rank's reporter does.
    """

    def __init__(self, settings: LoggerConfig, train_iters: int) -> None:
        super().__init__(settings, train_iters, Path(), writes=False)
        self.writes = True
        self.waits: list[dict[str, int]] = []
        self.timers: list[set[str]] = []

    def schedule(self, iteration: int, plan: StepPlan) -> None:
        """Write nothing."""

    def step(self, metrics: StepMetrics, interval: Interval | None = None) -> None:
        assert metrics.grad_norm and interval is not None
        self.waits.append(without_places(placement.waits))
        self.timers.append(set(interval.seconds))
        placement.waits.clear()
        if len(self.waits) == 3:
            raise Enough


def waits_of_the_loop(folder: str, lengths: str | None, overrides: dict[str, Any]) -> list[dict[str, int]]:
    """Return the waits of each iteration but the first, including the loop itself."""
    more = overrides | {"logger__log_interval": 1}
    config = (
        packed_config(lengths, more | {"model__dynamic_context_parallel_calibration_iters": 0})
        if lengths
        else (tiny_config(**more))
    )
    tokenizer = build_tokenizer(config.tokenizer)
    datasets = build_datasets(config.dataset, tokenizer, config.train.train_iters * config.train.global_batch_size)
    run = setup(config, tokenizer.vocab_size)
    reporter = CountingReporter(config.logger, config.train.train_iters)
    with closing(SignalWatch(False)) as watch, pytest.raises(Enough):
        train(run, datasets, Path(folder), reporter, watch)
    run.close()
    assert {"data", "forward_backward", "optimizer", "other"} <= reporter.timers[-1]
    return reporter.waits[1:]


@pytest.mark.parametrize(
    ("overrides", "packed", "expected"),
    [
        (TWO | CP2 | OVERLAPPED, False, OF_A_STEP),
        (PP2 | VPP2, False, OF_A_STEP),
        (TWO | BALANCED | CP2, True, OF_A_STEP),
    ],
    ids=["cp2", "pp2 vpp2", "packed"],
)
def test_the_loop_adds_no_waits(
    overrides: dict[str, Any], packed: bool, expected: dict[str, int], tmp_path: Path
) -> None:
    """Neither the log of every step nor the check for a stop may wait."""
    lengths = lengths_file(tmp_path) if packed else None
    for waits in run_ranks(waits_of_the_loop, 2, str(tmp_path / "run"), lengths, BF16 | overrides):
        assert waits == [expected] * 2


def with_a_question_in_each_layer(overrides: dict[str, Any]) -> dict[str, int]:
    rotate = rope_utils._apply_rotary_pos_emb_bshd

    def asking(t: torch.Tensor, *args: Any, **kwargs: Any) -> torch.Tensor:
        assert bool(t.isfinite().all())
        return rotate(t, *args, **kwargs)

    rope_utils._apply_rotary_pos_emb_bshd = asking
    return waits_of_a_dense_step(overrides)


def test_a_wait_in_each_layer_is_detected() -> None:
    """The tests above must be able to fail."""
    [waits] = run_ranks(with_a_question_in_each_layer, 1, BF16 | {"model__apply_rope_fusion": False})
    assert waits["_local_scalar_dense"] == 4 * 2 * 4  # queries and keys of four layers, four microbatches


def copies() -> list[int]:
    """Return how often the host waits for each copy."""
    x, found = torch.arange(8.0), []
    pinned = x.pin_memory()
    selected = pinned.index_select(0, torch.arange(6))
    for sent in (x, x[:2], pinned, pinned[2:], selected, torch.zeros(8, pin_memory=True)):
        placement.waits.clear()
        sent.to("cuda", non_blocking=True)
        torch.empty(len(sent), device="cuda").copy_(sent, non_blocking=True)
        found.append(sum(placement.waits.values()))
    assert x.cuda().to("cpu", non_blocking=True).is_pinned() and not x.cuda().cpu().is_pinned()
    return found


def test_a_copy_of_unpinned_memory_is_detected() -> None:
    assert run_ranks(copies, 1) == [[2, 0, 0, 0, 2, 0]]


def of_two_places() -> None:
    torch.ones(3, device="cuda") * torch.ones(3)


class Wrong(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
        return x * 2

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> torch.Tensor:
        return grad * torch.full((3,), 2.0)


def in_the_backward_pass() -> None:
    Wrong.apply(torch.ones(3, device="cuda", requires_grad=True)).sum().backward()


def in_a_pipelines_backward_pass() -> None:
    custom_backward(Wrong.apply(torch.ones(1, device="cuda", requires_grad=True)), torch.ones(1, device="cuda"))


def sent_from_the_host() -> None:
    dist.all_reduce(torch.ones(3))


def read_as_numpy() -> None:
    torch.ones(3, device="cuda").numpy()


def of_a_wide_head() -> None:
    query = torch.zeros(1, 8, 2, 12, dtype=torch.bfloat16, device="cuda")
    torch.ops.aten._flash_attention_forward(query, query, query, None, None, 8, 8, 0.0, True, False)


@pytest.mark.parametrize(
    ("wrong", "message"),
    [
        (of_two_places, r"same device: mul of \(3,\) on cuda, \(3,\) on cpu"),
        (in_the_backward_pass, r"same device: mul of \(3,\) on cuda, \(3,\) on cpu"),
        (in_a_pipelines_backward_pass, r"same device: mul of \(1,\) on cuda, \(3,\) on cpu"),
        (sent_from_the_host, r"NCCL was given a tensor in host memory: allreduce_ of \(3,\) on cpu"),
        (read_as_numpy, "can't convert cuda:0 device type tensor to numpy"),
        (of_a_wide_head, "a head of 12 elements"),
    ],
)
def test_tensors_of_two_places_are_refused(wrong: Callable, message: str) -> None:
    with pytest.raises(RanksFailed, match=message):
        run_ranks(wrong, 1)


def places() -> list[str]:
    model = torch.nn.Linear(3, 3).to("cuda")
    host = torch.arange(3.0)
    out = model(host.cuda())
    out.sum().backward()
    assert model.weight.grad is not None
    moved = [out, out.cpu(), out.to(host), host.to(out.device, torch.bfloat16), out[torch.tensor([0])]]
    made = [torch.zeros(3), torch.zeros(3, device=0), torch.zeros_like(out), out.new_ones(2), torch.tensor([1, 2])]
    return [x.device.type for x in (model.weight, model.weight.grad, *moved, *made)]


def test_tensors_report_their_device() -> None:
    [found] = run_ranks(places, 1)
    assert found == [*["cuda"] * 3, "cpu", "cpu", "cuda", "cuda", "cpu", "cuda", "cuda", "cuda", "cpu"]
