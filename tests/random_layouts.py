"""Generate random runs that the rules accept, on up to four ranks.

They differ in architecture, transport, recomputation and packing.
"""

from __future__ import annotations

import random
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from megatron_cp.rules import check
from tests.training_runs import tiny_config

LATENT = dict(
    model__multi_latent_attention=True,
    model__kv_lora_rank=32,
    model__qk_head_dim=16,
    model__qk_pos_emb_head_dim=8,
    model__v_head_dim=16,
    model__num_query_groups=None,
)
_LENGTHS = [24, 60, 100, 17, 250, 128, 31, 200, 77, 256]


def random_layouts(seed: int) -> Iterator[tuple[int, dict[str, Any]]]:
    """Yield world sizes and settings, endlessly.

    The settings differ from :func:`tests.training_runs.tiny_config`'s.
    """
    draw = random.Random(seed)
    lengths = Path(tempfile.mkdtemp(prefix="lengths"), "lengths.txt")
    lengths.write_text("\n".join(map(str, _LENGTHS * 20)))
    while True:
        world_size, settings = draw.choice([1, 2, 2, 4, 4]), {}
        for choose in (_architecture, _sizes, _layout, _recomputation, _batches):
            settings |= choose(draw, world_size, settings)
        if draw.random() < 0.25:
            settings |= _packing(draw, str(lengths))
        try:
            config = tiny_config(**settings)
        except ValueError:
            continue
        if not any(each.severity == "error" for each in check(config, world_size, environment="cpu")):
            yield world_size, settings


def _architecture(draw: random.Random, world_size: int, settings: dict[str, Any]) -> dict[str, Any]:
    kind = draw.choice(["dense", "dense", "experts", "latent", "latent experts", "hybrid", "mtp"])
    chosen: dict[str, Any] = {"model__num_layers": draw.choice([4, 8])}
    if "experts" in kind:
        chosen |= dict(
            model__num_moe_experts=draw.choice([4, 8]),
            model__moe_ffn_hidden_size=draw.choice([64, 96]),
            model__moe_aux_loss_coeff=draw.choice([0.0, 0.01]),
            model__moe_shared_expert_intermediate_size=draw.choice([None, 64]),
            model__moe_layer_freq=draw.choice([1, 2]),
        )
    if "latent" in kind:
        chosen |= LATENT | {"model__q_lora_rank": draw.choice([None, 48]), "model__qk_layernorm": True}
    if kind == "hybrid":
        pattern = draw.choice(["MM*-", "M-M*", "M*-M-M*-", "MME*"])
        chosen |= dict(
            model__architecture="hybrid",
            model__hybrid_layer_pattern=pattern,
            model__num_layers=len(pattern),
            model__mamba_state_dim=draw.choice([16, 32]),
            model__mamba_head_dim=16,
            model__mamba_num_groups=draw.choice([2, 4]),
        )
        if "E" in pattern:
            chosen["model__num_moe_experts"] = 4
    if kind == "mtp":
        chosen["model__mtp_num_layers"] = draw.choice([1, 2])
    return chosen


def _sizes(draw: random.Random, world_size: int, settings: dict[str, Any]) -> dict[str, Any]:
    hidden = draw.choice([64, 128])
    chosen: dict[str, Any] = {
        "model__hidden_size": hidden,
        "model__ffn_hidden_size": hidden * draw.choice([2, 3, 4]),
        "model__normalization": draw.choice(["RMSNorm", "RMSNorm", "LayerNorm"]),
        "model__share_embeddings_and_output_weights": draw.random() < 0.3,
        "dataset__seq_length": draw.choice([256, 512]),
    }
    if "model__multi_latent_attention" not in settings:
        chosen["model__num_query_groups"] = draw.choice([2, 4, 8])
        chosen["model__qk_layernorm"] = draw.random() < 0.2
        chosen["model__position_embedding_type"] = draw.choice(["rope", "rope", "none"])
    if draw.random() < 0.2:
        chosen |= dict(model__activation_func="squared_relu", model__gated_linear_unit=False)
    if draw.random() < 0.15:
        chosen["model__sandwich_norm"] = True
    if draw.random() < 0.15:
        chosen["model__hidden_dropout"] = 0.1
    return chosen


def _layout(draw: random.Random, world_size: int, settings: dict[str, Any]) -> dict[str, Any]:
    sizes = dict.fromkeys(("tensor", "pipeline", "context"), 1)
    left = world_size
    while left > 1:
        name = draw.choice([*sizes, "data"])
        if name in sizes:
            sizes[name] *= 2
        left //= 2
    chosen: dict[str, Any] = {
        "model__tensor_model_parallel_size": sizes["tensor"],
        "model__pipeline_model_parallel_size": sizes["pipeline"],
        "model__context_parallel_size": sizes["context"],
        "model__sequence_parallel": sizes["tensor"] > 1 and draw.random() < 0.6,
        "optimizer__use_distributed_optimizer": draw.random() < 0.8,
        "ddp__overlap_grad_reduce": draw.random() < 0.3,
    }
    if sizes["context"] > 1:
        chosen["model__cp_comm_type"] = draw.choice(["p2p", "all_gather", "a2a", "a2a+p2p"])
        if chosen["model__cp_comm_type"] == "a2a+p2p":
            chosen["model__hierarchical_context_parallel_sizes"] = [2, sizes["context"] // 2]
    if sizes["pipeline"] > 1 and draw.random() < 0.4:
        chosen["model__virtual_pipeline_model_parallel_size"] = 2
    if "model__num_moe_experts" in settings:
        chosen["model__expert_model_parallel_size"] = draw.choice([1, 2, 2])
        chosen["model__expert_tensor_parallel_size"] = 1
    return chosen


def _recomputation(draw: random.Random, world_size: int, settings: dict[str, Any]) -> dict[str, Any]:
    kind = draw.choice([None, None, "uniform", "block", "core_attn", "mlp", "moe"])
    chosen: dict[str, Any] = {"model__cross_entropy_chunk_size": draw.choice([None, None, 64])}
    if kind in ("uniform", "block"):
        layers = draw.choice([1, 2])
        chosen["model__recompute_granularity"] = "full"
        chosen |= dict(model__recompute_method=kind, model__recompute_num_layers=layers)
    elif kind is not None:
        chosen |= dict(model__recompute_granularity="selective", model__recompute_modules=[kind])
    return chosen


def _batches(draw: random.Random, world_size: int, settings: dict[str, Any]) -> dict[str, Any]:
    micro = draw.choice([1, 2])
    return {"train__micro_batch_size": micro, "train__global_batch_size": micro * draw.choice([4, 8])}


def _packing(draw: random.Random, lengths: str) -> dict[str, Any]:
    how: dict[str, Any] = {"model__sequence_packing_scheduler": "dp_balanced"}
    if draw.random() < 0.4:
        how = {"model__dynamic_context_parallel": True}
    data = dict(dataset__kind="mock_documents", dataset__mock_lengths=lengths, dataset__seq_length=256)
    return how | data | dict(train__micro_batch_size=1, train__global_batch_size=16)
