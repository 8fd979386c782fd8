"""K. Settings that must fit each other and the machine, beyond what the reference sections cover."""

from __future__ import annotations

import math
from collections.abc import Iterator

from megatron_cp.config import RunConfig
from megatron_cp.models.hybrid_pattern import LETTERS, layers_of, with_stages
from megatron_cp.rules.rule import Context, Finding, broken, divisors, listed, nearest_multiples, rule, value_at

_ANY, _SEEDS = (0, math.inf), (0, 2**31 - 1)
# Setting -> the least and the most that it may be. Sizes are rule A1's, fractions K16's, times and scales K51's.
_RANGES: dict[str, tuple[float, float]] = {
    "rng.seed": _SEEDS,
    "dataset.random_seed": _SEEDS,
    "dataset.num_workers": _ANY,
    "dataset.mock_num_samples": (1, math.inf),
    "validation.eval_iters": _ANY,
    "validation.eval_global_batch_size": (1, math.inf),
    "validation.eval_micro_batch_size": (1, math.inf),
    "optimizer.clip_grad": _ANY,
    "optimizer.adam_eps": (1e-30, math.inf),  # a gradient of 0 divided by 0 is no number
    "model.init_method_std": _ANY,
    "model.layernorm_epsilon": _ANY,
    "model.rotary_base": (1, math.inf),
    "model.mtp_loss_scaling_factor": _ANY,
    "model.moe_aux_loss_coeff": _ANY,
    "model.dynamic_context_parallel_calibration_iters": _ANY,
    "train.manual_gc_interval": _ANY,
}
# megatron-core's latent attention makes its own projections, scale and rotary embedding, without asking for these.
_NOT_READ_BY_LATENT_ATTENTION = (
    "softmax_scale", "rope_scaling", "rope_scaling_factor", "seq_len_interpolation_factor", "add_qkv_bias",
    "position_embedding_type",
)  # fmt: skip


@rule(
    "K5",
    "At most one precision is chosen.",
    "None of them means bf16 on GPUs and fp32 on CPUs.",
    broken("mixed_precision.fp32=true", "mixed_precision.bf16=true"),
)
def one_precision(c: Context) -> Iterator[Finding]:
    precision = c.config.mixed_precision
    chosen = [name for name in ("fp32", "bf16", "fp16") if getattr(precision, name)]
    if len(chosen) > 1:
        fixes = " or ".join(f"mixed_precision={name}" for name in chosen)
        yield Finding("mixed_precision", f"Only one of {', '.join(chosen)} should be True", fixes)


@rule(
    "K6",
    "The communication backend fits the device.",
    "NCCL moves GPU memory only.",
    broken("dist.distributed_backend=nccl"),
)
def backend_fits_device(c: Context) -> Iterator[Finding]:
    if c.config.dist.distributed_backend == "nccl" and c.environment.device == "cpu":
        yield Finding(
            "dist.distributed_backend", "nccl needs GPUs, and there are none", "dist.distributed_backend=null"
        )


@rule(
    "K7",
    "Activation recomputation is fully described.",
    "megatron-core needs a method and a number of layers for 'full', and neither number for 'selective'. With none of "
    "the two it ignores them, silently, and keeps all activations.",
    broken("model.recompute_granularity=full"),
)
def recomputation(c: Context) -> Iterator[Finding]:
    model = c.config.model
    kind, layers = model.recompute_granularity, model.num_layers // c.pp
    if kind == "full" and model.recompute_method is None:
        yield Finding(
            "model.recompute_method",
            'Using recompute_granularity: full so recompute_method must be "block" or "uniform"',
            "model.recompute_method=uniform model.recompute_num_layers=1",
        )
    elif kind == "full" and not 1 <= (model.recompute_num_layers or 0) <= max(1, layers):
        yield Finding(
            "model.recompute_num_layers",
            "When using recompute_granularity: full recompute_num_layers must be between 1 and "
            f"num_layers_per_pipeline_rank: {layers}",
            "model.recompute_num_layers=1",
        )
    if kind == "selective" and model.recompute_num_layers is not None:
        yield Finding(
            "model.recompute_num_layers",
            "When using recompute_granularity: selective recompute_num_layers must be None.",
            "model.recompute_num_layers=null",
        )
    if kind is not None and model.distribute_saved_activations and (model.sequence_parallel or c.tp == 1):
        yield Finding(
            "model.distribute_saved_activations",
            "distribute_saved_activations must be false when sequence parallel is enabled, and needs tp > 1",
            "model.distribute_saved_activations=false",
        )
    named = ("recompute_method", "recompute_num_layers", "recompute_modules", "distribute_saved_activations")
    for field in [f"model.{name}" for name in named if getattr(model, name)] if kind is None else []:
        message = "has no effect: model.recompute_granularity is null, and nothing is recomputed"
        yield Finding(field, message, f"{_default(field)}, or a model.recompute_granularity", "warning")
    allowed = {"core_attn": True, "mlp": True, "layernorm": c.backend == "te"}
    allowed |= {"moe": bool(model.num_moe_experts), "mla_up_proj": model.multi_latent_attention}
    for name in (model.recompute_modules or []) if kind == "selective" else []:
        if not allowed.get(name, False):
            yield Finding(
                "model.recompute_modules",
                f"Invalid choices for recompute_modules: {name} (layernorm needs Transformer Engine)",
                f"among {', '.join(n for n, ok in allowed.items() if ok)}",
            )


