"""Properties of any estimate of a step's time, and values by hand."""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Any

import pytest

from megatron_cp.attention.transports.registry import TRANSPORTS
from megatron_cp.config.model_config import ModelConfig
from megatron_cp.config.sections.distributed import DistributedDataParallelConfig
from megatron_cp.config.sections.optimization import OptimizerConfig
from megatron_cp.estimate.device import Device, load_device
from megatron_cp.estimate.fit import fit_device, scaled
from megatron_cp.estimate.job import Job, TimeEstimate
from megatron_cp.estimate.links import Links
from megatron_cp.estimate.time import time_estimate
from megatron_cp.parallel.layout import RankLayout

H100 = load_device("h100")
EXPERTS = {"num_moe_experts": 16, "moe_router_topk": 2, "moe_ffn_hidden_size": 1024}
LATENT = {"multi_latent_attention": True, "q_lora_rank": 512, "kv_lora_rank": 256}
HYBRID = {"architecture": "hybrid", "hybrid_layer_pattern": "M*-M*-M-", "num_layers": 8}


def job(world: int = 8, batch: int = 32, gemm: Any = "bf16", layout: dict[str, Any] | None = None, **model: Any) -> Job:
    sizes = layout or {}
    names = {
        "tp": "tensor_model_parallel_size",
        "cp": "context_parallel_size",
        "pp": "pipeline_model_parallel_size",
        "ep": "expert_model_parallel_size",
    }
    settings: dict[str, Any] = {
        "num_layers": 8,
        "hidden_size": 4096,
        "num_attention_heads": 32,
        "num_query_groups": 8,
        "ffn_hidden_size": 14336,
        "seq_length": 8192,
        "sequence_parallel": sizes.get("tp", 1) > 1,
        "expert_tensor_parallel_size": 1,
        **{names[name]: size for name, size in sizes.items() if name in names},
        **model,
    }
    config = ModelConfig(**settings)
    return Job(
        config, OptimizerConfig(), DistributedDataParallelConfig(), RankLayout(world, **sizes), 1, batch, 32000, gemm
    )


def seconds(asked: Job, device: Device = H100, per_node: int | None = None) -> float:
    return time_estimate(asked, device, per_node).seconds


def of_kind(asked: Job, kind: str) -> float:
    return time_estimate(asked, H100).kinds[kind]


@pytest.mark.parametrize("model", [{}, EXPERTS, LATENT, HYBRID], ids=["dense", "experts", "latent", "hybrid"])
@pytest.mark.parametrize("sizes", [{}, {"tp": 4}, {"cp": 4}, {"pp": 2}, {"tp": 2, "cp": 2, "pp": 2}], ids=str)
def test_kinds_are_the_documented_ones_and_add_up(model: dict[str, Any], sizes: dict[str, int]) -> None:
    if model is EXPERTS:
        sizes = {**sizes, "ep": 2}
    if model is HYBRID and "pp" in sizes:
        model = {**HYBRID, "hybrid_layer_pattern": "M*-M|*-M-"}
    found = time_estimate(job(layout=sizes, **model), H100)
    assert set(found.kinds) == {
        *("matrix products", "attention", "elementwise", "recomputation", "bubble", "optimizer", "host"),
        *(f"exposed {group}" for group in ("tp", "cp", "ep", "dp", "pp", "offload")),
    }
    assert all(value >= 0 for value in found.kinds.values())
    assert found.seconds == pytest.approx(sum(found.kinds.values()))
    assert isinstance(found, TimeEstimate) and found.model_flops > 0


def test_a_dense_step_takes_its_operations_at_the_devices_rate() -> None:
    """A plain step must take operations over rates and bytes over bandwidth.

    There are no messages, no bubble and no host.
    """
    ideal = replace(H100, memory_bandwidth=1e30, launch_seconds=0, kernel_seconds=0, step_seconds=0, attention_half=0)
    asked = job(world=1, batch=4)
    layer = 4096 * (4096 + 2 * 1024) + 4096 * 4096 + 3 * 4096 * 14336
    products = 4 * 8192 * 6 * (8 * layer + 4096 * 32000)
    pairs = 4 * 8 * 32 * 8192 * 8193 / 2 * 4 * 128
    expected = products / H100.matmul_rate("bf16")
    expected += pairs / ideal.attention_flops[0] + 2.5 * pairs / ideal.attention_flops[1]
    assert seconds(asked, ideal) == pytest.approx(expected, rel=1e-3)


