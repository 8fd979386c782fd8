"""I. Multi-token prediction, Mamba, mixture of experts, the schedule of the learning rate."""

from __future__ import annotations

from collections.abc import Iterator

from megatron_cp.rules.rule import Context, Finding, broken, rule


@rule(
    "I2",
    "Multi-token prediction is causal.",
    "It predicts further tokens from what came before; with full attention they are in sight.",
    broken("model.mtp_num_layers=1", "model.attention_mask_type=no_mask"),
)
def prediction_is_causal(c: Context) -> Iterator[Finding]:
    model = c.config.model
    if model.mtp_num_layers and (
        model.attention_mask_type != "causal" or model.position_embedding_type == "learned_absolute"
    ):
        yield Finding(
            "model.mtp_num_layers",
            "Multi-Token Prediction (MTP) needs causal attention and rotary (or no) position embeddings",
            "model.attention_mask_type=causal model.position_embedding_type=rope, or model.mtp_num_layers=null",
        )


@rule(
    "I14",
    "The layers of multi-token prediction are recomputed one by one.",
    "megatron-core asserts it for the uniform method, without a message for users, and leaves them out of the block "
    "method.",
    broken(
        "model.mtp_num_layers=1", "model.recompute_granularity=full", "model.recompute_method=uniform",
        "model.recompute_num_layers=2",
    ),
)  # fmt: skip
def prediction_is_recomputed(c: Context) -> Iterator[Finding]:
    model = c.config.model
    if not model.mtp_num_layers or model.recompute_granularity != "full":
        return
    if model.recompute_method == "uniform" and model.recompute_num_layers not in (None, 1):
        yield Finding(
            "model.recompute_num_layers",
            f"recompute_num_layers must be 1 for MTP recompute, got {model.recompute_num_layers}",
            "model.recompute_num_layers=1",
        )
    elif model.recompute_method == "block":
        message = "recompute_method=block is not supported for MTP: the activations of its layers are kept"
        yield Finding("model.recompute_method", message, "model.recompute_method=uniform", severity="warning")


@rule(
    "I3",
    "Mamba layers gain nothing from hierarchical context parallelism.",
    "Their all-to-all runs over the whole context-parallel group; only the attention layers use the levels.",
    broken("model.architecture=hybrid", "model.hybrid_layer_pattern=M*M*"),
    severity="warning",
)
def mamba_is_flat(c: Context) -> Iterator[Finding]:
    model = c.config.model
    hybrid = model.architecture == "hybrid" and "M" in (model.hybrid_layer_pattern or "")
    if hybrid and c.widest > 1 and "a2a+p2p" in c.transports:
        yield Finding(
            "model.cp_comm_type",
            "a2a+p2p applies to the attention layers; Mamba layers use one flat group",
            "model.cp_comm_type=p2p or all_gather, where the Mamba layers take most of the time",
        )


@rule(
    "I9",
    "The learning rate's schedule is consistent.",
    "megatron-core's scheduler asserts these, mostly without a message.",
    broken("scheduler.lr_decay_iters=10", "scheduler.lr_warmup_iters=10"),
)
def schedule_is_consistent(c: Context) -> Iterator[Finding]:
    schedule, optimizer = c.config.scheduler, c.config.optimizer
    decay, warmup, fraction = schedule.lr_decay_iters, c.config.warmup_iters(), schedule.lr_warmup_fraction
    if decay is not None and decay < 1:
        if c.config.train.train_iters >= 1:  # else it follows from that, and rule A1 has said so
            yield Finding(
                "scheduler.lr_decay_iters", f"must be at least 1, got {decay}", "scheduler.lr_decay_iters=null"
            )
    elif decay is not None and not 0 <= warmup < decay:
        name, most = ("lr_warmup_iters", decay - 1) if fraction is None else ("lr_warmup_fraction", 0.1)
        yield Finding(
            f"scheduler.{name}",
            f"warmup of {warmup} iterations must be at least 0 and smaller than scheduler.lr_decay_iters ({decay})",
            f"scheduler.{name}={most}" + (", or a larger scheduler.lr_decay_iters" if fraction is None else ""),
        )
    elif fraction is None and warmup < schedule.lr_warmup_iters:
        yield Finding(
            "scheduler.lr_warmup_iters",
            f"the run has {decay} iterations: the learning rate rises for {warmup} of them",
            f"scheduler.lr_warmup_iters={warmup} says so yourself; scheduler.lr_decay_iters="
            f"{schedule.lr_warmup_iters + 1} or more, where the run is the beginning of a longer schedule",
            severity="warning",
        )
    if optimizer.lr < 0:
        yield Finding("optimizer.lr", f"must be at least 0, got {optimizer.lr}", "optimizer.lr=3e-4")
    else:
        for name, value in (
            ("optimizer.min_lr", optimizer.min_lr),
            ("scheduler.lr_warmup_init", schedule.lr_warmup_init),
        ):
            if not 0 <= value <= optimizer.lr:
                yield Finding(name, f"must be between 0 and optimizer.lr ({optimizer.lr})", f"{name}=0.0")
    if schedule.lr_decay_style == "WSD" and decay is not None and 0 <= warmup < decay:
        last, most = schedule.lr_wsd_decay_iters, decay - warmup
        if last is None:
            message = "must be set for lr_decay_style=WSD"
            yield Finding("scheduler.lr_wsd_decay_iters", message, f"scheduler.lr_wsd_decay_iters from 1 to {most}")
        elif not 1 <= last <= most:
            yield Finding(
                "scheduler.lr_wsd_decay_iters",
                f"must be from 1 to the {most} iterations between the warmup ({warmup}) and the end of the schedule "
                f"({decay}), got {last}",
                f"scheduler.lr_wsd_decay_iters={1 if last < 1 else most}, or a larger scheduler.lr_decay_iters",
            )
    start = optimizer.weight_decay if schedule.start_weight_decay is None else schedule.start_weight_decay
    end = optimizer.weight_decay if schedule.end_weight_decay is None else schedule.end_weight_decay
    if start < 0:
        name = "optimizer.weight_decay" if schedule.start_weight_decay is None else "scheduler.start_weight_decay"
        yield Finding(name, "weight decay must be at least 0", f"{name}=0.0")
    elif end < start:
        yield Finding(
            "scheduler.end_weight_decay",
            f"weight decay must not fall: it goes from {start} to {end}",
            f"scheduler.end_weight_decay={start}",
        )
    elif end > start and schedule.weight_decay_incr_style == "constant":
        yield Finding(
            "scheduler.weight_decay_incr_style",
            f"weight decay goes from {start} to {end}, which is not constant",
            f"scheduler.weight_decay_incr_style=linear, or scheduler.start_weight_decay={end}",
        )
    if schedule.override_opt_param_scheduler and schedule.use_checkpoint_opt_param_scheduler:
        yield Finding(
            "scheduler.override_opt_param_scheduler",
            "both override and use-checkpoint are set",
            "scheduler.override_opt_param_scheduler=false, or scheduler.use_checkpoint_opt_param_scheduler=false",
        )
