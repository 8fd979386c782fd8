"""The process groups that schedules use: one for each legal block of a data-and-context-parallel domain."""

from __future__ import annotations

from datetime import timedelta

import torch.distributed as dist

from megatron_cp.dynamic_cp.groups import legal_groups
from megatron_cp.parallel.layout import RankLayout


class DynamicGroups:
    """Groups of this rank's domain, by the positions (not the global ranks) of their members in it.

    A domain is a ``dp_cp`` group of the layout: the ranks that hold the same part of the model. Groups are created when
    a microbatch first needs them, by their members alone, or all at once with ``create_all``; the group of all ranks
    and single ranks are no exception. Independent of how the other groups were made (MPU or decentralized).
    """

    def __init__(self, layout: RankLayout, *, min_cp_size: int = 1, timeout_minutes: float = 10.0) -> None:
        rank = dist.get_rank()
        self.domain = next(ranks for ranks in layout.groups("dp_cp") if rank in ranks)
        self.position = self.domain.index(rank)
        self._legal = frozenset(legal_groups(len(self.domain), min_cp_size))
        self._timeout = timedelta(minutes=timeout_minutes)
        self._groups: dict[tuple[int, ...], dist.ProcessGroup] = {}

    def get(self, positions: tuple[int, ...]) -> dist.ProcessGroup:
        """The process group of these positions of the domain; the caller must be one of them.

        Raises:
            ValueError: positions that are no legal group, or that the caller is not among.
        """
        if positions not in self._groups:
            # One rank is always a group: a rank that waits with a dummy microbatch needs nobody.
            if positions not in self._legal and positions != (self.position,):
                raise ValueError(f"ranks {positions} are no legal group of a domain of {len(self.domain)} ranks")
            if self.position not in positions:
                raise ValueError(f"rank {self.position} of the domain asks for the group {positions} of others")
            ranks = [self.domain[position] for position in positions]
            self._groups[positions] = dist.new_group(
                ranks, timeout=self._timeout, use_local_synchronization=True, group_desc=f"DYNAMIC_CP_{len(ranks)}"
            )
        return self._groups[positions]

    def create_all(self) -> None:
        """Create every legal group that the caller is a member of, widest first (an order that cannot deadlock)."""
        for positions in sorted(self._legal, key=lambda ranks: (-len(ranks), ranks)):
            if self.position in positions:
                self.get(positions)

    @property
    def created(self) -> list[tuple[int, ...]]:
        """The groups that exist, by position, widest first."""
        return sorted(self._groups, key=lambda ranks: (-len(ranks), ranks))

    def destroy(self) -> None:
        """Destroy the groups that were created."""
        if dist.is_initialized():
            for group in self._groups.values():
                dist.destroy_process_group(group)
        self._groups.clear()
