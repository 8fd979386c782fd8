"""Context-parallel attention in megatron-core's ``core_attention`` slot.

Usable wherever a layer spec has a core attention (``SelfAttentionSubmodules(core_attention=...)``). It uses the groups
in ``pg_collection``, and never global state while running.
"""

from __future__ import annotations

import math
from typing import Any

import torch
from megatron.core.packed_seq_params import PackedSeqParams
from megatron.core.process_groups_config import ProcessGroupCollection
from megatron.core.transformer.enums import AttnMaskType
from megatron.core.transformer.module import MegatronModule
from megatron.core.transformer.transformer_config import TransformerConfig
from megatron.core.transformer.utils import is_layer_window_attention, make_sharded_tensors_for_checkpoint
from torch import Tensor

from megatron_cp.attention.context import CPContext, GroupOrPair
from megatron_cp.attention.functional import attend_in_context, stages_in_context
from megatron_cp.attention.modules.configured import configured_context, learnable_softmax_offset, transport_of_layer
from megatron_cp.attention.modules.probe import ProbeInputs
from megatron_cp.attention.stages import StagedAttention
from megatron_cp.attention.tiles import Mask
from megatron_cp.attention.transports.registry import transport_named
from megatron_cp.parallel.device import device

_CAUSAL = {AttnMaskType.causal: True, AttnMaskType.padding_causal: True}
_CAUSAL |= {AttnMaskType.no_mask: False, AttnMaskType.padding: False}


