"""K. Checkpoints, exits and numbers that go wrong."""

from __future__ import annotations

from collections.abc import Iterator

from megatron_cp.config.names import NAME
from megatron_cp.rules.base import Context, Finding, broken, rule
from megatron_cp.rules.proposals import default_of


@rule(
    "K50",
    "Checkpoints to keep for ever are among those that are saved.",
    "save_retain_interval keeps its multiples; a checkpoint is written at multiples of save_interval. megatron-core "
    "asks for the same.",
    broken(checkpoint=dict(save_interval=20, save_retain_interval=50)),
)
def retained_checkpoints_are_saved(c: Context) -> Iterator[Finding]:
    every, kept = c.config.checkpoint.save_interval, c.config.checkpoint.save_retain_interval
    if kept is None or kept < 1:
        return
    if every is None:
        yield Finding(
            NAME.checkpoint.save_retain_interval,
            f"keeps multiples of {kept}, but {NAME.checkpoint.save_interval} is not set: only the end is saved",
            f"{NAME.checkpoint.save_interval}={kept}",
        )
    elif every > 0 and kept % every:
        yield Finding(
            NAME.checkpoint.save_retain_interval,
            f"keeps multiples of {kept}, which {NAME.checkpoint.save_interval}={every} does not divide",
            f"={max(1, kept // every) * every}",
        )


@rule(
    "K51",
    "Intervals, times, thresholds and scales are above zero.",
    "Zero would mean always or never, depending on who reads it; null means never, or the usual scale.",
    broken(checkpoint=dict(save_interval=0)),
)
def intervals_are_positive(c: Context) -> Iterator[Finding]:
    for field, value, facts in c.out_of_range("positive"):
        limit = "above 0" if value <= 0 else f"at most {facts.most}"
        yield Finding(field, f"must be {limit}, got {value}", default_of(field))


@rule(
    "K52",
    "A run that is saved without its optimizer cannot be resumed with it.",
    "Adam's moments are gone; a run that was stopped and started again with load_optim would end at once.",
    broken(checkpoint=dict(save_optim=False, save_interval=10)),
    severity="warning",
)
def resuming_needs_the_optimizer(c: Context) -> Iterator[Finding]:
    wanted = c.config.checkpoint
    if not wanted.save_optim and wanted.load_optim and wanted.save_interval is not None:
        yield Finding(
            NAME.checkpoint.save_optim,
            "checkpoints without the optimizer's state end an attempt to go on from them",
            "=true",
            f"{NAME.checkpoint.load_optim}=false (goes on with a fresh optimizer)",
        )


@rule(
    "K53",
    "Checkpoints have a folder, and a number of them is kept.",
    "An empty path is the current folder; only -1 (all of them) or at least one checkpoint can be kept.",
    broken(f"{NAME.checkpoint.save}=''"),
)
def checkpoints_have_a_place(c: Context) -> Iterator[Finding]:
    wanted = c.config.checkpoint
    places = {"save": wanted.save, "load": wanted.load, "pretrained_checkpoint": wanted.pretrained_checkpoint}
    for name, place in places.items():
        if place == "" and not (name == "load" and wanted.save == ""):  # load follows save
            yield Finding(f"checkpoint.{name}", "an empty path names no folder", "=null")
    if wanted.most_recent_k != -1 and wanted.most_recent_k < 1:
        yield Finding(
            NAME.checkpoint.most_recent_k,
            f"must be -1, which keeps all, or at least 1, got {wanted.most_recent_k}",
            "=-1",
        )
