"""Self-attention that computes its heads in groups, one after the other.

Queries, keys and values of all heads, and the copies that a transport exchanges, are several times as large as the
layer's input. Here those of one group exist at a time, forward and backward. A group is some key/value heads with their
query heads: neighbouring rows of ``linear_qkv``'s weight. What stays for the backward pass is the layer's input, the
output, and the log-sum-exp of each query: queries, keys and values are projected and exchanged again, but attention is
not computed again.

With ``overlap`` the messages of a group, of transports that exchange heads, are on their way while the group before it
is computed, and its results go back while the one after it is. Then tensors of up to three groups exist at a time.
"""

from __future__ import annotations

import copy
import itertools
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from megatron.core.models.common.embeddings.rope_utils import apply_rotary_pos_emb
from megatron.core.packed_seq_params import PackedSeqParams
from megatron.core.tensor_parallel.layers import ColumnParallelLinear
from megatron.core.tensor_parallel.mappings import (
    gather_from_sequence_parallel_region,
    reduce_from_tensor_model_parallel_region,
    reduce_scatter_to_sequence_parallel_region,
)
from megatron.core.transformer.attention import SelfAttention
from megatron.core.transformer.transformer_config import TransformerConfig
from torch import Tensor

from megatron_cp.attention.heads import GATHERED_TOKENS
from megatron_cp.attention.merge import accumulation_dtype
from megatron_cp.attention.once_differentiable import once_differentiable
from megatron_cp.attention.stages import StagedAttention
from megatron_cp.config.names import NAME
from megatron_cp.mcore.private_names import rotary_scale

# (projection [s, b, queries + keys + values of a group], number of the group) -> its attention
Attend = Callable[[Tensor, int], StagedAttention]


