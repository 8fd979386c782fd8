"""Validation of whole samples against transformers, under several layouts.

It runs before and after training.
"""

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from megatron_cp.common.jsonl_log import read_lines
from tests.unit_tests.evaluation.conftest import (
    COMMON,
    DYNAMIC,
    END,
    LENGTH,
    TEXTS,
    expected,
    predictions_of,
    published_model,
    write_files,
)

LAYOUTS = {
    "1 rank": (1, ("model.sequence_packing_scheduler=dp_balanced",)),
    "dynamic cp": (2, DYNAMIC),
    "cp 4": (
        4,
        (
            "model.context_parallel_size=4",
            "model.cp_comm_type=p2p",
            "model.sequence_packing_scheduler=dp_balanced",
        ),
    ),
    "tp 2, pp 2": (
        4,
        (
            "model.tensor_model_parallel_size=2",
            "model.sequence_parallel=true",
            "model.pipeline_model_parallel_size=2",
            "model.sequence_packing_scheduler=dp_balanced",
        ),
    ),
    "dp 2, other groups in evaluation": (
        2,
        ("model.sequence_packing_scheduler=dp_balanced", "dist.eval_context_parallel_size=2"),
    ),
}  # fmt: skip
FAST = "dynamic cp"


def dialogue(*contents: str) -> list[dict[str, str]]:
    """Return messages of user and assistant in turns."""
    return [{"role": ("user", "assistant")[k % 2], "content": each} for k, each in enumerate(contents)]


TEMPLATE = (
    "{% for m in messages %}{{ m.role[0] }}>{% if m.role == 'assistant' %}{% generation %}{{ m.content }}|"
    "{% endgeneration %}{% else %}{{ m.content }}|{% endif %}{% endfor %}"
)
# Rows, and their tokens by hand: each part with whether it is in the loss. Samples keep 48 labels, so the text and an
# answer are cut, and a prompt leaves no answer.
ROWS: list[tuple[dict[str, Any], list[tuple[str | int, bool]]]] = [
    ({"text": TEXTS[0]}, [(TEXTS[0], True), (END, True)]),
    (
        {"prompt": "What? ", "response": "Nothing at all."},
        [("What? ", False), ("Nothing at all.", True), (END, True)],
    ),
    (
        {"prompt": "On and on it went. " * 3, "response": "Yes."},
        [("On and on it went. " * 3, False), ("Yes.", True), (END, True)],
    ),
    (
        {"messages": dialogue("2+2?", "four", "Really?", "Yes.")},
        [("u>2+2?|a>", False), ("four|", True), ("u>Really?|a>", False), ("Yes.|", True)],
    ),
    (
        {"messages": dialogue("Hm?", "x", "And then, what next?", "naïve " * 9)},
        [("u>Hm?|a>", False), ("x|", True), ("u>And then, what next?|a>", False), ("naïve " * 9 + "|", True)],
    ),
    ({"messages": dialogue("A", "a")}, [("u>A|a>", False), ("a|", True)]),
]


def by_sample(folder: Path) -> np.ndarray:
    """Return sums of loss and tokens of :data:`ROWS` from transformers, [samples, 2]."""
    model, found = published_model(folder), []
    for _, parts in ROWS:
        ids = [([part] if isinstance(part, int) else list(part.encode()), learned) for part, learned in parts]
        in_loss = np.array([learned for each, learned in ids for _ in each])[1 : LENGTH + 1]
        losses, _ = predictions_of(model, [token for each, _ in ids for token in each][: LENGTH + 1])
        found.append([losses[in_loss].sum(), in_loss.sum()])
    return np.array(found)


def arguments(rows: Path) -> list[str]:
    """Return the settings of a step on a file."""
    return [
        *COMMON,
        "dataset.kind=null",
        f"dataset.data_path={rows}",
        f"dataset.valid_data_path={rows}",
        "train.train_iters=1",
        "scheduler.lr_warmup_fraction=null",
        "validation.eval_iters=0",
        "validation.full_validation=true",
        "logger.progress=plain",
    ]


def tuning(folder: Path) -> list[str]:
    """Write :data:`ROWS` and return the settings of a step on them."""
    rows, template = folder / "tuning.jsonl", folder / "template.jinja"
    rows.write_text("".join(json.dumps(row) + "\n" for row, _ in ROWS))
    template.write_text(TEMPLATE)
    return [*arguments(rows), f"dataset.chat_template={template}", "dataset.too_long=keep_start"]


def check_line(line: dict[str, Any], sums: np.ndarray, name: str = "validation") -> None:
    """Compare a line with sums of loss and tokens by sample."""
    loss, tokens = sums[sums[:, 1] > 0].T
    assert line[f"{name}_loss"] == pytest.approx(loss.sum() / tokens.sum(), rel=1e-6)
    assert line[f"{name}_loss_per_sample"] == pytest.approx(np.mean(loss / tokens), rel=1e-6)
    assert (line[f"{name}_samples"], line[f"{name}_loss_tokens"]) == (len(loss), tokens.sum())


@pytest.mark.parametrize("name", [pytest.param(n, marks=[] if n == FAST else pytest.mark.slow) for n in LAYOUTS])
def test_each_sample_is_validated_once_before_training(published: Path, run: Any, tmp_path: Path, name: str) -> None:
    ranks, layout = LAYOUTS[name]
    given = [*tuning(tmp_path), f"dataset.test_data_path={tmp_path}/tuning.jsonl", *layout]
    assert run(ranks, *given, command="train") == [0] * ranks, (tmp_path / "log0").read_text()
    first, step, last, test = read_lines(tmp_path / "run" / "metrics.jsonl")
    sums = by_sample(published)
    assert sums[:, 1].tolist() == [LENGTH, 16, 0, 10, 16, 2]
    check_line(first, sums)
    assert [line["iteration"] for line in (first, step, last, test)] == [0, 1, 1, 1]
    assert last["validation_loss"] != first["validation_loss"]
    for field in ("loss", "loss_per_sample", "samples", "loss_tokens"):
        assert last[f"validation_{field}"] == test[f"test_{field}"]
    shown = f"{first['validation_loss']:.6f} per token, {first['validation_loss_per_sample']:.6f} per sample (5 samples"
    assert f"validation loss at iteration 0: {shown}" in (tmp_path / "log0").read_text()


@pytest.mark.slow
def test_a_divided_document_is_one_sample(published: Path, run: Any, tmp_path: Path) -> None:
    given = [*arguments(write_files(tmp_path)[0]), *LAYOUTS["cp 4"][1]]
    assert run(4, *given, command="train") == [0] * 4, (tmp_path / "log0").read_text()
    sums = expected(published)[0][0][:, :2]
    assert sums[0, 1] > LENGTH
    check_line(read_lines(tmp_path / "run" / "metrics.jsonl")[0], sums)


@pytest.mark.slow
def test_a_first_look_does_not_change_the_training(run: Any, tmp_path: Path) -> None:
    found = []
    for looks in ("true", "false"):
        given = [*tuning(tmp_path), *LAYOUTS["1 rank"][1], f"validation.eval_on_start={looks}"]
        assert run(1, *given, command="train") == [0]
        lines = read_lines(tmp_path / "run" / "metrics.jsonl")
        found.append([(line.get("lm_loss"), line.get("validation_loss")) for line in lines if line["iteration"]])
        (tmp_path / "run").rename(tmp_path / looks)
    assert found[0] == found[1] and len(found[0]) == 2
