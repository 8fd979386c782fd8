"""Multi-token prediction (MTP), exact under context parallelism.

Depth k (1, 2, ...) predicts, at position i, the label of position i + k. Its inputs are the main model's state at i and
the tokens up to i + k (DeepSeek-V3 Technical Report, arXiv:2412.19437, section 2.2). A depth's tokens, labels and loss
masks are those of the depth before, shifted left by one within each sequence. The shift adds 0 at the end, so a
document's last k positions have no depth-k loss. The objective is

    lm loss + mtp_loss_scaling_factor / depths * sum over k of (mtp_k loss)

where each loss is the sum over its unmasked tokens of the *global* batch, divided by their number: what one rank
computes with all samples in one microbatch. (megatron-core divides by the tokens of each rank and microbatch.)
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

from megatron_cp.attention.placement.layout import PlacedLayout
from megatron_cp.dynamic_cp.runtime.active_group import active_group
from megatron_cp.models.build import Build
from megatron_cp.models.initial_weights import drawing_from, seed_of
from megatron_cp.models.layers.router import routers_in
from megatron_cp.parallel.collectives import gather_tensors
from megatron_cp.parallel.transfer import send


class MTPLayer(MultiTokenPredictionLayer):
    """One depth, with seeded weights and exactly shifted tokens.

    The weights depend on the seed and the depth only. In a hybrid model each depth has its own layer pattern.
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
            # Layers are numbered from 1 in the model and in each depth.
            kwargs["hybrid_submodules"] = _with_seed(kwargs["hybrid_submodules"], seed)
        if isinstance(config.cp_comm_type, list):
            # Upstream numbers these layers from 1, which would select the first layers' transports.
            config = copy.copy(config)
            config.cp_comm_type = config.cp_comm_type[-1]
        with drawing_from(seed):
            super().__init__(config, *args, layer_number=layer_number, pg_collection=pg_collection, **kwargs)
        self.pg_collection = pg_collection
        for router in routers_in([self]):
            # Upstream's hybrid stack does not set this. It would count a router's losses once for each use of a shared
            # layer, under the layer's number in the depth, for which there may be no entry.
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
        # Positions are the queries': rotary embeddings are passed in, others are not supported.
        embeddings = embedding(input_ids=input_ids, position_ids=position_ids)
        hidden_states = make_viewless_tensor(inp=hidden_states, requires_grad=True, keep_graph=True)
        # Not shifted: padding stays in place, and a sequence's last positions are real as on a single rank.
        return input_ids, position_ids, padding_mask, embeddings, hidden_states

    def _checkpointed_forward(self, *args: Any, **kwargs: Any) -> Tensor:
        if self.mtp_layer_pattern is None:
            return super()._checkpointed_forward(*args, **kwargs)
        # HybridStack recomputes its own layers, so the depth must not recompute them again.
        return self._proj_and_transformer_layer(*args, **kwargs)


def _with_seed(layers: Any, seed: int) -> Any:
    """Copy a hybrid stack's specs with another seed of initial weights."""
    seeded = copy.copy(layers)
    for name, spec in vars(layers).items():
        if "initialization_seed" in getattr(spec, "params", ()):
            setattr(seeded, name, replace(spec, params=spec.params | {"initialization_seed": seed}))
    return seeded


def mtp_block_spec(build: Build, model_layer: ModuleSpec | None) -> MultiTokenPredictionBlockSubmodules:
    """Build the spec of all depths, or of the one that all depths share.

    Norms are the model's own. Layers are like ``model_layer``, or follow the pattern of a hybrid model.
    """
    model = build.model
    layer = get_mtp_layer_spec(model_layer, build.with_te)
    submodules = layer.submodules
    submodules.enorm = submodules.hnorm = submodules.layer_norm = build.norm
    layer = ModuleSpec(module=MTPLayer, submodules=submodules, params={"initialization_seed": build.seed})
    layers = 1 if model.mtp_use_repeated_layer else model.mtp_num_layers or 0
    return MultiTokenPredictionBlockSubmodules(layer_specs=[layer] * layers)


@torch.no_grad()
def shift_left(values: Tensor, group: dist.ProcessGroup, packed: PackedSeqParams | None = None) -> Tensor:
    """Shift each sequence left by one: ``values[..., i + 1]`` at i, and 0 at the end.

    One collective over ``group``, of two values a sequence and row.

    Args:
        values: [..., t_local], this rank's shard of sequences split over ``group``, in zigzag order or as ``packed``
            places them.
        packed: several sequences in a row, each split by its *padded* length; None: the last dimension is one sequence.
    """
    placed = getattr(packed, "placed", None)
    if placed is not None:
        return _shift_placed(values, group, placed)
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
    # Rank r holds chunks r and 2 * size - 1 - r of each sequence, in this order.
    first, second = edges[:-1], (edges[:-1] + edges[1:]) // 2
    heads = torch.stack([values[..., first], values[..., second]])
    gathered = gather_tensors(heads, group)
    if rank < size - 1:  # the last rank holds both neighbours of the middle
        shifted[..., second - 1] = gathered[rank + 1, 0]
    shifted[..., edges[1:] - 1] = gathered[rank - 1, 1] if rank else 0
    return shifted


def _shift_placed(values: Tensor, group: dist.ProcessGroup, placed: PlacedLayout) -> Tensor:
    """Shift a pack in pieces; gathers one value a piece and row."""
    rank, most = group.rank(), placed.most_spans
    firsts = [span.row for span in placed.spans(rank)]
    firsts += [0] * (most - len(firsts))
    heads = values.index_select(-1, send(torch.tensor(firsts), values.device))
    gathered = gather_tensors(heads, group).movedim(0, -2).flatten(-2)
    table = torch.cat([values, gathered, torch.zeros_like(values[..., :1])], dim=-1)
    return table.index_select(-1, send(torch.from_numpy(placed.following(rank)), values.device))


def unmasked_tokens(loss_mask: Tensor, position_ids: Tensor, depths: int) -> Tensor:
    """Count unmasked tokens of the main loss and of each depth.

    Float64 [1 + depths], of one microbatch on this rank. A token at position k or later of its sequence is a target at
    depth k, on this rank or another. Summed over context-parallel ranks, the numbers equal those of shifted masks.
    """
    return torch.stack([(loss_mask * (position_ids >= depth)).sum(dtype=torch.float64) for depth in range(1 + depths)])


def depth_weights(config: TransformerConfig, tokens: Sequence[float]) -> tuple[float, ...]:
    """Return each depth's factor for its sum of losses.

    It applies before division by the main loss's tokens. ``tokens``: :func:`unmasked_tokens` of the global batch. A
    depth without tokens has no loss and factor 0.
    """
    factor = (config.mtp_loss_scaling_factor or 0.0) / max(1, len(tokens) - 1)
    return tuple(factor * tokens[0] / count if count else 0.0 for count in tokens[1:])
