"""The sizes of a Mamba-2 layer, and how its heads are shared by tensor- and context-parallel ranks. Pure."""

from __future__ import annotations

from dataclasses import dataclass, replace

from megatron_cp.attention.heads import shared_evenly
from megatron_cp.config.run_config import ModelConfig

CONV_WIDTH = 4  # tokens that the short convolution sees


@dataclass(frozen=True)
class MambaShape:
    """Heads, groups and their dims, of the whole layer or of one rank. Neighbouring heads share a group's B and C."""

    heads: int
    groups: int
    head_dim: int
    state_dim: int

    @classmethod
    def of(cls, model: ModelConfig) -> MambaShape:
        """The whole layer; without ``mamba_num_heads`` it is twice as wide as the model.

        ``model`` may as well be megatron-core's configuration, which has the same names.
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
        """Features of z, x, B, C and dt, in the order in which the input projection has them."""
        return [self.inner, *self.convolved, self.heads]

    def split(self, tp: int) -> MambaShape:
        """The part of each of ``tp`` tensor-parallel ranks: whole groups with their heads.

        Raises:
            ValueError: it cannot be split so.
        """
        if self.heads % tp or self.groups % tp or self.heads % self.groups:
            raise ValueError(f"{self.heads} heads in {self.groups} groups do not divide over {tp} ranks")
        return replace(self, heads=self.heads // tp, groups=self.groups // tp)

    def share(self, rank: int, size: int) -> MambaShare:
        """The part of rank ``rank`` of a context-parallel group of ``size``: whole heads, as evenly as they divide.

        Raises:
            ValueError: there are fewer heads than ranks.
        """
        if self.heads < size:
            raise ValueError(
                f"{self.heads} Mamba heads on each tensor-parallel rank cannot be shared by the {size} ranks of a "
                f"context-parallel group; the largest group that can has {self.heads}"
            )
        heads = range(rank * self.heads // size, (rank + 1) * self.heads // size)
        group_of = [head * self.groups // self.heads for head in heads]
        groups = range(group_of[0], group_of[-1] + 1)
        local = tuple(group - groups.start for group in group_of)
        mine = replace(self, heads=len(heads), groups=len(groups))
        return MambaShare(mine, heads, groups, None if shared_evenly(local) else local)


@dataclass(frozen=True)
class MambaShare:
    """What one context-parallel rank works on: its heads, and the groups that these use.

    Several neighbouring ranks may use the same group. ``group_of_head`` is the local group of each head where the
    groups do not serve as many of the heads each: the scan then gets one for each head.
    """

    shape: MambaShape
    heads: range
    groups: range
    group_of_head: tuple[int, ...] | None

    @property
    def scanned(self) -> MambaShape:
        """With the groups that the scan works with."""
        return self.shape if self.group_of_head is None else replace(self.shape, groups=len(self.heads))
