"""Layers and in-flight microbatches of each pipeline stage. Pure."""

from __future__ import annotations

from collections import Counter
from functools import lru_cache
from operator import ge
from typing import NamedTuple

from megatron_cp.config.model_config import ModelConfig
from megatron_cp.models.hybrid_pattern import with_stages


class State(NamedTuple):
    """A moment of a schedule.

    chunk: whose backward pass runs.

    under_way: each chunk's microbatches between forward and backward pass. done: whether each chunk's last pass was a
    backward pass.
    """

    chunk: int
    under_way: tuple[int, ...]
    done: tuple[bool, ...]


States = tuple[State, ...]
Chunk = tuple[str, ...]  # part letters of each layer, as in ``model.layer_types``


def chunks_of_stages(model: ModelConfig) -> list[list[Chunk]]:
    """Return the layers of each pipeline stage, by virtual stage.

    A microbatch visits the first virtual stage of all stages, then the second, and so on. The split is the one of
    megatron-core 0.19.2's ``transformer_block.get_num_layers_to_build``.
    """
    pp, virtual = model.pipeline_model_parallel_size, model.virtual_pipeline_model_parallel_size or 1
    if model.architecture == "hybrid":
        pattern = with_stages(model.hybrid_layer_pattern or "", pp * virtual).split("/")[0]
        places = [tuple(layers) for layers in pattern.split("|")]
    else:
        counts = [_layers_of_stage(model, stage) // virtual for stage in range(pp)] * virtual
        counts[0] -= model.account_for_embedding_in_pipeline_split
        counts[-1] -= model.account_for_loss_in_pipeline_split
        parts, start, places = model.layer_types, 0, []
        for count in counts:
            places.append(parts[start : start + count])
            start += count
    return [places[stage::pp] for stage in range(pp)]


def _layers_of_stage(model: ModelConfig, stage: int) -> int:
    """Return the layer count of a stage.

    Embedding and loss count as layers if ``account_for_*_in_pipeline_split`` is set.
    """
    pp = model.pipeline_model_parallel_size
    first, last = model.num_layers_in_first_pipeline_stage, model.num_layers_in_last_pipeline_stage
    if stage == 0 and first is not None:
        return first
    if stage == pp - 1 and last is not None:
        return last
    given = (first is not None) + (last is not None)
    counted = model.account_for_embedding_in_pipeline_split + model.account_for_loss_in_pipeline_split
    return (model.num_layers + counted - (first or 0) - (last or 0)) // max(1, pp - given)


def backward_states(model: ModelConfig, stage: int, microbatches: int) -> States:
    """Return the moments of a stage's backward passes.

    A moment that holds no more than another of the same chunk is left out. Schedules are those of megatron-core 0.19.2
    (``pipeline_parallel/schedules.py``): 1F1B, and interleaved 1F1B with virtual stages. The interleaved schedule runs
    groups of ``microbatch_group_size_per_vp_stage`` microbatches.
    """
    pp, virtual = model.pipeline_model_parallel_size, model.virtual_pipeline_model_parallel_size or 1
    if virtual == 1:
        return (State(0, (min(microbatches, pp - stage),), (False,)),)
    group = model.microbatch_group_size_per_vp_stage or pp
    return _interleaved(pp, virtual, group, stage, min(microbatches, 3 * max(pp, group)))


def forward_passes_before(model: ModelConfig, stage: int) -> int:
    """Return the forward passes before a stage's first backward pass.

    For virtual stages.
    """
    pp, virtual = model.pipeline_model_parallel_size, model.virtual_pipeline_model_parallel_size or 1
    return _warm_up(pp, virtual, model.microbatch_group_size_per_vp_stage or pp, stage)


def _warm_up(pp: int, virtual: int, group: int, stage: int) -> int:
    return 2 * (pp - stage - 1) + (virtual - 1) * group


@lru_cache(maxsize=4096)
def _interleaved(pp: int, virtual: int, group: int, stage: int, microbatches: int) -> States:
    order = [
        chunk
        for first in range(0, microbatches, group)
        for chunk in range(virtual)
        for _ in range(min(group, microbatches - first))
    ]
    warmup = min(len(order), _warm_up(pp, virtual, group, stage))
    counts, done = Counter(order[:warmup]), [False] * virtual
    states: dict[State, None] = {}  # in order, each once
    for number in range(len(order)):
        if warmup + number < len(order):
            counts[order[warmup + number]] += 1
            done[order[warmup + number]] = False
        chunk = virtual - 1 - order[number]
        states[State(chunk, tuple(counts[each] for each in range(virtual)), tuple(done))] = None
        counts[chunk] -= 1
        done[chunk] = True
    return tuple(each for each in states if not any(_holds_more(other, each) for other in states))


def _holds_more(other: State, state: State) -> bool:
    same = other.chunk == state.chunk and other.done == state.done and other != state
    return same and all(map(ge, other.under_way, state.under_way))
