"""Convert rows of published measurements to jobs.

The shapes, conventions and defaults are those of each source. No torch is needed. Blank cells are filled with the
values that the source's recipes use. ``Refused`` names a missing value where that is not known. The columns are those
of ``benchmarks/measurements/published.csv``.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from megatron_cp.common.yaml_files import read_yaml
from megatron_cp.config.model_config import ModelConfig
from megatron_cp.config.sections.distributed import DistributedDataParallelConfig
from megatron_cp.config.sections.optimization import OptimizerConfig
from megatron_cp.estimate.device import Device, device_names, load_device
from megatron_cp.estimate.flops import training_flops
from megatron_cp.estimate.job import Gemm, Job
from megatron_cp.parallel.layout import RankLayout

Row = Mapping[str, str]

MEASUREMENTS = Path(__file__).parent / "measurements"
MODELS: dict[str, dict[str, Any]] = read_yaml(MEASUREMENTS / "models.yaml")
UNGATED = ("gpt3", "gpt-", "megatron-", "mt-nlg", "nemotron")  # models whose MLPs have two matrices; not gpt-oss


class Refused(Exception):
    """Row that cannot be predicted; the message is the reason."""


@dataclass(frozen=True)
class Stack:
    """Conventions of a source's program, where its rows do not state them.

    whole_attention: its FLOP formula counts all pairs of a sample, not those of a causal mask.
    recomputed: its FLOP formula includes full recomputation. tp_overlap: share of tensor parallel messages hidden.
    attention: speed of its attention kernels relative to the device's file. unfused: no flash attention.
    clock: speed of its GPUs' matrix products relative to the device's file. memory: of kernels that only move data.
    host: speed of its host relative to the device's file. host_serial: see Device.
    ep_overlap: share of expert parallel messages hidden. interleaves: blank vpp means the most that fit.
    whole_batches: mbs is a replica's batch of a step, and a pipeline takes one sample at a time.
    """

    sequence_parallel: bool = True
    whole_attention: bool = False
    recomputed: bool = False
    recompute: str = ""
    tp_overlap: float = 0.0
    attention: float = 1.0
    unfused: bool = False
    clock: float = 1.0
    memory: float = 1.0
    host: float = 1.0
    host_serial: float = 0.3
    ep_overlap: float = 0.0
    interleaves: bool = False
    transport: str = "p2p"
    whole_batches: bool = False
    distributed_optimizer: bool = True
    overlap: bool = True
    fp32_gradients: bool = False


def load_stacks() -> dict[str, Stack]:
    """Read the programs of ``measurements/programs.yaml``, by name."""
    return {name: Stack(**fields) for name, fields in read_yaml(PROGRAMS).items()}


PROGRAMS = MEASUREMENTS / "programs.yaml"
STACKS = load_stacks()
# Part of the source's name, prefix of the GPU's name, program. The first match applies.
SOURCES = (
    ("performance-summary-archive", "", "bridge"),
    ("Megatron-Bridge", "", "bridge"),
    ("NVIDIA/NeMo", "h", "nemo_2024"),
    ("NVIDIA/NeMo", "", "nemo"),
    ("torchtitan", "", "torchtitan"),
    ("2205.05198", "", "megatron_2022"),
    ("vTrain", "", "megatron_deepspeed"),
    ("megatron_moe_benchmark", "", "megatron"),
    ("xtuner", "", "xtuner"),
    ("model_table", "", "megatron_table"),
    ("CP_results", "", "megatron_2024"),
)


def program_of(row: Row) -> str:
    source, gpu = row.get("source") or "", (row.get("gpu_type") or "").lower()
    return next((name for part, kind, name in SOURCES if part in source and gpu.startswith(kind)), "megatron")


def stack_of(row: Row) -> Stack:
    return STACKS[program_of(row)]


def number(row: Row, column: str, default: int | None = None) -> int:
    """Read a cell as an integer. A blank cell gives the default, or raises Refused."""
    text = (row.get(column) or "").strip()
    if not text:
        if default is None:
            raise Refused(f"{column} not stated")
        return default
    try:
        value = int(float(text))
    except (ValueError, OverflowError):
        raise Refused(f"{column}={text!r} is no number") from None
    most = 10_000 if column in ("layers", "pp", "vpp") else 10**9
    if not 1 <= value <= most:
        raise Refused(f"{column}={text!r} is not between 1 and {most}")
    return value


def gemm_of(row: Row, device: Device) -> Gemm:
    text = (row.get("precision") or "").lower()
    note = row.get("note") or ""
    if "fp4" in text:
        found: Gemm = "nvfp4"
    elif "mx" in text or (text.startswith("per-tensor") and "variant 2" in note):
        found = "mxfp8"  # the second value of a cell with two is MXFP8
    elif "rowwise" in text:
        found = "bf16"  # torchao's product with one scale per row is no faster than in 16 bits
    elif "8" in text or "per-tensor" in text:
        found = "fp8"
    elif "recipe" in note and "fp8mx" in note:
        found = "mxfp8"
    elif "32" in text and "tf" not in text:
        found = "fp32"
    else:
        found = "bf16"
    return "fp8" if found == "mxfp8" and "mxfp8" not in device.matmul_flops and "fp8" in device.matmul_flops else found


def device_of(row: Row, stack: Stack) -> Device:
    text = (row.get("gpu_type") or "").lower()
    name = next((each for each in sorted(device_names(), key=len, reverse=True) if each in text), None)
    if name is None:
        if "CP_results" not in row["source"]:
            raise Refused(f"gpu_type={row.get('gpu_type') or ''!r} is unknown")
        name = "h100"
    return adapted(load_device(name), stack)


def adapted(device: Device, stack: Stack) -> Device:
    """Apply a source's program to a device."""
    forward, backward = device.attention_flops
    changed = replace(
        device,
        attention_flops=(forward * stack.attention, backward * stack.attention),
        matmul_efficiency={key: each * stack.clock for key, each in device.matmul_efficiency.items()},
        memory_bandwidth=device.memory_bandwidth * stack.memory,
        launch_seconds=device.launch_seconds / stack.host,
        host_serial=stack.host_serial,
        overlap={**device.overlap, "tp": stack.tp_overlap, "ep": stack.ep_overlap},
    )
    if not stack.unfused:
        return changed
    rate = device.matmul_rate("bf16") / 2  # products of a head's few channels
    return replace(changed, attention_flops=(rate, rate), attention_half=0.0, score_bytes=UNFUSED_BYTES)


