"""Checkpoints: saving, loading and pretrained weights."""

from __future__ import annotations

from dataclasses import dataclass

from megatron_cp.config.setting import positive, setting


@dataclass
class CheckpointConfig:
    save: str | None = setting(None, "run folder; null: runs/NAME, from the recipe", flags="--save_dir")
    load: str | None = setting(None, "folder to resume from; null: the same as save", flags="--load_dir")
    save_interval: int | None = positive(
        None, "steps between checkpoints; null: at the end only", flags="--save_interval"
    )
    save_optim: bool = setting(True, "save the optimizer's state")
    save_rng: bool = setting(True, "save the random generators' states")
    load_optim: bool = setting(True, "load the optimizer's state")
    load_rng: bool = setting(True, "load the random generators' states")
    finetune: bool = setting(False, "load only weights, and start at step 0")
    pretrained_checkpoint: str | None = setting(
        None, "initial weights, used until the run has its own checkpoints", flags="--pretrained_checkpoint"
    )
    exit_on_missing_checkpoint: bool = setting(False, "exit if there is no checkpoint to resume from")
    ckpt_step: int | None = setting(None, "step of the checkpoint to load; null: the latest")
    most_recent_k: int = setting(-1, "number of checkpoints to keep; -1: all")
    save_retain_interval: int | None = positive(
        None, "also keep checkpoints at multiples of this many steps, beyond most_recent_k"
    )
    async_save: bool = setting(False, "write checkpoints while training continues")
    fully_parallel_save: bool = setting(True, "divide the writing over data-parallel ranks")
    verify_checksums: bool = setting(True, "compare checksums of a checkpoint's files before loading")
