"""Candidate layouts of a model on a number of GPUs; rules filter them later."""

from __future__ import annotations

import copy
import itertools
from collections.abc import Collection, Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from megatron_cp.attention.transports.registry import RING
from megatron_cp.attention.transports.select import choices
from megatron_cp.config.names import NAME
from megatron_cp.rules.memory import Settings, possible_head_groups, savings
from megatron_cp.rules.proposals import divisors
from megatron_cp.rules.remedies import Case

_MOST_TOKENS = 65536  # per rank, in a microbatch of several samples
_MOST_VIRTUAL = 8  # virtual stages per pipeline stage
_SPLIT = (
    NAME.model.account_for_embedding_in_pipeline_split,
    NAME.model.account_for_loss_in_pipeline_split,
    NAME.model.num_layers_in_first_pipeline_stage,
    NAME.model.num_layers_in_last_pipeline_stage,
)
_EVEN: Settings = dict(zip(_SPLIT, (False, False, None, None), strict=True))


@dataclass(frozen=True)
class Space:
    """Candidate layouts of a case.

    Args:
        case: the configuration, with the settings that are not searched.
        fixed: dotted names of search settings that keep the configuration's value.
        gpus_per_node: upper limit of the tensor parallel size.
        lengths: tokens of each sample of a global batch, for packed samples; None for equal lengths.
    """

    case: Case
    fixed: Collection[str]
    gpus_per_node: int
    lengths: tuple[int, ...] | None = None

    def _values(self, name: str, proposals: Iterable[Any]) -> list[Any]:
        return [self.case.config.value_at(name)] if name in self.fixed else list(proposals)

    def _keeps_fixed(self, settings: Settings) -> bool:
        return all(settings[name] == self.case.config.value_at(name) for name in self.fixed if name in settings)

    def grids(self) -> Iterator[Settings]:
        """Yield the parallel sizes."""
        model, world = self.case.config.model, self.case.world_size
        batch, heads, kv = self.case.config.train.global_batch_size, model.num_attention_heads, model.kv_heads
        for tp in self._values(NAME.model.tensor_model_parallel_size, divisors(world)):
            if NAME.model.tensor_model_parallel_size not in self.fixed and (
                tp > self.gpus_per_node or heads % tp or (kv % tp and tp % kv)
            ):
                continue
            for pp in self._values(NAME.model.pipeline_model_parallel_size, self._stages(world // tp)):
                for cp in self._values(NAME.model.context_parallel_size, divisors(max(1, world // (tp * pp)))):
                    ranks = tp * pp * cp
                    if world % ranks or (not self._packed and batch % (world // ranks)) or not self._slices(tp, cp):
                        continue
                    for sp, experts in itertools.product(
                        self._values(NAME.model.sequence_parallel, [tp > 1]), self._experts(tp, pp)
                    ):
                        yield {
                            NAME.model.tensor_model_parallel_size: tp,
                            NAME.model.pipeline_model_parallel_size: pp,
                            NAME.model.context_parallel_size: cp,
                            NAME.model.sequence_parallel: sp,
                            **experts,
                        }

    @property
    def _packed(self) -> bool:
        return self.lengths is not None or self.case.config.model.sequence_packing_scheduler is not None

    def _stages(self, ranks: int) -> list[int]:
        pattern = self.case.config.model.hybrid_layer_pattern or ""
        if "|" in pattern:  # the pattern assigns layers to stages
            return [pp for pp in [pattern.split("/")[0].count("|") + 1] if ranks % pp == 0]
        layers = len(self.case.config.model.layer_types)
        if pattern:  # equally many layers a stage
            return [pp for pp in divisors(ranks) if layers % pp == 0]
        return [pp for pp in divisors(ranks) if pp <= layers]

    def _slices(self, tp: int, cp: int) -> bool:
        """Return whether a sample divides into equal shards that are not too small."""
        length, unit = self.case.config.model.seq_length or 1, (2 * cp if cp > 1 else 1) * tp
        return (length % unit == 0 and length // cp >= min(length, 512)) or self._packed

    def _experts(self, tp: int, pp: int) -> Iterator[Settings]:
        ep_name, etp_name = NAME.model.expert_model_parallel_size, NAME.model.expert_tensor_parallel_size
        experts = self.case.config.model.num_moe_experts
        for etp in self._values(etp_name, [None, *([1] if experts and tp > 1 else [])]):
            ranks = self.case.world_size // (pp * (etp or tp))
            for ep in self._values(ep_name, divisors(experts) if experts else [1]):
                if ep <= ranks and ranks % ep == 0:
                    yield {ep_name: ep, etp_name: etp}

    def schedules(self, grid: Mapping[str, Any]) -> Iterator[Settings]:
        """Yield microbatch sizes, virtual stages, layer splits and packing settings."""
        tp, pp, cp = (grid[name] for name in _SIZES)
        model, train = self.case.config.model, self.case.config.train
        replica = train.global_batch_size // max(1, self.case.world_size // (tp * pp * cp))
        tokens = (model.seq_length or 1) // cp
        most = 1 if self._packed else max(1, _MOST_TOKENS // max(1, tokens))
        micros = [size for size in (1, 2, 4, 8) if size <= most and replica % size == 0] or [1]
        for micro in self._values(NAME.train.micro_batch_size, micros):
            for virtual in self._values(NAME.model.virtual_pipeline_model_parallel_size, self._virtual(pp)):
                if virtual and not self._packed and (replica // micro) % pp:
                    continue
                for split, packing in itertools.product(self._splits(pp, virtual or 1), self._packings(cp)):
                    yield {
                        NAME.train.micro_batch_size: micro,
                        NAME.model.virtual_pipeline_model_parallel_size: virtual,
                        **split,
                        **packing,
                    }

    def _packings(self, cp: int) -> list[Settings]:
        """Return packing with a static CP size, and dynamic CP.

        The token limit per rank lets ``cp`` ranks hold the longest sample.
        """
        if not self._packed:
            return [{}]
        names, longest = NAME.model, self.case.config.model.seq_length or 1
        found = [
            {
                names.sequence_packing_scheduler: scheduler,
                names.dynamic_context_parallel: dynamic,
                names.min_dynamic_context_parallel_size: smallest,
                names.max_seqlen_per_dp_cp_rank: -(-longest // (2 * cp * self.gpus_per_node)) * 2 * self.gpus_per_node,
            }
            for scheduler, dynamic, smallest in (
                ("dp_balanced", False, 1),
                *(("default_dynamic_cp", True, size) for size in (1, 2) if size <= cp),
            )
        ]
        kept = {name: self.case.config.value_at(name) for name in self.fixed if name in found[0]}
        return [each | kept for each in found if self._matches(each, kept)]

    def _matches(self, packing: Settings, kept: Settings) -> bool:
        """Return whether a packing has the fixed values, except for the token limit."""
        return all(packing[name] == kept.get(name, packing[name]) for name in list(packing)[:3])

    def _virtual(self, pp: int) -> list[int | None]:
        layers = len(self.case.config.model.layer_types)
        if pp == 1 or self.case.config.model.architecture == "hybrid":
            return [None]
        return [None, *(size for size in (2, 3, 4, 5, 6, 8) if size <= min(_MOST_VIRTUAL, layers // pp))]

    def _splits(self, pp: int, virtual: int) -> list[Settings]:
        """Return equal splits of the layers, and splits with fewer layers at the ends.

        The first stage also has the embedding, the last stage the output layer and the loss.
        """
        model, layers = self.case.config.model, self.case.config.model.num_layers
        if pp == 1 or model.architecture == "hybrid":
            return [_EVEN]
        found = [
            _EVEN | {_SPLIT[0]: first, _SPLIT[1]: last}
            for first, last in ((False, False), (False, True), (True, True))
            if (layers + first + last) % (pp * virtual) == 0
        ]
        if not found and pp > 2:
            for first, last in ((None, 1), (1, 1)):
                between = pp - sum(end is not None for end in (first, last))
                each = -(-layers // (pp * virtual)) * virtual
                rest, ends = layers - each * between, pp - between
                if rest >= ends and rest % (ends * virtual) == 0:
                    found.append(_EVEN | {_SPLIT[2]: first and rest // ends, _SPLIT[3]: last and rest // ends})
        return [split for split in found if self._keeps_fixed(split)]

    def transports(self, grid: Mapping[str, Any]) -> Iterator[Settings]:
        """Yield the transports, hierarchical ones with every pair of level sizes."""
        cp, name = grid[NAME.model.context_parallel_size], NAME.model.cp_comm_type
        sizes = NAME.model.hierarchical_context_parallel_sizes
        if cp == 1:
            yield {name: self._values(name, [RING.name])[0], sizes: None}
            return
        for transport, levels in choices(cp):
            if self._keeps_fixed(found := {name: transport, sizes: levels}):
                yield found

    def savings(self, grid: Mapping[str, Any], schedule: Mapping[str, Any]) -> list[Settings]:
        """Return memory savings from none to all, roughly by increasing cost in time."""
        tp, pp, cp = (grid[name] for name in _SIZES)
        model = self.case.config.model
        tokens = (model.seq_length or 1) * schedule[NAME.train.micro_batch_size] // cp
        layers = model.num_layers // pp // (schedule[NAME.model.virtual_pipeline_model_parallel_size] or 1)
        groups = possible_head_groups(model, tp)
        return savings(model, tokens, layers, self.case.environment.device == "gpu", self.fixed, groups)


_SIZES = (
    NAME.model.tensor_model_parallel_size,
    NAME.model.pipeline_model_parallel_size,
    NAME.model.context_parallel_size,
)


def with_settings(case: Case, settings: Mapping[str, Any]) -> Case:
    """Return a case with replaced settings, and defaults as after finalizing."""
    config, changed = copy.copy(case.config), set()
    for name, value in settings.items():
        section, _, field = name.partition(".")
        if section not in changed:
            changed.add(section)
            setattr(config, section, copy.copy(getattr(config, section)))
        setattr(getattr(config, section), field, value)
    model = config.model
    if model.expert_tensor_parallel_size is None:
        model.expert_tensor_parallel_size = model.tensor_model_parallel_size
    return Case(config, case.world_size, case.gpus_per_node, case.environment)
