"""A checkpoint becomes a published model: ``config.json``, safetensors, and the tokenizer where it has files."""

from __future__ import annotations

import math
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch

from megatron_cp.common.errors import DataError
from megatron_cp.common.interpolation import substitute_environment
from megatron_cp.config.names import NAME
from megatron_cp.config.run_config import ModelConfig, TokenizerConfig
from megatron_cp.convert.checkpoint import WholeModel, check_finite, find_checkpoint, undivided, whole_model
from megatron_cp.convert.hf_folder import TOKEN_IDS, check_absent, copy_companions, new_folder, read_json, write_model
from megatron_cp.data.text.tokenizers import build_tokenizer
from megatron_cp.models.families import hf_from_model
from megatron_cp.models.families.common.weights import WeightNames
from megatron_cp.models.hybrid_pattern import layers_of
from megatron_cp.training.checkpoint.files import LATEST, newer_than_latest


def export_model(root: Path, target: Path, iteration: int | None = None, dtype: str | None = None) -> str:
    """Make the folder ``target`` of a run's checkpoint, by default the latest; returns what to say of it.

    Args:
        dtype: of the weights: "float32", "bfloat16" or "float16"; by default as the checkpoint has them.

    Raises:
        ConfigError: there is no such checkpoint, or no published family computes what it does.
        RuntimeFault: the checkpoint is damaged, or ``target`` could not be written; ``target`` is absent.
    """
    target = target.resolve()
    check_absent(target, "--hf-path")
    found = find_checkpoint(root, iteration)
    trained, rows = found.config, found.vocabulary_rows
    family, values = hf_from_model(trained.model, rows)
    dtype = dtype or found.dtype
    config = undivided(trained, dtype)
    config.model.vocab_size = config.model.make_vocab_size_divisible_by = rows
    config.model.mtp_num_layers = None
    config.model.hybrid_layer_pattern = layers_of(trained.model.hybrid_layer_pattern) or None
    with whole_model(config) as whole:
        whole.load(found.folder)
        tensors = _published(whole, family.weights)
    check_finite(tensors, found.dtype, dtype)
    tokenizer, ids, without = _tokenizer(trained.tokenizer)
    values |= {"torch_dtype": dtype, "use_cache": True} | ids
    with new_folder(target) as partial:
        write_model(partial, values, tensors)
        if tokenizer is not None:
            copy_companions(tokenizer, partial)
    parameters = sum(tensor.numel() for tensor in tensors.values())
    said = [f"exported {parameters / 1e6:.1f}M parameters of {found.folder} ({family.architecture}, {dtype}): {target}"]
    said += positions_said(trained.model, values["max_position_embeddings"])
    if trained.model.mtp_num_layers:
        said.append("without its layers for multi-token prediction, which are not converted")
    newer = newer_than_latest(root) if iteration is None else None
    if newer is not None:
        said.append(f"{root / LATEST} names this checkpoint; iteration {newer} is newer: --iteration {newer}")
    if without:
        said.append(f"without a tokenizer: {without}")
    return "\n".join(said)


def positions_said(model: ModelConfig, declared: int) -> list[str]:
    """What to say where ``max_position_embeddings`` in ``config.json`` is not the run's setting, or too short."""
    name = "max_position_embeddings in config.json is"
    known, length, reached = model.max_position_embeddings, model.seq_length or 0, model.yarn_length
    if reached is None:
        if declared == known:
            return []
        return [
            f"{name} {declared}, the length of its training sequences; {NAME.model.max_position_embeddings} was {known}"
        ]
    factor, original = model.yarn_rotary_scaling_factor or 1.0, model.yarn_original_max_position_embeddings or 1
    said = []
    if declared != known:
        said.append(f"{name} {declared}, YaRN's factor times the original length; the run's setting was {known}")
    if length > declared:
        said.append(
            f"{name} {declared}, though training sequences had {length} tokens: with YaRN it is the factor {factor} "
            f"times the original length {original}, and programs that serve the model may refuse longer texts"
        )
    if not math.isclose(factor * original, declared):
        said.append(
            f"{name} {declared}, and {factor * original:g} is not whole: versions of transformers that divide it by "
            f"the original length compute with the factor {declared / original:g}, which is not the model's {factor}"
        )
    return said


def _published(whole: WholeModel, names: WeightNames) -> dict[str, torch.Tensor]:
    """Every published tensor, in memory of its own; the model's goes as they come."""
    tensors: dict[str, torch.Tensor] = {}
    of_experts: dict[str, list[torch.Tensor]] = {}
    for name, parameter in whole.parameters().items():
        part = names.mapping_of(name)
        for published, tensor in zip(part.published, part.split(parameter.detach(), whole.config.model), strict=True):
            own = tensor.clone(memory_format=torch.contiguous_format)
            if part.expert is None:
                tensors[published] = own
            else:  # megatron-core's parameters come in the order of the experts
                of_experts.setdefault(published, []).append(own)
        parameter.data = parameter.data.new_empty(0)
    return tensors | {published: torch.stack(of_experts[published]) for published in of_experts}


def _tokenizer(settings: TokenizerConfig) -> tuple[Path | None, dict[str, Any], str]:
    """The folder of the run's tokenizer, the special tokens' ids, and why there is no folder, if there is none."""
    ids: dict[str, Any] = dict.fromkeys(TOKEN_IDS)
    if settings.tokenizer_model:
        settings = replace(settings, tokenizer_model=substitute_environment(settings.tokenizer_model))
    if settings.tokenizer_type == "NullTokenizer":
        return None, ids, "the run's was a NullTokenizer"
    try:
        ids["eos_token_id"] = build_tokenizer(settings).eod
    except DataError as error:
        return None, ids, str(error)
    if settings.tokenizer_type != "HuggingFaceTokenizer":
        return None, ids, f"the run's was a {settings.tokenizer_type}"
    path = Path(settings.tokenizer_model or "")
    folder = path if path.is_dir() else path.parent
    if (folder / "config.json").is_file():  # of the model that was imported
        published = read_json(folder / "config.json")
        ids |= {name: published[name] for name in TOKEN_IDS if published.get(name) is not None}
    return folder, ids, ""
