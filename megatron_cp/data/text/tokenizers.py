"""Tokenizers with the interface of megatron-core's datasets.

They use the ``tokenizers`` library directly: it loads in 0.1 s and never uses the network. ``transformers`` is imported
only for a folder without ``tokenizer.json``.
"""

from __future__ import annotations

import hashlib
import json
import os
from collections import OrderedDict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

from megatron_cp.common.atomic_files import atomic_write
from megatron_cp.common.errors import DataError
from megatron_cp.config.names import NAME
from megatron_cp.config.run_config import TokenizerConfig
from megatron_cp.data.text.tokenizer_files import (
    added_by_post_processor,
    chat_templates,
    check_regular_files,
    load,
    special_token,
)
from megatron_cp.models.vocabulary import BYTE_LEVEL

END_OF_DOCUMENT = "<|endoftext|>"
NO_TOKEN = -1  # megatron-core's value for an absent token

# Tried in this order if the tokenizer's files set no eos_token.
_COMMON_END_TOKENS = (END_OF_DOCUMENT, "<|end_of_text|>", "</s>", "<eos>", "<|eot_id|>", "[EOS]", "[SEP]")


class Encoding(Protocol):
    """Ids of a text, and each character's token; see the ``tokenizers`` library."""

    @property
    def ids(self) -> list[int]: ...

    def char_to_token(self, char_pos: int) -> int | None: ...


@dataclass(frozen=True)
class _BytesOfText:
    text: str
    ids: list[int]

    def char_to_token(self, char_pos: int) -> int | None:
        return len(self.text[:char_pos].encode("utf-8"))


class Tokenizer:
    """Interface of all tokenizers; token ids are ints in [0, vocab_size).

    A document begins with the tokens ``prefix`` and ends with ``suffix``, whose last token is ``eod``. ``special_ids``
    stand for no text. ``pad`` is always ``NO_TOKEN``: megatron-core replaces each ``pad`` token by token 0 and masks
    its loss, even within a text.
    """

    pad = NO_TOKEN
    has_chat_template = False

    def __init__(self, vocab_size: int, eod: int) -> None:
        self.vocab_size = vocab_size
        self.eod = eod
        self.prefix: tuple[int, ...] = ()
        self.suffix: tuple[int, ...] = (eod,)
        self.special_ids = frozenset((eod,))

    @property
    def unique_identifiers(self) -> OrderedDict[str, Any]:
        """Identity of this tokenizer in megatron-core's index cache."""
        return OrderedDict(tokenizer=type(self).__name__, vocab_size=self.vocab_size, eod=self.eod)

    def name_of(self, token: int) -> str:
        return str(token)

    def tokenize(self, text: str) -> list[int]:
        raise NotImplementedError

    def encode_with_offsets(self, text: str) -> Encoding:
        """Encode a text without BOS and end-of-document token."""
        raise NotImplementedError

    def decode(self, ids: Sequence[int]) -> str:
        """Return the text of tokens, with special tokens by name."""
        raise NotImplementedError


class ByteLevelTokenizer(Tokenizer):
    """UTF-8 bytes and one end-of-document token; needs no file."""

    def __init__(self) -> None:
        super().__init__(vocab_size=BYTE_LEVEL, eod=BYTE_LEVEL - 1)

    def tokenize(self, text: str) -> list[int]:
        return list(text.encode("utf-8"))

    def encode_with_offsets(self, text: str) -> Encoding:
        return _BytesOfText(text, self.tokenize(text))

    def decode(self, ids: Sequence[int]) -> str:
        pieces = (END_OF_DOCUMENT.encode() if token == self.eod else bytes((token,)) for token in ids)
        return b"".join(pieces).decode("utf-8", errors="replace")


