"""Faults of attention, of positions and of other exchanges along the sequence."""

import functools
from collections.abc import Callable
from contextlib import AbstractContextManager
from dataclasses import replace
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist
from megatron.core.models.common.embeddings import rotary_pos_embedding

from megatron_cp.attention import functional, merge
from megatron_cp.attention.modules import native as core_attention
from megatron_cp.attention.tiles import Mask
from megatron_cp.attention.transports import all_to_all, comm, ring
from megatron_cp.dynamic_cp.runtime import packing
from megatron_cp.mcore import rotary
from megatron_cp.models.layers.mamba import exchange
from tests.unit_tests.models.hybrids import HYBRID
from tests.unit_tests.training.layouts.cases import CP2, CP4, HCP, TP2, over
from tests.unit_tests.verify.faults.registry import BACKWARD, FORWARD, PROBE, changed, fault
from tests.unit_tests.verify.test_layouts import DYNAMIC, PACKED, PLACED

SINKS = {"model__softmax_type": "learnable"}
WINDOW = {"model__window_size": [512, 0]}
Patch = AbstractContextManager[Any]


@fault("ring: ranks keep their own keys and values", CP4, PROBE)
def skipped_hop() -> Patch:
    def hop(pair: Any, distance: int, peers: Any, tag: int) -> Any:
        return comm.PendingReceive((pair[0].clone(), pair[1].clone()), [])

    return mock.patch.object(comm, "hop", hop)


@fault("ring: gradients of keys and values stay where they were computed", CP4, BACKWARD)
def skipped_gradient_hop() -> Patch:
    def change(hop: Callable) -> Callable:
        def without_gradients(pair: Any, distance: int, peers: Any, tag: int) -> Any:
            if tag == comm.GRAD_TAG:
                return comm.PendingReceive((pair[0].clone(), pair[1].clone()), [])
            return hop(pair, distance, peers, tag)

        return without_gradients

    return changed(comm, "hop", change)


@fault("ring: keys and values are swapped where they arrive on one rank", CP4, PROBE)
def swapped_keys_and_values() -> Patch:
    def change(hop: Callable) -> Callable:
        def swapping(pair: Any, distance: int, peers: Any, tag: int) -> Any:
            arrival = hop(pair, distance, peers, tag)
            if tag == comm.KV_TAG and peers.rank == 1:
                arrival._content = arrival._content[::-1]
            return arrival

        return swapping

    return changed(comm, "hop", change)


@fault("ring: partial outputs are averaged, and not merged by their log-sum-exp", CP4, PROBE)
def merged_without_log_sum_exp() -> Patch:
    def average(out: Any, lse: Any, new_out: Any, new_lse: Any) -> None:
        out.lerp_(new_out, 0.5)
        lse.copy_(torch.logaddexp(lse, new_lse))

    return mock.patch.object(merge, "merge_", average)


@fault("all-to-all: ranks take their own part for the others'", CP4 | over("a2a"), PROBE)
def skipped_exchange() -> Patch:
    def exchange(outgoing: Any, incoming: Any, content: Any, peers: Any, index: int) -> Any:
        for rank, (pieces, places) in enumerate(zip(outgoing, incoming, strict=True)):
            if rank == peers.rank:
                continue
            flat = torch.cat([piece.reshape(-1) for piece in pieces])
            for place, part in zip(places, flat.split([place.numel() for place in places]), strict=True):
                place.copy_(part.view_as(place))
        return comm.PendingReceive(content, [])

    return mock.patch.object(comm, "exchange", exchange)


@fault("all-to-all: key/value heads are dealt in the reverse order of the ranks", CP4 | over("a2a"), PROBE)
def reversed_heads() -> Patch:
    def change(spread: Callable) -> Callable:
        def reversing(self: Any, tensors: Any, shares: Any) -> Any:
            last = self.peers.size - 1
            if len(shares) == 3:
                of_query, of_kv, _ = shares
                shares = of_query, *[lambda rank: of_kv(last - rank)] * 2
            return spread(self, tensors, shares)

        return reversing

    return changed(all_to_all.HeadExchange, "spread", change)


@fault("all-gather: ranks repeat their own keys and values", CP4 | over("all_gather"), PROBE)
def skipped_all_gather() -> Patch:
    def all_gather(pieces: Any, outs: Any, content: Any, peers: Any, index: int) -> Any:
        for piece, out in zip(pieces, outs, strict=True):
            out.copy_(torch.cat([piece] * peers.size))
        return comm.PendingReceive(content, [])

    return mock.patch.object(comm, "all_gather", all_gather)


@fault("hierarchical: the two levels are swapped", CP4 | HCP, PROBE)
def swapped_levels() -> Patch:
    def change(transport: Callable) -> Callable:
        return lambda context, rows: transport(
            replace(context, a2a_peers=context.p2p_peers, p2p_peers=context.a2a_peers), rows
        )

    return changed(functional, "_transport", change)


@fault("windows: one token too long", CP4 | WINDOW, FORWARD)
def longer_window() -> Patch:
    def build(causal: bool, window: tuple[int, int] | None) -> Mask:
        found = _build(causal, window)
        return found if found.left is None else Mask(found.left + 1, found.right)

    return mock.patch.object(core_attention.Mask, "build", build)


