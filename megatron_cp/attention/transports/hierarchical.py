"""``a2a+p2p``: heads within groups of neighbours, a ring between groups.

After the exchange, a group of neighbours holds the zigzag shard of one rank of the ring between groups, with a share of
the heads. A hop of that ring carries as much as one of a flat ring. There are p2p - 1 hops instead of a2a * p2p - 1,
and only they use slow links.
"""

from __future__ import annotations

from torch import Tensor

from megatron_cp.attention.context import AttentionCall
from megatron_cp.attention.transports.all_to_all import with_heads_exchanged
from megatron_cp.attention.transports.comm import Peers
from megatron_cp.attention.transports.ring import ring_attention


def hierarchical_attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    softmax_offset: Tensor | None,
    call: AttentionCall,
    a2a_peers: Peers,
    p2p_peers: Peers,
) -> Tensor:
    """Attend to all ranks' tokens: [s_local, b, h, d]; differentiable.

    Query heads must divide by the size of ``a2a_peers``.
    """

    def between_groups(q: Tensor, k: Tensor, v: Tensor, offset: Tensor | None, common: AttentionCall) -> Tensor:
        return ring_attention(q, k, v, offset, common, p2p_peers)

    return with_heads_exchanged(between_groups, query, key, value, softmax_offset, call, a2a_peers)
