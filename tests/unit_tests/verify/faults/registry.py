"""Properties of a planted fault: its effect, its place, the expected verdict."""

from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import Any, NamedTuple
from unittest import mock

Overrides = dict[str, Any]
Plant = Callable[[], AbstractContextManager[Any]]


class Fault(NamedTuple):
    what: str  # for the documentation
    layout: Overrides  # of four ranks
    says: str  # a pattern of the verdict; empty: the fault is not caught
    plant: Plant


FAULTS: dict[str, Fault] = {}

# Texts of verdicts, by the part that they name.
PROBE = "the groups do not communicate correctly"
FORWARD = "the first forward pass differs in"
REPORTED = "token losses match, but the reported loss differs"
BATCHES = "Check how batches are distributed and sliced"
FURTHER = "the main loss matches, but multi-token prediction differs"
ROUTERS = "token losses match, but router losses differ"
BACKWARD = "all losses of the forward pass match, but"
COPIES = "copies of a parameter have different gradients .* gradients are not reduced over all"
FACTOR = "all gradients are 4 times the reference gradients"
CHECKS = "the layout did not run: the batches of step 1 cannot be used"
NORM = "gradients match, but the gradient norm differs"
RATE = "a learning rate is"
STEP = "losses and gradients of the first step match, but .* Check the optimizer"
WEIGHTS = "copies of a parameter have different weights after the last step"
NOT_CAUGHT = ""

_PARTS = {
    PROBE: "the attention probe",
    FORWARD: "each token's loss",
    REPORTED: "the reported loss",
    BATCHES: "the number of tokens",
    FURTHER: "multi-token prediction's losses",
    ROUTERS: "routers' losses",
    BACKWARD: "gradients, all losses being right",
    COPIES: "gradients of a parameter's copies",
    FACTOR: "gradients, all by one factor",
    CHECKS: "the checks of batches",
    NORM: "the gradients' norm",
    RATE: "the learning rate",
    STEP: "what the optimizer changed",
    WEIGHTS: "weights of a parameter's copies",
    NOT_CAUGHT: "**not caught**",
}


def fault(what: str, layout: Overrides, says: str) -> Callable[[Plant], Plant]:
    """Register a function that returns the patch of a fault, by the function's name."""

    def register(plant: Plant) -> Plant:
        FAULTS[plant.__name__] = Fault(what, layout, says, plant)
        return plant

    return register


def changed(holder: Any, name: str, change: Callable[[Any], Any]) -> AbstractContextManager[Any]:
    """Replace ``holder.name`` by what ``change`` makes of it."""
    return mock.patch.object(holder, name, change(getattr(holder, name)))


def table() -> str:
    """Return the documentation's table: every fault, and what shows it."""
    rows = [f"| {each.what} | {_PARTS[each.says]} |" for each in FAULTS.values()]
    return "\n".join(["| planted in the layout | seen by |", "|---|---|", *rows])
