"""Predict published memory from a row of ``published.csv``. Pure.

:func:`predicted` gives the value in the row's own unit, or raises :class:`Refused` with the reason.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

from megatron_cp.config.model_config import ModelConfig
from megatron_cp.config.sections.distributed import DistributedDataParallelConfig
from megatron_cp.config.sections.optimization import OptimizerConfig
from megatron_cp.estimate.job import Job
from megatron_cp.estimate.memory.fsdp import fully_sharded_peak
from megatron_cp.estimate.memory.model import memory_estimate, stage_estimate
from megatron_cp.estimate.memory.platform import GPU
from megatron_cp.parallel.layout import RankLayout

GIB = 2.0**30
METRICS = (
    "activation_memory_gib",
    "param_and_optimizer_memory_gib",
    "peak_memory_gib",
    "peak_memory_gb",
    "measured_memory_gb",
    "measured_model_state_gb",
    "measured_activation_gb",
)
Row = Mapping[str, str]


class Refused(ValueError):
    """A row does not state what a prediction needs; the message says what."""


def predicted(row: Row) -> float:
    """Predict the row's memory, in its unit (measured_*_gb are GiB in the sources).

    Raises:
        Refused: see there.
    """
    source, metric = row["source"], row["metric"]
    if metric not in METRICS:
        raise Refused(f"{metric} is no memory")
    if "torchtitan" in source:
        return _torchtitan(row)
    if "2205.05198" in source:
        return _korthikanti(row)
    if "mbridge" in source and "mixtral-8x2b" in row["model"]:
        return _mixtral(row)
    raise Refused("the source does not state the shape, the layout or the number formats of gradients and optimizer")


def _number(row: Row, name: str, default: int | None = None) -> int:
    if row.get(name):
        return int(row[name])
    if default is None:
        raise Refused(f"{name} is not stated")
    return default


def _torchtitan(row: Row) -> float:
    if _number(row, "tp") > 1 or _number(row, "pp") > 1:
        raise Refused("FSDP2 with tp or pp: the copies of its parallel loss and its stages are not stated")
    return (
        fully_sharded_peak(
            hidden=_number(row, "hidden"),
            layers=_number(row, "layers"),
            heads=_number(row, "heads"),
            kv_heads=_number(row, "kv_heads"),
            ffn=_number(row, "ffn"),
            vocabulary=_number(row, "vocab"),
            tokens=_number(row, "mbs") * _number(row, "seq_len") // _number(row, "cp"),
            shards=_number(row, "dp") * _number(row, "cp"),
            recompute=row["recompute"],
            compiled="compile" in row["precision"],
        )
        / GIB
    )


# Of table 3 of arXiv:2205.05198: micro-batch size and interleaved stages, which the rows leave out.
_KORTHIKANTI = {22: (4, None), 175: (1, 3), 530: (1, 3), 1: (1, None)}
_BEFORE_FLASH = replace(GPU, flash_attention=False)


def _korthikanti(row: Row) -> float:
    size = row["model"].rpartition("-")[2]
    if (known := _KORTHIKANTI.get(int(size.rstrip("bt")))) is None:
        raise Refused("its micro-batch size is not known")
    micro_batch_size, virtual = known
    model = ModelConfig(
        num_layers=_number(row, "layers"),
        hidden_size=_number(row, "hidden"),
        ffn_hidden_size=_number(row, "ffn"),
        num_attention_heads=_number(row, "heads"),
        seq_length=_number(row, "seq_len"),
        max_position_embeddings=_number(row, "seq_len"),
        position_embedding_type="learned_absolute",
        normalization="LayerNorm",
        activation_func="gelu",
        gated_linear_unit=False,
        add_bias_linear=True,
        hidden_dropout=0.1,
        share_embeddings_and_output_weights=True,
        tensor_model_parallel_size=_number(row, "tp"),
        pipeline_model_parallel_size=_number(row, "pp"),
        virtual_pipeline_model_parallel_size=virtual,
    )
    if row.get("recompute") == "selective+SP":
        model.sequence_parallel, model.recompute_granularity = True, "selective"
    job = _job(row, model, micro_batch_size, 64 * micro_batch_size, distributed=False)
    if row["metric"] == "activation_memory_gib":
        kinds = memory_estimate(job, _BEFORE_FLASH).kinds
        return sum(size for kind, size in kinds.items() if kind.startswith("activations")) / GIB
    # The paper leaves embeddings out, which a stage between the first and the last one has not.
    return _states(stage_estimate(job, min(1, model.pipeline_model_parallel_size - 1), _BEFORE_FLASH).kinds) / GIB


def _mixtral(row: Row) -> float:
    """Return the job of an mbridge row: its example's shape, without a fused loss."""
    tp, metric = _number(row, "tp"), row["metric"]
    model = ModelConfig(
        num_layers=_number(row, "layers"),
        hidden_size=_number(row, "hidden"),
        num_attention_heads=16,
        num_query_groups=8,
        seq_length=_number(row, "seq_len"),
        num_moe_experts=8,
        moe_router_topk=2,
        moe_ffn_hidden_size=5440,
        moe_grouped_gemm=False,
        tensor_model_parallel_size=tp,
        expert_tensor_parallel_size=tp,
        sequence_parallel=tp > 1,
        cross_entropy_loss_fusion=False,
    )
    found = memory_estimate(_job(row, model, _number(row, "mbs"), 64, distributed=True, vocabulary=32000)).kinds
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
    layout = RankLayout(_number(row, "gpus"), tp=tp, pp=pp, etp=model.expert_tensor_parallel_size or 1)
    optimizer = OptimizerConfig(use_distributed_optimizer=distributed)
    rows = vocabulary or _number(row, "vocab")
    return Job(model, optimizer, DistributedDataParallelConfig(), layout, micro_batch_size, global_batch_size, rows)


def _states(kinds: Mapping[str, float]) -> float:
    return sum(kinds[kind] for kind in ("weights", "gradients", "optimizer"))