class NullTokenizer(Tokenizer):
    """Token ids as decimal numbers, for mock data and already tokenized data.

    ``eod`` is the token that ends a document in that data; by default the last id.
    """

    def __init__(self, vocab_size: int, eod: int | None = None) -> None:
        super().__init__(vocab_size=vocab_size, eod=vocab_size - 1 if eod is None else eod)

    def tokenize(self, text: str) -> list[int]:
        ids = []
        for word in text.split():
            # Limit the digits: int() refuses numbers of thousands of digits.
            is_number = word.isascii() and word.isdecimal() and len(word) <= len(str(self.vocab_size))
            if not is_number or int(word) >= self.vocab_size:
                raise DataError(
                    f"{word[:40]!r} is not a token id: a NullTokenizer reads numbers from 0 to {self.vocab_size - 1}, "
                    f"separated by spaces. Fix: use a larger vocab_size, or for text {NAME.tokenizer.tokenizer_type}="
                    "ByteLevelTokenizer"
                )
            ids.append(int(word))
        return ids

    def decode(self, ids: Sequence[int]) -> str:
        return " ".join(map(str, ids))


class HuggingFaceTokenizer(Tokenizer):
    """Tokenizer from a ``tokenizer.json`` file or its folder; read from disk only.

    ``add_bos``: whether documents begin with the BOS token; None: if the tokenizer's post-processor adds it.
    """

    def __init__(self, path: str | os.PathLike[str], add_bos: bool | None = None) -> None:
        self.path = Path(path)
        check_regular_files(self.path)
        self._tokenizer = load(self.path)
        ids = self._tokenizer.get_vocab(with_added_tokens=True)
        if not ids:
            raise DataError(
                f"{NAME.tokenizer.tokenizer_model}={path}: the vocabulary is empty. Fix: "
                f"{NAME.tokenizer.tokenizer_model}=PATH (of another tokenizer)"
            )
        end = next((t for t in (special_token(self.path, "eos_token"), *_COMMON_END_TOKENS) if t in ids), None)
        if end is None:
            raise DataError(
                f"{NAME.tokenizer.tokenizer_model}={path}: no end-of-document token. Fix: set eos_token in "
                "tokenizer_config.json beside tokenizer.json"
            )
        self._digest = hashlib.sha256(self._tokenizer.to_str().encode()).hexdigest()[:16]
        # Ids can have gaps: the embedding needs the largest id, not their number.
        super().__init__(max(ids.values()) + 1, ids[end])
        added_before, added_after = added_by_post_processor(self._tokenizer)
        if add_bos is None or (add_bos and added_before):
            self.prefix = added_before
        elif add_bos:
            self.prefix = (self._bos(ids),)
        if added_after[-1:] != (self.eod,):
            added_after += (self.eod,)
        self.suffix = added_after
        if (largest := max(self.prefix + self.suffix)) >= self.vocab_size:
            raise DataError(
                f"{NAME.tokenizer.tokenizer_model}={path}: the post-processor adds token {largest}, but the vocabulary "
                f"ends at {self.vocab_size - 1}. Fix: {NAME.tokenizer.tokenizer_model}=PATH (of another tokenizer)"
            )
        decoder = self._tokenizer.get_added_tokens_decoder()
        self.special_ids = frozenset(token for token, added in decoder.items() if added.special)
        self.has_chat_template = bool(chat_templates(self.path))

    def _bos(self, ids: dict[str, int]) -> int:
        """Return the id of the ``bos_token`` in the tokenizer's files."""
        token = special_token(self.path, "bos_token")
        if token not in ids:
            what = "no file sets bos_token" if token is None else f"bos_token {token} is not in the vocabulary"
            raise DataError(f"{NAME.tokenizer.add_bos}=true: {self.path}: {what}. Fix: {NAME.tokenizer.add_bos}=null")
        return ids[token]

    @property
    def unique_identifiers(self) -> OrderedDict[str, Any]:
        identifiers = OrderedDict(super().unique_identifiers, digest=self._digest)
        if (self.prefix, self.suffix) != ((), (self.eod,)):  # keeps caches of earlier versions valid
            identifiers |= {"prefix": self.prefix, "suffix": self.suffix}
        return identifiers

    def name_of(self, token: int) -> str:
        return self._tokenizer.id_to_token(token) or str(token)

    def tokenize(self, text: str) -> list[int]:
        return self.encode_with_offsets(text).ids

    def encode_with_offsets(self, text: str) -> Encoding:
        return self._tokenizer.encode(text, add_special_tokens=False)

    def decode(self, ids: Sequence[int]) -> str:
        return self._tokenizer.decode(list(ids), skip_special_tokens=False)


