"""Create small valid inputs of every kind with the project's own writers."""

from __future__ import annotations

import gzip
import json
import shutil
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import yaml

from megatron_cp.cli import main
from megatron_cp.config.run_config import TokenizerConfig
from megatron_cp.data.text.preprocess import preprocess
from megatron_cp.data.text.tokenizers import train_bpe
from megatron_cp.rules.environment import PRESETS
from tests.unit_tests.convert.published import publish

TEXT = "It was the best of times, it was the worst of times. Ünïcödé too. "
# One layer of one rank: a step takes milliseconds.
RECIPE: dict[str, Any] = {
    "model": {
        "num_layers": 1,
        "hidden_size": 16,
        "ffn_hidden_size": 32,
        "num_attention_heads": 2,
        "num_query_groups": 1,
        "seq_length": 16,
    },
    "train": {"train_iters": 1, "global_batch_size": 2, "micro_batch_size": 1},
    "dataset": {"kind": "mock", "seq_length": 16},
    "tokenizer": {"tokenizer_type": "ByteLevelTokenizer"},
    "optimizer": {"lr": 1e-3, "min_lr": 1e-4},
    "scheduler": {"lr_decay_style": "constant", "lr_decay_iters": 100},
    "logger": {"progress": "none", "tensorboard": False},
    "dist": {"attention_probe": False},
}
PACKED = [
    "dataset.kind=mock_documents",
    "dataset.mock_lengths=lognormal",
    "dataset.seq_length=64",
    "model.sequence_packing_scheduler=default_dynamic_cp",
    "model.dynamic_context_parallel=true",
    "model.max_seqlen_per_dp_cp_rank=64",
]
PUBLISHED = ("llama", "mixtral window", "qwen3", "deepseek 3", "nemotron 3")


def make(folder: Path) -> None:
    """Fill a folder with one valid input of each kind.

    It trains, so call it in its own process.
    """
    (folder / "recipe.yaml").write_text("# one layer\n" + yaml.safe_dump(RECIPE, sort_keys=False))
    extra = {"optimizer": {"lr": 0.002, "adam_beta1": 0.8}, "train": {"global_batch_size": 4}, "rng": {"seed": 7}}
    (folder / "extra.yaml").write_text(yaml.safe_dump(extra))
    (folder / "environment.yaml").write_text(yaml.safe_dump(vars(PRESETS["gpu"])))
    (folder / "lengths.txt").write_text("\n".join(map(str, range(5, 2000, 37))))
    (folder / "lengths.txt.gz").write_bytes(gzip.compress((folder / "lengths.txt").read_bytes()))
    _texts(folder)
    train_bpe([TEXT] * 20, 300, folder / "tokenizer")
    preprocess([folder / "text.txt", folder / "lines.jsonl"], folder / "data", TokenizerConfig("ByteLevelTokenizer"))
    for variant in PUBLISHED:
        publish(folder / "published" / variant, variant)
        shutil.copytree(folder / "tokenizer", folder / "published" / variant, dirs_exist_ok=True)
    _sharded(folder / "published" / "llama", folder / "published" / "llama in files")
    train(folder, "run", *PACKED, "train.train_iters=4", "profiling.use_pytorch_profiler=true", *_PROFILE)
    shutil.copy(next((folder / "run/profile").glob("*.gz")), folder / "host.json.gz")
    _gpu_trace(folder / "gpu.json")


_PROFILE = ("profiling.profile_step_start=1", "profiling.profile_step_end=2", "checkpoint.save_interval=2")


def train(folder: Path, save: str, *overrides: str) -> None:
    """Train the recipe into a run's folder."""
    code = main(["train", "--recipe", str(folder / "recipe.yaml"), *overrides, f"checkpoint.save={folder / save}"])
    if code:
        raise RuntimeError(f"the example {save} ended with {code}")


def _texts(folder: Path) -> None:
    (folder / "text.txt").write_text(TEXT * 20)
    lines = [{"text": f"{number} {TEXT}", "id": number} for number in range(12)]
    (folder / "lines.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    pairs = [{"prompt": f"{number}?", "response": TEXT} for number in range(12)]
    (folder / "pairs.jsonl").write_text("".join(json.dumps(pair) + "\n" for pair in pairs))


def _sharded(single: Path, folder: Path) -> None:
    """Write the same model with its weights in two files and an index."""
    from safetensors.torch import load_file, save_file

    shutil.copytree(single, folder)
    tensors = load_file(folder / "model.safetensors")
    (folder / "model.safetensors").unlink()
    names, files = sorted(tensors), ("model-00001-of-00002.safetensors", "model-00002-of-00002.safetensors")
    places = {name: files[number % 2] for number, name in enumerate(names)}
    for file in files:
        save_file({name: tensors[name] for name in names if places[name] == file}, folder / file, {"format": "pt"})
    index = {"metadata": {"total_size": 0}, "weight_map": places}
    (folder / "model.safetensors.index.json").write_text(json.dumps(index))


def _gpu_trace(path: Path) -> None:
    def event(category: str, name: str, begin: float, last: float, **arguments: Any) -> dict[str, Any]:
        return {"ph": "X", "cat": category, "name": name, "ts": begin, "dur": last, "tid": 7, "args": arguments}

    events: list[dict[str, Any]] = [{"ph": "M", "name": "process_name"}]
    for step in range(2):
        at = 1000.0 * step
        events += [
            event("user_annotation", f"iteration {step + 2}", at, 1000),
            event("user_annotation", "forward_backward", at, 500),
            event("cuda_runtime", "cudaLaunchKernel", at + 5, 2, correlation=2 * step + 1),
            event("kernel", "nvjet_gemm", at + 10, 300, correlation=2 * step + 1),
            event("cuda_runtime", "cudaLaunchKernel", at + 15, 2, correlation=2 * step + 2),
            event("kernel", "ncclDevKernel_SendRecv", at + 200, 300, correlation=2 * step + 2),
            event("cuda_runtime", "cudaStreamSynchronize", at + 500, 20),
        ]
    path.write_text(json.dumps({"deviceProperties": [{"name": "NVIDIA H200"}], "traceEvents": events}))


def names() -> Sequence[str]:
    """Return the published models, including the one in several files."""
    return (*PUBLISHED, "llama in files")
