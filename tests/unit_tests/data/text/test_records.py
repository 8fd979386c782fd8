"""A run reports data of another form than its tokenizer writes.

The documents begin or end with other tokens.
"""

import logging
import re
import shlex
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from megatron_cp.common.errors import DataError
from megatron_cp.config.recipes import load_recipe
from megatron_cp.config.run_config import RunConfig, TokenizerConfig
from megatron_cp.data.samples.datasets import build_datasets
from megatron_cp.data.samples.streams import check_files
from megatron_cp.data.text.records import ENDING
from megatron_cp.data.text.tokenizers import build_tokenizer


def windows(config: RunConfig, prefix: str, settings: TokenizerConfig) -> list[dict[str, torch.Tensor]]:
    config.dataset.data_path, config.tokenizer = prefix, settings
    config.dataset.eod_mask_loss = config.dataset.reset_position_ids = True
    config.dataset.split, config.dataset.seq_length = "1,0,0", 9
    tokenizer = build_tokenizer(settings)
    check_files(config.finalize().dataset, tokenizer, settings)
    train = build_datasets(config.dataset, tokenizer, 8).train
    return [train[i] for i in range(8)]  # type: ignore[index]


def test_windows_find_documents_that_begin_with_bos(config: RunConfig, prepared: Any) -> None:
    """Positions must start again at BOS, whose prediction is not in the loss.

    It would be predicted from the end of another document.
    """
    seen = 0
    for sample in windows(config, *prepared("bos")):
        tokens, labels = sample["tokens"].tolist(), sample["labels"].tolist()
        assert sample["loss_mask"].tolist() == [float(token != 1) for token in tokens]
        for place, position in enumerate(sample["position_ids"].tolist()):
            start = max((i for i in range(place + 1) if i == 0 or tokens[i - 1] == 1), default=0)
            assert position == place - start
            if tokens[place] == 1:
                assert labels[place] == 0
                seen += 1
            if place and tokens[place] == 0:
                assert position == 0
    assert seen > 3


def test_a_bos_equal_to_eod_is_refused_if_windows_search_for_eod(config: RunConfig, prepared: Any) -> None:
    prefix, settings = prepared("bos is eos")
    with pytest.raises(DataError, match=r"dataset.eod_mask_loss=true: documents begin and end with </s>") as error:
        windows(config, prefix, settings)
    assert fix_of(error) == ["dataset.eod_mask_loss=false", "dataset.reset_position_ids=false"]
    config.dataset.eod_mask_loss = config.dataset.reset_position_ids = False
    check_files(config.dataset, build_tokenizer(settings), settings)
    Path(prefix + ENDING).unlink()
    config.dataset.eod_mask_loss = True
    with pytest.raises(DataError, match="documents begin and end with </s>"):
        check_files(config.dataset, build_tokenizer(settings), settings)


def fix_of(error: pytest.ExceptionInfo[DataError]) -> list[str]:
    return shlex.split(str(error.value).rpartition("Fix: ")[2])


def check_data(config: RunConfig, prefix: str, settings: TokenizerConfig) -> None:
    config.dataset.data_path, config.tokenizer = prefix, settings
    check_files(config.finalize().dataset, build_tokenizer(settings), settings)


@pytest.mark.parametrize(
    ("template", "data", "run", "fix"),
    [
        ("bos", None, False, "tokenizer.add_bos=null"),
        ("bos", False, None, "tokenizer.add_bos=false"),
        ("none", None, True, "tokenizer.add_bos=null"),
        ("none", True, None, "tokenizer.add_bos=true"),
        ("both", False, True, "tokenizer.add_bos=false"),
    ],
)
def test_data_of_another_form_is_named_with_the_setting_that_fits(
    config: RunConfig, prepared: Any, template: str, data: bool | None, run: bool | None, fix: str
) -> None:
    prefix, settings = prepared(template, add_bos=data)
    with pytest.raises(DataError, match=rf"corpus{re.escape(ENDING)}: the documents begin with ") as error:
        check_data(config, prefix, replace(settings, add_bos=run))
    assert fix_of(error) == [fix]
    check_data(config, prefix, load_recipe("llama_tiny_pretrain_config", [
        "tokenizer.tokenizer_type=HuggingFaceTokenizer", f"tokenizer.tokenizer_model={settings.tokenizer_model}", fix,
    ]).tokenizer)  # fmt: skip


def test_data_of_another_tokenizer_names_that_one(config: RunConfig, prepared: Any) -> None:
    prefix, settings = prepared("two ends")
    _, other = prepared("bos", name="other")
    with pytest.raises(DataError, match=r"documents end with token 2, 1, but .* end with token 1 \(</s>\)") as error:
        check_data(config, prefix, other)
    fix = fix_of(error)
    assert fix[0] == "tokenizer.tokenizer_type=HuggingFaceTokenizer" and len(fix) == 2
    check_data(config, prefix, load_recipe("llama_tiny_pretrain_config", fix).tokenizer)
    with pytest.raises(DataError, match="the documents begin with token 0, but documents of the run's"):
        check_data(config, prefix, TokenizerConfig("ByteLevelTokenizer"))
    check_data(
        config, prefix, TokenizerConfig("NullTokenizer", vocab_size=290, eod_id=1)
    )  # tokenized by another program
    Path(settings.tokenizer_model or "", "tokenizer.json").unlink()
    with pytest.raises(DataError, match=r"Fix: make the files again with megatron-cp preprocess and the run"):
        check_data(config, prefix, other)


def test_data_without_a_record_warns_once(config: RunConfig, prepared: Any, caplog: pytest.LogCaptureFixture) -> None:
    plain = [prepared("bos", name=name, add_bos=False)[0] for name in ("a", "b")]
    begun, settings = prepared("bos", name="c")
    for prefix in (*plain, begun):
        Path(prefix + ENDING).unlink()
    settings.add_bos = None
    with caplog.at_level(logging.INFO, "megatron_cp"):
        check_data(config, [*plain, begun], settings)  # type: ignore[arg-type]
    assert len(caplog.messages) == 1
    reported = caplog.messages[0]
    assert reported.startswith(f"{plain[0]}, {plain[1]}: the first document does not begin with <s>"), reported
    assert "tokenizer.add_bos=false to silence" in reported
    caplog.clear()
    check_data(config, [*plain, begun], replace(settings, add_bos=False))  # type: ignore[arg-type]
    assert not caplog.messages


@pytest.mark.parametrize("content", ["{", "[]", '{"prefix": 3}', '{"prefix": [Infinity], "suffix": [1]}', "\0"])
def test_a_damaged_record(config: RunConfig, prepared: Any, content: str) -> None:
    prefix, settings = prepared("bos")
    Path(prefix + ENDING).write_text(content)
    with pytest.raises(DataError, match=rf"corpus{re.escape(ENDING)}: is damaged\. Fix: rm ") as error:
        check_data(config, prefix, settings)
    Path(fix_of(error)[1]).unlink()
    check_data(config, prefix, settings)


def test_the_special_tokens_of_a_document_are_logged(
    config: RunConfig, prepared: Any, caplog: pytest.LogCaptureFixture
) -> None:
    prefix, settings = prepared("both")
    with caplog.at_level(logging.INFO, "megatron_cp"):
        check_data(config, prefix, settings)
    assert caplog.messages == ["tokenizer: form of a document: <s> text </s>"]
