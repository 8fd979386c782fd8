"""A run's typed configuration.

Plain dataclasses with the section and field names that Megatron-Bridge's users know; ``model.*`` are megatron-core
``TransformerConfig``/``ModelParallelConfig`` names plus the model's own. This is the one place where defaults live.
Nothing here imports torch or megatron, so that composing and checking a configuration takes milliseconds.

Sizes are counts, times are in the unit their name says, ``None`` means "decided from the rest" (see
:meth:`RunConfig.finalize`).
"""

from __future__ import annotations

import math
from dataclasses import asdict, dataclass, field
from typing import Any, Literal

from megatron_cp.common.interpolation import as_written

# What is counted in iterations or in samples: NAME_iters and NAME_samples.
TRAINING_LENGTHS, SCHEDULE_LENGTHS = ("train",), ("lr_warmup", "lr_decay", "lr_wsd_decay")
CP_COMM_TYPES = ("p2p", "all_gather", "a2a", "a2a+p2p")


@dataclass
class ModelConfig:
    """Architecture, parallel layout and memory/precision choices of the model."""

    # What is built: "gpt" (GPT/Llama-like) or "hybrid" (Mamba-2, attention, MLPs and experts by hybrid_layer_pattern).
    architecture: Literal["gpt", "hybrid"] = "gpt"
    hybrid_layer_pattern: str | None = None

    # Shape.
    num_layers: int = 2
    hidden_size: int = 128
    ffn_hidden_size: int | None = None
    num_attention_heads: int = 4
    num_query_groups: int | None = None
    kv_channels: int | None = None
    seq_length: int | None = None  # from dataset.seq_length
    max_position_embeddings: int | None = None
    vocab_size: int | None = None  # from the tokenizer, or from the checkpointed model for a published one
    make_vocab_size_divisible_by: int = 128
    share_embeddings_and_output_weights: bool = False

    # Positions.
    position_embedding_type: Literal["rope", "yarn", "learned_absolute", "none"] = "rope"
    rotary_base: float = 10000.0
    rotary_percent: float = 1.0
    rotary_interleaved: bool = False
    rope_scaling: bool = False
    rope_scaling_factor: float = 8.0
    seq_len_interpolation_factor: float | None = None
    yarn_rotary_scaling_factor: float | None = None  # how many times longer than the original length; needed by yarn
    yarn_original_max_position_embeddings: int | None = None  # what the model was trained on before; needed by yarn
    yarn_beta_fast: float = 32.0  # turns within the original length from which on a dimension keeps its frequency
    yarn_beta_slow: float = 1.0  # ... and up to which it is slowed down by the whole factor
    yarn_mscale: float | None = None  # of the concentration factor, with the next; None: 0.1 ln(scaling factor) + 1
    yarn_mscale_all_dim: float | None = None
    yarn_correction_range_round_to_int: bool = True

    # Layers.
    normalization: Literal["RMSNorm", "LayerNorm"] = "RMSNorm"
    layernorm_epsilon: float = 1e-5
    activation_func: Literal["silu", "gelu", "fast_gelu", "relu", "squared_relu", "quick_gelu"] = "silu"
    gated_linear_unit: bool = True
    glu_linear_offset: float = 0.0  # added to what is gated
    activation_func_clamp_value: float | None = None  # most that enters quick_gelu, of gates and what is gated
    mlp_chunks_for_training: int = 1  # pieces of a sequence that an MLP computes one after the other
    add_bias_linear: bool = False
    add_qkv_bias: bool = False
    qk_layernorm: bool = False
    qk_l2_norm: bool = False  # Llama 4's: queries and keys divided by their root mean square
    attention_output_gate: bool = False  # attention's output times the sigmoid of one more projection
    no_rope_freq: int | list[int] | None = None  # layers without rotary embedding: every n-th, or a list of 0/1
    hidden_dropout: float = 0.0
    attention_dropout: float = 0.0
    init_method_std: float = 0.02
    embedding_init_method_std: float | None = None  # None: init_method_std
    use_mup: bool = False  # maximal update parametrization: rates and scales by width, relative to a base model
    mup_base_hidden_size: int | None = None
    mup_embedding_mult: float = 1.0
    mup_output_mult: float = 1.0
    mup_base_head_dim: float | None = None
    mup_attn_scale_power: float = 1.0
    use_cpu_initialization: bool = False  # slower; the same weights under every layout. Without a GPU always so
    attention_mask_type: Literal["causal", "no_mask"] = "causal"  # no_mask: bidirectional
    softmax_scale: float | None = None
    softmax_type: Literal["vanilla", "off-by-one", "learnable"] = "vanilla"
    window_size: list[int] | None = None  # [left, right]
    window_attn_skip_freq: int | list[int] | None = None  # every n-th layer, or a list of 0/1, one a layer
    attention_backend: Literal["auto", "te", "native"] = "auto"
    transformer_impl: Literal["auto", "transformer_engine", "local"] = "auto"  # the layers around attention
    multi_latent_attention: bool = False
    q_lora_rank: int | None = None
    kv_lora_rank: int = 32
    qk_head_dim: int = 128
    qk_pos_emb_head_dim: int = 64
    v_head_dim: int = 128

    # Mamba.
    mamba_state_dim: int = 128
    mamba_head_dim: int = 64
    mamba_num_groups: int = 8
    mamba_num_heads: int | None = None

    # Multi-token prediction.
    mtp_num_layers: int | None = None
    mtp_loss_scaling_factor: float = 0.1
    mtp_use_repeated_layer: bool = False  # one for all depths
    mtp_detach_heads: bool = False  # the losses of further tokens train their own layers alone

    # Mixture of experts.
    num_moe_experts: int | None = None
    # GPT: one layer of n has experts, from the first on, or a list of 0/1, one a layer. Hybrids: the pattern's E.
    moe_layer_freq: int | list[int] = 1
    moe_router_topk: int = 2
    moe_router_num_groups: int | None = None  # of experts; a token's lie in moe_router_group_topk of them
    moe_router_group_topk: int | None = None
    moe_router_score_function: Literal["softmax", "sigmoid", "sqrtsoftplus"] = "softmax"
    moe_router_pre_softmax: bool = False  # over all experts, before the choice; topk 1 has no other softmax
    moe_router_topk_scaling_factor: float | None = None
    moe_router_enable_expert_bias: bool = False  # balances without a loss, in what is chosen only
    moe_router_bias_update_rate: float = 1e-3
    moe_router_dtype: Literal["fp32", "fp64"] | None = None  # of scores and weighted sums; None: the model's
    moe_apply_probs_on_input: bool = False  # a token is weighted before its expert, not after; with topk 1
    moe_ffn_hidden_size: int | None = None
    moe_latent_size: int | None = None  # dimensions that experts work in, where they are not the model's
    moe_shared_expert_intermediate_size: int | None = None  # of all shared experts together
    moe_shared_expert_gate: bool = False
    moe_aux_loss_coeff: float = 0.0
    moe_z_loss_coeff: float | None = None
    moe_router_load_balancing_type: Literal["aux_loss", "seq_aux_loss", "global_aux_loss", "sinkhorn", "none"] = (
        "aux_loss"
    )
    moe_token_dispatcher_type: Literal["alltoall", "allgather"] = "alltoall"
    moe_grouped_gemm: bool | None = None  # one product for a rank's experts; None: in Transformer Engine's layers

    # Parallel layout.
    tensor_model_parallel_size: int = 1
    pipeline_model_parallel_size: int = 1
    virtual_pipeline_model_parallel_size: int | None = None
    context_parallel_size: int = 1
    expert_model_parallel_size: int = 1
    expert_tensor_parallel_size: int | None = None
    sequence_parallel: bool = False
    account_for_embedding_in_pipeline_split: bool = False
    account_for_loss_in_pipeline_split: bool = False
    num_layers_in_first_pipeline_stage: int | None = None  # the stages between divide what is left
    num_layers_in_last_pipeline_stage: int | None = None
    microbatch_group_size_per_vp_stage: int | None = None
    overlap_p2p_comm: bool | None = None  # stages compute while messages pass; None: where there are virtual stages

    # Context parallelism.
    # p2p | all_gather | a2a | a2a+p2p | auto, or a list with one of them a layer
    cp_comm_type: str | list[str] = field(
        default="p2p", metadata={"expected": "cp_comm_type must be a str or list of str"}
    )
    hierarchical_context_parallel_sizes: list[int] | None = None  # [a2a, p2p]
    dynamic_context_parallel: bool = False
    min_dynamic_context_parallel_size: int = 1
    max_seqlen_per_dp_cp_rank: int | None = None  # tokens of a microbatch on a rank; None: seq_length / cp, rounded up
    sequence_packing_scheduler: Literal["default_dynamic_cp", "dp_balanced"] | None = None
    # The cost model is fitted to the times of so many iterations, then kept; 0: never, the model's shape decides.
    dynamic_context_parallel_calibration_iters: int = 10

    # Memory and exactness.
    recompute_granularity: Literal["full", "selective"] | None = None
    recompute_method: Literal["uniform", "block"] | None = None
    recompute_num_layers: int | None = None
    recompute_modules: list[str] | None = None
    distribute_saved_activations: bool = False
    cpu_offloading: bool = False  # of activations; refused, see rule K28
    # Fused kernels. None: Transformer Engine's, where the layers are its own and the kernel fits the model.
    apply_rope_fusion: bool | None = None
    gradient_accumulation_fusion: bool | None = None
    cross_entropy_loss_fusion: bool | None = None
    cross_entropy_fusion_impl: Literal["native", "te"] | None = None
    cross_entropy_chunk_size: int | None = None  # tokens whose logits exist at once on a rank; None: all of them
    calculate_per_token_loss: bool = True
    deterministic_mode: bool = False

    @property
    def kv_heads(self) -> int:
        """Key/value heads that attention meets: latent attention makes keys and values for every head."""
        groups = None if self.multi_latent_attention else self.num_query_groups
        return groups or self.num_attention_heads

    @property
    def yarn_length(self) -> int | None:
        """Positions under YaRN, scaling factor * original length, rounded; None without YaRN or without the two."""
        length = (self.yarn_rotary_scaling_factor or 0) * (self.yarn_original_max_position_embeddings or 0)
        return round(length) if self.position_embedding_type == "yarn" and 1 <= length < math.inf else None

    @property
    def layer_parts(self) -> tuple[str, ...]:
        """What each layer is made of: attention ``*``, an MLP ``-``, experts ``E``, Mamba ``M``."""
        if self.architecture == "hybrid":
            return tuple((self.hybrid_layer_pattern or "").split("/")[0].replace("|", ""))
        if self.num_moe_experts is None:
            return ("*-",) * self.num_layers
        every = self.moe_layer_freq
        if not isinstance(every, list):
            every = [index % max(1, every) == 0 for index in range(self.num_layers)]
        return tuple("*E" if experts else "*-" for experts in every)

    @property
    def parts(self) -> frozenset[str]:
        """The letters of all layers, without a list of layers, of which there may be absurdly many."""
        if self.architecture == "hybrid":
            return frozenset(self.hybrid_layer_pattern or "") - set("|/")
        if self.num_moe_experts is None:
            return frozenset("*-")
        every = self.moe_layer_freq
        chosen = set(map(bool, every)) if isinstance(every, list) else {True, every <= 1 or self.num_layers <= 1}
        return frozenset({"*"} | {"E" if experts else "-" for experts in chosen})

    @property
    def transports(self) -> tuple[str, ...]:
        """The entries of ``cp_comm_type``, each once, in the order of the layers."""
        return tuple(dict.fromkeys([self.cp_comm_type] if isinstance(self.cp_comm_type, str) else self.cp_comm_type))


