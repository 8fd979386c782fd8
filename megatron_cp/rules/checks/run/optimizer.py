"""I and K rules on the optimizer and its schedules."""

from __future__ import annotations

from collections.abc import Iterator

from megatron_cp.config.names import NAME
from megatron_cp.config.run_config import SCHEDULE_LENGTHS, TRAINING_LENGTHS, default_at
from megatron_cp.rules.base import Context, Finding, broken, rule
from megatron_cp.rules.proposals import EXPERTS_LIKE_THE_REST, default_of


@rule(
    "I9",
    "The learning rate's schedule is consistent.",
    "megatron-core's scheduler asserts these conditions, mostly without a message.",
    broken(scheduler=dict(lr_decay_iters=10, lr_warmup_iters=10)),
)
def schedule_is_consistent(c: Context) -> Iterator[Finding]:
    schedule, optimizer = c.config.scheduler, c.config.optimizer
    decay, fraction = schedule.lr_decay_iters, schedule.lr_warmup_fraction
    iterations = c.config.train.train_iters  # None: a length in epochs, checked again once the data are open
    warmup = schedule.warmup_iters(iterations or 0)
    if fraction is not None and schedule.lr_warmup_iters != 0:
        yield Finding(
            NAME.scheduler.lr_warmup_fraction,
            "Can only specify one of lr_warmup_fraction or lr_warmup_iters, got "
            f"{fraction} and {schedule.lr_warmup_iters}",
            f"{NAME.scheduler.lr_warmup_iters}=0",
            "=null",
        )
    if decay is not None and decay < 1:
        if iterations is None or iterations >= 1:  # rule A1 reports train_iters, the default of this setting
            yield Finding(
                NAME.scheduler.lr_decay_iters,
                f"must be at least 1, got {decay}",
                "=null",
                f"{NAME.scheduler.lr_decay_samples}=null",
            )
    elif decay is not None and not 0 <= warmup < decay:
        name, most = ("lr_warmup_iters", decay - 1) if fraction is None else ("lr_warmup_fraction", 0.1)
        yield Finding(
            f"scheduler.{name}",
            f"warmup of {warmup} iterations must be at least 0 and smaller than {NAME.scheduler.lr_decay_iters} "
            f"({decay})",
            f"={most}",
            f"{NAME.scheduler.lr_decay_iters}={warmup + 1}" if warmup >= decay else "",
        )
    elif decay is not None and fraction is None and warmup < schedule.lr_warmup_iters:
        yield Finding(
            NAME.scheduler.lr_warmup_iters,
            f"the run has {decay} iterations: the warmup ends after {warmup}",
            f"={warmup} (silences this warning)",
            f"{NAME.scheduler.lr_decay_iters}={schedule.lr_warmup_iters + 1} (starts a longer schedule)",
            severity="warning",
        )
    left = (iterations or 0) - (decay or 0)
    # A short tail at min_lr is common; a long one is seldom intended (a run's config.yaml with more iterations).
    if decay is not None and decay >= 1 and schedule.lr_decay_style != "constant" and left > 0.1 * (decay + left):
        yield Finding(
            NAME.scheduler.lr_decay_iters,
            f"the schedule ends {left} iterations before the run: they use {NAME.optimizer.min_lr}="
            f"{optimizer.min_lr:g}",
            f"={decay + left}",
            f"={decay + left} {NAME.scheduler.override_opt_param_scheduler}=true (when resuming)",
            severity="warning",
        )
    if optimizer.lr < 0:
        yield Finding(NAME.optimizer.lr, f"must be at least 0, got {optimizer.lr}", "=3e-4")
    else:
        for field in (NAME.optimizer.min_lr, NAME.scheduler.lr_warmup_init):
            if not 0 <= c.config.value_at(field) <= optimizer.lr:
                yield Finding(field, f"must be between 0 and {NAME.optimizer.lr} ({optimizer.lr})", "=0.0")
    if optimizer.decoupled_lr is not None and not 0 <= (optimizer.decoupled_min_lr or 0) <= optimizer.decoupled_lr:
        message = f"must be between 0 and {NAME.optimizer.decoupled_lr} ({optimizer.decoupled_lr})"
        yield Finding(NAME.optimizer.decoupled_min_lr, message, "=null")
    if schedule.lr_decay_style == "WSD" and decay is not None and 0 <= warmup < decay:
        last, most = schedule.lr_wsd_decay_iters, decay - warmup
        if last is None:
            message = "must be set with lr_decay_style=WSD"
            yield Finding(NAME.scheduler.lr_wsd_decay_iters, message, f"={max(1, most // 10)}")
        elif not 1 <= last <= most:
            yield Finding(
                NAME.scheduler.lr_wsd_decay_iters,
                f"must be from 1 to {most}, the iterations between warmup ({warmup}) and the end of the schedule "
                f"({decay}), got {last}",
                f"={1 if last < 1 else most}",
                f"{NAME.scheduler.lr_decay_iters}={warmup + last}" if last >= 1 else "",
            )
    start = optimizer.weight_decay if schedule.start_weight_decay is None else schedule.start_weight_decay
    end = optimizer.weight_decay if schedule.end_weight_decay is None else schedule.end_weight_decay
    if start < 0:
        name = NAME.optimizer.weight_decay if schedule.start_weight_decay is None else NAME.scheduler.start_weight_decay
        yield Finding(name, "weight decay must be at least 0", "=0.0")
    elif end < start:
        yield Finding(
            NAME.scheduler.end_weight_decay, f"weight decay must not decrease: from {start} to {end}", f"={start}"
        )
    elif end > start and schedule.weight_decay_incr_style == "constant":
        yield Finding(
            NAME.scheduler.weight_decay_incr_style,
            f"weight decay changes from {start} to {end}, which is not constant",
            "=linear",
            f"{NAME.scheduler.start_weight_decay}={end}",
        )
    if schedule.override_opt_param_scheduler and schedule.use_checkpoint_opt_param_scheduler:
        yield Finding(
            NAME.scheduler.override_opt_param_scheduler,
            "both override and use-checkpoint are set",
            "=false",
            f"{NAME.scheduler.use_checkpoint_opt_param_scheduler}=false",
        )


