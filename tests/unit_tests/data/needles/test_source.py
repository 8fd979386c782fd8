"""Retrieval samples have exact lengths and depths, and one right answer.

They are equal at every read.
"""

from __future__ import annotations

import json
import string
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from megatron_cp.common.errors import DataError
from megatron_cp.config.run_config import DatasetConfig
from megatron_cp.data.needles.haystack import NOISE, read_haystack
from megatron_cp.data.needles.source import NeedleSource, cells_of
from megatron_cp.data.needles.tasks import TASKS, find_task
from megatron_cp.data.needles.written import write_rows
from megatron_cp.data.text.tokenizers import ByteLevelTokenizer, HuggingFaceTokenizer, Tokenizer, train_bpe

DEPTHS = (0, 37, 100)


@pytest.fixture(scope="module")
def tokenizers(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Tokenizer]:
    """Return three tokenizers.

    Bytes, byte-level BPE with a BOS token, and pieces that take the space before a word (as Llama 2).
    """
    from tokenizers import Tokenizer as FastTokenizer
    from tokenizers import models, normalizers, processors, trainers

    folder = tmp_path_factory.mktemp("tokenizers")
    numbers = (str(number) for number in range(10_000, 99_999, 7))
    letters = " ".join(string.ascii_uppercase)
    texts = ["Code apple in the order of the text, VAR = VAR. Which?\n", *NOISE, letters, *numbers]
    bpe = train_bpe(texts * 3, 400, folder / "bpe")
    pieces = FastTokenizer(models.BPE(byte_fallback=True, unk_token="<unk>"))
    pieces.normalizer = normalizers.Sequence([normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")])
    pieces.train_from_iterator(texts, trainers.BpeTrainer(vocab_size=300, special_tokens=["<unk>", "<s>", "</s>"]))
    pieces.post_processor = processors.TemplateProcessing(single="<s> $A", special_tokens=[("<s>", 1)])
    pieces.save(str(folder / "tokenizer.json"))
    return {
        "bytes": ByteLevelTokenizer(),
        "bpe": HuggingFaceTokenizer(bpe),
        "pieces": HuggingFaceTokenizer(folder / "tokenizer.json"),
    }


def source_of(
    tokenizer: Tokenizer, *tasks: str, lengths: tuple[int, ...] = (700, 1501), **changed: Any
) -> NeedleSource:
    cells = cells_of([find_task(task) for task in tasks], lengths, DEPTHS)
    return NeedleSource(cells, **dict(per_cell=2, haystack=NOISE, tokenizer=tokenizer, seed=3) | changed)


def scored_of(source: NeedleSource, index: int) -> np.ndarray:
    sample = source[index]
    return sample["labels"][sample["loss_mask"] == 1].numpy()


def text_of(tokens: np.ndarray) -> str:
    return bytes(tokens.tolist()).decode()


@pytest.mark.parametrize("kind", ["bytes", "bpe", "pieces"])
def test_every_sample_has_its_length_to_the_token(tokenizers: dict[str, Tokenizer], kind: str) -> None:
    source = source_of(tokenizers[kind], *TASKS)
    assert len(source) == 2 * len(source.cells) == 2 * 2 * (2 * len(DEPTHS) + 3)
    lengths = source.lengths(np.arange(len(source)))
    for index, length in enumerate(lengths.tolist()):
        sample = source[index]
        assert {len(sample[key]) for key in ("tokens", "labels", "loss_mask")} == {length}
        assert sample["tokens"][1:].tolist() == sample["labels"][:-1].tolist()
        assert sample["loss_mask"].sum() > 0
        assert tuple(sample["tokens"][: len(tokenizers[kind].prefix)].tolist()) == tokenizers[kind].prefix


@pytest.mark.parametrize("kind", ["bytes", "bpe", "pieces"])
def test_scored_tokens_are_the_answer(tokenizers: dict[str, Tokenizer], kind: str) -> None:
    """The scored tokens must stand for the answer's numbers and names alone."""
    tokenizer = tokenizers[kind]
    source = source_of(tokenizer, *TASKS)
    for index in range(len(source)):
        written = source.write(index)
        names = "".join(tokenizer.name_of(token) for token in scored_of(source, index).tolist())
        if kind == "bytes":
            names = text_of(scored_of(source, index))
        answer = written.response.replace("VAR", "").replace(",", "")
        expected = [
            word.strip(".") for word in answer.split() if word.strip(".").isdigit() or word.strip(".").isupper()
        ]
        assert names.replace("Ġ", " ").replace("▁", " ").split() == expected


@pytest.mark.parametrize("task", TASKS)
def test_answers_stand_once_in_the_text(task: str) -> None:
    source = source_of(ByteLevelTokenizer(), task)
    for index in range(len(source)):
        written = source.write(index)
        text = text_of(written.tokens)
        assert text.endswith(written.response)
        lines, asked = text.split("\n")[1:-1], text_of(scored_of(source, index)).split()
        for value in asked:
            mentions = sum(f" {value}" in line for line in lines)
            # A variable is named where it gets its value and where it passes it on.
            assert mentions == (1 if task != "variables" or value == asked[-1] else 2)


@pytest.mark.parametrize("task", ["single", "multi_key"])
def test_the_needle_is_at_its_depth(task: str) -> None:
    source = source_of(ByteLevelTokenizer(), task, lengths=(3000,))
    for index in range(len(source)):
        text = text_of(source.write(index).tokens)
        noun = text.rpartition("Code ")[2].split()[0]
        place = text.index(f"Code {noun}")
        around = text.index("\nWhich") - text.index("\n")
        depth = source.cells[index // 2].depth or 0
        longest_line = 40
        assert abs(place - text.index("\n") - depth / 100 * around) < 4 * longest_line
        if depth == 0:
            assert place == text.index("\n") + 1
        if depth == 100:
            assert text[place:].count("\n") == 1


def test_needles_that_are_all_asked_for_keep_their_order() -> None:
    source = source_of(ByteLevelTokenizer(), "multi_value", "variables")
    for index in range(len(source)):
        written = source.write(index)
        text, asked = text_of(written.tokens), text_of(scored_of(source, index)).split()
        places = [text.index(f" {value}") for value in asked]
        assert places == sorted(places)


def test_a_sample_depends_on_its_own_cell_only() -> None:
    """No change of other tasks, lengths, depths and samples may change a sample.

    The seed and the purpose change all.
    """
    tokenizer = ByteLevelTokenizer()
    few = source_of(tokenizer, "single", lengths=(700,))
    many = source_of(tokenizer, "multi_key", "single", lengths=(600, 700), per_cell=5)
    places = {(cell.task.label, cell.length, cell.depth): place for place, cell in enumerate(many.cells)}
    for index in range(len(few)):
        cell = few.cells[index // 2]
        same = 5 * places[cell.task.label, cell.length, cell.depth] + index % 2
        assert (few.write(index).tokens == many.write(same).tokens).all()
        assert (few.write(index).tokens == few.write(index).tokens).all()
    longer = source_of(tokenizer, "single", lengths=(1000,))
    assert all(few.write(index).response == longer.write(index).response for index in range(len(few)))
    for changed in ({"seed": 4}, {"for_training": True}):
        other = source_of(tokenizer, "single", lengths=(700,), **changed)
        assert all((few.write(i).tokens != other.write(i).tokens).any() for i in range(len(few)))


def test_text_of_a_file_is_the_haystack(tmp_path: Path) -> None:
    file = tmp_path / "essay.txt"
    file.write_text("One idea. Another one!\n\nThe second paragraph has a line\nand a further one.\n", encoding="utf-8")
    haystack = read_haystack(str(file))
    assert haystack[:2] == ["One idea.", "Another one!"] and len(haystack) == 4
    text = text_of(source_of(ByteLevelTokenizer(), "single", haystack=haystack).write(0).tokens)
    assert "One idea.\nAnother one!\nThe second" in text and NOISE[0] not in text
    file.write_text(" \n")
    with pytest.raises(DataError, match=r"essay.txt: has no text. Fix:"):
        read_haystack(str(file))
    with pytest.raises(DataError, match="cannot be read"):
        read_haystack(str(tmp_path / "missing"))


def test_a_length_that_is_too_short_is_refused() -> None:
    with pytest.raises(DataError, match=r"--lengths 100: is too short for multi_query.* Fix: --lengths (\d+)") as error:
        source_of(ByteLevelTokenizer(), "multi_query", lengths=(100,))
    enough = int(str(error.value).split("--lengths ")[2].split()[0])
    source = source_of(ByteLevelTokenizer(), "multi_query", lengths=(enough,))
    assert len(source[0]["tokens"]) == enough


@pytest.mark.parametrize(
    ("typed", "message"),
    [
        ("singlo", "did you mean 'single'?. Fix: --needles single"),
        ("nothing", "Fix: --needles single"),
        ("multi_key:x", "must be from 2 to 298. Fix: --needles multi_key:4"),
        ("multi_query:1", "must be from 2 to"),
        ("single:2", "must be from 1 to 1. Fix: --needles single"),
    ],
)
def test_a_wrong_task_is_refused(typed: str, message: str) -> None:
    with pytest.raises(DataError) as error:
        find_task(typed)
    assert message in str(error.value) and f"--needles {typed}" in str(error.value)


def test_rows_to_train_on(tmp_path: Path) -> None:
    file = tmp_path / "rows.jsonl"
    tokenizer = ByteLevelTokenizer()
    source = source_of(tokenizer, "single", "multi_query:3", for_training=True)
    assert write_rows(str(file), source, DatasetConfig()) == len(source)
    rows = [json.loads(line) for line in file.read_text().splitlines()]
    cells = len(source.cells)
    for number, row in enumerate(rows):
        index = number % cells * 2 + number // cells
        text, written = text_of(source.write(index).tokens), row["prompt"] + row["response"]
        # The cut line begins with a whole word; the longest one has 8 letters.
        assert 0 <= len(text) - len(written) <= 8
        assert len(set(written.split("\n")) - set(text.split("\n"))) <= 1 and written[-200:] == text[-200:]
    with pytest.raises(DataError, match=r"rows.jsonl: exists. Fix:"):
        write_rows(str(file), source, DatasetConfig())
    with pytest.raises(DataError, match=r"dataset.prompt_key=null: .* Fix: dataset.prompt_key=prompt"):
        write_rows(str(tmp_path / "new"), source, DatasetConfig(prompt_key=None))
