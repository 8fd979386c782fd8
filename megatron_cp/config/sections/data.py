"""Samples and tokens."""

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
# Not by the kind of data: a recipe's mock_lengths are there for who has no documents yet.
OWN_LENGTHS = given("model.sequence_packing_scheduler", "dp_balanced")
HUGGING_FACE = equals("tokenizer.tokenizer_type", "HuggingFaceTokenizer")


@dataclass
class DatasetConfig:
    kind: Literal["indexed", "mock", "documents", "jsonl", "mock_documents"] | None = setting(
        None,
        "fixed lengths: indexed (Megatron .bin/.idx), mock; own lengths, for packs: documents (.bin/.idx, a sample "
        "each), jsonl (a sample a line), mock_documents; null: by data_path and model.sequence_packing_scheduler",
        DATA,
    )
    seq_length: int = size(
        256, "tokens of a sample; the most, where samples have their own lengths", DATA, flags="-sl --seq_length"
    )
    data_path: str | list[str | int | float] | None = setting(
        None,
        "prefix or .jsonl file, or a list of them, or of weight, prefix, ...; weights are shares of tokens",
        DATA,
    )
    valid_data_path: str | list[str | int | float] | None = setting(
        None, "files of the validation set; with them or the next, data_path is all for training", DATA
    )
    test_data_path: str | list[str | int | float] | None = setting(None, "files of the test set", DATA)
    split: str = setting("9999,8,2", "how data_path is divided into training, validation and test", DATA, when=DIVIDES)
    path_to_cache: str | None = setting(
        None, "folder of the index files that are made of the data; null: beside the data"
    )
    random_seed: int = setting(1234, "of the order of samples", DATA, least=0, most=LARGEST)
    num_workers: int = setting(0, "processes per rank that read ahead", least=0)
    eod_mask_loss: bool = setting(False, "tokens that end documents are not in the loss", DATA)
    reset_position_ids: bool = setting(False, "positions begin anew with each document of a sample", DATA)
    reset_attention_mask: bool = setting(False, "a document of a sample does not see those before it", DATA)
    mock_masked_fraction: float = share(
        0.0, "of mock data: this share of tokens is not in the loss, unevenly over the sequence", DATA, when=MOCK
    )
    mock_num_samples: int = setting(10000, "of mock data: samples", DATA, least=1, when=MOCK)
    too_long: Literal["split", "refuse"] = setting(
        "split", "what becomes of documents that are longer", DATA, when=OWN_LENGTHS
    )
    mock_lengths: str = setting(
        "lognormal", "of mock_documents: a distribution by name, or a file of lengths", DATA, when=OWN_LENGTHS
    )
    text_key: str | None = setting("text", "jsonl: the key of a text; the loss is over all of it", DATA, when=JSONL)
    prompt_key: str | None = setting("prompt", "jsonl: the key of a prompt, which is not in the loss", DATA, when=JSONL)
    response_key: str | None = setting(
        "response", "jsonl: the key of a response, which is in the loss", DATA, when=JSONL
    )

    @property
    def divides(self) -> bool:
        """Whether ``split`` divides the files of ``data_path``: no part has files of its own."""
        return self.valid_data_path is None and self.test_data_path is None


@dataclass
class TokenizerConfig:
    tokenizer_type: Literal["HuggingFaceTokenizer", "ByteLevelTokenizer", "NullTokenizer"] = setting(
        "HuggingFaceTokenizer", "from files, one token a byte, or none: data that is tokens already", DATA
    )
    tokenizer_model: str | None = setting(None, "a folder or a tokenizer.json", DATA, when=HUGGING_FACE)
    vocab_size: int | None = setting(None, "of NullTokenizer")
    eod_id: int | None = setting(None, "of NullTokenizer: the token that ends a document; null: the last one", DATA)
    add_bos: bool | None = setting(
        None,
        "documents begin with the BOS token; null: where the tokenizer's post-processor adds it",
        DATA,
        when=HUGGING_FACE,
    )
