"""Dialogues, prompts and responses as samples.

Rows of files, loss masks, cuts and refusals are tested.
"""

import json
import logging
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from megatron_cp.common.errors import DataError
from megatron_cp.config.run_config import RunConfig
from megatron_cp.data.samples.datasets import build_datasets
from megatron_cp.data.samples.streams import Stream, check_files
from megatron_cp.data.text.tokenizers import ByteLevelTokenizer, HuggingFaceTokenizer
from tests.unit_tests.data.text.chat_templates import make_chat_tokenizer

ROWS: list[dict[str, Any]] = [
    {"messages": [{"role": "user", "content": "the cat"}, {"role": "assistant", "content": "sat on a mat"}]},
    {
        "conversations": [
            {"from": "system", "value": "fed"},
            {"from": "human", "value": "and?"},
            {"from": "gpt", "value": "was"},
            {"from": "human", "value": "on?"},
            {"from": "gpt", "value": "a mat"},
        ]
    },
    {"text": "the cat was fed"},
    {"prompt": "the mat ", "response": "sat"},
]
BAD = {"messages": [{"role": "user", "content": "a"}, {"role": "user", "content": "b"}]}


@pytest.fixture
def tokenizer(tmp_path: Path) -> HuggingFaceTokenizer:
    return HuggingFaceTokenizer(make_chat_tokenizer(tmp_path / "tokenizer", "chatml"))


@pytest.fixture
def packed(config: RunConfig) -> RunConfig:
    config.model.sequence_packing_scheduler = "dp_balanced"
    config.dataset.seq_length, config.dataset.split = 200, "1,0,0"
    return config


def write(path: Path, rows: list[dict[str, Any]]) -> str:
    if path.suffix == ".parquet":
        import pyarrow
        import pyarrow.parquet

        keys = {key: None for row in rows for key in row}
        pyarrow.parquet.write_table(pyarrow.Table.from_pylist([keys | row for row in rows]), path)
    else:
        path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return str(path)


def stream(config: RunConfig, path: str, tokenizer: Any) -> Stream:
    config.dataset.data_path = path
    config.finalize()
    train = build_datasets(config.dataset, tokenizer, 1).train
    assert isinstance(train, Stream)
    return train


def learned(train: Stream, tokenizer: Any) -> dict[str, str]:
    """Return each sample's whole text, and the text of its tokens in the loss.

    The samples are those of one epoch.
    """
    (contents,) = train.sources()
    found = {}
    for index in range(int(contents.samples)):
        sample = train[index]
        labels = sample["labels"][sample["loss_mask"] == 1].tolist()
        text = tokenizer.decode([*sample["tokens"][:1].tolist(), *sample["labels"].tolist()])
        found[text] = tokenizer.decode(labels)
    return found


ANSWERS = {
    "assistant": ["sat on a mat<|im_end|>\n", "was<|im_end|>\na mat<|im_end|>\n"],
    "last_assistant": ["sat on a mat<|im_end|>\n", "a mat<|im_end|>\n"],
}


@pytest.mark.parametrize("ending", [".jsonl", ".parquet"])
def test_rows_of_every_form_have_loss_on_what_the_assistant_writes(
    packed: RunConfig, tmp_path: Path, tokenizer: HuggingFaceTokenizer, ending: str
) -> None:
    path = write(tmp_path / f"data{ending}", ROWS)
    for train_on, answers in ANSWERS.items():
        packed.dataset.train_on = train_on  # type: ignore[assignment]
        train = stream(packed, path, tokenizer)
        found = learned(train, tokenizer)
        assert sorted(found.values()) == sorted([*answers, "the cat was fed<|im_end|>"[3:], "sat<|im_end|>"])
        (contents,) = train.sources()
        assert contents.loss_tokens == sum(int(train[i]["loss_mask"].sum()) for i in range(4))
    packed.dataset.train_on = "all"
    for text, in_loss in learned(stream(packed, path, tokenizer), tokenizer).items():
        assert text.endswith(in_loss) and len(in_loss) >= len(text) - len("<|im_start|>")


def test_prompts_go_through_the_template_by_choice(
    packed: RunConfig, tmp_path: Path, tokenizer: HuggingFaceTokenizer, caplog: pytest.LogCaptureFixture
) -> None:
    path = write(tmp_path / "data.jsonl", ROWS[3:])
    assert learned(stream(packed, path, tokenizer), tokenizer) == {"the mat sat<|im_end|>": "sat<|im_end|>"}
    assert "Fix: dataset.apply_chat_template=true" in caplog.text
    caplog.clear()
    packed.dataset.apply_chat_template = True
    whole = "<|im_start|>user\nthe mat <|im_end|>\n<|im_start|>assistant\nsat<|im_end|>\n"
    with caplog.at_level(logging.INFO):
        assert learned(stream(packed, path, tokenizer), tokenizer) == {whole: "sat<|im_end|>\n"}
        assert "dataset.train_on=assistant, found by differences of renderings" in caplog.text
    assert "joined" not in caplog.text


