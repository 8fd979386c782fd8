"""Rank coordinates, and rank lists of every process group.

Pure: no torch, no process group. A layout is a grid of ranks with dimensions named by ``order``, the first one varying
fastest. Dense layers have dimensions tp, cp, dp, pp; expert layers have the same ranks as etp, ep, edp, pp ("parallel
folding"). This is megatron-core's convention (``RankGenerator``), so both kinds of process groups use the same lists.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property

from megatron_cp.config.run_config import DistributedConfig, ModelConfig

MOST_RANKS = 1_000_000  # rejects mistyped numbers at once
ORDERS = ("tp-cp-ep-dp-pp", "tp-cp-ep-pp-dp")

# Group family -> the dimensions that vary inside one group.
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

LEVELS = ("a2a", "p2p")  # of hierarchical context parallelism, neighbours first
_LARGEST_LITERAL_WORLD = 64  # larger worlds are abbreviated


@dataclass(frozen=True)
class RankLayout:
    """The grid of ``world_size`` ranks.

    Args:
        world_size: number of ranks.
        tp, cp, pp, ep, etp: parallel sizes; the data-parallel sizes follow from them.
        hierarchical: sizes of the context-parallel levels, innermost (all-to-all) first; their product is ``cp``.
        order: dimension names, the first one varying fastest.

    Raises:
        ValueError: a size is not a positive integer, is too large, or does not divide.
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
            _check_size(name, getattr(self, name))
        if self.world_size > MOST_RANKS:
            raise ValueError(f"world_size must be at most {MOST_RANKS}, got {self.world_size}")
        if self.hierarchical is not None:
            if not isinstance(self.hierarchical, Sequence):
                raise ValueError(f"hierarchical must be a tuple of sizes, got {self.hierarchical!r}")
            for level, size in enumerate(self.hierarchical):
                _check_size(f"hierarchical[{level}]", size)
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
    def _dense(self) -> dict[str, int]:
        return self._in_order({"tp": self.tp, "cp": self.cp, "ep": 1, "dp": self.dp, "pp": self.pp})

    @cached_property
    def _expert(self) -> dict[str, int]:
        expert_dp = self.world_size // self.expert_model_size
        return self._in_order({"tp": self.etp, "cp": 1, "ep": self.ep, "dp": expert_dp, "pp": self.pp})

    def _in_order(self, sizes: dict[str, int]) -> dict[str, int]:
        return {name: sizes[name] for name in self.order.split("-")}

    def groups(self, family: str) -> RankLists:
        """Return a family's rank lists (see :data:`FAMILIES`), in megatron-core's order."""
        if family in _DENSE_FAMILIES:
            return _slices(self._dense, _DENSE_FAMILIES[family])
        if family in _EXPERT_FAMILIES:
            return _slices(self._expert, _EXPERT_FAMILIES[family])
        if family == "embd":  # first and last stage share the embedding's weights
            return [sorted({ranks[0], ranks[-1]}) for ranks in self.groups("pp")]
        if family == "pos_embd":
            return [ranks[:1] for ranks in self.groups("pp")]
        raise ValueError(f"unknown group family {family!r}; one of {', '.join(FAMILIES)}")

    def hierarchical_groups(self) -> tuple[RankLists, ...]:
        """Return the rank lists of each CP level: ``(a2a, p2p)`` for two levels.

        A context-parallel rank is ``i + a2a * j``. A group varies the index of one level and keeps the others.
        """
        if self.hierarchical is None:
            raise ValueError("the layout has no hierarchical context parallel sizes")
        sizes = {str(level): size for level, size in enumerate(self.hierarchical)}
        cp_groups = self.groups("cp")
        slices = [_slices(sizes, (level,)) for level in sizes]
        return tuple(
            [[ranks[place] for place in places] for ranks in cp_groups for places in of_level] for of_level in slices
        )

    def coordinates(self, rank: int) -> dict[str, int]:
        """Return the dense coordinates (tp, cp, dp, pp) of a global rank."""
        found = {}
        for name, size in self._dense.items():
            rank, found[name] = divmod(rank, size)
        del found["ep"]
        return found


def _check_size(name: str, value: object) -> None:
    if isinstance(value, bool) or not isinstance(value, int) or value < 1:
        raise ValueError(f"{name} must be an integer of at least 1, got {value!r}")


