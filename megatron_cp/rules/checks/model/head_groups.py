"""D rules: attention by groups of heads."""

from __future__ import annotations

from collections.abc import Iterator

from megatron_cp.attention.heads import numbers_of_groups
from megatron_cp.config.names import NAME
from megatron_cp.rules.base import Context, Finding, broken, rule
from megatron_cp.rules.proposals import closest

_FIELD = NAME.model.attention_head_groups


@rule(
    "D14",
    "Groups of heads are whole key/value heads or parts of one, and an all-to-all divides each group's query heads.",
    "A group is whole key/value heads of a tensor-parallel rank with their query heads, or some of the query heads of "
    "one. With fewer key/value heads than ranks, several ranks project one, and each has one group. An all-to-all "
    "gives each of its ranks whole query heads of each group.",
    broken(model=dict(attention_head_groups=3)),
)
def head_groups_divide_heads(c: Context) -> Iterator[Finding]:
    groups, heads, kv_heads = c.model.attention_head_groups, c.local_heads, c.model.kv_heads // c.tp
    splits = [size for _, size in c.head_splits() if heads % size == 0]  # else D1 or D2 finds it
    possible = numbers_of_groups(heads, kv_heads, splits)
    if groups < 2 or groups in possible:
        return
    message = (
        f"{groups} groups are neither whole key/value heads nor equal parts of one: a tensor-parallel rank has "
        f"{heads} query heads on {kv_heads} key/value heads"
    )
    if not kv_heads:
        message = f"{c.tp} tensor-parallel ranks divide {c.model.kv_heads} key/value heads, each a part of one"
    elif groups in numbers_of_groups(heads, kv_heads, ()):
        message = (
            f"{heads} query heads of a tensor-parallel rank are {heads // groups} in each of {groups} groups, which "
            f"are not divisible by the {max(splits)} ranks of the all-to-all"
        )
    yield Finding(_FIELD, message, values=closest(possible, groups))


@rule(
    "D15",
    "Groups of heads are for plain self-attention, and need our attention.",
    "Latent attention projects all heads from shared vectors, in other layers. An output gate needs the output before "
    "and after it. Transformer Engine's attention does not start its backward pass from an output that is known. Its "
    "layers take our attention.",
    broken(model=dict(attention_head_groups=2, attention_output_gate=True)),
)
def head_groups_need_plain_attention(c: Context) -> Iterator[Finding]:
    model = c.model
    if model.attention_head_groups < 2:
        return
    if model.multi_latent_attention:
        yield Finding(_FIELD, "is not for latent attention", "=1")
    elif model.attention_output_gate:
        yield Finding(_FIELD, f"cannot be combined with {NAME.model.attention_output_gate}", "=1")
    else:
        yield from c.te_findings("D15")


@rule(
    "D16",
    "Overlap of groups of heads needs groups, and ranks that exchange their heads.",
    "Only messages of heads travel while another group is computed. A ring and a gather are inside attention. Where "
    "nothing is exchanged, groups are computed as without it.",
    broken(model=dict(overlap_head_groups=True)),
    severity="warning",
)
def head_groups_overlap_messages(c: Context) -> Iterator[Finding]:
    field, groups = NAME.model.overlap_head_groups, c.model.attention_head_groups
    if not c.model.overlap_head_groups:
        return
    exchanging = max((size for each in c.transports for size in each.head_ranks(c.max_cp, c.levels)), default=1)
    if groups < 2:
        yield Finding(field, f"has no effect with {_FIELD}={groups}", "=false")
    elif exchanging < 2:
        names = " and ".join(each.name for each in c.transports) or "no transport"
        message = f"has no effect: {names} over {c.max_cp} ranks sends no heads"
        yield Finding(field, message, "=false")
