"""Scores of retrieval samples, and their table and heat map.

A sample counts as right if all tokens of its answer are. The table and the heat map show every cell.
"""

from __future__ import annotations

import numpy as np

from megatron_cp.data.needles.haystack import NOISE
from megatron_cp.data.needles.scores import Score, scores_of
from megatron_cp.data.needles.source import NeedleSource, cells_of
from megatron_cp.data.needles.tasks import find_task
from megatron_cp.data.text.tokenizers import ByteLevelTokenizer
from megatron_cp.report.needles import as_text, draw


def scores() -> list[Score]:
    """Score two of three answers as right at depth 0, and one fewer per cell."""
    cells = cells_of([find_task("single"), find_task("variables:2")], [600, 1024], [0, 100])
    source = NeedleSource(cells, 3, NOISE, ByteLevelTokenizer(), seed=0)
    tokens = np.array([int(source[index]["loss_mask"].sum()) for index in range(len(source))])
    correct = tokens.copy()
    for cell, wrong in enumerate((1, 0, 3, 2, 0, 1)):
        correct[3 * cell : 3 * cell + wrong] -= 1  # one wrong token spoils the answer
    return scores_of(source, correct, tokens)


def test_one_wrong_token_spoils_an_answer() -> None:
    found = scores()
    assert [(score.task, score.length, score.depth, score.exact) for score in found] == [
        ("single", 600, 0, 2),
        ("single", 600, 100, 3),
        ("single", 1024, 0, 0),
        ("single", 1024, 100, 1),
        ("variables:2", 600, None, 3),
        ("variables:2", 1024, None, 2),
    ]
    digits = 6  # with the space
    assert (found[0].samples, found[0].tokens, found[0].correct) == (3, 3 * digits, 3 * digits - 1)


def test_the_table_has_a_row_for_each_length() -> None:
    rows = [line.split() for line in as_text(scores()).splitlines()[1:] if line.strip()]
    assert rows[0] == ["task", "length", "0%", "100%", "all"]
    assert rows[2:] == [
        ["single", "600", "67", "100", "83"],
        ["single", "1K", "0", "33", "17"],
        ["variables:2", "600", "100"],
        ["variables:2", "1K", "67"],
    ]


def test_the_heat_map_has_a_field_for_each_cell() -> None:
    figure = draw(scores(), "a run")
    single, variables = figure.axes[:2]
    assert single.get_title(loc="left") == "single" and variables.get_title(loc="left") == "variables:2"
    assert single.images[0].get_array().tolist() == [[2 / 3, 0], [1, 1 / 3]]
    assert variables.images[0].get_array().tolist() == [[1, 2 / 3]]
    assert [label.get_text() for label in single.get_yticklabels()] == ["0%", "100%"]
    assert [label.get_text() for label in variables.get_yticklabels()] == ["spread"]
    assert [label.get_text() for label in variables.get_xticklabels()] == ["600", "1K"]