@rule(
    "K8",
    "attention_backend=te finds Transformer Engine and a GPU.",
    "Asking for it by name must not end in something else; auto takes what is there.",
    broken("model.attention_backend=te"),
)
def transformer_engine_is_there(c: Context) -> Iterator[Finding]:
    if c.config.model.attention_backend == "te" and c.backend != "te":
        missing = "there is no GPU" if c.environment.device == "cpu" else "Transformer Engine is not installed"
        yield Finding(
            "model.attention_backend", f"asks for Transformer Engine, but {missing}", "model.attention_backend=auto"
        )


@rule(
    "K9",
    "The distributed optimizer is Adam's.",
    "megatron-core's distributed optimizer cannot save another one's state.",
    broken("optimizer.optimizer=sgd"),
)
def distributed_adam(c: Context) -> Iterator[Finding]:
    optimizer = c.config.optimizer
    if optimizer.use_distributed_optimizer and optimizer.optimizer != "adam":
        yield Finding(
            "optimizer.use_distributed_optimizer",
            f"Only Adam is supported by the distributed optimizer, got {optimizer.optimizer}",
            "optimizer.use_distributed_optimizer=false",
        )


@rule(
    "K10",
    "Overlapped parameter gathering needs the distributed optimizer.",
    "Without it there are no shards to gather, and megatron-core fails in the first step.",
    broken("ddp.overlap_param_gather=true", "optimizer.use_distributed_optimizer=false"),
)
def overlap_is_possible(c: Context) -> Iterator[Finding]:
    if c.config.ddp.overlap_param_gather and not c.config.optimizer.use_distributed_optimizer:
        yield Finding(
            "ddp.overlap_param_gather",
            "needs optimizer.use_distributed_optimizer=true",
            "ddp.overlap_param_gather=false",
        )


@rule(
    "K11",
    "The data and the tokenizer are named.",
    "Found out here, not after the model is built.",
    broken("dataset.kind=indexed"),
)
def data_is_named(c: Context) -> Iterator[Finding]:
    data, tokenizer = c.config.dataset, c.config.tokenizer
    if data.kind == "indexed" and not data.data_path:
        yield Finding(
            "dataset.data_path",
            "dataset.kind=indexed needs the prefix of a .bin and .idx file",
            "dataset.data_path=PREFIX (scripts/data/preprocess_data.py writes one), or dataset.kind=mock",
        )
    if data.kind in ("documents", "jsonl") and not data.data_path:
        what = "a .jsonl file" if data.kind == "jsonl" else "the prefix of a .bin and .idx file"
        yield Finding(
            "dataset.data_path",
            f"dataset.kind={data.kind} needs {what}",
            "dataset.data_path=PATH, or dataset.kind=mock_documents",
        )
    if tokenizer.tokenizer_type == "HuggingFaceTokenizer" and not tokenizer.tokenizer_model:
        yield Finding(
            "tokenizer.tokenizer_model",
            "HuggingFaceTokenizer needs a folder or a tokenizer.json",
            "tokenizer.tokenizer_model=PATH, or tokenizer.tokenizer_type=ByteLevelTokenizer",
        )
    if tokenizer.tokenizer_type == "NullTokenizer" and not tokenizer.vocab_size:
        yield Finding("tokenizer.vocab_size", "NullTokenizer needs a vocabulary size", "tokenizer.vocab_size=128256")
    if tokenizer.vocab_size and c.config.model.vocab_size and tokenizer.vocab_size > c.config.model.vocab_size:
        yield Finding(
            "model.vocab_size",
            f"the tokenizer's {tokenizer.vocab_size} tokens do not fit a vocabulary of {c.config.model.vocab_size}",
            f"model.vocab_size={tokenizer.vocab_size}",
        )


