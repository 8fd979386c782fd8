"""Start-up check that attention communicates, before any training step.

Attention with missing, wrong or stale groups raises no error: every rank attends to its own tokens and the loss still
falls. So all ranks first compare their groups. Then each distinct transport in the model computes a small tensor,
forward and backward, and the result must equal one rank's.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any, Protocol

import torch
import torch.distributed as dist
from torch import Tensor

from megatron_cp.attention.context import CPContext
from megatron_cp.attention.reference import reference_attention
from megatron_cp.attention.sharding import shard_sequence
from megatron_cp.common.errors import RuntimeFault, join_limited
from megatron_cp.config.names import NAME
from megatron_cp.parallel.collectives import gather_objects, gather_problems

TOKENS_PER_CHUNK, SEED = 2, 20
# Largest rounding difference, relative to the largest reference value (outputs and gradients).
TOLERANCE = {torch.float64: 1e-12, torch.float32: 1e-5, torch.bfloat16: 5e-2, torch.float16: 1e-2}


class ProbeError(RuntimeFault):
    """Attention that differs from a single rank's; raised on every rank."""


@dataclass(frozen=True)
class ProbeInputs:
    """Inputs for a trial of a module, and settings of its attention beside causality."""

    heads: int
    kv_heads: int
    dtype: torch.dtype
    device: torch.device
    qk_dim: int = 16
    v_dim: int = 16
    window_size: tuple[int, int] | None = None
    softmax_scale: float | None = None
    softmax_offset: Tensor | None = None


