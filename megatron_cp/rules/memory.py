"""The estimated peak memory of a case, and settings that lower it. Pure."""

from __future__ import annotations

import itertools
from collections.abc import Collection, Sequence
from dataclasses import replace
from typing import Any

from megatron_cp.attention.heads import numbers_of_groups
from megatron_cp.attention.transports.registry import known_transports
from megatron_cp.config.model_config import ModelConfig
from megatron_cp.config.names import NAME
from megatron_cp.config.overrides import override, quoted
from megatron_cp.estimate.job import MemoryEstimate
from megatron_cp.estimate.memory import memory_estimate
from megatron_cp.estimate.time import time_estimate
from megatron_cp.rules.job import assumed_job, device_of, job_of
from megatron_cp.rules.remedies import Case

Settings = dict[str, Any]

NEARLY_FULL = 0.9  # share of a GPU's memory that estimates should stay below: they are a few percent off
_CHUNK = 4096  # tokens per chunk of the loss
_TILE = 8192  # tokens per tile of an MLP: smaller ones read the weights too often
_RECOMPUTE = (
    NAME.model.recompute_granularity,
    NAME.model.recompute_method,
    NAME.model.recompute_num_layers,
    NAME.model.recompute_modules,
)
_OTHERS = (
    NAME.model.cross_entropy_chunk_size,
    NAME.model.mlp_chunk_size,
    NAME.model.offload_layer_inputs,
    NAME.model.attention_head_groups,
)
_SWITCH = NAME.model.memory_savings


def estimated(case: Case) -> MemoryEstimate | None:
    """Return the peak memory of a case; None for impossible or unknown sizes."""
    try:
        job = job_of(case)
        return None if job is None else memory_estimate(job)
    except (ValueError, ArithmeticError, LookupError):  # sizes that other rules refuse
        return None


def memory_line(case: Case) -> str | None:
    """Return the memory line, for instance ``estimated peak 61 of 80 GiB a GPU``.

    None without an estimate.
    """
    peak = estimated(case)
    return None if peak is None else format_peak(peak, case.environment.gpu_memory_gib, case.environment.device)


def format_peak(peak: MemoryEstimate, memory: float | None, device: str = "gpu") -> str:
    """Return an estimate in a line; ``memory`` is what a GPU has, in GiB."""
    kinds = by_group(peak)
    largest = max(kinds, key=kinds.__getitem__)
    of = f" of {gib(memory * 2**30)}" if memory else ""
    where = "GPU" if device == "gpu" else "rank"
    host = f", and {gib(peak.host)} GiB of host memory" if peak.host else ""
    return f"estimated peak {gib(peak.total)}{of} GiB a {where} (largest: {largest} {gib(kinds[largest])}){host}"


def by_group(peak: MemoryEstimate) -> dict[str, float]:
    """Return the bytes of each kind, those of activations together."""
    kinds: dict[str, float] = {}
    for kind, size in peak.kinds.items():
        group = kind.partition(":")[0]
        kinds[group] = kinds.get(group, 0.0) + size
    return kinds


def gib(size: float) -> str:
    """Return bytes as GiB with two or three digits."""
    number = size / 2**30
    return f"{number:.0f}" if number >= 10 else f"{number:.2g}"


