"""Inputs of a model's construction."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from megatron.core.process_groups_config import ProcessGroupCollection
from megatron.core.transformer.transformer_config import TransformerConfig

from megatron_cp.config.run_config import ModelConfig
from megatron_cp.models.layers.norms import TorchNorm
from megatron_cp.parallel.host_memory import HostMemory


@dataclass(frozen=True)
class Build:
    """Inputs of a model's construction.

    ``seed``: of the initial weights. ``core_attention``: the class that :func:`choose_attention` returned.
    """

    model: ModelConfig
    core_config: TransformerConfig
    groups: ProcessGroupCollection
    seed: int
    core_attention: type
    host_memory: HostMemory = field(default_factory=HostMemory)

    @property
    def with_te(self) -> bool:
        """Whether the layers are Transformer Engine's."""
        return uses_te_layers(self.core_config)

    @property
    def norm(self) -> Any:
        """The class of the model's norms."""
        if not self.with_te:
            return TorchNorm
        from megatron.core.extensions.transformer_engine import TENorm

        return TENorm


def uses_te_layers(core_config: TransformerConfig) -> bool:
    return core_config.transformer_impl == "transformer_engine"