@rule(
    "K56",
    "A length is given in iterations, in samples or in epochs, not in two of them.",
    "Samples are converted into iterations of whole global batches where iterations are not given; epochs, once the "
    "data are open. With both, samples or epochs would be ignored.",
    broken(scheduler=dict(lr_decay_iters=50, lr_decay_samples=400)),
)
def one_length(c: Context) -> Iterator[Finding]:
    for section, names in (("train", TRAINING_LENGTHS), ("scheduler", SCHEDULE_LENGTHS)):
        for name in names:
            iterations, samples = f"{section}.{name}_iters", f"{section}.{name}_samples"
            if c.config.value_at(samples) != default_at(samples):
                given = f"{iterations}={c.config.value_at(iterations)}"
                none = f"{iterations}=null" if section == "train" else default_of(iterations)
                yield Finding(samples, f"cannot be given together with {given}", none, default_of(samples))
    train = c.config.train
    if train.train_epochs is not None and train.train_iters is not None:
        given = f"{NAME.train.train_iters}={train.train_iters}"
        none = f"{NAME.train.train_iters}=null"
        yield Finding(NAME.train.train_epochs, f"cannot be given together with {given}", none, "=null")
    if train.train_epochs is None and train.train_iters is None:
        yield Finding(NAME.train.train_iters, "the run has no length", "=100", f"{NAME.train.train_epochs}=1")


@rule(
    "K9",
    "The distributed optimizer needs Adam.",
    "megatron-core's distributed optimizer cannot save the state of other optimizers.",
    broken(optimizer=dict(optimizer="sgd")),
)
def distributed_adam(c: Context) -> Iterator[Finding]:
    optimizer = c.config.optimizer
    if optimizer.use_distributed_optimizer and optimizer.optimizer != "adam":
        yield Finding(
            NAME.optimizer.use_distributed_optimizer,
            f"Only Adam is supported by the distributed optimizer, got {optimizer.optimizer}",
            "=false",
            f"{NAME.optimizer.optimizer}=adam",
        )


