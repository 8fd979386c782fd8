"""Datasets and tokenizers."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from megatron_cp.config.setting import DATA, LARGEST, When, equals, given, setting, share, size

MOCK = When(
    "dataset.data_path=null", lambda run: run.dataset.kind in ("mock", "mock_documents"), "dataset.data_path=null"
)
DIVIDES = When(
    "dataset.valid_data_path=null dataset.test_data_path=null",
    lambda run: run.dataset.divides,
    "dataset.valid_data_path=null dataset.test_data_path=null",
)
JSONL = equals("dataset.kind", "jsonl")
# By packing, not by the kind of data: recipes set mock_lengths for users without documents.
PACKED = given("model.sequence_packing_scheduler", "dp_balanced")
HUGGING_FACE = equals("tokenizer.tokenizer_type", "HuggingFaceTokenizer")


@dataclass
class DatasetConfig:
    kind: Literal["indexed", "mock", "documents", "jsonl", "mock_documents"] | None = setting(
        None,
        "one length: indexed (Megatron .bin/.idx), mock; varying length, for packs: documents (.bin/.idx, one "
        "sample each), jsonl (one sample per line of .jsonl or row of .parquet), mock_documents; null: from data_path "
        "and model.sequence_packing_scheduler",
        DATA,
    )
    seq_length: int = size(256, "tokens per sample; with packing, the longest sample", DATA, flags="-sl --seq_length")
    data_path: str | list[str | int | float] | None = setting(
        None,
        "prefix, .jsonl or .parquet file, or a list of them, or of weight, prefix, ...; weights are shares of tokens",
        DATA,
    )
    valid_data_path: str | list[str | int | float] | None = setting(
        None, "files of the validation set; with these or test_data_path, all of data_path is for training", DATA
    )
    test_data_path: str | list[str | int | float] | None = setting(None, "files of the test set", DATA)
    split: str = setting("9999,8,2", "shares of training, validation and test in data_path", DATA, when=DIVIDES)
    path_to_cache: str | None = setting(None, "folder for index files built from the data; null: beside the data")
    random_seed: int = setting(1234, "seed of the sample order", DATA, least=0, most=LARGEST)
    num_workers: int = setting(0, "prefetching processes per rank", least=0)
    eod_mask_loss: bool = setting(False, "mask the loss of end-of-document tokens", DATA)
    reset_position_ids: bool = setting(False, "restart positions at each document of a sample", DATA)
    reset_attention_mask: bool = setting(False, "mask attention across documents of a sample", DATA)
    mock_masked_fraction: float = share(
        0.0, "mock data: fraction of tokens without loss, unevenly over the sequence", DATA, when=MOCK
    )
    mock_num_samples: int = setting(
        10000, "mock data: number of samples; held-out documents are their share of it", DATA, least=1, when=MOCK
    )
    too_long: Literal["split", "keep_start", "keep_end", "refuse"] = setting(
        "split",
        "documents longer than seq_length: split them, keep their first or last seq_length tokens, or refuse with an "
        "error",
        DATA,
        when=PACKED,
    )
    length_mixture: list[int | float] | None = setting(
        None,
        "packed training data: shares of tokens by document length, as share, length, share, ...: [0.4,8192,0.6] draws "
        "40 % from documents below 8192 tokens; null: as the data is",
        DATA,
    )
    mock_lengths: str = setting(
        "lognormal", "mock_documents: name of a distribution, or a file of lengths", DATA, when=PACKED
    )
    text_key: str | None = setting("text", "jsonl: key of a text; all tokens are in the loss", DATA, when=JSONL)
    prompt_key: str | None = setting("prompt", "jsonl: key of a prompt, which is not in the loss", DATA, when=JSONL)
    response_key: str | None = setting("response", "jsonl: key of a response, which is in the loss", DATA, when=JSONL)
    messages_key: str | None = setting(
        "messages", "jsonl: key of a dialogue, a list of messages; conversations is read, too", DATA, when=JSONL
    )
    train_on: Literal["assistant", "last_assistant", "all"] = setting(
        "assistant",
        "jsonl: tokens in the loss, of prompts and responses or dialogues: those of the assistant, of the last answer "
        "only, or all",
        DATA,
        when=JSONL,
    )
    chat_template: str | None = setting(
        None, "jsonl: Jinja file with a chat template; null: the tokenizer's", DATA, when=JSONL
    )
    apply_chat_template: bool = setting(
        False, "jsonl: join prompts and responses by the chat template; dialogues always use it", DATA, when=JSONL
    )
    bad_dialogues: Literal["refuse", "skip"] = setting(
        "refuse",
        "jsonl: dialogues with roles out of order, empty turns or no answer: refuse with an error, or skip",
        DATA,
        when=JSONL,
    )

    @property
    def divides(self) -> bool:
        """Whether ``split`` divides the files of ``data_path``."""
        return self.valid_data_path is None and self.test_data_path is None


@dataclass
class TokenizerConfig:
    tokenizer_type: Literal["HuggingFaceTokenizer", "ByteLevelTokenizer", "NullTokenizer"] = setting(
        "HuggingFaceTokenizer", "from files, one token per byte, or none (data is already tokens)", DATA
    )
    tokenizer_model: str | None = setting(None, "folder or tokenizer.json", DATA, when=HUGGING_FACE)
    vocab_size: int | None = setting(None, "NullTokenizer: number of tokens")
    eod_id: int | None = setting(None, "NullTokenizer: token that ends a document; null: the last one", DATA)
    add_bos: bool | None = setting(
        None,
        "start documents with the BOS token; null: if the tokenizer's post-processor adds it",
        DATA,
        when=HUGGING_FACE,
    )
