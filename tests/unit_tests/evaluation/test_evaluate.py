"""Evaluations of files against transformers on the same windows, under several layouts."""

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
from megatron_cp.evaluation.samples import EverySample
from megatron_cp.models.layers.predictions import is_most_likely
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
LAYOUTS = {
    "1 rank": (1, ()),
    "dynamic cp": (2, DYNAMIC),
    "cp 4, p2p": (4, ("model.context_parallel_size=4", "model.cp_comm_type=p2p")),
    "tp 2, losses in chunks": (
        2,
        ("model.tensor_model_parallel_size=2", "model.sequence_parallel=true", "model.cross_entropy_chunk_size=16"),
    ),
    "pp 2, dp 2": (4, ("model.pipeline_model_parallel_size=2", "train.global_batch_size=6")),
}
FAST = "dynamic cp"


def write_files(folder: Path) -> list[Path]:
    """Write a file of rows and two texts; return their paths."""
    rows = [{"text": text} for text in TEXTS[:3]] + [{"prompt": "What? ", "response": "Nothing at all."}]
    (folder / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    for name, text in zip(("a.txt", "b.md"), TEXTS[3:], strict=True):
        (folder / name).write_text(text)
    return [folder / name for name in ("rows.jsonl", "a.txt", "b.md")]


def publish_and_import(folder: str) -> None:
    path = Path(folder)
    publish(path / "hf", "llama", vocab_size=VOCABULARY, max_position_embeddings=LENGTH)
    import_model(path / "hf", path / "imported")


def evaluate(folder: str, arguments: list[str]) -> int:
    os.environ["WORLD_SIZE"] = os.environ.get("WORLD_SIZE", "1")
    sys.stdout = sys.stderr = open(Path(folder) / f"log{os.environ['RANK']}", "w")  # noqa: SIM115
    return main(["evaluate", *arguments])


def expected(folder: Path) -> tuple[list[np.ndarray], np.ndarray]:
    """Return transformers' sums of loss, tokens and correct predictions.

    They are by file and by position.
    """
    model = AutoModelForCausalLM.from_pretrained(folder / "hf", dtype=torch.float64, attn_implementation="eager").eval()
    files = [[(text, 0) for text in TEXTS[:3]] + [("What? Nothing at all.", 6)], [(TEXTS[3], 0)], [(TEXTS[4], 0)]]
    by_file, positions = [], np.zeros((8, 3))
    for documents in files:
        total = np.zeros(3)
        for text, prompt in documents:
            ids = [*text.encode(), END]
            for start in range(0, len(ids) - 1, LENGTH):
                window = torch.tensor(ids[start : start + LENGTH + 1])
                with torch.no_grad():
                    logits = model(window[None, :-1]).logits[0]
                losses = torch.nn.functional.cross_entropy(logits, window[1:], reduction="none").numpy()
                right = (logits.argmax(-1) == window[1:]).numpy()
                for k, (loss, is_right) in enumerate(zip(losses, right, strict=True)):
                    if start + k + 1 >= prompt:
                        row = np.array([loss, 1.0, is_right])
                        total += row
                        positions[int(math.log2(k + 1))] += row
        by_file.append(total)
    return by_file, positions


@pytest.fixture(scope="module")
def published(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("published")
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("MEGATRON_CP_TEST_NO_INIT", "1")
        run_ranks(publish_and_import, 1, str(folder))
    return folder


@pytest.fixture
def run(published: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[..., list[int]]:
    """Return ``run(ranks, *arguments)``, which evaluates the imported model.

    It returns the exit codes.
    """
    monkeypatch.setenv("MEGATRON_CP_TEST_NO_INIT", "1")
    monkeypatch.setenv("MASTER_ADDR", "127.0.0.1")

    def call(ranks: int, *arguments: str) -> list[int]:
        monkeypatch.setenv("MASTER_PORT", str(free_port()))
        whole = [f"{published}/imported/recipe.yaml", *arguments, f"checkpoint.save={tmp_path}/run"]
        return run_ranks(evaluate, ranks, str(tmp_path), whole)

    return call


def check_result(path: Path, by_file: list[np.ndarray], positions: np.ndarray) -> None:
    found = json.loads(path.read_text())
    for row, sums in zip([*found["files"], found], [*by_file, sum(by_file)], strict=True):
        assert row["tokens"] == sums[1] and row["accuracy"] == pytest.approx(sums[2] / sums[1], abs=1e-12)
        assert row["loss"] == pytest.approx(sums[0] / sums[1], rel=1e-6)
        assert row["perplexity"] == pytest.approx(math.exp(sums[0] / sums[1]), rel=1e-5)
    classes = {row["after_tokens"][0]: row for row in found["positions"]}
    assert classes.keys() == {2**k for k in range(8) if positions[k, 1]}
    for k in np.flatnonzero(positions[:, 1]).tolist():
        assert classes[2**k]["tokens"] == positions[k, 1]
        assert classes[2**k]["loss"] == pytest.approx(positions[k, 0] / positions[k, 1], rel=1e-6)
    # Bytes of the texts but their first; the end of a document is no text.
    sizes = [len(text.encode()) - 1 for text in TEXTS]
    assert [row.get("bytes") for row in found["files"]] == [sum(sizes[:3]) + 15, None, sizes[4]]
    assert found["bits_per_byte"] == pytest.approx(sum(by_file)[0] / math.log(2) / found["bytes"], rel=1e-6)
    assert found["by_document"]["count"] == 6
    assert sum(each["tokens"] for each in found["by_document"]["documents"]) == found["tokens"]


@pytest.mark.parametrize("name", [pytest.param(n, marks=[] if n == FAST else pytest.mark.slow) for n in LAYOUTS])
def test_files_have_transformers_losses(published: Path, run: Any, tmp_path: Path, name: str) -> None:
    ranks, layout = LAYOUTS[name]
    files = write_files(tmp_path)
    # Later overrides win, so a layout may change the common ones.
    # The run's own data are not read: these have gone, and none were held out.
    gone = ("dataset.kind=null", f"dataset.data_path={tmp_path}/gone", "dataset.split='1,0,0'")
    arguments = [*map(str, files), *gone, *COMMON, *layout]
    assert run(ranks, *arguments) == [0] * ranks, (tmp_path / "log0").read_text()[-2000:]
    folder = tmp_path / "run" / "evaluations"
    assert sorted(path.name for path in folder.iterdir()) == [f"rows-and-2-more-{LENGTH}.{e}" for e in ("json", "png")]
    check_result(folder / f"rows-and-2-more-{LENGTH}.json", *expected(published))
    assert not (tmp_path / "run" / "metrics.jsonl").exists() and not (tmp_path / "run" / "config.yaml").exists()


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["missing.txt"], "missing.txt: no such file or folder"),
        (["empty.txt"], "has no text"),
        (["--needles", "singlo"], "Fix: --needles single"),
        (["--needles", "--lengths", "64"], "is too short for"),
        (["--needles", "single", "a.txt"], "Fix: leave one of them out"),
        (["--lengths", "4K"], "--lengths needs --needles. Fix: add --needles"),
        (["a.txt", "--name", "x/y"], "--name x/y: must be a file name without folders. Fix: --name my_evaluation"),
    ],
)
def test_bad_input_exits_with_two(
    run: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, arguments: list[str], message: str
) -> None:
    write_files(tmp_path)
    (tmp_path / "empty.txt").write_text("")
    monkeypatch.chdir(tmp_path)
    assert run(1, *arguments, *COMMON) == [2]
    assert message in (tmp_path / "log0").read_text()