@pytest.mark.parametrize(
    ("less", "more"),
    [
        (job(), job(seq_length=16384)),
        (job(), job(num_layers=16)),
        (job(), job(batch=64)),
        (job(gemm="fp8"), job()),
        (job(), job(recompute_granularity="full", recompute_method="uniform", recompute_num_layers=1)),
        (job(recompute_granularity="selective"), job(recompute_granularity="full")),
        (job(layout={"pp": 4}, virtual_pipeline_model_parallel_size=2), job(layout={"pp": 4})),
        (job(window_size=[1023, 0]), job()),
        (job(batch=64, layout={"pp": 2}, world=16), job(batch=64, layout={"pp": 2})),
    ],
    ids=["length", "layers", "batch", "format", "recomputed", "more recomputed", "interleaved", "window", "GPUs"],
)
def test_more_work_takes_longer(less: Job, more: Job) -> None:
    assert seconds(less) < seconds(more)


def test_block_recomputation_repeats_its_layers_only() -> None:
    whole, half = (
        of_kind(job(recompute_granularity="full", recompute_method="block", recompute_num_layers=n), "recomputation")
        for n in (8, 4)
    )
    assert half == pytest.approx(whole / 2)


def test_tiles_repeat_an_mlp_once_also_in_recomputed_layers() -> None:
    long = {"seq_length": 65536}
    tiles = long | {"mlp_chunk_size": 16384}
    full = {"recompute_granularity": "full", "recompute_method": "uniform", "recompute_num_layers": 1}
    again = {"recompute_granularity": "selective", "recompute_modules": ["mlp"]}
    assert seconds(job(**tiles)) == pytest.approx(seconds(job(**long, **again)), rel=0.01)
    assert seconds(job(**tiles, **full)) == pytest.approx(seconds(job(**long, **full)), rel=0.01)
    pairs = full | {"recompute_num_layers": 2}
    third = seconds(job(**tiles, **pairs)) - seconds(job(**tiles, **full))  # half of the layers compute it once more
    assert third == pytest.approx((seconds(job(**tiles)) - seconds(job(**long))) / 2, rel=0.01)
    # Each tile reads all weights: small ones take longer.
    assert seconds(job(**long, mlp_chunk_size=1024, **full)) > 1.05 * seconds(job(**tiles, **full))


def test_bubble_shrinks_with_microbatches_and_virtual_stages() -> None:
    def share(batch: int, virtual: int | None = None) -> float:
        found = time_estimate(job(batch=batch, layout={"pp": 4}, virtual_pipeline_model_parallel_size=virtual), H100)
        return found.kinds["bubble"] / found.seconds

    assert share(64) < share(16)
    assert share(16, 2) < share(16)


@pytest.mark.parametrize("transport", TRANSPORTS)
def test_context_parallel_messages_take_longer_across_nodes(transport: str) -> None:
    levels = {"hierarchical": (2, 4)} if TRANSPORTS[transport].hierarchical else {}
    sizes = {"cp": 8, **levels}
    asked = job(layout=sizes, cp_comm_type=transport, hierarchical_context_parallel_sizes=[2, 4] if levels else None)
    slow = replace(H100, overlap={**H100.overlap, "cp": 0.0})
    inside, across = (time_estimate(asked, slow, per_node).kinds["exposed cp"] for per_node in (8, 2))
    assert 0 < inside < across


def test_a_ring_hides_behind_attention_and_an_all_to_all_does_not() -> None:
    long = {"layout": {"cp": 8}, "seq_length": 262144, "batch": 2}
    assert of_kind(job(**long, cp_comm_type="p2p"), "exposed cp") < of_kind(
        job(**long, cp_comm_type="a2a"), "exposed cp"
    )


def test_gradients_hide_behind_the_last_backward_pass() -> None:
    exposed = job()
    hidden = replace(exposed, ddp=DistributedDataParallelConfig(overlap_grad_reduce=True, overlap_param_gather=True))
    assert of_kind(hidden, "exposed dp") < of_kind(exposed, "exposed dp")


def test_copies_of_inputs_hide_behind_layers_unless_the_link_is_slow() -> None:
    recomputed: dict[str, Any] = dict(recompute_granularity="full", recompute_method="uniform", recompute_num_layers=1)
    kept, sent = job(**recomputed), job(**recomputed, offload_layer_inputs=True)
    slow = replace(H100, host_bandwidth=1e9)
    exposed = time_estimate(sent, slow).kinds["exposed offload"]
    assert of_kind(sent, "exposed offload") == 0 and seconds(sent) == seconds(kept)
    assert seconds(sent, slow) == pytest.approx(seconds(kept) + exposed)
    # Each of 8 layers' inputs leaves and returns, behind its layer's two passes and recomputation.
    copies = 2 * 8 * sent.microbatches * sent.tokens_per_rank * 4096 * 2 / 1e9
    assert 0 < copies - exposed < seconds(kept)


def test_the_distributed_optimizer_divides_its_work() -> None:
    shared = job()
    whole = replace(shared, optimizer=OptimizerConfig(use_distributed_optimizer=False))
    assert of_kind(shared, "optimizer") < of_kind(whole, "optimizer")