@dataclass
class TrainConfig:
    train_iters: int = 100
    train_samples: int | None = None  # instead: whole global batches of them
    skip_train: bool = False  # measure the losses of held-out data, and change nothing
    global_batch_size: int = 8  # samples an optimizer step, over all ranks
    micro_batch_size: int = 1
    exit_interval: int | None = None
    exit_duration_in_mins: float | None = None
    exit_signal_handler: bool = True
    # A loss or gradient (ddp.check_for_nan_in_grad) that is nan or inf: end the run, or leave the step out and go on.
    on_nonfinite: Literal["stop", "skip"] = "stop"
    loss_spike_factor: float | None = 10.0  # report losses this many standard deviations above the usual; None: none
    manual_gc: bool = False
    manual_gc_interval: int = 0


@dataclass
class ValidationConfig:
    eval_interval: int | None = None
    eval_iters: int = 0
    eval_global_batch_size: int | None = None
    eval_micro_batch_size: int | None = None


@dataclass
class OptimizerConfig:
    optimizer: Literal["adam", "sgd", "muon", "lion"] = "adam"
    lr: float = 3e-4
    min_lr: float = 3e-5
    weight_decay: float = 0.1
    adam_beta1: float = 0.9
    adam_beta2: float = 0.95
    adam_eps: float = 1e-8
    sgd_momentum: float = 0.9
    decoupled_lr: float | None = None  # of embedding and output layer
    decoupled_min_lr: float | None = None
    apply_wd_to_qk_layernorm: bool = False
    muon_momentum: float = 0.95
    muon_split_qkv: bool = True
    muon_nesterov: bool = False
    muon_scale_mode: Literal["spectral", "unit_rms_norm", "shape_scaling"] = "spectral"
    muon_fp32_matmul_prec: Literal["highest", "high", "medium"] | None = None  # None: highest in fp32, else medium
    muon_coefficient_type: Literal["simple", "quintic", "polar_express", "cans", "aol", "deepseekv4"] = "quintic"
    muon_num_ns_steps: int = 5
    muon_tp_mode: Literal["blockwise", "duplicated", "distributed"] = "duplicated"
    muon_extra_scale_factor: float = 1.0
    muon_scalar_optimizer: Literal["adam", "lion"] = "adam"
    lion_beta1: float = 0.95
    lion_beta2: float = 0.98
    clip_grad: float = 1.0
    use_distributed_optimizer: bool = True
    optimizer_cpu_offload: bool = False  # refused, see rule K28


