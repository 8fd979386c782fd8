"""H. Process groups and dynamic context parallelism."""

from __future__ import annotations

from collections.abc import Iterator

from megatron_cp.rules.rule import Context, Finding, broken, rule

_DYNAMIC = ("model.dynamic_context_parallel=true", "model.max_seqlen_per_dp_cp_rank=64")


@rule(
    "H8",
    "A dynamic context-parallel group has between the smallest size allowed and all dp * cp ranks.",
    "Upstream builds groups of powers of two only and does not check the limits.",
    broken(*_DYNAMIC, "model.min_dynamic_context_parallel_size=8"),
    needs="world",
)
def dynamic_sizes(c: Context) -> Iterator[Finding]:
    smallest, ranks = c.config.model.min_dynamic_context_parallel_size, c.dp * c.cp
    if c.divisible and c.config.model.dynamic_context_parallel and smallest > ranks:
        yield Finding(
            "model.min_dynamic_context_parallel_size",
            f"{smallest} is more than the dp * cp = {c.dp} * {c.cp} = {ranks} ranks there are",
            f"at most {ranks}",
        )


@rule(
    "H10",
    "Dynamic context parallelism with Transformer Engine uses a one-level transport.",
    "The group that a microbatch switches on is one process group; Transformer Engine's a2a+p2p wants two.",
    broken("model.attention_backend=te", *_DYNAMIC, environment="gpu"),
    needs="config environment",
)
def dynamic_transport(c: Context) -> Iterator[Finding]:
    if c.backend == "te" and c.config.model.dynamic_context_parallel and "a2a+p2p" in c.comm_types:
        yield Finding(
            "model.cp_comm_type",
            "a2a+p2p requires cp_group = [a2a_cp_group, p2p_cp_group], and a dynamic group is one",
            "model.cp_comm_type=p2p, or model.attention_backend=native",
        )


@rule(
    "H14",
    "The longest sequence fits into all ranks together.",
    "A sample is spread over at most dp * cp ranks of max_seqlen_per_dp_cp_rank tokens each.",
    broken("model.dynamic_context_parallel=true", "model.max_seqlen_per_dp_cp_rank=32"),
    needs="world",
)
def longest_sequence_fits(c: Context) -> Iterator[Finding]:
    model, length = c.config.model, c.config.dataset.seq_length
    ranks = c.dp * c.cp if model.dynamic_context_parallel else c.cp
    limit = model.max_seqlen_per_dp_cp_rank
    if c.divisible and c.packed and limit is not None and limit * ranks < length:
        yield Finding(
            "model.max_seqlen_per_dp_cp_rank",
            f"{limit} tokens on each of {ranks} ranks are fewer than the sequence length {length}",
            f"at least {-(-length // ranks)}, or dataset.seq_length={limit * ranks} or less",
        )


@rule(
    "H15",
    "dynamic_context_parallel and the default_dynamic_cp scheduler come together.",
    "The one chooses group sizes, the other is what chooses them; dp_balanced packs for a fixed size.",
    broken("model.sequence_packing_scheduler=default_dynamic_cp"),
)
def scheduler_fits(c: Context) -> Iterator[Finding]:
    model = c.config.model
    if model.dynamic_context_parallel != (model.sequence_packing_scheduler == "default_dynamic_cp"):
        wanted = "default_dynamic_cp" if model.dynamic_context_parallel else "dp_balanced"
        yield Finding(
            "model.sequence_packing_scheduler",
            f"does not fit model.dynamic_context_parallel={str(model.dynamic_context_parallel).lower()}",
            f"model.sequence_packing_scheduler={wanted}",
        )
