"""Read the files of a Hugging Face tokenizer."""

from __future__ import annotations

import logging
import os
import shlex
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from megatron_cp.common.errors import DataError, readable
from megatron_cp.common.input_files import decode_text, read_bytes, read_json, special_files
from megatron_cp.config.names import NAME

CHAT_TEMPLATE = "chat_template.jinja"  # a file beside the tokenizer's; it replaces the template in their settings
_TOKENS = tuple(f"{name}_token" for name in ("bos", "eos", "unk", "sep", "pad", "cls", "mask"))


def check_regular_files(path: Path) -> None:
    """Raise DataError if the path does not exist, or has a device or a pipe."""
    if not os.path.exists(path):  # unlike Path.exists, never raises
        raise DataError(
            f"{NAME.tokenizer.tokenizer_model}={path}: no such file or folder. Fix: {NAME.tokenizer.tokenizer_model}="
            "PATH (of a tokenizer.json or its folder; nothing is downloaded)"
        )
    if special := special_files(path):
        raise DataError(
            f"{NAME.tokenizer.tokenizer_model}={path}: {special[0]} is neither a file nor a folder. "
            f"Fix: rm {shlex.quote(str(special[0]))}"
        )


def load(path: Path) -> Any:
    """Load a ``tokenizers.Tokenizer`` without truncation or padding.

    Raises:
        DataError: the files cannot be read as a tokenizer, or need custom Python code.
    """
    from tokenizers import Tokenizer as FastTokenizer

    file = path / "tokenizer.json" if path.is_dir() else path
    try:
        if file.exists():
            tokenizer = FastTokenizer.from_str(decode_text(read_bytes(file), file))
        else:
            from transformers import AutoTokenizer

            logging.getLogger("transformers").setLevel(logging.ERROR)  # its warnings quote the folder's files
            options = {"local_files_only": True, "use_fast": True, "trust_remote_code": False}
            tokenizer = AutoTokenizer.from_pretrained(str(path), **options).backend_tokenizer
        # tokenizer.json may set truncation or padding, which must not change documents.
        tokenizer.no_truncation()
        tokenizer.no_padding()
        return tokenizer
    except Exception as error:  # both libraries raise plain Exceptions
        why = " ".join(str(error).split())
        if "trust_remote_code" in why:
            raise DataError(
                f"{NAME.tokenizer.tokenizer_model}={path}: needs its own Python code (auto_map), which is never run. "
                f"Fix: if you trust that code, save it as {path / 'tokenizer.json'} with transformers' save_pretrained"
            ) from error
        raise DataError(f"{NAME.tokenizer.tokenizer_model}={path}: cannot be read as a tokenizer: {why}") from error


def added_by_post_processor(tokenizer: Any) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """Return the tokens that a tokenizer adds before (BOS) and after (EOS) a text."""
    sample = next((text for text in ("a", *tokenizer.get_vocab()) if _has_tokens(tokenizer, text)), "")
    encoded = tokenizer.encode(sample, add_special_tokens=True)
    own = [index for index, added in enumerate(encoded.special_tokens_mask) if not added]
    if not own:
        return (), ()
    return tuple(encoded.ids[: own[0]]), tuple(encoded.ids[own[-1] + 1 :])


def _has_tokens(tokenizer: Any, text: str) -> bool:
    try:
        return bool(tokenizer.encode(text, add_special_tokens=False).ids)
    except Exception:  # raised by the library for a word outside of the vocabulary
        return False


def chat_templates(path: Path) -> dict[str, str]:
    """Return the chat templates in the folder of ``tokenizer.json``, by name.

    The one that is used is ``default``; models with several have ``tool_use``, for dialogues with tools.

    Raises:
        DataError: a file cannot be read.
    """
    folder = _folder_of(path)
    found: dict[str, str] = {}
    for file, values in _companions(folder):
        given = values.get("chat_template")
        named = given if isinstance(given, list) else [{"name": "default", "template": given}] if given else []
        for each in named:
            if not (isinstance(each, dict) and all(isinstance(each.get(key), str) for key in ("name", "template"))):
                raise DataError(f"{file}: chat_template: must be a string. Fix: restore the file")
            found[each["name"]] = each["template"]
    file = folder / CHAT_TEMPLATE
    if os.path.exists(file):
        with readable(file):
            found["default"] = decode_text(read_bytes(file), file)
    return found


def special_tokens(path: Path) -> dict[str, str]:
    """Return the special tokens in the tokenizer's configs, such as ``bos_token``."""
    found = {key: special_token(path, key) for key in _TOKENS}
    return {key: token for key, token in found.items() if token is not None}


def special_token(path: Path, key: str) -> str | None:
    """Return the token that the tokenizer's configs name ``key`` (``eos_token``)."""
    named: str | None = None
    for file, values in _companions(_folder_of(path)):
        token = values.get(key)
        if isinstance(token, dict):
            token = token.get("content")
        if not isinstance(token, str | None):
            example = "<|endoftext|>" if key == "eos_token" else "<s>"
            fix = f'"{key}": "{example}", or another token of the vocabulary'
            raise DataError(f"{file}: {key}={str(token)[:40]}: must be a string. Fix: {fix}")
        named = token or named
    return named


def _folder_of(path: Path) -> Path:
    return path if path.is_dir() else path.parent


def _companions(folder: Path) -> Iterator[tuple[Path, dict[str, Any]]]:
    """Yield each file with special tokens beside ``tokenizer.json``, and its values."""
    for name in ("special_tokens_map.json", "tokenizer_config.json"):
        file = folder / name
        if not os.path.exists(file):
            continue
        try:
            with readable(file):
                values = read_json(file)
        except ValueError as error:
            raise DataError(f"{file}: not valid JSON: {error}") from error
        if not isinstance(values, dict):
            raise DataError(f"{file}: must be a JSON object, found {type(values).__name__}. Fix: restore the file")
        yield file, values
