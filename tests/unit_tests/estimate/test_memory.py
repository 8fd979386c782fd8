"""The memory model against live tensors and published figures.

The tensors are counted in real runs. The model's stages are compared with megatron-core's.
"""

from __future__ import annotations

import time

import pytest

from benchmarks.published import Refused
from benchmarks.published_memory import predicted
from megatron_cp.config.model_config import ModelConfig
from megatron_cp.config.sections.distributed import DistributedDataParallelConfig
from megatron_cp.config.sections.optimization import OptimizerConfig
from megatron_cp.estimate.job import Job
from megatron_cp.estimate.memory import GPU, memory_estimate
from megatron_cp.estimate.memory.stages import backward_states, chunks_of_stages
from megatron_cp.parallel.layout import RankLayout
from tests.memory_runs import compare, errors
from tests.random_layouts import LATENT, random_layouts
from tests.ranks import RanksFailed

_SIZES = dict(dataset__seq_length=256, train__micro_batch_size=2)
_STAGES = dict(
    model__pipeline_model_parallel_size=2,
    model__virtual_pipeline_model_parallel_size=2,
    model__num_layers=4,
    train__micro_batch_size=1,
)
_TENSOR = dict(model__tensor_model_parallel_size=2, model__sequence_parallel=True)
_EXPERTS = dict(model__num_moe_experts=4, model__moe_ffn_hidden_size=80, model__num_layers=3)
_MAMBA = dict(
    model__architecture="hybrid",
    model__hybrid_layer_pattern="MM*-",
    model__mamba_state_dim=16,
    model__mamba_head_dim=8,
    model__mamba_num_groups=2,
)
_LATENT = LATENT | dict(
    dataset__seq_length=512,
    model__recompute_granularity="selective",
    model__recompute_modules=["core_attn"],
)
_TILES = _EXPERTS | dict(
    dataset__seq_length=512,
    model__ffn_hidden_size=512,
    model__moe_ffn_hidden_size=256,
    model__moe_shared_expert_intermediate_size=256,
    model__moe_layer_freq=2,
    model__mlp_chunk_size=64,
)
_DEPTHS = dict(
    model__mtp_num_layers=2,
    model__hidden_dropout=0.1,
    model__cross_entropy_chunk_size=64,
    model__recompute_granularity="selective",
    model__recompute_modules=["mlp"],
)
_RECOMPUTED = dict(
    model__recompute_granularity="full",
    model__recompute_method="uniform",
    model__recompute_num_layers=1,
    model__cross_entropy_chunk_size=64,
)
_GROUPS = _RECOMPUTED | dict(  # so that attention has the peak
    model__attention_head_groups=2,
    model__num_query_groups=8,
    model__ffn_hidden_size=32,
    dataset__seq_length=1024,
    train__micro_batch_size=1,
)
_OVERLAP = _GROUPS | dict(model__context_parallel_size=2, model__cp_comm_type="a2a", model__overlap_head_groups=True)
LAYOUTS = {
    "dropout and sandwich norms": (1, dict(model__hidden_dropout=0.1, model__sandwich_norm=True)),
    "sequence parallel, depths": (2, _TENSOR | dict(model__mtp_num_layers=2)),
    "recomputed experts": (1, _RECOMPUTED | _EXPERTS | dict(model__num_layers=8)),
    "recomputed depth": (1, _RECOMPUTED | dict(model__mtp_num_layers=1)),
    "gathered keys": (2, dict(model__context_parallel_size=2, model__cp_comm_type="all_gather")),
    "interleaved stages, few microbatches": (2, _STAGES | dict(train__global_batch_size=2)),
    "interleaved stages of four, each holds other messages": (
        4,
        _STAGES
        | _RECOMPUTED
        | dict(model__pipeline_model_parallel_size=4, model__num_layers=8, train__global_batch_size=8),
    ),
    "interleaved stages of four, one group": (
        4,
        _STAGES
        | _RECOMPUTED
        | dict(model__pipeline_model_parallel_size=4, model__num_layers=8, train__global_batch_size=4),
    ),
    "interleaved groups larger than the pipeline": (
        2,
        _STAGES | _RECOMPUTED | dict(model__microbatch_group_size_per_vp_stage=6, train__global_batch_size=12),
    ),
    "all tokens on one of two ranks' experts": (2, _EXPERTS | dict(model__expert_model_parallel_size=2)),
    "groups of heads": (2, _GROUPS | dict(model__context_parallel_size=2, model__cp_comm_type="a2a")),
    "groups of heads, tensor parallel": (2, _GROUPS | dict(model__tensor_model_parallel_size=2)),
    "groups of heads, overlapped": (2, _OVERLAP),
    "four groups of normalized heads, overlapped": (
        2,
        _OVERLAP | dict(model__attention_head_groups=4, model__qk_layernorm=True),
    ),
    "groups of heads, sequence parallel": (2, _GROUPS | _TENSOR | dict(model__attention_head_groups=4)),
    "groups of query heads, sequence parallel, in tiles": (
        2,
        _GROUPS | _TENSOR | dict(model__attention_head_groups=4, model__num_query_groups=2, model__mlp_chunk_size=256),
    ),
    "Mamba": (1, _MAMBA),
    "depths of pieces of the loss": (1, _DEPTHS),
    "MLPs and experts in tiles": (1, _TILES),
    "recomputed latent attention in tiles": (1, _LATENT),
}


