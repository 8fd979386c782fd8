"""Initial weights that do not depend on layout or backend.

With ``use_cpu_initialization`` megatron-core draws whole matrices on the host, in the order of construction, and keeps
a tensor-parallel rank's shard. The order is the same on every rank, with exceptions: the first layer of a pipeline
stage, the experts of an expert-parallel rank, and matrices that Transformer Engine draws. These get seeds of their own.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
import torch.distributed as dist
from megatron.core.transformer.transformer_config import TransformerConfig
from torch import Tensor

from megatron_cp.mcore.private_names import initialize_affine_weight_cpu

Draw = Callable[[Tensor], Any]
# Seed, weight, initialization method, group that shards it, sharded dimension, and the stride of draw_part.
Matrix = tuple[int, Tensor, Draw, dist.ProcessGroup | None, int, int]
_LATENT = ("linear_q_proj", "linear_q_down_proj", "linear_q_up_proj", "linear_kv_down_proj", "linear_kv_up_proj")


def seed_of(seed: int, name: str) -> int:
    """Derive the seed of a named part: 32 bits, for PyTorch's CPU generator."""
    return int.from_bytes(hashlib.blake2b(f"{seed} {name}".encode(), digest_size=4).digest())


@contextmanager
def drawing_from(seed: int) -> Iterator[None]:
    """Draw on the host from ``seed`` in the body; the generator outside is unchanged."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        yield


def draw_part(
    weight: Tensor,
    seed: int,
    method: Draw,
    dtype: torch.dtype,
    group: dist.ProcessGroup | None,
    dim: int = 0,
    stride: int = 1,
) -> None:
    """Draw the whole matrix of the shard ``weight`` along ``dim``, and keep the shard.

    Without a ``group`` every rank has the whole matrix. ``stride``: number of matrices stored as one, each in shards
    (2 for a gated MLP's first matrix).
    """
    rank, size = (group.rank(), group.size()) if group is not None else (0, 1)
    shape = list(weight.shape)
    shape[dim] *= size
    with drawing_from(seed):
        initialize_affine_weight_cpu(
            weight,
            *shape,
            weight.shape[dim],
            dim,
            method,
            stride=stride,
            params_dtype=dtype,
            rank=rank,
            world_size=size,
            skip_set_tensor_parallel_attributes=True,
        )


def draw_layer(layer: Any, seed: int, name: str) -> None:
    """Redraw a layer's weights that depend on layout or backend."""
    config: TransformerConfig = layer.config
    if not (config.use_cpu_initialization and config.perform_initialization):
        return

    def seed_for(part: str) -> int:
        return seed_of(seed, f"{name} {part}")

    matrices: list[Matrix] = []
    if config.multi_latent_attention:
        matrices += _latent_matrices(layer, seed_for)
    if hasattr(layer.mlp, "experts"):
        matrices += _expert_matrices(layer, seed_for)
    for part_seed, weight, method, group, dim, stride in matrices:
        draw_part(weight, part_seed, method, config.params_dtype, group, dim, stride)


def _expert_matrices(layer: Any, seed_for: Callable[[str], int]) -> Iterator[Matrix]:
    """Yield each expert's matrices with a seed of its own.

    megatron-core draws the same experts on every expert-parallel rank; Transformer Engine draws grouped ones on the
    device. A shared expert is drawn after the rank's own experts, so it depends on their number too.
    """
    config, mlp, groups = layer.config, layer.mlp, layer.pg_collection
    first, second, gated = config.init_method, config.output_layer_init_method, 1 + config.gated_linear_unit
    for index, (fc1, fc2) in zip(mlp.local_expert_indices, _experts(mlp.experts), strict=True):
        expert = seed_for(f"expert {index}")
        yield expert, fc1, first, groups.expt_tp, 0, gated
        yield seed_of(expert, "second"), fc2, second, groups.expt_tp, 1, 1
    if mlp.use_shared_expert:
        shared = mlp.shared_experts
        yield seed_for("shared expert first"), shared.linear_fc1.weight, first, groups.tp, 0, gated
        yield seed_for("shared expert second"), shared.linear_fc2.weight, second, groups.tp, 1, 1
        if shared.gate_weight is not None:
            yield seed_for("shared expert gate"), shared.gate_weight, first, None, 0, 1
    if config.moe_latent_size is not None:
        yield seed_for("latent fc1"), mlp.fc1_latent_proj.weight, first, None, 0, 1
        yield seed_for("latent fc2"), mlp.fc2_latent_proj.weight, second, None, 0, 1


def _experts(experts: Any) -> Iterator[tuple[Tensor, Tensor]]:
    """Yield both matrices of each expert of this rank."""
    if hasattr(experts, "local_experts"):
        for expert in experts.local_experts:
            yield expert.linear_fc1.weight, expert.linear_fc2.weight
        return
    for index in range(experts.num_local_experts):
        yield getattr(experts.linear_fc1, f"weight{index}"), getattr(experts.linear_fc2, f"weight{index}")


def _latent_matrices(layer: Any, seed_for: Callable[[str], int]) -> Iterator[Matrix]:
    """Yield the matrices of a layer with latent attention.

    Transformer Engine draws two of them from another generator, which would change all later ones too.
    """
    config, attention, mlp = layer.config, layer.self_attention, layer.mlp
    first, second = config.init_method, config.output_layer_init_method
    linears = [(part, getattr(attention, part, None), first, 1) for part in _LATENT]
    linears += [("linear_proj", attention.linear_proj, second, 1)]
    if hasattr(mlp, "experts"):
        yield seed_for("router"), mlp.router.weight, first, None, 0, 1
    else:
        gated = 1 + config.gated_linear_unit
        linears += [("linear_fc1", mlp.linear_fc1, first, gated), ("linear_fc2", mlp.linear_fc2, second, 1)]
    for part, linear, method, stride in linears:
        if linear is not None:
            weight = linear.weight
            group = layer.pg_collection.tp if getattr(weight, "tensor_model_parallel", False) else None
            yield seed_for(part), weight, method, group, weight.partition_dim, stride
