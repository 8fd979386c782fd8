"""What ``auto`` settings and a world size that nobody gave come to, so that all who ask get the same answer."""

from __future__ import annotations

import dataclasses
from collections.abc import Collection

from megatron_cp.attention.modules.te_support import Gap, choose_backend, has_window
from megatron_cp.attention.transports.registry import ALL_TO_ALL, HIERARCHICAL
from megatron_cp.attention.transports.select import select_transport
from megatron_cp.config.names import NAME
from megatron_cp.config.run_config import DistributedConfig, ModelConfig, RunConfig
from megatron_cp.launch import launcher
from megatron_cp.parallel.layout import layout_of
from megatron_cp.rules.environment import Environment


def ranks_to_check(config: RunConfig, asked: int | None) -> int:
    """Ranks to check for: as asked, else as launched, else as the recipe says, else as few as its layout needs.

    Raises:
        ConfigError: the launcher's variable is no number.
    """
    if asked is not None:
        return asked
    launched = launcher.world_size()
    return launched if launched is not None else config.recipe_world_size or config.model.fewest_ranks


def packed_sizes(model: ModelConfig, distributed: DistributedConfig, world_size: int) -> set[int]:
    """Ranks of the groups that packs may use; none where nothing is packed, or where the layout cannot be."""
    of_evaluation = distributed.eval_context_parallel_size
    if model.sequence_packing_scheduler is None and of_evaluation is None:
        return set()
    from megatron_cp.dynamic_cp.buddy_tree import configured_blocks  # needs numpy, which takes a while to import

    try:
        layout = layout_of(model, distributed, world_size)
        return {len(block) for block in configured_blocks(model, of_evaluation, layout)}
    except ValueError:  # the rules say why
        return set()


def backend_in(
    environment: Environment, model: ModelConfig, packed: Collection[int], fp32: bool
) -> tuple[str, list[Gap]]:
    """What :func:`choose_backend` comes to in an environment; ``packed`` are its ``packed_sizes``."""
    on_gpu, flash = environment.device == "gpu", environment.flash_attn is not None
    return choose_backend(model, environment.transformer_engine, on_gpu, packed, fp32, flash)


def resolve_auto(
    config: RunConfig, world_size: int, gpus_per_node: int | None, environment: Environment
) -> tuple[RunConfig, str | None]:
    """The configuration with ``cp_comm_type=auto`` replaced by a transport, and what was chosen and why.

    The same configuration and None where nothing is ``auto`` or nothing can be chosen (the rules then say what is
    wrong). Sizes that are given mean two levels of just those; whether they can be is the rules' matter, too. Otherwise
    a node has ``gpus_per_node`` ranks; by default what the launcher or the environment says, else all ranks.
    """
    model = config.model
    if "auto" not in model.transports:
        return config, None
    given = model.hierarchical_context_parallel_sizes
    sizes: list[int] | None
    if given and model.context_parallel_size > 1:
        transport, sizes = HIERARCHICAL.name, given
        reason = f"these are its {NAME.model.hierarchical_context_parallel_sizes}"
    else:
        try:
            transport, sizes, reason = _selected(config, world_size, gpus_per_node, environment)
        except ValueError:
            return config, None
    resolved = dataclasses.replace(
        model,
        cp_comm_type=replaced(model.cp_comm_type, transport),
        hierarchical_context_parallel_sizes=given or sizes,
    )
    what = f"{transport} {sizes}" if sizes else transport
    return dataclasses.replace(config, model=resolved), f"{NAME.model.cp_comm_type}=auto is {what}: {reason}"


def _selected(
    config: RunConfig, world_size: int, gpus_per_node: int | None, environment: Environment
) -> tuple[str, list[int] | None, str]:
    """What :func:`select_transport` returns, and raises, for this configuration."""
    model = config.model
    node = gpus_per_node or environment.gpus_per_node or launcher.local_world_size() or world_size
    by_heads = dataclasses.replace(
        model,
        cp_comm_type=replaced(model.cp_comm_type, ALL_TO_ALL.name),
        hierarchical_context_parallel_sizes=None,
    )
    packed = packed_sizes(by_heads, config.dist, world_size)
    return select_transport(
        model.num_attention_heads,
        model.kv_heads,
        model.tensor_model_parallel_size,
        model.context_parallel_size,
        node,
        seq_length=model.seq_length,
        window=has_window(model),
        softmax_offset=model.softmax_type != "vanilla",
        transformer_engine=backend_in(environment, model, packed, config.mixed_precision.fp32)[0] == "te",
        packed_sizes=packed,
    )


def replaced(kinds: str | list[str], right: str, wrong: str = "auto") -> str | list[str]:
    """``cp_comm_type`` with one transport in place of another."""
    return right if isinstance(kinds, str) else [right if kind == wrong else kind for kind in kinds]
