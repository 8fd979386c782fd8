"""Answer flags of Megatron-LM and Megatron-Bridge with settings to write. Pure.

Most flags follow a rule: a setting's name with dashes (``--num-layers``), ``--no-NAME`` for a boolean. Tables list the
others.
"""

from __future__ import annotations

import re
import shlex
from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import cache
from typing import Any, Literal

from megatron_cp.config.bridge_names import Meaning, by_bare_name
from megatron_cp.config.names import NAME
from megatron_cp.config.recipe_names import commands_to_import
from megatron_cp.config.run_config import RunConfig, settings
from megatron_cp.config.schema import alternatives, kind_of, nearest

_RENAMED = {
    "accumulate_allreduce_grads_in_fp32": NAME.ddp.grad_reduce_in_fp32,
    "check_for_nan_in_loss_and_grad": NAME.ddp.check_for_nan_in_grad,
    "data_cache_path": NAME.dataset.path_to_cache,
    "ddp_average_in_collective": NAME.ddp.average_in_collective,
    "ddp_bucket_size": NAME.ddp.bucket_size,
    "decoder_first_pipeline_num_layers": NAME.model.num_layers_in_first_pipeline_stage,
    "decoder_last_pipeline_num_layers": NAME.model.num_layers_in_last_pipeline_stage,
    "decoder_seq_length": NAME.dataset.seq_length,
    "hybrid_context_parallel": NAME.model.dynamic_context_parallel,
    "norm_epsilon": NAME.model.layernorm_epsilon,
    "num_experts": NAME.model.num_moe_experts,
    "num_virtual_stages_per_pipeline_rank": NAME.model.virtual_pipeline_model_parallel_size,
    "profile": NAME.profiling.use_nsys_profiler,
    "rope_fusion": NAME.model.apply_rope_fusion,
    "seq_length": NAME.dataset.seq_length,
    "tensorboard_log_interval": NAME.logger.log_interval,
    "train_data_path": NAME.dataset.data_path,
    "vocab_size": NAME.tokenizer.vocab_size,  # for a NullTokenizer, as in Megatron-LM
}
_REPLACED = {
    "bf16": ("mixed_precision=bf16_mixed",),
    "disable_bias_linear": (f"{NAME.model.add_bias_linear}=false",),
    "fp16": ("mixed_precision=fp16_mixed",),
    "mock_data": (f"{NAME.dataset.kind}=mock",),
    "no_position_embedding": (f"{NAME.model.position_embedding_type}=none",),
    "packed_sequence": (f"{NAME.model.sequence_packing_scheduler}=dp_balanced", f"{NAME.dataset.kind}=documents"),
    "recompute_activations": (f"{NAME.model.recompute_granularity}=selective",),
    "squared_relu": (f"{NAME.model.activation_func}=squared_relu", f"{NAME.model.gated_linear_unit}=false"),
    "swiglu": (f"{NAME.model.activation_func}=silu", f"{NAME.model.gated_linear_unit}=true"),
    "untie_embeddings_and_output_weights": (f"{NAME.model.share_embeddings_and_output_weights}=false",),
    "use_rope_scaling": (f"{NAME.model.rope_scaling}=true",),
    "use_rotary_position_embeddings": (f"{NAME.model.position_embedding_type}=rope",),
}
_REMOVED = {
    "attention_backend": f"{NAME.model.attention_backend}=auto uses the fastest installed kernel",
    "fp8_format": "FP8 training is not supported",
    "group_query_attention": f"set {NAME.model.num_query_groups}",
    "merge_file": f"set {NAME.tokenizer.tokenizer_model} to the folder of the file",
    "no_create_attention_mask_in_dataloader": "no mask tensor is ever created",
    "no_masked_softmax_fusion": "attention is fused or tiled",
    "use_dist_ckpt": "checkpoints are always distributed",
    "use_flash_attn": f"{NAME.model.attention_backend}=auto uses the fastest installed kernel",
    "use_mcore_models": "all models are megatron-core's",
}
_WITH_VALUE = ("attention_backend", "fp8_format", "merge_file")  # removed flags that take a value
_MODELS = ("hf_path", "hf_model_id", "hf_model", "hf_model_path")
_PLAIN = re.compile(r"[A-Za-z_./][\w./@+-]*")
_NUMBER = re.compile(r"-?[\d.]+(e-?\d+)?")
_WORDS = ("true", "false", "null", "nan", "inf", "on", "off", "yes", "no")


@dataclass
class _Flag:
    """A flag as typed."""

    text: str
    values: list[str] = field(default_factory=list)

    @property
    def name(self) -> str:
        return self.text.lstrip("-").replace("-", "_")

    def __str__(self) -> str:
        return shlex.join([self.text, *self.values])