_build = Mask.build


@fault("windows of packs: one token too long", PACKED | CP2 | WINDOW, FORWARD)
def longer_window_in_packs() -> Patch:
    return longer_window()


@fault("attention sinks: no gradient", TP2 | CP2 | SINKS, BACKWARD)
def no_gradient_of_sinks() -> Patch:
    return changed(
        ring, "softmax_offset_grad", lambda of: lambda *given: None if of(*given) is None else 0 * of(*given)
    )


@fault("attention sinks: counted at every stop of the ring", TP2 | CP2 | SINKS, FORWARD)
def repeated_sinks() -> Patch:
    def change(finish: Callable) -> Callable:
        def twice(self: Any, offset: Any) -> Any:
            if offset is None or dist.get_rank() % 2:
                return finish(self, offset)
            return finish(self, offset + torch.log(torch.tensor(2.0)))

        return twice

    return changed(merge.OutputAccumulator, "finish", change)


@fault("attention: computed in bf16 by one rank", CP4, FORWARD)
def half_precision() -> Patch:
    def change(attend: Callable) -> Callable:
        def rounded(context: Any, query: Any, key: Any, value: Any, **given: Any) -> Any:
            if "softmax_scale" in given and dist.get_rank() == 2:  # not where the probe calls it
                query = query.bfloat16().float()
            return attend(context, query, key, value, **given)

        return rounded

    return changed(core_attention, "attend_in_context", change)


@fault("RoPE: positions of the tensor-parallel rank", TP2 | CP2, FORWARD)
def rope_of_another_group() -> Patch:
    def change(of_rank: Callable) -> Callable:
        def misplaced(emb: Any, dim: int, group: Any) -> Any:
            return of_rank(emb, dim, _neighbours())

        return misplaced

    return changed(rotary_pos_embedding, "get_pos_emb_on_this_cp_rank", change)


@functools.cache
def _neighbours() -> Any:
    first = dist.get_rank() // 2 * 2
    return dist.new_group([first, first + 1], use_local_synchronization=True)


@fault("RoPE: positions of one rank begin one token late", CP4, FORWARD)
def late_positions() -> Patch:
    def change(of_rank: Callable) -> Callable:
        def late(emb: Any, dim: int, group: Any) -> Any:
            found = of_rank(emb, dim, group)
            return found.roll(1, 0) if group.rank() == 1 else found

        return late

    return changed(rotary_pos_embedding, "get_pos_emb_on_this_cp_rank", change)


@fault("RoPE in packs: positions of the next rank", PACKED | CP2, FORWARD)
def offset_in_packs() -> Patch:
    def change(rows: Callable) -> Callable:
        return lambda starts, count, rank, size: rows(starts, count, (rank + 1) % size, size)

    return changed(rotary, "_rows_of_pack", change)


@fault("packs: a rank's two chunks in the other order", PACKED | CP2, FORWARD)
def swapped_chunks_in_packs() -> Patch:
    def change(indices: Callable) -> Callable:
        return lambda starts, rank, size: indices(starts, size - 1 - rank, size)

    return changed(packing, "partition_indices", change)


@fault("packs in pieces: RoPE takes the positions of the rows before", PACKED | CP2 | PLACED, FORWARD)
def positions_of_the_rows_before() -> Patch:
    return changed(rotary, "_rows_of_pack", lambda rows: lambda *given: rows(*given).roll(1))


@fault("packs: the first two documents are one to attention", PACKED | CP2, FORWARD)
def joined_documents() -> Patch:
    def change(lengths: Callable) -> Callable:
        def joined(packed: Any, where: str) -> Any:
            starts = lengths(packed, where)
            return starts if len(starts[0]) < 3 else tuple(torch.cat([each[:1], each[2:]]) for each in starts)

        return joined

    return changed(core_attention, "_cumulative_lengths", change)


@fault("dynamic context parallelism: slices of a pack by the reversed rank", DYNAMIC, FORWARD)
def reversed_ranks_of_a_pack() -> Patch:
    from megatron_cp.dynamic_cp.runtime import iterator

    def change(lay_out: Callable) -> Callable:
        return lambda parts, rank, size, **given: lay_out(parts, size - 1 - rank, size, **given)

    return changed(iterator, "lay_out", change)


@fault("Mamba: the scan runs over tokens in the order of the ranks", HYBRID | CP4, FORWARD)
def mamba_in_zigzag_order() -> Patch:
    return mock.patch.object(exchange, "regroup_rows", lambda x, layout, size, inverse=False: x)


@fault("Mamba: ranks scan their own tokens alone", HYBRID | CP4, FORWARD)
def mamba_alone() -> Patch:
    def change(all_to_all: Callable) -> Callable:
        def own(group: Any, flat: Any, outs: Any, ins: Any) -> Any:
            received = all_to_all(group, flat, outs, ins)
            if len(set(outs)) > 1 or len(set(ins)) > 1:
                return received
            return received.view(group.size(), -1)[group.rank()].repeat(group.size())

        return own

    return changed(exchange, "all_to_all", change)