# Four overlapped groups, and groups of query heads in tiles, hold the same kinds.
SLOW = ("groups of heads, overlapped", "groups of heads, sequence parallel")


@pytest.mark.parametrize("name", [pytest.param(n, marks=pytest.mark.slow) if n in SLOW else n for n in LAYOUTS])
def test_prediction_is_what_a_run_holds(name: str) -> None:
    world_size, settings = LAYOUTS[name]
    for counted, expected in compare(world_size, _SIZES | settings, crowded="experts" in name):
        found = errors(counted, expected)
        assert abs(found.pop("total")) < 0.02, (counted, expected)
        assert max(map(abs, found.values())) < 0.05, found


@pytest.mark.slow
def test_random_layouts() -> None:
    layouts, totals = random_layouts(seed=3), []
    while len(totals) < 10:
        world_size, settings = next(layouts)
        try:
            found = compare(world_size, settings)
        except RanksFailed:
            continue
        totals += [abs(errors(counted, expected)["total"]) for counted, expected in found]
    assert max(totals) < 0.02


# Of arXiv:2205.05198 (figure 1), torchtitan's benchmarks/llama3_h100_202412_torchtitan.md and mbridge's README.
_COLUMNS = "source,model,hidden,layers,heads,kv_heads,ffn,vocab,seq_len,gpus,tp,cp,pp,dp,mbs,precision,recompute,metric"
_PUBLISHED = {
    "2205.05198,megatron-22b,6144,48,64,64,24576,51200,2048,8,8,1,1,,,fp16,none,activation_memory_gib": 59.25,
    "2205.05198,gpt3-175b,12288,96,96,96,49152,51200,2048,64,8,1,8,,,fp16,none,activation_memory_gib": 66.84,
    "2205.05198,gpt3-175b,12288,96,96,96,49152,51200,2048,64,8,1,8,,,fp16,selective+SP,activation_memory_gib": 12.35,
    "2205.05198,mt-nlg-530b,20480,105,128,128,81920,51200,2048,280,8,1,35,,,fp16,selective+SP,activation_memory_gib": (
        23.08
    ),
    "2205.05198,gpt3-175b,12288,96,96,96,49152,51200,2048,64,8,1,8,,,fp16,,param_and_optimizer_memory_gib": 45.56,
    "torchtitan,llama3-8b,4096,32,32,8,14336,128256,8192,8,1,1,1,8,2,bf16,selective,peak_memory_gib": 82.4,
    "torchtitan,llama3-8b,4096,32,32,8,14336,128256,8192,128,1,1,1,128,2,bf16+compile,selective,peak_memory_gib": 62.0,
    "torchtitan,llama3-8b,4096,32,32,8,14336,128256,131072,8,1,4,1,2,1,float8+compile,full,peak_memory_gib": 84.0,
    "mbridge,mixtral-8x2b-4l,2048,4,,,,,4096,8,1,1,1,,1,,,measured_memory_gb": 11.2,
    "mbridge,mixtral-8x2b-4l,2048,4,,,,,4096,8,2,1,1,,2,,,measured_memory_gb": 8.0,
}
_NANO = "Megatron-Bridge,nemotron-3-nano-30b-a3b,,,,,,,8192,16,1,1,1,16,1,bf16"
_PUBLISHED_EXPERTS = {"moe": 64.653, "moe,layernorm": 63.639}  # of Megatron Bridge's skill on recomputation, in GB


@pytest.mark.parametrize("row", _PUBLISHED)
def test_published_memory_is_met(row: str) -> None:
    value = predicted(dict(zip(_COLUMNS.split(","), row.split(","), strict=True)))
    assert value == pytest.approx(_PUBLISHED[row], rel=0.03)


@pytest.mark.parametrize("recompute", _PUBLISHED_EXPERTS)
def test_published_memory_of_mamba_and_experts_is_met(recompute: str) -> None:
    row = dict(zip(_COLUMNS.split(","), [*_NANO.split(","), recompute, "peak_memory_gb"], strict=True))
    value = predicted(row | {"ep": "8", "gbs": "16"})
    assert value == pytest.approx(_PUBLISHED_EXPERTS[recompute], rel=0.03)


