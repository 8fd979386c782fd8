"""Cached memory costs of layers and loss on one rank. Pure."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import fields, replace
from functools import lru_cache
from operator import attrgetter
from types import ModuleType

from megatron_cp.attention.heads import GATHERED_TOKENS
from megatron_cp.config.model_config import ModelConfig
from megatron_cp.config.names import NAME
from megatron_cp.estimate.job import Job
from megatron_cp.estimate.memory import local_layers, te_layers
from megatron_cp.estimate.memory.local_blocks import residual
from megatron_cp.estimate.memory.parameters import mtp_depths
from megatron_cp.estimate.memory.platform import Platform
from megatron_cp.estimate.memory.tape import ATTENTION, RESIDUAL, Moment, PartCost, Step, cost_of
from megatron_cp.estimate.memory.tiles import tiled_experts, tiled_last_norm, tiled_mlp, tiles_of
from megatron_cp.models.fusions import groups_experts

# What a layer on its own does not depend on.
_OF_STAGES = (
    NAME.model.num_layers,
    NAME.model.pipeline_model_parallel_size,
    NAME.model.virtual_pipeline_model_parallel_size,
    NAME.model.num_layers_in_first_pipeline_stage,
    NAME.model.num_layers_in_last_pipeline_stage,
    NAME.model.account_for_embedding_in_pipeline_split,
    NAME.model.account_for_loss_in_pipeline_split,
    NAME.model.microbatch_group_size_per_vp_stage,
    NAME.model.seq_length,
)
_values = attrgetter(*(field.name for field in fields(ModelConfig) if f"model.{field.name}" not in _OF_STAGES))


class LayerSettings:
    """The settings that layers depend on; equal for layouts that split layers alike.

    Of ``job`` they depend on model, number format, microbatch size and load; on its tokens only by tiles and pieces.
    """

    def __init__(self, job: Job, where: Platform) -> None:
        model, gemm, micro_batch_size, load = job.model, job.gemm, job.micro_batch_size, job.expert_load
        self.model, self.gemm, self.micro_batch_size, self.load = model, gemm, micro_batch_size, load
        self.tiles = tiles_of(model, job.tokens_per_rank, load, groups_experts(model, where.te_layers))
        self.te_layers, self.fused_norm = where.te_layers, where.fused_gated_norm
        self.offloads = where.offloads and model.offload_layer_inputs
        self.gathered = min(GATHERED_TOKENS, job.tokens_per_rank) if model.attention_head_groups > 1 else 0.0
        self.one_tile = local_layers.one_tile(model)
        self.scores = 0 if where.flash_attention else model.seq_length or 0  # that each query keeps, a head
        values = (tuple(each) if isinstance(each, list) else each for each in _values(model))
        of_platform = (
            self.te_layers,
            self.fused_norm,
            self.scores,
            self.one_tile,
            self.offloads,
            self.tiles,
            self.gathered,
        )
        self._key = (*of_platform, gemm, micro_batch_size, load, *values)
        self._hash = hash(self._key)

    def __hash__(self) -> int:
        return self._hash

    def __eq__(self, other: object) -> bool:
        return isinstance(other, LayerSettings) and self._key == other._key

    @property
    def item(self) -> int:
        """Bytes of an element of weights and activations."""
        return 4 if self.gemm == "fp32" else 2


@lru_cache(maxsize=4096)
def layer_cost(settings: LayerSettings, parts: str) -> PartCost:
    """Return the cost of a layer, with selective recomputation."""
    model, b = settings.model, settings.item
    layers = te_layers if settings.te_layers else local_layers
    stream = residual(model, b)
    chosen = (model.recompute_modules or ["core_attn"]) if model.recompute_granularity == "selective" else []
    steps = [_with_recomputation(settings, _steps(settings, layers, part), chosen) for part in parts]
    cost = in_sequence([cost_of(each, stream) for each in steps])
    return replace(cost, routes=parts.count("E") * _routes(settings)) if "moe" in chosen else cost


def _steps(settings: LayerSettings, layers: ModuleType, part: str) -> list[Step]:
    model, b = settings.model, settings.item
    if part == "*":
        if model.multi_latent_attention:
            steps = layers.latent_attention_steps(model, b, settings.micro_batch_size)
        else:
            steps = layers.attention_steps(model, b, settings.micro_batch_size, settings.gathered)
        return [_with_scores(settings, step) for step in steps]
    if part == "E":
        steps = layers.experts_steps(model, b, settings.load)
        return tiled_experts(model, b, layers, steps, settings.tiles)
    if part == "-":
        steps = layers.mlp_steps(model, b)
        return steps if settings.tiles.dense is None else tiled_mlp(model, b, steps, settings.tiles.dense)
    return layers.mamba_steps(model, b, settings.fused_norm)


def _with_scores(settings: LayerSettings, step: Step) -> Step:
    """Return the bytes of softmax and dropout (Korthikanti, arXiv:2205.05198)."""
    if not settings.scores or step.module != "core_attn":
        return step
    model = settings.model
    size = settings.scores * model.num_attention_heads / model.tensor_model_parallel_size
    return replace(step, keeps={**step.keeps, (ATTENTION, "scores"): size * (2 * settings.item + 1)})


def in_sequence(parts: Sequence[PartCost]) -> PartCost:
    """Join parts in sequence; each backward pass begins after that of the next part."""
    kept: Counter[str] = Counter()
    moments: list[Moment] = []
    for part in parts:
        before = Counter(kept)
        moments += [
            replace(moment, kept={**before, **{k: before[k] + v for k, v in moment.kept.items()}})
            for moment in part.moments
        ]
        kept.update(part.kept)
    return PartCost(dict(kept), moments)


def _with_recomputation(settings: LayerSettings, steps: list[Step], chosen: Sequence[str]) -> list[Step]:
    """Join recomputed steps into one that keeps their input (selective recomputation)."""
    again = [place for place, step in enumerate(steps) if step.module in chosen and step.module]
    if not again:
        return steps
    inside = steps[again[0] : again[-1] + 1]
    inputs, model, attention = inside[0].inputs, settings.model, inside[0].module == "core_attn"
    stream = residual(model, settings.item)
    apart = not attention and (model.sandwich_norm or model.hidden_dropout)  # its gradient is not the residual's
    cost = cost_of(inside, stream if apart else 0.0)
    exchanged = inside[-1].keeps.get((ATTENTION, "output of heads"), 0.0)
    made = 2 * exchanged if attention else stream  # its output again; attention's own is among what it keeps
    there = sum(size for key, size in inputs.items() if not exchanged and any(key in step.keeps for step in inside))
    moments = []
    for moment in cost.moments:
        held = sum(moment.kept.values()) + moment.gradients + made * (moment.gradients > 0)
        moments.append(Moment({}, max(0.0, held - there), moment.weight))
    one = Step(inputs, 0.0, forward=inside[-1].forward, again=moments)
    return [*steps[: again[0]], one, *steps[again[-1] + 1 :]]


@lru_cache(maxsize=4096)
def whole_layers_again(settings: LayerSettings, parts: tuple[str, ...], stays: bool) -> PartCost:
    """Join layers under full recomputation; only the first layer's input is kept.

    Its output and that one's gradient are freed in its backward pass (models/layers/recomputed_layers.py). With
    offloading, the host keeps the input unless it ``stays``, and beside the running layer's another one is on its way.
    """
    stream = residual(settings.model, settings.item)
    inside = [layer_cost(settings, part) for parts_of_layer in parts for part in parts_of_layer]
    kept = stream
    if settings.model.distribute_saved_activations:
        kept /= settings.model.tensor_model_parallel_size
    here = kept * (1 + settings.offloads)
    cost = _again(settings, inside, here, "".join(parts), freed=stream)
    away = kept if settings.offloads and not stays else 0.0
    return replace(cost, kept={RESIDUAL: kept - away}, host=away, leaves=stream * (cost.leaves > 0), frees_output=True)


def _routes(settings: LayerSettings) -> float:
    """Return bytes a token of a recomputed layer's dispatcher.

    It keeps probabilities, a map and an order.
    """
    model = settings.model
    parts = model.tensor_model_parallel_size if model.sequence_parallel else 1
    return (5 * (model.num_moe_experts or 0) + 8 * model.moe_router_topk) / parts


@lru_cache(maxsize=4096)
def embedding_cost(settings: LayerSettings) -> PartCost:
    """Return what the embedding keeps: rows of its own vocabulary, and dropout's mask."""
    model, b = settings.model, settings.item
    layers = te_layers if settings.te_layers else local_layers
    steps = [Step({(RESIDUAL, "rows"): 9.0 if model.tensor_model_parallel_size > 1 else 0.0}, 0.0)]
    if model.hidden_dropout:
        steps.append(layers.dropout_step(model, b, "embedding"))
    return cost_of(steps, residual(model, b))