@dataclass
class SchedulerConfig:
    lr_decay_style: Literal["cosine", "linear", "constant", "inverse-square-root", "WSD"] = "cosine"
    lr_warmup_iters: int = 0
    lr_warmup_fraction: float | None = None
    lr_warmup_init: float = 0.0
    lr_decay_iters: int | None = None
    lr_wsd_decay_style: Literal["exponential", "linear", "cosine", "minus_sqrt"] = "exponential"
    lr_wsd_decay_iters: int | None = None
    # Instead of iterations, as train.train_samples: whole global batches.
    lr_warmup_samples: int = 0
    lr_decay_samples: int | None = None
    lr_wsd_decay_samples: int | None = None
    start_weight_decay: float | None = None
    end_weight_decay: float | None = None
    weight_decay_incr_style: Literal["constant", "linear", "cosine"] = "constant"
    override_opt_param_scheduler: bool = False
    use_checkpoint_opt_param_scheduler: bool = False


@dataclass
class DatasetConfig:
    # Fixed lengths: indexed (Megatron .bin/.idx) or mock. Of their own lengths, for packing: documents (.bin/.idx, a
    # sample each), jsonl (a sample a line) or mock_documents. None: by data_path and model.sequence_packing_scheduler.
    kind: Literal["indexed", "mock", "documents", "jsonl", "mock_documents"] | None = None
    seq_length: int = 256  # tokens a sample; the most, where samples have lengths of their own
    # Prefix or .jsonl file, or a list of them, or of weight, prefix, weight, prefix ...; weights are shares of tokens.
    data_path: str | list[str | int | float] | None = None
    # Files of their own for validation and test. With either, data_path is all for training, and split is not read.
    valid_data_path: str | list[str | int | float] | None = None
    test_data_path: str | list[str | int | float] | None = None
    split: str = "9999,8,2"
    path_to_cache: str | None = None
    random_seed: int = 1234  # from 0 to 2**31 - 1
    num_workers: int = 0
    eod_mask_loss: bool = False
    reset_position_ids: bool = False
    reset_attention_mask: bool = False
    # mock: random tokens; this share of the loss mask is zero, unevenly over the sequence.
    mock_masked_fraction: float = 0.0
    mock_num_samples: int = 10000
    # Samples of their own lengths.
    too_long: Literal["split", "refuse"] = "split"  # what becomes of documents longer than seq_length
    mock_lengths: str = "lognormal"  # mock_documents: a distribution of dynamic_cp/distributions.py, or a lengths file
    text_key: str | None = "text"  # jsonl: a line holds a text, or a prompt and a response; the loss is the response's
    prompt_key: str | None = "prompt"
    response_key: str | None = "response"

    @property
    def divides(self) -> bool:
        """Whether ``split`` divides the files of ``data_path``: no part has files of its own."""
        return self.valid_data_path is None and self.test_data_path is None