def test_short_kernels_wait_for_the_host() -> None:
    tiny = job(world=1, batch=32, hidden_size=128, ffn_hidden_size=256, num_attention_heads=4, seq_length=64)
    slower = replace(H100, launch_seconds=2 * H100.launch_seconds)
    assert seconds(tiny, slower) > 1.5 * seconds(tiny)
    big = job(world=1, batch=1)
    assert seconds(big, slower) < 1.1 * seconds(big)


def test_layers_that_do_not_divide_are_spread() -> None:
    odd = job(num_layers=9, layout={"pp": 4})
    assert seconds(job(num_layers=8, layout={"pp": 4})) < seconds(odd) < seconds(job(num_layers=12, layout={"pp": 4}))


def test_groups_that_leave_the_node_share_its_network_cards() -> None:
    links = Links(H100, 8)
    alone, four = links.gather(16, 8, 1e9), links.gather(16, 2, 1e9)
    assert alone == pytest.approx(1e9 * 15 / 16 / H100.inter_bandwidth + 4 * H100.inter_latency)
    assert four == pytest.approx(1e9 * 15 / 16 / (4 * H100.inter_bandwidth) + 4 * H100.inter_latency)
    assert links.gather(1, 1, 1e9) == links.exchange(1, 1, 1e9) == links.hop(1, 1, 1e9) == 0


def test_ranks_that_share_cores_take_turns() -> None:
    """Eight ranks on two cores compute one after another.

    They fill the gaps of their pipeline.
    """
    shared = replace(H100, cores=2)
    kinds, alone = (time_estimate(job(), device).kinds for device in (shared, H100))
    assert kinds == pytest.approx({kind: 4 * value for kind, value in alone.items()})
    kinds, alone = (time_estimate(job(layout={"pp": 4}, batch=8), device).kinds for device in (shared, H100))
    assert alone["bubble"] > 0 == kinds["bubble"]
    assert time_estimate(job(), replace(H100, cores=8)) == time_estimate(job(), H100)
    # Two ranks that wait for each other on one core each leave a gap.
    asked = job(world=2, layout={"pp": 2}, batch=2)
    kinds, alone = (time_estimate(asked, device).kinds for device in (replace(H100, cores=2), H100))
    assert kinds["bubble"] == alone["bubble"] > 0


def test_activations_of_32_bits_take_twice_the_bytes() -> None:
    for kind, sizes in (("elementwise", {"tp": 1}), ("exposed tp", {"tp": 8})):
        full, half = (of_kind(job(gemm=gemm, layout=sizes, seq_length=131072), kind) for gemm in ("fp32", "bf16"))
        assert full > 1.8 * half


def test_an_all_to_all_has_a_latency_each_way() -> None:
    slow, asked = replace(H100, intra_latency=1.0), job(layout={"cp": 8}, cp_comm_type="a2a")
    for serial, tensors in ((0.0, 1 + 1), (1.0, 3 + 1)):  # q, k, v there, output back
        messages = tensors * 2 * 8 * asked.microbatches  # forward and backward, in eight layers
        found = time_estimate(asked, replace(slow, message_serial=serial)).kinds["exposed cp"]
        assert found == pytest.approx(messages * math.log2(8), rel=0.01)


def test_a_fit_finds_the_speeds_of_a_device() -> None:
    """A run with a wrong time must not disturb the fit."""
    true = scaled(H100, [0.8, 1.2, 0.7, 1.0, 1.0, 1.0])
    jobs = [
        job(),
        job(seq_length=32768),
        job(layout={"tp": 4}),
        job(num_layers=16),
        job(hidden_size=2048),
        job(batch=64),
    ]
    measured = [seconds(asked, true) for asked in jobs]
    predict = lambda device: [seconds(asked, device) for asked in jobs]  # noqa: E731
    found = fit_device(H100, predict, [*measured[:-1], 2 * measured[-1]]).device
    asked = job(num_layers=24, seq_length=16384)
    assert seconds(asked, found) == pytest.approx(seconds(asked, true), rel=0.05)
    assert fit_device(H100, predict, measured).mean_error < 0.02


@pytest.mark.parametrize("groups", [2, 4])
def test_messages_of_groups_of_heads_hide_behind_other_groups(groups: int) -> None:
    """Not those of the first on its way there, nor of the last on its way back."""
    device = replace(H100, overlap={**H100.overlap, "cp": 1.0})

    def exposed(overlap: bool, attention: float = 1.0, count: int = groups) -> float:
        model = {"attention_head_groups": count, "overlap_head_groups": overlap, "num_query_groups": 32}
        asked = job(batch=1, layout={"cp": 8}, cp_comm_type="a2a", seq_length=2**20, **model)
        speeds = device.attention_flops[0] * attention, device.attention_flops[1] * attention
        return time_estimate(asked, replace(device, attention_flops=speeds)).kinds["exposed cp"]

    assert exposed(True) == pytest.approx(exposed(False) / groups)
    assert exposed(True, attention=1e9) == pytest.approx(exposed(False))  # nothing to hide behind
    assert exposed(True, count=1) == exposed(False, count=1)
