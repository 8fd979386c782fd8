"""K rules on the model's shape: sizes fit each other and every setting is used."""

from __future__ import annotations

from collections.abc import Iterator

from megatron_cp.config.names import NAME
from megatron_cp.config.run_config import ModelConfig, default_at
from megatron_cp.models.hybrid_pattern import LETTERS, layers_of, mtp_layers_of, with_stages, without_stages
from megatron_cp.rules.base import Context, Finding, broken, rule
from megatron_cp.rules.proposals import closest, default_of, divisors, nearest_multiples, ones, resized
from megatron_cp.rules.unused_settings import unused_settings

# megatron-core's latent attention has its own projections, scale and rotary embedding, and ignores these settings.
_UNUSED_BY_LATENT_ATTENTION = (
    NAME.model.softmax_scale,
    NAME.model.rope_scaling,
    NAME.model.rope_scaling_factor,
    NAME.model.seq_len_interpolation_factor,
    NAME.model.add_qkv_bias,
    NAME.model.attention_output_gate,
    NAME.model.no_rope_freq,
    NAME.model.qk_l2_norm,
    NAME.model.use_mup,
    NAME.model.rotary_base_local,
)
_UNUSED_BY_LATENT_YARN = (NAME.model.rotary_percent, NAME.model.yarn_correction_range_round_to_int)
_UNSUPPORTED_IN_HYBRIDS = (
    NAME.model.multi_latent_attention,
    NAME.model.rope_scaling,
    NAME.model.use_mup,
    NAME.model.sandwich_norm,
)
# Settings that assign layers to the stages of models that are not hybrid.
_STAGE_SETTINGS = (
    NAME.model.account_for_embedding_in_pipeline_split,
    NAME.model.account_for_loss_in_pipeline_split,
    NAME.model.num_layers_in_first_pipeline_stage,
    NAME.model.num_layers_in_last_pipeline_stage,
)


@rule(
    "K12",
    "A sliding window is two lengths.",
    "megatron-core passes (left, right) on unchecked and fails late. A causal window has nothing to the right. "
    "Layers of multi-token prediction use the windows of the first layers: megatron-core numbers them from 1 again.",
    broken(model=dict(window_size=[64])),
)
def window_is_two_lengths(c: Context) -> Iterator[Finding]:
    model = c.model
    window, every, field = model.window_size, model.window_attn_skip_freq, NAME.model.window_attn_skip_freq
    if window is not None and (len(window) != 2 or min(window) < -1):
        left = window[0] if window and window[0] > 0 else 1024
        message = f"must be [left, right], -1 for no limit, got {window}"
        yield Finding(NAME.model.window_size, message, values=[[left, 0]])
    elif window is not None and model.attention_mask_type == "causal" and window[1] > 0:
        message = f"causal attention has no tokens to the right: the right part of {window} has no effect"
        yield Finding(NAME.model.window_size, message, values=[[window[0], 0]], severity="warning")
    # megatron-core numbers the layers of multi-token prediction from 1 again and uses the same list.
    depths = min(model.mtp_num_layers or 0, 1) if model.mtp_use_repeated_layer else model.mtp_num_layers or 0
    # In a hybrid model only the attention layers use the list.
    ahead = max((layers.rfind("*") + 1 for layers in mtp_layers_of(model.hybrid_layer_pattern)), default=depths)
    if isinstance(every, list) and len(every) != model.num_layers:
        message = f"has {len(every)} entries for {model.num_layers} layers"
        yield Finding(field, message, values=[resized(every, model.num_layers) if every else None, None])
    elif isinstance(every, list) and window is not None and len(every) < ahead:
        message = f"has {len(every)} entries, but {ahead} layers of multi-token prediction use the first {ahead}"
        fewer = f"{NAME.model.mtp_num_layers}={len(every)}"
        if model.architecture == "hybrid":
            shorter = [layers[: len(every)] for layers in mtp_layers_of(model.hybrid_layer_pattern)]
            fewer = _pattern("/".join([(model.hybrid_layer_pattern or "").split("/")[0], *shorter]))
        yield Finding(field, message, fewer, "=null (a window in all layers)")
    elif isinstance(every, int) and every < 1:
        message = f"every n-th layer has no window: n must be at least 1, got {every}"
        yield Finding(field, message, "=null (a window in all layers)")
    elif isinstance(every, list) and not set(every) <= {0, 1}:
        message = f"entries must be 1 (layer with a window) or 0 (without), got {every}"
        yield Finding(field, message, values=[ones(every)])
    elif every is not None and window is None:
        message = f"has no effect: {NAME.model.window_size} is null"
        yield Finding(field, message, "=null", severity="warning")


def _pattern(pattern: str) -> str:
    return f'"{NAME.model.hybrid_layer_pattern}={pattern}"'


@rule(
    "K14",
    "A hybrid model has a layer pattern with one letter per layer.",
    "M is Mamba, * attention, - an MLP, E experts. Optional | separate the pipeline stages, all of them. Each depth "
    "of multi-token prediction follows after a / and has the same pattern.",
    broken(model=dict(architecture="hybrid")),
)
def hybrid_pattern(c: Context) -> Iterator[Finding]:
    model, field = c.model, NAME.model.hybrid_layer_pattern
    pattern, layers = model.hybrid_layer_pattern, layers_of(model.hybrid_layer_pattern)
    if model.architecture != "hybrid":
        if pattern is not None:
            gpt = f"is for hybrid models only, and {NAME.model.architecture} is gpt"
            yield Finding(field, gpt, "=null", f"{NAME.model.architecture}=hybrid")
    elif not layers or set(layers) - set(LETTERS):
        yield Finding(
            field, "must contain only M, *, - and E", _pattern(("M*-" * model.num_layers)[: model.num_layers])
        )
    elif len(layers) != model.num_layers:
        message = f"has {len(layers)} letters for {model.num_layers} layers"
        yield Finding(field, message, f"{NAME.model.num_layers}={len(layers)}")
    elif mtp_layers_of(pattern) or model.mtp_num_layers:
        yield from _mtp_patterns(model)
    if model.architecture == "hybrid" and layers and "|" in (pattern or "").split("/")[0]:
        stages = c.pp * max(1, model.virtual_pipeline_model_parallel_size or 1)
        try:
            with_stages(pattern or "", stages)
        except ValueError as error:
            yield Finding(field, str(error), _pattern(without_stages(pattern)))


