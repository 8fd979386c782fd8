"""Where each global rank stands, and the rank lists of every process group. Pure: no torch, no process group.

A layout is a grid of ranks whose dimensions are named by ``order``, the first one varying fastest. Dense layers see
the dimensions tp, cp, dp, pp; expert layers see the same ranks as etp, ep, edp, pp ("parallel folding"). This is
megatron-core's convention (``RankGenerator``), so both kinds of process groups are built from the same lists.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from functools import cached_property

import numpy as np

from megatron_cp.config import RunConfig

ORDERS = ("tp-cp-ep-dp-pp", "tp-cp-ep-pp-dp")

# Name of a group family -> the dimensions that vary inside one group.
_DENSE_FAMILIES = {
    "tp": ("tp",),
    "cp": ("cp",),
    "dp": ("dp",),
    "pp": ("pp",),
    "dp_cp": ("dp", "cp"),
    "tp_cp": ("tp", "cp"),
    "tp_dp_cp": ("tp", "dp", "cp"),
    "mp": ("tp", "pp"),
}
_EXPERT_FAMILIES = {
    "ep": ("ep",),
    "expt_tp": ("tp",),
    "expt_dp": ("dp",),
    "tp_ep": ("tp", "ep"),
    "tp_ep_pp": ("tp", "ep", "pp"),
}
FAMILIES = (*_DENSE_FAMILIES, *_EXPERT_FAMILIES, "embd", "pos_embd")

RankLists = list[list[int]]


@dataclass(frozen=True)
class RankLayout:
    """The grid of ``world_size`` ranks.

    Args:
        world_size: number of ranks.
        tp, cp, pp, ep, etp: parallel sizes; the data-parallel sizes follow from them.
        hierarchical: sizes of the context-parallel levels, innermost (all-to-all) first; their product is ``cp``.
        order: dimension names, the first one varying fastest.

    Raises:
        ValueError: a size that is not a positive integer or does not divide what it must.
    """

    world_size: int
    tp: int = 1
    cp: int = 1
    pp: int = 1
    ep: int = 1
    etp: int = 1
    hierarchical: tuple[int, ...] | None = None
    order: str = "tp-cp-ep-dp-pp"

    def __post_init__(self) -> None:
        for name in ("world_size", "tp", "cp", "pp", "ep", "etp"):
            value = getattr(self, name)
            if isinstance(value, bool) or not isinstance(value, int) or value < 1:
                raise ValueError(f"{name} must be an integer of at least 1, got {value!r}")
        if self.hierarchical is not None:
            object.__setattr__(self, "hierarchical", tuple(self.hierarchical))
            if math.prod(self.hierarchical) != self.cp:
                raise ValueError(
                    f"hierarchical context parallel sizes {list(self.hierarchical)} multiply to "
                    f"{math.prod(self.hierarchical)}, not to the context parallel size {self.cp}"
                )
        if self.order not in ORDERS:
            raise ValueError(f"unknown rank order {self.order!r}; one of {', '.join(ORDERS)}")
        for what, size in (("tp * pp * cp", self.tp * self.pp * self.cp), ("etp * ep * pp", self.expert_model_size)):
            if self.world_size % size:
                raise ValueError(f"world size {self.world_size} is not divisible by {what} = {size}")

    @property
    def expert_model_size(self) -> int:
        return self.etp * self.ep * self.pp

    @property
    def dp(self) -> int:
        """Number of model replicas that see different samples."""
        return self.world_size // (self.tp * self.pp * self.cp)

    @cached_property
    def _dense(self) -> np.ndarray:
        return self._grid({"tp": self.tp, "cp": self.cp, "ep": 1, "dp": self.dp, "pp": self.pp})

    @cached_property
    def _expert(self) -> np.ndarray:
        expert_dp = self.world_size // self.expert_model_size
        return self._grid({"tp": self.etp, "cp": 1, "ep": self.ep, "dp": expert_dp, "pp": self.pp})

    def _grid(self, sizes: dict[str, int]) -> np.ndarray:
        """Ranks with one axis a dimension, slowest first as numpy wants it."""
        return np.arange(self.world_size).reshape([sizes[dim] for dim in reversed(self.order.split("-"))])

    def _slices(self, grid: np.ndarray, dims: tuple[str, ...]) -> RankLists:
        axes = self.order.split("-")[::-1]
        inside = [axis for axis, name in enumerate(axes) if name in dims]
        outside = [axis for axis, name in enumerate(axes) if name not in dims]
        size = math.prod(grid.shape[axis] for axis in inside)
        return grid.transpose(outside + inside).reshape(-1, size).tolist()

    def groups(self, family: str) -> RankLists:
        """The rank lists of a family (one of :data:`FAMILIES`), in megatron-core's order."""
        if family in _DENSE_FAMILIES:
            return self._slices(self._dense, _DENSE_FAMILIES[family])
        if family in _EXPERT_FAMILIES:
            return self._slices(self._expert, _EXPERT_FAMILIES[family])
        if family == "embd":  # the stages that share the embedding's weights: the first and the last
            return [sorted({ranks[0], ranks[-1]}) for ranks in self.groups("pp")]
        if family == "pos_embd":
            return [ranks[:1] for ranks in self.groups("pp")]
        raise ValueError(f"unknown group family {family!r}; one of {', '.join(FAMILIES)}")

    def hierarchical_groups(self) -> tuple[RankLists, ...]:
        """The rank lists of each context-parallel level: ``(a2a, p2p)`` for two levels.

        A context-parallel rank is ``i + a2a * j``: a level's group varies its own index and keeps the others.
        """
        if self.hierarchical is None:
            raise ValueError("the layout has no hierarchical context parallel sizes")
        levels = self.hierarchical
        cp_groups = np.array(self.groups("cp")).reshape(-1, *reversed(levels))
        result = []
        for level, size in enumerate(levels):
            axis = len(levels) - level
            result.append(np.moveaxis(cp_groups, axis, -1).reshape(-1, size).tolist())
        return tuple(result)

    def coordinates(self, rank: int) -> dict[str, int]:
        """The dense coordinates (tp, cp, dp, pp) of a global rank."""
        index = np.unravel_index(rank, self._dense.shape)
        return {name: int(i) for name, i in zip(self.order.split("-")[::-1], index, strict=True) if name != "ep"}


