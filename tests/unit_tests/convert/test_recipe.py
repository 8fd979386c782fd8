"""The recipe that an import writes fits the model and trains.

It passes every rule unchanged.
"""

import os
import re
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import yaml
from megatron.core.datasets.indexed_dataset import IndexedDatasetBuilder
from transformers import AutoConfig

from megatron_cp.config.recipes import from_settings, load_recipe
from megatron_cp.config.run_config import RunConfig, TokenizerConfig
from megatron_cp.convert.importing import import_model
from megatron_cp.convert.recipe import continued_pretraining
from megatron_cp.models.families import FAMILIES, model_from_hf
from megatron_cp.rules import Environment, check
from megatron_cp.training.train import run
from tests.ranks import run_ranks
from tests.unit_tests.convert.published import SHAPE, VARIANTS, publish

A_VARIANT = {values["model_type"]: name for name, values in reversed(VARIANTS.items())}


def write_documents(prefix: Path) -> None:
    """Write a hundred documents of the small models' tokens, as .bin and .idx."""
    numbers = np.random.default_rng(1)
    builder = IndexedDatasetBuilder(f"{prefix}.bin", dtype=np.uint16)
    for _ in range(100):
        builder.add_document(numbers.integers(SHAPE["vocab_size"], size=90), [90])
    builder.finalize(f"{prefix}.idx")


def import_and_train(folder: str, variant: str) -> tuple[str, list[str]]:
    path = Path(folder)
    os.chdir(path)  # where the recipe's checkpoint.save is
    publish(path / "hf", variant)
    import_model(path / "hf", path / "mcore")
    recipe = path / "mcore/recipe.yaml"
    broken = [str(each) for each in check(load_recipe(recipe), 1, None, Environment.of("cpu"))]
    broken += [str(e) for e in check(load_recipe(recipe), 1, None, Environment.of("gpu")) if e.severity == "error"]
    write_documents(path / "data")
    os.environ.pop("RANK")
    few = ["train.train_iters=2", "train.global_batch_size=2", "validation.eval_iters=1", "logger.progress=none"]
    assert run(load_recipe(recipe, [*few, f"dataset.data_path={path}/data"])) == 0
    return recipe.read_text(), broken


QUICK = ("llama", "nemotron_h")


@pytest.mark.parametrize(
    "family", [pytest.param(name, marks=() if name in QUICK else pytest.mark.slow) for name in FAMILIES]
)
def test_an_imported_model_of_every_family_trains_by_its_recipe(tmp_path: Path, family: str) -> None:
    [(text, broken)] = run_ranks(import_and_train, 1, str(tmp_path), A_VARIANT[family])
    assert broken == []
    assert (tmp_path / "runs/mcore_continued/iter_0000002").is_dir()
    assert yaml.safe_load(text)["dataset"]["seq_length"] == SHAPE["max_position_embeddings"]
    assert f"{SHAPE['max_position_embeddings']} tokens are the published maximum" in text


@pytest.mark.parametrize("variant", VARIANTS)
def test_the_recipe_of_every_model_holds_under_every_rule(tmp_path: Path, variant: str) -> None:
    values = SHAPE | VARIANTS[variant]
    config = AutoConfig.for_model(values.pop("model_type"), **values)
    _, model = model_from_hf(config.to_dict() | {name: getattr(config, name) for name in config.attribute_map})
    tokenizer = TokenizerConfig("NullTokenizer", vocab_size=model.vocab_size)
    (tmp_path / "recipe.yaml").write_text(
        continued_pretraining("a model", model, tokenizer, tmp_path, "bfloat16", 10**5).text()
    )
    found = load_recipe(tmp_path / "recipe.yaml")
    assert found.dataset.seq_length == found.model.max_position_embeddings == SHAPE["max_position_embeddings"]
    assert check(found, 1, None, Environment.of("cpu")) == []
    assert [each for each in check(found, 1, None, Environment.of("gpu")) if each.severity == "error"] == []


