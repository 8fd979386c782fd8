"""K rules on positions and latent attention: dims, YaRN, tensor parallelism."""

from __future__ import annotations

import math
from collections.abc import Iterator

from megatron_cp.config.names import NAME
from megatron_cp.rules.base import Context, Finding, broken, rule
from megatron_cp.rules.proposals import default_of, nearest_multiples, typed


@rule(
    "K17",
    "The head dim is even where rotary embeddings pair its dimensions.",
    "Rotary embeddings rotate pairs of dimensions. Multi-latent attention always rotates "
    f"{NAME.model.qk_pos_emb_head_dim} dimensions and has its own pairing.",
    broken(model=dict(kv_channels=15)),
)
def head_dim_is_even(c: Context) -> Iterator[Finding]:
    model = c.model
    latent = model.multi_latent_attention
    field = NAME.model.qk_pos_emb_head_dim if latent else NAME.model.kv_channels
    size = c.config.value_at(field) or 0
    rotated = math.floor(size * model.rotary_percent)
    if (latent or model.position_embedding_type in ("rope", "yarn")) and rotated % 2:
        yield Finding(
            field,
            f"rotary embeddings rotate {rotated} dimensions per head, an odd number",
            f"={math.ceil((rotated + 1) / model.rotary_percent)}",
        )
    if latent and model.rotary_interleaved:
        yield Finding(
            NAME.model.rotary_interleaved, "rotary_interleaved does not work with multi_latent_attention.", "=false"
        )


@rule(
    "K55",
    "YaRN has a scaling factor and an original length, and is the only scaling.",
    "The scaling factor and the original length determine which frequencies YaRN changes. megatron-core silently "
    "ignores other ways to scale positions beside YaRN.",
    broken(model=dict(position_embedding_type="yarn")),
)
def yarn_settings_are_complete(c: Context) -> Iterator[Finding]:
    model = c.model
    if model.position_embedding_type != "yarn":
        return
    factor, original = model.yarn_rotary_scaling_factor, model.yarn_original_max_position_embeddings
    examples = {NAME.model.yarn_rotary_scaling_factor: 4.0, NAME.model.yarn_original_max_position_embeddings: 4096}
    missing = {field: value for field, value in examples.items() if c.config.value_at(field) is None}
    for field in missing:
        fix = " ".join(typed(name, value) for name, value in missing.items())
        note = "a model trained on 4096 tokens, for sequences 4 times as long"
        yield Finding(field, f"must be set with {NAME.model.position_embedding_type}=yarn", f"{fix} ({note})")
    if model.multi_latent_attention and original and original % (2 * c.cp):
        message = f"latent attention slices this many positions: {original} is not a multiple of "
        message += f"2 * {NAME.model.context_parallel_size} = {2 * c.cp}"
        field = NAME.model.yarn_original_max_position_embeddings
        yield Finding(field, message, values=nearest_multiples(original, 2 * c.cp))
    if model.yarn_beta_fast <= model.yarn_beta_slow:
        message = f"must be above {NAME.model.yarn_beta_slow} ({model.yarn_beta_slow}), got {model.yarn_beta_fast}"
        yield Finding(NAME.model.yarn_beta_fast, message, f"=32.0 {NAME.model.yarn_beta_slow}=1.0")
    if 1 <= model.rotary_base < 2:  # rule K30 reports values below 1
        message = f"must be at least 2 for yarn, got {model.rotary_base}"
        yield Finding(NAME.model.rotary_base, message, default_of(NAME.model.rotary_base))
    for field in (NAME.model.rope_scaling, NAME.model.seq_len_interpolation_factor):
        if c.config.value_at(field):
            yield Finding(field, "yarn already scales the positions", default_of(field))
    if model.rotary_base_local is not None:
        message = "not supported with yarn: all layers share yarn's frequencies and concentration"
        yield Finding(NAME.model.rotary_base_local, message, default_of(NAME.model.rotary_base_local))
    length = c.config.dataset.seq_length
    if factor is not None and original is not None and factor * original < length:
        message = f"{factor} times the original {original} positions is less than the sequence length ({length})"
        times = math.ceil(length / max(1, original))
        fix = f"={times}.0 {NAME.model.max_position_embeddings}={times * max(1, original)}"
        yield Finding(NAME.model.yarn_rotary_scaling_factor, message, fix, severity="warning")


@rule(
    "K24",
    "Tensor parallelism divides the compressed vectors of latent attention.",
    "megatron-core's own layers split the down projections over ranks; Transformer Engine's layers do not.",
    broken(model=dict(multi_latent_attention=True, kv_lora_rank=31, tensor_model_parallel_size=2), world_size=8),
)
def compressed_vectors_are_divided(c: Context) -> Iterator[Finding]:
    model = c.model
    if not model.multi_latent_attention or c.te_layers:
        return
    if model.q_lora_rank and model.q_lora_rank % c.tp:
        message = f"{NAME.model.tensor_model_parallel_size} ({c.tp}) does not divide {model.q_lora_rank}"
        yield Finding(NAME.model.q_lora_rank, message, values=nearest_multiples(model.q_lora_rank, c.tp))
    shared = model.qk_pos_emb_head_dim
    if (model.kv_lora_rank + shared) % c.tp:
        message = f"kv_lora_rank + qk_pos_emb_head_dim = {model.kv_lora_rank + shared} is not divisible by "
        message += f"{NAME.model.tensor_model_parallel_size} ({c.tp})"
        fitting = (model.kv_lora_rank + shared) // c.tp * c.tp - shared
        yield Finding(NAME.model.kv_lora_rank, message, f"={max(fitting, -shared % c.tp or c.tp)}")


@rule(
    "K37",
    "In packs, values of multi-latent attention are no wider than its queries.",
    "In packs megatron-core pads the values to the queries' width and cuts wider ones. The output then does not fit "
    "its projection. Without packs either may be wider.",
    broken(
        model=dict(
            multi_latent_attention=True,
            sequence_packing_scheduler="dp_balanced",
            qk_head_dim=16,
            qk_pos_emb_head_dim=8,
            v_head_dim=32,
        ),
        dataset=dict(kind="mock_documents"),
    ),
)
def latent_values_in_packs(c: Context) -> Iterator[Finding]:
    model = c.model
    width = model.qk_head_dim + model.qk_pos_emb_head_dim
    if model.multi_latent_attention and c.runs_packs and model.v_head_dim > width:
        yield Finding(
            NAME.model.v_head_dim,
            f"packs support at most {NAME.model.qk_head_dim} + {NAME.model.qk_pos_emb_head_dim} = {width}",
            f"={width}",
        )
