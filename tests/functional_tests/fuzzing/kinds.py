"""Kinds of input: the example of a case, its change, and the command.

The command reads the changed example.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

from tests.functional_tests.fuzzing.arguments import flags, overrides
from tests.functional_tests.fuzzing.case import WRITES, Case, checked_or_trained
from tests.functional_tests.fuzzing.examples import PACKED, names


def recipe(case: Case) -> list[str]:
    path = case.take("recipe.yaml")
    case.change(path)
    return checked_or_trained(case, "--recipe", str(path))


def config(case: Case) -> list[str]:
    recipe, extra = case.take("recipe.yaml"), case.take("extra.yaml")
    case.change(extra)
    return checked_or_trained(case, "--recipe", str(recipe), "--config", str(extra))


def environment(case: Case) -> list[str]:
    path = case.take("environment.yaml")
    case.change(path)
    return ["validate", "--recipe", str(case.take("recipe.yaml")), "--environment", str(path)]


def _trained(case: Case, *overrides: str) -> list[str]:
    return ["train", "--recipe", str(case.take("recipe.yaml")), *WRITES, *overrides]


def indexed(case: Case) -> list[str]:
    idx, data = case.take("data.idx"), case.take("data.bin")
    case.change_some([case.work / each for each in case.rng.choice([(idx,), (idx,), (data,), (idx, data)])])
    match case.rng.randrange(4):
        case 0:
            return ["schedule", "--lengths", str(idx), "--ranks", "4"]
        case 1:
            return _trained(case, *PACKED, "dataset.kind=documents", "dataset.data_path=input/data")
        case _:
            return _trained(case, "dataset.kind=indexed", "dataset.data_path=input/data", "dataset.split='1,0,0'")


def _preprocessed(case: Case, *inputs: Path, tokenizer: Path | None = None) -> list[str]:
    how = ["--tokenizer-type", "ByteLevelTokenizer"] if tokenizer is None else ["--tokenizer-model", str(tokenizer)]
    return ["preprocess", "--input", *map(str, inputs), "--output-prefix", "out/data", "--workers", "1", *how]


def lines(case: Case) -> list[str]:
    preprocessed = case.rng.random() < 0.5
    path = case.take("lines.jsonl" if preprocessed else case.rng.choice(["lines.jsonl", "pairs.jsonl"]))
    case.change(path)
    if preprocessed:
        return _preprocessed(case, path)
    return _trained(case, *PACKED, "dataset.kind=jsonl", f"dataset.data_path={path}")


def text(case: Case) -> list[str]:
    path = case.take("text.txt")
    case.change(path)
    return _preprocessed(case, path if case.rng.random() < 0.7 else path.parent)


def tokenizer(case: Case) -> list[str]:
    folder = case.take("tokenizer")
    case.change_some(case.files(folder, "*"))
    if case.rng.random() < 0.5:
        return _preprocessed(case, case.take("text.txt"), tokenizer=folder)
    named = ["tokenizer.tokenizer_type=HuggingFaceTokenizer", f"tokenizer.tokenizer_model={folder}"]
    return _trained(case, *named)


def published(case: Case) -> list[str]:
    folder = case.take(f"published/{case.rng.choice(names())}")
    weights = "*.safetensors*"
    case.change_some(case.files(folder, *case.rng.choice([("config.json",), (weights,), ("*",)])))
    return ["convert", "import", "--hf-model", str(folder), "--megatron-path", "out/new"]


def _resumed(case: Case) -> list[str]:
    return ["train", "--recipe", str(case.take("recipe.yaml")), *PACKED, "checkpoint.save=out/run", "-ms", "5"]


def run_folder(case: Case) -> list[str]:
    """Return the files of a run beside its checkpoints."""
    folder = case.take("run", "out" if (resumed := case.rng.random() < 0.3) else "input")
    if resumed:
        case.change_some(case.files(folder, "*"))
        return _resumed(case)
    match case.rng.randrange(4):
        case 0:
            case.change_some(case.files(folder, "schedules.jsonl"))
            return ["schedule", "--from-run", str(folder)]
        case 1:
            case.change_some(case.files(folder, "config.yaml"))
            return ["validate", "--recipe", str(folder / "config.yaml")]
        case _:
            case.change_some(case.files(folder, "metrics.jsonl", "config.yaml"))
            drawn = case.rng.choice([[], [], ["--html", "out/report.html"], ["--png", "out/report.png"]])
            return ["report", str(folder), *drawn]


def checkpoint(case: Case) -> list[str]:
    resumed = case.rng.random() < 0.6
    folder = case.take("run", "out" if resumed else "input")
    case.change_some(case.files(folder, "iter_0000004/*", "iter_0000004/.*"))
    if resumed:
        return _resumed(case)
    return ["convert", "export", "--megatron-path", str(folder), "--hf-path", "out/new"]


def profile(case: Case) -> list[str]:
    path = case.take(case.rng.choice(["gpu.json", "gpu.json", "host.json.gz"]))
    case.change(path)
    return ["profile", str(path)]


def lengths(case: Case) -> list[str]:
    path = case.take(case.rng.choice(["lengths.txt", "lengths.txt.gz"]))
    case.change(path)
    if case.rng.random() < 0.2:
        return _trained(case, *PACKED, f"dataset.mock_lengths={path}")
    return ["schedule", "--lengths", str(path), "--ranks", "4", "--max-seqlen-per-rank", "1024"]


KINDS: dict[str, Callable[[Case], list[str]]] = {
    each.__name__: each
    for each in (
        *(recipe, config, overrides, flags, environment, indexed, lines, text, tokenizer),
        *(published, run_folder, checkpoint, profile, lengths),
    )
}
