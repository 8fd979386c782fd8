"""Tokenize the rows of ``.jsonl`` and ``.parquet`` files once.

The result is a cached ``.bin``/``.idx`` pair. A row has a text, a prompt and a response, or a dialogue. All tokens of a
text are in the loss; of the others only the assistant's, by default. A document begins with the tokenizer's BOS token
if it has one, and ends with the end-of-document token; a dialogue is exactly what the chat template writes.
"""

from __future__ import annotations

import json
import logging
import os
import re
import shlex
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from megatron_cp.common.errors import DataError, readable
from megatron_cp.common.input_files import file_or_pipe, read_json
from megatron_cp.config.names import NAME
from megatron_cp.config.run_config import DatasetConfig
from megatron_cp.data.formats.cache import build_cached, cache_key, cache_root, map_array
from megatron_cp.data.formats.loss_spans import write_spans
from megatron_cp.data.formats.rows import read_rows, text_under
from megatron_cp.data.text.chat_template import ChatTemplate, Span
from megatron_cp.data.text.dialogues import SHARE_GPT, BadDialogue, Dialogue, dialogue_of, of_pair
from megatron_cp.data.text.tokenizers import Tokenizer
from megatron_cp.data.text.tokenizing import encode, indexed_writer
from megatron_cp.launch import launcher

logger = logging.getLogger(__name__)
_FORMAT = 2  # of the cached files; a change invalidates caches
_NAME, _ROWS, _NOTES = "documents", ".rows.npy", ".notes.json"
_REPORT_EVERY = 100_000  # rows


class Pair(NamedTuple):
    """Prompt and response; the prompt of a text is empty."""

    prompt: str
    response: str


def tokenized(path: str, tokenizer: Tokenizer, config: DatasetConfig) -> str:
    """Return the prefix of a file's tokens, spans and row numbers.

    Writes them if they do not exist. Their folder is in ``path_to_cache`` (by default ``cache`` beside the file). The
    folder's name depends on the file's path, size and modification time, the tokenizer, its chat template and the
    settings of the rows.

    Raises:
        DataError: the file cannot be read, a row is not a sample, there are no samples, or the folder cannot be
            written.
    """
    file = Path(path)
    with readable(path), open(file, "rb", opener=file_or_pipe) as stream:
        status = os.fstat(stream.fileno())  # a network file system may report an old size of a closed file
    stamp = (str(file.absolute()), status.st_size, status.st_mtime_ns)
    identifiers = list(tokenizer.unique_identifiers.items())
    template = None
    if config.chat_template or tokenizer.has_chat_template:
        template = ChatTemplate(tokenizer, config.chat_template).digest
    keys = (config.text_key, config.prompt_key, config.response_key, config.messages_key)
    choices = (config.train_on, config.apply_chat_template, config.bad_dialogues)
    name = cache_key(_FORMAT, stamp, identifiers, template, keys, choices)
    folder = cache_root(config.path_to_cache, file) / f"samples-{name}"
    build_cached(lambda partial: _tokenize(file, tokenizer, config, str(partial / _NAME)), folder)
    return str(folder / _NAME)


def check_first_row(path: str, tokenizer: Tokenizer, config: DatasetConfig) -> None:
    """Encode the first row of a file.

    Raises:
        DataError: the file cannot be read or has no row, or the row is not a sample.
    """
    file = Path(path)
    number, row = next(read_rows(file), (0, None))
    if row is None:
        raise DataError(f"{path}: is empty. Fix: name a file with samples")
    _Encoder(file, tokenizer, config).encode(number, row)


def map_rows(prefix: str) -> np.ndarray:
    """Map the row of each document, from 1: int64 [documents]."""
    return map_array(prefix + _ROWS)


def log_notes(prefix: str) -> None:
    """Log on the first rank what the tokenization of a file found, at every start.

    Raises:
        DataError: the notes cannot be read.
    """
    if not launcher.is_first_rank():
        return
    path = Path(prefix + _NOTES)
    try:
        notes = [(logging.getLevelNamesMapping()[level], str(text)) for level, text in read_json(path)]
    except (OSError, ValueError, KeyError, TypeError) as error:
        fix = f"rm -r {shlex.quote(str(path.parent))} (it is built again)"
        raise DataError(f"{path}: cannot be read ({error}). Fix: {fix}") from error
    for level, text in notes:
        logger.log(level, "%s", text)