def answer(program: str, argv: Sequence[str], unknown: Sequence[str]) -> str:
    """Return the settings to write instead of unknown flags, and the command to type.

    Args:
        argv: all arguments.
        unknown: arguments that the command does not have.
    """
    flags, others = _split(argv, set(unknown))
    answers = [(flag, *_answer(flag)) for flag in flags]
    if not any(settings or note for _, settings, note in answers):
        return (
            f"unrecognized arguments: {' '.join(unknown)}{_nearest(flags[0]) if flags else ''}\n"
            f"Fix: write settings as key=value; '{program} --help' lists the options."
        )
    width = max(len(str(flag)) for flag, *_ in answers)
    lines = [
        f"  {flag!s:{width}}  {_shell(settings) or note or f'no setting has this name{_nearest(flag)}'}"
        for flag, settings, note in answers
    ]
    typed = [*program.split(), *others, *(each for _, settings, _ in answers for each in settings)]
    begin = "these are flags of Megatron-LM or Megatron-Bridge; write settings as key=value."
    return "\n".join([begin, *lines, f"Fix: {_shell(typed)}"])


def _nearest(flag: _Flag) -> str:
    return nearest(flag.name, sorted(_settings()))


def _shell(words: Sequence[str]) -> str:
    """Return words quoted for a shell, in double quotation marks if possible."""
    double = re.compile(r"""[^"$`\\!]*'[^"$`\\!]*""")
    return " ".join(f'"{word}"' if double.fullmatch(word) else shlex.quote(word) for word in words)


def _split(argv: Sequence[str], unknown: set[str]) -> tuple[list[_Flag], list[str]]:
    """Split arguments into unknown flags with their values, and all others."""
    flags: list[_Flag] = []
    others: list[str] = []
    takes = 0.0
    for word in argv:
        if word in unknown and word.startswith("-"):
            text, has_value, value = word.partition("=")
            flag = _Flag(text, [value] if has_value else [])
            flags.append(flag)
            takes = 0 if has_value else _values_of(flag.name)
        elif takes and "=" not in word and (not word.startswith("-") or re.fullmatch(r"-[\d.]\S*", word)):
            flags[-1].values.append(word)
            takes -= 1
        else:
            others.append(word)
            takes = 0
    return flags, others


def _answer(flag: _Flag) -> tuple[tuple[str, ...], str]:
    """Return the settings that replace a flag, or a note."""
    name, path = flag.name, _setting(flag.name)
    if name in _MODELS:
        return (), f"first {commands_to_import(flag.values[0] if flag.values else 'OWNER/MODEL')}"
    if name in _REPLACED:
        return _REPLACED[name], ""
    if name in _REMOVED:
        return (), f"remove it: {_REMOVED[name]}"
    if path:
        is_off = name.startswith("no_") and name not in _settings()
        return (f"{path}={'false' if is_off else _written(path, flag.values)}",), ""
    if known := _upstream_meaning(name.removeprefix("no_")):
        return (), f"{known.fix}: {known.message}" if known.message else "remove it: it has no effect"
    return (), ""


@cache
def _settings() -> dict[str, str]:
    """Return flag name -> dotted name of the setting."""
    found: dict[str, str] = {}
    for path in settings():
        found.setdefault(path.partition(".")[2], path)
    return found | _RENAMED


def _upstream_meaning(name: str) -> Meaning | None:
    """Return the meaning of an upstream setting, by its name without section."""
    return by_bare_name().get(name, (name, None))[1]


def _setting(name: str) -> str | None:
    """Return the setting of a flag, also of a ``no_`` flag."""
    path, known = _settings().get(name), _upstream_meaning(name)
    if path is None and known and known.renamed:
        return known.setting
    if path is None and name.startswith("no_"):
        path = _settings().get(name.removeprefix("no_"))
        return path if path and bool in _kinds(path) else None
    return path


def _kinds(path: str) -> list[Any]:
    return alternatives(kind_of(RunConfig, path))


def _values_of(name: str) -> float:
    """Return the largest number of values that a flag takes."""
    if name in _REPLACED or (name in _REMOVED and name not in _WITH_VALUE):
        return 0
    path = _setting(name)
    if path is None:
        return 1
    return 0 if bool in _kinds(path) else float("inf") if list in _kinds(path) else 1


def _written(path: str, values: Sequence[str]) -> str:
    """Return a flag's values as written in an override."""
    kinds = _kinds(path)
    if not values:
        return "true" if bool in kinds else "VALUE"
    if list in kinds and not (len(values) == 1 and (str in kinds or (int in kinds and values[0].isdigit()))):
        parts = [part for value in values for part in re.split(r"[,\s]+", value.strip("()[]")) if part]
        return f"[{','.join(part if _NUMBER.fullmatch(part) else _quoted(part) for part in parts)}]"
    return _quoted(values[0]) if str in kinds or Literal in kinds else values[0]


def _quoted(text: str) -> str:
    """Return text for Hydra, quoted if Hydra would read it as another type."""
    if _PLAIN.fullmatch(text) and text.lower() not in _WORDS:
        return text
    return "'" + text.replace("'", r"\'") + "'"
