"""Predict the memory of published rows, by the conventions of each source.

No torch is needed.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

from benchmarks.fsdp_memory import fully_sharded_peak
from benchmarks.published import Refused, Row, job_of, number
from megatron_cp.config.model_config import ModelConfig
from megatron_cp.config.sections.distributed import DistributedDataParallelConfig
from megatron_cp.config.sections.optimization import OptimizerConfig
from megatron_cp.estimate.job import Job
from megatron_cp.estimate.memory import GPU, memory_estimate, stage_estimate
from megatron_cp.parallel.layout import RankLayout

GIB = 2.0**30


def predicted(row: Row) -> float:
    """Predict the row's memory, in its unit (measured_*_gb are GiB in the source).

    Raises:
        Refused: the row does not state what a prediction needs.
    """
    source = row["source"]
    if "torchtitan" in source:
        return _torchtitan(row)
    if "2205.05198" in source:
        return _korthikanti(row)
    if "mbridge" in source and "mixtral-8x2b" in row["model"]:
        return _mixtral(row)
    job, _ = job_of({**row, "gpu_type": row.get("gpu_type") or "h100"})
    if job.gemm not in ("bf16", "fp32"):
        raise Refused(f"{job.gemm} copies of weights and activations are not modelled")
    return _of_metric(row, memory_estimate(job, _OTHERS).kinds) / (GIB if "gib" in row["metric"] else 1e9)


def _of_metric(row: Row, kinds: Mapping[str, float]) -> float:
    """Select the bytes that a row's metric counts."""
    metric = row["metric"]
    if "param" in metric or "model_state" in metric:
        return _states(kinds)
    if "activation" in metric:
        return sum(size for kind, size in kinds.items() if kind.startswith("activations"))
    return sum(kinds.values())


def _torchtitan(row: Row) -> float:
    if number(row, "tp") > 1 or number(row, "pp") > 1:
        raise Refused("FSDP2 with tp or pp: the copies of its parallel loss and its stages are not stated")
    return (
        fully_sharded_peak(
            hidden=number(row, "hidden"),
            layers=number(row, "layers"),
            heads=number(row, "heads"),
            kv_heads=number(row, "kv_heads"),
            ffn=number(row, "ffn"),
            vocabulary=number(row, "vocab"),
            tokens=number(row, "mbs") * number(row, "seq_len") // number(row, "cp"),
            shards=number(row, "dp") * number(row, "cp"),
            recompute=row["recompute"],
            compiled="compile" in row["precision"],
        )
        / GIB
    )


# Of table 3 of arXiv:2205.05198: micro-batch size and interleaved stages, which the rows leave out.
_KORTHIKANTI = {22: (4, None), 175: (1, 3), 530: (1, 3), 1: (1, None)}
_OTHERS = replace(GPU, fused_gated_norm=True)  # programs other than this one
_BEFORE_FLASH = replace(GPU, flash_attention=False)


def _korthikanti(row: Row) -> float:
    size = row["model"].rpartition("-")[2]
    if (known := _KORTHIKANTI.get(int(size.rstrip("bt")))) is None:
        raise Refused("its micro-batch size is not known")
    micro_batch_size, virtual = known
    model = ModelConfig(
        num_layers=number(row, "layers"),
        hidden_size=number(row, "hidden"),
        ffn_hidden_size=number(row, "ffn"),
        num_attention_heads=number(row, "heads"),
        seq_length=number(row, "seq_len"),
        max_position_embeddings=number(row, "seq_len"),
        position_embedding_type="learned_absolute",
        normalization="LayerNorm",
        activation_func="gelu",
        gated_linear_unit=False,
        add_bias_linear=True,
        hidden_dropout=0.1,
        share_embeddings_and_output_weights=True,
        tensor_model_parallel_size=number(row, "tp"),
        pipeline_model_parallel_size=number(row, "pp"),
        virtual_pipeline_model_parallel_size=virtual,
    )
    if row.get("recompute") == "selective+SP":
        model.sequence_parallel, model.recompute_granularity = True, "selective"
    job = _job(row, model, micro_batch_size, 64 * micro_batch_size, distributed=False)
    if row["metric"] == "activation_memory_gib":
        return _of_metric(row, memory_estimate(job, _BEFORE_FLASH).kinds) / GIB
    # The paper leaves out embeddings, as a stage between the first and the last has none.
    return _states(stage_estimate(job, min(1, model.pipeline_model_parallel_size - 1), _BEFORE_FLASH).kinds) / GIB


def _mixtral(row: Row) -> float:
    """Return the job of an mbridge row: its example's shape, without a fused loss."""
    tp, metric = number(row, "tp"), row["metric"]
    model = ModelConfig(
        num_layers=number(row, "layers"),
        hidden_size=number(row, "hidden"),
        num_attention_heads=16,
        num_query_groups=8,
        seq_length=number(row, "seq_len"),
        num_moe_experts=8,
        moe_router_topk=2,
        moe_ffn_hidden_size=5440,
        moe_grouped_gemm=False,
        tensor_model_parallel_size=tp,
        expert_tensor_parallel_size=tp,
        sequence_parallel=tp > 1,
        cross_entropy_loss_fusion=False,
    )
    found = memory_estimate(_job(row, model, number(row, "mbs"), 64, distributed=True, vocabulary=32000)).kinds
    state = _states(found)
    activations = sum(found.values()) - state - found["allocator"]
    return {
        "measured_model_state_gb": state,
        "measured_activation_gb": activations,
        "measured_memory_gb": state + activations,
    }[metric] / GIB


def _job(
    row: Row,
    model: ModelConfig,
    micro_batch_size: int,
    global_batch_size: int,
    distributed: bool,
    vocabulary: int | None = None,
) -> Job:
    tp, pp = model.tensor_model_parallel_size, model.pipeline_model_parallel_size
    layout = RankLayout(number(row, "gpus"), tp=tp, pp=pp, etp=model.expert_tensor_parallel_size or 1)
    optimizer = OptimizerConfig(use_distributed_optimizer=distributed)
    rows = vocabulary or number(row, "vocab")
    return Job(model, optimizer, DistributedDataParallelConfig(), layout, micro_batch_size, global_batch_size, rows)


def _states(kinds: Mapping[str, float]) -> float:
    return sum(kinds[kind] for kind in ("weights", "gradients", "optimizer"))
