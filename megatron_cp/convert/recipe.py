"""Recipe for continued pretraining of imported weights, with a reason per value."""

from __future__ import annotations

import textwrap
from collections.abc import Sequence
from dataclasses import dataclass, fields, replace
from pathlib import Path
from typing import Any

import yaml

from megatron_cp.attention.transports.registry import TRANSPORTS
from megatron_cp.common.terminal import in_a_line
from megatron_cp.config.names import NAME
from megatron_cp.config.recipes import from_settings
from megatron_cp.config.run_config import ModelConfig, TokenizerConfig
from megatron_cp.rules import Environment, check
from megatron_cp.rules.proposals import typed
from megatron_cp.rules.remedies import with_overrides

_TOKENS_OF_A_RANK = 8192
_TOKENS_OF_A_BATCH, _MOST_SAMPLES = 2**19, 512
_ITERATIONS, _INTERVAL = 2000, 200


@dataclass(frozen=True)
class Group:
    """Settings of one section with a common comment."""

    section: str
    values: dict[str, Any]
    why: str


@dataclass(frozen=True)
class Recipe:
    """Title and settings of a recipe file, in the file's order."""

    title: str
    groups: tuple[Group, ...]

    def settings(self) -> dict[str, dict[str, Any]]:
        """Return the settings by section."""
        sections: dict[str, dict[str, Any]] = {}
        for group in self.groups:
            sections.setdefault(group.section, {}).update(group.values)
        return sections

    def text(self) -> str:
        """Return the text of the YAML file."""
        lines, section = [f"# {in_a_line(self.title)}", "recipe_world_size: 1"], ""
        for group in self.groups:
            if group.section != section:
                lines += ["", f"{group.section}:"]
            section = group.section
            lines += textwrap.wrap(in_a_line(group.why), 110, initial_indent="  # ", subsequent_indent="  # ")
            for name, value in group.values.items():
                written = yaml.safe_dump([value], width=10**6, default_flow_style=True).strip()
                lines.append(f"  {name}: {written.removeprefix('[').removesuffix(']')}")
        return "\n".join(lines) + "\n"


def continued_pretraining(
    title: str, model: ModelConfig, tokenizer: TokenizerConfig, root: Path, dtype: str, parameters: int
) -> Recipe:
    """Return a recipe to continue pretraining an imported model on one rank.

    Args:
        root: folder of the imported checkpoint.
        dtype: of the weights.
        parameters: their number.
    """
    length = min(model.max_position_embeddings or _TOKENS_OF_A_RANK, _TOKENS_OF_A_RANK)
    batch, usual = _samples_of(length), ModelConfig()
    architecture = {field.name: getattr(model, field.name) for field in fields(model)}
    architecture = {name: value for name, value in architecture.items() if value != getattr(usual, name)}
    bytes_each = 16 if dtype == "float32" else 18
    samples = Group("dataset", dict(seq_length=length), "")
    groups = (
        Group("model", architecture, "The published model. The weights fit these values only."),
        Group(
            "model",
            dict(tensor_model_parallel_size=1, pipeline_model_parallel_size=1, context_parallel_size=1),
            f"One rank has the whole model: {parameters / 1e6:.0f}M parameters take "
            f"{parameters * bytes_each / 1e9:.1f} GB ({bytes_each} bytes each: weight, gradient, optimizer), plus "
            "activations. Larger sizes split the model. Ranks beyond the product of the sizes are replicas.",
        ),
        Group(
            "dataset",
            {},
            f"data_path is not set: add {NAME.dataset.data_path}=PREFIX. Without it, the run trains on MOCK DATA "
            "(random tokens), which destroys the weights.",
        ),
        samples,
        Group("dataset", {"split": "98,2,0"}, "2% of the documents are held out for validation, none for a test."),
        Group(
            "tokenizer",
            {name: value for name, value in vars(tokenizer).items() if value is not None},
            "The published tokenizer. Tokenize the data with it."
            if tokenizer.tokenizer_model
            else "No published tokenizer could be read. The data must have the model's token ids.",
        ),
        Group(
            "train",
            {"train_iters": _ITERATIONS},
            f"{_ITERATIONS * batch * length / 1e9:.3g}B tokens. One epoch has (tokens of your data) / "
            f"{batch * length} iterations. The learning rate schedule has the same length.",
        ),
        Group(
            "train",
            {"global_batch_size": batch, "micro_batch_size": 1},
            f"{batch} samples of {length} tokens are {batch * length} tokens per step over all ranks, usual for "
            f"continued pretraining. Keep the product if you change {NAME.dataset.seq_length}.",
        ),
        Group(
            "optimizer",
            {"optimizer": "adam", "lr": 2e-5, "min_lr": 2e-6},
            "About a tenth of the usual rates of pretraining, to change the weights slowly. Raise both for a large "
            "amount of different data.",
        ),
        Group(
            "optimizer",
            {"weight_decay": 0.1, "adam_beta1": 0.9, "adam_beta2": 0.95, "clip_grad": 1.0},
            "The values of Llama, Qwen, DeepSeek and Nemotron pretraining.",
        ),
        Group(
            "scheduler",
            {"lr_decay_style": "cosine", "lr_warmup_fraction": 0.05},
            "Warm-up from 0 to lr in the first twentieth of train_iters, then decay to min_lr at the end.",
        ),
        Group(
            "validation",
            {"eval_on_start": True, "eval_interval": _INTERVAL, "eval_iters": 10},
            "The loss on 10 batches of held-out data: of the imported weights, at each interval and at the end.",
        ),
        Group(
            "checkpoint",
            {"pretrained_checkpoint": str(root)},
            "The imported weights. A run starts from them, and resumes from its own checkpoints.",
        ),
        Group(
            "checkpoint",
            {"save": f"runs/{root.name}_continued", "save_interval": _INTERVAL, "most_recent_k": 3},
            "The run's folder: use another one for each run. The last three checkpoints are kept.",
        ),
        *_precision(dtype),
    )
    known = Recipe(title, groups)
    why = _about_length(known, model.max_position_embeddings or length, length)
    return Recipe(title, tuple(replace(group, why=why) if group is samples else group for group in groups))


