"""Documents begin and end as in the tokenizer's own library."""

import json
from pathlib import Path
from typing import Any

import pytest
from megatron.core.datasets.indexed_dataset import IndexedDataset

from megatron_cp.common.errors import DataError
from megatron_cp.config.run_config import RunConfig, TokenizerConfig
from megatron_cp.data.samples.datasets import build_datasets
from megatron_cp.data.text.preprocess import preprocess
from megatron_cp.data.text.tokenizers import HuggingFaceTokenizer
from tests.unit_tests.data.text.tokenizer_folders import TEMPLATES, WORDS, make_tokenizer


@pytest.mark.parametrize("model", ["BPE", "WordLevel"])
@pytest.mark.parametrize("template", TEMPLATES)
def test_documents_have_the_tokens_of_transformers(tmp_path: Path, template: str, model: str) -> None:
    from transformers import AutoTokenizer

    folder = make_tokenizer(tmp_path / "tokenizer", TEMPLATES[template], model)
    library = AutoTokenizer.from_pretrained(str(folder), local_files_only=True)
    texts = [WORDS, "the mat sat", "a"]
    (tmp_path / "0.txt").write_text(texts[0])
    (tmp_path / "1.jsonl").write_text("".join(json.dumps({"text": text}) + "\n" for text in texts[1:]))
    config = TokenizerConfig(tokenizer_model=str(folder))
    for workers in (1, 2) if (model, template) == ("BPE", "both") else (1,):
        files = [tmp_path / "0.txt", tmp_path / "1.jsonl"]
        prefix = preprocess(files, tmp_path / "out", config, workers=workers).prefix
        ids = [library(text).input_ids for text in texts]
        eod = library.eos_token_id
        written = [document.tolist() for document in IndexedDataset(prefix)]
        assert written == [each if each[-1] == eod else [*each, eod] for each in ids]


def test_the_setting_decides_against_the_tokenizer(tmp_path: Path) -> None:
    bos = make_tokenizer(tmp_path / "bos", TEMPLATES["both"])
    none = make_tokenizer(tmp_path / "none", TEMPLATES["none"])
    forms = {
        (folder.name, add_bos): HuggingFaceTokenizer(folder, add_bos).prefix
        for folder in (bos, none)
        for add_bos in (None, True, False)
    }
    assert forms == {
        ("bos", None): (0,), ("bos", True): (0,), ("bos", False): (),
        ("none", None): (), ("none", True): (0,), ("none", False): (),
    }  # fmt: skip
    assert HuggingFaceTokenizer(bos, False).suffix == (1,)
    unnamed = make_tokenizer(tmp_path / "unnamed", TEMPLATES["none"], bos_token=None)
    unknown = make_tokenizer(tmp_path / "unknown", TEMPLATES["none"], bos_token="<begin>")
    for folder, what in ((unnamed, "no file sets bos_token"), (unknown, "bos_token <begin> is not in the voc")):
        with pytest.raises(DataError, match=rf"tokenizer.add_bos=true: .*{what}.*\. Fix: tokenizer.add_bos=null"):
            HuggingFaceTokenizer(folder, True)


def test_a_post_processor_that_adds_a_token_beyond_the_vocabulary(tmp_path: Path) -> None:
    folder = make_tokenizer(tmp_path / "tokenizer", TEMPLATES["bos"])
    values = json.loads((folder / "tokenizer.json").read_text())
    values["post_processor"]["special_tokens"]["<s>"]["ids"] = [70_000]
    (folder / "tokenizer.json").write_text(json.dumps(values))
    with pytest.raises(DataError, match="the post-processor adds token 70000, but the vocabulary ends at "):
        HuggingFaceTokenizer(folder)


def test_identifiers_change_with_bos_only(tmp_path: Path) -> None:
    """Caches of one form must not be used for another.

    Caches without BOS stay valid.
    """
    bos = make_tokenizer(tmp_path / "bos", TEMPLATES["bos"])
    with_bos, without = HuggingFaceTokenizer(bos), HuggingFaceTokenizer(bos, add_bos=False)
    assert with_bos.unique_identifiers != without.unique_identifiers
    assert set(without.unique_identifiers) == {"tokenizer", "vocab_size", "eod", "digest"}


