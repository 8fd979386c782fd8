"""What preview shows against what was written, and against what ranks read."""

import io
import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import yaml
from megatron.core.datasets.indexed_dataset import IndexedDatasetBuilder
from rich.console import Console

from megatron_cp import cli
from megatron_cp.config.run_config import RunConfig
from megatron_cp.data.batch_iterator import BatchIterator
from megatron_cp.data.samples.datasets import build_datasets
from megatron_cp.data.text.tokenizers import ByteLevelTokenizer, HuggingFaceTokenizer, NullTokenizer, Tokenizer
from megatron_cp.preview.show import StepView
from megatron_cp.preview.step import build_training_data, read_step
from megatron_cp.preview.text import pieces_of
from megatron_cp.rules import Environment
from megatron_cp.rules.remedies import Case
from tests.training_runs import tiny_config
from tests.unit_tests.data.text.tokenizer_folders import TEMPLATES, make_tokenizer

BYTES = ByteLevelTokenizer()
EOD = "<|endoftext|>"
PAIRS = {f"Wie heißt {name}? ": name * (i + 1) for i, name in enumerate(("Jürgen", "Ωmega", "日本", "x", "Zoë"))}
PACKED = [
    "llama_tiny_dynamic_cp_pretrain_config",
    "dataset.seq_length=256",
    "tokenizer.tokenizer_type=ByteLevelTokenizer",
]


@pytest.fixture
def preview(capsys: pytest.CaptureFixture[str]) -> Any:
    def call(*arguments: str) -> tuple[int, str, str]:
        code = cli.main(["preview", *arguments])
        captured = capsys.readouterr()
        return code, captured.out, captured.err

    return call


@pytest.fixture
def pairs(tmp_path: Path) -> str:
    lines = [json.dumps({"prompt": prompt, "response": response}) for prompt, response in PAIRS.items()]
    (tmp_path / "pairs.jsonl").write_text("\n".join(lines) + "\n")
    return str(tmp_path / "pairs.jsonl")


def learned(sample: dict[str, Any]) -> str:
    return "".join(piece["text"] for piece in sample["pieces"] if piece["learned"])


def test_a_step_of_pairs(preview: Any, pairs: str) -> None:
    batch = ["train.global_batch_size=10", "--step", "3", "--samples", "10"]
    code, out, err = preview(*PACKED, f"dataset.data_path={pairs}", *batch, "--json")
    assert code == 0 and "5 documents tokenized" in err and "data: " in err
    shown = json.loads(out)
    samples = shown["samples"]
    assert [sample["sample"] for sample in samples] == list(range(20, 30))
    whole = {"".join(piece["text"] for piece in sample["pieces"]): learned(sample) for sample in samples}
    assert whole == {f"{prompt}{response}{EOD}": f"{response}{EOD}" for prompt, response in PAIRS.items()}
    assert all(list(PAIRS)[sample["documents"][0]] in sample["pieces"][0]["text"] for sample in samples)
    groups = [group for groups in shown["microbatches"] for group in groups]
    assert sorted(number for group in groups for number in group["samples"]) == list(range(20, 30))
    assert all(len(group["ranks"]) == group["cp_size"] for group in groups)
    summary = shown["summary"]
    assert summary["tokens"] == 2 * sum(len((p + r).encode()) for p, r in PAIRS.items())
    assert summary["loss_tokens"] == 2 * sum(len(r.encode()) + 1 for r in PAIRS.values())
    code, out, _ = preview(*PACKED, f"dataset.data_path={pairs}", *batch)
    assert code == 0 and f"Wie heißt Zoë? ⟦ZoëZoëZoëZoëZoë{EOD}⟧" in out
    assert f"step: 10 samples, {summary['tokens']:,} tokens, {summary['loss_tokens']:,} in the loss" in out


def case_of(config: RunConfig, world_size: int) -> Case:
    return Case(config, world_size, None, Environment.of("cpu"))


