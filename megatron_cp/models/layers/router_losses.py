"""Router losses of a step: means over layers and tokens, without coefficients.

megatron-core keeps a sum a layer and reduces it over the groups it saw last, but packs change groups with every
microbatch. It also weighs microbatches equally, while gradients weigh them by tokens. Here each rank also counts the
tokens behind each value, so one sum over all ranks is enough.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from megatron.core.transformer.moe.moe_logging import set_moe_metrics_tracker
from megatron.core.transformer.transformer_config import TransformerConfig
from torch import Tensor

from megatron_cp.parallel.collectives import sum_over_ranks

_BALANCES = {  # names in megatron-core's logs
    "aux_loss": "load_balancing_loss",
    "seq_aux_loss": "seq_load_balancing_loss",
    "global_aux_loss": "global_load_balancing_loss",
}


class RouterLosses:
    """Recorder of router losses, in place of megatron-core's tracker.

    tokens: mean number of tokens of the ranks that share the next recorded value; set by routers.
    """

    tokens: Tensor | int = 1

    def __init__(self, config: TransformerConfig, device: torch.device) -> None:
        balance = _BALANCES.get(config.moe_router_load_balancing_type)
        names = [balance] if balance and config.moe_aux_loss_coeff else []
        names += ["z_loss"] if config.moe_z_loss_coeff is not None else []
        self._index = {name: index for index, name in enumerate(names)}
        self._records = torch.zeros(2, len(names), dtype=torch.float64, device=device)  # sums, and their tokens
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
        """Record a loss of one layer and microbatch.

        ``value`` is this rank's part of a loss over ``reduce_group``, or without it this rank's own loss. A layer
        that several depths share records each depth's part of its mean.
        """
        parts = 1 if reduce_group is None else reduce_group.size()
        if layer_number > self._layers:
            parts *= self._uses
        index = self._index[name]
        self._records[0, index] += value.detach() * (self.tokens * parts)
        self._records[1, index] += self.tokens

    def begin(self) -> None:
        """Clear the records, and record from now on."""
        set_moe_metrics_tracker(self)
        self._records.zero_()

    def means(self, group: dist.ProcessGroup) -> dict[str, Tensor]:
        """Return each loss, averaged over ``group``, 0 if missing. Collective."""
        if not self._index:
            return {}
        sums, tokens = sum_over_ranks(self._records.clone(), group)
        means = torch.where(tokens > 0, sums / tokens, 0.0)
        return {name: means[index] for name, index in self._index.items()}