@dataclass
class TokenizerConfig:
    tokenizer_type: Literal["HuggingFaceTokenizer", "ByteLevelTokenizer", "NullTokenizer"] = "HuggingFaceTokenizer"
    tokenizer_model: str | None = None  # a folder or a tokenizer.json
    vocab_size: int | None = None  # NullTokenizer
    eod_id: int | None = None  # NullTokenizer: the token that ends a document; None: the last one
    # HuggingFaceTokenizer: documents begin with the BOS token; None: where the tokenizer's post-processor adds it.
    add_bos: bool | None = None


@dataclass
class DistributedConfig:
    use_decentralized_pg: bool = False
    # None: nccl on GPUs, gloo elsewhere. staged: gloo by way of host memory, for several ranks on one GPU; slow.
    distributed_backend: Literal["nccl", "gloo", "staged"] | None = None
    distributed_timeout_minutes: float = 10.0
    use_tp_pp_dp_mapping: bool = False
    attention_probe: bool = True
    dynamic_groups_at_start: bool = False  # of packed microbatches; otherwise each before its first use
    # Ranks that share a sample of the validation and test sets; None: as in training. Its samples are run as packs.
    eval_context_parallel_size: int | None = None


@dataclass
class DistributedDataParallelConfig:
    overlap_grad_reduce: bool = False
    overlap_param_gather: bool = False
    grad_reduce_in_fp32: bool = True
    average_in_collective: bool = False
    check_for_nan_in_grad: bool = True
    bucket_size: int | None = None
    num_buckets: int | None = None
    pad_buckets_for_high_nccl_busbw: bool = False
    reduce_scatter_with_fp32_accumulation: bool = False
    param_name_patterns_for_fp32_local_accumulation: list[str] = field(default_factory=list)