@lru_cache(maxsize=4096)
def ending_costs(settings: LayerSettings, rows: int, tokens_at_once: int | None) -> list[PartCost]:
    """Return the last norm, layers of multi-token prediction, output layer and loss.

    rows: vocabulary on this rank. tokens_at_once: of ``cross_entropy_chunk_size``, where it is less than there are.
    """
    model, b = settings.model, settings.item
    layers = te_layers if settings.te_layers else local_layers
    norm, loss = layers.last_norm_steps(model, b), layers.loss_steps(model, b, rows, tokens_at_once)
    if settings.tiles.dense is not None:
        norm = tiled_last_norm(model, b, norm, settings.tiles.dense)
    if not (depths := model.mtp_num_layers or 0):
        return [cost_of([*norm, *loss], 0.0)]
    stream, weight = residual(model, b), float(rows * model.hidden_size * b)
    outputs = (1 + depths) * stream  # of the main model and each depth, in one tensor; its gradient is another
    parts = [cost_of(norm, stream)]
    for depth in range(1, depths + 1):
        waits = model.share_embeddings_and_output_weights or depth < depths
        parts += [beside(part, outputs, weight * waits) for part in _depth_costs(settings, layers, depth)]
    parts.append(cost_of([Step({}, 2 * outputs), Step({(RESIDUAL, "outputs"): outputs}, 0.0)], 0.0))
    keeps = {key: size for key, size in loss[0].keeps.items() if key[0] != RESIDUAL}
    of_depth = cost_of([replace(loss[0], keeps=keeps), *loss[1:]], 0.0)
    return parts + [beside(of_depth, done * stream, weight * (done > 0)) for done in range(depths, -1, -1)]


