"""Export a checkpoint to a folder in Hugging Face's format."""

from __future__ import annotations

import math
import os
import shlex
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch

from megatron_cp.common.errors import ConfigError, DataError, readable
from megatron_cp.common.input_files import read_bytes
from megatron_cp.common.interpolation import substitute_environment
from megatron_cp.config.names import NAME
from megatron_cp.config.run_config import ModelConfig, TokenizerConfig
from megatron_cp.convert.checkpoint import (
    CheckpointInfo,
    WholeModel,
    check_finite,
    find_checkpoint,
    single_rank_config,
    whole_model,
)
from megatron_cp.convert.hf_folder import TOKEN_IDS, check_absent, copy_companions, new_folder, read_json, write_model
from megatron_cp.convert.origin import RunExport, folder_of_export, size_of, write_origin
from megatron_cp.data.text.tokenizer_files import CHAT_TEMPLATE
from megatron_cp.data.text.tokenizers import build_tokenizer
from megatron_cp.models.families import hf_from_model
from megatron_cp.models.families.common.weights import WeightNames
from megatron_cp.models.hybrid_pattern import layers_of
from megatron_cp.training.checkpoint.files import LATEST, discard, newer_than_latest


def export_model(root: Path, target: Path, iteration: int | None = None, dtype: str | None = None) -> str:
    """Export a run's checkpoint to ``target``; return a report.

    Args:
        iteration: of the checkpoint; by default the latest.
        dtype: of the weights: "float32", "bfloat16" or "float16"; by default the checkpoint's.

    Raises:
        ConfigError: there is no such checkpoint, or no published family computes the same.
        RuntimeFault: the checkpoint is damaged, or ``target`` could not be written; ``target`` does not exist then.
    """
    target = target.resolve()
    check_absent(target, "--hf-path")
    report = _export(find_checkpoint(root, iteration), target, dtype)
    return "\n".join([*report, *_newer(root, iteration)])


def export_into_run(root: Path, iteration: int | None, typed: str) -> RunExport:
    """Export a checkpoint into the run's folder, in place of an older export of it.

    Args and raises: as :func:`megatron_cp.convert.run_exports.export_of_run`.
    """
    found = find_checkpoint(root, iteration, typed)
    target = folder_of_export(root, found.iteration)
    if not os.access(root, os.W_OK | os.X_OK):
        run, number = shlex.quote(str(root)), found.iteration
        raise ConfigError(
            f"{typed} {root}: the export goes into this folder, which cannot be written. Fix: megatron-cp convert "
            f"export --megatron-path {run} --iteration {number} --hf-path FOLDER && {typed} FOLDER"
        )
    try:
        build_tokenizer(_without_variables(found.config.tokenizer))
    except DataError as error:
        raise DataError(f"{typed} {root}: {error} Relative paths begin where the run was started.") from error
    discard(target)
    report = [*_export(found, target, None), *_newer(root, iteration)]
    return RunExport(target, "\n".join(report))


def _export(found: CheckpointInfo, target: Path, dtype: str | None) -> list[str]:
    """Write a checkpoint to ``target``, which must not exist; return report lines."""
    trained, rows = found.config, found.vocabulary_rows
    family, values = hf_from_model(trained.model, rows)
    dtype = dtype or found.dtype
    config = single_rank_config(trained, dtype)
    config.model.vocab_size = config.model.make_vocab_size_divisible_by = rows
    config.model.mtp_num_layers = None
    config.model.hybrid_layer_pattern = layers_of(trained.model.hybrid_layer_pattern) or None
    with whole_model(config) as whole:
        whole.load(found.folder)
        tensors = _published(whole, family.weights)
    check_finite(tensors, found.dtype, dtype)
    tokenizer, ids, without = _tokenizer(_without_variables(trained.tokenizer))
    values |= {"torch_dtype": dtype, "use_cache": True} | ids
    with new_folder(target) as partial:
        write_model(partial, values, tensors)
        if tokenizer is not None:
            copy_companions(tokenizer, partial)
        without_template = copy_chat_template(trained.dataset.chat_template, partial)
        write_origin(partial, found.folder, trained.tokenizer)
    parameters = sum(tensor.numel() for tensor in tensors.values())
    size = size_of(target)
    lines = [
        f"exported {parameters / 1e6:.1f}M parameters of {found.folder} ({family.architecture}, {dtype}, {size}): "
        f"{target}"
    ]
    lines += describe_positions(trained.model, values["max_position_embeddings"])
    if trained.model.mtp_num_layers:
        lines.append("multi-token prediction layers: not converted")
    if without:
        lines.append(f"no tokenizer exported: {without}")
    if without_template:
        lines.append(f"no chat template exported: {without_template}")
    return lines


