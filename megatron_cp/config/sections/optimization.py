"""The optimizer and its schedule."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from megatron_cp.config.setting import LAYOUT, OPTIMIZER, SCHEDULE, either, equals, given, setting, share, size

ADAM = equals("optimizer.optimizer", "adam", "muon", "lion")  # which leave embeddings, norms and biases to Adam
SGD, MUON = equals("optimizer.optimizer", "sgd"), equals("optimizer.optimizer", "muon")
LION = equals("optimizer.muon_scalar_optimizer", "lion")
WSD = equals("scheduler.lr_decay_style", "WSD")
# Its own start and end replace it; a zero is a value, too.
NOT_SCHEDULED = either(equals("scheduler.start_weight_decay", None), equals("scheduler.end_weight_decay", None))


@dataclass
class OptimizerConfig:
    optimizer: Literal["adam", "sgd", "muon", "lion"] = setting(
        "adam", "adam (AdamW), sgd, or of matrices muon or lion (with adam's betas) and of all else adam", OPTIMIZER
    )
    lr: float = setting(3e-4, "learning rate after the warmup", SCHEDULE, flags="--lr")
    min_lr: float = setting(3e-5, "learning rate that the schedule ends at", SCHEDULE, flags="--min_lr")
    weight_decay: float = setting(
        0.1, "decoupled decay of all weights but biases and norms", SCHEDULE, when=NOT_SCHEDULED
    )
    decoupled_lr: float | None = setting(
        None, "learning rate of the embedding and the output layer; null: lr", SCHEDULE, least=0
    )
    decoupled_min_lr: float | None = setting(
        None, "what theirs ends at; null: min_lr", SCHEDULE, when=given("optimizer.decoupled_lr", 3e-4)
    )
    apply_wd_to_qk_layernorm: bool = setting(
        False, "norms of queries and keys decay, too", SCHEDULE, when=equals("model.qk_layernorm", True)
    )
    adam_beta1: float = share(0.9, "decay of the mean of gradients", when=ADAM)
    adam_beta2: float = share(0.95, "decay of the mean of their squares", when=ADAM)
    adam_eps: float = setting(  # a gradient of 0 divided by 0 is no number
        1e-8, "added to the root of that mean", least=1e-30, when=ADAM
    )
    sgd_momentum: float = share(0.9, "share of the last step in the next", when=SGD)
    muon_momentum: float = share(0.95, "decay of the mean of gradients", when=MUON)
    muon_nesterov: bool = setting(False, "the next mean is looked ahead at", when=MUON)
    muon_split_qkv: bool = setting(True, "queries, keys and values are a matrix each", when=MUON)
    muon_num_ns_steps: int = size(5, "Newton-Schulz iterations", when=MUON)
    muon_coefficient_type: Literal["simple", "quintic", "polar_express", "cans", "aol", "deepseekv4"] = setting(
        "quintic", "coefficients of those iterations", when=MUON
    )
    muon_scale_mode: Literal["spectral", "unit_rms_norm", "shape_scaling"] = setting(
        "spectral", "how a step's size follows from a matrix's shape", when=MUON
    )
    muon_extra_scale_factor: float = setting(1.0, "a step is multiplied with it", least=0, when=MUON)
    muon_fp32_matmul_prec: Literal["highest", "high", "medium"] | None = setting(
        None, "precision of the iterations' products; null: highest in fp32, else medium (bf16)", when=MUON
    )
    muon_tp_mode: Literal["blockwise", "duplicated", "distributed"] = setting(
        "duplicated",
        "tp ranks gather a matrix, divide the iterations, or (blockwise, refused) take a part for the whole",
        LAYOUT,
        when=MUON,
    )
    muon_scalar_optimizer: Literal["adam", "lion"] = setting(
        "adam", "optimizer of all but matrices", OPTIMIZER, when=MUON
    )
    lion_beta1: float = share(0.95, "share of the mean in a step's sign", when=(MUON, LION))
    lion_beta2: float = share(0.98, "decay of the mean of gradients", when=(MUON, LION))
    clip_grad: float = setting(1.0, "largest norm of all gradients; 0: any", least=0)
    grad_norm_skip_threshold: float | None = setting(
        None, "steps whose gradients' norm is above it are left out", least=0
    )
    use_distributed_optimizer: bool = setting(True, "data-parallel ranks divide the optimizer's state", OPTIMIZER)
    optimizer_cpu_offload: bool = setting(False, "refused, see rule K28")


@dataclass
class SchedulerConfig:
    lr_decay_style: Literal["cosine", "linear", "constant", "inverse-square-root", "WSD"] = setting(
        "cosine", "how the learning rate falls after the warmup", SCHEDULE
    )
    lr_warmup_iters: int = setting(0, "steps over which it rises", SCHEDULE, flags="--warmup_iters")
    lr_warmup_fraction: float | None = setting(
        None, "warmup as a share of lr_decay_iters, instead of lr_warmup_iters", SCHEDULE
    )
    lr_warmup_init: float = setting(0.0, "what it rises from", SCHEDULE)
    lr_decay_iters: int | None = setting(None, "steps until it has fallen; null: train.train_iters", SCHEDULE)
    lr_wsd_decay_style: Literal["exponential", "linear", "cosine", "minus_sqrt"] = setting(
        "exponential", "how it falls at the end of WSD", SCHEDULE, when=WSD
    )
    lr_wsd_decay_iters: int | None = setting(None, "steps of that fall", SCHEDULE, when=WSD)
    lr_warmup_samples: int = setting(0, "lr_warmup_iters in samples, rounded to whole global batches")
    lr_decay_samples: int | None = setting(None, "lr_decay_iters in samples")
    lr_wsd_decay_samples: int | None = setting(None, "lr_wsd_decay_iters in samples")
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
