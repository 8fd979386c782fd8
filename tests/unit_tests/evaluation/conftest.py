"""Small published models, files, and their losses by transformers."""

import json
import math
import os
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from transformers import AutoModelForCausalLM

from megatron_cp.cli import main
from megatron_cp.convert.importing import import_model
from tests.ranks import free_port, run_ranks
from tests.unit_tests.convert.published import publish

LENGTH, VOCABULARY, END = 48, 260, 256
TEXTS = ["The cat sat on a mat and was fed. " * 5, "naïve 😀 words", "x" * 48, "a", "On and on it went. " * 3]
COMMON = (
    "tokenizer.tokenizer_type=ByteLevelTokenizer",
    "tokenizer.vocab_size=null",
    f"dataset.seq_length={LENGTH}",
    "train.global_batch_size=4",
    "logger.tensorboard=false",
)
DYNAMIC = ("model.dynamic_context_parallel=true", "model.max_seqlen_per_dp_cp_rank=24", "model.context_parallel_size=2")


def write_files(folder: Path) -> list[Path]:
    """Write a file of rows and two texts; return their paths."""
    rows = [{"text": text} for text in TEXTS[:3]] + [{"prompt": "What? ", "response": "Nothing at all."}]
    (folder / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    for name, text in zip(("a.txt", "b.md"), TEXTS[3:], strict=True):
        (folder / name).write_text(text)
    return [folder / name for name in ("rows.jsonl", "a.txt", "b.md")]


def publish_and_import(folder: str, variant: str) -> None:
    path = Path(folder)
    publish(path / "hf", variant, vocab_size=VOCABULARY)
    import_model(path / "hf", path / "imported")


def publish_in_a_rank(folder: Path, variant: str) -> Path:
    """Make and import a small random model of a family."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("MEGATRON_CP_TEST_NO_INIT", "1")
        run_ranks(publish_and_import, 1, str(folder), variant)
    return folder


def call_main(folder: str, arguments: list[str]) -> int:
    os.environ["WORLD_SIZE"] = os.environ.get("WORLD_SIZE", "1")
    sys.stdout = sys.stderr = open(Path(folder) / f"log{os.environ['RANK']}", "w")  # noqa: SIM115
    return main(arguments)


def documents_of_files() -> list[list[tuple[str, int]]]:
    """Return texts of :func:`write_files`, and the bytes of their prompts."""
    rows = [(text, 0) for text in TEXTS[:3]] + [("What? Nothing at all.", 6)]
    return [rows, [(TEXTS[3], 0)], [(TEXTS[4], 0)]]


def published_model(folder: Path) -> Any:
    """Load transformers' model of :func:`publish_and_import` in float64."""
    plain = {
        "attn_implementation": "eager",
        "experts_implementation": "eager",
    }  # torch's grouped products have no float64
    return AutoModelForCausalLM.from_pretrained(folder / "hf", dtype=torch.float64, **plain).eval()


def predictions_of(model: Any, ids: list[int]) -> tuple[np.ndarray, np.ndarray]:
    """Return loss and correctness of the prediction of each token but the first."""
    window = torch.tensor(ids)
    with torch.no_grad():
        logits = model(window[None, :-1]).logits[0].double()
    losses = torch.nn.functional.cross_entropy(logits, window[1:], reduction="none")
    return losses.numpy(), (logits.argmax(-1) == window[1:]).numpy()


def expected(folder: Path) -> tuple[list[np.ndarray], np.ndarray]:
    """Return sums of loss, tokens and correct predictions from transformers.

    By file a table [documents, 3], and a table by position.
    """
    model = published_model(folder)
    by_file, positions = [], np.zeros((8, 3))
    for documents in documents_of_files():
        total = np.zeros((len(documents), 3))
        for number, (text, prompt) in enumerate(documents):
            ids = [*text.encode(), END]
            for start in range(0, len(ids) - 1, LENGTH):
                predictions = zip(*predictions_of(model, ids[start : start + LENGTH + 1]), strict=True)
                for k, (loss, is_right) in enumerate(predictions):
                    if start + k + 1 >= prompt:
                        row = np.array([loss, 1.0, is_right])
                        total[number] += row
                        positions[int(math.log2(k + 1))] += row
        by_file.append(total)
    return by_file, positions


@pytest.fixture(scope="session")
def published(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return publish_in_a_rank(tmp_path_factory.mktemp("published"), "llama")


@pytest.fixture
def run(published: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[..., list[int]]:
    """Return ``run(ranks, *arguments)``: it evaluates the model, with exit codes.

    Other commands and models by keyword.
    """
    monkeypatch.setenv("MEGATRON_CP_TEST_NO_INIT", "1")
    monkeypatch.setenv("MASTER_ADDR", "127.0.0.1")

    def call(ranks: int, *arguments: str, command: str = "evaluate", model: Path = published) -> list[int]:
        monkeypatch.setenv("MASTER_PORT", str(free_port()))
        begin = ["train", "--recipe"] if command == "train" else [command]
        whole = [*begin, f"{model}/imported/recipe.yaml", *arguments, f"checkpoint.save={tmp_path}/run"]
        return run_ranks(call_main, ranks, str(tmp_path), whole)

    return call