def test_rows_that_leave_out_what_is_needed_are_refused() -> None:
    with pytest.raises(Refused, match="stages are not stated"):
        predicted({"source": "torchtitan", "metric": "peak_memory_gib", "tp": "8", "pp": "8"})
    with pytest.raises(Refused, match="shape not stated"):
        predicted({"source": "card.yaml", "metric": "peak_memory_gb", "model": "qwen3-next-80b-a3b"})
    eight_bits = {"source": "mine", "metric": "peak_memory_gb", "model": "llama3-8b", "precision": "fp8", "tp": "1"}
    with pytest.raises(Refused, match="fp8 copies of weights"):
        predicted(eight_bits | {"seq_len": "8192", "gpus": "8"})


def test_rows_of_other_sources_are_estimated_as_they_are_stated() -> None:
    row = {"source": "mine", "metric": "peak_memory_gib", "model": "llama3-8b", "precision": "bf16", "tp": "2"}
    row |= {"seq_len": "8192", "gpus": "8", "gpu_type": "H100"}
    assert predicted(row) == pytest.approx(predicted(row | {"metric": "peak_memory_gb"}) * 1e9 / 2**30)
    assert 0 < predicted(row | {"metric": "model_state_gib"}) < predicted(row)


def _model(**settings: object) -> ModelConfig:
    return ModelConfig(num_layers=16, hidden_size=4096, num_attention_heads=32, seq_length=8192, **settings)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    "settings",
    [
        {},
        {"virtual_pipeline_model_parallel_size": 2},
        {"num_layers_in_first_pipeline_stage": 2, "num_layers_in_last_pipeline_stage": 6},
        {"account_for_embedding_in_pipeline_split": True, "account_for_loss_in_pipeline_split": True, "num_layers": 14},
    ],
)
def test_stages_have_the_layers_that_megatron_core_gives_them(settings: dict) -> None:
    from megatron.core.transformer.transformer_block import get_num_layers_to_build
    from megatron.core.transformer.transformer_config import TransformerConfig

    model = ModelConfig(**{"num_layers": 16, "pipeline_model_parallel_size": 4, **settings})
    virtual = model.virtual_pipeline_model_parallel_size
    core = TransformerConfig(
        hidden_size=64,
        num_attention_heads=4,
        pipeline_dtype=__import__("torch").float32,
        **{"num_layers": 16, "pipeline_model_parallel_size": 4, **settings},
    )
    expected = [
        [get_num_layers_to_build(core, None if virtual is None else stage, rank) for stage in range(virtual or 1)]
        for rank in range(4)
    ]
    assert [[len(chunk) for chunk in chunks] for chunks in chunks_of_stages(model)] == expected


def test_an_interleaved_stage_has_more_microbatches_under_way() -> None:
    """The first stage must hold Korthikanti's factor of microbatches.

    1 + (pp - 1) / (pp * vpp) microbatches' layers.
    """
    model = _model(pipeline_model_parallel_size=4, virtual_pipeline_model_parallel_size=2)
    assert max(sum(each.under_way) for each in backward_states(model, 0, 64)) == 4 * 2 * (1 + 3 / 8)
    # The second backward pass of the second chunk follows the first one, without a forward pass of it between them.
    two = _model(pipeline_model_parallel_size=2, virtual_pipeline_model_parallel_size=2)
    assert [each.done for each in backward_states(two, 0, 4)][:3] == [(False, False), (False, True), (False, False)]
    (state,) = backward_states(_model(pipeline_model_parallel_size=4), 1, 64)
    assert (state.chunk, state.under_way) == (0, (3,))


def test_the_host_holds_all_inputs_but_two() -> None:
    recomputed: dict = dict(recompute_granularity="full", recompute_method="uniform", recompute_num_layers=1)
    kept, sent = (
        memory_estimate(
            Job(
                _model(**recomputed, cross_entropy_chunk_size=1024, offload_layer_inputs=offload),
                OptimizerConfig(),
                DistributedDataParallelConfig(),
                RankLayout(1),
                *(1, 1, 32000),
            )
        )
        for offload in (False, True)
    )
    of_input = 8192 * 4096 * 2
    # The GPU keeps the input of the running layer and one on its way, of 16; the last layer's never leaves.
    assert kept.total - sent.total == pytest.approx(14 * of_input * (1 + GPU.waste))
    assert (kept.host, sent.host) == (0, 15 * of_input)


def test_an_estimate_takes_no_time() -> None:
    """A search asks for thousands of layouts."""
    jobs = [
        Job(
            _model(tensor_model_parallel_size=tp, context_parallel_size=cp, pipeline_model_parallel_size=pp),
            OptimizerConfig(),
            DistributedDataParallelConfig(),
            RankLayout(1024, tp=tp, cp=cp, pp=pp),
            1,
            1024,
            128256,
        )
        for tp in (1, 2, 4, 8)
        for cp in (1, 2, 4, 8)
        for pp in (1, 2, 4, 8)
    ]
    for job in jobs:
        memory_estimate(job)
    times = []
    for _ in range(5):
        begin = time.process_time()
        for job in jobs:
            memory_estimate(job)
        times.append((time.process_time() - begin) / len(jobs))
    assert min(times) < 0.4e-3  # on a slow machine; 0.1 ms and less otherwise
