"""Wrong arguments raise a ValueError on every rank, without a hang.

The message has the argument and both values.
"""

import re

import pytest
import torch
import torch.distributed as dist

from megatron_cp.attention import context_parallel_attention
from megatron_cp.attention.context import CPContext
from tests.ranks import run_ranks
from tests.unit_tests.attention.harness import make_groups

BAD = {
    "ranks of tensors": (
        {"query": (8, 4, 8)},
        r"query must be \[s_local, batch, heads, head_dim\], got .*\(8, 4, 8\)",
    ),
    "a pack with a batch": ({"cu_seqlens": [0, 16]}, r"query must be \[t_local, heads, head_dim\], got .*8, 1, 4, 8"),
    "batch": ({"key": (8, 2, 4, 8)}, r"key is \(8, 2\) in all but heads and head dim, query is \(8, 1\)"),
    "head dims": ({"key": (8, 1, 4, 6)}, "key has head dim 6 but query has 8"),
    "heads": ({"key": (8, 1, 3, 8), "value": (8, 1, 3, 8)}, "query's 4 heads are not divisible by key's 3 heads"),
    "heads of key and value": ({"value": (8, 1, 2, 8)}, "value has 2 heads but key has 4"),
    "dtypes": ({"value_dtype": torch.bfloat16}, "value has dtype torch.bfloat16 but query has torch.float32"),
    "integers": ({"query_dtype": torch.int64}, "query has dtype torch.int64; supported are"),
    "odd rows": (
        {"query": (7, 1, 4, 8), "key": (7, 1, 4, 8), "value": (7, 1, 4, 8)},
        "query has 7 rows: .* must be even",
    ),
    "transport": ({"comm_type": "ring"}, "comm_type 'ring' is unknown; choose one of p2p, all_gather, a2a, a2a\\+p2p"),
    "no group": ({"group": None}, "group is None, not a process group: without one"),
    "one group for two levels": ({"comm_type": "a2a+p2p"}, r"takes two process groups .*, got one process group"),
    "two groups for one level": ({"group": [None, None]}, "comm_type 'p2p' takes one process group, got 2"),
    "offset": ({"softmax_offset": torch.zeros(3)}, r"softmax_offset has shape \(3,\), expected \(4,\)"),
    "window": ({"window_size": (-3, 0)}, r"window_size must hold numbers >= 0, or -1 for no limit, got \(-3, 0\)"),
    "a window of one number": ({"window_size": 3}, r"window_size must be two integers \(left, right\), got 3"),
    "a window of three": ({"window_size": (1, 2, 3)}, r"window_size must be two integers .*, got \(1, 2, 3\)"),
    "half a token": ({"window_size": (1.5, 0)}, r"window_size must be two integers .*, got \(1.5, 0\)"),
    "an offset that is a list": ({"softmax_offset": [0.0] * 4}, r"softmax_offset must be a tensor .*, got \[0.0"),
    "a scale that is a text": ({"softmax_scale": "a"}, "softmax_scale must be a finite number .*, got 'a'"),
    "a scale that is no number": ({"softmax_scale": float("nan")}, "softmax_scale must be a finite number .*, got nan"),
    "an infinite scale": ({"softmax_scale": float("inf")}, "softmax_scale must be a finite number .*, got inf"),
    "a scale that float32 has not": ({"softmax_scale": -1e39}, r"must be a finite number \(of float32\), got -1e\+39"),
    "a scale that no float has": ({"softmax_scale": 10**400}, "softmax_scale must be a finite number"),
    "padding alone": ({"cu_seqlens_padded": [0, 16]}, "cu_seqlens_padded is given without cu_seqlens"),
    "heads that the all-to-all cannot split": (
        {"comm_type": "a2a", "query": (8, 1, 3, 8), "key": (8, 1, 3, 8), "value": (8, 1, 3, 8)},
        "query has 3 heads on this rank, which are not divisible by the all-to-all group's 2 ranks; use a group of 1",
    ),
}
BAD_PACKS = {
    "too long": (
        {"cu_seqlens": [0, 20]},
        "cu_seqlens ends at 20, which is 10 rows for each of 2 ranks, but query has 8",
    ),
    "not divisible": ({"cu_seqlens": [0, 6, 16]}, "sequence 0 occupies 6 tokens, .* = 4; pad it to 8"),
    "longer than its place": (
        {"cu_seqlens": [0, 9, 16], "cu_seqlens_padded": [0, 8, 16]},
        "sequence 0 has 9 tokens .* 8",
    ),
    "falling": ({"cu_seqlens": [0, 12, 8]}, r"cu_seqlens must start at 0 and never fall, got \[0, 12, 8\]"),
}