@pytest.mark.slow
def test_retrieval_is_the_same_on_one_rank_and_four(run: Any, tmp_path: Path) -> None:
    needles = (
        "--needles",
        "single,multi_key:2,variables:2",
        "--lengths",
        "256,320",
        "--samples",
        "2",
        "--depths",
        "0,50",
    )
    more = ("model.max_position_embeddings=320", *COMMON[:2], "train.global_batch_size=4", "logger.tensorboard=false")
    found = {}
    for name, ranks in (("one", 1), ("four", 4)):
        layout = (f"model.context_parallel_size={ranks}", "model.cp_comm_type=p2p")
        assert run(ranks, *needles, "--name", name, *more, *layout) == [0] * ranks, (tmp_path / "log0").read_text()
        found[name] = json.loads((tmp_path / "run" / "evaluations" / f"{name}.json").read_text())
    one, four = found["one"], found["four"]
    assert one["scores"] == four["scores"] and len(one["scores"]) == 2 * (2 + 2 + 1)
    assert one["loss"] == pytest.approx(four["loss"], rel=2e-6) and one["tokens"] == four["tokens"] > 100
    assert (tmp_path / "run" / "evaluations" / "four.png").stat().st_size > 1000


class Lengths:
    """Samples of given lengths, two a document."""

    def __init__(self, *lengths: int) -> None:
        self._lengths = np.array(lengths)
        self.num_documents = -(-len(lengths) // 2)

    def __len__(self) -> int:
        return len(self._lengths)

    def lengths(self, indices: np.ndarray) -> np.ndarray:
        return self._lengths[indices]

    def documents_of(self, indices: np.ndarray) -> np.ndarray:
        return indices // 2

    def __getitem__(self, index: int) -> dict[str, torch.Tensor]:
        length = int(self._lengths[index])
        return {"tokens": torch.zeros(length), "labels": torch.zeros(length), "loss_mask": torch.ones(length)}


def test_each_sample_comes_once_and_then_samples_without_loss() -> None:
    samples = EverySample([Lengths(5, 3, 4), Lengths(), Lengths(7)])
    indices = np.arange(6)
    assert samples.lengths(indices).tolist() == [5, 3, 4, 7, 2, 2]
    assert samples.documents_of(indices).tolist() == [0, 0, 1, 2, 0, 0] and samples.num_documents == 3
    assert [float(samples[i]["loss_mask"].sum()) for i in range(6)] == [5, 3, 4, 7, 0, 0]


def compare_predictions() -> None:
    import torch.distributed as dist

    rank, ranks = dist.get_rank(), dist.get_world_size()
    logits = torch.randn(5, 2, 12, generator=torch.Generator().manual_seed(1))
    labels = logits.argmax(-1).t().clone()
    labels[0, 1], labels[1, 3] = (labels[0, 1] + 1) % 12, (labels[1, 3] + 5) % 12
    own = logits.chunk(ranks, dim=-1)[rank]
    right = is_most_likely(labels, own, dist.group.WORLD)  # type: ignore[arg-type]
    assert torch.equal(right, logits.argmax(-1).t() == labels) and int((~right).sum()) == 2


def test_predictions_of_a_divided_vocabulary() -> None:
    run_ranks(compare_predictions, 3)
