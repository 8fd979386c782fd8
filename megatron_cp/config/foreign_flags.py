"""Flags of Megatron-LM and Megatron-Bridge, answered with the settings to write instead. Pure.

Most flags follow by rule: a setting's name with dashes (``--num-layers``), and ``--no-NAME`` for a switch. Tables hold
the others.
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

_CALLED = {
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
    "vocab_size": NAME.tokenizer.vocab_size,  # read for a NullTokenizer, as Megatron-LM's
}
_MEANS = {
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
_LEFT_OUT = {
    "attention_backend": f"{NAME.model.attention_backend}=auto takes the fastest kernel that is installed",
    "fp8_format": "there is no FP8 training",
    "group_query_attention": f"{NAME.model.num_query_groups} decides",
    "merge_file": f"{NAME.tokenizer.tokenizer_model} names the folder that holds it",
    "no_create_attention_mask_in_dataloader": "attention knows its mask",
    "no_masked_softmax_fusion": "attention is fused or in tiles",
    "use_dist_ckpt": "checkpoints are always distributed",
    "use_flash_attn": f"{NAME.model.attention_backend}=auto takes the fastest kernel that is installed",
    "use_mcore_models": "models are always megatron-core's",
}
_WITH_VALUE = ("attention_backend", "fp8_format", "merge_file")  # of those that are left out
_MODELS = ("hf_path", "hf_model_id", "hf_model", "hf_model_path")
_PLAIN = re.compile(r"[A-Za-z_./][\w./@+-]*")
_NUMBER = re.compile(r"-?[\d.]+(e-?\d+)?")
_WORDS = ("true", "false", "null", "nan", "inf", "on", "off", "yes", "no")


@dataclass
class _Flag:
    """A flag as it was given."""

    text: str
    values: list[str] = field(default_factory=list)

    @property
    def name(self) -> str:
        return self.text.lstrip("-").replace("-", "_")

    def __str__(self) -> str:
        return shlex.join([self.text, *self.values])


def answer(program: str, argv: Sequence[str], unknown: Sequence[str]) -> str:
    """Say what to write instead of the flags that a command does not know, and the whole command to type.

    Args:
        argv: all arguments.
        unknown: those that are none of the command's flags.
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
        f"  {flag!s:{width}}  {_shell(settings) or note or f'no setting is called so{_nearest(flag)}'}"
        for flag, settings, note in answers
    ]
    typed = [*program.split(), *others, *(each for _, settings, _ in answers for each in settings)]
    begin = "these are flags of Megatron-LM or Megatron-Bridge; here a setting is written key=value."
    return "\n".join([begin, *lines, f"Fix: {_shell(typed)}"])


def _nearest(flag: _Flag) -> str:
    return nearest(flag.name, sorted(_settings()))


def _shell(words: Sequence[str]) -> str:
    """Words as a shell takes them, in double quotation marks where it takes those."""
    double = re.compile(r"""[^"$`\\!]*'[^"$`\\!]*""")
    return " ".join(f'"{word}"' if double.fullmatch(word) else shlex.quote(word) for word in words)


def _split(argv: Sequence[str], unknown: set[str]) -> tuple[list[_Flag], list[str]]:
    """The unknown flags with their values, and all other arguments."""
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
    """The settings to write instead of a flag, or else what there is to say of it."""
    name, path = flag.name, _setting(flag.name)
    if name in _MODELS:
        return (), f"first {commands_to_import(flag.values[0] if flag.values else 'OWNER/MODEL')}"
    if name in _MEANS:
        return _MEANS[name], ""
    if name in _LEFT_OUT:
        return (), f"leave it out: {_LEFT_OUT[name]}"
    if path:
        is_off = name.startswith("no_") and name not in _settings()
        return (f"{path}={'false' if is_off else _written(path, flag.values)}",), ""
    if known := _upstreams(name.removeprefix("no_")):
        return (), f"{known.fix}: {known.message}" if known.message else "leave it out: nothing here reads it"
    return (), ""


@cache
def _settings() -> dict[str, str]:
    """Dotted names of settings by what their flags are called."""
    found: dict[str, str] = {}
    for path in settings():
        found.setdefault(path.partition(".")[2], path)
    return found | _CALLED


def _upstreams(name: str) -> Meaning | None:
    """What a setting of Bridge's or megatron-core's, by its bare name, means here."""
    return by_bare_name().get(name, (name, None))[1]


def _setting(name: str) -> str | None:
    """The setting that a flag stands for, also where ``no_`` switches it off."""
    path, known = _settings().get(name), _upstreams(name)
    if path is None and known and known.message.startswith("is '"):
        return known.setting
    if path is None and name.startswith("no_"):
        path = _settings().get(name.removeprefix("no_"))
        return path if path and bool in _kinds(path) else None
    return path


def _kinds(path: str) -> list[Any]:
    return alternatives(kind_of(RunConfig, path))


def _values_of(name: str) -> float:
    """The most values that a flag takes."""
    if name in _MEANS or (name in _LEFT_OUT and name not in _WITH_VALUE):
        return 0
    path = _setting(name)
    if path is None:
        return 1
    return 0 if bool in _kinds(path) else float("inf") if list in _kinds(path) else 1


def _written(path: str, values: Sequence[str]) -> str:
    """Values of a flag as an override has them."""
    kinds = _kinds(path)
    if not values:
        return "true" if bool in kinds else "VALUE"
    if list in kinds and not (len(values) == 1 and (str in kinds or (int in kinds and values[0].isdigit()))):
        parts = [part for value in values for part in re.split(r"[,\s]+", value.strip("()[]")) if part]
        return f"[{','.join(part if _NUMBER.fullmatch(part) else _quoted(part) for part in parts)}]"
    return _quoted(values[0]) if str in kinds or Literal in kinds else values[0]


def _quoted(text: str) -> str:
    """A text as Hydra takes it: in quotation marks where it would be read as something else."""
    if _PLAIN.fullmatch(text) and text.lower() not in _WORDS:
        return text
    return "'" + text.replace("'", r"\'") + "'"