def savings(
    model: ModelConfig,
    tokens: int,
    layers: int,
    on_gpu: bool,
    fixed: Collection[str] = frozenset(),
    head_groups: Sequence[int] = (),
) -> list[Settings]:
    """Return memory savings from none to all, roughly by increasing cost in time.

    Args:
        tokens: of a rank in a microbatch.
        layers: of a pipeline stage, or of one of its virtual stages.
        fixed: dotted names of settings that keep the model's value.
        head_groups: of :func:`possible_head_groups`.
    """
    chunk, tile, offload, groups = _OTHERS
    plain = {**_recompute(), chunk: None, tile: None, offload: False, groups: 1}
    chunked = plain | ({chunk: _CHUNK} if tokens > _CHUNK else {})
    in_tiles = tokens > _TILE and set("-E") & set(model.layer_letters)
    tiled = chunked | ({tile: _TILE, NAME.model.mlp_chunks_for_training: 1} if in_tiles else {})
    cheap = [plain, chunked, tiled]
    again = [name for name, part in (("moe", "E"), ("mlp", "-")) if part in model.layer_letters]
    again = again if not model.add_bias_linear else [name for name in again if name == "moe"]
    steps = [*cheap, *([chunked | _recompute("selective", None, None, again)] if again else [])]
    in_blocks = layers >= 4 and (not model.mtp_num_layers or model.architecture == "hybrid")
    whole = [_recompute("full", "block", layers // 2)] if in_blocks else []
    for recomputed in (*whole, _recompute("full", "uniform", 1)):
        steps += [chunked | recomputed, tiled | recomputed]
    if on_gpu:
        steps.append(steps[-1] | {offload: True})
    steps += [steps[-1] | {groups: count} for count in head_groups]
    if any(name in fixed for name in _RECOMPUTE):  # these settings define recomputation only together
        given = {name: _value(model, name) for name in _RECOMPUTE}
        steps = [step | given for step in cheap]
        if given[NAME.model.recompute_granularity] == "full":
            steps.append(steps[-1] | {offload: True})
            steps += [steps[-1] | {groups: count} for count in head_groups]
    kept = {name: _value(model, name) for name in _OTHERS if name in fixed}
    steps = [step | kept for step in steps]
    return [step for number, step in enumerate(steps) if step not in steps[:number]]


def possible_head_groups(model: ModelConfig, tp: int, exchanging: Collection[int] = ()) -> list[int]:
    """Return the numbers of groups into which attention's heads can be divided.

    ``exchanging``: ranks that share the heads in an all-to-all.
    """
    whole = model.multi_latent_attention or model.attention_output_gate or model.attention_backend == "te"
    if whole or tp < 1 or "*" not in model.layer_letters:
        return []
    heads, kv_heads = model.num_attention_heads // tp, model.kv_heads // tp
    return [count for count in numbers_of_groups(heads, kv_heads, exchanging) if count > 1]


def _recompute(*values: Any) -> Settings:
    return dict(itertools.zip_longest(_RECOMPUTE, values))


def choose_savings(case: Case) -> tuple[Case, str]:
    """Replace ``memory_savings=auto`` by savings that fit; also return the choice.

    The settings stay as they are if they fit. Else the savings that fit and take the least time, by the estimates,
    replace them. If nothing fits, the last are chosen, and a rule reports the rest.
    """
    memory = case.environment.gpu_memory_gib
    if memory is None:
        return _with(case, {}), f"{_SWITCH}=auto saves nothing: the memory of a rank is not known"
    model = case.config.model
    layers = model.num_layers // model.pipeline_model_parallel_size
    layers //= model.virtual_pipeline_model_parallel_size or 1
    tokens = case.config.train.micro_batch_size * (model.max_seqlen_per_dp_cp_rank or model.tokens_per_rank)
    cp, levels = model.context_parallel_size, model.hierarchical_context_parallel_sizes
    exchanging = [ranks for each in known_transports(model.transports) for ranks in each.head_ranks(cp, levels)]
    groups = possible_head_groups(model, model.tensor_model_parallel_size, exchanging)
    options: list[tuple[Settings, Case]] = [({}, _with(case, {}))]
    if estimated(options[0][1]) is None:
        return case, f"{_SWITCH}=auto: these sizes have no estimate"
    if not _fits(options[0][1], memory):
        steps = savings(model, tokens, layers, case.environment.device == "gpu", head_groups=groups)
        options = [(step, _with(case, step)) for step in steps]
        options = [each for each in options if _fits(each[1], memory)] or options[-1:]
    step, chosen = min(options, key=lambda each: _seconds(each[1]))
    changed = {name: value for name, value in step.items() if value != _value(model, name)}
    text = " ".join(quoted(override(*each)) for each in changed.items()) or "the settings as they are"
    return chosen, f"{_SWITCH}=auto is {text}: {memory_line(chosen)}"


def _fits(case: Case, memory: float) -> bool:
    peak = estimated(case)
    return peak is not None and peak.total <= NEARLY_FULL * memory * 2**30


def _seconds(case: Case) -> float:
    """Return the estimated step time."""
    return time_estimate(assumed_job(case), device_of(case.environment), case.gpus_per_node).seconds


def _with(case: Case, step: Settings) -> Case:
    fields = {_field(name): value for name, value in step.items()}
    model = replace(case.config.model, memory_savings="off", **fields)
    return replace(case, config=replace(case.config, model=model))


def _value(model: ModelConfig, name: str) -> Any:
    return getattr(model, _field(name))


def _field(name: str) -> str:
    return name.removeprefix("model.")
