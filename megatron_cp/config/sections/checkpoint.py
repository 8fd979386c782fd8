"""What is saved, and what a run begins with."""

from __future__ import annotations

from dataclasses import dataclass

from megatron_cp.config.setting import positive, setting


@dataclass
class CheckpointConfig:
    save: str | None = setting(None, "the run folder; null: runs/NAME of the recipe", flags="--save_dir")
    load: str | None = setting(None, "folder to go on from; null: the same as save", flags="--load_dir")
    save_interval: int | None = positive(
        None, "steps between checkpoints; null: at the end only", flags="--save_interval"
    )
    save_optim: bool = setting(True, "save the optimizer's state")
    save_rng: bool = setting(True, "save the random generators' states")
    load_optim: bool = setting(True, "go on with the optimizer's state")
    load_rng: bool = setting(True, "go on with the random generators' states")
    finetune: bool = setting(False, "take the weights only, and begin at step 0")
    pretrained_checkpoint: str | None = setting(
        None, "weights to begin with, until the run has checkpoints of its own", flags="--pretrained_checkpoint"
    )
    exit_on_missing_checkpoint: bool = setting(False, "end instead of beginning fresh")
    ckpt_step: int | None = setting(None, "which checkpoint; null: the latest")
    most_recent_k: int = setting(-1, "checkpoints to keep; -1: all")
    save_retain_interval: int | None = positive(
        None, "also keep checkpoints at multiples of so many steps, whatever most_recent_k"
    )
    async_save: bool = setting(False, "write while training goes on")
    fully_parallel_save: bool = setting(True, "data-parallel ranks divide what is written")
    verify_checksums: bool = setting(True, "compare a checkpoint's files with their checksums before loading")