def packed_samples(config: RunConfig, lines: list[dict[str, str]], folder: Path, tokenizer: Any) -> list[Any]:
    (folder / "data.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    config.model.sequence_packing_scheduler, config.dataset.split = "dp_balanced", "1,0,0"
    config.dataset.data_path, config.dataset.seq_length = str(folder / "data.jsonl"), 100
    train = build_datasets(config.finalize().dataset, tokenizer, len(lines)).train
    assert train is not None
    return [train[i] for i in range(len(lines))]


def test_prompts_begin_with_bos_and_responses_end_with_eos(config: RunConfig, tmp_path: Path) -> None:
    tokenizer = HuggingFaceTokenizer(make_tokenizer(tmp_path / "tokenizer", TEMPLATES["both"]))
    prompt, response = tokenizer.tokenize("the cat"), tokenizer.tokenize("sat on")
    pair = {"prompt": "the cat", "response": "sat on"}
    templated = {"prompt": "<s>the cat", "response": "sat on"}
    found = [
        ([*sample["tokens"].tolist(), sample["labels"][-1].item()], sample["loss_mask"].tolist())
        for sample in packed_samples(config, [pair, {"text": "the cat"}, templated], tmp_path, tokenizer)
    ]
    whole = [0, *prompt, *response, 1]
    learnt = [0.0] * len(prompt) + [1.0] * (len(response) + 1)
    text = [0, *prompt, 1]
    bare = tokenizer.tokenize("<s>the cat")
    assert sorted(found) == sorted([
        (whole, learnt),
        (text, [1.0] * (len(prompt) + 1)),
        ([*bare, *response, 1], [0.0] * (len(bare) - 1) + [1.0] * (len(response) + 1)),
    ])  # fmt: skip
    assert bare.count(0) == 1


def test_bos_is_not_predicted_in_samples_of_variable_length(config: RunConfig, tmp_path: Path) -> None:
    tokenizer = HuggingFaceTokenizer(make_tokenizer(tmp_path / "tokenizer", TEMPLATES["bos"]))
    for sample in packed_samples(config, [{"text": WORDS}, {"text": "a"}], tmp_path, tokenizer):
        assert sample["tokens"][0] == 0 and 0 not in sample["labels"] and sample["labels"][-1] == tokenizer.eod


def test_lines_are_tokenized_again_if_the_setting_changes(config: RunConfig, tmp_path: Path) -> None:
    folder = make_tokenizer(tmp_path / "tokenizer", TEMPLATES["bos"])
    for add_bos in (None, False, None):
        (sample,) = packed_samples(config, [{"text": WORDS}], tmp_path, HuggingFaceTokenizer(folder, add_bos))
        assert (sample["tokens"][0] == 0) == (add_bos is None)


CHAT = "{% for m in messages %}<user>{{ m.content }}<sep>{% endfor %}"


@pytest.mark.parametrize("in_a_file", [True, False])
def test_plain_prompts_of_an_instruct_model_warn(
    config: RunConfig, tmp_path: Path, caplog: pytest.LogCaptureFixture, in_a_file: bool
) -> None:
    named = {} if in_a_file else {"chat_template": CHAT}
    folder = make_tokenizer(tmp_path / "tokenizer", TEMPLATES["bos"], **named)
    if in_a_file:
        (folder / "chat_template.jinja").write_text(CHAT)
    tokenizer = HuggingFaceTokenizer(folder)
    pair = {"prompt": "the cat", "response": "sat"}
    for _ in range(2):  # also where the file was tokenized by an earlier run
        caplog.clear()
        packed_samples(config, [{"text": WORDS}, pair], tmp_path, tokenizer)
        (reported,) = caplog.messages
        assert "data.jsonl: prompts and responses are joined with nothing between them, without the" in reported
        assert "Fix: dataset.apply_chat_template=true." in reported
    caplog.clear()
    from transformers import AutoTokenizer

    library = AutoTokenizer.from_pretrained(str(folder), local_files_only=True)
    pair["prompt"] = library.apply_chat_template(
        [{"role": "user", "content": "the cat"}], tokenize=False, add_generation_prompt=True
    )
    packed_samples(config, [{"text": WORDS}, pair], tmp_path, tokenizer)
    packed_samples(config, [{"text": WORDS}], tmp_path, tokenizer)
    assert not caplog.messages
