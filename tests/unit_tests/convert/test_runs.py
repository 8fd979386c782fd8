"""Exports contain what a run trained, and a run starts from imports."""

import json
import os
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM, AutoTokenizer

from megatron_cp.common.errors import ConfigError
from megatron_cp.config.recipes import load_recipe
from megatron_cp.convert.exporting import export_model
from megatron_cp.convert.importing import import_model
from megatron_cp.data.samples.datasets import build_datasets
from megatron_cp.data.text.tokenizers import build_tokenizer, train_bpe
from megatron_cp.parallel.device import start_distributed, stop_distributed
from megatron_cp.training.checkpoint.resume import find_resume_point
from megatron_cp.training.checkpoint.saver import load_checkpoint
from megatron_cp.training.step import train_step
from tests.ranks import run_ranks
from tests.training_runs import save_checkpoint, start, tiny_config
from tests.unit_tests.convert.published import SHAPE, publish, published_losses
from tests.unit_tests.models.hybrids import FURTHER
from tests.unit_tests.training.layouts.test_model_variants import BIASED, MLA

TRAINED: dict[str, dict[str, Any]] = {
    "llama, tp 2, pp 2, with two more tokens predicted": {
        "model__tensor_model_parallel_size": 2,
        "model__pipeline_model_parallel_size": 2,
        "model__mtp_num_layers": 2,
        "model__share_embeddings_and_output_weights": True,
        "model__make_vocab_size_divisible_by": 24,  # 264 rows for 255 tokens
    },
    "qwen3, hierarchical cp, windows none": {
        "model__context_parallel_size": 4,
        "model__cp_comm_type": "a2a+p2p",
        "model__hierarchical_context_parallel_sizes": [2, 2],
        "model__qk_layernorm": True,
    },
    "mixtral, ep 2, virtual stages, cp 1": {
        "model__pipeline_model_parallel_size": 2,
        "model__virtual_pipeline_model_parallel_size": 2,
        "model__expert_model_parallel_size": 2,
        "model__num_moe_experts": 4,
        "model__moe_ffn_hidden_size": 48,
        "model__window_size": [9, 0],
    },
    "deepseek_v3, ep 2, hierarchical cp": MLA
    | BIASED
    | {
        "model__context_parallel_size": 4,
        "model__cp_comm_type": "a2a+p2p",
        "model__hierarchical_context_parallel_sizes": [2, 2],
        "model__expert_model_parallel_size": 2,
        "model__moe_layer_freq": [0, 1, 1, 1],
        "model__layernorm_epsilon": 1e-6,
        "model__moe_z_loss_coeff": None,
        "model__moe_shared_expert_intermediate_size": 96,
    },
    "nemotron_h, tp 2 sp, stages as marked, with one more token predicted": FURTHER
    | {
        "model__tensor_model_parallel_size": 2,
        "model__sequence_parallel": True,
        "model__pipeline_model_parallel_size": 2,
        "model__hybrid_layer_pattern": "M*M|-/*M",
        "model__mtp_num_layers": 1,
        "model__position_embedding_type": "none",
        "model__activation_func": "squared_relu",
        "model__gated_linear_unit": False,
    },
}


def train_and_save(folder: str, overrides: dict[str, Any]) -> float:
    """Save after two steps; return the third step's loss with the saved weights."""
    run, batches = start(tiny_config(**overrides))
    for _ in range(2):
        train_step(run, next(batches).microbatches)
        run.progress.iteration += 1
    save_checkpoint(run, Path(folder) / "run", {})
    loss = train_step(run, next(batches).microbatches).loss
    run.close()
    return loss


def export_and_compute(folder: str, overrides: dict[str, Any]) -> tuple[float, dict[str, Any]]:
    """Export a run; return transformers' loss on the third batch, and config.json."""
    path, config = Path(folder), tiny_config(**overrides)
    print(export_model(path / "run", path / "out"))
    os.environ.pop("RANK")
    config.model.expert_model_parallel_size = 1
    start_distributed(config.dist)
    train, _, _ = build_datasets(config.dataset, build_tokenizer(config.tokenizer), 12)
    samples = [train[index] for index in range(8, 12)]
    stop_distributed()
    names = ("tokens", "labels", "loss_mask")
    tokens, labels, mask = (torch.stack([torch.as_tensor(sample[name]) for sample in samples]) for name in names)
    losses = published_losses(path / "out", tokens, labels)
    return float((losses * mask).sum() / mask.sum()), json.loads((path / "out/config.json").read_text())


