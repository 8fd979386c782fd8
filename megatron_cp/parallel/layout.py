"""Where each global rank stands, and the rank lists of every process group. Pure: no torch, no process group.

A layout is a grid of ranks whose dimensions are named by ``order``, the first one varying fastest. Dense layers see
the dimensions tp, cp, dp, pp; expert layers see the same ranks as etp, ep, edp, pp ("parallel folding"). This is
megatron-core's convention (``RankGenerator``), so both kinds of process groups are built from the same lists.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property

from megatron_cp.config.run_config import DistributedConfig, ModelConfig

MOST_RANKS = 1_000_000  # a mistyped number is told at once, instead of counting to it
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

LEVELS = ("a2a", "p2p")  # of hierarchical context parallelism: neighbours first
_LARGEST_LITERAL_WORLD = 64  # ranks; the tables of larger worlds are abbreviated


@dataclass(frozen=True)
class RankLayout:
    """The grid of ``world_size`` ranks.

    Args:
        world_size: number of ranks.
        tp, cp, pp, ep, etp: parallel sizes; the data-parallel sizes follow from them.
        hierarchical: sizes of the context-parallel levels, innermost (all-to-all) first; their product is ``cp``.
        order: dimension names, the first one varying fastest.

    Raises:
        ValueError: a size that is not a positive integer, or is beyond all machines, or does not divide what it must.
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
        """The rank lists of a family (one of :data:`FAMILIES`), in megatron-core's order."""
        if family in _DENSE_FAMILIES:
            return _slices(self._dense, _DENSE_FAMILIES[family])
        if family in _EXPERT_FAMILIES:
            return _slices(self._expert, _EXPERT_FAMILIES[family])
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
        sizes = {str(level): size for level, size in enumerate(self.hierarchical)}
        cp_groups = self.groups("cp")
        return tuple(
            [[ranks[place] for place in places] for ranks in cp_groups for places in _slices(sizes, (level,))]
            for level in sizes
        )

    def coordinates(self, rank: int) -> dict[str, int]:
        """The dense coordinates (tp, cp, dp, pp) of a global rank."""
        found = {}
        for name, size in self._dense.items():
            rank, found[name] = divmod(rank, size)
        del found["ep"]
        return found


def _check_size(name: str, value: object) -> None:
    if isinstance(value, bool) or not isinstance(value, int) or value < 1:
        raise ValueError(f"{name} must be an integer of at least 1, got {value!r}")


def _slices(sizes: Mapping[str, int], varying: Collection[str]) -> RankLists:
    """The places of a grid in lists along which only the dimensions ``varying`` change; the first one is fastest."""
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
    """The rank layout of a finalized configuration."""
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
    """One line a group family: what a run logs and ``--dry-run`` prints. Exact; every rank by name in small worlds."""
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
    """Groups along one dimension of a grid: ``[0..24 by 8] [1..25 by 8] ... [999..1023 by 8] (256 of 4: the first
    shifted by 0..7 + 0..992 by 32)``, which is every sum of one number from each range.
    """
    groups = [" + ".join(map(_range, _progressions(ranks))) or str(ranks[0]) for ranks in lists]
    shown = groups if len(groups) <= 3 else [*groups[:2], groups[-1]]
    shifts = " + ".join(map(_range, _progressions([ranks[0] for ranks in lists])))
    dots = " ... " if len(groups) > 3 else " "
    text = " ".join(f"[{group}]" for group in shown[:-1]) + (dots if shown[:-1] else "") + f"[{shown[-1]}]"
    return f"{text} ({len(lists)} of {len(lists[0])}{': the first shifted by ' + shifts if shifts else ''})"


def _progressions(numbers: list[int]) -> list[range]:
    """Arithmetic progressions whose sums run through ``numbers``, the first one fastest; that one has the offset."""
    found: list[range] = []
    while len(numbers) > 1:
        first, step = (0 if found else numbers[0]), numbers[1] - numbers[0]
        length = next((n for n, x in enumerate(numbers) if x != numbers[0] + n * step), len(numbers))
        found.append(range(first, first + length * step, step))
        numbers = numbers[::length]
    return found


def _range(numbers: range) -> str:
    return f"{numbers[0]}..{numbers[-1]}" + (f" by {numbers.step}" if numbers.step != 1 else "")