class ContextParallelAttention(MegatronModule):
    """Attention of this rank's heads over a sharded sequence.

    Supports causal and full attention, grouped query heads, a separate head dim of values, megatron-core's
    ``window_size``, ``window_attn_skip_freq`` and ``softmax_type``, and packed sequences (``thd``). Raises ValueError
    for masks, attention bias, attention dropout and cross attention, and for groups that are missing or have other
    sizes than configured: attention without them would silently attend to local tokens.
    """

    def __init__(
        self,
        config: TransformerConfig,
        layer_number: int,
        attn_mask_type: AttnMaskType,
        attention_type: str,
        attention_dropout: float | None = None,
        softmax_scale: float | None = None,
        cp_comm_type: str | None = None,
        pg_collection: ProcessGroupCollection | None = None,
        k_channels: int | None = None,
        v_channels: int | None = None,
        **kwargs: Any,
    ) -> None:
        """Build the module.

        ``cp_comm_type`` None: ``config``'s. ``pg_collection`` None: megatron-core's global groups. Multi-latent
        attention passes ``k_channels`` and ``v_channels``; the tensors have their own head dims.
        """
        super().__init__(config=config)
        where = f"ContextParallelAttention, layer {layer_number}"
        if kwargs:
            raise ValueError(f"{where}: unknown arguments {sorted(kwargs)}")
        if attention_type != "self":
            raise ValueError(f"{where}: attention_type {attention_type!r} is not supported, only 'self'")
        dropout = config.attention_dropout if attention_dropout is None else attention_dropout
        if dropout:
            raise ValueError(
                f"{where}: attention_dropout={dropout} is not supported under context parallelism; set "
                "attention_dropout=0 (hidden_dropout still regularizes) or use Transformer Engine's attention"
            )
        self.layer_number = max(1, layer_number)
        self.attn_mask_type = attn_mask_type
        self.cp_comm_type = cp_comm_type or transport_of_layer(config, layer_number)
        self.pg_collection = pg_collection or _global_groups(config, self.cp_comm_type)
        self.context = configured_context(config, self.cp_comm_type, self.pg_collection, where)
        self._contexts: dict[GroupOrPair, CPContext] = {}

        # apply_query_key_layer_scaling has no effect: upstream divides scores by the layer's number for float16's range
        # and multiplies them again; ours are float32.
        self.softmax_scale = 1 / math.sqrt(k_channels or config.kv_channels) if softmax_scale is None else softmax_scale
        windowed = is_layer_window_attention(config.window_size, config.window_attn_skip_freq, layer_number)
        self.window_size: tuple[int, int] | None = tuple(config.window_size) if windowed else None
        self.softmax_offset = self._build_softmax_offset()
        self.max_logits: Tensor | None = None  # [heads on this rank], the largest scores since they were reset
        if config.qk_clip or config.log_max_attention_logit:
            heads = config.num_attention_heads // config.tensor_model_parallel_size
            self.max_logits = torch.full((heads,), -torch.inf, device=device())
        self._with_transformer_engine = config.transformer_impl == "transformer_engine"

    def forward(
        self,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        attention_mask: Tensor | None = None,
        attn_mask_type: AttnMaskType | None = None,
        attention_bias: Tensor | None = None,
        packed_seq_params: PackedSeqParams | None = None,
        heads: slice | None = None,
    ) -> Tensor | StagedAttention:
        """Map [s_local, b, heads, d] to [s_local, b, heads * d_v]; packs without b.

        ``key`` and ``value`` may have fewer heads. ``attn_mask_type`` overrides the configured one. A group in
        ``packed_seq_params`` (dynamic context parallelism) applies to this call. ``heads``: which of this rank's query
        heads are given; their attention is returned not yet computed.
        """
        where = f"ContextParallelAttention, layer {self.layer_number}"
        mask_type = self.attn_mask_type if attn_mask_type is None else attn_mask_type
        packed = packed_seq_params is not None and packed_seq_params.qkv_format == "thd"
        padding = mask_type in (AttnMaskType.padding, AttnMaskType.padding_causal)
        if mask_type not in _CAUSAL or (padding and not packed):
            raise ValueError(
                f"{where}: attn_mask_type {mask_type} is not supported; use causal or no_mask, and pack "
                "sequences (thd with cu_seqlens) to keep documents or padding apart"
            )
        if attention_mask is not None:
            raise ValueError(
                f"{where}: attention_mask of shape {tuple(attention_mask.shape)} is not used; pass None and mask "
                "by attn_mask_type, the window or cu_seqlens"
            )
        if attention_bias is not None:
            raise ValueError(f"{where}: attention_bias is not supported; use rotary embeddings for positions")
        placed = getattr(packed_seq_params, "placed", None)
        in_zigzag = packed and placed is None
        cu_seqlens, cu_seqlens_padded = _cumulative_lengths(packed_seq_params, where) if in_zigzag else (None, None)
        lead, dim_v = query.shape[:-2], value.shape[-1]
        if packed and query.ndim == 4:
            query, key, value = (x.squeeze(1) for x in (query, key, value))
        attend = attend_in_context if heads is None else stages_in_context
        out = attend(
            self._context_of(packed_seq_params, query.shape[-2]),
            query,
            key,
            value,
            mask=Mask.build(_CAUSAL[mask_type], self.window_size),
            cu_seqlens=cu_seqlens,
            cu_seqlens_padded=cu_seqlens_padded,
            placed=placed,
            softmax_scale=self.softmax_scale,
            softmax_offset=_of_heads(self.softmax_offset, heads),
            deterministic=self.config.deterministic_mode,
            transformer_engine=self._with_transformer_engine,
            max_logits=_of_heads(self.max_logits, heads) if self.training else None,
        )
        return out.reshape(*lead, query.shape[-2] * dim_v) if isinstance(out, Tensor) else out

    def probe_inputs(self) -> ProbeInputs:
        """Return inputs for :func:`megatron_cp.attention.modules.probe.probe_attention`."""
        tp = self.config.tensor_model_parallel_size
        here = device()
        kv_heads = max(1, self.config.num_query_groups // tp)
        # On CUDA in the training's dtype: half precision has its own kernels there.
        dtype = self.config.params_dtype if here.type == "cuda" else torch.float32
        return ProbeInputs(self.config.num_attention_heads // tp, kv_heads, dtype, here)

    def probe_forward(self, query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        """Compute plain causal attention through this module's transport."""
        mask, te_kernels = Mask.build(True, None), self._with_transformer_engine
        return attend_in_context(self.context, query, key, value, mask=mask, transformer_engine=te_kernels)

    def sharded_state_dict(
        self,
        prefix: str = "",
        sharded_offsets: tuple[tuple[int, int, int], ...] = (),
        metadata: dict | None = None,
    ) -> dict:
        """Return the learnable softmax offset, sharded over tensor-parallel ranks, if any."""
        learnable = self.config.softmax_type == "learnable"
        return make_sharded_tensors_for_checkpoint(
            self.state_dict(prefix="", keep_vars=True) if learnable else {},
            prefix,
            {"softmax_offset": 0},
            sharded_offsets,
            tp_group=self.pg_collection.tp,
            dp_cp_group=(metadata or {}).get("dp_cp_group"),
        )

    def _context_of(self, packed_seq_params: PackedSeqParams | None, heads: int) -> CPContext:
        if packed_seq_params is None:
            return self.context
        if packed_seq_params.cp_group is not None:
            return self._context_of_microbatch(packed_seq_params, heads)
        if packed_seq_params.local_cp_size is None:
            return self.context
        if packed_seq_params.local_cp_size != 1:
            raise ValueError(
                f"packed_seq_params: local_cp_size={packed_seq_params.local_cp_size} without cp_group; only "
                "local_cp_size=1 (no context parallelism) needs no group"
            )
        return CPContext.alone(self.cp_comm_type)

    def _context_of_microbatch(self, packed: Any, heads: int) -> CPContext:
        """Return the context of a microbatch's group.

        It has two levels where the group does not divide ``heads``.
        """
        transport, levels = transport_named(self.cp_comm_type), getattr(packed, "cp_levels", None)
        too_many = any(heads % ranks for ranks in transport.head_ranks(packed.cp_group.size(), None))
        in_two_levels = transport.in_two_levels if too_many else transport.name if transport.hierarchical else None
        if levels is not None and in_two_levels is not None:
            return self._context_for(levels, in_two_levels)
        return self._context_for(packed.cp_group)

    def _context_for(self, group: GroupOrPair, comm_type: str | None = None) -> CPContext:
        if group not in self._contexts:
            self._contexts[group] = CPContext.build(comm_type or self.cp_comm_type, group)
        return self._contexts[group]

    def _build_softmax_offset(self) -> Tensor | None:
        """Build the offset [heads on this tensor-parallel rank] of ``softmax_type``."""
        config = self.config
        if config.softmax_type == "vanilla":
            return None
        heads = config.num_attention_heads // config.tensor_model_parallel_size
        if config.softmax_type == "off-by-one":
            return torch.zeros(heads, device=device(), dtype=config.params_dtype)
        if config.softmax_type != "learnable":
            raise ValueError(f"softmax_type {config.softmax_type!r}: unknown; use vanilla, off-by-one or learnable")
        return learnable_softmax_offset(config, self.pg_collection)


def _of_heads(values: Tensor | None, heads: slice | None) -> Tensor | None:
    return values if values is None or heads is None else values[heads]


def _global_groups(config: TransformerConfig, comm_type: str) -> ProcessGroupCollection:
    required = ["tp"]
    if config.context_parallel_size > 1:
        required += ["cp", "hcp"] if transport_named(comm_type).hierarchical else ["cp"]
    return ProcessGroupCollection.use_mpu_process_groups(required_pgs=required)


def _cumulative_lengths(packed: PackedSeqParams | None, where: str) -> tuple[Tensor, Tensor | None]:
    if packed is None or packed.cu_seqlens_q is None:
        raise ValueError(f"{where}: packed_seq_params with qkv_format 'thd' needs cu_seqlens_q")
    for name in ("cu_seqlens", "cu_seqlens_padded"):
        suffix = "_padded" if name.endswith("padded") else ""
        q, kv = getattr(packed, f"cu_seqlens_q{suffix}"), getattr(packed, f"cu_seqlens_kv{suffix}")
        if q is not kv and q is not None and kv is not None and not torch.equal(q, kv):
            raise ValueError(
                f"{where}: cu_seqlens_q{suffix} and cu_seqlens_kv{suffix} differ; only self-attention is supported"
            )
    return packed.cu_seqlens_q, packed.cu_seqlens_q_padded
