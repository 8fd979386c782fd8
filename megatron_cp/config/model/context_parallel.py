"""Context parallelism and packing."""

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
        "how keys and values, or heads, are exchanged: a transport, auto, or a list with one per layer",
        LAYOUT,
        translated=True,
        expected="cp_comm_type must be a str or list of str",
    )
    hierarchical_context_parallel_sizes: list[int] | None = setting(
        None, "[a2a, p2p]: ranks of the all-to-all and of the ring around it", LAYOUT, translated=True
    )
    dynamic_context_parallel: bool = setting(False, "a sample's length decides how many ranks share it", LAYOUT)
    min_dynamic_context_parallel_size: int = size(1, "the fewest ranks that share a sample", LAYOUT, when=DYNAMIC)
    max_seqlen_per_dp_cp_rank: int | None = size(
        None, "tokens of a microbatch on a rank; null: a sample's, divided by cp and rounded up", LAYOUT, when=PACKS
    )
    sequence_packing_scheduler: Literal["default_dynamic_cp", "dp_balanced"] | None = setting(
        None, "packs samples of different lengths; null: all samples have one length", LAYOUT
    )
    dynamic_context_parallel_calibration_iters: int = setting(
        10,
        "iterations whose times the cost model is fitted to; 0: the model's shape decides",
        LAYOUT,
        least=0,
        when=DYNAMIC,
    )