def build_tokenizer(config: TokenizerConfig) -> Tokenizer:
    """Build the tokenizer of a run's ``tokenizer`` section.

    Raises:
        DataError: the type is unknown, a setting is missing, or a file is missing or cannot be read.
    """
    match config.tokenizer_type:
        case "HuggingFaceTokenizer":
            if not config.tokenizer_model:
                raise DataError(
                    f"{NAME.tokenizer.tokenizer_model}: is not set, but a HuggingFaceTokenizer needs a tokenizer.json. "
                    f"Fix: {NAME.tokenizer.tokenizer_model}=PATH, or {NAME.tokenizer.tokenizer_type}=ByteLevelTokenizer"
                )
            return HuggingFaceTokenizer(config.tokenizer_model, config.add_bos)
        case "ByteLevelTokenizer":
            return ByteLevelTokenizer()
        case "NullTokenizer":
            size = config.vocab_size
            if size is None or size < 2:
                raise DataError(
                    f"{NAME.tokenizer.vocab_size}={size}: a NullTokenizer needs 2 or more tokens. Fix: "
                    f"{NAME.tokenizer.vocab_size}=256 (or the number of tokens in your data)"
                )
            if config.eod_id is not None and not 0 <= config.eod_id < size:
                raise DataError(
                    f"{NAME.tokenizer.eod_id}={config.eod_id}: must be from 0 to {size - 1}. Fix: "
                    f"{NAME.tokenizer.eod_id}={size - 1}"
                )
            return NullTokenizer(size, config.eod_id)
        case other:
            raise DataError(
                f"{NAME.tokenizer.tokenizer_type}={other}: is unknown. Fix: {NAME.tokenizer.tokenizer_type}="
                "HuggingFaceTokenizer, ByteLevelTokenizer or NullTokenizer"
            )


def train_bpe(texts: Iterable[str], vocab_size: int, out_dir: str | os.PathLike[str]) -> Path:
    """Train a byte-level BPE tokenizer; write it and its config to ``out_dir``.

    Returns ``out_dir``. Files are written under temporary names and renamed, so an interruption leaves no partial
    tokenizer. Byte-level BPE: Radford et al., "Language Models are Unsupervised Multitask Learners" (2019).

    Raises:
        DataError: ``vocab_size`` is too small for the 256 bytes and the end-of-document token.
    """
    from tokenizers import Tokenizer as FastTokenizer
    from tokenizers import decoders, models, pre_tokenizers, trainers

    if vocab_size < 257:
        raise DataError(
            f"vocab_size={vocab_size}: byte-level BPE needs 257 or more (256 bytes, end of document). "
            "Fix: vocab_size=257"
        )
    tokenizer = FastTokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=vocab_size,
        special_tokens=[END_OF_DOCUMENT],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator(texts, trainer)
    folder = Path(out_dir)
    folder.mkdir(parents=True, exist_ok=True)
    with atomic_write(folder / "tokenizer_config.json", folder / "tokenizer.json") as (settings, learned):
        config = {"tokenizer_class": "PreTrainedTokenizerFast", "eos_token": END_OF_DOCUMENT}
        settings.write_text(json.dumps(config, indent=2) + "\n", encoding="utf-8")
        tokenizer.save(str(learned))
    return folder
