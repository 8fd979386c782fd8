"""Mamba-2 layers that need no CUDA and use each microbatch's groups.

Parameters, names and checkpoints are upstream's. Under context parallelism the mixer exchanges sequence for heads, as
upstream. The split of heads is computed for the group of each call, so groups may differ between microbatches and need
not divide the heads.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import torch
from megatron.core.packed_seq_params import PackedSeqParams
from megatron.core.process_groups_config import ProcessGroupCollection
from megatron.core.ssm.mamba_layer import MambaLayer
from megatron.core.ssm.mamba_mixer import MambaMixer, MambaMixerSubmodules
from megatron.core.tensor_parallel.layers import set_tensor_model_parallel_attributes
from megatron.core.transformer.module import MegatronModule
from megatron.core.transformer.spec_utils import build_module
from megatron.core.transformer.transformer_config import TransformerConfig
from megatron.core.transformer.utils import make_sharded_tensors_for_checkpoint
from torch import Tensor

from megatron_cp.attention.merge import accumulation_dtype
from megatron_cp.attention.transports.comm import Peers
from megatron_cp.dynamic_cp.runtime.active_group import active_group
from megatron_cp.models.initial_weights import drawing_from, seed_of
from megatron_cp.models.layers.mamba.exchange import (
    heads_to_sequence,
    repeat_groups,
    sequence_to_heads,
    sequences_of,
    token_layout,
)
from megatron_cp.models.layers.mamba.kernel import conv_and_scan_best, share_of_weights
from megatron_cp.models.layers.mamba.shape import CONV_WIDTH, MambaShape, MambaShare

NORM_EPSILON = 1e-5


class GatedNorm(MegatronModule):
    """RMS norm of each group's features, in float32. The gate is applied before."""

    def __init__(self, config: TransformerConfig, features: int, group_size: int, tp_group: Any) -> None:
        super().__init__(config)
        weight = torch.ones(features, dtype=config.params_dtype, device=torch.cuda.current_device())
        self.weight = _tensor_parallel(weight)
        self.group_size, self.tp_group = group_size, tp_group

    def forward(self, x: Tensor) -> Tensor:
        dtype = accumulation_dtype(x.dtype)
        groups = x.to(dtype).unflatten(-1, (-1, self.group_size))
        normed = groups * torch.rsqrt(groups.square().mean(-1, keepdim=True) + NORM_EPSILON)
        return (normed.flatten(-2) * self.weight.to(dtype)).to(x.dtype)

    def sharded_state_dict(self, prefix: str = "", sharded_offsets: tuple = (), metadata: dict | None = None) -> dict:
        return make_sharded_tensors_for_checkpoint(
            self.state_dict(prefix="", keep_vars=True),
            prefix,
            {"weight": 0},
            sharded_offsets,
            tp_group=self.tp_group,
            dp_cp_group=(metadata or {}).get("dp_cp_group"),
        )