@pytest.mark.parametrize(("too_long", "kept"), [("keep_start", slice(0, 9)), ("keep_end", slice(-9, None))])
def test_long_samples_keep_their_start_or_end(
    packed: RunConfig, tmp_path: Path, tokenizer: HuggingFaceTokenizer, too_long: Any, kept: slice
) -> None:
    path = write(tmp_path / "data.jsonl", ROWS)
    whole = stream(packed, path, tokenizer)
    samples = [whole[i] for i in range(4)]
    full = {tuple(s["tokens"].tolist())[kept]: s for s in samples if len(s["tokens"]) > 9}
    packed.dataset.seq_length, packed.dataset.too_long = 9, too_long
    cut = stream(packed, path, tokenizer)
    found = [cut[i] for i in range(4)]
    assert cut.lengths(np.arange(4)).tolist() == [len(s["tokens"]) for s in found]
    assert max(len(s["tokens"]) for s in found) == 9 and len(full) >= 2
    for sample in found:
        if (key := tuple(sample["tokens"].tolist())) in full:
            for name in ("labels", "loss_mask"):
                assert sample[name].tolist() == full[key][name][kept].tolist()
    (contents,) = cut.sources()
    assert contents.samples == 4
    assert contents.loss_tokens == sum(int(s["loss_mask"].sum()) for s in found)


def test_bad_dialogues_are_refused_with_their_line_or_skipped_and_reported_at_every_start(
    packed: RunConfig, tmp_path: Path, tokenizer: HuggingFaceTokenizer, caplog: pytest.LogCaptureFixture
) -> None:
    path = write(tmp_path / "data.jsonl", [ROWS[0], BAD, BAD])
    with pytest.raises(DataError, match=rf"{path}:2: message 2 \(user\) follows user"):
        stream(packed, path, tokenizer)
    packed.dataset.bad_dialogues = "skip"
    for _ in range(2):
        caplog.clear()
        train = stream(packed, path, tokenizer)
        assert f"{path}: 2 dialogues are skipped (dataset.bad_dialogues=skip); the first is {path}:2: " in caplog.text
        assert train.sources()[0].samples == 1
    with pytest.raises(DataError, match="has no text"):
        stream(packed, write(tmp_path / "bad.jsonl", [BAD]), tokenizer)


def test_a_change_of_the_template_is_tokenized_again(
    packed: RunConfig, tmp_path: Path, tokenizer: HuggingFaceTokenizer
) -> None:
    path = write(tmp_path / "data.jsonl", ROWS[:1])
    before = learned(stream(packed, path, tokenizer), tokenizer)
    (tmp_path / "other.jinja").write_text(
        "{% for m in messages %}{{ m.role }}: {% generation %}{{ m.content }}{% endgeneration %}\n{% endfor %}"
    )
    packed.dataset.chat_template = str(tmp_path / "other.jinja")
    other = learned(stream(packed, path, tokenizer), tokenizer)
    assert before.keys() != other.keys() and list(other.values()) == ["the cat sat on a mat"]


def test_dialogues_without_a_template_end_before_the_rendezvous(packed: RunConfig, tmp_path: Path) -> None:
    packed.dataset.data_path, packed.dataset.kind = write(tmp_path / "data.jsonl", ROWS[:1]), "jsonl"
    with pytest.raises(DataError, match=r"ByteLevelTokenizer: has no chat template"):
        check_files(packed.dataset, ByteLevelTokenizer(), packed.tokenizer)
    packed.dataset.data_path = str(tmp_path / "data.parquet")
    (tmp_path / "data.parquet").write_bytes(b"PAR1 not really")
    with pytest.raises(DataError, match=r"cannot be read as Parquet: .*Fix: "):
        check_files(packed.dataset, ByteLevelTokenizer(), packed.tokenizer)


@pytest.mark.parametrize("too_long", ["split", "keep_start", "keep_end"])
def test_classes_of_length_count_what_their_samples_learn(
    packed: RunConfig, tmp_path: Path, tokenizer: HuggingFaceTokenizer, too_long: Any
) -> None:
    packed.dataset.seq_length, packed.dataset.too_long = 9, too_long
    packed.dataset.length_mixture = [0.5, 9, 0.5]
    train = stream(packed, write(tmp_path / "data.jsonl", ROWS), tokenizer)
    contents = train.sources()
    assert len(contents) == 2
    for number, (source, counts) in enumerate(zip(train._sources, contents, strict=True)):
        samples = [source[index] for index in range(len(source))]
        assert counts.loss_tokens == sum(int(sample["loss_mask"].sum()) for sample in samples), number
        assert counts.tokens == sum(len(sample["tokens"]) for sample in samples), number