def _slices(sizes: Mapping[str, int], varying: Collection[str]) -> RankLists:
    """Return grid places in lists along which only ``varying`` dimensions change.

    The first dimension is fastest.
    """
    inside, outside, stride = [0], [0], 1
    for name, size in sizes.items():
        steps = range(0, stride * size, stride)
        if name in varying:
            inside = [step + place for step in steps for place in inside]
        else:
            outside = [step + place for step in steps for place in outside]
        stride *= size
    return [[first + place for place in inside] for first in outside]


def layout_of(model: ModelConfig, distributed: DistributedConfig, world_size: int) -> RankLayout:
    """Return the rank layout of a finalized configuration."""
    levels = model.hierarchical_context_parallel_sizes
    return RankLayout(
        world_size,
        tp=model.tensor_model_parallel_size,
        cp=model.context_parallel_size,
        pp=model.pipeline_model_parallel_size,
        ep=model.expert_model_parallel_size,
        etp=model.expert_tensor_parallel_size or 1,
        hierarchical=tuple(levels) if levels and model.context_parallel_size > 1 else None,
        order="tp-cp-ep-pp-dp" if distributed.use_tp_pp_dp_mapping else "tp-cp-ep-dp-pp",
    )


def group_lines(layout: RankLayout) -> list[str]:
    """Return one line per group family, for the log and ``--dry-run``.

    Exact; small worlds list every rank.
    """
    text = _literal if layout.world_size <= _LARGEST_LITERAL_WORLD else _compact
    lines = [f"TENSOR_MODEL_PARALLEL_GROUP {text(layout.groups('tp'))}"] if layout.tp > 1 else []
    lines.append(f"CONTEXT_PARALLEL_GROUP {text(layout.groups('cp'))}")
    if layout.hierarchical is not None:
        names = LEVELS if len(layout.hierarchical) == len(LEVELS) else map(str, range(len(layout.hierarchical)))
        levels = zip(names, layout.hierarchical_groups(), strict=True)
        lines.append("HIERARCHICAL_CONTEXT_PARALLEL_GROUPS " + " ".join(f"{n}={text(g)}" for n, g in levels))
    if layout.pp > 1:
        lines.append(f"PIPELINE_MODEL_PARALLEL_GROUP {text(layout.groups('pp'))}")
    if layout.ep > 1:
        lines.append(f"EXPERT_MODEL_PARALLEL_GROUP {text(layout.groups('ep'))}")
    lines.append(f"DATA_PARALLEL_GROUP {text(layout.groups('dp'))}")
    return lines


def _literal(lists: RankLists) -> str:
    return str(lists).replace(" ", "")


def _compact(lists: RankLists) -> str:
    """Format groups along one grid dimension.

    For example ``[0..24 by 8] [1..25 by 8] ... [999..1023 by 8] (256 of 4: the first shifted by 0..7 + 0..992 by 32)``:
    every sum of one number from each range.
    """
    groups = [" + ".join(map(_range, _progressions(ranks))) or str(ranks[0]) for ranks in lists]
    shown = groups if len(groups) <= 3 else [*groups[:2], groups[-1]]
    shifts = " + ".join(map(_range, _progressions([ranks[0] for ranks in lists])))
    dots = " ... " if len(groups) > 3 else " "
    text = " ".join(f"[{group}]" for group in shown[:-1]) + (dots if shown[:-1] else "") + f"[{shown[-1]}]"
    return f"{text} ({len(lists)} of {len(lists[0])}{': the first shifted by ' + shifts if shifts else ''})"


def _progressions(numbers: list[int]) -> list[range]:
    """Return arithmetic progressions whose sums run through ``numbers``.

    The first one is fastest and has the offset.
    """
    found: list[range] = []
    while len(numbers) > 1:
        first, step = (0 if found else numbers[0]), numbers[1] - numbers[0]
        length = next((n for n, x in enumerate(numbers) if x != numbers[0] + n * step), len(numbers))
        found.append(range(first, first + length * step, step))
        numbers = numbers[::length]
    return found


def _range(numbers: range) -> str:
    return f"{numbers[0]}..{numbers[-1]}" + (f" by {numbers.step}" if numbers.step != 1 else "")