def copy_chat_template(file: str | None, target: Path) -> str:
    """Copy the template that a run was tuned with; return why not, or "".

    It replaces the tokenizer's. ``file``: ``dataset.chat_template``, which may be gone since the run started.
    """
    if file is None:
        return ""
    try:
        with readable(file):
            content = read_bytes(file)
    except DataError as error:
        return str(error)
    (target / CHAT_TEMPLATE).write_bytes(content)
    return ""


def _newer(root: Path, iteration: int | None) -> list[str]:
    """Return a report line if the latest-iteration file names an older checkpoint."""
    newer = newer_than_latest(root) if iteration is None else None
    if newer is None:
        return []
    return [f"{root / LATEST}: names this checkpoint, but iteration {newer} is newer. Fix: --iteration {newer}"]


def describe_positions(model: ModelConfig, declared: int) -> list[str]:
    """Return report lines if the exported ``max_position_embeddings`` needs attention.

    This is so if it differs from the run's setting or is below the run's sequence length.
    """
    name = "max_position_embeddings in config.json is"
    known, length, reached = model.max_position_embeddings, model.seq_length or 0, model.yarn_length
    if reached is None:
        if declared == known:
            return []
        return [
            f"{name} {declared}, the length of training sequences; {NAME.model.max_position_embeddings} was {known}"
        ]
    factor, original = model.yarn_rotary_scaling_factor or 1.0, model.yarn_original_max_position_embeddings or 1
    lines = []
    if declared != known:
        lines.append(f"{name} {declared}, YaRN's factor times the original length; the run's setting was {known}")
    if length > declared:
        lines.append(
            f"{name} {declared}, YaRN's factor {factor} times the original length {original}; training sequences had "
            f"{length} tokens, and servers of the model may refuse texts that long"
        )
    if not math.isclose(factor * original, declared):
        lines.append(
            f"{name} {declared}, but YaRN's length {factor * original:g} is not whole: versions of transformers that "
            f"divide {declared} by the original length use the factor {declared / original:g} instead of {factor}"
        )
    return lines


def _published(whole: WholeModel, names: WeightNames) -> dict[str, torch.Tensor]:
    """Return every published tensor as a copy, and free the model's tensors."""
    tensors: dict[str, torch.Tensor] = {}
    of_experts: dict[str, list[torch.Tensor]] = {}
    for name, parameter in whole.parameters().items():
        part = names.mapping_of(name)
        for published, tensor in zip(part.published, part.split(parameter.detach(), whole.config.model), strict=True):
            own = tensor.clone(memory_format=torch.contiguous_format)
            if part.expert is None:
                tensors[published] = own
            else:  # parameters are in the order of the experts
                of_experts.setdefault(published, []).append(own)
        parameter.data = parameter.data.new_empty(0)
    return tensors | {published: torch.stack(of_experts[published]) for published in of_experts}


def _without_variables(settings: TokenizerConfig) -> TokenizerConfig:
    """Replace environment variables in the tokenizer's path by their values."""
    if not settings.tokenizer_model:
        return settings
    return replace(settings, tokenizer_model=substitute_environment(settings.tokenizer_model))


def _tokenizer(settings: TokenizerConfig) -> tuple[Path | None, dict[str, Any], str]:
    """Return (folder of the run's tokenizer, special token ids, reason if no folder)."""
    ids: dict[str, Any] = dict.fromkeys(TOKEN_IDS)
    if settings.tokenizer_type == "NullTokenizer":
        return None, ids, "the run used a NullTokenizer"
    try:
        ids["eos_token_id"] = build_tokenizer(settings).eod
    except DataError as error:
        return None, ids, str(error)
    if settings.tokenizer_type != "HuggingFaceTokenizer":
        return None, ids, f"the run used a {settings.tokenizer_type}"
    path = Path(settings.tokenizer_model or "")
    folder = path if path.is_dir() else path.parent
    if (folder / "config.json").is_file():  # of the imported model
        published = read_json(folder / "config.json")
        ids |= {name: published[name] for name in TOKEN_IDS if published.get(name) is not None}
    return folder, ids, ""
