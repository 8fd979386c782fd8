"""Runs on samples of their own lengths, from the command line."""

import json
import re
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

COMMON = (
    "dataset.kind=null",
    "dataset.seq_length=128",
    "train.train_iters=4",
    "train.global_batch_size=12",
    "scheduler.lr_decay_iters=4",
    "scheduler.lr_warmup_iters=1",
)
DYNAMIC = ("--recipe", "llama_tiny_dynamic_cp_pretrain_config", *COMMON)
OTHERS = (
    "mamba_hybrid_tiny_dynamic_cp_pretrain_config",
    "mamba_hybrid_tiny_mtp_dynamic_cp_pretrain_config",
    "llama_tiny_mtp_dynamic_cp_pretrain_config",
)
# What the fixture's settings for other tests would change in these models.
SHAPES = {name: ["model.num_layers=4"] for name in OTHERS if "hybrid" in name}
slow = pytest.mark.slow


def steps(folder: Path) -> list[dict[str, Any]]:
    """Return the metrics of each step.

    Of a resumed run these are the last run's.
    """
    lines = (json.loads(line) for line in (folder / "run" / "metrics.jsonl").read_text().splitlines())
    return list({line["iteration"]: line for line in lines if "grad_norm" in line}.values())


@pytest.fixture
def chats(tmp_path: Path) -> str:
    rng = np.random.default_rng(1)
    letters = list("abcdefgh ")

    def words(low: int, high: int) -> str:
        return "x" + "".join(rng.choice(letters, rng.integers(low, high)))

    lines = [{"prompt": words(1, 40), "response": words(1, 20)} for _ in range(15)]
    lines += [{"text": words(80, 200)} for _ in range(3)]
    path = tmp_path / "chats.jsonl"
    path.write_text("".join(json.dumps(line) + "\n" for line in lines))
    return str(path)


@pytest.mark.parametrize("recipe", [DYNAMIC[1], *(pytest.param(name, marks=slow) for name in OTHERS)])
def test_a_recipe_uses_groups_of_several_sizes_and_trains_like_one_rank(cli: Any, tmp_path: Path, recipe: str) -> None:
    arguments = ["--recipe", recipe, *COMMON, *SHAPES.get(recipe, [])]
    code, text = cli(*arguments, "model.context_parallel_size=4", ranks=4)
    assert code == 0 and "DYNAMIC_CONTEXT_PARALLEL_GROUPS" in text, text
    four = steps(tmp_path)
    assert len({size for step in four for size in step["cp_sizes"]}) > 1
    (tmp_path / "run").rename(tmp_path / "four")
    code, text = cli(*arguments, "model.context_parallel_size=1", ranks=1)
    assert code == 0, text
    one = steps(tmp_path)
    for key in ("lm_loss", "grad_norm"):
        assert [step[key] for step in four] == pytest.approx([step[key] for step in one], rel=2e-6)
    assert [step["consumed_tokens"] for step in four] == [step["consumed_tokens"] for step in one]


def test_resuming_on_other_ranks_takes_the_same_samples(cli: Any, tmp_path: Path, chats: str) -> None:
    """An epoch of eighteen lines ends in a batch, before and after the checkpoint."""
    arguments = [*DYNAMIC, f"dataset.data_path={chats}", "dataset.split='1,0,0'"]
    code, text = cli(*arguments, ranks=2)
    assert code == 0 and "18 documents tokenized" in text, text
    undisturbed = steps(tmp_path)
    (tmp_path / "run").rename(tmp_path / "undisturbed")
    assert cli(*arguments, "train.exit_interval=2", ranks=2)[0] == 0
    code, text = cli(*arguments, "model.context_parallel_size=1", ranks=1)
    assert code == 0 and "resumed from iteration 2" in text, text
    assert "documents tokenized" not in text
    resumed = steps(tmp_path)
    assert [step["iteration"] for step in resumed] == [1, 2, 3, 4]
    for key in ("lm_loss", "grad_norm"):
        assert [step[key] for step in resumed] == pytest.approx([step[key] for step in undisturbed], rel=2e-6)
    for key in ("consumed_tokens", "loss_tokens", "consumed_loss_tokens"):
        assert [s[key] for s in resumed] == [s[key] for s in undisturbed]
    assert resumed[-1]["consumed_loss_tokens"] == sum(s["loss_tokens"] for s in resumed)
    assert 0 < resumed[-1]["consumed_loss_tokens"] < resumed[-1]["consumed_tokens"]  # prompts have no loss