UNFUSED_LAUNCHES = 1.35  # Megatron's fused softmax of 2022 takes heads and samples in fours
DROPPED_LAUNCHES = 0.4  # experts of a fixed capacity: the host need not wait for the router
UNFUSED_BYTES = 12.0  # passes over the scores in 16 bits: write, scale and mask, normalize, drop out, read


def shape_of(row: Row) -> dict[str, Any]:
    name = re.sub(r"[_ ]", "-", (row.get("model") or "").strip().lower())
    known = next((dict(shape) for key, shape in sorted(MODELS.items(), reverse=True) if name.startswith(key)), {})
    columns = {
        "hidden": "hidden_size",
        "layers": "num_layers",
        "heads": "num_attention_heads",
        "kv_heads": "num_query_groups",
        "vocab": "vocab_size",
    }
    for column, field in columns.items():
        if (row.get(column) or "").strip():
            known[field] = number(row, column)
    if (row.get("ffn") or "").strip() and "num_moe_experts" not in known:
        known["ffn_hidden_size"] = number(row, "ffn")
    missing = [
        column for column, field in columns.items() if field not in known and column not in ("kv_heads", "vocab")
    ]
    if missing:
        raise Refused(f"shape not stated ({', '.join(missing)})")
    if (dense := known.pop("first_dense_layers", None)) is not None:
        known["moe_layer_freq"] = [0] * dense + [1] * (known["num_layers"] - dense)
    if ("moe" in name or re.search(r"-a\d+b|\dx\d+b", name)) and "num_moe_experts" not in known:
        raise Refused("experts not stated")
    known.setdefault(
        "num_query_groups", known["num_attention_heads"] if "gqa" not in (row.get("precision") or "").lower() else 8
    )
    known.setdefault("vocab_size", 51200)
    known.setdefault("ffn_hidden_size", 4 * known["hidden_size"])
    if name.startswith(UNGATED) and not name.startswith("gpt-oss"):
        known["gated_linear_unit"] = False
    return known


