"""How long a run is, of which batches, and how it is evaluated and ended."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from megatron_cp.config.setting import DATA, SCHEDULE, counted, equals, positive, setting, size

EVALUATES = counted("validation.eval_iters", 10)


@dataclass
class TrainConfig:
    train_iters: int = size(100, "optimizer steps of the run", SCHEDULE, flags="-ms --max_steps")
    train_samples: int | None = setting(None, "instead: whole global batches of so many samples")
    skip_train: bool = setting(False, "measure the losses of held-out data, and change nothing")
    global_batch_size: int = size(
        8, "samples of an optimizer step, over all ranks", SCHEDULE, DATA, flags="-gb --global_batch_size"
    )
    micro_batch_size: int = size(1, "samples that a rank computes at once", flags="-mb --micro_batch_size")
    exit_interval: int | None = positive(None, "end the run at a multiple of so many steps")
    exit_duration_in_mins: float | None = positive(None, "end the run after so many minutes")
    exit_signal_handler: bool = setting(True, "SIGTERM and SIGINT end the run after the step, with a checkpoint")
    on_nonfinite: Literal["stop", "skip"] = setting(
        "stop", "a loss or gradient that is nan or inf ends the run, or its step is left out"
    )
    loss_spike_factor: float | None = positive(
        10.0, "report losses so many standard deviations above the usual; null: none"
    )
    check_memory: bool = setting(
        True, "refuse a run whose estimated peak memory is more than a GPU has", flags="--no-memory-check"
    )
    manual_gc: bool = setting(False, "collect Python's garbage between steps only")
    manual_gc_interval: int = setting(
        0, "with manual_gc: steps between collections; 0: never", least=0, when=equals("train.manual_gc", True)
    )


@dataclass
class ValidationConfig:
    eval_interval: int | None = positive(None, "steps between evaluations; null: at the end only")
    eval_iters: int = setting(0, "batches of an evaluation; 0: none", least=0)
    eval_global_batch_size: int | None = setting(None, "null: train.global_batch_size", least=1, when=EVALUATES)
    eval_micro_batch_size: int | None = setting(None, "null: train.micro_batch_size", least=1, when=EVALUATES)
