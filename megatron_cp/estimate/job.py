"""Inputs and results of the memory and time models.

A job has a model, a batch, a layout and number formats. Pure.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal

from megatron_cp.config.model_config import ModelConfig
from megatron_cp.config.sections.distributed import DistributedDataParallelConfig
from megatron_cp.config.sections.optimization import OptimizerConfig
from megatron_cp.parallel.layout import RankLayout

# Number format of matrix products. Other operations run in bf16, or in fp32 if this is fp32.
Gemm = Literal["fp32", "bf16", "fp8", "mxfp8", "nvfp4"]


@dataclass(frozen=True)
class Job:
    """A training step of a finalized configuration on ``layout.world_size`` GPUs.

    vocab_size: rows of the output layer, before padding to tensor parallel ranks.
    gemm: number format of matrix products.
    lengths: documents of a typical packed microbatch (tokens), for packed data; None for samples of one length.
    expert_load: tokens routed to the busiest expert rank, divided by the mean over ranks.
    pack_load: tokens of the packed microbatch that runs at the peak of memory, divided by those of ``lengths``. These
        are then the mean of the microbatches under way.
    """

    model: ModelConfig
    optimizer: OptimizerConfig
    ddp: DistributedDataParallelConfig
    layout: RankLayout
    micro_batch_size: int
    global_batch_size: int
    vocab_size: int
    gemm: Gemm = "bf16"
    lengths: tuple[int, ...] | None = None
    expert_load: float = 1.0
    pack_load: float = 1.0

    @property
    def microbatches(self) -> int:
        """Microbatches of a step on each data parallel replica, at least 1."""
        return max(1, self.global_batch_size // (self.micro_batch_size * self.layout.dp))

    @property
    def tokens_per_rank(self) -> int:
        """Tokens of a microbatch on each context parallel rank."""
        whole = sum(self.lengths) if self.lengths else self.micro_batch_size * (self.model.seq_length or 0)
        return -(-whole // self.layout.cp)

    @property
    def positions_per_rank(self) -> int:
        """Positions of a rank's tables.

        They are those of its part of a sample, or of the longest packed document.
        """
        return max(self.lengths) if self.lengths else -(-(self.model.seq_length or 0) // self.layout.cp)


@dataclass(frozen=True)
class MemoryEstimate:
    """Peak bytes of the GPU with the highest memory use, by kind.

    kinds: ``weights``, ``gradients``, ``optimizer``, ``activations: KIND`` for each kind of activation, ``logits``,
    ``buffers`` (communication and kernels) and ``allocator`` (fragmentation and CUDA context).
    stage: pipeline stage of the GPU.
    host: bytes of pinned host memory of the rank, beside the GPU's (``model.offload_layer_inputs``).
    """

    kinds: Mapping[str, float]
    stage: int
    host: float = 0.0

    @property
    def total(self) -> float:
        return sum(self.kinds.values())


@dataclass(frozen=True)
class TimeEstimate:
    """Seconds of a training step, by kind; the sum is the step time.

    kinds: ``matrix products``, ``attention``, ``elementwise`` (norms, activations, router, embedding),
    ``recomputation``, ``exposed GROUP`` for the exposed communication of each group (tp, cp, ep, dp, pp),
    ``exposed offload`` (copies of layer inputs), ``bubble``, ``optimizer``, ``host``.
    model_flops: model FLOPs of a step over all GPUs (see estimate/flops.py).
    """

    kinds: Mapping[str, float]
    model_flops: float

    @property
    def seconds(self) -> float:
        return sum(self.kinds.values())