@pytest.mark.parametrize("name", TRAINED)
def test_a_run_publishes_what_it_trained(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str) -> None:
    overrides = TRAINED[name]
    monkeypatch.delenv("MEGATRON_CP_TEST_NO_INIT")
    ours = run_ranks(train_and_save, 4, str(tmp_path), overrides)
    monkeypatch.setenv("MEGATRON_CP_TEST_NO_INIT", "1")
    [(theirs, values)] = run_ranks(export_and_compute, 1, str(tmp_path), overrides)
    # The ranks of the last stage have the main loss, which excludes multi-token prediction.
    assert ours == pytest.approx([theirs] * 4, rel=2e-6)
    assert values["model_type"] == name.split(",")[0]
    assert values["vocab_size"] == (264 if "make_vocab_size_divisible_by" in str(overrides) else 256)


def halves(folder: str) -> None:
    """Convert bf16 in several files in both directions, and into a float32 run."""
    path = Path(folder)
    publish(path / "hf32", "llama")
    model = AutoModelForCausalLM.from_pretrained(path / "hf32", dtype=torch.bfloat16)
    model.save_pretrained(path / "hf", max_shard_size="40KB")
    assert len(list((path / "hf").glob("*.safetensors"))) > 2
    reported = import_model(path / "hf", path / "mcore")
    assert "bfloat16" in reported
    export_model(path / "mcore", path / "out")
    export_model(path / "mcore", path / "out32", dtype="float32")
    there = model.state_dict()
    back, wide = load_file(path / "out/model.safetensors"), load_file(path / "out32/model.safetensors")
    assert there.keys() == back.keys() == wide.keys()
    for name, tensor in there.items():
        assert back[name].dtype == torch.bfloat16 and torch.equal(back[name], tensor)
        assert wide[name].dtype == torch.float32 and torch.equal(wide[name], tensor.float())
    assert json.loads((path / "out32/config.json").read_text())["torch_dtype"] == "float32"

    os.environ.pop("RANK")
    tokens, labels = torch.randint(SHAPE["vocab_size"], (2, 2, 32), generator=torch.Generator().manual_seed(1))
    config = load_recipe(path / "mcore/recipe.yaml", ["mixed_precision=fp32", "dataset.seq_length=32"])
    start_distributed(config.dist)
    run, _ = start(config)
    load_checkpoint(run, path / "mcore", 0, finetune=True)
    with torch.no_grad():
        losses = run.model[0].eval()(tokens, torch.arange(32).expand_as(tokens), None, labels=labels)
    torch.testing.assert_close(losses, published_losses(path / "out32", tokens, labels), rtol=5e-6, atol=1e-5)


def test_half_precision_in_several_files(tmp_path: Path) -> None:
    run_ranks(halves, 1, str(tmp_path))


def kept_in_float32(folder: str, variant: str, ahead: str) -> None:
    """Check that routers' biases of a bf16 model stay in float32.

    Its multi-token prediction is not exported.
    """
    path = Path(folder)
    publish(path / "hf", variant)
    file = path / "hf/model.safetensors"
    there = {name: t if name.endswith("correction_bias") else t.bfloat16() for name, t in load_file(file).items()}
    further = {f"{ahead}.{name}.weight": torch.ones(64) for name in ("eh_proj", "enorm")}
    save_file(there | further, file, metadata={"format": "pt"})
    reported = import_model(path / "hf", path / "mcore")
    assert "bfloat16" in reported and "multi-token prediction layers: not converted (2 tensors)" in reported, reported
    export_model(path / "mcore", path / "out")
    back = load_file(path / "out/model.safetensors")
    assert back.keys() == there.keys()
    assert all(back[name].dtype == tensor.dtype and torch.equal(back[name], tensor) for name, tensor in there.items())
    assert {tensor.dtype for tensor in there.values()} == {torch.bfloat16, torch.float32}


@pytest.mark.parametrize(("variant", "ahead"), [("deepseek 3", "model.layers.3"), ("nemotron 3", "mtp.layers.0")])
def test_biases_of_routers_keep_their_precision(tmp_path: Path, variant: str, ahead: str) -> None:
    run_ranks(kept_in_float32, 1, str(tmp_path), variant, ahead)


def with_tokenizer(folder: str) -> None:
    path = Path(folder)
    train_bpe(["some words to make a vocabulary of"] * 9, 280, path / "hf")
    publish(path / "hf", "llama", vocab_size=280, bos_token_id=1, eos_token_id=[3, 5], pad_token_id=0)
    assert "no tokenizer imported" not in import_model(path / "hf", path / "mcore")
    config = load_recipe(path / "mcore/recipe.yaml")
    assert config.tokenizer.tokenizer_type == "HuggingFaceTokenizer"
    tokenizer = build_tokenizer(config.tokenizer)
    # Settings of the model only, none of the conversion.
    assert not config.model.use_cpu_initialization and config.model.seq_length == config.dataset.seq_length
    assert "seq_length" not in yaml.safe_load((path / "mcore/recipe.yaml").read_text())["model"]
    export_model(path / "mcore", path / "out")
    again = AutoTokenizer.from_pretrained(path / "out")
    assert again("some words")["input_ids"] == tokenizer.tokenize("some words")
    values = json.loads((path / "out/config.json").read_text())
    assert (values["bos_token_id"], values["eos_token_id"], values["pad_token_id"]) == (1, [3, 5], 0)
    shutil.rmtree(path / "mcore/tokenizer")
    reported = export_model(path / "mcore", path / "moved")
    assert "no tokenizer exported: tokenizer.tokenizer_model=" in reported and "no such file or folder" in reported


