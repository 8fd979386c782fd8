"""Retrieval tasks in the manner of RULER: needles, a question and its answer.

RULER: https://arxiv.org/abs/2404.06654.

A needle is a line with a noun and its number, or with a variable and its value. An answer repeats the words of its
needles, so that a teacher-forced model finds before each number what stands before it in the needle. Only the numbers
and the variables of an answer are scored, not the words around them.
"""

from __future__ import annotations

import string
from collections.abc import Callable
from dataclasses import dataclass
from itertools import pairwise

import numpy as np

from megatron_cp.common.errors import DataError
from megatron_cp.config.schema import nearest
from megatron_cp.data.needles.names import NOUNS

Text = list[tuple[str, bool]]  # pieces of an answer, and whether a piece is scored


@dataclass(frozen=True)
class Needles:
    """What one sample hides and asks.

    ``asked`` are lines that the answer needs, in the order of the text; ``others`` are lines like them. ``question``
    ends without a space, ``answer`` begins with one.
    """

    asked: tuple[str, ...]
    others: tuple[str, ...]
    question: str
    answer: Text

    @property
    def tail(self) -> str:
        """Question and answer, which end a sample."""
        return self.question + "".join(text for text, _ in self.answer)

    @property
    def prompt_and_response(self) -> tuple[str, str]:
        """The tail, divided before the first scored piece."""
        first = next(place for place, (_, is_scored) in enumerate(self.answer) if is_scored)
        before, after = ("".join(text for text, _ in part) for part in (self.answer[:first], self.answer[first:]))
        return self.question + before, after


@dataclass(frozen=True)
class Task:
    """One kind of task.

    ``count``: needles, values, questions or assignments. ``at_depth``: one needle is asked for and its depth is chosen;
    otherwise all needles are spread over the text at random.
    """

    name: str
    what: str
    count: int
    at_depth: bool
    write: Callable[[np.random.Generator, int], Needles]

    @property
    def label(self) -> str:
        """The task as typed: ``multi_key:8``."""
        return self.name if self.count == TASKS[self.name].count else f"{self.name}:{self.count}"


def find_task(typed: str) -> Task:
    """Return a task by ``NAME`` or ``NAME:COUNT``.

    Raises:
        DataError: the name is unknown, or the count is not possible.
    """
    name, colon, number = typed.partition(":")
    if name not in TASKS:
        hint = nearest(name, list(TASKS))
        fix = hint.split("'")[1] if hint else " ".join(TASKS)
        raise DataError(f"--needles {typed}: is no task{hint}. Fix: --needles {fix}")
    task = TASKS[name]
    if not colon:
        return task
    least, most = 2 if name != "single" else 1, 1 if name == "single" else len(NOUNS)
    if not number.isdecimal() or not least <= int(number) <= most:
        raise DataError(
            f"--needles {typed}: the number after {name} must be from {least} to {most}. "
            f"Fix: --needles {name}:{task.count}"
        )
    return Task(task.name, task.what, int(number), task.at_depth, task.write)


def _line(noun: str, number: str) -> str:
    return f"Code {noun} {number}.\n"


def _numbers(rng: np.random.Generator, count: int) -> list[str]:
    """Return different numbers of five digits."""
    return [str(number) for number in 10_000 + rng.choice(90_000, count, replace=False)]


def _nouns(rng: np.random.Generator, count: int) -> list[str]:
    return [NOUNS[place] for place in rng.choice(len(NOUNS), count, replace=False)]


def _one_of_many(rng: np.random.Generator, count: int) -> Needles:
    """Ask for one of ``count`` numbers."""
    nouns, numbers = _nouns(rng, count), _numbers(rng, count)
    lines = tuple(_line(*pair) for pair in zip(nouns, numbers, strict=True))
    question = f"Which number has the code {nouns[0]}? Code {nouns[0]}"
    return Needles(lines[:1], lines[1:], question, [(f" {numbers[0]}", True), (".", False)])


def _many_values(rng: np.random.Generator, count: int) -> Needles:
    """Ask for all numbers of one noun, in the order of the text."""
    (noun,), numbers = _nouns(rng, 1), _numbers(rng, count)
    question = f"Which {count} numbers have the code {noun}, in the order of the text?"
    answer: Text = []
    for number in numbers:
        answer += [(f" Code {noun}", False), (f" {number}", True), (".", False)]
    return Needles(tuple(_line(noun, number) for number in numbers), (), question, answer)


def _many_questions(rng: np.random.Generator, count: int) -> Needles:
    """Ask for the numbers of several nouns, in an order of the question's own."""
    nouns, numbers = _nouns(rng, count), _numbers(rng, count)
    order = rng.permutation(count)
    question = f"Which numbers have the codes {', '.join(nouns[place] for place in order)}?"
    answer: Text = []
    for place in order:
        answer += [(f" Code {nouns[place]}", False), (f" {numbers[place]}", True), (".", False)]
    return Needles(tuple(_line(*pair) for pair in zip(nouns, numbers, strict=True)), (), question, answer)


def _variables(rng: np.random.Generator, hops: int) -> Needles:
    """Ask for all variables with one value, which ``hops`` lines pass on."""
    names: dict[str, None] = {}
    while len(names) <= hops:
        names["".join(rng.choice(list(string.ascii_uppercase), 5))] = None
    (value,), chain = _numbers(rng, 1), list(names)
    lines = [f"VAR {chain[0]} = {value}.\n"]
    lines += [f"VAR {name} = VAR {before}.\n" for before, name in pairwise(chain)]
    question = f"Which {len(chain)} variables have the value {value}, in the order of the text? They are"
    answer: Text = []
    for place, name in enumerate(chain):
        answer += [(" VAR", False), (f" {name}", True), ("." if place == hops else ",", False)]
    return Needles(tuple(lines), (), question, answer)


TASKS = {
    task.name: task
    for task in (
        Task("single", "one number is hidden and asked for", 1, True, _one_of_many),
        Task("multi_key", "numbers of COUNT nouns are hidden, one is asked for", 4, True, _one_of_many),
        Task("multi_value", "COUNT numbers of one noun are hidden, all are asked for", 4, False, _many_values),
        Task("multi_query", "numbers of COUNT nouns are hidden, all are asked for", 4, False, _many_questions),
        Task(
            "variables",
            "a value is passed on by COUNT assignments, all its variables are asked for",
            4,
            False,
            _variables,
        ),
    )
}