def test_ranks_of_samples_of_one_length_and_their_documents(tmp_path: Path) -> None:
    """Ranks must get the samples that BatchIterator gives them.

    Documents have two sequences each, and two files are blended.
    """
    written, rng = {}, np.random.default_rng(0)
    for name in ("a", "b"):
        prefix = str(tmp_path / name)
        builder = IndexedDatasetBuilder(f"{prefix}.bin", dtype=np.uint16)
        written[prefix] = [np.append(rng.integers(0, 254, rng.integers(20, 90)), 254) for _ in range(40)]
        for tokens in written[prefix]:
            builder.add_document(tokens, [7, len(tokens) - 7])
        builder.finalize(f"{prefix}.idx")
    config = tiny_config(
        dataset__kind="indexed",
        dataset__data_path=[0.3, str(tmp_path / "a"), 0.7, str(tmp_path / "b")],
        dataset__split="1,0,0",
        train__global_batch_size=16,
        train__micro_batch_size=2,
        model__context_parallel_size=2,
        model__tensor_model_parallel_size=2,
    )
    case, tokenizer = case_of(config, 8), NullTokenizer(255, 254)
    train = build_training_data(case, tokenizer, 25).train
    assert train is not None
    seen = read_step(case, train, 25, num_kept=16)  # in a later epoch
    assert [sample.number for sample in seen.samples] == list(range(384, 400))
    for rank, ranks in enumerate([[0, 1, 2, 3], [4, 5, 6, 7]]):
        sizes: Any = {
            "micro_batch_size": 2,
            "global_batch_size": 16,
            "data_parallel_rank": rank,
            "data_parallel_size": 2,
        }
        batches = BatchIterator(train, **sizes, consumed_samples=384)
        assert len(seen.schedule.microbatches) == batches.num_microbatches
        for groups in seen.schedule.microbatches:
            assert seen.ranks(groups[rank]) == ranks and seen.padding(groups[rank]) == 0
            labels = [seen.samples[i].ids[1:].tolist() for i in groups[rank].sample_ids]  # type: ignore[index]
            assert labels == next(batches)["labels"].tolist()
    starts = 0
    for sample in seen.samples:
        document, start = written[sample.origin.name][sample.origin.documents[0]], sample.origin.start
        text = document[start : 7 if start < 7 else None][:33]  # megatron-core shuffles sequences, not documents
        assert sample.ids is not None and sample.ids[: len(text)].tolist() == text.tolist()
        starts += sample.origin.start > 7
        pieces = pieces_of(sample.ids, sample.learned, tokenizer, None, has_documents=True)  # type: ignore[arg-type]
        assert sum(piece.ends for piece in pieces) == int((sample.ids[:-1] == 254).sum())
    assert starts > 3 and len({sample.origin.name for sample in seen.samples}) == 2


def split(text: str, marks: str, tokenizer: Tokenizer, most: int | None = None) -> list[tuple[str, bool | None]]:
    """Split a text into pieces whose tokens at ``1`` are learned."""
    ids = np.array(tokenizer.tokenize(text))
    flags = np.array([mark == "1" for mark in marks]) if marks else np.arange(len(ids)) >= len(ids) // 2
    return [piece[:2] for piece in pieces_of(ids, flags, tokenizer, most, has_documents=False)]


def test_text_is_decoded_where_the_mask_changes(tmp_path: Path) -> None:
    assert split("aé日z", "0111111", BYTES) == [("a", False), ("é日z", True)]
    assert split("é", "01", BYTES) == [("�", False), ("�", True)], "a border within a character"
    assert split("7 8 9", "001", NullTokenizer(10)) == [("7 8", False), (" 9", True)]
    from tokenizers import Tokenizer as FastTokenizer
    from tokenizers import decoders, pre_tokenizers

    folder = make_tokenizer(tmp_path / "words", TEMPLATES["bos"], model="words")
    spaces = FastTokenizer.from_file(str(folder / "tokenizer.json"))
    spaces.pre_tokenizer, spaces.decoder = pre_tokenizers.Metaspace(), decoders.Metaspace()
    spaces.add_tokens(["▁the", "▁cat", "▁sat"])
    spaces.save(str(folder / "tokenizer.json"))
    tokenizer = HuggingFaceTokenizer(folder)
    ids = [tokenizer._tokenizer.token_to_id(word) for word in ("<s>", "▁the", "▁cat", "▁sat", "</s>")]
    pieces = pieces_of(np.array(ids), np.array([0, 0, 0, 1, 1], bool), tokenizer, None, has_documents=False)
    assert [piece.text for piece in pieces] == ["<s> the cat", " sat</s>"], "the space before a piece is kept"


