"""The model's settings, one base class per topic, and values derived from them."""

from __future__ import annotations

import math
from dataclasses import dataclass

from megatron_cp.config.model.attention import Attention
from megatron_cp.config.model.context_parallel import ContextParallel
from megatron_cp.config.model.experts import Experts
from megatron_cp.config.model.latent_attention import LatentAttention
from megatron_cp.config.model.mamba import Mamba
from megatron_cp.config.model.memory import Memory
from megatron_cp.config.model.multi_token_prediction import MultiTokenPrediction
from megatron_cp.config.model.parallel import Parallel
from megatron_cp.config.model.positions import Positions
from megatron_cp.config.model.shape import Shape
from megatron_cp.config.model.width import Width


@dataclass
class ModelConfig(
    Memory,
    ContextParallel,
    Parallel,
    Experts,
    MultiTokenPrediction,
    Mamba,
    LatentAttention,
    Attention,
    Positions,
    Width,
    Shape,
):
    """Architecture, parallel layout, memory and precision of the model.

    Fields are in the order of the bases from last to first, as dataclasses inherit.
    """

    @property
    def kv_heads(self) -> int:
        """Key/value heads of attention; latent attention has as many as query heads."""
        groups = None if self.multi_latent_attention else self.num_query_groups
        return groups or self.num_attention_heads

    @property
    def attended_heads(self) -> int:
        """Query heads of a tensor-parallel rank that attention exchanges at one time."""
        return max(1, self.num_attention_heads // max(1, self.tensor_model_parallel_size * self.attention_head_groups))

    @property
    def has_local_rotary(self) -> bool:
        """Whether layers with a window have a separate rotary base."""
        return self.rotary_base_local is not None and self.position_embedding_type == "rope"

    def layer_has_window(self, layer_number: int) -> bool:
        """Return whether a layer (1-based) uses ``window_size``."""
        every = self.window_attn_skip_freq
        if self.window_size is None or every is None:
            return self.window_size is not None
        if isinstance(every, list):
            return bool(every[min(layer_number, len(every)) - 1])
        return layer_number % every != 0

    @property
    def yarn_length(self) -> int | None:
        """Positions with YaRN: scaling factor * original length, rounded; None if unset."""
        length = (self.yarn_rotary_scaling_factor or 0) * (self.yarn_original_max_position_embeddings or 0)
        return round(length) if self.position_embedding_type == "yarn" and 1 <= length < math.inf else None

    @property
    def layer_types(self) -> tuple[str, ...]:
        """Parts of each layer: ``*`` attention, ``-`` MLP, ``E`` experts, ``M`` Mamba."""
        if self.architecture == "hybrid":
            return tuple((self.hybrid_layer_pattern or "").split("/")[0].replace("|", ""))
        if self.num_moe_experts is None:
            return ("*-",) * self.num_layers
        every = self.moe_layer_freq
        if not isinstance(every, list):
            every = [index % max(1, every) == 0 for index in range(self.num_layers)]
        return tuple("*E" if experts else "*-" for experts in every)

    @property
    def layer_letters(self) -> frozenset[str]:
        """The letters of all layers, computed without a list of ``num_layers`` entries.

        ``num_layers`` may be absurdly large before the rules run.
        """
        if self.architecture == "hybrid":
            return frozenset(self.hybrid_layer_pattern or "") - set("|/")
        if self.num_moe_experts is None:
            return frozenset("*-")
        every = self.moe_layer_freq
        chosen = set(map(bool, every)) if isinstance(every, list) else {True, every <= 1 or self.num_layers <= 1}
        return frozenset({"*"} | {"E" if experts else "-" for experts in chosen})

    @property
    def fewest_ranks(self) -> int:
        """Ranks of one model replica: tp * pp * cp, at least 1."""
        return max(1, self.tensor_model_parallel_size * self.pipeline_model_parallel_size * self.context_parallel_size)

    def data_parallel_size(self, world_size: int) -> int:
        """Return the number of data-parallel replicas."""
        return world_size // self.fewest_ranks

    @property
    def tokens_per_rank(self) -> int:
        """Tokens per rank of the longest sample on cp ranks, padded."""
        width = max(1, self.tensor_model_parallel_size) if self.sequence_parallel else 1
        unit = 2 * max(1, self.context_parallel_size) * width
        return -(-max(1, self.seq_length or 1) // unit) * 2 * width

    @property
    def transports(self) -> tuple[str, ...]:
        """The entries of ``cp_comm_type``, each once, in the order of the layers."""
        return tuple(dict.fromkeys([self.cp_comm_type] if isinstance(self.cp_comm_type, str) else self.cp_comm_type))
