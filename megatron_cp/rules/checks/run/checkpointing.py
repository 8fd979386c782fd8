"""K. Checkpoints, exits and numbers that go wrong."""

from __future__ import annotations

from collections.abc import Iterator

from megatron_cp.rules.base import Context, Finding, broken, rule
from megatron_cp.rules.proposals import typed

_MINUTES_OF_A_YEAR = 365 * 24 * 60  # longer ones end in an OverflowError once torch has them


@rule(
    "K50",
    "Checkpoints to keep for ever are among those that are saved.",
    "save_retain_interval keeps its multiples; a checkpoint is written at multiples of save_interval. megatron-core "
    "asks for the same.",
    broken("checkpoint.save_interval=20", "checkpoint.save_retain_interval=50"),
)
def retained_checkpoints_are_saved(c: Context) -> Iterator[Finding]:
    every, kept = c.config.checkpoint.save_interval, c.config.checkpoint.save_retain_interval
    if kept is None or kept < 1:
        return
    if every is None:
        yield Finding(
            "checkpoint.save_retain_interval",
            f"keeps multiples of {kept}, but checkpoint.save_interval is not set: only the end is saved",
            f"checkpoint.save_interval={kept}",
        )
    elif every > 0 and kept % every:
        yield Finding(
            "checkpoint.save_retain_interval",
            f"keeps multiples of {kept}, which checkpoint.save_interval={every} does not divide",
            f"checkpoint.save_retain_interval={max(1, kept // every) * every}",
        )


@rule(
    "K51",
    "Intervals, times, thresholds and scales are above zero.",
    "Zero would mean always or never, depending on who reads it; null means never, or the usual scale.",
    broken("checkpoint.save_interval=0"),
)
def intervals_are_positive(c: Context) -> Iterator[Finding]:
    config = c.config
    values = {
        "checkpoint.save_interval": config.checkpoint.save_interval,
        "checkpoint.save_retain_interval": config.checkpoint.save_retain_interval,
        "validation.eval_interval": config.validation.eval_interval,
        "train.exit_interval": config.train.exit_interval,
        "train.exit_duration_in_mins": config.train.exit_duration_in_mins,
        "train.loss_spike_factor": config.train.loss_spike_factor,
        "dist.distributed_timeout_minutes": config.dist.distributed_timeout_minutes,
        "model.softmax_scale": config.model.softmax_scale,
        "model.seq_len_interpolation_factor": config.model.seq_len_interpolation_factor,
        "model.rope_scaling_factor": config.model.rope_scaling_factor,
        "model.yarn_beta_fast": config.model.yarn_beta_fast,
        "model.yarn_beta_slow": config.model.yarn_beta_slow,
        "mixed_precision.loss_scale": config.mixed_precision.loss_scale,
        "mixed_precision.initial_loss_scale": config.mixed_precision.initial_loss_scale,
        "mixed_precision.min_loss_scale": config.mixed_precision.min_loss_scale,
    }
    fixes = {
        "dist.distributed_timeout_minutes": 10,
        "model.rope_scaling_factor": 8.0,
        "model.yarn_beta_fast": 32.0,
        "model.yarn_beta_slow": 1.0,
        "mixed_precision.initial_loss_scale": 2.0**32,
        "mixed_precision.min_loss_scale": 1.0,
    }
    for field, value in values.items():
        if value is not None and value <= 0:
            yield Finding(field, f"must be above 0, got {value}", typed(field, fixes.get(field)))
    minutes = config.dist.distributed_timeout_minutes
    if minutes > _MINUTES_OF_A_YEAR:
        message = f"must be at most {_MINUTES_OF_A_YEAR}, a year, got {minutes}"
        yield Finding("dist.distributed_timeout_minutes", message, "dist.distributed_timeout_minutes=10")


@rule(
    "K52",
    "A run that is saved without its optimizer cannot be resumed with it.",
    "Adam's moments are gone; a run that was stopped and started again with load_optim would end at once.",
    broken("checkpoint.save_optim=false", "checkpoint.save_interval=10"),
    severity="warning",
)
def resuming_needs_the_optimizer(c: Context) -> Iterator[Finding]:
    wanted = c.config.checkpoint
    if not wanted.save_optim and wanted.load_optim and wanted.save_interval is not None:
        yield Finding(
            "checkpoint.save_optim",
            "checkpoints without the optimizer's state end an attempt to go on from them",
            "checkpoint.save_optim=true, or checkpoint.load_optim=false (goes on with a fresh optimizer)",
        )


@rule(
    "K53",
    "Checkpoints have a folder, and a number of them is kept.",
    "An empty path is the current folder; only -1 (all of them) or at least one checkpoint can be kept.",
    broken("checkpoint.save=''"),
)
def checkpoints_have_a_place(c: Context) -> Iterator[Finding]:
    wanted = c.config.checkpoint
    places = {"save": wanted.save, "load": wanted.load, "pretrained_checkpoint": wanted.pretrained_checkpoint}
    for name, place in places.items():
        if place == "" and not (name == "load" and wanted.save == ""):  # load follows save
            yield Finding(f"checkpoint.{name}", "an empty path names no folder", f"checkpoint.{name}=null")
    if wanted.most_recent_k != -1 and wanted.most_recent_k < 1:
        yield Finding(
            "checkpoint.most_recent_k",
            f"must be -1, which keeps all, or at least 1, got {wanted.most_recent_k}",
            "checkpoint.most_recent_k=-1",
        )
