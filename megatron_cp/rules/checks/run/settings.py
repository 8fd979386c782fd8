"""K rules on precision, devices, memory and numeric ranges."""

from __future__ import annotations

import math
from collections.abc import Iterator

from megatron_cp.config.names import NAME
from megatron_cp.config.run_config import default_at
from megatron_cp.rules.base import Context, Finding, broken, rule
from megatron_cp.rules.checks.run.recomputation import WHOLE_LAYERS
from megatron_cp.rules.proposals import EXPERTS_LIKE_THE_REST, default_of, either, typed

_LOSS_SCALE = ("loss_scale", "initial_loss_scale", "min_loss_scale", "loss_scale_window", "hysteresis")


@rule(
    "K5",
    "At most one precision is chosen.",
    "If none is chosen: bf16 on GPUs, fp32 on CPUs.",
    broken(mixed_precision=dict(fp32=True, bf16=True)),
)
def one_precision(c: Context) -> Iterator[Finding]:
    precision = c.config.mixed_precision
    chosen = [name for name in ("fp32", "bf16", "fp16") if getattr(precision, name)]
    if len(chosen) > 1:
        message = f"Only one of {', '.join(chosen)} should be True"
        yield Finding("mixed_precision", message, values=chosen)


@rule(
    "K6",
    "The communication backend fits the device.",
    "NCCL moves GPU memory only.",
    broken(dist=dict(distributed_backend="nccl")),
)
def backend_fits_device(c: Context) -> Iterator[Finding]:
    if c.config.dist.distributed_backend == "nccl" and c.environment.device == "cpu":
        yield Finding(NAME.dist.distributed_backend, "nccl needs GPUs, but there are none", "=null")


@rule(
    "K8",
    f"{NAME.model.attention_backend}=te and {NAME.model.transformer_impl}=transformer_engine need Transformer Engine "
    "and a GPU.",
    "An explicit choice is never replaced silently; auto uses what is available. All recipes of Megatron-Bridge "
    "name Transformer Engine's layers, so without a GPU that is a warning only.",
    broken(model=dict(attention_backend="te")),
)
def transformer_engine_is_available(c: Context) -> Iterator[Finding]:
    model, on_gpu = c.model, c.environment.device == "gpu"
    missing = "it is not installed, or too old" if on_gpu else "there is no GPU"
    if model.attention_backend == "te" and c.backend != "te":
        if model.transformer_impl == "local":
            missing = f"{NAME.model.transformer_impl}=local excludes it"
        yield Finding(NAME.model.attention_backend, f"needs Transformer Engine, but {missing}", "=auto")
    if model.transformer_impl == "transformer_engine" and not c.te_layers:
        message = f"needs Transformer Engine, but {missing}"
        message += "" if on_gpu else ": megatron-core's layers are used"
        yield Finding(NAME.model.transformer_impl, message, "=auto", severity=None if on_gpu else "warning")


@rule(
    "K13",
    "fp16 finds its loss scale by overflowing.",
    f"Overflowing steps are skipped, but {NAME.ddp.check_for_nan_in_grad} would end the run at the first one. "
    "Experts on other ranks than the rest of the model have their own optimizer and loss scale in megatron-core. "
    "That scale drifts from the loss's scale, and their gradients are silently wrong by a power of two.",
    broken("mixed_precision=fp16_mixed"),
)
def fp16_overflows(c: Context) -> Iterator[Finding]:
    precision = c.config.mixed_precision
    if precision.fp16 and c.spreads_experts:
        yield Finding(
            NAME.mixed_precision.fp16,
            "experts on other ranks than the rest of the model would have a separate loss scale",
            "mixed_precision=bf16_mixed (needs no scale)",
            EXPERTS_LIKE_THE_REST,
        )
    if precision.fp16 and c.config.ddp.check_for_nan_in_grad:
        yield Finding(
            NAME.ddp.check_for_nan_in_grad,
            "fp16 overflows while it finds its loss scale, and this check would end the run",
            "=false",
            "mixed_precision=bf16_mixed (needs no scale)",
        )
    if precision.fp16 and precision.min_loss_scale > precision.initial_loss_scale > 0:
        yield Finding(
            NAME.mixed_precision.initial_loss_scale,
            f"must be at least {NAME.mixed_precision.min_loss_scale} ({precision.min_loss_scale})",
            f"={precision.min_loss_scale}",
        )
    for name in () if precision.fp16 else _LOSS_SCALE:
        field = f"mixed_precision.{name}"
        if getattr(precision, name) != default_at(field):
            message = "has no effect: only fp16 scales the loss"
            yield Finding(
                field, message, f"{default_of(field)}", f"{NAME.mixed_precision.fp16}=true", severity="warning"
            )


@rule(
    "K16",
    "Probabilities and fractions are between 0 and 1.",
    "A dropout of 10 is a typing error. Adam divides by one minus a power of its betas.",
    broken(model=dict(hidden_dropout=10)),
)
def fractions(c: Context) -> Iterator[Finding]:
    for field, value, _ in c.out_of_range("share"):
        yield Finding(field, f"must be at least 0 and less than 1, got {value}", _proportion(field, value))
    share, field = c.model.rotary_percent, NAME.model.rotary_percent
    if not 0 < share <= 1:
        yield Finding(field, f"must be above 0 and at most 1, got {share}", _proportion(field, share))


def _proportion(field: str, value: float) -> str:
    """Return the override for a percentage as a fraction; otherwise the default."""
    return either(typed(field, value / 100) if 1 < value < 100 else "", default_of(field))


@rule(
    "K28",
    "Offloading to host memory is not supported, but for the inputs of recomputed layers.",
    "Without a GPU there is no other memory. megatron-core's cpu_offloading belongs to Transformer Engine, and refuses "
    "recomputation and pipeline stages: offload_layer_inputs replaces it. "
    "megatron-core's hybrid optimizer is unreliable in every variant tested. With distributed optimizer state it "
    "cannot be built in fp32 and cannot be resumed in bf16. With the precision-aware optimizer losses differ.",
    broken(optimizer=dict(optimizer_cpu_offload=True)),
)
def nothing_is_offloaded(c: Context) -> Iterator[Finding]:
    inputs = f"{NAME.model.cpu_offloading}=false {NAME.model.offload_layer_inputs}=true"
    if c.model.recompute_granularity != "full":
        inputs += f" {WHOLE_LAYERS}"
    for field, instead in ((NAME.model.cpu_offloading, inputs), (NAME.optimizer.optimizer_cpu_offload, "")):
        if c.config.value_at(field):
            yield Finding(
                field,
                "offloading to host memory is not supported",
                instead,
                f"=false ({NAME.model.recompute_granularity}=full, the distributed optimizer, "
                f"{NAME.model.cross_entropy_chunk_size} and a larger {NAME.model.context_parallel_size} save memory)",
            )


@rule(
    "K30",
    "Seeds, counts and factors are in their valid range.",
    "A negative number of batches evaluates nothing and reports a loss of 0. numpy rejects a negative seed, and a "
    "large seed overflows torch's 64 bits.",
    broken(dataset=dict(random_seed=-1)),
)
def numbers_are_in_range(c: Context) -> Iterator[Finding]:
    for field, value, facts in c.out_of_range("number"):
        limit = f"at least {facts.least}" if facts.most == math.inf else f"from {facts.least} to {facts.most}"
        fix = "=10" if field == NAME.validation.eval_iters else f"={abs(value)}" if facts.allows(abs(value)) else ""
        yield Finding(field, f"must be {limit}, got {value}", fix, default_of(field))
