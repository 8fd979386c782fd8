"""Record of the special tokens that a data file's documents begin and end with."""

from __future__ import annotations

import json
import logging
import shlex
from collections.abc import Iterable, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np

from megatron_cp.common.errors import DataError, join_limited
from megatron_cp.common.input_files import read_json
from megatron_cp.config.names import NAME
from megatron_cp.config.run_config import DatasetConfig, TokenizerConfig
from megatron_cp.data.formats.indexed import IndexedFiles, open_indexed
from megatron_cp.data.text.tokenizers import Tokenizer, build_tokenizer
from megatron_cp.launch import launcher

logger = logging.getLogger(__name__)
ENDING = ".meta.json"  # beside .bin and .idx


@dataclass(frozen=True)
class Record:
    """Tokenizer of a file; ``prefix`` and ``suffix`` are the tokens around each text."""

    tokenizer_type: str
    tokenizer_model: str | None
    prefix: tuple[int, ...]
    suffix: tuple[int, ...]

    @staticmethod
    def of(tokenizer: Tokenizer) -> Record:
        path = getattr(tokenizer, "path", None)
        model = None if path is None else str(Path(path).absolute())
        return Record(type(tokenizer).__name__, model, tokenizer.prefix, tokenizer.suffix)

    def fits(self, tokenizer: Tokenizer) -> bool:
        return (self.prefix, self.suffix) == (tokenizer.prefix, tokenizer.suffix)


def write_record(path: str, tokenizer: Tokenizer) -> None:
    Path(path).write_text(json.dumps(asdict(Record.of(tokenizer))) + "\n", encoding="utf-8")


def document_form(tokenizer: Tokenizer) -> str:
    """Return the form of a document, such as ``<s> text </s>``."""
    return " ".join([*map(tokenizer.name_of, tokenizer.prefix), "text", *map(tokenizer.name_of, tokenizer.suffix)])


def check_records(paths: Sequence[str], data: DatasetConfig, tokenizer: Tokenizer, settings: TokenizerConfig) -> None:
    """Check that documents begin and end with the tokens of the run's tokenizer.

    Files of earlier versions or of other programs have no record. One warning lists those files whose first document
    differs.

    Raises:
        DataError: a file's documents begin or end with other tokens, or their boundaries are ambiguous.
    """
    if settings.tokenizer_type == "NullTokenizer":  # another program tokenized the data
        return
    without: list[str] = []
    for path in paths:
        files = open_indexed(path)
        record = _read(files)
        if record is not None and not record.fits(tokenizer):
            raise DataError(_difference(files, record, tokenizer, settings))
        if record is not None or _begins_with(files, tokenizer.prefix):
            _check_boundaries(data, tokenizer)
        else:
            without.append(path)
    if without and launcher.is_first_rank():
        logger.warning(
            "%s: the first document does not begin with %s, as this tokenizer's documents do; training continues. "
            f"Fix: run megatron-cp preprocess again, or set {NAME.tokenizer.add_bos}=false to silence this warning",
            join_limited(without, ", "),
            " ".join(map(tokenizer.name_of, tokenizer.prefix)),
        )
    elif tokenizer.prefix and not without:
        logger.info("tokenizer: form of a document: %s", document_form(tokenizer))


def _read(files: IndexedFiles) -> Record | None:
    path = Path(files.prefix + ENDING)
    try:
        values: Any = read_json(path)
        prefix, suffix = (tuple(int(token) for token in values[name]) for name in ("prefix", "suffix"))
        model = None if values["tokenizer_model"] is None else str(values["tokenizer_model"])
        record = Record(str(values["tokenizer_type"]), model, prefix, suffix)
    except FileNotFoundError:
        return None
    except (OSError, ValueError, KeyError, TypeError, OverflowError) as error:
        why = f"cannot be read: {error.strerror}" if isinstance(error, OSError) else "is damaged"
        raise DataError(f"{path}: {why}. Fix: rm {shlex.quote(str(path))} (the record is optional)") from error
    return None if record.tokenizer_type == "NullTokenizer" else record  # it adds no BOS or EOS


def _begins_with(files: IndexedFiles, prefix: tuple[int, ...]) -> bool:
    """Return whether the first document of a file begins with these tokens."""
    return tuple(np.fromfile(files.prefix + ".bin", files.dtype, len(prefix)).tolist()) == prefix


def _check_boundaries(data: DatasetConfig, tokenizer: Tokenizer) -> None:
    """Raise DataError if the first token of a document would count as an end."""
    readers = [name for name in ("eod_mask_loss", "reset_position_ids") if getattr(data, name)]
    if data.kind == "indexed" and readers and tokenizer.eod in tokenizer.prefix:
        raise DataError(
            f"dataset.{readers[0]}=true: documents begin and end with {tokenizer.name_of(tokenizer.eod)}, so each "
            "would count as two. Fix: " + " ".join(f"dataset.{name}=false" for name in readers)
        )


def _difference(files: IndexedFiles, record: Record, tokenizer: Tokenizer, settings: TokenizerConfig) -> str:
    where = "begin" if record.prefix != tokenizer.prefix else "end"
    recorded, wanted = (record.prefix, tokenizer.prefix) if where == "begin" else (record.suffix, tokenizer.suffix)
    named = ", ".join(f"{token} ({tokenizer.name_of(token)})" for token in wanted)
    return (
        f"{files.prefix}{ENDING}: the documents {where} with {_tokens(map(str, recorded))}, but documents of the run's "
        f"tokenizer {where} with {_tokens([named] if named else [])}. Fix: {_fix(record, settings)}"
    )


def _tokens(ids: Iterable[str]) -> str:
    return f"token {text}" if (text := ", ".join(ids)) else "no special token"


def _fix(record: Record, settings: TokenizerConfig) -> str:
    """Return settings with which the run's tokenizer matches the record."""
    recorded = {"tokenizer_type": record.tokenizer_type, "tokenizer_model": record.tokenizer_model}
    attempts: list[dict[str, Any]] = [{"add_bos": None}, {"add_bos": False}, {"add_bos": True}, recorded]
    for values in attempts:
        with suppress(DataError):
            if record.fits(build_tokenizer(replace(settings, **values))):
                texts = {name: value if isinstance(value, str) else json.dumps(value) for name, value in values.items()}
                return shlex.join(f"tokenizer.{name}={text}" for name, text in texts.items())
    return "make the files again with megatron-cp preprocess and the run's tokenizer"
