"""Compare ``te_support.py`` with the installed Transformer Engine.

The file is ``megatron_cp/attention/modules/te_support.py``. What the table lists as supported is exact, and what it
lists as missing is refused or wrong.

Not collected directly: ``tests/unit_tests/doubles/test_te_on_cpu.py`` runs this file. See
:mod:`tests.doubles.te_on_cpu` for other versions.
"""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Any

import pytest
import torch
import torch.distributed as dist
import transformer_engine
from megatron.core.packed_seq_params import PackedSeqParams
from megatron.core.process_groups_config import ProcessGroupCollection
from megatron.core.transformer.enums import AttnMaskType

from megatron_cp.attention.modules.te import te_attention_class
from megatron_cp.attention.modules.te_support import EVEN_HEADS, gaps, parse_version
from megatron_cp.config.recipes import load_recipe
from megatron_cp.rules.explain import EXAMPLE_RECIPE
from tests.ranks import run_ranks
from tests.unit_tests.attention.harness import Case, make_groups
from tests.unit_tests.attention.modules.test_native import make_config

VERSION = transformer_engine.__version__
DENSE = Case(seq_length=64, batch=2, heads=4, kv_heads=2, qk_dim=16, v_dim=16, dtype=torch.float32)
LATENT = {"qk_dim": 24, "kv_heads": 4}  # which expands its keys and values for every head
WINDOW, BOTH_WAYS = {"window": (8, 0)}, {"window": (8, 5), "causal": False}
# Padding after every sequence, and after the last one only, which Transformer Engine ignores by default.
PACK = {"batch": 1, "cu_seqlens": (0, 23, 45, 64), "cu_seqlens_padded": (0, 24, 48, 72)}
END = {"batch": 1, "cu_seqlens": (0, 24, 48, 67), "cu_seqlens_padded": (0, 24, 48, 72)}
FULL, OFFSET = {"causal": False}, {"offset": True}
CASES: dict[str, dict[str, Any]] = {
    "dense": {},
    "full": FULL,
    "packs": PACK,
    "full packs": PACK | FULL,
    "packs, padding at the end": END,
    "window": WINDOW,
    "window, both ways": BOTH_WAYS,
    "window in packs": PACK | WINDOW,
    "window in packs, both ways": PACK | BOTH_WAYS,
    "offset": OFFSET,
    "offset in packs": PACK | OFFSET,
    "window and offset": WINDOW | OFFSET,
    "latent": LATENT,
    "full latent": LATENT | FULL,
    "latent packs": LATENT | PACK,
    "latent window": LATENT | WINDOW,
}
SIZES = {"alone": 1, "p2p": 2, "all_gather": 2, "a2a": 2, "a2a+p2p": 4}


def objections_of(case: Case, transport: str, size: int) -> list[str]:
    """Return the table's objections to a run with such attention."""
    overrides = ["mixed_precision=bf16_mixed", f"model.context_parallel_size={size}", "model.attention_backend=te"]
    overrides.append(f"model.hierarchical_context_parallel_sizes={'[2,2]' if transport == 'a2a+p2p' else 'null'}")
    if size > 1:
        overrides.append(f"model.cp_comm_type={transport}")
    if case.window is not None:
        overrides.append(f"model.window_size=[{case.window[0]},{case.window[1]}]")
    if not case.causal:
        overrides.append("model.attention_mask_type=no_mask")
    if case.cu_seqlens is not None:
        overrides.append("model.sequence_packing_scheduler=dp_balanced")
    if case.offset:
        overrides.append("model.softmax_type=learnable")
    if case.qk_dim != case.v_dim:
        overrides.append("model.multi_latent_attention=true")
    found = gaps(load_recipe(EXAMPLE_RECIPE, overrides).model, VERSION, (), flash=False, fp32=False)
    return [gap.message for gap in found if not gap.slow]


