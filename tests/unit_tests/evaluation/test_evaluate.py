"""Evaluations of files against transformers on the same windows.

They run under several layouts.
"""

import json
import math
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from megatron_cp.models.layers.predictions import is_most_likely
from megatron_cp.training.held_out.samples import EverySample
from tests.ranks import run_ranks
from tests.unit_tests.evaluation.conftest import (
    COMMON,
    DYNAMIC,
    LENGTH,
    TEXTS,
    expected,
    publish_in_a_rank,
    write_files,
)

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
FAMILY_LAYOUTS = {
    "1 rank": (1, ()),
    "dynamic cp": (2, DYNAMIC),
    "cp 2, p2p": (2, ("model.context_parallel_size=2", "model.cp_comm_type=p2p")),
}
SPREAD_EXPERTS = {
    "ep 2, dp 2": (2, ("model.expert_model_parallel_size=2",)),
    "ep 2, dynamic cp": (2, (*DYNAMIC, "model.expert_model_parallel_size=2")),
}
HYBRID_STAGES = {
    "tp 2, pp 2": (
        4,
        (
            "model.tensor_model_parallel_size=2",
            "model.sequence_parallel=true",
            "model.pipeline_model_parallel_size=2",
        ),
    ),
}
# Mamba layers, Mamba layers with experts, and experts with full, windowed and latent attention.
FAMILIES = {
    "nemotron h": FAMILY_LAYOUTS | HYBRID_STAGES,
    "nemotron 3": FAMILY_LAYOUTS | SPREAD_EXPERTS | HYBRID_STAGES,
    "mixtral": FAMILY_LAYOUTS | SPREAD_EXPERTS,
    "qwen3 experts": FAMILY_LAYOUTS | SPREAD_EXPERTS,
    "gpt oss": FAMILY_LAYOUTS | SPREAD_EXPERTS,
    "deepseek 3": FAMILY_LAYOUTS | SPREAD_EXPERTS,
}


def check_result(path: Path, by_file: list[np.ndarray], positions: np.ndarray) -> None:
    found, files = json.loads(path.read_text()), [table.sum(axis=0) for table in by_file]
    for row, sums in zip([*found["files"], found], [*files, sum(files)], strict=True):
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
    assert found["bits_per_byte"] == pytest.approx(sum(files)[0] / math.log(2) / found["bytes"], rel=1e-6)
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


@pytest.mark.slow
@pytest.mark.parametrize("variant", FAMILIES)
def test_families_have_transformers_losses(run: Any, tmp_path: Path, variant: str) -> None:
    model, files = publish_in_a_rank(tmp_path / "model", variant), write_files(tmp_path)
    sums = expected(model)
    for name, (ranks, layout) in FAMILIES[variant].items():
        arguments = [*map(str, files), *COMMON, "train.global_batch_size=6", "--name", name.replace(",", ""), *layout]
        assert run(ranks, *arguments, model=model) == [0] * ranks, (tmp_path / "log0").read_text()[-2000:]
        check_result(tmp_path / "run" / "evaluations" / f"{name.replace(',', '')}.json", *sums)


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
