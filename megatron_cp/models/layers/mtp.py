"""Multi-token prediction (MTP): megatron-core's block, with tokens shifted exactly under context parallelism.

Depth k (1, 2, ...) predicts, at position i, the label of position i + k, from the main model's state at i and the
tokens up to i + k (DeepSeek-V3 Technical Report, arXiv:2412.19437, section 2.2). Tokens, labels and loss masks of a
depth are those of the depth before, shifted by one to the left within each sequence; what runs over its end is 0, so
that a document's last k positions have no depth-k loss. The objective is

    lm loss + mtp_loss_scaling_factor / depths * sum over k of (mtp_k loss)

where each loss is the sum over its own unmasked tokens of the *global* batch, divided by their number: what one rank
with all samples in one microbatch computes. (megatron-core divides by the tokens of each rank and microbatch.)
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import torch
import torch.distributed as dist
from megatron.core.packed_seq_params import PackedSeqParams
from megatron.core.process_groups_config import ProcessGroupCollection
from megatron.core.transformer.multi_token_prediction import (
    MultiTokenPredictionBlockSubmodules,
    MultiTokenPredictionLayer,
    get_mtp_layer_spec,
)
from megatron.core.transformer.spec_utils import ModuleSpec
from megatron.core.transformer.transformer_config import TransformerConfig
from megatron.core.utils import make_viewless_tensor
from torch import Tensor

from megatron_cp.dynamic_cp.runtime.active_group import active_group
from megatron_cp.models.build import Build
from megatron_cp.models.initial_weights import drawing_from, seed_of
from megatron_cp.models.layers.router import routers_in
from megatron_cp.parallel.collectives import gather_tensors
from megatron_cp.parallel.transfer import send


class MTPLayer(MultiTokenPredictionLayer):
    """One depth, whose weights depend on the seed and its number, and whose tokens follow the padded sequences.

    Of a hybrid model it has layers by a pattern of its own.
    """

    def __init__(
        self,
        config: TransformerConfig,
        *args: Any,
        initialization_seed: int,
        layer_number: int = 1,
        pg_collection: ProcessGroupCollection,
        **kwargs: Any,
    ) -> None:
        seed = seed_of(initialization_seed, f"mtp {layer_number}")
        if kwargs.get("hybrid_submodules") is not None:
            # Its layers are numbered from 1, as the model's own and those of each other depth.
            kwargs["hybrid_submodules"] = _drawn_from(kwargs["hybrid_submodules"], seed)
        if isinstance(config.cp_comm_type, list):
            # Upstream numbers these layers from 1 and would give them the first layers' transports.
            config = copy.copy(config)
            config.cp_comm_type = config.cp_comm_type[-1]
        with drawing_from(seed):
            super().__init__(config, *args, layer_number=layer_number, pg_collection=pg_collection, **kwargs)
        self.pg_collection = pg_collection
        for router in routers_in([self]):
            # Upstream's hybrid stack does not say so. A router's losses are then counted once for each use of a layer
            # that all depths share, and kept under its layer's number in the depth, for which there may be no place.
            router.is_mtp_layer = True
            router.set_layer_number(layer_number)

    def _get_embeddings(
        self,
        input_ids: Tensor,
        position_ids: Tensor,
        embedding: Callable[..., Tensor],
        hidden_states: Tensor,
        packed_seq_params: PackedSeqParams | None = None,
        padding_mask: Tensor | None = None,
    ) -> tuple[Tensor, Tensor, Tensor | None, Tensor, Tensor]:
        with active_group(self.pg_collection, packed_seq_params):
            input_ids = shift_left(input_ids, self.pg_collection.cp, packed_seq_params)
        # Positions are those of the queries: rotary embeddings are handed down, and no others are supported.
        embeddings = embedding(input_ids=input_ids, position_ids=position_ids)
        hidden_states = make_viewless_tensor(inp=hidden_states, requires_grad=True, keep_graph=True)
        # Not shifted: padding lies where it lies, and a sequence's last positions are as real as on one rank.
        return input_ids, position_ids, padding_mask, embeddings, hidden_states

    def _checkpointed_forward(self, *args: Any, **kwargs: Any) -> Tensor:
        if self.mtp_layer_pattern is None:
            return super()._checkpointed_forward(*args, **kwargs)
        return self._proj_and_transformer_layer(*args, **kwargs)  # a hybrid model's stack recomputes its layers itself


def _drawn_from(layers: Any, seed: int) -> Any:
    """The specs of a hybrid stack, whose layers draw their initial weights from another seed."""
    seeded = copy.copy(layers)
    for name, spec in vars(layers).items():
        if "initialization_seed" in getattr(spec, "params", ()):
            setattr(seeded, name, replace(spec, params=spec.params | {"initialization_seed": seed}))
    return seeded


def mtp_block_spec(build: Build, model_layer: ModuleSpec | None) -> MultiTokenPredictionBlockSubmodules:
    """The spec of all depths, each with norms like the model's own and a layer like ``model_layer``, or by the pattern
    of a hybrid model; or of the one that all depths share."""
    model = build.model
    layer = get_mtp_layer_spec(model_layer, build.with_te)
    submodules = layer.submodules
    submodules.enorm = submodules.hnorm = submodules.layer_norm = build.norm
    layer = ModuleSpec(module=MTPLayer, submodules=submodules, params={"initialization_seed": build.seed})
    layers = 1 if model.mtp_use_repeated_layer else model.mtp_num_layers or 0
    return MultiTokenPredictionBlockSubmodules(layer_specs=[layer] * layers)


@torch.no_grad()
def shift_left(values: Tensor, group: dist.ProcessGroup, packed: PackedSeqParams | None = None) -> Tensor:
    """``values[..., i + 1]`` at each position i of each sequence, and 0 at its end.

    Args:
        values: [..., t_local], this rank's part of sequences that are sliced over ``group`` in zigzag order.
        packed: of several sequences in a row, each sliced for itself, by their *padded* lengths; otherwise the last
            dimension is one sequence.

    One collective over ``group``, of two values a sequence and row.
    """
    rank, size = group.rank(), group.size()
    if packed is None:
        edges = send(torch.tensor([0, values.shape[-1]]), values.device)
    else:
        lengths = packed.cu_seqlens_q if packed.cu_seqlens_q_padded is None else packed.cu_seqlens_q_padded
        edges = lengths.long() // size
    shifted = torch.roll(values, -1, dims=-1)
    if size == 1:
        shifted[..., edges[1:] - 1] = 0
        return shifted
    # Rank r holds chunks r and 2 * size - 1 - r of each sequence, one after the other.
    first, second = edges[:-1], (edges[:-1] + edges[1:]) // 2
    heads = torch.stack([values[..., first], values[..., second]])
    gathered = gather_tensors(heads, group)
    if rank < size - 1:  # the last rank holds both neighbours of the middle
        shifted[..., second - 1] = gathered[rank + 1, 0]
    shifted[..., edges[1:] - 1] = gathered[rank - 1, 1] if rank else 0
    return shifted


def unmasked_tokens(loss_mask: Tensor, position_ids: Tensor, depths: int) -> Tensor:
    """Unmasked tokens of the main loss and of each depth's, [1 + depths] in float64, of one microbatch of this rank.

    A token that is k or more positions into its sequence is somebody's target at depth k, on this rank or another;
    summed over the context-parallel ranks the numbers are those of the shifted masks, without shifting any.
    """
    return torch.stack([(loss_mask * (position_ids >= depth)).sum(dtype=torch.float64) for depth in range(1 + depths)])


def depth_weights(config: TransformerConfig, tokens: Sequence[float]) -> tuple[float, ...]:
    """What each depth's sum of losses is multiplied with, before all is divided by the main loss's tokens.

    ``tokens`` are the :func:`unmasked_tokens` of the global batch. A depth without any has no loss and no weight.
    """
    factor = (config.mtp_loss_scaling_factor or 0.0) / max(1, len(tokens) - 1)
    return tuple(factor * tokens[0] / count if count else 0.0 for count in tokens[1:])