@dataclass
class CheckpointConfig:
    save: str | None = None  # default runs/<recipe>
    load: str | None = None  # default: the same folder as save
    save_interval: int | None = None  # None: at the end only
    save_optim: bool = True
    save_rng: bool = True
    load_optim: bool = True
    load_rng: bool = True
    finetune: bool = False
    pretrained_checkpoint: str | None = None
    exit_on_missing_checkpoint: bool = False
    ckpt_step: int | None = None
    most_recent_k: int = -1  # -1: all
    save_retain_interval: int | None = None
    async_save: bool = False
    fully_parallel_save: bool = True
    verify_checksums: bool = True  # of a checkpoint's files, before it is loaded


@dataclass
class LoggerConfig:
    log_interval: int = 1
    # TFLOP/s that the MFU is a fraction of; None: measured with matrix products when the run starts.
    peak_tflops_per_device: float | None = None
    tensorboard: bool = True
    tensorboard_dir: str | None = None
    wandb_project: str | None = None
    wandb_exp_name: str | None = None
    wandb_entity: str | None = None
    # A moving line (auto: on a terminal) and log lines, log lines alone, or neither.
    progress: Literal["auto", "rich", "plain", "none"] = "auto"


@dataclass
class RNGConfig:
    seed: int = 1234  # from 0 to 2**31 - 1
    data_parallel_random_init: bool = False