def layout_of(config: RunConfig, world_size: int) -> RankLayout:
    """The rank layout of a finalized configuration."""
    model = config.model
    levels = model.hierarchical_context_parallel_sizes
    return RankLayout(
        world_size,
        tp=model.tensor_model_parallel_size,
        cp=model.context_parallel_size,
        pp=model.pipeline_model_parallel_size,
        ep=model.expert_model_parallel_size,
        etp=model.expert_tensor_parallel_size or 1,
        hierarchical=tuple(levels) if levels and model.context_parallel_size > 1 else None,
        order="tp-cp-ep-pp-dp" if config.dist.use_tp_pp_dp_mapping else "tp-cp-ep-dp-pp",
    )


def group_lines(layout: RankLayout) -> list[str]:
    """One line a group family: what a run logs and ``--dry-run`` prints."""
    lines = [f"TENSOR_MODEL_PARALLEL_GROUP {_compact(layout.groups('tp'))}"] if layout.tp > 1 else []
    lines.append(f"CONTEXT_PARALLEL_GROUP {_compact(layout.groups('cp'))}")
    if layout.hierarchical is not None:
        names = ("a2a", "p2p") if len(layout.hierarchical) == 2 else map(str, range(len(layout.hierarchical)))
        levels = zip(names, layout.hierarchical_groups(), strict=True)
        lines.append("HIERARCHICAL_CONTEXT_PARALLEL_GROUPS " + " ".join(f"{n}={_compact(g)}" for n, g in levels))
    if layout.pp > 1:
        lines.append(f"PIPELINE_MODEL_PARALLEL_GROUP {_compact(layout.groups('pp'))}")
    if layout.ep > 1:
        lines.append(f"EXPERT_MODEL_PARALLEL_GROUP {_compact(layout.groups('ep'))}")
    lines.append(f"DATA_PARALLEL_GROUP {_compact(layout.groups('dp'))}")
    return lines


def _compact(lists: RankLists) -> str:
    return str(lists).replace(" ", "")