@rule(
    "K10",
    "Overlapped parameter gathering needs the distributed optimizer.",
    "Without it there are no shards to gather, and megatron-core fails in the first step.",
    broken(ddp=dict(overlap_param_gather=True), optimizer=dict(use_distributed_optimizer=False)),
)
def overlap_is_possible(c: Context) -> Iterator[Finding]:
    if c.config.ddp.overlap_param_gather and not c.config.optimizer.use_distributed_optimizer:
        yield Finding(
            NAME.ddp.overlap_param_gather,
            f"needs {NAME.optimizer.use_distributed_optimizer}=true",
            "=false",
            f"{NAME.optimizer.use_distributed_optimizer}=true",
        )


@rule(
    "K60",
    "Muon and related optimizers need their package, bf16 or fp32, and a whole-matrix mode.",
    "The optimizers are in the package emerging-optimizers. megatron-core does not support them in fp16. In "
    "blockwise mode each tensor-parallel rank orthogonalizes its own part of a matrix, so results differ from "
    "single rank.",
    broken(optimizer=dict(optimizer="muon", use_distributed_optimizer=False)),
)
def emerging_optimizers(c: Context) -> Iterator[Finding]:
    optimizer, kind, field = c.config.optimizer, c.config.optimizer.optimizer, NAME.optimizer.optimizer
    if kind in ("adam", "sgd"):
        return
    if c.environment.emerging_optimizers is None:
        message = f"{kind} needs the package emerging-optimizers, which is not installed"
        yield Finding(field, message, "in the clone: uv pip install emerging-optimizers", "=adam")
    if c.config.mixed_precision.fp16:
        yield Finding(field, f"{kind} does not support fp16", "mixed_precision=bf16_mixed", "=adam")
    if c.spreads_experts:
        message = f"with expert parallelism, {kind}'s state cannot be resumed under another layout"
        yield Finding(field, message, EXPERTS_LIKE_THE_REST, "=adam")
    if kind == "muon" and optimizer.muon_tp_mode == "blockwise" and max(c.tp, c.etp) > 1:
        message = "each tensor-parallel rank orthogonalizes its part of a matrix: results differ from single rank"
        yield Finding(NAME.optimizer.muon_tp_mode, message, "=duplicated", "=distributed")


@rule(
    "K65",
    "Separate learning rates need the distributed optimizer.",
    "Some pipeline stages have no such parameters. Checkpoints of the plain optimizer then cannot be resumed under "
    "another layout. With muP, Muon's can.",
    broken(optimizer=dict(decoupled_lr=0.001, use_distributed_optimizer=False)),
)
def separate_learning_rates(c: Context) -> Iterator[Finding]:
    optimizer, message = c.config.optimizer, "needs the distributed optimizer to resume under another layout"
    distributed = f"{NAME.optimizer.optimizer}=adam {NAME.optimizer.use_distributed_optimizer}=true"
    if optimizer.use_distributed_optimizer:
        return
    if optimizer.decoupled_lr is not None:
        fix = f"{NAME.optimizer.decoupled_lr}=null {NAME.optimizer.decoupled_min_lr}=null"
        yield Finding(NAME.optimizer.decoupled_lr, message, fix, distributed)
    if c.model.use_mup and optimizer.optimizer in ("adam", "sgd"):
        yield Finding(NAME.model.use_mup, message, "=false", distributed)


@rule(
    "K61",
    "Gradient buckets have a size or a number, not both.",
    "megatron-core asserts this.",
    broken(ddp=dict(num_buckets=4, bucket_size=1000000)),
)
def buckets_are_given_once(c: Context) -> Iterator[Finding]:
    if None not in (c.config.ddp.num_buckets, c.config.ddp.bucket_size):
        message = "Cannot specify both num_buckets and bucket_size"
        yield Finding(NAME.ddp.num_buckets, message, "=null", f"{NAME.ddp.bucket_size}=null")
