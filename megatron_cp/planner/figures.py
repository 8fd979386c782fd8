"""Figures and short descriptions of estimated layouts. Pure."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from megatron_cp.config.names import NAME
from megatron_cp.planner.found import Estimated
from megatron_cp.planner.space import Settings
from megatron_cp.rules.memory import by_group

_COMPUTE = ("matrix products", "attention")
_LIMITS = 0.08  # least share of a step that a kind of overhead needs to be reported as the limit


@dataclass(frozen=True)
class Setup:
    """Hardware and batch that all layouts of a plan share.

    Args:
        memory: bytes of a GPU.
        peak_flops: FLOP/s of a GPU, for the MFU.
        tokens: tokens of a step.
    """

    gpu: str
    gpus: int
    gpus_per_node: int
    memory: float
    peak_flops: float
    tokens: int


@dataclass(frozen=True)
class Figures:
    """Figures of one layout."""

    setup: Setup
    layout: Estimated

    @property
    def seconds(self) -> float:
        return self.layout.time.seconds

    @property
    def tokens_per_gpu(self) -> float:
        """Tokens per second of one GPU."""
        return self.setup.tokens / self.seconds / self.setup.gpus

    @property
    def mfu(self) -> float:
        return self.layout.time.model_flops / self.seconds / self.setup.gpus / self.setup.peak_flops

    @property
    def free(self) -> float:
        """Free bytes of a GPU; negative if the layout does not fit."""
        return self.setup.memory - self.layout.memory.total

    @property
    def limit(self) -> str:
        """The largest overhead and its share of the step.

        If no overhead reaches ``_LIMITS``, the largest kind of compute.
        """
        kinds = self.layout.time.kinds
        others = {kind: seconds for kind, seconds in kinds.items() if kind not in _COMPUTE}
        largest = max(others, key=others.__getitem__)
        if others[largest] < _LIMITS * self.seconds:
            largest = max(kinds, key=kinds.__getitem__)
        return f"{largest} {kinds[largest] / self.seconds:.0%}"

    @property
    def words(self) -> str:
        return words(self.layout.settings, self.setup.gpus)

    def time_shares(self) -> dict[str, float]:
        """Return the share of the step by kind, largest first."""
        return _shares(self.layout.time.kinds)

    def memory_shares(self) -> dict[str, float]:
        """Return the share of the peak memory by kind, largest first."""
        return _shares(self.layout.memory.kinds)

    def as_dict(self) -> dict[str, Any]:
        """Return the figures as plain data, for JSON."""
        memory = self.layout.memory
        return {
            "layout": self.words,
            "settings": self.layout.settings,
            "seconds": self.seconds,
            "tokens_per_second_per_gpu": self.tokens_per_gpu,
            "mfu": self.mfu,
            "peak_bytes": memory.total,
            "free_bytes": self.free,
            "limited_by": self.limit,
            "seconds_by_kind": dict(self.layout.time.kinds),
            "bytes_by_kind": dict(memory.kinds),
            "bytes_by_group": by_group(memory),
            "stage": memory.stage,
        }


def _shares(kinds: Mapping[str, float]) -> dict[str, float]:
    total = sum(kinds.values()) or 1.0
    ordered = sorted(kinds, key=kinds.__getitem__, reverse=True)
    return {kind: kinds[kind] / total for kind in ordered if kinds[kind] > 0}


def words(settings: Settings, gpus: int) -> str:
    """Describe a layout in a line: ``tp 2, cp 8 (a2a+p2p 4x2), dp 1; loss in chunks``."""
    names = NAME.model
    tp, pp, cp = (
        settings[name]
        for name in (names.tensor_model_parallel_size, names.pipeline_model_parallel_size, names.context_parallel_size)
    )
    levels = settings[names.hierarchical_context_parallel_sizes]
    transport = settings[names.cp_comm_type] + (f" {'x'.join(map(str, levels))}" if levels else "")
    virtual, ep = settings[names.virtual_pipeline_model_parallel_size], settings[names.expert_model_parallel_size]
    etp, micro = settings[names.expert_tensor_parallel_size], settings[NAME.train.micro_batch_size]
    if settings.get(names.dynamic_context_parallel):
        transport = f"dynamic, {settings[names.max_seqlen_per_dp_cp_rank]} tokens a rank, {transport}"
    sizes = [
        f"tp {tp}" if tp > 1 else "",
        f"pp {pp}" + (f" x {virtual}" if virtual else "") if pp > 1 else "",
        f"cp {cp} ({transport})" if cp > 1 else "",
        f"dp {gpus // (tp * pp * cp)}",
        f"ep {ep}" if ep > 1 else "",
        f"etp {etp}" if etp else "",
        f"{micro} samples a microbatch" if micro > 1 else "",
    ]
    return "; ".join(filter(None, [", ".join(filter(None, sizes)), *_memory_words(settings)]))


def _memory_words(settings: Settings) -> list[str]:
    names = NAME.model
    granularity, layers = settings[names.recompute_granularity], settings[names.recompute_num_layers]
    found = []
    if granularity == "full":
        found.append(
            "all recomputed" if settings[names.recompute_method] == "uniform" else f"{layers} layers recomputed"
        )
    elif granularity:
        found.append(f"{' and '.join(settings[names.recompute_modules] or ['core_attn'])} recomputed")
    if settings[names.cross_entropy_chunk_size]:
        found.append("loss in chunks")
    if settings[names.mlp_chunk_size]:
        found.append("MLP in tiles")
    if settings[names.offload_layer_inputs]:
        found.append("layer inputs on the host")
    if (count := settings[names.attention_head_groups]) > 1:
        found.append(f"attention in {count} groups of heads")
    ends = (names.num_layers_in_first_pipeline_stage, names.num_layers_in_last_pipeline_stage)
    counted = (names.account_for_embedding_in_pipeline_split, names.account_for_loss_in_pipeline_split)
    if any(settings[name] for name in (*ends, *counted)):
        found.append("fewer layers at the ends")
    return found