def attempt(case: Case, transport: str) -> float | str:
    """Return this rank's largest error of output and gradients, or the error raised."""
    rank, size = dist.get_rank(), dist.get_world_size()
    groups = ProcessGroupCollection(
        cp=dist.group.WORLD, tp=make_groups(1)[0], hcp=list(make_groups(1 + (size % 2 == 0)))
    )
    config = make_config(
        context_parallel_size=size,
        hierarchical_context_parallel_sizes=[2, 2],
        num_attention_heads=case.heads,
        num_query_groups=case.kv_heads,
        kv_channels=case.v_dim,
        hidden_size=case.heads * case.v_dim,
        window_size=case.window,
        softmax_type="learnable" if case.offset else "vanilla",
    )
    packed = case.padded is not None
    kinds = AttnMaskType
    masks = (kinds.padding_causal, kinds.padding) if packed else (kinds.causal, kinds.no_mask)
    mask = masks[0 if case.causal else 1]
    channels = {"k_channels": case.qk_dim, "v_channels": case.v_dim}
    inputs, dout = case.draw()
    mine = [case.shard(x, rank, size).requires_grad_() for x in inputs[:3]]
    try:
        module: Any = te_attention_class()(
            config, 1, mask, "self", cp_comm_type=transport, pg_collection=groups, **channels
        )
        if case.offset:
            module.softmax_offset.data.copy_(inputs[3])
            mine.append(module.softmax_offset)
        out = module(*mine[:3], None, attn_mask_type=mask, packed_seq_params=parameters(case))
        grads = list(torch.autograd.grad(out, mine, case.shard(dout, rank, size).view_as(out)))
    except NotImplementedError:  # computed by the stand-in: proves nothing
        raise
    except Exception as error:
        return f"{type(error).__name__}: {error}"
    if case.offset:
        dist.all_reduce(grads[3])
    errors = []
    for i, (got, want) in enumerate(zip((out.detach(), *grads), case.reference(), strict=True)):
        exact = want if i == 4 else case.shard(want, rank, size)
        error = (got.double().view_as(exact) - exact).abs().max().item() / want.abs().max().item()
        errors.append(math.inf if math.isnan(error) else error)
    return max(errors)


def parameters(case: Case) -> PackedSeqParams | None:
    """Return parameters as :mod:`megatron_cp.dynamic_cp.runtime.packing` makes them."""
    if case.cu_seqlens is None or case.padded is None:
        return None
    real, padded = (torch.tensor(x, dtype=torch.int32) for x in (case.cu_seqlens, case.padded))
    longest = int((padded[1:] - padded[:-1]).max())
    return PackedSeqParams(
        "thd", real, real, padded, padded, longest, longest, pad_between_seqs=case.cu_seqlens != case.padded
    )


def try_all(cases: list[Case], transport: str) -> list[float | str]:
    return [attempt(case, transport) for case in cases]


@pytest.mark.parametrize("transport", SIZES)
def test_the_table_matches_the_installed_version(transport: str) -> None:
    size = SIZES[transport]
    cases = {name: replace(DENSE, **changes) for name, changes in CASES.items()}
    ranks = run_ranks(try_all, size, list(cases.values()), "p2p" if size == 1 else transport)
    faults = []
    for (name, case), *results in zip(cases.items(), *ranks, strict=True):
        objections = objections_of(case, transport, size)
        exact = all(isinstance(result, float) and result < 1e-5 for result in results)
        print(f"{VERSION:8} {transport:10} {name:28} {max(map(str, results))[:90]:90} {objections}")
        if exact == bool(objections):
            faults.append((name, objections, results))
    assert not faults, "\n".join(map(str, faults))


def test_odd_numbers_of_heads_are_taken_until_they_are_not() -> None:
    case = replace(DENSE, heads=3, kv_heads=3, seq_length=60)
    results = run_ranks(attempt, 3, case, "a2a")
    exact = all(isinstance(result, float) and result < 1e-5 for result in results)
    assert exact == (parse_version(VERSION) < parse_version(EVEN_HEADS)), results