def _mtp_patterns(model: ModelConfig) -> Iterator[Finding]:
    field, depths = NAME.model.hybrid_layer_pattern, model.mtp_num_layers or 0
    ahead = mtp_layers_of(model.hybrid_layer_pattern)
    own = (model.hybrid_layer_pattern or "").split("/")[0]
    if not ahead:
        message = f"has no layers for the {depths} depths of multi-token prediction ({NAME.model.mtp_num_layers})"
        yield Finding(field, message, _pattern(f"{own}{'/*-' * min(depths, 8)}"), f"{NAME.model.mtp_num_layers}=null")
    elif not ahead[0] or set(ahead[0]) - set(LETTERS) or len(set(ahead)) > 1:
        message = f"each depth of multi-token prediction must have the same letters of M, *, - and E, got {ahead}"
        yield Finding(field, message, _pattern(f"{own}{'/*-' * len(ahead)}"))
    elif len(ahead) != depths:
        message = f"{field} has {len(ahead)} depths (after each /), not {depths or 'null'}"
        yield Finding(NAME.model.mtp_num_layers, message, f"={len(ahead)}")


@rule(
    "K18",
    "The key/value heads divide the attention heads.",
    "Each key/value head serves the same number of query heads.",
    broken(model=dict(num_query_groups=3)),
)
def kv_heads_divide_heads(c: Context) -> Iterator[Finding]:
    heads, groups = c.model.num_attention_heads, c.model.num_query_groups
    if c.model.multi_latent_attention:
        return  # has no key/value heads; rule K19 reports the setting
    if groups and groups > 0 and heads > 0 and heads % groups:
        yield Finding(
            NAME.model.num_query_groups,
            f"{groups} key/value heads do not divide {heads} attention heads",
            values=closest(divisors(heads), groups),
        )


@rule(
    "K19",
    "Every setting that is given is used.",
    "An ignored setting gives another model than the configuration describes. A setting that needs another one, "
    f"such as {NAME.model.rope_scaling_factor} without {NAME.model.rope_scaling}, gives a warning.",
    broken(
        model=dict(
            architecture="hybrid",
            hybrid_layer_pattern="M*M*",
            mamba_num_groups=4,
            num_query_groups=None,
            multi_latent_attention=True,
        ),
    ),
)
def settings_are_used(c: Context) -> Iterator[Finding]:
    if c.model.architecture == "hybrid":
        for field in filter(c.config.value_at, _UNSUPPORTED_IN_HYBRIDS):
            message = "not supported in hybrid models"
            yield Finding(field, message, "=false", f"{NAME.model.architecture}=gpt")
        for field in filter(c.config.value_at, _STAGE_SETTINGS):
            message = f"has no effect on a hybrid model: {NAME.model.hybrid_layer_pattern} assigns layers to stages"
            yield Finding(field, message, f"{default_of(field)} (| in the pattern begins a stage)")
        if c.model.moe_layer_freq != 1:
            message = f"has no effect on a hybrid model: E in {NAME.model.hybrid_layer_pattern} is a layer with experts"
            yield Finding(NAME.model.moe_layer_freq, message, "=1")
    if c.model.multi_latent_attention:
        yield from _unused_by_latent_attention(c)
    yield from unused_settings(c.config)


def _unused_by_latent_attention(c: Context) -> Iterator[Finding]:
    kind = c.model.position_embedding_type
    for field in _UNUSED_BY_LATENT_ATTENTION + (_UNUSED_BY_LATENT_YARN if kind == "yarn" else ()):
        if c.config.value_at(field) != default_at(field):
            which = "multi-latent attention with YaRN" if field in _UNUSED_BY_LATENT_YARN else "multi-latent attention"
            yield Finding(field, f"has no effect on {which}", default_of(field))
    if kind not in ("rope", "yarn"):
        message = "has no effect on multi-latent attention, which always uses rotary embeddings"
        yield Finding(NAME.model.position_embedding_type, message, "=rope")


@rule(
    "K31",
    "Tensor parallelism divides the feed-forward layers.",
    "Each rank holds as many columns of the first matrix, gated or not, as rows of the second.",
    broken(model=dict(ffn_hidden_size=97, tensor_model_parallel_size=2), world_size=8),
)
def feed_forward_divides(c: Context) -> Iterator[Finding]:
    names = NAME.model
    dense, experts = (names.tensor_model_parallel_size, c.tp), (names.expert_tensor_parallel_size, c.etp)
    split = [(names.ffn_hidden_size, *dense)] if "-" in c.model.layer_letters else []
    if "E" in c.model.layer_letters:
        expert_width = names.ffn_hidden_size if c.model.moe_ffn_hidden_size is None else names.moe_ffn_hidden_size
        split += [(expert_width, *experts), (names.moe_shared_expert_intermediate_size, *dense)]
    for field, ranks, size in split:
        width = c.config.value_at(field)
        if width is not None and width % size:
            message = f"{width} is not divisible by {ranks} ({size})"
            yield Finding(field, message, values=nearest_multiples(width, size))
