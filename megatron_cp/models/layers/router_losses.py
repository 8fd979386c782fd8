"""What a step reports of its routers' losses: each one's mean over layers and tokens, without its coefficient.

megatron-core keeps a sum for each layer and reduces it over the groups that it saw last, which packs change with every
microbatch; and microbatches count alike there, where the gradients weigh them by their tokens. Here each rank also
counts the tokens that a value is of, so that one sum over all ranks is enough.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from megatron.core.transformer.moe.moe_logging import set_moe_metrics_tracker
from megatron.core.transformer.transformer_config import TransformerConfig
from torch import Tensor

from megatron_cp.parallel.collectives import sum_over_ranks

_BALANCES = {  # as megatron-core's logs call them
    "aux_loss": "load_balancing_loss",
    "seq_aux_loss": "seq_load_balancing_loss",
    "global_aux_loss": "global_load_balancing_loss",
}


class RouterLosses:
    """Collects what this process's routers record, in place of megatron-core's tracker.

    tokens: of each rank that has a part of what is recorded next, on the average; routers say so.
    """

    tokens: Tensor | int = 1

    def __init__(self, config: TransformerConfig, device: torch.device) -> None:
        balance = _BALANCES.get(config.moe_router_load_balancing_type)
        names = [balance] if balance and config.moe_aux_loss_coeff else []
        names += ["z_loss"] if config.moe_z_loss_coeff is not None else []
        self._place = {name: place for place, name in enumerate(names)}
        self._recorded = torch.zeros(2, len(names), dtype=torch.float64, device=device)  # sums, and their tokens
        self._layers = config.num_layers
        self._uses = config.mtp_num_layers if config.mtp_use_repeated_layer else 1

    def record(
        self,
        name: str,
        value: Tensor,
        layer_number: int,
        num_layers: int,
        reduce_group: dist.ProcessGroup | None = None,
        **averaging: Any,
    ) -> None:
        """Of one layer and microbatch: a part of the loss, of which the ranks of ``reduce_group`` have the others, or
        without it this rank's own. A layer that several depths share records each depth's part of its mean."""
        parts = 1 if reduce_group is None else reduce_group.size()
        if layer_number > self._layers:
            parts *= self._uses
        place = self._place[name]
        self._recorded[0, place] += value.detach() * (self.tokens * parts)
        self._recorded[1, place] += self.tokens

    def begin(self) -> None:
        """Forget what was recorded, and record what comes."""
        set_moe_metrics_tracker(self)
        self._recorded.zero_()

    def means(self, group: dist.ProcessGroup) -> dict[str, Tensor]:
        """Each loss over the ranks of ``group``, by name, on the device: 0 where nothing was recorded. Collective."""
        if not self._place:
            return {}
        sums, tokens = sum_over_ranks(self._recorded.clone(), group)
        means = torch.where(tokens > 0, sums / tokens, 0.0)
        return {name: means[place] for name, place in self._place.items()}
