"""Process groups of schedules, one a legal block of a domain."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from datetime import timedelta

import torch
import torch.distributed as dist

from megatron_cp.dynamic_cp.buddy_tree import Positions
from megatron_cp.dynamic_cp.runtime.packing import BlockGroups
from megatron_cp.parallel.collectives import sum_over_ranks
from megatron_cp.parallel.layout import RankLayout
from megatron_cp.parallel.process_groups import new_group_alone, new_groups


class DynamicGroups:
    """Groups of this rank's domain, by positions (not global ranks) of their members.

    A domain is a ``dp_cp`` group of the layout: the ranks with the same part of the model. All domains run the same
    schedules, so every rank knows which groups a step needs and joins the creation of all with several ranks, as
    torch.distributed requires. Independent of how other groups were made (global state or decentralized).

    Args:
        blocks: blocks of positions that schedules may use, beside single ranks.
        at_start: create all groups at once; else each before the first step that uses it.
        a2a_size: ranks of a block's all-to-all level, for the two-level transport.
        with_tensor_parallel: also create each block's group with its tensor-parallel ranks, for router losses.
        known: existing groups, which are used and not destroyed.
    """

    def __init__(
        self,
        layout: RankLayout,
        *,
        blocks: Iterable[Positions],
        at_start: bool = False,
        timeout_minutes: float = 10.0,
        a2a_size: Callable[[Positions], int] | None = None,
        with_tensor_parallel: bool = False,
        known: Mapping[Positions, dist.ProcessGroup] | None = None,
    ) -> None:
        rank = dist.get_rank()
        self._domains = layout.groups("dp_cp")
        self._wide = with_tensor_parallel
        self._wide_domains = layout.groups("tp_dp_cp") if with_tensor_parallel and layout.tp > 1 else []
        if known is not None:  # a run on this rank only
            self._domains = [[rank]]
        self.domain = next(ranks for ranks in self._domains if rank in ranks)
        self.position = self.domain.index(rank)
        self._tp = layout.tp
        # A single rank is always a group, for dummy microbatches.
        alone = {(position,) for position in range(len(self.domain))}
        self.legal = alone.union(blocks)
        self._a2a_size = a2a_size
        self._timeout = timedelta(minutes=timeout_minutes)
        self._known = dict(known or {})
        self._groups: dict[Positions, dist.ProcessGroup | None] = dict(self._known)
        self._wide_groups: dict[Positions, dist.ProcessGroup | None] = {}
        self._created: set[Positions] = set()
        self._connected: set[Positions] = set()
        self._create_missing(self.legal if at_start else alone)

    def prepare(self, blocks: Iterable[Positions]) -> list[Positions]:
        """Create missing groups of these blocks, and connect unused ones.

        Collective over the world. Returns the new blocks. Raises ValueError for a block that is not legal.
        """
        wanted = set(blocks)
        new = self._create_missing(wanted)
        for block in _in_order(wanted - self._connected):
            self._connect(block)
        self._connected |= wanted
        return new

    def _create_missing(self, blocks: Iterable[Positions]) -> list[Positions]:
        new = _in_order(set(blocks) - self._created)
        for block in new:
            if block not in self.legal:
                raise ValueError(f"ranks {block} are not a legal group of a domain of {len(self.domain)} ranks")
            for positions in self._parts(block):
                if positions not in self._groups:
                    self._groups[positions] = self._create(self._domains, positions, 1)
            if self._wide_domains:
                self._wide_groups[block] = self._create(self._wide_domains, block, self._tp)
        self._created.update(new)
        return new

    def _connect(self, block: Positions) -> None:
        """Connect the groups of a block, so that no step includes it.

        Only NCCL needs it: its first collective sets a group up, which would disturb calibration's times. It connects
        single pairs of ranks later still, which takes much less.
        """
        groups = [*(self._groups[positions] for positions in self._parts(block)), self._wide_groups.get(block)]
        for group in groups:
            if group is not None and group.size() > 1 and dist.get_backend(group) == "nccl":
                sum_over_ranks(torch.zeros(1, device=torch.cuda.current_device()), group)

    def _parts(self, block: Positions) -> Iterator[Positions]:
        """Yield the block itself and the groups of its two levels, except single ranks."""
        yield block
        if self._a2a_size is not None:
            inner = self._a2a_size(block)
            if 1 < inner < len(block):
                yield from (block[start : start + inner] for start in range(0, len(block), inner))
                yield from (block[offset::inner] for offset in range(inner))

    def _create(self, domains: list[list[int]], positions: Positions, width: int) -> dist.ProcessGroup | None:
        """Create the group of ``positions`` in every domain; return this rank's, or None.

        ``width``: neighbouring ranks a position.
        """
        name = f"dynamic_cp_{len(positions)}"
        if len(positions) * width == 1:  # most groups of a large run, and no other rank needs to know of them
            return new_group_alone(self._timeout, name) if positions == (self.position,) else None
        places = [position * width + i for position in positions for i in range(width)]
        rank_lists = [[domain[place] for place in places] for domain in domains]
        return new_groups(rank_lists, self._timeout, name)

    def get(self, positions: Positions) -> dist.ProcessGroup:
        """Return the process group of these positions of the domain.

        Raises:
            ValueError: this rank is not a member, or :meth:`prepare` was not called for them.
        """
        group = self._groups.get(positions)
        if group is None:
            raise ValueError(
                f"rank {self.position} of the domain has no group {positions}: not a member, or not prepared"
            )
        return group

    def of_block(self, block: Positions) -> BlockGroups:
        """Return all groups of a microbatch of ``block``; raises as :meth:`get`."""
        levels = None
        if self._a2a_size is not None:
            inner = self._a2a_size(block)
            index = block.index(self.position)
            first = index - index % inner
            levels = self.get(block[first : first + inner]), self.get(block[index % inner :: inner])
        group = self.get(block)
        return BlockGroups(group, levels, self._wide_groups.get(block, group) if self._wide else None)

    def destroy(self) -> None:
        """Destroy this rank's groups."""
        if dist.is_initialized():
            for positions, group in [*self._groups.items(), *self._wide_groups.items()]:
                if group is not None and positions not in self._known:
                    dist.destroy_process_group(group)
        self._groups.clear()
        self._wide_groups.clear()
        self._created.clear()
        self._connected.clear()


def _in_order(blocks: Iterable[Positions]) -> list[Positions]:
    """Sort blocks in the order in which all ranks create and connect them."""
    return sorted(blocks, key=lambda ranks: (-len(ranks), ranks))
