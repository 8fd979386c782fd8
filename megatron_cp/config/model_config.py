"""The model: one class of settings a concern, and what follows from several of them."""

from __future__ import annotations

import math
from dataclasses import dataclass

from megatron_cp.config.model.attention import Attention
from megatron_cp.config.model.context_parallel import ContextParallel
from megatron_cp.config.model.experts import Experts
from megatron_cp.config.model.further_tokens import FurtherTokens
from megatron_cp.config.model.latent_attention import LatentAttention
from megatron_cp.config.model.mamba import Mamba
from megatron_cp.config.model.memory import Memory
from megatron_cp.config.model.parallel import Parallel
from megatron_cp.config.model.positions import Positions
from megatron_cp.config.model.shape import Shape
from megatron_cp.config.model.width import Width

# In the order in which they are printed.
CONCERNS = (
    Shape,
    Width,
    Positions,
    Attention,
    LatentAttention,
    Mamba,
    FurtherTokens,
    Experts,
    Parallel,
    ContextParallel,
    Memory,
)


@dataclass
class ModelConfig(
    Memory,
    ContextParallel,
    Parallel,
    Experts,
    FurtherTokens,
    Mamba,
    LatentAttention,
    Attention,
    Positions,
    Width,
    Shape,
):
    """Architecture, parallel layout, and choices of memory and precision; a dataclass takes the last base's first."""

    @property
    def kv_heads(self) -> int:
        """Key/value heads that attention meets: latent attention makes keys and values for every head."""
        groups = None if self.multi_latent_attention else self.num_query_groups
        return groups or self.num_attention_heads

    @property
    def yarn_length(self) -> int | None:
        """Positions under YaRN, scaling factor * original length, rounded; None without YaRN or without the two."""
        length = (self.yarn_rotary_scaling_factor or 0) * (self.yarn_original_max_position_embeddings or 0)
        return round(length) if self.position_embedding_type == "yarn" and 1 <= length < math.inf else None

    @property
    def layer_parts(self) -> tuple[str, ...]:
        """What each layer is made of: attention ``*``, an MLP ``-``, experts ``E``, Mamba ``M``."""
        if self.architecture == "hybrid":
            return tuple((self.hybrid_layer_pattern or "").split("/")[0].replace("|", ""))
        if self.num_moe_experts is None:
            return ("*-",) * self.num_layers
        every = self.moe_layer_freq
        if not isinstance(every, list):
            every = [index % max(1, every) == 0 for index in range(self.num_layers)]
        return tuple("*E" if experts else "*-" for experts in every)

    @property
    def parts(self) -> frozenset[str]:
        """The letters of all layers, without a list of layers, of which there may be absurdly many."""
        if self.architecture == "hybrid":
            return frozenset(self.hybrid_layer_pattern or "") - set("|/")
        if self.num_moe_experts is None:
            return frozenset("*-")
        every = self.moe_layer_freq
        chosen = set(map(bool, every)) if isinstance(every, list) else {True, every <= 1 or self.num_layers <= 1}
        return frozenset({"*"} | {"E" if experts else "-" for experts in chosen})

    @property
    def transports(self) -> tuple[str, ...]:
        """The entries of ``cp_comm_type``, each once, in the order of the layers."""
        return tuple(dict.fromkeys([self.cp_comm_type] if isinstance(self.cp_comm_type, str) else self.cp_comm_type))