def test_long_samples_are_shortened_in_the_middle_of_each_piece() -> None:
    text = "p" * 500 + "r" * 300
    flags = "0" * 500 + "1" * 300
    assert split(text, flags, BYTES, 40) == [
        ("p" * 10, False),
        ("480 tokens, 0 in the loss", None),
        ("p" * 10, False),
        ("r" * 10, True),
        ("280 tokens, 280 in the loss", None),
        ("r" * 10, True),
    ]
    assert split(text, flags, BYTES, 800) == split(text, flags, BYTES) == [("p" * 500, False), ("r" * 300, True)]
    turns = split("ab" * 400, "01" * 400, BYTES, 64)
    assert turns == [("a", False), ("b", True), ("796 tokens, 398 in the loss", None), ("a", False), ("b", True)]


def shown_on(console: Console, pairs: str) -> str:
    config = tiny_config(
        dataset__kind="jsonl",
        dataset__data_path=pairs,
        dataset__split="1,0,0",
        model__sequence_packing_scheduler="dp_balanced",
        dataset__seq_length=256,
        train__global_batch_size=2,
    )
    train = build_datasets(config.dataset, BYTES, 2).train
    step = read_step(case_of(config, 1), train, 1, num_kept=2)
    StepView(step, BYTES, None, is_packed=True).print(console)
    assert isinstance(console.file, io.StringIO)
    return console.file.getvalue()


def test_colours_on_a_terminal_and_brackets_without(pairs: str, monkeypatch: pytest.MonkeyPatch) -> None:
    settings: dict[str, Any] = {"force_terminal": True, "color_system": "standard", "highlight": False}
    monkeypatch.delenv("NO_COLOR", raising=False)
    coloured = shown_on(Console(file=io.StringIO(), **settings), pairs)
    assert "\x1b[1;32m" in coloured and "⟦" not in coloured
    monkeypatch.setenv("NO_COLOR", "1")
    plain = shown_on(Console(file=io.StringIO(), **settings), pairs)
    assert "⟦" in plain and "32m" not in plain


def test_control_characters_of_a_text_are_escaped(preview: Any, tmp_path: Path) -> None:
    (tmp_path / "bad.jsonl").write_text(json.dumps({"text": "a\x1b[2Jb\nc [bold]d[/bold]"}) + "\n")
    code, out, _ = preview(*PACKED, f"dataset.data_path={tmp_path / 'bad.jsonl'}")
    assert code == 0 and "\x1b" not in out and "\\x1b[2Jb\n      c [bold]d[/bold]" in out


def test_other_kinds_and_a_run_folder(preview: Any, tmp_path: Path) -> None:
    code, out, _ = preview(*PACKED, "--samples", "0", "--world-size", "8", "train.global_batch_size=4")
    assert code == 0 and "on 8 ranks" in out and "step: 4 samples" in out and "sample 0:" not in out
    assert "the run may choose other groups after it measured 10 iterations" in out
    settings = {"dataset": {"kind": "mock", "seq_length": 64}, "train": {"global_batch_size": 2}, "recipe": "mine"}
    (tmp_path / "config.yaml").write_text(
        yaml.safe_dump(settings | {"tokenizer": {"tokenizer_type": "ByteLevelTokenizer"}})
    )
    code, out, _ = preview(str(tmp_path), "--step", "7", "--full")
    assert code == 0 and out.startswith("mine: step 7 of ") and "sample 13: mock, document" in out


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ([*PACKED, "dataset.data_path=missing.jsonl"], "missing.jsonl"),
        ([*PACKED, "--step", "0"], "argument --step: 0: must be at least 1"),
        ([*PACKED, "--width", "x"], "argument --width: invalid number value: 'x'"),
        ([*PACKED, "dataset.kind=indexed"], "error K25"),
        ([], "no recipe is given"),
    ],
)
def test_bad_input(preview: Any, arguments: list[str], message: str) -> None:
    code, out, err = preview(*arguments)
    assert code == 2 and message in err and not out and "Traceback" not in err