class ProbedAttention(Protocol):
    """Interface of attention modules that can be probed."""

    config: Any
    pg_collection: Any
    layer_number: int

    @property
    def context(self) -> CPContext:
        """Transport and groups in use."""

    def probe_inputs(self) -> ProbeInputs:
        """Return the inputs of :meth:`probe_forward`."""

    def probe_forward(self, query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        """Map [s_local, 1, heads, qk_dim] to [s_local, 1, heads, v_dim], causally.

        Through the real transport.
        """


@dataclass
class _ProbeTarget:
    """A transport with groups, and the layers that use it."""

    module: ProbedAttention
    layers: list[int]

    def __str__(self) -> str:
        plural = "layers" if len(self.layers) > 1 else "layer"
        return f"{plural} {', '.join(map(str, self.layers))}, {self.module.context}"


def probe_attention(model_chunks: Iterable[torch.nn.Module]) -> None:
    """Check that every attention module in ``model_chunks`` communicates.

    A collective call over all ranks, each with the chunks of its pipeline stage. Raises :class:`ProbeError` on all of
    them if groups differ between ranks, or an output or gradient differs from one rank's by more than rounding. Modules
    that share transport and groups are checked once. Does nothing without torch.distributed.
    """
    if not dist.is_initialized():
        return
    targets = _probe_targets(model_chunks)
    _compare_settings([problem for target in targets if (problem := _compare_sizes(target))])
    _compare_settings(_compare_groups(targets))
    _compare_settings([problem for target in targets if (problem := _try_transport(target))])


def _probe_targets(model_chunks: Iterable[torch.nn.Module]) -> list[_ProbeTarget]:
    found: dict[str, _ProbeTarget] = {}
    for chunk in model_chunks:
        modules: Iterable[Any] = chunk.modules()
        for module in modules:
            if hasattr(module, "probe_forward") and module.config.context_parallel_size > 1:
                layers = found.setdefault(str(module.context), _ProbeTarget(module, [])).layers
                layers.append(module.layer_number)
    return list(found.values())


def _compare_sizes(target: _ProbeTarget) -> str | None:
    module, context = target.module, target.module.context
    expected, cp_group = module.config.context_parallel_size, module.pg_collection.cp
    if context.size != expected:
        return f"{target}: attends over {context.size} ranks, but {NAME.model.context_parallel_size} is {expected}"
    if cp_group is None or (dist.get_world_size(cp_group), dist.get_rank(cp_group)) != (expected, context.rank):
        ranks = None if cp_group is None else dist.get_process_group_ranks(cp_group)
        return f"{target}: rank {context.rank} of {expected} in it, but sequences are sharded over ranks {ranks}"
    return None


def _compare_groups(targets: list[_ProbeTarget]) -> list[str]:
    """Compare each group's members, order and layers over its members."""
    mine: list[tuple[str, dict[str, list[int]]]] = []
    for target in targets:
        context = target.module.context
        levels = zip(context.transport.levels, context.peers, strict=True)
        groups = {"cp": target.module.pg_collection.cp} | {level: peers.group for level, peers in levels}
        members = {name: dist.get_process_group_ranks(group) for name, group in groups.items() if group is not None}
        mine.append((f"layers {target.layers}, {context.comm_type}", members))
    gathered = gather_objects(mine)
    problems = []
    for index, (what, members) in enumerate(mine):
        for name, ranks in members.items():
            for rank in ranks:
                theirs = gathered[rank][index] if index < len(gathered[rank]) else ("nothing", {})
                if theirs[0] != what or theirs[1].get(name) != ranks:
                    problems.append(
                        f"{targets[index]}: the {name} group is {ranks}, but rank {rank} has {theirs[0]}, "
                        f"{name} group {theirs[1].get(name)}"
                    )
    return problems


def _try_transport(target: _ProbeTarget) -> str | None:
    """Run a small forward and backward pass; return a message if they differ."""
    module = target.module
    size, rank = module.config.context_parallel_size, dist.get_rank(module.pg_collection.cp)
    inputs = module.probe_inputs()
    generator = torch.Generator().manual_seed(SEED)
    tokens = 2 * size * TOKENS_PER_CHUNK

    def draw(heads: int, dim: int) -> Tensor:
        return torch.randn(tokens, 1, heads, dim, generator=generator).to(dtype=inputs.dtype, device=inputs.device)

    whole = [
        draw(inputs.heads, inputs.qk_dim),
        draw(inputs.kv_heads, inputs.qk_dim),
        draw(inputs.kv_heads, inputs.v_dim),
    ]
    dout = draw(inputs.heads, inputs.v_dim)
    query, key, value = exact = [x.double().requires_grad_() for x in whole]
    expected = reference_attention(
        query,
        key,
        value,
        window_size=inputs.window_size,
        softmax_scale=inputs.softmax_scale,
        softmax_offset=inputs.softmax_offset,
    )
    expected_grads = torch.autograd.grad(expected, exact, dout.double())
    mine = [shard_sequence(x, 0, rank, size).requires_grad_() for x in whole]
    try:
        out = module.probe_forward(mine[0], mine[1], mine[2])
        grads = torch.autograd.grad(out, mine, shard_sequence(dout, 0, rank, size))
    except (ValueError, RuntimeError) as error:
        return f"{target}: {error}"
    names = ("output", "query gradient", "key gradient", "value gradient")
    for name, got, want in zip(names, (out, *grads), (expected, *expected_grads), strict=True):
        difference = _largest_error(got, shard_sequence(want, 0, rank, size), want)
        if not difference <= TOLERANCE[inputs.dtype]:
            return (
                f"{target}: the {name} of a sequence sharded over {size} ranks differs from the one-rank answer by "
                f"{difference:.1e} of the largest value: the groups do not communicate correctly"
            )
    return None


def _largest_error(got: Tensor, want: Tensor, scale: Tensor) -> float:
    return ((got.double() - want).abs().max() / scale.abs().max()).item()


def _compare_settings(problems: list[str]) -> None:
    """Raise on all ranks the problems of any rank."""
    found = gather_problems(problems)
    if found:
        between = "\n  "
        what = f"attention probe failed; training not started.{between}{join_limited(found, between)}"
        raise ProbeError(what, on_all_ranks=True)