@rule(
    "K12",
    "A sliding window is two lengths.",
    "megatron-core passes (left, right) on as they are and fails late; a causal window has nothing to the right. The "
    "layers of multi-token prediction have the windows of the first layers: their numbers begin at 1 again.",
    broken("model.window_size=[64]"),
)
def window_is_two_lengths(c: Context) -> Iterator[Finding]:
    model = c.config.model
    window, every = model.window_size, model.window_attn_skip_freq
    if window is not None and (len(window) != 2 or min(window) < -1):
        yield Finding("model.window_size", f"must be [left, right], -1 for no limit, got {window}", "[1024, 0]")
    elif window is not None and model.attention_mask_type == "causal" and window[1] > 0:
        message = f"causal attention sees nothing ahead; the right part of {window} has no effect"
        yield Finding("model.window_size", message, f"[{window[0]}, 0]", severity="warning")
    ahead = model.mtp_num_layers or 0  # megatron-core numbers these from 1 again, and looks them up in the same list
    if isinstance(every, list) and len(every) != model.num_layers:
        yield Finding(
            "model.window_attn_skip_freq", f"has {len(every)} entries for {model.num_layers} layers", "one a layer"
        )
    elif isinstance(every, list) and window is not None and len(every) < ahead:
        yield Finding(
            "model.window_attn_skip_freq",
            f"has {len(every)} entries for {ahead} layers of multi-token prediction, which take them from the first on",
            f"model.mtp_num_layers={len(every)}, or a number instead of the list",
        )
    elif isinstance(every, int) and every < 1:
        yield Finding(
            "model.window_attn_skip_freq",
            f"leaves every n-th layer without a window, n at least 1, got {every}",
            "model.window_attn_skip_freq=null for a window in all layers",
        )
    elif isinstance(every, list) and not set(every) <= {0, 1}:
        message = f"says 1 for a layer with a window and 0 for one without, got {every}"
        fix = f"model.window_attn_skip_freq=[{','.join(str(int(bool(each))) for each in every)}]"
        yield Finding("model.window_attn_skip_freq", message, fix)
    elif every is not None and window is None:
        message = "has no effect: model.window_size is null, and no layer has a window"
        yield Finding("model.window_attn_skip_freq", message, "null, or a model.window_size", severity="warning")


@rule(
    "K13",
    "fp16 looks for one loss scale by overflowing.",
    "Those steps are skipped by themselves; ddp.check_for_nan_in_grad would end the run at the first of them. Experts "
    "that are spread over other ranks have an optimizer and a scale of their own in megatron-core, which drifts from "
    "the one that the loss was scaled by: their gradients are silently a power of two off.",
    broken("mixed_precision=fp16_mixed"),
)
def fp16_overflows(c: Context) -> Iterator[Finding]:
    if c.config.mixed_precision.fp16 and c.config.model.num_moe_experts and (c.ep > 1 or c.etp != c.tp):
        yield Finding(
            "mixed_precision.fp16",
            "experts that are spread over other ranks than the rest would have a loss scale of their own",
            "mixed_precision=bf16_mixed, which needs no scale, or model.expert_model_parallel_size=1 and "
            "model.expert_tensor_parallel_size=null",
        )
    if c.config.mixed_precision.fp16 and c.config.ddp.check_for_nan_in_grad:
        yield Finding(
            "ddp.check_for_nan_in_grad",
            "fp16 overflows until its loss scale fits, and the run would end with: gradients are not finite",
            "ddp.check_for_nan_in_grad=false, or mixed_precision=bf16_mixed, which needs no scale",
        )


@rule(
    "K14",
    "A hybrid model has a layer pattern with one letter a layer.",
    "M is Mamba, * attention, - an MLP; the pattern is the model. | may part the pipeline stages, all of them.",
    broken("model.architecture=hybrid"),
)
def hybrid_pattern(c: Context) -> Iterator[Finding]:
    model, field = c.config.model, "model.hybrid_layer_pattern"
    pattern, layers = model.hybrid_layer_pattern, layers_of(model.hybrid_layer_pattern)
    if model.architecture != "hybrid":
        if pattern is not None:
            yield Finding(field, "is set, but model.architecture is gpt", "model.architecture=hybrid")
    elif not layers or set(layers) - set(LETTERS):
        yield Finding(field, "must be letters among M, * and -", "model.hybrid_layer_pattern=M*-M*-")
    elif len(layers) != model.num_layers:
        message = f"has {len(layers)} letters for {model.num_layers} layers"
        yield Finding(field, message, f"model.num_layers={len(layers)}")
    elif "|" in (pattern or ""):
        stages = c.pp * max(1, model.virtual_pipeline_model_parallel_size or 1)
        try:
            with_stages(pattern or "", stages)
        except ValueError as error:
            yield Finding(field, str(error), f"{stages - 1} times | between layers, or none")