def recipe_of(name: str, dtype: str = "bfloat16") -> tuple[str, RunConfig]:
    model = replace(load_recipe(name).model, seq_length=None, context_parallel_size=1, cp_comm_type="p2p")
    model = replace(model, hierarchical_context_parallel_sizes=None, tensor_model_parallel_size=1)
    model = replace(model, pipeline_model_parallel_size=1, sequence_parallel=False, dynamic_context_parallel=False)
    model = replace(model, sequence_packing_scheduler=None, max_seqlen_per_dp_cp_rank=None, mtp_num_layers=None)
    model = replace(model, hybrid_layer_pattern=(model.hybrid_layer_pattern or "").split("/")[0] or None)
    model = replace(
        model, expert_model_parallel_size=1, expert_tensor_parallel_size=None, window_size=WINDOWS.get(name)
    )
    tokenizer = TokenizerConfig("NullTokenizer", vocab_size=model.vocab_size)
    recipe = continued_pretraining(name, model, tokenizer, Path("/models/published"), dtype, 10**9)
    return recipe.text(), from_settings(recipe.settings())


WINDOWS = {"llama3_8b_pretrain_config": [4095, 0]}
LONG = {  # sequence length, and the longest
    "llama32_1b_pretrain_config": (8192, 131072),
    "llama3_8b_pretrain_config": (8192, 8192),
    "qwen3_8b_128k_yarn_hcp_config": (8192, 131072),
    "nemotron_nano_9b_v2_128k_dynamic_cp_pretrain_config": (8192, 131072),
    "nemotron_3_nano_128k_dynamic_cp_pretrain_config": (8192, 262144),
}


@pytest.mark.parametrize("name", LONG)
def test_samples_are_as_long_as_one_rank_holds_and_the_comment_lengthens_them(tmp_path: Path, name: str) -> None:
    length, longest = LONG[name]
    text, config = recipe_of(name)
    assert (config.dataset.seq_length, config.train.global_batch_size) == (length, 64)
    file = tmp_path / "recipe.yaml"
    file.write_text(text)
    comment = " ".join(text.replace("\n  #", "").split())
    found = re.search(r"For the maximum: (.*) \((\d+) tokens on each of (\d+) ranks\)", comment)
    if longest == length:
        assert found is None and f"{length} tokens are the published maximum" in comment
        return
    assert found, comment
    longer = load_recipe(file, [*found[1].split(), "train.check_memory=false"])
    assert longer.dataset.seq_length == longest == int(found[2]) * int(found[3])
    assert longer.train.global_batch_size * longest == 2**19
    for environment in ("cpu", "gpu"):
        violations = check(longer, int(found[3]), None, Environment.of(environment))
        assert [each for each in violations if each.severity == "error"] == []


def test_the_schedule_follows_the_length_of_the_run(tmp_path: Path) -> None:
    text, config = recipe_of("llama32_1b_pretrain_config")
    assert config.scheduler.warmup_iters(config.train.train_iters) == 100 and config.scheduler.lr_decay_iters == 2000
    assert config.optimizer.min_lr < config.optimizer.lr < 1e-4
    assert config.checkpoint.save != config.checkpoint.pretrained_checkpoint and config.checkpoint.save_interval
    (tmp_path / "recipe.yaml").write_text(text)
    short = load_recipe(tmp_path / "recipe.yaml", ["train.train_iters=3"])
    assert short.scheduler.warmup_iters(short.train.train_iters) == 0
    assert check(short, 1, None, Environment.of("cpu")) == []


@pytest.mark.parametrize(("dtype", "kind"), [("float32", "fp32"), ("bfloat16", "bf16"), ("float16", "fp16")])
def test_weights_are_trained_in_their_own_precision(dtype: str, kind: str) -> None:
    text, config = recipe_of("llama32_1b_pretrain_config", dtype)
    assert getattr(config.mixed_precision, kind) and f"weights are {dtype}" in text
    assert check(config, 1, None, Environment.of("cpu")) == []


def test_every_setting_stands_under_a_reason() -> None:
    """No section may begin without a comment."""
    text, _ = recipe_of("nemotron_3_nano_128k_dynamic_cp_pretrain_config")
    assert text.startswith("# ")
    assert re.findall(r"^\w+:\n(?!  # \S)", text, re.MULTILINE) == []
