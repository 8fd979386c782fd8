"""Optimizer and schedules."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from megatron_cp.config.setting import LAYOUT, OPTIMIZER, SCHEDULE, either, equals, given, setting, share, size

ADAM = equals("optimizer.optimizer", "adam", "muon", "lion")  # muon and lion use Adam for embeddings, norms and biases
SGD, MUON = equals("optimizer.optimizer", "sgd"), equals("optimizer.optimizer", "muon")
LION = equals("optimizer.muon_scalar_optimizer", "lion")
WSD = equals("scheduler.lr_decay_style", "WSD")
# start_weight_decay and end_weight_decay together replace it; 0 is a value.
NOT_SCHEDULED = either(equals("scheduler.start_weight_decay", None), equals("scheduler.end_weight_decay", None))


@dataclass
class OptimizerConfig:
    optimizer: Literal["adam", "sgd", "muon", "lion"] = setting(
        "adam", "adam (AdamW), sgd, or for matrices muon or lion (with adam's betas) and adam for all else", OPTIMIZER
    )
    lr: float = setting(3e-4, "learning rate after the warmup", SCHEDULE, flags="--lr")
    min_lr: float = setting(3e-5, "learning rate at the end of the schedule", SCHEDULE, flags="--min_lr")
    weight_decay: float = setting(
        0.1, "decoupled weight decay of all weights except biases and norms", SCHEDULE, when=NOT_SCHEDULED
    )
    decoupled_lr: float | None = setting(
        None, "learning rate of the embedding and the output layer; null: lr", SCHEDULE, least=0
    )
    decoupled_min_lr: float | None = setting(
        None,
        "decoupled_lr at the end of the schedule; null: min_lr",
        SCHEDULE,
        when=given("optimizer.decoupled_lr", 3e-4),
    )
    apply_wd_to_qk_layernorm: bool = setting(
        False, "apply weight decay to the norms of queries and keys", SCHEDULE, when=equals("model.qk_layernorm", True)
    )
    adam_beta1: float = share(0.9, "decay of the mean gradient", when=ADAM)
    adam_beta2: float = share(0.95, "decay of the mean squared gradient", when=ADAM)
    adam_eps: float = setting(  # above 0, since 0 / 0 is nan
        1e-8, "epsilon added to the root of the mean squared gradient", least=1e-30, when=ADAM
    )
    sgd_momentum: float = share(0.9, "momentum", when=SGD)
    muon_momentum: float = share(0.95, "decay of the mean gradient", when=MUON)
    muon_nesterov: bool = setting(False, "Nesterov momentum", when=MUON)
    muon_split_qkv: bool = setting(True, "treat queries, keys and values as separate matrices", when=MUON)
    muon_num_ns_steps: int = size(5, "Newton-Schulz iterations", when=MUON)
    muon_coefficient_type: Literal["simple", "quintic", "polar_express", "cans", "aol", "deepseekv4"] = setting(
        "quintic", "coefficients of the Newton-Schulz iterations", when=MUON
    )
    muon_scale_mode: Literal["spectral", "unit_rms_norm", "shape_scaling"] = setting(
        "spectral", "scaling of a step by a matrix's shape", when=MUON
    )
    muon_extra_scale_factor: float = setting(1.0, "factor on a step", least=0, when=MUON)
    muon_fp32_matmul_prec: Literal["highest", "high", "medium"] | None = setting(
        None, "matrix product precision of the iterations; null: highest in fp32, else medium (bf16)", when=MUON
    )
    muon_tp_mode: Literal["blockwise", "duplicated", "distributed"] = setting(
        "duplicated",
        "tp ranks gather a matrix (duplicated), divide the iterations (distributed), or use only a part (blockwise, "
        "refused)",
        LAYOUT,
        when=MUON,
    )
    muon_scalar_optimizer: Literal["adam", "lion"] = setting(
        "adam", "optimizer for all parameters that are not matrices", OPTIMIZER, when=MUON
    )
    lion_beta1: float = share(0.95, "weight of the mean gradient in the sign of a step", when=(MUON, LION))
    lion_beta2: float = share(0.98, "decay of the mean gradient", when=(MUON, LION))
    clip_grad: float = setting(1.0, "maximum global gradient norm; 0: no clipping", least=0)
    grad_norm_skip_threshold: float | None = setting(
        None, "skip steps with a gradient norm above this; null: skip none", least=0
    )
    use_distributed_optimizer: bool = setting(True, "divide the optimizer's state over data-parallel ranks", OPTIMIZER)
    optimizer_cpu_offload: bool = setting(
        False, "offload the optimizer to host memory; refused by rule K28 (no offloading)"
    )


@dataclass
class SchedulerConfig:
    lr_decay_style: Literal["cosine", "linear", "constant", "inverse-square-root", "WSD"] = setting(
        "cosine", "decay of the learning rate after the warmup", SCHEDULE
    )
    lr_warmup_iters: int = setting(0, "warmup steps", SCHEDULE, flags="--warmup_iters")
    lr_warmup_fraction: float | None = setting(
        None, "warmup as a fraction of lr_decay_iters, instead of lr_warmup_iters", SCHEDULE
    )
    lr_warmup_init: float = setting(0.0, "learning rate at the start of the warmup", SCHEDULE)
    lr_decay_iters: int | None = setting(None, "steps until the end of the decay; null: train.train_iters", SCHEDULE)
    lr_wsd_decay_style: Literal["exponential", "linear", "cosine", "minus_sqrt"] = setting(
        "exponential", "final decay of WSD", SCHEDULE, when=WSD
    )
    lr_wsd_decay_iters: int | None = setting(None, "steps of the final decay", SCHEDULE, when=WSD)
    lr_warmup_samples: int = setting(0, "lr_warmup_iters in samples, rounded to whole global batches")
    lr_decay_samples: int | None = setting(None, "lr_decay_iters in samples")
    lr_wsd_decay_samples: int | None = setting(None, "lr_wsd_decay_iters in samples")
    start_weight_decay: float | None = setting(None, "weight decay of the first step; null: the optimizer's", SCHEDULE)
    end_weight_decay: float | None = setting(None, "weight decay of the last step; null: the optimizer's", SCHEDULE)
    weight_decay_incr_style: Literal["constant", "linear", "cosine"] = setting(
        "constant", "change of weight decay from start to end", SCHEDULE
    )
    override_opt_param_scheduler: bool = setting(
        False, "on resume, use this run's schedule instead of the checkpoint's"
    )
    use_checkpoint_opt_param_scheduler: bool = setting(
        False, "on resume, use the checkpoint's schedule instead of this run's"
    )

    def warmup_iters(self, train_iters: int) -> int:
        """Return the number of warmup iterations.

        A recipe's warmup is for the recipe's full length. If the schedule is as long as the run, the warmup ends at
        least one iteration before the run; rule I9 then gives a warning.
        """
        decay = train_iters if self.lr_decay_iters is None else self.lr_decay_iters
        if self.lr_warmup_fraction is not None:
            return int(self.lr_warmup_fraction * decay)
        return min(self.lr_warmup_iters, max(0, decay - 1)) if decay == train_iters else self.lr_warmup_iters
