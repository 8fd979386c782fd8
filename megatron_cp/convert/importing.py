"""Import a published model as a checkpoint, with a recipe to train it."""

from __future__ import annotations

import math
import shlex
import shutil
from pathlib import Path

import torch

from megatron_cp.common.errors import ConfigError, DataError, join_limited
from megatron_cp.config.names import NAME
from megatron_cp.config.recipes import from_settings
from megatron_cp.config.run_config import ModelConfig, TokenizerConfig
from megatron_cp.convert.checkpoint import WholeModel, check_finite, single_rank_config, whole_model
from megatron_cp.convert.hf_folder import PublishedWeights, check_absent, copy_companions, new_folder, read_config
from megatron_cp.convert.recipe import continued_pretraining
from megatron_cp.data.text.tokenizers import build_tokenizer
from megatron_cp.models.families import model_from_hf
from megatron_cp.models.families.common import weights
from megatron_cp.models.families.common.weights import WeightNames
from megatron_cp.rules import Environment, check_or_raise

RECIPE, TOKENIZER = "recipe.yaml", "tokenizer"


def import_model(source: Path, root: Path, dtype: str | None = None) -> str:
    """Write checkpoint, tokenizer files and recipe to ``root``; return a report.

    Args:
        dtype: of the checkpoint's weights: "float32", "bfloat16" or "float16"; by default the published dtype.

    Raises:
        ConfigError: the published model is not supported, or a file is missing or damaged.
        RuntimeFault: ``root`` could not be written and does not exist.
    """
    root = root.resolve()
    check_absent(root, "--megatron-path")
    published = PublishedWeights(source)
    values = read_config(source, published.shapes)
    family, model = model_from_hf(values)
    mtp = weights.multi_token_prediction(set(published.shapes))
    kept = (name for name in published.shapes.keys() - mtp if not family.weights.is_spare(name, model))
    own, alike = published.dtype(name for name in kept if not name.endswith(weights.KEPT_IN_FLOAT32))
    several = dtype is None and not alike
    dtype = dtype or own
    parameters = sum(map(math.prod, published.shapes.values()))
    with new_folder(root) as partial:
        tokenizer, without = _copy_tokenizer(source, partial / TOKENIZER, model)
        if not without:
            tokenizer.tokenizer_model = str(root / TOKENIZER)
        title = f"{source.resolve().name}, imported ({family.architecture}): continued pretraining"
        recipe = continued_pretraining(title, model, tokenizer, root, dtype, parameters)
        config = from_settings(recipe.settings())
        check_or_raise(config, 1, None, Environment.of("cpu"))
        config = single_rank_config(config, dtype)
        with torch.device("meta"), whole_model(config) as shapes_alone:
            _check_fits(shapes_alone, published, family.weights, mtp)
        with whole_model(config) as whole:
            parameters = _fill(whole, published, family.weights)
            check_finite(whole.parameters(), own, dtype)
            iteration = whole.save(partial, 0).name
        (partial / RECIPE).write_text(recipe.text(), encoding="utf-8")
    path = shlex.quote(str(root / RECIPE))
    lines = [
        f"imported {parameters / 1e6:.1f}M parameters of {source} ({family.architecture}, {dtype}): {root / iteration}",
        f"train: megatron-cp train --recipe {path} {NAME.dataset.data_path}=PREFIX",
    ]
    if model.max_position_embeddings != values["max_position_embeddings"]:
        lines.append(
            f"max_position_embeddings={model.max_position_embeddings}: YaRN's factor times the original length. "
            f"config.json has {values['max_position_embeddings']}; older versions of transformers divide that by the "
            "original length and get another factor"
        )
    if several:
        lines.append("the weights have several dtypes and are stored as float32; set another with --torch-dtype")
    if mtp:
        lines.append(f"multi-token prediction layers: not converted ({len(mtp)} tensors)")
    return "\n".join([*lines, *([f"no tokenizer imported: {without}"] if without else [])])


def _fill(whole: WholeModel, published: PublishedWeights, names: WeightNames) -> int:
    """Fill every parameter from the published weights; return the number of elements."""
    model, parameters = whole.config.model, whole.parameters()
    for name, parameter in parameters.items():
        part = names.mapping_of(name)
        parameter.data.copy_(part.join([published.read(tensor, part.expert) for tensor in part.published], model))
    return sum(parameter.numel() for parameter in parameters.values())


def _check_fits(whole: WholeModel, published: PublishedWeights, names: WeightNames, mtp: set[str]) -> None:
    """Compare the shapes of a model's parameters and of the published weights.

    Raises:
        ConfigError: tensors are missing, unknown or of another shape; lists all of them.
    """
    model, parameters = whole.config.model, whole.parameters()
    parts = {name: names.mapping_of(name) for name in parameters}
    expected = {
        name: (() if part.expert is None else (model.num_moe_experts or 0,)) + tuple(tensor.shape)
        for parameter, part in parts.items()
        for name, tensor in zip(
            part.published, part.split(parameters[parameter].detach().to("meta"), model), strict=True
        )
    }
    found = published.shapes.keys() - mtp
    _check_tied(model, published, names)
    problems = [f"{name} is missing" for name in sorted(expected.keys() - found)]
    problems += [f"{name} is unknown" for name in sorted(found - expected.keys()) if not names.is_spare(name, model)]
    problems += [
        f"{name} has shape {published.shapes[name]} instead of {shape}"
        for name, shape in expected.items()
        if name in found and published.shapes[name] != shape
    ]
    if problems:
        raise ConfigError(
            f"config.json: does not match the weights: {join_limited(problems, '; ')}. Fix: download the model again"
        )


def _check_tied(model: ModelConfig, published: PublishedWeights, names: WeightNames) -> None:
    """Check that a published output layer equals the embedding if both are tied."""
    embedding, output = names.outside[weights.EMBEDDING], names.outside[weights.OUTPUT]
    both = model.share_embeddings_and_output_weights and {embedding, output} <= published.shapes.keys()
    if both and not torch.equal(published.read(embedding), published.read(output)):
        raise ConfigError(
            f"tie_word_embeddings=True in config.json: {output} must equal {embedding}, but the weights differ. "
            'Fix: "tie_word_embeddings": false (in config.json)'
        )


def _copy_tokenizer(source: Path, folder: Path, model: ModelConfig) -> tuple[TokenizerConfig, str]:
    """Copy the tokenizer; return (settings, reason if it is a NullTokenizer)."""
    folder.mkdir()
    copied = copy_companions(source, folder)
    shutil.copyfile(source / "config.json", folder / "config.json")  # has token ids for the export
    tokenizer = TokenizerConfig(tokenizer_model=str(folder))
    why = "the model has no tokenizer files"
    if not {"tokenizer.json", "tokenizer.model", "vocab.json"}.isdisjoint(copied):
        try:
            tokens = build_tokenizer(tokenizer).vocab_size
        except DataError as error:
            why = str(error)
        else:
            if tokens <= (model.vocab_size or 0):
                return tokenizer, ""
            why = f"its {tokens} tokens exceed the model's vocabulary of {model.vocab_size}"
    return TokenizerConfig("NullTokenizer", vocab_size=model.vocab_size), why
