"""Sizes of a Mamba-2 layer, and its split over ranks. Pure."""

from __future__ import annotations

from dataclasses import dataclass, replace

from megatron_cp.attention.heads import shared_evenly
from megatron_cp.config.run_config import ModelConfig

CONV_WIDTH = 4  # tokens in the short convolution


@dataclass(frozen=True)
class MambaShape:
    """Heads, groups and dims of a layer or a rank."""

    heads: int
    groups: int
    head_dim: int
    state_dim: int

    @classmethod
    def of(cls, model: ModelConfig) -> MambaShape:
        """Return the whole layer's shape; the default width is twice the model's.

        ``model`` may also be megatron-core's configuration, which has the same names.
        """
        heads = model.mamba_num_heads or 2 * model.hidden_size // max(1, model.mamba_head_dim)
        return cls(heads, model.mamba_num_groups, model.mamba_head_dim, model.mamba_state_dim)

    @property
    def inner(self) -> int:
        return self.heads * self.head_dim

    @property
    def convolved(self) -> list[int]:
        """Features of x, B and C."""
        return [self.inner, self.groups * self.state_dim, self.groups * self.state_dim]

    @property
    def projected(self) -> list[int]:
        """Features of z, x, B, C and dt, in the input projection's order."""
        return [self.inner, *self.convolved, self.heads]

    def split(self, tp: int) -> MambaShape:
        """Return the shape on each of ``tp`` tensor-parallel ranks: whole groups.

        Raises:
            ValueError: ``tp`` does not divide the groups evenly.
        """
        if self.heads % tp or self.groups % tp or self.heads % self.groups:
            raise ValueError(f"{self.heads} heads in {self.groups} groups are not divisible by {tp} ranks")
        return replace(self, heads=self.heads // tp, groups=self.groups // tp)

    def share(self, rank: int, size: int) -> MambaShare:
        """Return a context-parallel rank's share: whole heads, as evenly as possible.

        Raises:
            ValueError: fewer heads than ranks.
        """
        if self.heads < size:
            raise ValueError(
                f"{self.heads} Mamba heads on each tensor-parallel rank cannot be split over {size} context-parallel "
                f"ranks; the largest group is {self.heads}"
            )
        heads = range(rank * self.heads // size, (rank + 1) * self.heads // size)
        group_of = [head * self.groups // self.heads for head in heads]
        groups = range(group_of[0], group_of[-1] + 1)
        local = tuple(group - groups.start for group in group_of)
        mine = replace(self, heads=len(heads), groups=len(groups))
        return MambaShare(mine, heads, groups, None if shared_evenly(local) else local)


@dataclass(frozen=True)
class MambaShare:
    """One context-parallel rank's heads, and the groups that they use.

    Several neighbouring ranks may use the same group. ``group_of_head`` is the local group of each head if groups have
    unequal numbers of heads: the scan then gets one group a head.
    """

    shape: MambaShape
    heads: range
    groups: range
    group_of_head: tuple[int, ...] | None

    @property
    def scanned(self) -> MambaShape:
        """Shape with the groups that the scan uses."""
        return self.shape if self.group_of_head is None else replace(self.shape, groups=len(self.heads))