def _call(options: dict) -> str:
    options = dict(options)
    packed = options.pop("packed", False)
    dtypes = {name: options.pop(f"{name}_dtype", torch.float32) for name in ("query", "key", "value")}
    shape = (8, 4, 8) if packed else (8, 1, 4, 8)
    tensors = {name: torch.zeros(options.pop(name, shape), dtype=dtype) for name, dtype in dtypes.items()}
    for name in ("cu_seqlens", "cu_seqlens_padded"):
        if name in options:
            options[name] = torch.tensor(options[name])
    options.setdefault("group", dist.group.WORLD)
    try:
        context_parallel_attention(**tensors, **options)
    except ValueError as error:
        return str(error)
    return "no error"


def _call_all(calls: list[dict]) -> list[str]:
    return [_call(options) for options in calls]


def test_wrong_arguments_are_named_on_every_rank():
    calls = [*BAD.values(), *((options | {"packed": True}, message) for options, message in BAD_PACKS.values())]
    for messages in run_ranks(_call_all, 2, [options for options, _ in calls]):
        for (_, pattern), message in zip(calls, messages, strict=True):
            assert re.search(pattern, message), (pattern, message)


def _levels() -> list[str]:
    a2a, p2p = make_groups(2)
    messages = []
    for pair in ((a2a, a2a), (p2p, dist.group.WORLD), (a2a, None), (a2a,)):
        try:
            CPContext.build("a2a+p2p", pair)
            messages.append("no error")
        except ValueError as error:
            messages.append(str(error))
    return messages


def test_the_levels_of_a_hierarchy_must_share_one_rank():
    for rank, messages in enumerate(run_ranks(_levels, 4)):
        assert f"must have exactly rank {rank} in common, but share" in messages[0]
        assert f"must have exactly rank {rank} in common, but share" in messages[1]
        assert "group[1] (p2p) is None, not a process group" in messages[2]
        assert "takes two process groups" in messages[3]


def _outsider() -> str:
    group = dist.new_group([0])
    try:
        CPContext.build("p2p", group)
    except ValueError as error:
        return str(error)
    return "no error"


def test_a_group_without_this_rank_is_refused():
    inside, outside = run_ranks(_outsider, 2)
    assert inside == "no error"
    assert "rank 1 is not a member" in outside or "not a process group" in outside


def _disagree(change: str) -> str:
    dist.set_debug_level(dist.DebugLevel.INFO)
    rank = dist.get_rank()
    options = {"comm_type": "p2p", "softmax_scale": 0.5}
    rows = 8
    if rank == 1:
        match change:
            case "rows":
                rows = 12
            case "comm_type":
                options["comm_type"] = "all_gather"
            case "scale":
                options["softmax_scale"] = 0.25
            case "window":
                options["window_size"] = (3, 0)
    q, k, v = (torch.zeros(rows, 1, 2, 8) for _ in range(3))
    try:
        context_parallel_attention(q, k, v, group=dist.group.WORLD, **options)
    except ValueError as error:
        return str(error)
    return "no error"


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ("rows", "query differs between ranks .* on rank 0, .*12.* on 1"),
        ("comm_type", "comm_type differs between ranks .*: p2p on rank 0, all_gather on 1"),
        ("scale", "softmax_scale differs between ranks .*: 0.5 on rank 0, 0.25 on 1"),
        ("window", "causal and window_size differs between ranks"),
        ("nothing", "no error"),
    ],
)
def test_different_arguments_raise_on_all_ranks_before_the_first_exchange(change, message):
    for text in run_ranks(_disagree, 3, change):
        if change == "comm_type":
            assert "comm_type differs between ranks" in text
        else:
            assert re.search(message, text), text
