"""A published model is the same model here, and again after export.

This is tested under every layout.
"""

import functools
import os
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from megatron_cp.cli import main
from megatron_cp.config.recipes import load_recipe
from megatron_cp.config.run_config import RunConfig
from megatron_cp.data.samples.datasets import build_datasets
from megatron_cp.data.text.tokenizers import build_tokenizer
from megatron_cp.parallel.device import start_distributed, stop_distributed
from megatron_cp.training.checkpoint.saver import load_checkpoint
from megatron_cp.training.step import train_step
from tests.ranks import run_ranks
from tests.training_runs import start
from tests.unit_tests.convert.published import SHAPE, VARIANTS, publish, published_losses


def start_alone(config: RunConfig) -> None:
    os.environ.pop("RANK", None)
    start_distributed(config.dist)


def convert(*arguments: Any) -> None:
    assert main(["convert", *map(str, arguments)]) == 0


def import_from(folder: Path) -> None:
    convert("import", "--hf-model", folder / "hf", "--megatron-path", folder / "mcore")


def export_to(folder: Path, name: str, *options: Any) -> None:
    convert("export", "--megatron-path", folder / "mcore", "--hf-path", folder / name, *options)


def recipe_of(folder: Path, *overrides: str) -> RunConfig:
    """Return the imported recipe on mock data with uneven loss masks, in float32."""
    usual = ("dataset.seq_length=32", "dataset.mock_masked_fraction=0.4", "train.train_iters=1")
    batch = ("train.global_batch_size=4", "logger.progress=none", f"checkpoint.save={folder}/run")
    return load_recipe(folder / "mcore" / "recipe.yaml", [*usual, *batch, "mixed_precision=fp32", *overrides])


def losses_here(folder: Path, tokens: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
    """Compute per-token losses ``[b, s]`` of the imported model at a run's start."""
    config = recipe_of(folder)
    start_alone(config)
    run, _ = start(config)
    load_checkpoint(run, folder / "mcore", 0, finetune=True)
    model = run.model[0].eval()
    positions = torch.arange(tokens.shape[1]).expand_as(tokens)
    with torch.no_grad():
        losses = model(tokens, positions, None, labels=labels)
    run.close()
    stop_distributed()
    return losses


def there_and_back(folder: str, variant: str) -> tuple[torch.Tensor, torch.Tensor, dict[str, Any], dict[str, Any]]:
    path = Path(folder)
    publish(path / "hf", variant)
    tokens, labels = torch.randint(SHAPE["vocab_size"], (2, 3, 40), generator=torch.Generator().manual_seed(1))
    theirs = published_losses(path / "hf", tokens, labels)
    import_from(path)
    ours = losses_here(path, tokens, labels)
    export_to(path, "out")
    again = published_losses(path / "out", tokens, labels)
    assert torch.equal(again, theirs)
    return ours, theirs, load_file(path / "hf/model.safetensors"), load_file(path / "out/model.safetensors")


@pytest.mark.parametrize("variant", VARIANTS)
def test_a_published_model_computes_the_same_here_and_comes_back_bit_by_bit(tmp_path: Path, variant: str) -> None:
    [(ours, theirs, there, back)] = run_ranks(there_and_back, 1, str(tmp_path), variant)
    # Both sides compute in float32, in another order: losses of about 5 to 1e-5.
    torch.testing.assert_close(ours, theirs, rtol=5e-6, atol=1e-5)
    assert there.keys() == back.keys()
    assert all(torch.equal(there[name], back[name]) for name in there)


def loss_of_a_batch(folder: str, variant: str) -> float:
    """Return the loss of Hugging Face's library on the first batch of a run."""
    path = Path(folder)
    publish(path / "hf", variant)
    import_from(path)
    config = recipe_of(path)
    start_alone(config)
    train, _, _ = build_datasets(config.dataset, build_tokenizer(config.tokenizer), 4)
    samples = [train[index] for index in range(4)]
    stop_distributed()
    tokens, labels, mask = (
        torch.stack([torch.as_tensor(s[k]) for s in samples]) for k in ("tokens", "labels", "loss_mask")
    )
    losses = published_losses(path / "hf", tokens, labels)
    return float((losses * mask).sum() / mask.sum())


def first_loss(folder: str, overrides: list[str]) -> float:
    config = recipe_of(Path(folder), *overrides)
    run, batches = start(config)
    load_checkpoint(run, Path(folder) / "mcore", 0, finetune=True)
    result = train_step(run, next(batches).microbatches)
    run.close()
    return result.loss


HIERARCHICAL = [
    "model.context_parallel_size=4",
    "model.cp_comm_type=a2a+p2p",
    "model.hierarchical_context_parallel_sizes=[2,2]",
]
TENSOR_PIPELINE = ["model.tensor_model_parallel_size=2", "model.pipeline_model_parallel_size=2"]
DECENTRALIZED = [
    "model.tensor_model_parallel_size=2",
    "model.context_parallel_size=2",
    "dist.use_decentralized_pg=true",
]
EXPERTS = ["model.expert_model_parallel_size=2", "model.context_parallel_size=2", "model.tensor_model_parallel_size=2"]
EXPERTS += ["model.sequence_parallel=true", "model.expert_tensor_parallel_size=1"]
slow = functools.partial(pytest.param, marks=pytest.mark.slow)
# Each family has a fast layout (Nemotron 3 the one with latent experts), and each layout fast families.
LAYOUTS = [
    ("llama tied, scaled rope", HIERARCHICAL),
    slow("llama tied, scaled rope", TENSOR_PIPELINE),
    ("mistral window", DECENTRALIZED),
    ("qwen3 yarn", HIERARCHICAL),
    ("qwen2", TENSOR_PIPELINE),
    ("mixtral", EXPERTS),
    ("deepseek 3", HIERARCHICAL),
    slow("gpt oss", HIERARCHICAL),
    ("gpt oss", EXPERTS),
    slow("gemma 3", HIERARCHICAL),
    ("gemma 3", TENSOR_PIPELINE),
    ("nemotron h", TENSOR_PIPELINE),
    slow("nemotron 3", HIERARCHICAL),
    ("nemotron 3, experts in fewer dimensions", EXPERTS),
]


@pytest.mark.parametrize(("variant", "layout"), LAYOUTS)
def test_an_imported_model_begins_with_its_loss_under_a_layout(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, variant: str, layout: list[str]
) -> None:
    [expected] = run_ranks(loss_of_a_batch, 1, str(tmp_path), variant)
    monkeypatch.delenv("MEGATRON_CP_TEST_NO_INIT")
    losses = run_ranks(first_loss, 4, str(tmp_path), layout)
    assert losses == pytest.approx([expected] * 4, rel=2e-6)