def _precision(dtype: str) -> list[Group]:
    """Return settings to train in the precision of the weights.

    Another precision would round the weights, or take twice the memory.
    """
    why = f"The imported weights are {dtype}."
    if dtype == "float32":
        return [
            Group("mixed_precision", {"fp32": True}, f"{why} mixed_precision=bf16_mixed takes less time and memory.")
        ]
    why += " The optimizer keeps float32 copies, so that small updates are not lost."
    if dtype == "bfloat16":
        return [Group("mixed_precision", {"bf16": True}, why)]
    return [
        Group("mixed_precision", {"fp16": True}, why),
        Group("ddp", {"check_for_nan_in_grad": False}, "float16 overflows sometimes; such steps are skipped."),
    ]


def _samples_of(length: int) -> int:
    """Return the global batch size: a power of two, for many numbers of ranks."""
    return min(_MOST_SAMPLES, 1 << max(0, (_TOKENS_OF_A_BATCH // length).bit_length() - 1))


def _about_length(recipe: Recipe, longest: int, length: int) -> str:
    """Return the comment on the sample length, with overrides for the model's maximum."""
    if longest <= length:
        return f"{length} tokens are the published maximum of the model."
    text = f"{length} tokens per sample fit one rank; the published maximum of the model is {longest}."
    ranks = 1 << max(0, -(-longest // _TOKENS_OF_A_RANK) - 1).bit_length()
    while ranks > 1:  # fewer ranks have more tokens each
        for transport in (name for name, each in TRANSPORTS.items() if not each.hierarchical):
            settings: dict[str, Any] = {NAME.dataset.seq_length: longest, NAME.model.context_parallel_size: ranks}
            settings |= {NAME.model.cp_comm_type: transport, NAME.train.global_batch_size: _samples_of(longest)}
            words = [typed(name, value) for name, value in settings.items()]
            if _holds(recipe, [*words, f"{NAME.train.check_memory}=false"], ranks):  # more ranks may be needed
                each = f"{-(-longest // ranks)} tokens on each of {ranks} ranks"
                return f"{text} For the maximum: {' '.join(words)} ({each})."
        ranks //= 2
    return text


def _holds(recipe: Recipe, overrides: Sequence[str], ranks: int) -> bool:
    """Return whether the recipe with overrides passes the rules on CPUs and GPUs."""
    config = with_overrides(from_settings(recipe.settings()), overrides)
    found = (each for name in ("cpu", "gpu") for each in check(config, ranks, None, Environment.of(name)))
    return all(each.severity == "warning" for each in found)