def _depth_costs(settings: LayerSettings, layers: ModuleType, depth: int) -> list[PartCost]:
    model, b = settings.model, settings.item
    stream = residual(model, b)
    norms = [*layers.norm_steps(model, b, "embedding of mtp"), *layers.norm_steps(model, b, "states of mtp")]
    joined = cost_of([*norms, Step({(RESIDUAL, "joined"): 2 * stream}, 4 * stream)], stream)
    # All ranks' tokens; this rank's are a view of them, which the layer keeps.
    gathered = cost_of([Step({(RESIDUAL, "gathered"): model.hidden_size * b - stream}, 0.0)], stream)
    last_norm = cost_of(layers.norm_steps(model, b, "mtp"), stream)
    layer = mtp_depths(model)[0 if model.mtp_use_repeated_layer else depth - 1]
    inside = [joined, gathered, *(layer_cost(settings, parts) for parts in layer), last_norm]
    if model.recompute_granularity == "full" and model.recompute_method == "uniform":
        inside = [_again(settings, inside, 2 * stream, "".join(layer))]  # of states and embedding
    return [embedding_cost(settings), *inside]


def _again(
    settings: LayerSettings, parts: Sequence[PartCost], kept: float, letters: str, freed: float = 0.0
) -> PartCost:
    """Join recomputed parts; what came out of them exists again, unless it is freed.

    kept: bytes a token of the first part's input, which stays. letters: the types of the layers' parts. freed: bytes of
    the output. While the parts are computed again, they are those of its gradient, which waits.
    """
    moments = []
    for each in in_sequence(parts).moments:
        held = sum(each.kept.values()) + each.gradients - freed * (not each.forward)
        moments.append(Moment({RESIDUAL: kept}, held, each.weight))
    experts = letters.count("E")
    return PartCost({RESIDUAL: kept}, moments, 0.0, experts * _routes(settings), kept * (experts > 0))


def beside(part: PartCost, gradients: float, weight: float) -> PartCost:
    """Return a part whose backward pass runs while gradients of others wait."""
    moments = [
        replace(each, gradients=each.gradients + gradients, weight=each.weight + weight) for each in part.moments
    ]
    return PartCost(part.kept, moments)
