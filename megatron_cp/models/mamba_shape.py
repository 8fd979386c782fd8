"""The sizes of a Mamba-2 layer, and how its heads are shared by tensor- and context-parallel ranks. Pure."""

from __future__ import annotations

from dataclasses import dataclass, replace

from megatron_cp.config import ModelConfig


@dataclass(frozen=True)
class MambaShape:
    """Heads, groups and their dims, of the whole layer or of one rank. Neighbouring heads share a group's B and C."""

    heads: int
    groups: int
    head_dim: int
    state_dim: int

    @classmethod
    def of(cls, model: ModelConfig) -> MambaShape:
        """The whole layer; without ``mamba_num_heads`` it is twice as wide as the model."""
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

    def can_share(self, size: int) -> bool:
        """Whether the ranks of a context-parallel group of ``size`` can share this rank's heads."""
        return self.heads % size == 0 and (self.groups % size == 0 or size % self.groups == 0)

    def share(self, size: int) -> MambaShape:
        """The part of each of ``size`` context-parallel ranks: whole heads, and the groups that they use.

        With fewer groups than ranks, several neighbouring ranks get the same one.

        Raises:
            ValueError: that does not work out; says what the largest size is that does.
        """
        if not self.can_share(size):
            largest = max(n for n in range(1, size) if self.can_share(n))
            raise ValueError(
                f"{self.heads} Mamba heads in {self.groups} groups cannot be shared by the {size} ranks of a "
                f"context-parallel group; the largest smaller group that can has {largest}"
            )
        return replace(self, heads=self.heads // size, groups=max(1, self.groups // size))
