"""Length, batches, evaluation and exit of a run."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from megatron_cp.config.setting import DATA, SCHEDULE, When, equals, positive, setting, size

EVALUATES = When("validation.eval_iters", lambda run: run.validation.evaluates, "validation.eval_iters=10")


@dataclass
class TrainConfig:
    train_iters: int | None = size(
        100,
        "optimizer steps of the run; null: given as train_epochs or train_samples",
        SCHEDULE,
        flags="-ms --max_steps",
    )
    train_epochs: float | None = positive(
        None, "length in passes over the training data, instead of train_iters; rounded up to whole global batches"
    )
    train_samples: int | None = setting(None, "length in samples, in whole global batches, instead of train_iters")
    skip_train: bool = setting(False, "only evaluate; train nothing")
    global_batch_size: int = size(
        8, "samples per optimizer step, over all ranks", SCHEDULE, DATA, flags="-gb --global_batch_size"
    )
    micro_batch_size: int = size(1, "samples per forward pass on a rank", flags="-mb --micro_batch_size")
    exit_interval: int | None = positive(None, "exit at a multiple of this many steps")
    exit_duration_in_mins: float | None = positive(None, "exit after this many minutes")
    exit_signal_handler: bool = setting(True, "on SIGTERM or SIGINT, save a checkpoint after the step and exit")
    on_nonfinite: Literal["stop", "skip"] = setting(
        "stop", "on a nan or inf loss or gradient: stop the run, or skip the step"
    )
    loss_spike_factor: float | None = positive(
        10.0, "report losses this many standard deviations above the mean; null: off"
    )
    check_memory: bool = setting(
        True, "refuse a run whose estimated peak memory exceeds a GPU's", flags="--no-memory-check"
    )
    manual_gc: bool = setting(False, "run Python's garbage collector between steps only")
    manual_gc_interval: int = setting(
        0, "with manual_gc: steps between collections; 0: never", least=0, when=equals("train.manual_gc", True)
    )

    @property
    def iterations(self) -> int:
        """The length of a run; one in epochs has it once its data are open."""
        assert self.train_iters is not None
        return self.train_iters


@dataclass
class ValidationConfig:
    eval_interval: int | None = positive(None, "steps between evaluations; null: at the end only")
    eval_iters: int = setting(
        0, "batches per evaluation; 0: no evaluation", least=0, when=equals("validation.full_validation", False)
    )
    full_validation: bool = setting(
        False,
        "evaluate each held-out sample once, instead of eval_iters batches, and report the mean over samples, too; "
        "for packs",
    )
    eval_on_start: bool = setting(False, "evaluate before the first step, too", when=EVALUATES)
    eval_global_batch_size: int | None = setting(
        None, "global batch size of evaluation; null: train.global_batch_size", least=1, when=EVALUATES
    )
    eval_micro_batch_size: int | None = setting(
        None, "micro batch size of evaluation; null: train.micro_batch_size", least=1, when=EVALUATES
    )

    @property
    def evaluates(self) -> bool:
        """Whether held-out data are evaluated."""
        return self.eval_iters > 0 or self.full_validation