@rule(
    "K16",
    "Probabilities and fractions are between 0 and 1.",
    "A dropout of 10 is a typing error, not a setting. Adam divides by one minus a power of its betas.",
    broken("model.hidden_dropout=10"),
)
def fractions(c: Context) -> Iterator[Finding]:
    values = {
        "model.hidden_dropout": c.config.model.hidden_dropout,
        "model.attention_dropout": c.config.model.attention_dropout,
        "dataset.mock_masked_fraction": c.config.dataset.mock_masked_fraction,
        "optimizer.adam_beta1": c.config.optimizer.adam_beta1,
        "optimizer.adam_beta2": c.config.optimizer.adam_beta2,
        "optimizer.sgd_momentum": c.config.optimizer.sgd_momentum,
    }
    for field, value in values.items():
        if not 0 <= value < 1:
            yield Finding(field, f"must be at least 0 and less than 1, got {value}", _default(field))
    share, field = c.config.model.rotary_percent, "model.rotary_percent"
    if not 0 < share <= 1:
        yield Finding(field, f"must be above 0 and at most 1, got {share}", _default(field))


@rule(
    "K17",
    "The head dim is even where rotary embeddings pair its dimensions.",
    "Rotary embeddings turn pairs of dimensions. Multi-latent attention turns qk_pos_emb_head_dim of them, whatever "
    "the position embeddings, and pairs them in its own way.",
    broken("model.kv_channels=15"),
)
def head_dim_is_even(c: Context) -> Iterator[Finding]:
    model = c.config.model
    latent = model.multi_latent_attention
    field = "model.qk_pos_emb_head_dim" if latent else "model.kv_channels"
    size = value_at(c.config, field) or 0
    rotated = math.floor(size * model.rotary_percent)
    if (latent or model.position_embedding_type == "rope") and rotated % 2:
        yield Finding(
            field,
            f"rotary embeddings turn {rotated} dimensions of a head, an odd number",
            f"{field}={math.ceil((rotated + 1) / model.rotary_percent)}",
        )
    if latent and model.rotary_interleaved:
        yield Finding(
            "model.rotary_interleaved",
            "rotary_interleaved does not work with multi_latent_attention.",
            "model.rotary_interleaved=false",
        )


@rule(
    "K18",
    "The key/value heads divide the attention heads.",
    "Each key/value head serves the same number of query heads.",
    broken("model.num_query_groups=3"),
)
def kv_heads_divide_heads(c: Context) -> Iterator[Finding]:
    heads, groups = c.config.model.num_attention_heads, c.config.model.num_query_groups
    if groups and groups > 0 and heads > 0 and heads % groups:
        yield Finding(
            "model.num_query_groups",
            f"{groups} key/value heads do not divide {heads} attention heads",
            f"one of {listed(divisors(heads))}",
        )


@rule(
    "K19",
    "Every setting given is built.",
    "A setting that is accepted and then ignored gives another model than the configuration says.",
    broken("model.architecture=hybrid", "model.hybrid_layer_pattern=M*M*", "model.mtp_num_layers=1"),
)
def everything_is_built(c: Context) -> Iterator[Finding]:
    model = c.config.model
    not_built_in_hybrids = {
        "model.mtp_num_layers": bool(model.mtp_num_layers),
        "model.num_moe_experts": model.num_moe_experts is not None,
        "model.multi_latent_attention": model.multi_latent_attention,
        "model.rope_scaling": model.rope_scaling,
    }
    for field, asked in not_built_in_hybrids.items():
        if asked and model.architecture == "hybrid":
            yield Finding(field, "is not built into hybrid models by this version", "model.architecture=gpt")
    for name in ("account_for_embedding_in_pipeline_split", "account_for_loss_in_pipeline_split"):
        if getattr(model, name) and model.architecture == "hybrid":
            message = "does not move the layers of a hybrid model, which its pattern gives to the stages"
            yield Finding(f"model.{name}", message, f"model.{name}=false, and | between the stages of the pattern")
    for name in _NOT_READ_BY_LATENT_ATTENTION if model.multi_latent_attention else []:
        field = f"model.{name}"
        if getattr(model, name) != value_at(RunConfig(), field):
            yield Finding(field, "does not reach multi-latent attention, which goes on without it", _default(field))