class ContextParallelMambaMixer(MambaMixer):
    """Mixer with upstream's checkpoints; construction and computation are ours.

    Upstream's constructor requires mamba-ssm. Its initial weights also depend on the tensor-parallel layout: a rank
    takes z, x, B, C and dt from its slice of one matrix, here from the whole matrix.
    """

    def __init__(
        self,
        config: TransformerConfig,
        submodules: MambaMixerSubmodules,
        d_model: int,
        layer_number: int,
        pg_collection: ProcessGroupCollection,
        pp_layer_offset: int = 0,
        name: str | None = None,
    ) -> None:
        MegatronModule.__init__(self, config)
        self.layer_number = layer_number
        self.pg_collection = pg_collection
        self.tp_group = pg_collection.tp
        whole = MambaShape.of(config)
        self.shape = shape = whole.split(self.tp_group.size())
        # Names that upstream's sharded_state_dict reads.
        self.nheads_local_tp, self.ngroups_local_tp = shape.heads, shape.groups
        self.d_inner_local_tp, self.d_state = shape.inner, shape.state_dim

        self.in_proj = build_module(
            submodules.in_proj,
            d_model,
            sum(whole.projected),
            config=config,
            init_method=config.init_method,
            gather_output=False,
            bias=False,
            skip_bias_add=False,
            is_expert=False,
            tp_comm_buffer_name="fc1",
            tp_group=self.tp_group,
        )
        self.in_proj.weight.partition_sizes = shape.projected
        if config.use_cpu_initialization and config.perform_initialization:
            self.in_proj.weight.data.copy_(self._draw(whole.projected, (d_model,), config.init_method))

        def parameter(
            parts: list[int], rest: tuple[int, ...], draw: Callable, dtype: torch.dtype
        ) -> torch.nn.Parameter:
            drawn = self._draw(parts, rest, draw)
            # A model built for its shapes only (meta device) has no data to move.
            device = drawn.device if drawn.is_meta else torch.cuda.current_device()
            return _tensor_parallel(drawn.to(device=device, dtype=dtype))

        self.conv1d_weight = parameter(whole.convolved, (1, CONV_WIDTH), _draw_convolution, config.params_dtype)
        self.conv1d_bias = parameter(whole.convolved, (), _draw_convolution, config.params_dtype)
        for weight in (self.conv1d_weight, self.conv1d_bias):
            weight.partition_sizes = shape.convolved  # type: ignore[attr-defined]
        self.dt_bias = parameter([whole.heads], (), _draw_dt_bias, config.params_dtype)
        self.A_log = parameter([whole.heads], (), _draw_log_a, torch.float32)
        self.D = parameter([whole.heads], (), torch.nn.init.ones_, torch.float32)
        self.norm = GatedNorm(config, shape.inner, whole.inner // whole.groups, self.tp_group)
        self.out_proj = build_module(
            submodules.out_proj,
            whole.inner,
            d_model,
            config=config,
            init_method=config.output_layer_init_method,
            bias=False,
            input_is_parallel=True,
            skip_bias_add=True,
            is_expert=False,
            tp_comm_buffer_name="fc2",
            tp_group=self.tp_group,
        )

    def forward(
        self,
        hidden_states: Tensor,
        inference_context: Any = None,
        *,
        inference_params: Any = None,
        packed_seq_params: PackedSeqParams | None = None,
    ) -> tuple[Tensor, Tensor | None]:
        """Map [s_local, b, hidden] to the same shape; packs (thd) have b = 1.

        Raises:
            ValueError: the group cannot split the heads, lengths do not match, or there is an inference context.
        """
        if inference_context is not None or inference_params is not None:
            raise ValueError("Mamba layers: inference is not supported")
        peers = self._peers(packed_seq_params)
        share = self.shape.share(peers.rank, peers.size)
        projected, _ = self.in_proj(hidden_states)
        layout = token_layout(packed_seq_params, projected.shape[0], peers.size)
        projected = sequence_to_heads(projected, self.shape, layout, peers)
        seq_idx = None
        if packed_seq_params is not None:
            numbers, padding = sequences_of(layout, projected.device)
            seq_idx = numbers.expand(projected.shape[1], -1)
            # Padding after a sequence does not reach real tokens, but nan would in a product.
            projected = projected.masked_fill(padding[:, None, None], 0)
        y = self._mix_share(repeat_groups(projected, share).transpose(0, 1), share, seq_idx).transpose(0, 1)
        return self.out_proj(self.norm(heads_to_sequence(y, self.shape, layout, peers)))

    def _mix_share(self, x: Tensor, share: MambaShare, seq_idx: Tensor | None) -> Tensor:
        """Map [b, s, features] to [b, s, inner] with this rank's share of the heads."""
        dtype = accumulation_dtype(x.dtype)
        weights = (
            self.conv1d_weight.squeeze(1),
            self.conv1d_bias,
            self.dt_bias.to(dtype),
            -self.A_log.to(dtype).exp(),
            self.D.to(dtype),
        )
        return conv_and_scan_best(x, share_of_weights(weights, self.shape, share), share.scanned, seq_idx)

    def _peers(self, packed: PackedSeqParams | None) -> Peers:
        if packed is not None and packed.cp_group is None and packed.local_cp_size == 1:
            return Peers.alone()
        return Peers.of(self.pg_collection.cp)

    def _draw(self, parts: list[int], rest: tuple[int, ...], draw: Callable) -> Tensor:
        """Draw a whole weight, and keep this tensor-parallel rank's share of each part."""
        whole = torch.empty(sum(parts), *rest)
        draw(whole)
        rank, size = self.tp_group.rank(), self.tp_group.size()
        return torch.cat([part.chunk(size)[rank] for part in whole.split(parts)])


class SeededMambaLayer(MambaLayer):
    """Layer with weights from the seed and its number; see ``SeededTransformerLayer``."""

    def __init__(
        self,
        config: TransformerConfig,
        *args: Any,
        initialization_seed: int,
        layer_number: int = 1,
        pg_collection: ProcessGroupCollection,
        **kwargs: Any,
    ) -> None:
        with drawing_from(seed_of(initialization_seed, f"layer {layer_number}")):
            super().__init__(config, *args, layer_number=layer_number, pg_collection=pg_collection, **kwargs)
        self.pg_collection = pg_collection

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        with active_group(self.pg_collection, kwargs.get("packed_seq_params")):
            return super().forward(*args, **kwargs)


def _tensor_parallel(tensor: Tensor) -> torch.nn.Parameter:
    """Mark a parameter as sharded over tensor-parallel ranks, for gradient norms."""
    parameter = torch.nn.Parameter(tensor)
    set_tensor_model_parallel_attributes(parameter, is_parallel=True, dim=0, stride=1)
    return parameter


# Upstream's distributions, from the paper's code.


def _draw_convolution(weight: Tensor) -> None:
    bound = 1 / math.sqrt(CONV_WIDTH)
    weight.uniform_(-bound, bound)


def _draw_dt_bias(weight: Tensor) -> None:
    """Draw values whose softplus is between 0.001 and 0.1, log-uniformly."""
    weight.uniform_(math.log(1e-3), math.log(1e-1)).exp_().clamp_(min=1e-4)
    weight.add_(torch.log(-torch.expm1(-weight)))  # the inverse of softplus


def _draw_log_a(weight: Tensor) -> None:
    weight.uniform_(1, 16).log_()
