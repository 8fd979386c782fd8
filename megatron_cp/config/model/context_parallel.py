"""Context parallelism and packing"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from megatron_cp.config.setting import LAYOUT, When, equals, setting, size

PACKS = When(
    "model.sequence_packing_scheduler or dist.eval_context_parallel_size",
    lambda run: run.runs_packs,
    "model.sequence_packing_scheduler=dp_balanced",
)
DYNAMIC = equals("model.dynamic_context_parallel", True)


@dataclass
class ContextParallel:
    context_parallel_size: int = size(1, "cp: ranks that share a sequence", LAYOUT, flags="-cp --context_parallel_size")
    cp_comm_type: str | list[str] = setting(
        "p2p",
        "transport of keys and values, or heads: a name, auto, or a list with one per layer",
        LAYOUT,
        translated=True,
        expected="cp_comm_type must be a str or list of str",
    )
    hierarchical_context_parallel_sizes: list[int] | None = setting(
        None, "[a2a, p2p]: ranks of the all-to-all level and of the ring level", LAYOUT, translated=True
    )
    dynamic_context_parallel: bool = setting(False, "choose the ranks that share a sample by its length", LAYOUT)
    min_dynamic_context_parallel_size: int = size(
        1, "smallest number of ranks that share a sample", LAYOUT, when=DYNAMIC
    )
    max_seqlen_per_dp_cp_rank: int | None = size(
        None, "tokens of a microbatch per rank; null: the longest sample / cp, rounded up", LAYOUT, when=PACKS
    )
    sequence_packing_scheduler: Literal["default_dynamic_cp", "dp_balanced"] | None = setting(
        None, "scheduler that packs samples of varying length; null: all samples have one length", LAYOUT
    )
    packed_placement: Literal["zigzag", "balanced"] = setting(
        "zigzag",
        "documents of a pack on the ranks of its group: zigzag cuts each over all of them; balanced cuts few, with "
        "equal tokens and nearly equal attention work",
        LAYOUT,
        when=PACKS,
    )
    packed_shape_buckets: int = setting(
        0,
        "pad packs, so that their tokens per rank are one of at most so many numbers (CUDA graphs need few); 0: any",
        LAYOUT,
        least=0,
        when=PACKS,
    )
    dynamic_context_parallel_calibration_iters: int = setting(
        10,
        "iterations timed to calibrate the cost model; 0: estimate from the model's shape",
        LAYOUT,
        least=0,
        when=DYNAMIC,
    )
