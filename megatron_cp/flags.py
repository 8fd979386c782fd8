"""Flags for frequent settings, called as Megatron-Bridge's: the same ones for every command that takes a recipe."""

from __future__ import annotations

import argparse
from typing import Any

# Short and long flag (Bridge's), type, the setting it stands for.
_FLAGS: tuple[tuple[str | None, str, type, str], ...] = (
    ("-ms", "--max_steps", int, "train.train_iters"),
    ("-gb", "--global_batch_size", int, "train.global_batch_size"),
    ("-mb", "--micro_batch_size", int, "train.micro_batch_size"),
    ("-sl", "--seq_length", int, "dataset.seq_length"),
    ("-tp", "--tensor_model_parallel_size", int, "model.tensor_model_parallel_size"),
    ("-pp", "--pipeline_model_parallel_size", int, "model.pipeline_model_parallel_size"),
    ("-cp", "--context_parallel_size", int, "model.context_parallel_size"),
    ("-vp", "--virtual_pipeline_model_parallel_size", int, "model.virtual_pipeline_model_parallel_size"),
    ("-ep", "--expert_model_parallel_size", int, "model.expert_model_parallel_size"),
    ("-etp", "--expert_tensor_parallel_size", int, "model.expert_tensor_parallel_size"),
    (None, "--lr", float, "optimizer.lr"),
    (None, "--min_lr", float, "optimizer.min_lr"),
    (None, "--warmup_iters", int, "scheduler.lr_warmup_iters"),
    (None, "--pretrained_checkpoint", str, "checkpoint.pretrained_checkpoint"),
    (None, "--save_dir", str, "checkpoint.save"),
    (None, "--load_dir", str, "checkpoint.load"),
    (None, "--save_interval", int, "checkpoint.save_interval"),
)


def add_flags(parser: argparse.ArgumentParser) -> None:
    """Let a command take the flags; :func:`given` tells which ones it was given."""
    group = parser.add_argument_group("flags for frequent settings")
    for short, long, kind, setting in _FLAGS:
        names = dict.fromkeys(name for name in (short, long, long.replace("_", "-")) if name)
        group.add_argument(*names, dest=setting, type=kind, metavar=kind.__name__, help=f"-> {setting}")


def given(args: argparse.Namespace) -> dict[str, Any]:
    """The settings that were given by flags, by their dotted names: ``flags`` of ``load_recipe``."""
    values = {setting: getattr(args, setting) for *_, setting in _FLAGS}
    return {setting: value for setting, value in values.items() if value is not None}
