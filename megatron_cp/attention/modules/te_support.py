"""Transformer Engine's support for attention, by version. Pure.

The rules refuse configurations beyond this table, and ``attention_backend=auto`` falls back to our own attention in
Transformer Engine's layers. The facts come from its checks in ``attention/dot_product_attention/context_parallel.py``
and ``utils.py`` and, for windows, in ``common/fused_attn/fused_attn.cpp``. ``tests/doubles/te_on_cpu/support.py`` tries
them against the Python part of a version: each minor version from 2.10 to 2.20 was tried.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator
from dataclasses import dataclass
from typing import Literal

from megatron_cp.attention.transports.registry import ALWAYS, TRANSPORTS, TESince, Transport, known_transports
from megatron_cp.config.names import NAME
from megatron_cp.config.run_config import ModelConfig

MINIMUM = "2.10.0"  # oldest supported version
EVEN_HEADS = "2.15.0"  # from here on, fused attention with an all-to-all requires even numbers of heads
ONE_RANK = TESince(ALWAYS, ALWAYS, ALWAYS, ALWAYS, ALWAYS, "2.12.0", ALWAYS, "2.12.0", different_head_dims=ALWAYS)
# Features of TESince: words, and the id of the rule that checks each.
FEATURES = {
    "context_parallelism": ("context parallelism", "C16"),
    "packs": ("packed sequences (thd)", "F5"),
    "window": ("sliding window", "E1"),
    "full_window": ("sliding window without a causal mask", "E1"),
    "full_window_in_packs": ("sliding window without a causal mask in packs", "E1"),
    "softmax_offset": ("softmax offset", "E4"),
    "softmax_offset_in_packs": ("softmax offset in packs", "E4"),
    "different_head_dims": ("head dims that differ (MLA)", "D6"),
}


@dataclass(frozen=True)
class Gap:
    """Configured feature that Transformer Engine lacks; ``rule``: the rule's id.

    ``slow``: it has the feature, but far slower than our own attention.
    """

    rule: str
    field: str
    message: str
    slow: bool = False


def parse_version(text: str) -> tuple[int, ...]:
    """Parse a version: ``"2.20.0.dev0"`` as (2, 20, 0)."""
    numbers = []
    for part in text.split("+")[0].split("."):
        if not part.isdigit():
            break
        numbers.append(int(part))
    return tuple(numbers)


def has(version: str, since: str | None) -> bool:
    """Return whether a version has a feature that exists ``since`` another version."""
    return since is not None and parse_version(version) >= parse_version(since)


def first_versions(feature: str) -> str:
    """Describe since which version each transport has a feature of :class:`TESince`."""
    since = {name: getattr(transport.te_since, feature) for name, transport in TRANSPORTS.items()}
    return ", ".join(
        f"{name} {'always' if version == ALWAYS else f'since {version.removesuffix(".0")}'}"
        for name, version in since.items()
        if version is not None
    )


def has_window(model: ModelConfig) -> bool:
    """Return whether attention has a window that limits it."""
    unlimited = ([-1, -1], [-1, 0]) if model.attention_mask_type == "causal" else ([-1, -1],)
    return model.window_size is not None and model.window_size not in unlimited


def gaps(model: ModelConfig, version: str, packed_sizes: Collection[int], flash: bool, fp32: bool) -> Iterator[Gap]:
    """Yield features of a configuration that this version lacks or slows down.

    ``packed_sizes``, ``flash`` and ``fp32`` are as in :func:`choose_backend`.
    """
    if parse_version(version) < parse_version(MINIMUM):
        yield Gap("C16", NAME.model.attention_backend, f"at least version {MINIMUM} is needed ({version} here)")
    if model.qk_clip or model.log_max_attention_logit:
        field = NAME.model.qk_clip if model.qk_clip else NAME.model.log_max_attention_logit
        yield Gap("E21", field, "the largest score of its attention is not read here")
    if model.attention_head_groups > 1:
        yield Gap("D15", NAME.model.attention_head_groups, "its backward pass does not begin from a known output")
    widest = max(packed_sizes, default=1)
    several = max(model.context_parallel_size, widest) > 1 or model.dynamic_context_parallel
    packing = NAME.model.sequence_packing_scheduler, model.sequence_packing_scheduler is not None
    if widest > 1 and not packing[1]:  # packs in evaluation only
        packing = NAME.dist.eval_context_parallel_size, True
    in_packs = "_in_packs" if packing[1] else ""
    window = "window" if model.attention_mask_type == "causal" else f"full_window{in_packs}"
    wanted = {
        "context_parallelism": (NAME.model.cp_comm_type, True),
        "packs": packing,
        window: (NAME.model.window_size, has_window(model)),
        f"softmax_offset{in_packs}": (NAME.model.softmax_type, model.softmax_type != "vanilla"),
        "different_head_dims": (NAME.model.multi_latent_attention, model.multi_latent_attention),
    }
    for transport in known_transports(model.transports) if several else (None,):
        where, row = "on one rank", ONE_RANK
        if transport is not None:
            where, row = f"with {NAME.model.cp_comm_type}={transport.name}", transport.te_since
        for feature, (field, is_wanted) in wanted.items():
            since, (words, rule) = getattr(row, feature), FEATURES[feature]
            if is_wanted and not has(version, since):
                when = f"before version {since}" if since else "in any version"
                yield Gap(rule, field, f"no {words} {where} {when} ({version} here)")
        # Not checked for packs in evaluation only.
        if model.sequence_packing_scheduler is not None and not has(version, row.packs_without_waits):
            when = f"before {row.packs_without_waits}"
            message = f"packs make the host wait for the GPU, for each sequence, {where} {when} ({version} here)"
            yield Gap("F5", packing[0], message, slow=True)
        if transport is not None and transport.exchanges_heads:
            yield from _head_gaps(model, transport, packed_sizes)
            if not flash and (odd := odd_heads(model, version)):
                message = f"{where} odd numbers of heads ({odd}) need flash attention: not installed"
                yield Gap("D3", NAME.model.num_query_groups, message)
    if several and packing[1] and model.packed_placement != "zigzag":
        yield Gap("F17", NAME.model.packed_placement, "its packs are in zigzag")
    odd_dims = [dim for dim in _head_dims(model) if dim % 8]
    if odd_dims and (several or packing[1]):
        where = "packs" if packing[1] else "context parallelism"
        message = f"no kernel for {where} takes a head dim of {odd_dims[0]}, which is not a multiple of 8"
        yield Gap("D13", NAME.model.v_head_dim if model.multi_latent_attention else NAME.model.kv_channels, message)
    if not several:
        return
    if has_window(model) and model.attention_dropout:
        yield Gap(
            "E2", NAME.model.attention_dropout, "no attention dropout with a sliding window under context parallelism"
        )
    if fp32:
        yield Gap("E13", NAME.mixed_precision.fp32, "No dot product attention backend is available in fp32")


def _head_dims(model: ModelConfig) -> tuple[int, ...]:
    if model.multi_latent_attention:
        return model.qk_head_dim + model.qk_pos_emb_head_dim, model.v_head_dim
    return (model.kv_channels or 0,)


def odd_heads(model: ModelConfig, version: str) -> str:
    """Describe a rank's head counts that fused attention refuses with an all-to-all."""
    if model.tensor_model_parallel_size < 1 or parse_version(version) < parse_version(EVEN_HEADS):
        return ""
    heads = (count // model.tensor_model_parallel_size for count in (model.num_attention_heads, model.kv_heads))
    return ", ".join(str(count) for count in heads if max(1, count) % 2)


def _head_gaps(model: ModelConfig, transport: Transport, packed_sizes: Collection[int]) -> Iterator[Gap]:
    """Yield gaps of key/value heads that an all-to-all cannot split."""
    sizes = transport.head_ranks(model.context_parallel_size, model.hierarchical_context_parallel_sizes, packed_sizes)
    tp, groups = model.tensor_model_parallel_size, model.kv_heads
    if tp < 1:
        return
    awkward = [n for n in sizes if n > 1 and (groups < tp or groups // tp % n)]
    if not awkward:
        return
    size = max(awkward)
    if groups < tp:
        message = f"an all-to-all over {size} ranks needs whole key/value heads, and {tp} ranks share {groups} already"
        yield Gap("D4", NAME.model.num_query_groups, message)
    else:
        message = (
            f"{NAME.model.cp_comm_type}='{transport.name}' requires num_heads % cp_size == 0 for key/value heads "
            f"too: {groups} / tp {tp} = {groups // tp} is not divisible by {size}"
        )
        yield Gap("D2" if transport.hierarchical else "D1", NAME.model.num_query_groups, message)


def has_te_layers(model: ModelConfig, version: str | None, on_gpu: bool, fp32: bool) -> bool:
    """Return whether the layers around attention are Transformer Engine's.

    True on a GPU with the library, with any attention, unless ``model.transformer_impl`` says otherwise. ``version``:
    the installed version or None. Runs in float32 (``fp32``) need ``transformer_impl=transformer_engine`` or
    ``attention_backend=te`` for these layers, because Transformer Engine multiplies matrices in TF32.
    """
    wanted = model.transformer_impl
    if wanted == "local" or not on_gpu or version is None or parse_version(version) < parse_version(MINIMUM):
        return False
    return wanted == "transformer_engine" or model.attention_backend == "te" or not fp32


def choose_backend(
    model: ModelConfig,
    version: str | None,
    on_gpu: bool,
    packed_sizes: Collection[int],
    fp32: bool,
    flash: bool = False,
) -> tuple[Literal["te", "native"], list[Gap]]:
    """Choose the attention backend; return it and Transformer Engine's gaps.

    ``version``: the installed version or None. ``packed_sizes``: ranks of the groups of packed microbatches, which
    Transformer Engine uses as all-to-all groups like the configured one. ``fp32``: everything is computed in float32.
    ``flash``: flash attention is installed. With "te" the rules report the gaps; with "auto" any gap selects our own
    attention.
    """
    wanted = model.attention_backend
    if wanted == "native" or not on_gpu or version is None or model.transformer_impl == "local":
        return "native", []
    found = list(gaps(model, version, packed_sizes, flash, fp32))
    if wanted == "auto" and fp32 and not any(gap.rule == "E13" for gap in found):
        # It works, but rounds to TF32: a run on one rank must not differ from a sharded run by that.
        found.append(Gap("E13", NAME.mixed_precision.fp32, "its matrix products are TF32, not float32"))
    return ("native" if wanted == "auto" and found else "te"), found
