"""Resolve ``auto`` settings and an unspecified world size, in one place."""

from __future__ import annotations

import dataclasses
from collections.abc import Collection

from megatron_cp.attention.heads import numbers_of_groups
from megatron_cp.attention.modules.te_support import Gap, choose_backend, has_window
from megatron_cp.attention.transports.registry import ALL_TO_ALL, HIERARCHICAL
from megatron_cp.attention.transports.select import Choice, possible_transports
from megatron_cp.config.names import NAME
from megatron_cp.config.run_config import DistributedConfig, ModelConfig, RunConfig
from megatron_cp.estimate.time import time_estimate
from megatron_cp.launch import launcher
from megatron_cp.models.vocabulary import known_vocab_size
from megatron_cp.parallel.layout import layout_of
from megatron_cp.rules.environment import Environment
from megatron_cp.rules.job import ASSUMED_VOCABULARY, assumed_job, device_of
from megatron_cp.rules.memory import choose_savings
from megatron_cp.rules.remedies import Case

_MOST_SHOWN = 4  # transports in the reason for a choice


def ranks_to_check(config: RunConfig, asked: int | None) -> int:
    """Return the world size to check.

    In this order: as asked, as launched, from the recipe, the fewest ranks of the layout.

    Raises:
        ConfigError: the launcher's variable is not a number.
    """
    if asked is not None:
        return asked
    launched = launcher.world_size()
    return launched if launched is not None else config.recipe_world_size or config.model.fewest_ranks


def packed_sizes(model: ModelConfig, distributed: DistributedConfig, world_size: int) -> set[int]:
    """Return the sizes of the groups that packs may use.

    Empty without packing, or if the layout is impossible.
    """
    eval_size = distributed.eval_context_parallel_size
    if model.sequence_packing_scheduler is None and eval_size is None:
        return set()
    from megatron_cp.dynamic_cp.buddy_tree import configured_blocks  # imports numpy, which is slow

    try:
        layout = layout_of(model, distributed, world_size)
        return {len(block) for block in configured_blocks(model, eval_size, layout)}
    except ValueError:  # the rules report it
        return set()


def backend_in(
    environment: Environment, model: ModelConfig, packed: Collection[int], fp32: bool
) -> tuple[str, list[Gap]]:
    """Return the result of :func:`choose_backend` in an environment.

    ``packed`` are the environment's ``packed_sizes``.
    """
    on_gpu, flash = environment.device == "gpu", environment.flash_attn is not None
    return choose_backend(model, environment.transformer_engine, on_gpu, packed, fp32, flash)


def resolve_auto(
    config: RunConfig, world_size: int, gpus_per_node: int | None, environment: Environment
) -> tuple[RunConfig, str | None]:
    """Replace ``auto`` of ``cp_comm_type`` and ``memory_savings``.

    Also returns choices and reasons. Returns the same configuration and None if nothing is ``auto`` or nothing can be
    chosen (the rules then report an error). A node has ``gpus_per_node`` ranks; by default the launcher's or the
    environment's number, else all ranks.
    """
    choices = []
    if "auto" in config.model.transports:
        config, choice = _with_transport_chosen(config, world_size, gpus_per_node, environment)
        choices.append(choice)
    if config.model.memory_savings == "auto":
        case, choice = choose_savings(Case(config, world_size, gpus_per_node, environment))
        config = case.config
        choices.append(choice)
    return config, "\n".join(filter(None, choices)) or None


def _with_transport_chosen(
    config: RunConfig, world_size: int, gpus_per_node: int | None, environment: Environment
) -> tuple[RunConfig, str | None]:
    """Replace ``cp_comm_type=auto`` by a transport.

    Given hierarchical sizes are kept, and the rules check them.
    """
    model = config.model
    given = model.hierarchical_context_parallel_sizes
    sizes: list[int] | None
    if given and model.context_parallel_size > 1:
        transport, sizes = HIERARCHICAL.name, given
        reason = f"{NAME.model.hierarchical_context_parallel_sizes} is set"
    else:
        try:
            transport, sizes, reason = _selected(config, world_size, gpus_per_node, environment)
        except ValueError:
            return config, None
    resolved = dataclasses.replace(config, model=_with_transport(model, (transport, given or sizes)))
    return resolved, f"{NAME.model.cp_comm_type}=auto is {_choice_text((transport, sizes))}: {reason}"


def _selected(
    config: RunConfig, world_size: int, gpus_per_node: int | None, environment: Environment
) -> tuple[str, list[int] | None, str]:
    """Return the transport of least estimated time, its sizes, and the reason.

    Raises:
        ValueError: as :func:`possible_transports`.
    """
    model = config.model
    node = gpus_per_node or environment.gpus_per_node or launcher.local_world_size() or world_size
    packed = packed_sizes(_with_transport(model, (ALL_TO_ALL.name, None)), config.dist, world_size)
    groups, tp = max(1, model.attention_head_groups), max(1, model.tensor_model_parallel_size)
    of_rank = numbers_of_groups(model.num_attention_heads // tp, model.kv_heads // tp, ())
    groups = groups if groups in of_rank else 1  # else the rules report an error
    found, restricted = possible_transports(
        model.num_attention_heads // groups,  # attention has as many at one time
        max(tp, model.kv_heads // groups),
        model.tensor_model_parallel_size,
        model.context_parallel_size,
        window=has_window(model),
        softmax_offset=model.softmax_type != "vanilla",
        transformer_engine=backend_in(environment, model, packed, config.mixed_precision.fp32)[0] == "te",
        packed_sizes=packed,
    )
    if len(found) == 1:
        return *found[0], restricted or "no other transport is possible"
    device = device_of(environment)
    try:
        layouts = [dataclasses.replace(config, model=_with_transport(model, each)) for each in found]
        jobs = [assumed_job(Case(layout, world_size, node, environment)) for layout in layouts]
        seconds = [time_estimate(job, device, node).seconds for job in jobs]
    except (ValueError, ArithmeticError, LookupError):  # sizes that the rules refuse
        return *found[0], "the first that is possible; these sizes have no time estimate"
    # Four digits: ranks on other kinds of CPU must not choose by the last one. Then the order of preference decides.
    ranked = sorted(zip(seconds, found, strict=True), key=lambda pair: float(f"{pair[0]:.4g}"))
    shown = ", ".join(f"{_choice_text(each)} {time:.3g} s" for time, each in ranked[:_MOST_SHOWN])
    reason = f"the fastest of {len(found)} by the estimated step time on {device.name}: {shown}"
    known = known_vocab_size(model, config.tokenizer) is not None
    assumed = None if known else f"a vocabulary of {ASSUMED_VOCABULARY:,} is assumed"
    return *ranked[0][1], "; ".join(filter(None, (reason, assumed, restricted)))


def _with_transport(model: ModelConfig, choice: Choice) -> ModelConfig:
    """Return the model's settings with ``auto`` replaced by a choice."""
    kinds = replaced(model.cp_comm_type, choice[0])
    return dataclasses.replace(model, cp_comm_type=kinds, hierarchical_context_parallel_sizes=choice[1])


def _choice_text(choice: Choice) -> str:
    """Return a transport with its sizes, for instance ``a2a+p2p [4, 2]``."""
    transport, sizes = choice
    return f"{transport} {sizes}" if sizes else transport


def replaced(kinds: str | list[str], right: str, wrong: str = "auto") -> str | list[str]:
    """Return ``cp_comm_type`` with one transport replaced by another."""
    return right if isinstance(kinds, str) else [right if kind == wrong else kind for kind in kinds]
