"""Initial weights that follow from the seed and from what a matrix is: not from the layout, or from who computes it.

megatron-core draws a whole matrix on the host and keeps a tensor-parallel rank's part (``use_cpu_initialization``), one
matrix after the other in the order in which modules are built. That order is the same on every rank, but for the layer
a pipeline stage begins with, the experts an expert-parallel rank has, and matrices that Transformer Engine draws by
itself: these are given seeds of their own.
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
_LATENT = ("linear_q_proj", "linear_q_down_proj", "linear_q_up_proj", "linear_kv_down_proj", "linear_kv_up_proj")


def seed_of(seed: int, name: str) -> int:
    """A seed for one named part of the model: 32 bits, all that PyTorch's CPU generator takes of a number."""
    return int.from_bytes(hashlib.blake2b(f"{seed} {name}".encode(), digest_size=4).digest())


@contextmanager
def drawing_from(seed: int) -> Iterator[None]:
    """Draw on the host from a stream of its own; the stream outside goes on as if nothing had been drawn."""
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
    """Draw the matrix of which ``weight`` is this rank's part along ``dim``, and keep the part.

    Without a ``group`` every rank has the whole. ``stride`` is the number of matrices that are stored as one, each in
    parts: 2 for gates and what they gate.
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
    """Draw again what a transformer layer did not get from its own seed alone. For ``use_cpu_initialization``."""
    config: TransformerConfig = layer.config
    if not (config.use_cpu_initialization and config.perform_initialization):
        return
    if config.multi_latent_attention:
        _draw_latent(layer, seed, name)
    if hasattr(layer.mlp, "experts"):
        _draw_experts(layer, seed, name)


def _draw_experts(layer: Any, seed: int, name: str) -> None:
    """Each expert from a seed of its own: megatron-core draws the same ones on every expert-parallel rank, and
    Transformer Engine those of a grouped product on the device."""
    config, group = layer.config, layer.pg_collection.expt_tp
    gated = 2 if config.gated_linear_unit else 1
    for index, (first, second) in zip(layer.mlp.local_expert_indices, _experts(layer.mlp.experts), strict=True):
        own = seed_of(seed, f"{name} expert {index}")
        draw_part(first, own, config.init_method, config.params_dtype, group, 0, gated)
        draw_part(second, seed_of(own, "second"), config.output_layer_init_method, config.params_dtype, group, 1)
    if layer.mlp.use_shared_expert:
        _draw_shared_expert(layer, seed, name)
    if config.moe_latent_size is not None:
        for part, method in (("fc1", config.init_method), ("fc2", config.output_layer_init_method)):
            weight = getattr(layer.mlp, f"{part}_latent_proj").weight
            draw_part(weight, seed_of(seed, f"{name} latent {part}"), method, config.params_dtype, None)


def _draw_shared_expert(layer: Any, seed: int, name: str) -> None:
    """From seeds of its own: megatron-core draws it after the experts, of which a rank may have only some."""
    config, group, shared = layer.config, layer.pg_collection.tp, layer.mlp.shared_experts
    gated = 2 if config.gated_linear_unit else 1
    matrices: list[tuple[str, Tensor, Draw, dist.ProcessGroup | None, int, int]] = [
        ("first", shared.linear_fc1.weight, config.init_method, group, 0, gated),
        ("second", shared.linear_fc2.weight, config.output_layer_init_method, group, 1, 1),
    ]
    if shared.gate_weight is not None:
        matrices.append(("gate", shared.gate_weight, config.init_method, None, 0, 1))
    for part, weight, method, ranks, dim, stride in matrices:
        own = seed_of(seed, f"{name} shared expert {part}")
        draw_part(weight, own, method, config.params_dtype, ranks, dim, stride)


def _experts(experts: Any) -> Iterator[tuple[Tensor, Tensor]]:
    """Both matrices of each expert that this rank has."""
    if hasattr(experts, "local_experts"):
        for expert in experts.local_experts:
            yield expert.linear_fc1.weight, expert.linear_fc2.weight
        return
    for index in range(experts.num_local_experts):
        yield getattr(experts.linear_fc1, f"weight{index}"), getattr(experts.linear_fc2, f"weight{index}")


def _draw_latent(layer: Any, seed: int, name: str) -> None:
    """The matrices of a layer with latent attention: Transformer Engine draws two of them by itself, from another
    stream, so that all that follow would differ too."""
    config, group = layer.config, layer.pg_collection.tp
    first, second = config.init_method, config.output_layer_init_method
    attention, mlp = layer.self_attention, layer.mlp
    matrices: list[tuple[str, Any, Draw, int]] = [(part, getattr(attention, part, None), first, 1) for part in _LATENT]
    matrices += [("linear_proj", attention.linear_proj, second, 1)]
    if not hasattr(mlp, "experts"):
        gated = 2 if config.gated_linear_unit else 1
        matrices += [("linear_fc1", mlp.linear_fc1, first, gated), ("linear_fc2", mlp.linear_fc2, second, 1)]
    for part, linear, method, stride in matrices:
        if linear is None:
            continue
        own, weight = seed_of(seed, f"{name} {part}"), linear.weight
        shared = group if getattr(weight, "tensor_model_parallel", False) else None
        draw_part(weight, own, method, config.params_dtype, shared, weight.partition_dim, stride)
    if hasattr(mlp, "router"):
        draw_part(mlp.router.weight, seed_of(seed, f"{name} router"), first, config.params_dtype, None)
