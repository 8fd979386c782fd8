"""Metrics of one optimizer step, and the log line."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field, fields

from megatron_cp.training.monitor.peak import Peak
from megatron_cp.training.monitor.phases import Interval

LINE_WIDTH = 138  # 160 with the timestamp


@dataclass(frozen=True)
class StepMetrics:
    """One line of ``metrics.jsonl``.

    Times in seconds; rates per second over the whole world unless named otherwise. ``learning_rate``, ``weight_decay``
    and ``loss_scale`` are the values used in this step. ``step_time_s`` excludes evaluation and checkpoints. Fields
    that are ``None`` are omitted: ``max_attention_logit`` unless scores are measured, the others without packing.
    ``cp_sizes`` counts groups by CP size.
    """

    iteration: int
    consumed_samples: int
    consumed_tokens: int
    consumed_loss_tokens: int
    loss_tokens: int
    lm_loss: float
    grad_norm: float | None
    learning_rate: float
    weight_decay: float
    step_time_s: float
    tokens_per_s: float
    tokens_per_s_per_device: float
    tflops_per_device: float
    num_microbatches: int
    skipped: bool
    loss_scale: float = 1.0
    mtp_losses: tuple[float, ...] = ()  # of each MTP depth; written as "mtp_1 loss" and so on
    router_losses: dict[str, float] = field(default_factory=dict)  # of experts, by name, unweighted
    loss_spike: bool = False  # far above recent losses
    max_attention_logit: float | None = None  # largest attention score of all layers
    schedule_time_s: float | None = None
    imbalance: float | None = None
    padding_fraction: float | None = None
    cp_sizes: dict[int, int] | None = None

    def values(self, peak: Peak | None) -> dict[str, object]:
        """Return the line's fields without the iteration; MFU if there is a ``peak``."""
        values = asdict(self)
        del values["iteration"]
        # Bridge's names.
        values |= {f"mtp_{depth} loss": loss for depth, loss in enumerate(values.pop("mtp_losses"), start=1)}
        values |= values.pop("router_losses")
        if peak is not None:
            values[peak.name] = peak.mfu(self.tflops_per_device)
        return {name: value for name, value in values.items() if value is not None or name not in _OPTIONAL}


@dataclass(frozen=True)
class HeldOutLoss:
    """Loss on held-out data; nan without tokens in the loss.

    per_sample: mean over samples of each one's mean over tokens. None unless each sample is evaluated once. samples:
    with tokens in the loss.
    """

    per_token: float
    loss_tokens: int
    per_sample: float | None = None
    samples: int | None = None

    def values(self, name: str) -> dict[str, object]:
        """Return the fields of a line of ``metrics.jsonl``."""
        found: dict[str, object] = {f"{name}_loss": self.per_token}
        if self.per_sample is not None:
            found |= {
                f"{name}_loss_per_sample": self.per_sample,
                f"{name}_samples": self.samples,
                f"{name}_loss_tokens": self.loss_tokens,
            }
        return found

    def __str__(self) -> str:
        """Format the loss for the log line."""
        if self.per_sample is None:
            return f"{self.per_token:.6f}"
        counts = f"{self.samples:,} samples, {self.loss_tokens:,} tokens in the loss"
        return f"{self.per_token:.6f} per token, {self.per_sample:.6f} per sample ({counts})"


_OPTIONAL = {each.name for each in fields(StepMetrics) if each.default is None}


def log_line(
    steps: Sequence[StepMetrics],
    total: int,
    seconds_left: float,
    peak: Peak | None = None,
    interval: Interval | None = None,
) -> str:
    """Format the most important numbers in at most LINE_WIDTH characters.

    Times and rates are means over ``steps``, skipped steps are counted; the rest is the last step's.
    """
    last = steps[-1]
    seconds = sum(step.step_time_s for step in steps) / len(steps)
    # Total work by total time, not the mean of the steps' rates.
    tflops = sum(step.tflops_per_device * step.step_time_s for step in steps) / len(steps) / seconds
    tokens = sum(step.tokens_per_s * step.step_time_s for step in steps) / len(steps) / seconds
    skipped, not_finite = sum(s.skipped for s in steps), sum(not math.isfinite(s.lm_loss) for s in steps)
    entries = [
        f"iteration {last.iteration:{len(str(total))}d}/{total}",
        f"lm loss: {_short(last.lm_loss, 4)}",
        f"lr: {f'{last.learning_rate:.3E}' if last.learning_rate else '0'}",
        f"grad norm: {_short(last.grad_norm, 3)}" if last.grad_norm is not None else "",
        f"loss scale: {last.loss_scale:g}" if last.loss_scale != 1 else "",
        f"skipped: {skipped}" if skipped else "",
        f"nan: {not_finite}" if not_finite else "",
        f"TFLOP/s/GPU: {tflops:.{1 if tflops >= 10 else 4}f}",
        f"MFU ({peak.source}): {peak.mfu(tflops):.3f}" if peak is not None else "",
        f"left {clock(seconds_left)}",
        f"step ms: {seconds * 1e3:.1f}",
        f"tokens/s: {tokens:.0f}",
        f"peak memory (GB): {interval.peak_memory_bytes / 1e9:.2f}" if interval is not None else "",
    ]
    line = entries[0]
    for entry in filter(None, entries[1:]):
        if len(line) + len(entry) + 3 <= LINE_WIDTH:
            line += f" | {entry}"
    return line


def _short(value: float, digits: int) -> str:
    """Format a number in at most nine characters."""
    return f"{value:.{digits}f}" if abs(value) < 1e4 or not math.isfinite(value) else f"{value:.3E}"


def clock(seconds: float) -> str:
    """Format hours, minutes and seconds: ``1:02:03``."""
    minutes, rest = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours}:{minutes:02}:{rest:02}"
