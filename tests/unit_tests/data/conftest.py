"""Small indexed corpora."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from megatron_cp.config.run_config import RunConfig, TokenizerConfig
from megatron_cp.data.text.preprocess import preprocess
from tests.unit_tests.data.text.tokenizer_folders import TEMPLATES, WORDS, make_tokenizer


@pytest.fixture
def corpus(tmp_path: Path) -> Callable[..., str]:
    """Return ``corpus(name, documents)``, which writes documents of letters.

    It returns the prefix of their .bin/.idx pair.
    """

    def make(name: str = "corpus", documents: int = 40, letters: str = "abcdefghijklm") -> str:
        rng = np.random.default_rng(0)
        source = tmp_path / f"{name}-source"
        source.mkdir()
        for number in range(documents):
            text = "".join(rng.choice(list(letters), rng.integers(50, 150)))
            (source / f"{number:03}.txt").write_text(text)
        return preprocess([source], tmp_path / name, TokenizerConfig("ByteLevelTokenizer")).prefix

    return make


@pytest.fixture
def config() -> RunConfig:
    config = RunConfig()
    config.tokenizer.tokenizer_type = "ByteLevelTokenizer"
    config.dataset.seq_length = 32
    config.dataset.split = "80,20,0"
    return config


@pytest.fixture
def prepared(tmp_path: Path) -> Callable[..., tuple[str, TokenizerConfig]]:
    """Return ``prepared(template)``, which writes four documents in that form.

    It returns their prefix and the settings that made them.
    """

    def make(template: str = "bos", *, name: str = "corpus", **settings: Any) -> tuple[str, TokenizerConfig]:
        folder = tmp_path / f"tokenizer-{template}"
        config = TokenizerConfig(
            tokenizer_model=str(folder if folder.exists() else make_tokenizer(folder, TEMPLATES[template])), **settings
        )
        (tmp_path / "in.jsonl").write_text("".join(json.dumps({"text": t}) + "\n" for t in (WORDS, "a", "on", WORDS)))
        return preprocess([tmp_path / "in.jsonl"], tmp_path / name, config).prefix, config

    return make
