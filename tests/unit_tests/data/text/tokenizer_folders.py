"""Folders with a Hugging Face tokenizer and a post-processor.

The post-processor adds special tokens.
"""

import json
from pathlib import Path
from typing import Any

WORDS = "the cat sat on a mat and was fed"
TEMPLATES = {
    "bos": "<s> $A",
    "eos": "$A </s>",
    "both": "<s> $A </s>",
    "none": "$A",
    "bos is eos": "</s> $A",
    "two ends": "<s> $A <sep>",
}
SPECIAL = ["<s>", "</s>", "<sep>", "<user>"]


def make_tokenizer(folder: Path, template: str, model: str = "BPE", **named: Any) -> Path:
    """Write a folder with a tokenizer of the library's own, trained on ``WORDS``.

    ``named`` goes to tokenizer_config.json.
    """
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, processors, trainers

    if model == "BPE":
        tokenizer = Tokenizer(models.BPE())
        tokenizer.pre_tokenizer, tokenizer.decoder = pre_tokenizers.ByteLevel(), decoders.ByteLevel()
        alphabet = pre_tokenizers.ByteLevel.alphabet()
        trainer: Any = trainers.BpeTrainer(special_tokens=SPECIAL, vocab_size=290, initial_alphabet=alphabet)
    else:
        tokenizer = Tokenizer(models.WordLevel(unk_token="<unk>"))
        tokenizer.pre_tokenizer = pre_tokenizers.Whitespace()
        trainer = trainers.WordLevelTrainer(special_tokens=[*SPECIAL, "<unk>"])
    tokenizer.train_from_iterator([WORDS] * 9, trainer)
    used = [(token, tokenizer.token_to_id(token)) for token in SPECIAL if token in template]
    tokenizer.post_processor = processors.TemplateProcessing(single=template, special_tokens=used)
    folder.mkdir()
    tokenizer.save(str(folder / "tokenizer.json"))
    config = {"tokenizer_class": "PreTrainedTokenizerFast", "bos_token": "<s>", "eos_token": "</s>"} | named
    (folder / "tokenizer_config.json").write_text(json.dumps({k: v for k, v in config.items() if v is not None}))
    return folder
