"""A rules on pipeline stages: layers and micro batches."""

from __future__ import annotations

from collections.abc import Iterator

from megatron_cp.config.names import NAME
from megatron_cp.rules.base import Context, Finding, broken, rule
from megatron_cp.rules.proposals import divisors, nearest_multiples, one_of

_ENDS = (NAME.model.num_layers_in_first_pipeline_stage, NAME.model.num_layers_in_last_pipeline_stage)


@rule(
    "A15",
    "The layers divide over the pipeline stages.",
    "Every stage, and every virtual stage, has the same number of layers. The embedding and the loss may count as "
    "one layer each. Alternatively the first and last stage have their own numbers, and the others divide the rest.",
    broken(model=dict(pipeline_model_parallel_size=3), world_size=12),
)
def layers_divide_over_stages(c: Context) -> Iterator[Finding]:
    model = c.model
    ends = {field: c.config.value_at(field) for field in _ENDS if c.config.value_at(field) is not None}
    counted = model.account_for_embedding_in_pipeline_split + model.account_for_loss_in_pipeline_split
    if model.architecture == "hybrid":
        counted = 0  # the pattern has layers only; rule K19 reports the settings
    elif ends:
        yield from _uneven_stages(c, ends, bool(counted))
        return
    layers = model.num_layers + counted
    virtual = max(1, model.virtual_pipeline_model_parallel_size or 1) if c.pp > 1 else 1
    stages = c.pp * virtual
    if layers % stages and "|" not in (model.hybrid_layer_pattern or ""):  # | assigns layers to stages
        valid = sorted({n for n in (layers // stages * stages, (layers // stages + 1) * stages) if n})
        yield Finding(
            NAME.model.num_layers,
            f"num_layers={layers} should be divisible by config.pipeline_model_parallel_size={c.pp}"
            + (f" times virtual_pipeline_model_parallel_size={virtual}" if virtual > 1 else "")
            + (f"; {counted} of the {layers} for embedding and loss" if counted else ""),
            one_of(NAME.model.pipeline_model_parallel_size, _fewer_stages(c, layers, virtual)),
            values=[n - counted for n in valid],
        )


def _fewer_stages(c: Context, layers: int, virtual: int) -> list[int]:
    return [stages for stages in reversed(divisors(layers)) if stages < c.pp and layers % (stages * virtual) == 0]


def _uneven_stages(c: Context, ends: dict[str, int], counted: bool) -> Iterator[Finding]:
    """Check uneven stages. ``ends``: setting -> layers of the first and last stage."""
    field, layers = next(iter(ends)), c.model.num_layers
    between, left = c.pp - len(ends), layers - sum(ends.values())
    virtual = max(1, c.model.virtual_pipeline_model_parallel_size or 1)
    if min(ends.values()) < 1:
        return  # rule A1 reports it
    if c.pp == 1:
        yield Finding(field, "needs pipeline stages", "=null", f"{NAME.model.pipeline_model_parallel_size}=2")
    elif counted:
        flags = [NAME.model.account_for_embedding_in_pipeline_split, NAME.model.account_for_loss_in_pipeline_split]
        message = f"cannot be set at the same time with {' or '.join(flags)}"
        yield Finding(field, message, "=null", f"{' '.join(f'{flag}=false' for flag in flags)}")
    elif not between and virtual > 1:
        # megatron-core divides by the number of middle stages to number the layers.
        yield Finding(field, "with two interleaved stages set the layers of one stage only", "=null")
    elif not between and left:
        valid = f"{field}={layers - (sum(ends.values()) - ends[field])}"
        sizes = " and ".join(map(str, ends.values()))
        yield Finding(field, f"two stages of {sizes} layers do not add up to {layers}", valid)
    elif any(number % virtual for number in ends.values()):
        field = next(name for name, number in ends.items() if number % virtual)
        message = f"must be divisible by virtual_pipeline_model_parallel_size={virtual}"
        yield Finding(field, message, values=nearest_multiples(ends[field], virtual))
    elif between and (left < 1 or left % (between * virtual)):
        rest, multiple = sum(ends.values()), between * virtual
        valid_rests = sorted({max(left // multiple, 1) * multiple, max(left // multiple + 1, 1) * multiple})
        yield Finding(
            NAME.model.num_layers,
            f"num_layers={layers} leaves {left} for the {between} other pipeline stages"
            + (f" with {virtual} virtual stages each" if virtual > 1 else ""),
            values=[rest + number for number in valid_rests],
        )


@rule(
    "A16",
    "Virtual pipeline stages need pp > 1.",
    "The interleaved schedule passes activations between ranks.",
    broken(model=dict(virtual_pipeline_model_parallel_size=2)),
)
def interleaving_needs_stages(c: Context) -> Iterator[Finding]:
    if c.model.virtual_pipeline_model_parallel_size is not None and c.pp == 1:
        yield Finding(
            NAME.model.virtual_pipeline_model_parallel_size,
            "pipeline-model-parallel size should be greater than 1 with interleaved schedule",
            "=null",
            f"{NAME.model.pipeline_model_parallel_size}=2",
        )


@rule(
    "A17",
    "With virtual stages the number of micro batches is a multiple of the micro batch group.",
    "The interleaved schedule sends micro batches through the stages in groups of "
    f"{NAME.model.microbatch_group_size_per_vp_stage} (default: pp).",
    broken(
        model=dict(pipeline_model_parallel_size=2, virtual_pipeline_model_parallel_size=2),
        train=dict(global_batch_size=3, micro_batch_size=1),
        world_size=8,
    ),
)
def interleaved_microbatches(c: Context) -> Iterator[Finding]:
    model, train = c.model, c.config.train
    group = model.microbatch_group_size_per_vp_stage or c.pp
    if model.virtual_pipeline_model_parallel_size is None or c.pp == 1:
        return
    if group < c.pp:
        yield Finding(
            NAME.model.microbatch_group_size_per_vp_stage,
            "The number of contiguous micro-batches in a virtual pipeline stage should range in "
            f"[PP={c.pp}, M], M being the number of micro batches, got {group}",
            values=[c.pp, None],
        )
        return
    if c.packed or not c.divisible:  # packs come in multiples of the group
        return
    yield from _interleaving(c, NAME.train.global_batch_size, train.global_batch_size, train.micro_batch_size)
    if c.config.validation.eval_iters and not c.runs_packs:
        yield from _interleaving(c, NAME.validation.eval_global_batch_size, *c.config.evaluation_batch)


def _interleaving(c: Context, field: str, global_batch: int, micro_batch: int) -> Iterator[Finding]:
    group = c.model.microbatch_group_size_per_vp_stage or c.pp
    per_step = max(1, micro_batch) * c.dp
    count = global_batch // per_step
    if group > count:
        yield Finding(
            field,
            "The number of contiguous micro-batches in a virtual pipeline stage should range in "
            f"[PP={c.pp}, M={count}], got {group}",
            f"={per_step * group}",
        )
    elif 0 < count % group < c.pp:
        yield Finding(
            field,
            f"The remainder of M={count} (the total micro-batches) divided by N={group} (number of contiguous "
            "micro-batches in a virtual pipeline stage) should be 0, or larger than or equal to the "
            f"pipeline-parallel size {c.pp}",
            values=nearest_multiples(global_batch, per_step * group),
        )
