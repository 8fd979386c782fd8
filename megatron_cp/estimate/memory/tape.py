"""The memory that a part of a model keeps for backward, and its peak there. Pure.

A part is written down as its steps in forward order. Sizes are bytes for each token of a rank.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

# Kinds of what is kept.
RESIDUAL, ATTENTION, MLP = "activations: residual", "activations: attention", "activations: mlp"
EXPERTS, MAMBA, LOGITS = "activations: experts", "activations: mamba", "logits"


@dataclass(frozen=True)
class Moment:
    """The memory of a part at one moment of its backward or ``forward`` pass."""

    kept: Mapping[str, float]
    gradients: float
    weight: float
    forward: bool = False

    def total(self, tokens: float) -> float:
        return (sum(self.kept.values()) + self.gradients) * tokens + self.weight


@dataclass(frozen=True)
class Step:
    """One operation.

    keeps: tensors that its backward needs, by kind and name; a tensor of two steps lives until the first one's.
    gradients: what its backward holds beside those: gradients of its outputs and inputs, and what they are made with.
    weight: bytes of its weight's gradient, whatever the tokens, until it is added to the sum over microbatches.
    module: of selective recomputation, that the step belongs to. inputs: what is kept where this module is recomputed.
    forward: what its forward pass holds beside all that was kept until then.
    again: of a recomputed module, the moments of its backward pass; they replace gradients and weight.
    """

    keeps: Mapping[tuple[str, str], float]
    gradients: float
    weight: float = 0.0
    module: str = ""
    inputs: Mapping[tuple[str, str], float] = field(default_factory=dict)
    forward: float = 0.0
    again: Sequence[Moment] = ()


@dataclass(frozen=True)
class PartCost:
    """The memory of a part.

    kept: bytes a token by kind, from forward to backward. moments: candidates for the peak. host: bytes a token in host
    memory, from forward to backward. routes: bytes a token that its dispatchers hold from one forward pass to the next.
    leaves: bytes a token of its input, which routes hold by their graph after the backward pass; and as many of its
    gradient, unless the part before it frees_output: recomputed layers take the memory of their output's gradient.
    """

    kept: Mapping[str, float]
    moments: Sequence[Moment]
    host: float = 0.0
    routes: float = 0.0
    leaves: float = 0.0
    frees_output: bool = False
    size: float = field(init=False)  # of all that is kept

    def __post_init__(self) -> None:
        object.__setattr__(self, "size", sum(self.kept.values()))

    def worst(self, tokens: float, forward: float = 0.0, backward: float = 0.0) -> Moment:
        """Return the largest moment.

        forward, backward: bytes beside the part in each pass.
        """
        return max(self.moments, key=lambda each: each.total(tokens) + (forward if each.forward else backward))


def cost_of(steps: Sequence[Step], stream: float) -> PartCost:
    """Wrap a part in a residual connection of ``stream`` bytes a token.

    The gradient of the addition is the residual's own, and lives to the end.
    """
    alive = dict.fromkeys((name for step in steps for name in step.keeps), 0.0)
    for step in steps:
        alive.update(step.keeps)
    kept = _by_kind(alive)
    moments: list[Moment] = []
    so_far: dict[tuple[str, str], float] = {}
    for step in steps:
        so_far.update(step.keeps)
        if step.forward:
            own = next(kind for kind, _ in step.keeps)
            moments.append(Moment(_by_kind(so_far | {(own, ""): step.forward}), 0.0, 0.0, forward=True))
    for place in reversed(range(len(steps))):
        step = steps[place]
        for gradients, weight in [(each.gradients, each.weight) for each in step.again] or [
            (step.gradients, step.weight)
        ]:
            moments.append(Moment(_by_kind(alive), stream + gradients, weight))
        earlier = {name for before in steps[:place] for name in before.keeps}
        for name in step.keeps.keys() - earlier:
            del alive[name]
    return PartCost(kept, _undominated(moments))


def _by_kind(tensors: Mapping[tuple[str, str], float]) -> dict[str, float]:
    sizes: defaultdict[str, float] = defaultdict(float)
    for (kind, _), size in tensors.items():
        sizes[kind] += size
    return dict(sizes)


def _undominated(moments: Sequence[Moment]) -> list[Moment]:
    """Drop moments that another one of the same pass exceeds whatever the tokens."""
    rest = []
    for moment in moments:
        others = (each for each in moments if each is not moment and each.forward == moment.forward)
        size = moment.total(1) - moment.weight
        if not any(each.total(1) - each.weight > size and each.weight >= moment.weight for each in others):
            rest.append(moment)
    return rest or [moments[0]]
