"""Reduce configurations for a comparison, and derive the single-rank one. Pure.

Settings that determine how work is split stay: heads (also Mamba heads), key/value heads, transports, per-layer lists,
pipeline stages, experts. Settings that only cost time shrink.
"""

from __future__ import annotations

import copy
import math
import sys
from collections.abc import Sequence
from dataclasses import asdict

from megatron_cp.common.errors import ConfigError, Violation
from megatron_cp.common.terminal import say
from megatron_cp.config.names import NAME
from megatron_cp.config.run_config import DatasetConfig, ModelConfig, RunConfig
from megatron_cp.config.single_rank import on_single_rank
from megatron_cp.dynamic_cp.distributions import LEAST_LONGEST
from megatron_cp.launch import launcher
from megatron_cp.rules import checked
from megatron_cp.verify.sizes import row_of_all_types, shrink, shrink_thresholds

VOCAB, TOKENS = 255, 32
# Packed samples have lognormal lengths, on average a sixteenth of the longest.
PACKED_TOKENS, PACKED_SAMPLES_PER_RANK = 256, 4
# Adam's first updates are signs of gradients. With the default 1e-8, gradients of pure rounding noise take full steps
# in either direction, and correct layouts drift apart by 1e-4 per step. This epsilon suppresses them.
ADAM_EPS = 1e-3
# Large enough that a step changes weights far more than float32 rounding.
LEARNING_RATE = 1e-2
# Weights at which router losses, bias updates and MTP losses are at least a tenth of the main terms.
AUX_LOSS, Z_LOSS, BIAS_RATE, MTP_LOSS = 1.0, 0.1, 0.1, 0.3