class HeadGroupsAttention(SelfAttention):
    """Self-attention by ``head_groups`` groups of heads, with or without ``overlap``.

    For training and evaluation with this project's core attention, after a norm that is a module of its own.
    """

    linear_qkv: ProjectionByGroups

    def __init__(self, *args: Any, head_groups: int, overlap: bool = False, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.head_groups, self.overlap = head_groups, overlap

    def forward(
        self,
        hidden_states: Tensor,
        attention_mask: Tensor | None,
        rotary_pos_emb: Tensor | tuple[Tensor, Tensor] | None = None,
        attention_bias: Tensor | None = None,
        packed_seq_params: PackedSeqParams | None = None,
        **unused: None,
    ) -> tuple[Tensor, Tensor | None]:
        """Map [s, b, h] to the output and bias of ``linear_proj``.

        Raises ValueError for upstream's arguments of inference.
        """
        if given := [name for name, value in unused.items() if value is not None]:
            setting = NAME.model.attention_head_groups
            raise ValueError(f"{setting}={self.head_groups}: no inference with {given}. Fix: {setting}=1")
        angles = rotary_pos_emb if isinstance(rotary_pos_emb, tuple | None) else (rotary_pos_emb, rotary_pos_emb)
        if (skipped := self.config.no_rope_freq) and skipped[self.layer_number - 1]:
            angles = None
        cp_group = self.pg_collection.cp  # a microbatch's own, which is no longer set in the backward pass
        packed = packed_seq_params is not None and packed_seq_params.qkv_format == "thd"

        def attend(mixed: Tensor, group: int) -> StagedAttention:
            query, key, value = self._split(mixed)
            if packed:
                query, key, value = (x.squeeze(1) for x in (query, key, value))
            if angles is not None:
                query, key = self._rotate((query, key), angles, packed_seq_params if packed else None, cp_group)
            heads = query.shape[-2]
            return self.core_attention(
                *(query, key, value, attention_mask),
                attn_mask_type=self.attn_mask_type,
                attention_bias=attention_bias,
                packed_seq_params=packed_seq_params,
                heads=slice(group * heads, (group + 1) * heads),
            )

        inside = [norm for norm in (self.q_layernorm, self.k_layernorm) if norm is not None]
        parameters = [each for module in (*inside, self.core_attention) for each in module.parameters()]
        size = self.hidden_size_per_attention_head
        out = self.linear_qkv(hidden_states, attend, self.head_groups, self.overlap, size, parameters)
        return self.linear_proj(out)

    def _split(self, mixed: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Split a group's projection into queries, keys and values, [s, b, heads, d]."""
        size = self.hidden_size_per_attention_head
        queries = self.num_attention_heads_per_partition // self.num_query_groups_per_partition
        by_kv_head = mixed.unflatten(-1, (-1, (queries + 2) * size))
        query, key, value = by_kv_head.split([queries * size, size, size], dim=-1)
        query = query.reshape(*query.shape[:2], -1, size)
        if self.q_layernorm is not None:
            query = self.q_layernorm(query)
        if self.k_layernorm is not None:
            key = self.k_layernorm(key)
        return query, key, value

    def _rotate(
        self, tensors: tuple[Tensor, Tensor], angles: tuple[Tensor, Tensor], packed: PackedSeqParams | None, group: Any
    ) -> Iterator[Tensor]:
        """Yield queries and keys with rotary positions; ``packed`` has the bounds."""
        bounds: list[Tensor | None] = [None, None]
        if packed is not None:
            padded = packed.cu_seqlens_q_padded, packed.cu_seqlens_kv_padded
            plain = packed.cu_seqlens_q, packed.cu_seqlens_kv
            bounds = [b if a is None else a for a, b in zip(padded, plain, strict=True)]
        common = {"config": self.config, "mscale": rotary_scale(self), "cp_group": group}
        for x, angle, cu_seqlens in zip(tensors, angles, bounds, strict=True):
            yield apply_rotary_pos_emb(x, angle, cu_seqlens=cu_seqlens, **common)


class ProjectionByGroups(ColumnParallelLinear):
    """``linear_qkv`` that projects a group of heads, attends, and goes on to the next.

    Returns attention's output. A module of its own, whose call waits for its weights: the distributed optimizer may
    still gather them. Without ``gradient_accumulation_fusion``, for which megatron-core's layer needs Apex.
    """

    def __init__(self, *args: Any, config: TransformerConfig, **kwargs: Any) -> None:
        unfused = copy.copy(config)
        unfused.gradient_accumulation_fusion = False
        super().__init__(*args, config=unfused, **kwargs)

    def forward(
        self, hidden: Tensor, attend: Attend, groups: int, overlap: bool, head_dim: int, parameters: list[Tensor]
    ) -> Tensor:
        """Map [s, b, h] to [s, b, heads * d].

        ``parameters``: other parameters that ``attend`` uses.
        """
        work = _Work(attend, groups, overlap, head_dim, self.tp_group, self.sequence_parallel, self.allreduce_dgrad)
        return _ByGroups.apply(work, hidden, self.weight, self.bias, *parameters)


@dataclass(frozen=True, eq=False)
class _Work:
    """What the groups have in common.

    Under sequence parallelism tokens are gathered in pieces, and gradients reduced: all tensor-parallel ranks' tokens
    with their gradients would be larger than a group's queries, keys and values.
    """

    attend: Attend
    groups: int
    overlap: bool
    head_dim: int
    tp_group: Any
    sequence_parallel: bool
    sum_gradients: bool

    def run(self, stages_of: Callable[[int], Iterator[None]]) -> None:
        """Run the stages of all groups, each group's in order.

        With overlap the first stage of a group, after which its messages are on their way, comes before the second of
        the group before it, which waits for those of that group and computes; and the third, which waits for the
        results, comes after the second of the next one. Else group after group.
        """
        groups = [stages_of(group) for group in range(self.groups)]
        turns: Iterable[Sequence[Iterator[None]]] = ([group] * 3 for group in groups)
        if self.overlap:
            turns = (groups[max(0, turn - 2) : turn + 1][::-1] for turn in range(self.groups + 2))
        for stages in itertools.chain.from_iterable(turns):
            next(stages, None)

    def rows(self, group: int, whole: int) -> slice:
        share = whole // self.groups
        return slice(group * share, (group + 1) * share)

    def project(self, hidden: Tensor, weight: Tensor, bias: Tensor | None, group: int) -> Tensor:
        """Project a group's queries, keys and values of all tensor-parallel ranks."""
        rows = self.rows(group, weight.shape[0])
        weight, bias = weight[rows], None if bias is None else bias[rows]
        if not self.sequence_parallel:
            return F.linear(hidden, weight, bias)
        ranks = self.tp_group.size()
        mixed = hidden.new_empty((ranks, *hidden.shape[:2], len(weight)))
        for piece in self._pieces(hidden):
            mixed[:, piece] = F.linear(self._gather(hidden[piece]), weight, bias).unflatten(0, (ranks, -1))
        return mixed.flatten(0, 1)

    def add_gradients(self, dmixed: Tensor, hidden: Tensor, weight: Tensor, dhidden: Tensor) -> Tensor:
        """Add a group's gradient to the input's, and return the weight's."""
        if not self.sequence_parallel:
            rows = dmixed.flatten(0, 1)
            dhidden.view(len(rows), -1).addmm_(rows, weight)
            return rows.t() @ hidden.flatten(0, 1)
        of_ranks = dmixed.unflatten(0, (self.tp_group.size(), -1))
        dweight = torch.zeros_like(weight, dtype=accumulation_dtype(weight.dtype))
        for piece in self._pieces(hidden):
            rows = of_ranks[:, piece].flatten(0, 2)
            tokens = self._gather(hidden[piece])
            dweight += rows.t() @ tokens.flatten(0, 1)
            dtokens = (rows @ weight).view_as(tokens)
            dhidden[piece] += reduce_scatter_to_sequence_parallel_region(dtokens, group=self.tp_group)
        return dweight.to(weight.dtype)

    def _pieces(self, hidden: Tensor) -> Iterator[slice]:
        """Yield positions of this rank whose tokens are gathered at one time."""
        length = max(1, GATHERED_TOKENS // (hidden.shape[1] * self.tp_group.size()))
        return (slice(start, start + length) for start in range(0, len(hidden), length))

    def _gather(self, hidden: Tensor) -> Tensor:
        return gather_from_sequence_parallel_region(hidden, group=self.tp_group)


class _ByGroups(torch.autograd.Function):
    """All groups in one node, so that each parameter gets its gradient once."""

    @staticmethod
    def forward(
        ctx: Any, work: _Work, hidden: Tensor, weight: Tensor, bias: Tensor | None, *parameters: Tensor
    ) -> Tensor:
        whole: Tensor | None = None
        denominators: list[Tensor | None] = []

        def stages_of(group: int) -> Iterator[None]:
            nonlocal whole
            attention = work.attend(work.project(hidden, weight, bias, group), group)
            out, lse = yield from attention.forward(group % 2)
            if whole is None:
                whole = out.new_empty((*out.shape[:2], work.groups * out.shape[2] * out.shape[3]))
            whole[..., work.rows(group, whole.shape[-1])] = out.flatten(2)
            denominators.append(lse)

        work.run(stages_of)
        assert whole is not None
        ctx.save_for_backward(hidden, weight, bias, whole, *denominators, *parameters)
        ctx.work = work
        return whole

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *douts: Tensor) -> tuple[Tensor | None, ...]:
        work, (dwhole,) = ctx.work, douts
        hidden, weight, bias, whole, *rest = ctx.saved_tensors
        denominators, parameters = rest[: work.groups], rest[work.groups :]
        dhidden = torch.zeros_like(hidden, memory_format=torch.contiguous_format)
        dweight, dbias = torch.empty_like(weight), None if bias is None else torch.empty_like(bias)
        sums: list[Tensor | None] = [None] * len(parameters)

        def stages_of(group: int) -> Iterator[None]:
            columns, rows = work.rows(group, whole.shape[-1]), work.rows(group, weight.shape[0])
            mixed = work.project(hidden, weight, bias, group).requires_grad_()
            with torch.enable_grad():
                attention = work.attend(mixed, group)
            out, dout = (x[..., columns].unflatten(-1, (-1, work.head_dim)) for x in (whole, dwhole))
            inputs = mixed, *parameters
            dmixed, *others = yield from attention.backward(out, denominators[group], dout, inputs, group % 2)
            del mixed, inputs, attention
            assert dmixed is not None
            dweight[rows] = work.add_gradients(dmixed, hidden, weight[rows], dhidden)
            if dbias is not None:
                torch.sum(dmixed, (0, 1), out=dbias[rows])
            sums[:] = [b if a is None else a if b is None else a + b for a, b in zip(sums, others, strict=True)]

        work.run(stages_of)
        if work.sum_gradients:
            dhidden = reduce_from_tensor_model_parallel_region(dhidden, work.tp_group)
        return None, dhidden, dweight, dbias, *sums