@rule(
    "K28",
    "Nothing is offloaded to host memory.",
    "Without a GPU there is no other memory, and offloading activations is Transformer Engine's. Of megatron-core's "
    "hybrid optimizer no variant was found that could be trusted, not even with parameters that pretended to be on a "
    "GPU: with distributed optimizer state it cannot be built in fp32, in bf16 it cannot be resumed, and with the "
    "precision-aware optimizer it trains to other losses.",
    broken("optimizer.optimizer_cpu_offload=true"),
)
def nothing_is_offloaded(c: Context) -> Iterator[Finding]:
    asked = {
        "model.cpu_offloading": c.config.model.cpu_offloading,
        "optimizer.optimizer_cpu_offload": c.config.optimizer.optimizer_cpu_offload,
    }
    for field, value in asked.items():
        if value:
            yield Finding(
                field,
                "offloading to host memory is not supported",
                f"{field}=false, and to save memory model.recompute_granularity=full, the distributed optimizer, "
                "model.cross_entropy_chunk_size, or a larger model.context_parallel_size",
            )


@rule(
    "K23",
    "Multi-latent attention with qk_layernorm compresses its queries.",
    "The normalization is that of the compressed queries; without q_lora_rank megatron-core's own layers refuse it.",
    broken("model.multi_latent_attention=true", "model.qk_layernorm=true"),
)
def latent_queries_are_normalized(c: Context) -> Iterator[Finding]:
    model = c.config.model
    if model.multi_latent_attention and model.qk_layernorm and model.q_lora_rank is None and c.backend == "native":
        yield Finding(
            "model.q_lora_rank",
            "q_layernorm is non-trivial, but q_lora_rank is None, meaning it will not be used",
            "model.q_lora_rank=RANK, or model.qk_layernorm=false",
        )


@rule(
    "K24",
    "Multi-latent attention under tensor parallelism needs Transformer Engine's layers.",
    "megatron-core's own layers split the compressed keys' projection over the ranks and gather its output without "
    "summing the gradients of the shared rotary key over the ranks' heads: training runs, and its weights are wrong. "
    "Transformer Engine's layers keep that projection whole.",
    broken(
        "model.multi_latent_attention=true", "model.q_lora_rank=32", "model.tensor_model_parallel_size=2", world_size=8
    ),
)
def latent_keys_under_tensor_parallelism(c: Context) -> Iterator[Finding]:
    if c.config.model.multi_latent_attention and c.tp > 1 and c.backend == "native":
        yield Finding(
            "model.tensor_model_parallel_size",
            "multi-latent attention in megatron-core's own layers has wrong gradients under tensor parallelism",
            "model.tensor_model_parallel_size=1, with a larger model.context_parallel_size instead",
        )


@rule(
    "K30",
    "Seeds, counts and factors are in the range that has a meaning.",
    "A negative number of batches evaluates none and reports a loss of 0; a negative seed ends in numpy, and what is "
    "made of a large one no longer fits torch's 64 bits.",
    broken("dataset.random_seed=-1"),
)
def numbers_are_in_range(c: Context) -> Iterator[Finding]:
    for field, (least, most) in _RANGES.items():
        value = value_at(c.config, field)
        if value is not None and not least <= value <= most:
            limit = f"at least {least}" if most == math.inf else f"from {least} to {most}"
            yield Finding(field, f"must be {limit}, got {value}", _default(field))


def _default(field: str) -> str:
    value = value_at(RunConfig(), field)
    text = "null" if value is None else str(value).lower() if isinstance(value, bool) else value
    return f"{field}={text}"


@rule(
    "K31",
    "Tensor parallelism divides the feed-forward layers.",
    "Each rank holds as many columns of the first matrix, gated or not, as rows of the second.",
    broken("model.ffn_hidden_size=97", "model.tensor_model_parallel_size=2", world_size=8),
)
def feed_forward_divides(c: Context) -> Iterator[Finding]:
    model = c.config.model
    if model.architecture == "hybrid" and "-" not in (model.hybrid_layer_pattern or ""):
        return  # Mamba and attention only
    field, width, parts, size = "model.ffn_hidden_size", model.ffn_hidden_size, "tensor_model_parallel_size", c.tp
    if model.num_moe_experts is not None:
        parts, size = "expert_tensor_parallel_size", c.etp
        if model.moe_ffn_hidden_size is not None:
            field, width = "model.moe_ffn_hidden_size", model.moe_ffn_hidden_size
    if width is not None and width % size:
        yield Finding(
            field, f"{width} is not divisible by {parts} ({size})", f"nearest valid: {nearest_multiples(width, size)}"
        )
