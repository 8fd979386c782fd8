"""Transformer Engine's attention with the groups that it is given.

megatron-core 0.19.2's ``TEDotProductAttention`` reads the hierarchical groups from global state and ignores
``pg_collection``. If that state is empty, Transformer Engine silently attends to local tokens. It also allocates its
second stream only with static context parallelism, and keeps a microbatch's group after the microbatch. The subclass
here corrects all of this, and refuses the rest.

Importable without Transformer Engine; :func:`te_attention_class` creates the class on first call.
"""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Iterator, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from megatron_cp.attention.context import CPContext, GroupOrPair
from megatron_cp.attention.modules.configured import configured_context, learnable_softmax_offset, transport_of_layer
from megatron_cp.attention.modules.probe import ProbeInputs
from megatron_cp.attention.transports.registry import RING
from megatron_cp.common.installation import how_to_install
from megatron_cp.config.names import NAME


@functools.cache
def have_transformer_engine() -> bool:
    """Return whether megatron-core found Transformer Engine."""
    from megatron.core.extensions.transformer_engine import HAVE_TE

    return bool(HAVE_TE)


@functools.cache
def te_attention_class() -> type:
    """Return the core-attention class; raise ImportError without the library."""
    if not have_transformer_engine():
        raise ImportError(
            f"Transformer Engine is not installed. Fix: {how_to_install('gpu')}, or "
            f"{NAME.model.attention_backend}=native"
        )
    from megatron.core.extensions.transformer_engine import TEDotProductAttention

    return te_subclass(TEDotProductAttention)