def test_the_tokenizer_goes_along(tmp_path: Path) -> None:
    run_ranks(with_tokenizer, 1, str(tmp_path))


def load_instead(folder: str) -> None:
    path = Path(folder)
    publish(path / "hf", "llama")
    import_model(path / "hf", path / "mcore")
    begin = load_recipe(path / "mcore/recipe.yaml", [f"checkpoint.save={path}/run"])
    found = find_resume_point(begin)
    assert found is not None and found.finetune and found.root == str(path / "mcore")
    again = ["checkpoint.pretrained_checkpoint=null", f"checkpoint.load={path}/mcore", "checkpoint.load_optim=false"]
    with pytest.raises(ConfigError, match=r"holds weights only. Fix: checkpoint.pretrained_checkpoint="):
        find_resume_point(load_recipe(path / "mcore/recipe.yaml", again))
    with pytest.raises(ConfigError, match=r"of a different model: model.num_layers is 3"):
        find_resume_point(
            load_recipe(path / "mcore/recipe.yaml", ["model.num_layers=3", f"checkpoint.save={path}/run"])
        )


def test_imported_weights_begin_a_run_and_do_not_resume_one(tmp_path: Path) -> None:
    run_ranks(load_instead, 1, str(tmp_path))


def of_several_dtypes(folder: str) -> None:
    path = Path(folder)
    publish(path / "hf", "llama")
    file = path / "hf/model.safetensors"
    tensors = {name: t if "norm" in name else t.bfloat16() for name, t in load_file(file).items()}
    save_file(tensors, file, metadata={"format": "pt"})
    reported = import_model(path / "hf", path / "mcore")
    assert "float32): " in reported and "several dtypes" in reported and "--torch-dtype" in reported
    assert "several dtypes" not in import_model(path / "hf", path / "as asked", dtype="float32")
    export_model(path / "mcore", path / "out")
    back = load_file(path / "out/model.safetensors")
    assert all(torch.equal(back[name], tensor.float()) for name, tensor in tensors.items())
    # No tokenizer, no token that ends a text.
    assert json.loads((path / "out/config.json").read_text())["eos_token_id"] is None

    tensors["model.norm.weight"][3] = 1e6
    save_file(tensors, file, metadata={"format": "pt"})
    with pytest.raises(ConfigError, match=r"decoder.final_layernorm.weight: has numbers too large for float16"):
        import_model(path / "hf", path / "half", dtype="float16")
    assert not (path / "half").exists()
    import_model(path / "hf", path / "large")
    with pytest.raises(ConfigError, match=r"model.norm.weight: has numbers too large for float16"):
        export_model(path / "large", path / "half", dtype="float16")


def test_no_number_is_rounded_or_lost(tmp_path: Path) -> None:
    run_ranks(of_several_dtypes, 1, str(tmp_path))


def in_odd_places(folder: str) -> None:
    path = Path(folder)
    publish(path / "hf", "llama")
    (path / "here").mkdir()
    (path / "there").mkdir()
    (path / "link").symlink_to(path / "there")
    os.chdir(path / "here")
    damaged = path / "hf/config.json"
    good = damaged.read_text()
    damaged.write_text(good.replace('"num_hidden_layers": 2', '"num_hidden_layers": 3'))
    for target in (Path(), path / "link"):  # empty folders that were there stay, and stay empty
        with pytest.raises(ConfigError, match="num_hidden_layers=3: the weights have 2 layers"):
            import_model(path / "hf", target)
    assert os.listdir(path / "here") == os.listdir(path / "link") == []
    damaged.write_text(good)
    import_model(path / "hf", path / "link")
    os.chdir(path / "here")  # which was created again
    export_model(path / "there", Path())
    assert (path / "here/model.safetensors").is_file()
    # Shards of another model beside the whole file: Hugging Face's library reads the whole file.
    index = {"weight_map": {"model.norm.weight": "other.safetensors"}}
    (path / "hf/model.safetensors.index.json").write_text(json.dumps(index))
    import_model(path / "hf", path / "again")


def test_relative_paths_links_and_folders_that_are_there(tmp_path: Path) -> None:
    run_ranks(in_odd_places, 1, str(tmp_path))