class _Encoder:
    """Encoder of rows; takes notes of what it skips and how it joins messages."""

    def __init__(self, file: Path, tokenizer: Tokenizer, config: DatasetConfig) -> None:
        self._file, self._tokenizer, self._config = file, tokenizer, config
        self._template: ChatTemplate | None = None
        self._raw_prompt: list[int] | None = None  # of the first pair without a chat template
        self._skipped: list[str] = []
        self._left_out: list[str] = []
        self.empty = 0

    def encode(self, number: int, row: dict[str, Any]) -> tuple[list[int], list[Span]]:
        """Return ids and the spans to learn; no ids for a row that is skipped."""
        place = f"{self._file}:{number}"
        try:
            sample = sample_of(row, self._config)
            if isinstance(sample, Pair):
                return self._encode_pair(sample)
            encoded = self._chat_template().encode(sample, self._config.train_on)
        except DataError:
            raise
        except BadDialogue as error:
            if self._config.bad_dialogues == "refuse":
                raise DataError(f"{place}: {error}") from error
            self._skipped.append(f"{place}: {str(error).rpartition(' Fix: ')[0]}")
            return [], []
        except ValueError as error:
            raise DataError(f"{place}: {error}") from error
        if encoded.left_out is not None:
            self._left_out.append(f"{place}: message {encoded.left_out}")
        return encoded.ids, encoded.spans

    def notes(self) -> list[tuple[str, str]]:
        """Return (level, text) of each note to log at every start."""
        notes = []
        if self._template is not None:
            found = "generation blocks" if self._template.has_marks else "differences of renderings"
            trained = f"{NAME.dataset.train_on}={self._config.train_on}"
            notes.append(("INFO", f"dialogues use {self._template.name}; {trained}, found by {found}"))
        if self._skipped:
            skipped = f"{len(self._skipped)} dialogues are skipped ({NAME.dataset.bad_dialogues}=skip)"
            notes.append(("WARNING", f"{skipped}; the first is {self._skipped[0]}"))
        if self._left_out:
            what = f"the chat template leaves out the text of a message in {len(self._left_out)} dialogues"
            notes.append(("WARNING", f"{what}; the first is {self._left_out[0]}"))
        if self._raw_prompt is not None:
            notes.append(self._note_on_raw_prompts(self._raw_prompt))
        return [(level, f"{self._file}: {text}") for level, text in notes]

    def _note_on_raw_prompts(self, prompt: list[int]) -> tuple[str, str]:
        joined = "prompts and responses are joined with nothing between them"
        written = prompt[len(self._tokenizer.prefix) :]
        if not self._tokenizer.has_chat_template or not self._tokenizer.special_ids.isdisjoint(written):
            return "INFO", joined
        return "WARNING", (
            f"{joined}, without the tokenizer's chat template; instruct models expect it. Fix: "
            f"{NAME.dataset.apply_chat_template}=true. Special tokens of the template in the prompts silence this"
        )

    def _encode_pair(self, pair: Pair) -> tuple[list[int], list[Span]]:
        ids, prompt_length = encode(self._tokenizer, pair.response, pair.prompt)
        self.empty += not ids
        if prompt_length and self._raw_prompt is None:
            self._raw_prompt = ids[:prompt_length]
        begin = 0 if self._config.train_on == "all" else prompt_length
        return ids, [(begin, len(ids))]

    def _chat_template(self) -> ChatTemplate:
        if self._template is None:
            self._template = ChatTemplate(self._tokenizer, self._config.chat_template)
        return self._template


def _tokenize(file: Path, tokenizer: Tokenizer, config: DatasetConfig, prefix: str) -> None:
    spans: list[list[Span]] = []
    rows: list[int] = []
    encoder = _Encoder(file, tokenizer, config)
    with indexed_writer(prefix, tokenizer, source=str(file)) as writer:
        for number, row in read_rows(file):
            ids, marked = encoder.encode(number, row)
            if ids:
                writer.add_document(ids, [len(ids)])
                spans.append(marked)
                rows.append(number)
            if number % _REPORT_EVERY == 0:
                logger.info("%s: %d rows tokenized", file, number)
    write_spans(prefix, spans)
    np.save(prefix + _ROWS, np.array(rows, dtype=np.int64))
    empty = f", {encoder.empty} rows without text skipped" if encoder.empty else ""
    logger.info("%s: %d documents tokenized%s", file, len(rows), empty)
    Path(prefix + _NOTES).write_text(json.dumps(encoder.notes()) + "\n", encoding="utf-8")


def sample_of(row: dict[str, Any], config: DatasetConfig) -> Pair | Dialogue:
    """Return the sample of a row.

    Raises:
        BadDialogue: its dialogue cannot be trained on.
        ValueError: it has no sample, or more than one.
    """
    dialogues = [key for key in (config.messages_key, SHARE_GPT) if key in row]
    has_text = config.text_key in row
    has_pair = config.prompt_key in row and config.response_key in row
    if has_text + has_pair + bool(dialogues) != 1:
        raise ValueError(_not_one_sample(row, config, has_text, has_pair, bool(dialogues)))
    if dialogues:
        return dialogue_of(row, str(dialogues[0]))
    if has_text:
        return Pair("", text_under(config.text_key, row))
    pair = Pair(text_under(config.prompt_key, row), text_under(config.response_key, row))
    return of_pair(*pair) if config.apply_chat_template else pair


def _not_one_sample(
    row: dict[str, Any], config: DatasetConfig, has_text: bool, has_pair: bool, has_dialogue: bool
) -> str:
    wanted = f"{config.text_key!r}, or {config.prompt_key!r} and {config.response_key!r}, or {config.messages_key!r}"
    ways = {
        f"{NAME.dataset.text_key}=null": has_text,
        f"{NAME.dataset.prompt_key}=null {NAME.dataset.response_key}=null": has_pair,
        f"{NAME.dataset.messages_key}=null": has_dialogue,
    }
    if sum(ways.values()) > 1:
        others = [" ".join(way for way, there in ways.items() if there and way != kept) for kept in ways if ways[kept]]
        return f"has more than one of {wanted}. Fix: {', or '.join(dict.fromkeys(others))}"
    texts = [key for key in sorted(row) if isinstance(row[key], str)]
    fixes = [f"{NAME.dataset.text_key}={key}" for key in texts[:3] if re.fullmatch(r"\w+", key)]
    return f"has no {wanted}; its keys are {sorted(row)}. Fix: {', or '.join(fixes) or f'{NAME.dataset.text_key}=NAME'}"
