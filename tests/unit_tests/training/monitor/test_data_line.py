"""Every run logs one ``data:`` line at its start, for every kind of start."""

from pathlib import Path
from typing import Any

import pytest

from megatron_cp.config.run_config import TokenizerConfig
from megatron_cp.data.text.preprocess import preprocess


@pytest.fixture
def corpus(tmp_path: Path) -> str:
    """Write ten documents of 100 tokens."""
    texts = tmp_path / "texts"
    texts.mkdir()
    for number in range(10):
        (texts / f"{number}.txt").write_text(f"{number}" * 99)
    return preprocess([texts], tmp_path / "corpus", TokenizerConfig("ByteLevelTokenizer")).prefix


def data_lines(text: str) -> list[str]:
    return [line.partition("] ")[2] for line in text.splitlines() if "] data: " in line]


def test_mock_data_is_named_once_by_all_ranks_together(cli: Any) -> None:
    code, text = cli("train.train_iters=2")
    assert code == 0
    assert data_lines(text) == [
        "data: MOCK DATA (random tokens) | 320,000 tokens, all in loss | 10,000 samples | run: <0.001 epochs | "
        "real: dataset.kind=null dataset.data_path=PREFIX"
    ]


def test_real_data_before_and_after_a_resume_and_in_an_evaluation(cli: Any, corpus: str) -> None:
    given = ["dataset.kind=null", f"dataset.data_path={corpus}", "dataset.split='80,20,0'", "validation.eval_iters=1"]
    # Windows of 32 tokens: 99 in four epochs.
    numbers = "corpus | 8 documents | 800 tokens, 792 in loss | 24.8 samples | "
    code, text = cli(*given, "train.train_iters=10")
    assert code == 0 and "repeated" not in text
    (line,) = data_lines(text)
    assert line.endswith(numbers + "run: 0.808 epochs | validation 20%, test 0%")
    # Of smaller batches: 20 samples were taken, 105 are to come.
    longer = ["train.train_iters=115", "train.exit_interval=11", "scheduler.override_opt_param_scheduler=true"]
    code, text = cli(*given, *longer, "train.global_batch_size=1")
    assert code == 0
    (line,) = data_lines(text)
    assert line.endswith("run: 4.24 of 5.05 epochs | validation 20%, test 0%"), line
    assert "is repeated 5.05 times by this run" in text and "Fix: train.train_iters=" in text
    code, text = cli(*given, "train.skip_train=true")
    assert code == 0
    (line,) = data_lines(text)
    assert "corpus | 2 documents | 200 tokens, " in line and "| eval: " in line


def test_packed_answers(cli: Any, tmp_path: Path) -> None:
    (tmp_path / "answers.jsonl").write_text('{"prompt": "12345", "response": "67"}\n' * 3 + '{"text": "12345"}\n')
    code, text = cli(
        "dataset.kind=null",
        f"dataset.data_path={tmp_path}/answers.jsonl",
        "model.sequence_packing_scheduler=dp_balanced",
        "dataset.split='1,0,0'",
        "model.context_parallel_size=1",
        ranks=1,
    )
    assert code == 0
    (line,) = data_lines(text)
    # Each response, and each text but for its first byte, with the end of its document.
    assert line.endswith(
        "answers.jsonl | 4 documents | 30 tokens, 14 in loss | 4 samples | run: 0.5 epochs | none held out"
    )