@pytest.mark.parametrize(
    ("contents", "overrides", "message"),
    [
        pytest.param(None, [], "corpus.jsonl: cannot be read: No such file or directory", marks=slow),
        pytest.param(b"", [], "corpus.jsonl: is empty", marks=slow),
        (b'{"text": "a"}\n{"text": 5}\n', [], "corpus.jsonl:2: the value of 'text' is int, not text"),
        pytest.param(b'{"text": "\xff"}\n', [], "corpus.jsonl:1: is not UTF-8 text", marks=slow),
        pytest.param(b'{"txt": "a"}\n', [], "corpus.jsonl:1: has no 'text', or 'prompt' and 'response'", marks=slow),
        pytest.param(b'{"text": ""}\n', [], "corpus.jsonl: has no text", marks=slow),
        pytest.param(
            b'{"text": "' + b"a" * 300 + b'"}\n',
            ["dataset.too_long=refuse"],
            "corpus.jsonl:1: the sample has 301 tokens, more than 128",
            marks=slow,
        ),
        pytest.param(b'{"text": "a"}\n', ["dataset.kind=indexed"], "dataset.kind=documents, or", marks=slow),
    ],
)
def test_bad_data_ends_every_rank_with_one_message(
    cli: Any, tmp_path: Path, contents: bytes | None, overrides: list[str], message: str
) -> None:
    path = tmp_path / "corpus.jsonl"
    if contents is not None:
        path.write_bytes(contents)
    code, text = cli(*DYNAMIC, f"dataset.data_path={path}", "dataset.split='1,0,0'", *overrides, ranks=2)
    assert code == 2 and text.count(message) == 1, text


def labels_too_short() -> None:
    """Remove a label of each sample, on the second rank only."""
    import os

    from megatron_cp.data.samples.varlen import MockVarlenDataset

    read = MockVarlenDataset.__getitem__

    def damaged(self: MockVarlenDataset, index: int) -> dict[str, torch.Tensor]:
        sample = read(self, index)
        return sample | {"labels": sample["labels"][:-1]}

    if os.environ["RANK"] == "1":
        MockVarlenDataset.__getitem__ = damaged  # type: ignore[method-assign]


def test_labels_of_the_wrong_length_end_every_rank(cli: Any) -> None:
    code, text = cli(*DYNAMIC, "model.context_parallel_size=2", ranks=2, before=labels_too_short)
    assert code == 1 and text.count("one label and one loss mask entry a token") >= 1 and "rank 1: sample" in text, text


def test_evaluation_on_the_held_out_lines(cli: Any, tmp_path: Path, chats: str) -> None:
    evaluation = ["validation.eval_interval=2", "validation.eval_iters=2", "validation.eval_global_batch_size=5"]
    arguments = [*DYNAMIC, f"dataset.data_path={chats}", "dataset.split='12,4,2'", *evaluation]
    code, text = cli(*arguments, ranks=2)
    assert code == 0, text
    losses = re.findall(r"(validation|test) loss at iteration (\d+): ([\d.]+)", text)
    # At intervals, the last of them at the end; the test set at the end only.
    assert [(name, iteration) for name, iteration, _ in losses] == [
        ("validation", "2"),
        ("validation", "4"),
        ("test", "4"),
    ]
    # The finished run under another context-parallel size: nothing to train, and the same losses.
    code, text = cli(*arguments, "model.context_parallel_size=1", ranks=1)
    assert code == 0 and "nothing to do: already at iteration 4" in text, text
    again = re.findall(r"(validation|test) loss at iteration (\d+): ([\d.]+)", text)
    assert [(name, iteration) for name, iteration, _ in again] == [("validation", "4"), ("test", "4")]
    assert [float(loss) for *_, loss in again] == pytest.approx([float(loss) for *_, loss in losses[1:]], rel=2e-6)
