"""Router of a mixture of experts, for packed batches."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import Any

import torch
import torch.distributed as dist
from megatron.core.process_groups_config import ProcessGroupCollection
from megatron.core.transformer.moe.moe_logging import get_moe_metrics_tracker
from megatron.core.transformer.moe.router import TopKRouter
from megatron.core.transformer.transformer_config import TransformerConfig
from torch import Tensor

from megatron_cp.parallel.collectives import sum_over_ranks


class PackedRouter(TopKRouter):
    """Router whose load-balancing loss weighs a pack by the real tokens of all ranks.

    ``active_group`` sets ``cp_group`` and ``tp_cp_group`` to the microbatch's. Upstream weighs each rank's share of the
    loss by this rank's tokens, which is correct only with equal numbers. With padding it counts all ranks' tokens
    (moe_utils.py:271 reduces the sum in place and reads it afterwards), so the loss is too large by the number of
    ranks. A dummy microbatch without tokens (``idle``) would make it 0 / 0.
    """

    idle = False
    _real_tokens: Tensor | None = None  # of this rank, in the current microbatch; None without padding

    def routing(self, logits: Tensor, padding_mask: Tensor | None = None) -> Any:
        self._real_tokens = None if padding_mask is None else (~padding_mask).sum()
        return super().routing(logits, padding_mask=padding_mask)

    def apply_z_loss(self, logits: Tensor, padding_mask: Tensor | None = None) -> Tensor:
        if self.idle:
            return logits
        get_moe_metrics_tracker().tokens = logits.shape[0] if padding_mask is None else self._real_tokens
        return super().apply_z_loss(logits, padding_mask=padding_mask)

    def _apply_expert_bias(self, routing_map: Tensor, padding_mask: Tensor | None = None) -> None:
        """Mask ``[tokens, experts]`` by ``[tokens]``; upstream mismatches the shapes."""
        super()._apply_expert_bias(routing_map if padding_mask is None else routing_map & ~padding_mask[:, None])

    def attach_and_log_load_balancing_loss(
        self, activation: Tensor, coefficient: float, loss: Tensor, name: str, group: dist.ProcessGroup, **more: Any
    ) -> Tensor:
        if self.idle:
            return activation
        if self._real_tokens is not None:
            more["valid_token_count"] = sum_over_ranks(self._real_tokens.to(torch.float32), group) / group.size()
        tokens = more.get("valid_token_count")
        get_moe_metrics_tracker().tokens = activation.shape[0] if tokens is None else tokens
        return super().attach_and_log_load_balancing_loss(activation, coefficient, loss, name, group, **more)


def expert_biases(chunks: Iterable[torch.nn.Module]) -> list[Tensor]:
    """List the biases of all routers of these modules."""
    return [router.expert_bias for router in routers_in(chunks) if router.expert_bias is not None]


def routers_in(parts: Iterable[torch.nn.Module]) -> Iterator[PackedRouter]:
    """Yield all routers of these modules."""
    return (module for part in parts for module in part.modules() if isinstance(module, PackedRouter))


def shard_padding_mask(
    padding_mask: Tensor | None, config: TransformerConfig, groups: ProcessGroupCollection
) -> Tensor | None:
    """Return the shard of a microbatch's ``[b, s_local]`` mask for this rank's layers.

    Under sequence parallelism layers hold a slice of the tokens. Upstream's GPT model slices the mask on the first
    pipeline stage only, over the global group, and its hybrid model never.
    """
    if padding_mask is None or not config.sequence_parallel:
        return padding_mask
    return padding_mask.chunk(groups.tp.size(), dim=1)[groups.tp.rank()]
