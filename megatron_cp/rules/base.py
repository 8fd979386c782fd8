"""Rules, the table of rules, and the context that checks read."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import cached_property
from typing import Any

from megatron_cp.attention.modules.te_support import Gap, has_te_layers
from megatron_cp.attention.transports.registry import Transport, known_transports
from megatron_cp.common.errors import Violation
from megatron_cp.config.names import NAME
from megatron_cp.config.overrides import override
from megatron_cp.config.run_config import ModelConfig
from megatron_cp.rules.environment import Environment
from megatron_cp.rules.proposals import NATIVE, Finding, Severity
from megatron_cp.rules.remedies import Case
from megatron_cp.rules.resolve import backend_in, packed_sizes


@dataclass(frozen=True)
class Example:
    """Overrides of ``llama_tiny_pretrain_config`` that break a rule.

    The recipe has four layers, eight heads, four KV heads and cp 4.
    """

    overrides: tuple[str, ...]
    world_size: int = 4
    environment: str | Environment = "cpu"
    gpus_per_node: int | None = None


@dataclass(frozen=True)
class Context(Case):
    """A configuration, the place it runs in, and derived numbers for checks.

    Sizes below 1 (rule A1 reports them) are read as 1, so that all other checks can calculate.
    """

    @property
    def model(self) -> ModelConfig:
        return self.config.model

    @cached_property
    def tp(self) -> int:
        return max(1, self.model.tensor_model_parallel_size)

    @cached_property
    def pp(self) -> int:
        return max(1, self.model.pipeline_model_parallel_size)

    @cached_property
    def cp(self) -> int:
        return max(1, self.model.context_parallel_size)

    @cached_property
    def ep(self) -> int:
        return max(1, self.model.expert_model_parallel_size)

    @cached_property
    def etp(self) -> int:
        return max(1, self.model.expert_tensor_parallel_size or 1)

    @cached_property
    def dp(self) -> int:
        return max(1, self.world_size // (self.tp * self.pp * self.cp))

    @property
    def spreads_experts(self) -> bool:
        """Whether experts are on other ranks than the rest of the model."""
        return bool(self.model.num_moe_experts) and (self.ep > 1 or self.etp != self.tp)

    @property
    def divisible(self) -> bool:
        """Whether tp * pp * cp divides the world size (rule A2); dp is meaningless if not."""
        return self.world_size % (self.tp * self.pp * self.cp) == 0

    @cached_property
    def local_heads(self) -> int:
        """Query heads on one tensor-parallel rank."""
        return max(1, self.model.num_attention_heads // self.tp)

    @cached_property
    def local_kv_heads(self) -> int:
        """Key/value heads on one tensor-parallel rank; with fewer than tp, a rank has one."""
        return max(1, self.model.kv_heads // self.tp)

    @cached_property
    def transports(self) -> tuple[Transport, ...]:
        """Known transports in use, each once, in the order of the layers."""
        return known_transports(self.model.transports)

    @cached_property
    def hierarchical(self) -> Transport | None:
        """The two-level transport in use, if any."""
        return next((transport for transport in self.transports if transport.hierarchical), None)

    @cached_property
    def levels(self) -> tuple[int, int] | None:
        """Hierarchical sizes if they are valid by rules C5 to C7."""
        sizes = self.model.hierarchical_context_parallel_sizes
        well_formed = sizes is not None and len(sizes) == 2 and min(sizes) >= 1 and math.prod(sizes) == self.cp
        return (sizes[0], sizes[1]) if well_formed and sizes is not None else None

    def head_splits(self) -> Iterator[tuple[Transport, int]]:
        """Yield each transport with the number of ranks that share the heads."""
        packed = self.packed_sizes if self.backend == "te" else ()  # native attention uses as many ranks as fit
        for transport in self.transports:
            sizes = transport.head_ranks(self.cp, self.levels, packed)
            worst = max(sizes, key=lambda size: (self.local_heads % size != 0, size), default=1)
            if sizes and (self.cp > 1 or worst > 1):
                yield transport, worst

    @cached_property
    def packed(self) -> bool:
        """Whether training runs packs."""
        return self.model.sequence_packing_scheduler is not None

    @cached_property
    def runs_packs(self) -> bool:
        """Whether training runs packs, or evaluation does in separate groups."""
        return self.config.runs_packs

    @cached_property
    def eval_cp(self) -> int:
        """Context parallel size of separate evaluation groups; 1 without them."""
        return self.config.dist.eval_context_parallel_size or 1

    @cached_property
    def packed_sizes(self) -> set[int]:
        """Sizes of the groups that packs may use, in ranks."""
        return packed_sizes(self.model, self.config.dist, self.world_size)

    @cached_property
    def max_cp(self) -> int:
        """The largest number of ranks that share a sample, in training or evaluation."""
        return max(self.cp, self.eval_cp, self.dp * self.cp if self.model.dynamic_context_parallel else 1)

    @cached_property
    def gloo(self) -> bool:
        """Whether gloo carries messages, directly or staged."""
        return self.config.dist.distributed_backend in ("gloo", "staged") or self.environment.device == "cpu"

    @cached_property
    def node_size(self) -> int | None:
        """Ranks per node: given, or from the environment on GPUs."""
        return self.gpus_per_node or (self.environment.gpus_per_node if self.environment.device == "gpu" else None)

    @cached_property
    def _choice(self) -> tuple[str, list[Gap]]:
        return backend_in(self.environment, self.model, self.packed_sizes, self.config.mixed_precision.fp32)

    @property
    def backend(self) -> str:
        """The attention in use: "te" or "native"."""
        return self._choice[0]

    @property
    def gaps(self) -> list[Gap]:
        """Reasons against Transformer Engine's attention."""
        return self._choice[1]

    @property
    def te_layers(self) -> bool:
        """Whether the layers around attention are Transformer Engine's."""
        environment, fp32 = self.environment, self.config.mixed_precision.fp32
        return has_te_layers(self.model, environment.transformer_engine, environment.device == "gpu", fp32)

    def te_findings(self, rule_id: str) -> Iterator[Finding]:
        """Yield the gaps of Transformer Engine under one rule.

        A gap is an error if attention_backend=te was set, and a warning if it is only slow or native attention runs.
        """
        chosen = self.backend == "te"
        for gap in self.gaps:
            if gap.rule == rule_id:
                message = f"Transformer Engine: {gap.message}{'' if chosen else '; native attention is used instead'}"
                fix = NATIVE if chosen else f"{NATIVE} (silences this warning)"
                yield Finding(gap.field, message, fix, severity="error" if chosen and not gap.slow else "warning")

    def variable(self, name: str) -> str | None:
        """Return an environment variable of the run; exports override ``env_vars``."""
        return self.environment.variables.get(name, self.config.env_vars.get(name))

    def set_variable(self, name: str, value: str) -> str:
        """Return the fix that sets a variable: an override, or an export if exported."""
        exported = name in self.environment.variables
        return f"export {name}={value} (wins over env_vars)" if exported else f"env_vars.{name}={value}"


