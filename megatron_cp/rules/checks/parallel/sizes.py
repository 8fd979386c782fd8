"""A rules: the world size and how parallel sizes divide it."""

from __future__ import annotations

import math
from collections.abc import Iterator

from megatron_cp.attention.transports.registry import HIERARCHICAL, LEVELS, RING
from megatron_cp.config.names import NAME
from megatron_cp.config.run_config import default_at
from megatron_cp.models.vocabulary import known_vocab_size, padded
from megatron_cp.parallel.layout import MOST_RANKS, layout_of
from megatron_cp.rules.base import Context, Finding, broken, rule
from megatron_cp.rules.checks.parallel.context_parallel import FLAT
from megatron_cp.rules.proposals import closest, divisors, either, nearest_multiples, one_of
from megatron_cp.rules.remedies import Case

_USUAL = {NAME.model.kv_channels: 64}  # where 1 is valid but useless


def _valid_sizes(field: str) -> str:
    """Return overrides of a setting with sizes that are valid in any run."""
    default = default_at(field)
    return one_of(field, [default, *(size for size in (1, _USUAL.get(field)) if size not in (None, default))])


def oversized(case: Case) -> list[Finding]:
    """Return findings for sizes so large that the other checks would not finish."""
    found = []
    if case.world_size > MOST_RANKS:
        message = f"must be at most {MOST_RANKS}, got {case.world_size}"
        found.append(Finding("world size", message, f"start {case.config.model.fewest_ranks} ranks"))
    for field, value, facts in case.out_of_range("size"):
        if value > facts.most:
            found.append(Finding(field, f"must be at most {facts.most}, got {value}", _valid_sizes(field)))
    return found


@rule(
    "A1",
    "Sizes and counts are at least 1 and below a generous limit.",
    "Upstream a context parallel size of 0 raises ZeroDivisionError deep in process group setup. The checks "
    "themselves would not finish with huge numbers.",
    broken(train=dict(train_iters=0)),
)
def sizes_are_positive(c: Context) -> Iterator[Finding]:
    for field, value, facts in c.out_of_range("size"):
        if value < facts.least:
            yield Finding(field, f"must be an integer of at least 1, got {value}", _valid_sizes(field))
    if c.world_size < 1:
        message = f"must be an integer of at least 1, got {c.world_size}"
        yield Finding("world size", message, f"start {c.model.fewest_ranks} ranks")
    yield from oversized(c)


