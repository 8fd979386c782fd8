"""The process groups that schedules use: one for each legal block of a data-and-context-parallel domain."""

from __future__ import annotations

from collections.abc import Iterable
from datetime import timedelta

import torch.distributed as dist

from megatron_cp.dynamic_cp.groups import legal_groups
from megatron_cp.parallel.layout import RankLayout

Positions = tuple[int, ...]


class DynamicGroups:
    """Groups of this rank's domain, by the positions (not the global ranks) of their members in it.

    A domain is a ``dp_cp`` group of the layout: the ranks that hold the same part of the model. All domains run the
    same schedules, so every rank of the world knows which groups a step needs and takes part in creating them, as
    torch.distributed wants. ``at_start`` creates every legal group at once; otherwise each is created before the first
    step that uses it. Independent of how the other groups were made (MPU or decentralized).
    """

    def __init__(
        self, layout: RankLayout, *, min_cp_size: int = 1, at_start: bool = False, timeout_minutes: float = 10.0
    ) -> None:
        rank = dist.get_rank()
        self._domains = layout.groups("dp_cp")
        self.domain = next(ranks for ranks in self._domains if rank in ranks)
        self.position = self.domain.index(rank)
        # One rank alone is always a group: a rank that keeps step with a dummy microbatch needs nobody.
        alone = {(position,) for position in range(len(self.domain))}
        self.legal = alone.union(legal_groups(len(self.domain), min_cp_size))
        self._timeout = timedelta(minutes=timeout_minutes)
        self._groups: dict[Positions, dist.ProcessGroup | None] = {}
        self.prepare(self.legal if at_start else alone)

    def prepare(self, blocks: Iterable[Positions]) -> None:
        """Create the groups of these blocks of positions that do not exist yet; collective over the world.

        Raises:
            ValueError: a block that is no legal group.
        """
        for positions in sorted(set(blocks) - self._groups.keys(), key=lambda ranks: (-len(ranks), ranks)):
            if positions not in self.legal:
                raise ValueError(f"ranks {positions} are no legal group of a domain of {len(self.domain)} ranks")
            mine = None
            for domain in self._domains:
                group = dist.new_group(
                    [domain[position] for position in positions],
                    timeout=self._timeout,
                    group_desc=f"DYNAMIC_CP_{len(positions)}",
                )
                mine = group if domain is self.domain and self.position in positions else mine
            self._groups[positions] = mine

    def get(self, positions: Positions) -> dist.ProcessGroup:
        """The process group of these positions of the domain.

        Raises:
            ValueError: the caller is not one of them, or :meth:`prepare` was not called for them.
        """
        group = self._groups.get(positions)
        if group is None:
            raise ValueError(
                f"rank {self.position} of the domain has no group {positions}: not a member, or not prepared"
            )
        return group

    @property
    def created(self) -> list[Positions]:
        """The groups that exist, by position, widest first."""
        return sorted(self._groups, key=lambda ranks: (-len(ranks), ranks))

    def destroy(self) -> None:
        """Destroy the groups that this rank is a member of."""
        if dist.is_initialized():
            for group in self._groups.values():
                if group is not None:
                    dist.destroy_process_group(group)
        self._groups.clear()
