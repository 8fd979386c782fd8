"""Samples from JSON lines, tokenized once into cached ``.bin``/``.idx`` files.

A line is a JSON object with a text, or with a prompt and a response. The loss excludes prompts. A document begins with
the tokenizer's BOS token if it has one (part of the prompt), and ends with the end-of-document token (part of the
response).
"""

from __future__ import annotations

import logging
import os
import re
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np

from megatron_cp.common.errors import DataError, readable
from megatron_cp.common.input_files import decode_text, file_or_pipe, parse_json
from megatron_cp.config.names import NAME
from megatron_cp.config.run_config import DatasetConfig
from megatron_cp.data.formats.cache import build_cached, cache_key, cache_root, map_array
from megatron_cp.data.text.tokenizers import Tokenizer
from megatron_cp.data.text.tokenizing import encode, indexed_writer
from megatron_cp.launch import launcher

logger = logging.getLogger(__name__)
_FORMAT = 1  # of the cached files; a change invalidates caches
_NAME, _PROMPTS = "documents", ".prompts.npy"
_REPORT_EVERY = 100_000  # lines


def tokenized(path: str, tokenizer: Tokenizer, config: DatasetConfig) -> str:
    """Return the prefix of a ``.jsonl`` file's ``.bin``, ``.idx``, ``.prompts.npy``.

    Writes them if they do not exist. Their folder is in ``path_to_cache`` (by default ``cache`` beside the file). The
    folder's name depends on the file's path, size and modification time, the tokenizer and the keys of the texts.

    Raises:
        DataError: the file cannot be read, a line is not a sample, there are no samples, or the folder cannot be
            written.
    """
    file = Path(path)
    with readable(path), open(file, "rb", opener=file_or_pipe) as stream:
        status = os.fstat(stream.fileno())  # a network file system may report an old size of a closed file
    stamp = (str(file.absolute()), status.st_size, status.st_mtime_ns)
    identifiers = list(tokenizer.unique_identifiers.items())
    name = cache_key(_FORMAT, stamp, identifiers, config.text_key, config.prompt_key, config.response_key)
    folder = cache_root(config.path_to_cache, file) / f"jsonl-{name}"
    build_cached(lambda partial: _tokenize(file, tokenizer, config, str(partial / _NAME)), folder)
    return str(folder / _NAME)


def map_prompt_lengths(prefix: str) -> np.ndarray:
    """Map the prompt tokens of each document, int32; 0 for a text.

    Raises:
        DataError: the file is missing or damaged.
    """
    return map_array(prefix + _PROMPTS)


def warn_of_plain_prompts(path: str, prefix: str, prompt_lengths: np.ndarray, tokenizer: Tokenizer) -> None:
    """Warn on the first rank if prompts lack the special tokens of the chat template.

    Checks the first prompt of the file ``path``, which was tokenized into ``prefix.bin``.
    """
    if not tokenizer.has_chat_template or not prompt_lengths.any() or not launcher.is_first_rank():
        return
    from megatron.core.datasets.indexed_dataset import IndexedDataset

    first = int(np.argmax(prompt_lengths > 0))
    data = IndexedDataset(prefix)  # keep a reference: its deletion unmaps the arrays of get()
    prompt = data.get(first, length=int(prompt_lengths[first])).tolist()
    if tokenizer.special_ids.isdisjoint(prompt[len(tokenizer.prefix) :]):
        logger.warning(
            "%s: prompts do not use the tokenizer's chat template; instruct models expect it. Fix: write prompts "
            "with transformers' apply_chat_template([{'role': 'user', 'content': PROMPT}], tokenize=False, "
            "add_generation_prompt=True). The template's special tokens in the prompts silence this warning",
            path,
        )


def _tokenize(file: Path, tokenizer: Tokenizer, config: DatasetConfig, prefix: str) -> None:
    prompt_lengths: list[int] = []
    empty = 0
    samples = (sample for sample, _ in read_lines(file, lambda value: _sample(value, config)) if sample is not None)
    with indexed_writer(prefix, tokenizer, source=str(file)) as writer:
        for number, (prompt, text) in enumerate(samples, 1):
            ids, prompt_length = encode(tokenizer, text, prompt)
            if ids:
                writer.add_document(ids, [len(ids)])
                prompt_lengths.append(prompt_length)
            else:
                empty += 1
            if number % _REPORT_EVERY == 0:
                logger.info("%s: %d lines tokenized", file, number)
    np.save(prefix + _PROMPTS, np.array(prompt_lengths, dtype=np.int32))
    left_out = f", {empty} lines without text skipped" if empty else ""
    logger.info("%s: %d documents tokenized%s", file, len(prompt_lengths), left_out)


def read_lines[T](file: Path, parse: Callable[[dict[str, Any]], T]) -> Iterator[tuple[T | None, int]]:
    """Yield ``parse(object)`` of each line (None if blank) and the line's bytes.

    Raises:
        DataError: the file cannot be read, a line is not a JSON object, or ``parse`` raises ValueError.
    """
    with readable(file), open(file, "rb", opener=file_or_pipe) as stream:
        for number, line in enumerate(stream, 1):
            try:
                text = decode_text(line, file)  # in a concatenated file, any line may begin with a byte order mark
                value = parse(_object(text)) if text.strip() else None
            except ValueError as error:
                raise DataError(f"{file}:{number}: {error}") from error
            yield value, len(line)


def _sample(value: dict[str, Any], config: DatasetConfig) -> tuple[str, str]:
    """Return (prompt, text or response); raise ValueError if there is no sample."""
    has_text = config.text_key in value
    has_pair = config.prompt_key in value and config.response_key in value
    if has_text == has_pair:
        wanted = f"{config.text_key!r}, or {config.prompt_key!r} and {config.response_key!r}"
        texts = [key for key in sorted(value) if isinstance(value[key], str)]
        fixes = [f"{NAME.dataset.text_key}={key}" for key in texts[:3] if re.fullmatch(r"\w+", key)]
        if has_text:
            fixes = [
                f"{NAME.dataset.prompt_key}=null {NAME.dataset.response_key}=null",
                f"{NAME.dataset.text_key}=null",
            ]
        raise ValueError(
            f"{'has both ' if has_text else 'has no '}{wanted}{'' if has_text else f'; its keys are {sorted(value)}'}. "
            f"Fix: {', or '.join(fixes) or f'{NAME.dataset.text_key}=NAME'}"
        )
    if has_text:
        return "", text_under(config.text_key, value)
    return text_under(config.prompt_key, value), text_under(config.response_key, value)


def _object(line: str) -> dict[str, Any]:
    """Parse a line as a JSON object; raise ValueError if it is not one."""
    try:
        value = parse_json(line)
    except ValueError as error:
        cut_short = "" if line.endswith("\n") else " The file ends in this line and may be truncated."
        raise ValueError(f"not valid JSON: {error}.{cut_short}") from error
    if not isinstance(value, dict):
        raise ValueError(f"must be a JSON object, found {type(value).__name__}.")
    return value


def text_under(key: str | None, values: dict[Any, Any]) -> str:
    """Return the text under ``key``; raise ValueError if no tokenizer can encode it."""
    text = values[key]
    if not isinstance(text, str):
        raise ValueError(f"the value of {key!r} is {type(text).__name__}, not text.")
    try:
        text.encode("utf-8")
    except UnicodeEncodeError as error:
        raise ValueError(
            f"the value of {key!r} has half a surrogate pair (such as \\ud800 alone). Fix: write the whole pair, or "
            "remove it"
        ) from error
    return text
