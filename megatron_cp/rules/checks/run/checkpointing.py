"""K rules on checkpoints and on intervals."""

from __future__ import annotations

from collections.abc import Iterator

from megatron_cp.config.names import NAME
from megatron_cp.rules.base import Context, Finding, broken, rule
from megatron_cp.rules.proposals import default_of


@rule(
    "K50",
    "Checkpoints to keep are among the checkpoints that are saved.",
    "save_retain_interval keeps its multiples; save_interval writes checkpoints at its multiples. megatron-core "
    "requires the same.",
    broken(checkpoint=dict(save_interval=20, save_retain_interval=50)),
)
def retained_checkpoints_are_saved(c: Context) -> Iterator[Finding]:
    every, kept = c.config.checkpoint.save_interval, c.config.checkpoint.save_retain_interval
    if kept is None or kept < 1:
        return
    if every is None:
        yield Finding(
            NAME.checkpoint.save_retain_interval,
            f"{NAME.checkpoint.save_interval} is not set: only the last iteration is saved",
            f"{NAME.checkpoint.save_interval}={kept}",
        )
    elif every > 0 and kept % every:
        yield Finding(
            NAME.checkpoint.save_retain_interval,
            f"must be a multiple of {NAME.checkpoint.save_interval}={every}",
            f"={max(1, kept // every) * every}",
        )


@rule(
    "K51",
    "Intervals, times, thresholds and scales are above zero.",
    "Zero is ambiguous: always or never. null means never, or the default scale.",
    broken(checkpoint=dict(save_interval=0)),
)
def intervals_are_positive(c: Context) -> Iterator[Finding]:
    for field, value, facts in c.out_of_range("positive"):
        limit = "above 0" if value <= 0 else f"at most {facts.most}"
        yield Finding(field, f"must be {limit}, got {value}", default_of(field))


@rule(
    "K52",
    "A run saved without its optimizer cannot be resumed with it.",
    "Adam's moments are lost. With load_optim a resumed run would stop with an error.",
    broken(checkpoint=dict(save_optim=False, save_interval=10)),
    severity="warning",
)
def resuming_needs_the_optimizer(c: Context) -> Iterator[Finding]:
    wanted = c.config.checkpoint
    if not wanted.save_optim and wanted.load_optim and wanted.save_interval is not None:
        yield Finding(
            NAME.checkpoint.save_optim,
            f"resuming will fail: checkpoints have no optimizer state, but {NAME.checkpoint.load_optim} is true",
            "=true",
            f"{NAME.checkpoint.load_optim}=false (resumes with a fresh optimizer)",
        )


@rule(
    "K53",
    "Checkpoint folders have names, and at least one checkpoint is kept.",
    "An empty path is the current folder. most_recent_k is -1 (keep all) or at least 1.",
    broken(f"{NAME.checkpoint.save}=''"),
)
def checkpoint_folders_are_named(c: Context) -> Iterator[Finding]:
    wanted = c.config.checkpoint
    places = {"save": wanted.save, "load": wanted.load, "pretrained_checkpoint": wanted.pretrained_checkpoint}
    for name, place in places.items():
        if place == "" and not (name == "load" and wanted.save == ""):  # load follows save
            yield Finding(f"checkpoint.{name}", "an empty path names no folder", "=null")
    if wanted.most_recent_k != -1 and wanted.most_recent_k < 1:
        yield Finding(
            NAME.checkpoint.most_recent_k,
            f"must be -1 (keep all) or at least 1, got {wanted.most_recent_k}",
            "=-1",
        )