def recompute_of(text: str) -> dict[str, Any]:
    text = text.strip().lower()
    if text in ("", "none", "no"):
        return {}
    if text.startswith("full"):
        return {"recompute_granularity": "full", "recompute_method": "uniform", "recompute_num_layers": 1}
    names = {"up_proj": "mla_up_proj", "norm": "layernorm", "ln": "layernorm"}
    known = ("core_attn", "mlp", "moe", "moe_act", "layernorm", "mla_up_proj", "shared_experts")
    modules = [names.get(each, each) for each in re.split(r"[,+ ]+", text)]
    chosen = [each for each in modules if each in known] or ["core_attn"]
    return {"recompute_granularity": "selective", "recompute_modules": chosen}


def job_of(row: Row) -> tuple[Job, Device]:
    """Return a row's job and the device that it ran on. Raises Refused."""
    stack = stack_of(row)
    note, metric = (row.get("note") or "").lower(), row.get("metric") or ""
    for word, reason in {
        "lora": "trains adapters only",
        "peft": "trains adapters only",
        "layout not published": "layout not published",
    }.items():
        if word in note:
            raise Refused(reason)
    device = device_of(row, stack)
    shape = shape_of(row)
    figure = "speedup" in metric
    sizes = {
        name: number(row, name, 1 if name in ("cp", "pp", "ep") or figure else None)
        for name in ("tp", "cp", "pp", "ep")
    }
    if "num_moe_experts" in shape and not (row.get("ep") or "").strip():
        raise Refused("ep not stated")
    if "num_moe_experts" not in shape:
        sizes["ep"] = 1
    ranks = sizes["tp"] * sizes["cp"] * sizes["pp"]
    gpus = number(row, "gpus", ranks * number(row, "dp", 1))
    if gpus % ranks:
        raise Refused(f"tp * cp * pp = {ranks} does not divide {gpus} GPUs")
    if gpus % (sizes["ep"] * sizes["pp"]):
        raise Refused(f"ep * pp = {sizes['ep'] * sizes['pp']} does not divide {gpus} GPUs")
    replicas = gpus // ranks
    virtual = number(row, "vpp", _interleaved(shape["num_layers"], sizes["pp"]) if stack.interleaves else 1)
    if "num_moe_experts" in shape and number(row, "seq_len") <= 4096:
        number(row, "mbs")  # the speed of experts depends on it most; long samples run one by one
    if "sft" in note:
        number(row, "gbs")  # without it the lengths of the documents are unknown
    mbs = number(row, "mbs", 1)
    gbs = number(row, "gbs", mbs * replicas * (1 if stack.whole_batches else 8 * sizes["pp"] if sizes["pp"] > 1 else 4))
    if stack.whole_batches:
        if sizes["pp"] > 1:
            mbs = 1  # the local batch goes through the pipeline a sample at a time
        if "interleaved" in note:
            virtual = 2
    if "model_table" in row["source"]:
        mbs = 2
    sp = stack.sequence_parallel and sizes["tp"] > 1
    recompute = (row.get("recompute") or "").strip()
    if "2205.05198" in row["source"]:
        sp = sp and "sp" in recompute.lower()
    if (
        shape.get("architecture") != "hybrid"
        and sizes["pp"] > 1
        and virtual > 1
        and shape["num_layers"] % (sizes["pp"] * virtual)
    ):
        missing = -shape["num_layers"] % (sizes["pp"] * virtual)
        shape["account_for_embedding_in_pipeline_split"] = missing in (1, 2)
        shape["account_for_loss_in_pipeline_split"] = missing == 2
    if "deepseek" in shape_name(row) and "w/o mtp" not in note:
        shape["mtp_num_layers"] = 1
    transport, levels = transport_of(row, sizes["cp"], shape, sizes["tp"], stack.transport)
    model = ModelConfig(
        seq_length=number(row, "seq_len"),
        tensor_model_parallel_size=sizes["tp"],
        context_parallel_size=sizes["cp"],
        pipeline_model_parallel_size=sizes["pp"],
        virtual_pipeline_model_parallel_size=virtual if virtual > 1 and sizes["pp"] > 1 else None,
        expert_model_parallel_size=sizes["ep"],
        expert_tensor_parallel_size=1,
        sequence_parallel=sp,
        cross_entropy_loss_fusion=not stack.unfused,
        cp_comm_type=transport,
        hierarchical_context_parallel_sizes=levels,
        **shape,
        **recompute_of(recompute or stack.recompute),
    )
    try:
        layout = RankLayout(
            gpus,
            tp=sizes["tp"],
            cp=sizes["cp"],
            pp=sizes["pp"],
            ep=sizes["ep"],
            hierarchical=tuple(levels) if levels else None,
        )
    except ValueError as error:
        raise Refused(str(error)) from None
    overlap = stack.overlap and replicas * sizes["cp"] > 1
    ddp = DistributedDataParallelConfig(
        overlap_grad_reduce=overlap, overlap_param_gather=overlap, grad_reduce_in_fp32=stack.fp32_gradients
    )
    if stack.unfused and shape["num_attention_heads"] // sizes["tp"] * mbs % 4:
        device = replace(device, launch_seconds=device.launch_seconds * UNFUSED_LAUNCHES)
    if "tokendrop" in note:
        device = replace(device, launch_seconds=device.launch_seconds * DROPPED_LAUNCHES)
    optimizer = OptimizerConfig(use_distributed_optimizer=stack.distributed_optimizer)
    return Job(model, optimizer, ddp, layout, mbs, gbs, shape["vocab_size"], gemm_of(row, device)), device