@dataclass
class ProfilingConfig:
    use_pytorch_profiler: bool = False  # a trace file a rank, in profile/ of the run folder
    use_nsys_profiler: bool = False  # for nsys profile --capture-range=cudaProfilerApi; with NVTX ranges
    nvtx_ranges: bool = False  # a step's phases as NVTX ranges, in all steps
    profile_step_start: int = 10  # iterations before the profile
    profile_step_end: int = 12  # the last profiled iteration
    profile_ranks: list[int] = field(default_factory=lambda: [0])
    pytorch_profiler_collect_shapes: bool = False
    pytorch_profiler_collect_callstack: bool = False


@dataclass
class MixedPrecisionConfig:
    """At most one of the three; none of them means bf16 on GPUs and fp32 on CPUs."""

    fp32: bool = False
    bf16: bool = False
    fp16: bool = False
    # What losses are multiplied with in fp16, so that small gradients are not 0. None: found while training.
    loss_scale: float | None = None
    initial_loss_scale: float = 2.0**32
    min_loss_scale: float = 1.0
    loss_scale_window: int = 1000  # steps without an overflow after which the scale doubles
    hysteresis: int = 2  # overflows until the scale halves


@dataclass
class RunConfig:
    """Everything that defines a run."""

    model: ModelConfig = field(default_factory=ModelConfig)
    train: TrainConfig = field(default_factory=TrainConfig)
    validation: ValidationConfig = field(default_factory=ValidationConfig)
    optimizer: OptimizerConfig = field(default_factory=OptimizerConfig)
    scheduler: SchedulerConfig = field(default_factory=SchedulerConfig)
    dataset: DatasetConfig = field(default_factory=DatasetConfig)
    tokenizer: TokenizerConfig = field(default_factory=TokenizerConfig)
    dist: DistributedConfig = field(default_factory=DistributedConfig)
    ddp: DistributedDataParallelConfig = field(default_factory=DistributedDataParallelConfig)
    checkpoint: CheckpointConfig = field(default_factory=CheckpointConfig)
    logger: LoggerConfig = field(default_factory=LoggerConfig)
    rng: RNGConfig = field(default_factory=RNGConfig)
    profiling: ProfilingConfig = field(default_factory=ProfilingConfig)
    mixed_precision: MixedPrecisionConfig = field(default_factory=MixedPrecisionConfig)
    env_vars: dict[str, str] = field(default_factory=dict)
    recipe: str = "unnamed"  # set by the recipe loader; names the default run folder
    recipe_world_size: int | None = None  # ranks that the recipe is for; a run may use any that its layout divides

    def finalize(self) -> RunConfig:
        """Fill every value that the others decide, in place; returns self. Idempotent; checks nothing."""
        given = asdict(self)
        model, data = self.model, self.dataset
        if model.seq_length is None:
            model.seq_length = data.seq_length
        if model.max_position_embeddings is None:
            model.max_position_embeddings = model.yarn_length or model.seq_length
        if model.num_query_groups is None:
            model.num_query_groups = model.num_attention_heads
        if model.ffn_hidden_size is None:
            model.ffn_hidden_size = 4 * model.hidden_size
        if model.kv_channels is None and isinstance(model.num_attention_heads, int) and model.num_attention_heads > 0:
            model.kv_channels = model.hidden_size // model.num_attention_heads
        if model.expert_tensor_parallel_size is None:
            model.expert_tensor_parallel_size = model.tensor_model_parallel_size
        if model.dynamic_context_parallel and model.sequence_packing_scheduler is None:
            model.sequence_packing_scheduler = "default_dynamic_cp"
        if model.sequence_packing_scheduler is not None and model.max_seqlen_per_dp_cp_rank is None:
            model.max_seqlen_per_dp_cp_rank = self._tokens_per_rank()
        if data.kind is None:
            data.kind = _kind_of_data(data.data_path, packed=model.sequence_packing_scheduler is not None)
        self._count_in_iterations()
        if self.scheduler.lr_decay_iters is None:
            self.scheduler.lr_decay_iters = self.train.train_iters
        if self.checkpoint.save is None:
            self.checkpoint.save = f"runs/{self.recipe}"
        if self.checkpoint.load is None:
            self.checkpoint.load = self.checkpoint.save
        self.__dict__.setdefault("_given", (given, asdict(self)))  # no field: no setting, and not compared
        return self

    def as_written(self) -> dict[str, Any]:
        """All settings as they may be written: what environment variables gave as the recipe refers to it."""
        return as_written(asdict(self))

    def given(self) -> dict[str, Any]:
        """The settings as plain values before :meth:`finalize` filled what the others decide.

        All of them where the configuration was changed since, or never finalized.
        """
        given, filled = self.__dict__.get("_given", (None, None))
        now = asdict(self)
        return given if given is not None and filled == now else now

    def _count_in_iterations(self) -> None:
        """Turn lengths in samples into iterations. What is given in both stays, and rule K56 refuses it."""
        batch = self.train.global_batch_size
        section: TrainConfig | SchedulerConfig
        for section, names in ((self.train, TRAINING_LENGTHS), (self.scheduler, SCHEDULE_LENGTHS)):
            defaults = type(section)()
            for name in names if batch >= 1 else ():
                iterations, samples = f"{name}_iters", f"{name}_samples"
                unset, given = getattr(defaults, samples), getattr(section, samples)
                if given != unset and getattr(section, iterations) == getattr(defaults, iterations):
                    setattr(section, iterations, given // batch)
                    setattr(section, samples, unset)

    def _tokens_per_rank(self) -> int:
        """What a rank holds of the longest sample on context_parallel_size ranks, padded: one fits, in any case."""
        m = self.model
        width = max(1, m.tensor_model_parallel_size) if m.sequence_parallel else 1
        unit = 2 * max(1, m.context_parallel_size) * width
        return -(-max(1, m.seq_length or 1) // unit) * 2 * width

    def warmup_iters(self) -> int:
        """Iterations over which the learning rate rises.

        A recipe's warmup is written for its full length: where the schedule is as long as the run, the warmup ends at
        least one iteration before the run does. Rule I9 says so.
        """
        schedule, run = self.scheduler, self.train.train_iters
        decay = run if schedule.lr_decay_iters is None else schedule.lr_decay_iters
        if schedule.lr_warmup_fraction is not None:
            return int(schedule.lr_warmup_fraction * decay)
        return min(schedule.lr_warmup_iters, max(0, decay - 1)) if decay == run else schedule.lr_warmup_iters

    @property
    def runs_packs(self) -> bool:
        """Whether anything runs packs, evaluation in groups of its own among them."""
        return self.model.sequence_packing_scheduler is not None or self.dist.eval_context_parallel_size is not None

    @property
    def evaluation_batch(self) -> tuple[int, int]:
        """Samples of evaluation's global and micro batches: training's where it has none of its own."""
        own, train = self.validation, self.train
        batch, micro = own.eval_global_batch_size, own.eval_micro_batch_size
        return batch or train.global_batch_size, micro or train.micro_batch_size

    @property
    def fewest_ranks(self) -> int:
        """Ranks of one model replica, tp * pp * cp: the layout needs these or a multiple. At least 1."""
        m = self.model
        return max(1, m.tensor_model_parallel_size * m.pipeline_model_parallel_size * m.context_parallel_size)

    def data_parallel_size(self, world_size: int) -> int:
        """Number of model replicas that see different samples."""
        return world_size // self.fewest_ranks


def _kind_of_data(
    data_path: str | list[str | int | float] | None, packed: bool
) -> Literal["indexed", "mock", "documents", "jsonl", "mock_documents"]:
    if data_path is None:
        return "mock_documents" if packed else "mock"
    paths = data_path if isinstance(data_path, list) else [data_path]
    if any(str(path).endswith(".jsonl") for path in paths):
        return "jsonl"
    return "documents" if packed else "indexed"
