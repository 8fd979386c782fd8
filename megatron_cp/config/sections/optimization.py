"""The optimizer and its schedule."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Literal

from megatron_cp.config.setting import OPTIMIZER, SCHEDULE, When, equals, setting, share

ADAM, SGD = equals("optimizer.optimizer", "adam"), equals("optimizer.optimizer", "sgd")
WSD = equals("scheduler.lr_decay_style", "WSD")


def _own_decay_is_read(run: Any) -> bool:
    """Its own start and end replace it; a zero is a value, too."""
    return None in (run.scheduler.start_weight_decay, run.scheduler.end_weight_decay)


NOT_SCHEDULED = When(
    "scheduler.start_weight_decay=null or scheduler.end_weight_decay=null",
    _own_decay_is_read,
    "scheduler.start_weight_decay=null, or scheduler.end_weight_decay=null",
)


@dataclass
class OptimizerConfig:
    optimizer: Literal["adam", "sgd"] = setting("adam", "adam (AdamW) or sgd", OPTIMIZER)
    lr: float = setting(3e-4, "learning rate after the warmup", SCHEDULE, flags="--lr")
    min_lr: float = setting(3e-5, "learning rate that the schedule ends at", SCHEDULE, flags="--min_lr")
    weight_decay: float = setting(
        0.1, "decoupled decay of all weights but biases and norms", SCHEDULE, when=NOT_SCHEDULED
    )
    adam_beta1: float = share(0.9, "decay of the mean of gradients", when=ADAM)
    adam_beta2: float = share(0.95, "decay of the mean of their squares", when=ADAM)
    adam_eps: float = setting(  # a gradient of 0 divided by 0 is no number
        1e-8, "added to the root of that mean", least=1e-30, when=ADAM
    )
    sgd_momentum: float = share(0.9, "share of the last step in the next", when=SGD)
    clip_grad: float = setting(1.0, "largest norm of all gradients; 0: any", least=0)
    use_distributed_optimizer: bool = setting(True, "data-parallel ranks divide the optimizer's state", OPTIMIZER)
    optimizer_cpu_offload: bool = setting(False, "refused, see rule K28")


@dataclass
class SchedulerConfig:
    lr_decay_style: Literal["cosine", "linear", "constant", "inverse-square-root", "WSD"] = setting(
        "cosine", "how the learning rate falls after the warmup", SCHEDULE
    )
    lr_warmup_iters: int = setting(0, "steps over which it rises", SCHEDULE, flags="--warmup_iters")
    lr_warmup_fraction: float | None = setting(None, "... or this share of lr_decay_iters", SCHEDULE)
    lr_warmup_init: float = setting(0.0, "what it rises from", SCHEDULE)
    lr_decay_iters: int | None = setting(None, "steps until it has fallen; null: train.train_iters", SCHEDULE)
    lr_wsd_decay_style: Literal["exponential", "linear", "cosine", "minus_sqrt"] = setting(
        "exponential", "how it falls at the end of WSD", SCHEDULE, when=WSD
    )
    lr_wsd_decay_iters: int | None = setting(None, "steps of that fall", SCHEDULE, when=WSD)
    lr_warmup_samples: int = setting(0, "instead of iterations: whole global batches of so many samples")
    lr_decay_samples: int | None = setting(None, "as above")
    lr_wsd_decay_samples: int | None = setting(None, "as above")
    start_weight_decay: float | None = setting(None, "weight decay of the first step; null: the optimizer's", SCHEDULE)
    end_weight_decay: float | None = setting(None, "weight decay of the last step; null: the optimizer's", SCHEDULE)
    weight_decay_incr_style: Literal["constant", "linear", "cosine"] = setting(
        "constant", "how it goes from one to the other", SCHEDULE
    )
    override_opt_param_scheduler: bool = setting(False, "a resumed run takes its own schedule, not the checkpoint's")
    use_checkpoint_opt_param_scheduler: bool = setting(
        False, "a resumed run takes the checkpoint's schedule, whatever its own"
    )

    def warmup_iters(self, train_iters: int) -> int:
        """Iterations over which the learning rate rises.

        A recipe's warmup is written for its full length: where the schedule is as long as the run, the warmup ends at
        least one iteration before the run does. Rule I9 says so.
        """
        decay = train_iters if self.lr_decay_iters is None else self.lr_decay_iters
        if self.lr_warmup_fraction is not None:
            return int(self.lr_warmup_fraction * decay)
        return min(self.lr_warmup_iters, max(0, decay - 1)) if decay == train_iters else self.lr_warmup_iters
