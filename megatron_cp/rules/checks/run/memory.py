"""K66, of memory: the estimated peak of a GPU against what a GPU has."""

from __future__ import annotations

from collections.abc import Iterator

from megatron_cp.config.names import NAME
from megatron_cp.parallel.layout import MOST_RANKS
from megatron_cp.rules.base import Context, Finding, broken, rule
from megatron_cp.rules.checks.run.recomputation import WHOLE_LAYERS
from megatron_cp.rules.memory import NEARLY_FULL, estimated, format_peak
from megatron_cp.rules.proposals import Severity, typed
from megatron_cp.rules.remedies import parse_fix

_MORE_RANKS = (2, 4, 8, 16)


@rule(
    "K66",
    "The estimated peak memory fits a GPU.",
    f"An error above what a GPU has, a warning above {NEARLY_FULL:.0%} of it: estimates are a few percent off, and "
    "other programs may use some. A GPU's memory is read from its driver, or stated by --environment. The estimate "
    "does not cover evaluation. --no-memory-check skips this rule; megatron-cp plan finds layouts that fit.",
    broken(
        dataset=dict(seq_length=1048576),
        model=dict(vocab_size=131072),
        tokenizer=dict(tokenizer_type="NullTokenizer", vocab_size=131072),
        environment="gpu",
    ),
)
def memory_fits(c: Context) -> Iterator[Finding]:
    memory = c.environment.gpu_memory_gib
    peak = estimated(c) if memory and c.config.train.check_memory and c.divisible else None
    if not memory or peak is None or peak.total <= NEARLY_FULL * memory * 2**30:
        return
    too_large = peak.total > memory * 2**30
    note = "or 'megatron-cp plan' finds layouts that fit" if too_large else "silences this warning"
    skip = f"{NAME.train.check_memory}=false ({note})"
    severity: Severity = "error" if too_large else "warning"
    yield Finding(NAME.train.check_memory, format_peak(peak, memory), *_savings(c, memory), skip, severity=severity)


def _savings(c: Context, memory: float) -> Iterator[str]:
    """Propose fixes: settings that save memory, or more ranks."""
    chunks = typed(NAME.model.cross_entropy_chunk_size, 4096)
    again = "" if c.model.recompute_granularity == "full" else WHOLE_LAYERS
    inputs = "" if c.model.offload_layer_inputs else typed(NAME.model.offload_layer_inputs, True)
    proposals = [chunks, again, f"{chunks} {again}" if again else "", f"{chunks} {again} {inputs}" if inputs else ""]
    ranks = [c.world_size * times for times in _MORE_RANKS if c.world_size * times <= MOST_RANKS]
    for text in filter(None, [*proposals, *(f"start {number} ranks" for number in ranks)]):
        peak = estimated(c.after(parse_fix(text)[0]))
        if peak is not None and peak.total <= NEARLY_FULL * memory * 2**30:
            yield text
            if text not in proposals[:2]:
                return