def comparable(layouts: Sequence[RunConfig], world_size: int, steps: int, *, full: bool = False) -> list[RunConfig]:
    """Equalize several layouts of one model, and reduce them.

    Uses mock data (variable lengths if packed) with an uneven loss mask, float32, no dropout, and large weights: RoPE
    errors hide below a standard deviation of 0.02. Every layout divides the global batch into at least two microbatches
    per rank. With ``full`` the model keeps its size. If the input passes the rules, so does the result.

    Raises:
        ConfigError: the layouts have different models, or a model that cannot be compared.
    """
    _check_same_model(layouts)
    configs = [copy.deepcopy(config) for config in layouts]
    vocab_size = configs[0].model.vocab_size or configs[0].tokenizer.vocab_size or VOCAB if full else VOCAB
    models = [config.model for config in configs]
    length, num_layers = _seq_length(models), _num_layers(models)
    if not full:
        for config in configs:
            config.train.micro_batch_size = min(2, config.train.micro_batch_size)
    batch = math.lcm(*(_global_batch(c.model, c.train.micro_batch_size, world_size) for c in configs))
    tp = math.lcm(*(model.tensor_model_parallel_size for model in models))
    for config in configs:
        model = config.model
        if not full:
            shrink(model, tp, num_layers)
            _raise_weights(model)
            shrink_thresholds(model, config.ddp, config.train.micro_batch_size, config.dataset.seq_length, length)
            config.dataset.seq_length = model.seq_length = length
            model.max_position_embeddings = model.yarn_length or length
        model.vocab_size = None
        # Padding takes part in the loss: all layouts must pad to the same number of rows.
        model.make_vocab_size_divisible_by = math.lcm(model.make_vocab_size_divisible_by, tp)
        model.init_method_std = 0.15 if not full else model.init_method_std
        model.hidden_dropout = model.attention_dropout = 0.0
        _leave_transformer_engine(model)
        if model.recompute_num_layers is not None:
            layers = max(1, model.num_layers // model.pipeline_model_parallel_size)
            model.recompute_num_layers = min(model.recompute_num_layers, layers)
        if model.sequence_packing_scheduler is not None and len(configs) > 1:
            model.moe_aux_loss_coeff = 0.0  # depends on which samples share a pack; layouts pack differently
        config.train.global_batch_size, config.train.train_iters, config.train.train_epochs = batch, steps, None
        config.train.skip_train = False
        config.optimizer.adam_eps = max(config.optimizer.adam_eps, ADAM_EPS)
        config.optimizer.lr, config.optimizer.min_lr = LEARNING_RATE, LEARNING_RATE / 10
        _mock(config.dataset)
        config.tokenizer = type(config.tokenizer)("NullTokenizer", vocab_size=vocab_size)
        config.mixed_precision = type(config.mixed_precision)(fp32=True)
        scheduler = config.scheduler
        scheduler.lr_decay_iters, scheduler.lr_warmup_iters, scheduler.lr_warmup_fraction = steps, 0, None
        scheduler.lr_wsd_decay_iters = None if scheduler.lr_wsd_decay_iters is None else 1
        config.validation = type(config.validation)()
        config.dist.eval_context_parallel_size = None
        # The comparison runs the probe itself, so that a failed probe does not end the run.
        config.dist.attention_probe = False
        config.finalize()
    return configs


def checked_and_comparable(
    layouts: Sequence[RunConfig], world_size: int, steps: int, *, full: bool = False
) -> list[RunConfig]:
    """Return the :func:`comparable` configurations, checked before and after."""
    layouts = [checked(config, world_size) for config in layouts]
    configs = [checked(config, world_size) for config in comparable(layouts, world_size, steps, full=full)]
    if launcher.rank() == 0 and layouts[-1].model.moe_aux_loss_coeff and not configs[-1].model.moe_aux_loss_coeff:
        say(
            f"note: compared without the router auxiliary loss ({NAME.model.moe_aux_loss_coeff}=0): it depends on "
            "which samples share a pack, and the two layouts pack differently",
            file=sys.stderr,
        )
    return configs


def _raise_weights(model: ModelConfig) -> None:
    """Raise weights of added losses, so that errors in them show."""
    if model.moe_aux_loss_coeff > 0:
        model.moe_aux_loss_coeff = max(model.moe_aux_loss_coeff, AUX_LOSS)
    if model.moe_z_loss_coeff:
        model.moe_z_loss_coeff = max(model.moe_z_loss_coeff, Z_LOSS)
    if model.moe_router_enable_expert_bias:
        model.moe_router_bias_update_rate = max(model.moe_router_bias_update_rate, BIAS_RATE)
    if model.mtp_num_layers:
        model.mtp_loss_scaling_factor = max(model.mtp_loss_scaling_factor, MTP_LOSS)


def _check_same_model(layouts: Sequence[RunConfig]) -> None:
    if len({config.model.sequence_packing_scheduler is None for config in layouts}) > 1:
        message = "one layout packs samples and the other does not; they cannot be compared"
        raise ConfigError([Violation("", "error", NAME.model.sequence_packing_scheduler, message)])
    first, *others = (asdict(on_single_rank(config).model) for config in layouts)
    different = sorted({name for other in others for name in first if first[name] != other[name]})
    if different:
        raise ConfigError(
            [
                Violation("", "error", f"model.{name}", "differs between the two layouts, which must train one model")
                for name in different
            ]
        )


def _leave_transformer_engine(model: ModelConfig) -> None:
    """Turn off features of Transformer Engine or half precision.

    The comparison runs in float32 without Transformer Engine's layers.
    """
    model.attention_backend = model.transformer_impl = "auto"
    model.moe_grouped_gemm = model.gradient_accumulation_fusion = None
    if model.cross_entropy_fusion_impl != "te":  # megatron-core's rounds to bf16; Transformer Engine's does not
        model.cross_entropy_loss_fusion = model.cross_entropy_fusion_impl = None
    if model.recompute_granularity == "selective" and "layernorm" in (model.recompute_modules or []):
        model.recompute_modules = [name for name in model.recompute_modules or [] if name != "layernorm"]
        if not model.recompute_modules:
            model.recompute_granularity = None


def _mock(data: DatasetConfig) -> None:
    """Use random tokens, with lengths that fit the sequence."""
    if data.kind != "mock_documents" or data.seq_length < LEAST_LONGEST.get(data.mock_lengths, 1):
        data.mock_lengths = DatasetConfig().mock_lengths
    data.kind, data.mock_masked_fraction, data.num_workers = None, 0.4, 0
    data.data_path = data.valid_data_path = data.test_data_path = None
    data.eod_mask_loss = False


def _stages(model: ModelConfig) -> int:
    return model.pipeline_model_parallel_size * (model.virtual_pipeline_model_parallel_size or 1)


def _is_uneven(m: ModelConfig) -> bool:
    return m.num_layers_in_first_pipeline_stage is not None or m.num_layers_in_last_pipeline_stage is not None


def _num_layers(models: Sequence[ModelConfig]) -> int:
    """Return the fewest layers that all layouts divide, at least two.

    All layers if a setting names layers or layer counts, except leading layers without experts.
    """
    model = models[0]
    per_layer = isinstance(model.window_attn_skip_freq, list) or any("|" in _pattern(each) for each in models)
    if per_layer or any(isinstance(each.cp_comm_type, list) or _is_uneven(each) for each in models):
        return model.num_layers
    if isinstance(experts := model.moe_layer_freq, list):
        # Experts in all but some leading layers, on one stage: one layer of each kind is enough.
        only_leading_are_dense = 0 < sum(experts) < len(experts) and sorted(experts) == experts
        if not only_leading_are_dense or any(_stages(each) > 1 for each in models):
            return model.num_layers
    least = max(2, (model.window_attn_skip_freq or 0) if not isinstance(model.window_attn_skip_freq, list) else 0)

    def fits(layers: int, m: ModelConfig) -> bool:
        counted = layers + m.account_for_embedding_in_pipeline_split + m.account_for_loss_in_pipeline_split
        return counted % _stages(m) == 0 and counted >= _stages(m)

    for layers in range(min(least, model.num_layers), model.num_layers):
        if all(fits(layers, each) for each in models) and row_of_all_types(_pattern(model), layers) is not None:
            return layers
    return model.num_layers


def _pattern(model: ModelConfig) -> str:
    return model.hybrid_layer_pattern or ""


def _seq_length(models: Sequence[ModelConfig]) -> int:
    """Return a sequence length that all layouts can split.

    At least eight tokens per rank, or per tensor-parallel rank if the loss or the MLP is chunked.
    """
    parts, least = [1], TOKENS
    for m in models:
        parts.append(2 * m.context_parallel_size)
        if m.sequence_parallel:
            parts.append(m.context_parallel_size * m.tensor_model_parallel_size)
        if m.sequence_packing_scheduler is not None:
            least = max(least, PACKED_TOKENS)
        elif m.sequence_parallel and (m.cross_entropy_chunk_size or m.mlp_chunk_size):
            least = max(least, 8 * m.context_parallel_size * m.tensor_model_parallel_size)
        least = max(least, 8 * m.context_parallel_size)
    multiple = math.lcm(*parts)
    return -(-least // multiple) * multiple


def _global_batch(m: ModelConfig, micro_batch_size: int, world_size: int) -> int:
    """Return two microbatches per rank, or two pipeline rounds; more if packed."""
    if m.sequence_packing_scheduler is not None:
        return PACKED_SAMPLES_PER_RANK * max(1, m.data_parallel_size(world_size)) * m.context_parallel_size
    count = 2 * m.pipeline_model_parallel_size if m.pipeline_model_parallel_size > 1 else 2
    if m.virtual_pipeline_model_parallel_size:
        count = 2 * max(m.pipeline_model_parallel_size, m.microbatch_group_size_per_vp_stage or 0)
    return micro_batch_size * max(1, m.data_parallel_size(world_size)) * count