Check = Callable[[Context], Iterator[Finding]]


@dataclass(frozen=True)
class Rule:
    """A constraint on a configuration and the place it runs in."""

    id: str
    title: str
    why: str
    check: Check
    example: Example
    severity: Severity = "error"

    def violations(self, context: Context) -> Iterator[Violation]:
        for found in self.check(context):
            severity, value = found.severity or self.severity, context.config.value_at(found.field)
            yield Violation(self.id, severity, found.field, found.message, found.fix, value)


RULES: dict[str, Rule] = {}
SECTIONS = {
    "A": "World size and parallel sizes",
    "B": "Sequence lengths and slicing",
    "C": "The transport of context-parallel attention",
    "D": "Heads and head dims",
    "E": "Masks, windows, dropout, softmax and determinism",
    "F": "Packed sequences",
    "G": "Loss and gradients",
    "H": "Process groups and dynamic context parallelism",
    "I": "Models and schedules",
    "K": "Combinations of settings, and requirements on the machine",
}


def rule(id: str, title: str, why: str, example: Example, *, severity: Severity = "error") -> Callable[[Check], Check]:
    """Register a check as a rule."""

    def register(check: Check) -> Check:
        if id in RULES:
            raise ValueError(f"rule {id} is defined twice")
        RULES[id] = Rule(id, title, why, check, example, severity)
        return check

    return register


def te_rule(id: str, title: str, why: str, example: Example) -> None:
    """Register a rule whose findings come from :mod:`te_support`."""
    rule(id, title, why, example)(lambda context: context.te_findings(id))


def order(rule_id: str) -> tuple[str, int]:
    """Return the sort key of a rule id: section, number."""
    return rule_id[0], int(rule_id[1:])


def broken(
    *overrides: str,
    world_size: int = 4,
    environment: str | Environment = "cpu",
    gpus_per_node: int | None = None,
    **sections: dict[str, Any],
) -> Example:
    """Return an :class:`Example` from override texts or sections of settings.

    A section is a dictionary: ``model=dict(num_layers=3)``.
    """
    settings = [
        override(getattr(getattr(NAME, section), name), value)
        for section, values in sections.items()
        for name, value in values.items()
    ]
    return Example((*settings, *overrides), world_size, environment, gpus_per_node)