@rule(
    "A2",
    "tp * pp * cp divides the world size.",
    "The ranks form a grid with these sides; the quotient is the data-parallel size.",
    broken(model=dict(pipeline_model_parallel_size=2), world_size=4),
)
def world_is_divisible(c: Context) -> Iterator[Finding]:
    size = c.tp * c.pp * c.cp
    if c.world_size % size:
        sizes = {"context": c.cp, "tensor_model": c.tp, "pipeline_model": c.pp}
        smaller = [
            one_of(f"model.{name}_parallel_size", closest(divisors(c.world_size * own // size), own))
            for name, own in sizes.items()
            if c.world_size * own % size == 0
        ]
        yield Finding(
            NAME.model.context_parallel_size,
            f"world size ({c.world_size}) is not divisible by total_model_size ({size}) = tp {c.tp} * pp {c.pp} * cp "
            f"{c.cp}: world_size ({c.world_size}) is not divisible by {size}",
            f"start {size} ranks (megatron-cp train -n {size} or a multiple)" if size <= MOST_RANKS else "",
            *smaller,
        )


@rule(
    "A3",
    "etp * ep * pp divides the world size.",
    "Expert layers divide the same ranks into a second grid.",
    broken(model=dict(num_moe_experts=6, expert_model_parallel_size=3)),
)
def world_is_divisible_for_experts(c: Context) -> Iterator[Finding]:
    size = c.etp * c.ep * c.pp
    if c.world_size % size:
        fitting = [ep for ep in divisors(c.world_size) if c.world_size % (c.etp * ep * c.pp) == 0]
        ranks = math.lcm(size, c.tp * c.pp * c.cp)
        more = f"start {ranks} ranks (or a multiple of them)" if ranks <= MOST_RANKS else ""
        field = NAME.model.expert_model_parallel_size
        fix = either(one_of(field, closest(fitting, c.ep)), more)
        if not c.model.num_moe_experts and c.etp != c.tp:  # expert groups are built without experts too
            field = NAME.model.expert_tensor_parallel_size
            fix = either(f"{field}=null (there are no experts)", more)
        yield Finding(
            field,
            f"world_size ({c.world_size}) is not divisible by expert_tensor_model_pipeline_parallel size ({size}) "
            f"= etp {c.etp} * ep {c.ep} * pp {c.pp}",
            fix,
        )


@rule(
    "A4",
    "tp divides the attention heads.",
    "Each tensor-parallel rank holds whole heads.",
    broken(
        *RING.settings,
        model=dict(num_attention_heads=6, num_query_groups=2, kv_channels=16, tensor_model_parallel_size=4),
        world_size=16,
    ),
)
def heads_divide_by_tp(c: Context) -> Iterator[Finding]:
    heads = c.model.num_attention_heads
    if heads % c.tp:
        yield Finding(
            NAME.model.num_attention_heads,
            f"num_attention_heads ({heads}) must be a multiple of tensor_model_parallel_size ({c.tp})",
            one_of(NAME.model.tensor_model_parallel_size, closest(divisors(max(1, heads)), c.tp)),
        )


@rule(
    "A5",
    "tp divides the key/value heads, or the other way round.",
    "A rank holds whole key/value heads or shares one with its neighbours. Each neighbour then computes an equal "
    "part of the head's dimensions.",
    broken(model=dict(num_attention_heads=12, num_query_groups=3, tensor_model_parallel_size=2), world_size=8),
)
def kv_heads_divide_by_tp(c: Context) -> Iterator[Finding]:
    model, groups = c.model, c.model.kv_heads
    dim = model.kv_channels or 0
    if groups >= 1 and groups % c.tp and c.tp % groups:
        fitting = [t for t in divisors(model.num_attention_heads) if groups % t == 0 or t % groups == 0]
        yield Finding(
            NAME.model.num_query_groups,
            f"num_query_groups ({groups}) must be a multiple or divisor of tensor_model_parallel_size ({c.tp})",
            one_of(NAME.model.tensor_model_parallel_size, closest(fitting, c.tp)),
        )
    elif 1 <= groups < c.tp and model.num_attention_heads % c.tp == 0 and 2 * groups * dim % c.tp:
        step = math.lcm(2, c.tp // math.gcd(2 * groups, c.tp))  # even, for rotary embeddings
        yield Finding(
            NAME.model.kv_channels,
            f"{groups} key/value heads of {dim} dimensions cannot be divided equally over "
            f"{NAME.model.tensor_model_parallel_size} ({c.tp})",
            values=nearest_multiples(dim, step),
        )


def _batch_finding(c: Context, field: str, message: str, global_batch: int, micro_batch: int) -> Iterator[Finding]:
    multiple = max(1, micro_batch) * c.dp
    if global_batch < 1:
        return  # rule A1 reports it
    if c.divisible and not c.packed and (global_batch % multiple or global_batch < multiple):
        yield Finding(
            field,
            f"{message}; {c.world_size} ranks / (tp {c.tp} * pp {c.pp} * cp {c.cp}) = {c.dp}",
            values=nearest_multiples(global_batch, multiple),
        )


@rule(
    "A6",
    "The global batch divides into micro batches over the data-parallel replicas.",
    "Every replica runs the same number of micro batches. Context parallelism reduces the number of replicas.",
    broken(train=dict(global_batch_size=12, micro_batch_size=8)),
)
def batch_divides(c: Context) -> Iterator[Finding]:
    batch, micro = c.config.train.global_batch_size, c.config.train.micro_batch_size
    message = (
        f"global batch size ({batch}) is not divisible by micro batch size ({micro}) times data parallel size ({c.dp})"
    )
    yield from _batch_finding(c, NAME.train.global_batch_size, message, batch, micro)


@rule(
    "A7",
    "The evaluation batch divides into micro batches over the data-parallel replicas.",
    f"Every replica evaluates the same number of micro batches. {NAME.validation.eval_global_batch_size} and "
    "eval_micro_batch_size are by default the training ones.",
    broken(validation=dict(eval_iters=1, eval_global_batch_size=9)),
)
def evaluation_batch_divides(c: Context) -> Iterator[Finding]:
    validation = c.config.validation
    if c.runs_packs:
        return  # a pack takes any number of samples
    if validation.eval_iters and (validation.eval_global_batch_size or validation.eval_micro_batch_size):
        batch, micro = c.config.evaluation_batch
        message = (
            f"eval_global_batch_size ({batch}) must be divisible by eval_micro_batch_size * eval_data_parallel_size "
            f"({micro} * {c.dp} = {micro * c.dp})"
        )
        yield from _batch_finding(c, NAME.validation.eval_global_batch_size, message, batch, micro)


@rule(
    "A8",
    f"With {NAME.dist.use_tp_pp_dp_mapping} and pipeline stages, dense and expert layers have equal data-parallel "
    "sizes.",
    "In that rank order the stages of both grids must have the same ranks. megatron-core's MPU asserts this after "
    "it has built some groups. Decentralized groups do not need it for dense models.",
    broken(
        *RING.settings,
        dist=dict(use_tp_pp_dp_mapping=True),
        model=dict(pipeline_model_parallel_size=2, context_parallel_size=2),
    ),
)
def stages_match_in_tp_pp_dp_order(c: Context) -> Iterator[Finding]:
    free = c.config.dist.use_decentralized_pg and not c.model.num_moe_experts
    if c.config.dist.use_tp_pp_dp_mapping and c.pp > 1 and c.tp * c.cp != c.etp * c.ep and not free:
        yield Finding(
            NAME.dist.use_tp_pp_dp_mapping,
            "When not using pp-last rank ordering, the data parallel size of the attention and moe layers must be the "
            f"same; here tp * cp = {c.tp * c.cp} and etp * ep = {c.etp * c.ep}",
            "=false",
            "" if c.model.num_moe_experts else f"{NAME.dist.use_decentralized_pg}=true",
        )


@rule(
    "A9",
    "Sequence parallelism needs tp > 1.",
    "It splits the sequence over the tensor-parallel ranks outside attention and MLP.",
    broken(model=dict(sequence_parallel=True)),
)
def sequence_parallel_needs_tp(c: Context) -> Iterator[Finding]:
    if c.model.sequence_parallel and c.tp == 1:
        yield Finding(
            NAME.model.sequence_parallel,
            "Cannot use sequence parallelism without tensor parallelism",
            "=false",
            f"{NAME.model.tensor_model_parallel_size}=2",
        )


@rule(
    "A12",
    "CUDA_DEVICE_MAX_CONNECTIONS is 1 for tensor or context parallelism before Blackwell.",
    "With more hardware queues a communication kernel may start after the computation that it should overlap.",
    broken(environment="gpu"),
    severity="warning",
)
def one_hardware_queue(c: Context) -> Iterator[Finding]:
    before_blackwell = c.environment.device == "gpu" and (c.environment.compute_capability or 0) < 10
    value = c.variable("CUDA_DEVICE_MAX_CONNECTIONS")
    if before_blackwell and c.tp * c.max_cp > 1 and value != "1":
        yield Finding(
            "env_vars.CUDA_DEVICE_MAX_CONNECTIONS",
            f"is {value or 'not set'}: communication may not overlap with computation",
            c.set_variable("CUDA_DEVICE_MAX_CONNECTIONS", "1"),
        )


@rule(
    "A13",
    "The ranks of an all-to-all level share a node.",
    f"The all-to-all of {HIERARCHICAL.name} is exposed and moves every head. Across nodes it runs at network speed, "
    "which the hierarchy should avoid.",
    broken(model=dict(tensor_model_parallel_size=4, num_query_groups=8), world_size=16, gpus_per_node=4),
    severity="warning",
)
def all_to_all_stays_inside_nodes(c: Context) -> Iterator[Finding]:
    if c.node_size is None or c.levels is None or not c.hierarchical or c.world_size <= c.node_size:
        return
    try:
        groups = layout_of(c.model, c.config.dist, c.world_size).hierarchical_groups()[0]
    except ValueError:  # other rules report impossible layouts
        return
    node = c.node_size
    spans = [len({rank // node for rank in group}) for group in groups]
    across = sum(span > 1 for span in spans)
    if across:
        largest = max((d for d in divisors(c.cp) if node % (c.tp * d) == 0), default=1)
        yield Finding(
            NAME.model.hierarchical_context_parallel_sizes,
            f"{across} of {len(groups)} all-to-all groups span up to {max(spans)} nodes of {node} ranks "
            f"(tp {c.tp} * {LEVELS[0]} {c.levels[0]} = {c.tp * c.levels[0]} neighbouring ranks)",
            FLAT,
            values=[[largest, c.cp // largest]] if largest > 1 else [],
        )


@rule(
    "A18",
    "Expert parallelism divides the experts of a mixture-of-experts model.",
    "Each expert-parallel rank holds the same number of experts.",
    broken(model=dict(expert_model_parallel_size=2)),
)
def experts_divide(c: Context) -> Iterator[Finding]:
    experts = c.model.num_moe_experts
    if c.ep > 1 and not experts:
        yield Finding(
            NAME.model.expert_model_parallel_size, "num_moe_experts must be non None to use expert-parallel", "=1"
        )
    elif experts and experts % c.ep:
        yield Finding(
            NAME.model.num_moe_experts,
            f"num_moe_experts ({experts}) should be divisible by expert_model_parallel_size ({c.ep})",
            one_of(NAME.model.expert_model_parallel_size, closest(divisors(experts), c.ep)),
        )


@rule(
    "A19",
    "The vocabulary is padded to the same size under every tensor parallel size.",
    "Padding rows take part in the softmax. With another number of rows it is another model, with other losses.",
    broken("parallel=none", model=dict(make_vocab_size_divisible_by=1, tensor_model_parallel_size=2), world_size=2),
)
def vocabulary_is_padded_alike(c: Context) -> Iterator[Finding]:
    unit, size = c.model.make_vocab_size_divisible_by, known_vocab_size(c.model, c.config.tokenizer)
    if unit < 1 or c.tp < 1 or unit % c.tp == 0:
        return
    fitting = math.lcm(unit, c.tp)
    if size is None:
        rows = f"to a multiple of {fitting} here and of {unit} on one rank, which may differ"
    elif padded(size, unit, c.tp) != padded(size, unit, 1):
        rows = f"to {padded(size, unit, c.tp)} rows here and to {padded(size, unit, 1)} on one rank"
    else:
        return
    yield Finding(
        NAME.model.make_vocab_size_divisible_by,
        f"not a multiple of tp {c.tp}: the vocabulary is padded {rows}",
        f"={fitting} (the same model under this tp and its divisors)",
        severity=None if size else "warning",
    )