def _interleaved(layers: int, stages: int) -> int:
    """Return the default of virtual stages.

    It is the most, up to eight, that divide a stage's layers.
    """
    each = -(-layers // stages)
    return max(size for size in range(1, 9) if each % size == 0) if stages > 1 else 1


def shape_name(row: Row) -> str:
    return (row.get("model") or "").lower()


def transport_of(
    row: Row, cp: int, shape: Mapping[str, Any], tp: int, default: str = "p2p"
) -> tuple[str, list[int] | None]:
    """Return a row's transport and its levels.

    Latent attention exchanges heads: it has many keys and values.
    """
    if cp == 1:
        return "p2p", None
    latent = shape.get("multi_latent_attention")
    text = (row.get("cp_comm_type") or "").strip().lower() or ("a2a" if latent else default)
    if text in ("p2p", "all_gather", "a2a"):
        if text == "a2a" and (shape["num_attention_heads"] // tp) % cp:
            return "a2a+p2p", _levels(shape["num_attention_heads"] // tp, cp)
        return text, None
    if text in ("usp", "a2a+p2p", "hierarchical"):
        return "a2a+p2p", _levels(8, cp)
    raise Refused(f"cp_comm_type={text} is no transport here")


def _levels(heads: int, cp: int) -> list[int]:
    inner = next(size for size in range(min(heads, cp, 8), 0, -1) if heads % size == 0 and cp % size == 0)
    return [inner, cp // inner]


def flops_of_source(row: Row, job: Job) -> float:
    """Return the operations of a step by the formula of the row's source."""
    stack, model = stack_of(row), job.model
    counted = model
    if stack.whole_attention:
        counted = replace(counted, attention_mask_type="no_mask", window_size=None)
    if "gpt-oss" in shape_name(row):  # its formula counts neither windows nor gates
        counted = replace(counted, window_size=None, gated_linear_unit=False)
    lengths = [model.seq_length or 1]
    flops = training_flops(counted, job.vocab_size, lengths)
    if "finetune" in (row.get("note") or ""):  # six operations a parameter, none for attention
        whole = training_flops(replace(model, attention_mask_type="no_mask"), job.vocab_size, lengths)
        flops = 2 * training_flops(model, job.vocab_size, lengths) - whole
    if stack.recomputed and model.recompute_granularity == "full":
        flops *= 4 / 3
    return flops * job.microbatches * job.micro_batch_size * job.layout.dp