def te_subclass(base: Any) -> type:
    """Subclass megatron-core's ``TEDotProductAttention`` to use given groups."""

    class TEContextParallelAttention(base):
        """See the module's docstring. ``context`` has the transport and groups in use."""

        def __init__(
            self,
            config: Any,
            layer_number: int,
            attn_mask_type: Any,
            attention_type: str,
            *args: Any,
            cp_comm_type: str | None = None,
            pg_collection: Any = None,
            **kwargs: Any,
        ) -> None:
            comm_type = cp_comm_type or transport_of_layer(config, layer_number)
            where = f"TEDotProductAttention, layer {layer_number}"
            if pg_collection is None and config.context_parallel_size > 1:
                raise ValueError(f"{where}: pg_collection is None; pass the process groups")
            context = configured_context(config, comm_type, pg_collection, where)
            super().__init__(
                config,
                layer_number,
                attn_mask_type,
                attention_type,
                *args,
                # Upstream requires both levels' groups, also without static context parallelism.
                cp_comm_type=comm_type if context.size > 1 else RING.name,
                pg_collection=pg_collection,
                **kwargs,
            )
            self.layer_number = layer_number
            self.pg_collection = pg_collection
            self.cp_comm_type = comm_type
            if config.softmax_type == "learnable":
                # Transformer Engine's starts at zero, without the attributes of a tensor-parallel parameter.
                self.softmax_offset = learnable_softmax_offset(config, pg_collection)
            # Dynamic context parallelism needs the stream also without static context parallelism.
            if base.cp_stream is None and torch.cuda.is_available():
                base.cp_stream = torch.cuda.Stream()
            self._softmax_scale = kwargs.get("softmax_scale")
            self._configured_context = self._context = context
            self._contexts: dict[GroupOrPair, CPContext] = {}  # of microbatches' groups
            if context.size > 1:
                self._apply_context(context)

        @property
        def context(self) -> CPContext:
            return self._context

        def set_context_parallel_group(
            self,
            group: GroupOrPair | CPContext | None,
            cp_global_ranks: Sequence[int] | None = None,
            cp_stream: Any = None,
            cp_comm_type: str | None = None,
        ) -> CPContext:
            """Use ``group`` from now on; return the previous context.

            The other arguments are Transformer Engine's; None keeps the layer's value. In particular the transport
            stays, where Transformer Engine's default would be ``p2p``.
            """
            before = self._context
            if cp_comm_type is not None and cp_comm_type != self.cp_comm_type:
                raise ValueError(f"layer {self.layer_number} was built for {self.cp_comm_type!r}, got {cp_comm_type!r}")
            if group is None:
                context = self._configured_context
            elif isinstance(group, CPContext):
                context = group
            else:
                context = CPContext.build(self.cp_comm_type, group)
            self._apply_context(context, cp_global_ranks, cp_stream)
            return before

        def forward(self, *args: Any, packed_seq_params: Any = None, **kwargs: Any) -> Tensor:
            """Attend; a group in ``packed_seq_params`` applies to this call only."""
            group = getattr(packed_seq_params, "cp_group", None)
            dynamic = group is not None or getattr(packed_seq_params, "local_cp_size", None) is not None
            if group is not None:
                ranks = self._context_for(group).a2a_peers.size
            else:
                ranks = 1 if dynamic else self._context.a2a_peers.size
            attend = functools.partial(super().forward, *args, packed_seq_params=packed_seq_params, **kwargs)
            try:
                if ranks == 1 or self._parameters.get("softmax_offset") is None:
                    return attend()
                with self._share_of_offset_gradient(ranks):
                    return attend()
            finally:
                if dynamic:
                    self._apply_context(self._context)

        def _context_for(self, group: GroupOrPair) -> CPContext:
            if group not in self._contexts:
                self._contexts[group] = CPContext.build(self.cp_comm_type, group)
            return self._contexts[group]

        @contextlib.contextmanager
        def _share_of_offset_gradient(self, ranks: int) -> Iterator[None]:
            """Give each rank of an all-to-all a share of the offsets' gradient.

            Transformer Engine gives each rank the whole gradient of all heads, and the ranks' gradients are summed.
            """
            whole = self._parameters.pop("softmax_offset")
            try:
                object.__setattr__(self, "softmax_offset", _ShareOfGradient.apply(whole, ranks))
                yield
            finally:
                object.__delattr__(self, "softmax_offset")
                self._parameters["softmax_offset"] = whole

        def probe_inputs(self) -> ProbeInputs:
            """Return inputs for :func:`megatron_cp.attention.modules.probe.probe_attention`."""
            tp = self.config.tensor_model_parallel_size
            offset = getattr(self, "softmax_offset", None)
            return ProbeInputs(
                heads=self.config.num_attention_heads // tp,
                kv_heads=max(1, self.config.num_query_groups // tp),
                qk_dim=getattr(self, "hidden_size_per_attention_head_k", self.config.kv_channels),
                v_dim=getattr(self, "hidden_size_per_attention_head_v", self.config.kv_channels),
                dtype=torch.bfloat16,
                device=torch.device(torch.cuda.current_device()),
                window_size=getattr(self, "window_size", None),
                softmax_scale=self._softmax_scale,
                softmax_offset=None if offset is None else offset.detach().reshape(-1),
            )

        def probe_forward(self, query: Tensor, key: Tensor, value: Tensor) -> Tensor:
            """Compute causal attention by Transformer Engine, [s_local, b, heads, head_dim]."""
            from megatron.core.transformer.enums import AttnMaskType

            out = self(query, key, value, None, attn_mask_type=AttnMaskType.causal)
            return out.unflatten(-1, (query.shape[2], value.shape[3]))

        def _apply_context(self, context: CPContext, ranks: Sequence[int] | None = None, stream: Any = None) -> None:
            stream = base.cp_stream if stream is None else stream
            self._context = context
            if context.size == 1:
                super().set_context_parallel_group(None, None, stream, self.cp_comm_type)
                return
            group, members = _te_groups(context)
            super().set_context_parallel_group(group, list(ranks or members), stream, self.cp_comm_type)

    return TEContextParallelAttention


class _ShareOfGradient(torch.autograd.Function):
    """Identity with one of ``ranks`` equal shares of the gradient."""

    @staticmethod
    def forward(ctx: Any, value: Tensor, ranks: int) -> Tensor:
        ctx.ranks = ranks
        return value.view_as(value)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        return grad / ctx.ranks, None


def _te_groups(context: CPContext) -> tuple[Any, list[int]]:
    """Return Transformer Engine's groups, and global ranks by CP rank."""
    if not context.transport.hierarchical:
        group = context.peers[0].group
        return group, dist.get_process_group_ranks(group)
    # Neighbours form a2a groups: other groups are this one, shifted by the ring's members.
    neighbours = dist.get_process_group_ranks(context.a2a_peers.group)
    ring = dist.get_process_group_ranks(context.p2p_peers.group)
    shifts = [rank - ring[context.p2p_peers.rank] for rank in ring]
    ranks = [neighbour + shift for shift in shifts for neighbour in neighbours]
    return [context.a2a_peers.group, context.p2p_peers.group], ranks
