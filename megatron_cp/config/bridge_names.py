"""Settings of Megatron-Bridge and megatron-core that are called otherwise here, always so, or not offered. Pure.

A configuration written for Bridge may keep what asks for nothing, or for what is done anyway: it is left out of the
run's own configuration. What asks for anything else is an error that says what to write instead.
"""

from __future__ import annotations

from typing import Any, NamedTuple

from megatron_cp.common.errors import Violation

_LEAVE_OUT = "leave it out"


class _Meaning(NamedTuple):
    """What a name of Bridge's means here. ``accepted`` are values that change nothing; None stands for any."""

    message: str
    fix: str
    accepted: tuple[Any, ...] | None

    def accepts(self, value: Any) -> bool:
        """Whether the value may be dropped; a mapping may where all that is in it may."""
        if isinstance(value, dict):
            return all(self.accepts(inner) for inner in value.values())
        # True is no 1, as in the schema.
        return self.accepted is None or any(
            value == each and isinstance(value, bool) == isinstance(each, bool) for each in self.accepted
        )


def _called(setting: str, how: str = "") -> _Meaning:
    return _Meaning(f"is '{setting}' here", how or f"{setting}=VALUE", (None,))


def _always(*values: Any, fix: str = _LEAVE_OUT) -> _Meaning:
    shown = "null" if values[0] is None else str(values[0]).lower() if isinstance(values[0], bool) else values[0]
    return _Meaning(f"only {shown} is offered", fix, (None, *values))


def _absent(why: str, fix: str = _LEAVE_OUT) -> _Meaning:
    return _Meaning(f"not offered: {why}", fix, (None, False, 0, "", "none", []))


_FLOAT32 = _always("float32", "torch.float32", "fp32")
_UNREAD = _Meaning("", "", None)  # upstream reads it only where something is on that is not offered here
_ALWAYS_WRITTEN = _Meaning("is always written", _LEAVE_OUT, (None, True, False))
_NO_FP8 = _absent("there is no FP8 or FP4 training", "mixed_precision=bf16_mixed")
_NO_GRAPHS = _absent("there are no CUDA graphs")
_NO_FSDP = _absent("there is no FSDP", "optimizer.use_distributed_optimizer=true (shards the optimizer's state)")
_NO_TP_OVERLAP = _absent("tensor-parallel messages are not overlapped with computation")
_DTYPE = _Meaning(
    "follows from mixed_precision",
    "mixed_precision=bf16_mixed, or mixed_precision=fp16_mixed, or mixed_precision=fp32",
    (None,),
)
_PRECISION_OF = {"torch.bfloat16": "bf16", "torch.float16": "fp16", "torch.float32": "fp32"}
_PACKING = _absent(
    "samples are packed by the scheduler, whole", "model.sequence_packing_scheduler=dp_balanced dataset.kind=documents"
)
_OTHER_LOGGER = _absent("numbers go to TensorBoard, metrics.jsonl and Weights & Biases", "logger.wandb_project=NAME")
_WHOLE_SECTION = {
    "peft": _absent("there are no adapters: all weights are trained"),
    "comm_overlap": _absent(
        "messages are overlapped by settings of the model and ddp",
        "model.overlap_p2p_comm=true ddp.overlap_grad_reduce=true",
    ),
    "ft": _absent("NVIDIA's fault tolerance is not used; a run started again goes on from its checkpoint"),
    "straggler": _absent("no rank is compared with others", "profiling.use_pytorch_profiler=true"),
    "nvrx_straggler": _absent("no rank is compared with others", "profiling.use_pytorch_profiler=true"),
    "rerun_state_machine": _absent(
        "no step is run again to compare it", "train.on_nonfinite and train.loss_spike_factor, of losses"
    ),
    "tensor_inspect": _absent("tensors are not inspected"),
    "inprocess_restart": _absent("a run is started again by its launcher", "torchrun --max-restarts=N"),
}
_NAMES = {
    # The model: names of published configurations, and of Bridge's.
    "model.rope_theta": _called("model.rotary_base"),
    "model.tie_word_embeddings": _called("model.share_embeddings_and_output_weights"),
    "model.rms_norm_eps": _called("model.layernorm_epsilon"),
    "model.intermediate_size": _called("model.ffn_hidden_size"),
    "model.num_hidden_layers": _called("model.num_layers"),
    "model.num_key_value_heads": _called("model.num_query_groups"),
    "model.head_dim": _called("model.kv_channels"),
    # YaRN of latent attention, which has names of its own for it.
    "model.rope_type": _called("model.position_embedding_type")._replace(accepted=(None, "rope")),
    "model.rotary_scaling_factor": _called("model.yarn_rotary_scaling_factor"),
    "model.original_max_position_embeddings": _called("model.yarn_original_max_position_embeddings"),
    "model.beta_fast": _called("model.yarn_beta_fast"),
    "model.beta_slow": _called("model.yarn_beta_slow"),
    "model.mscale": _called("model.yarn_mscale", "model.yarn_mscale=VALUE model.yarn_mscale_all_dim=VALUE"),
    "model.mscale_all_dim": _called(
        "model.yarn_mscale_all_dim", "model.yarn_mscale=VALUE model.yarn_mscale_all_dim=VALUE"
    ),
    "model.cache_mla_latents": _absent("there is no inference"),
    "model.mla_down_proj_fusion": _absent("the down-projections are products of their own"),
    "model.hybrid_override_pattern": _called("model.hybrid_layer_pattern"),
    "model.mtp_hybrid_override_pattern": _called("model.hybrid_layer_pattern", "model.hybrid_layer_pattern=OWN/AHEAD"),
    "model.hybrid_context_parallel": _called("model.dynamic_context_parallel")._replace(accepted=(None, False)),
    "model.attention_softmax_in_fp32": _always(True),
    "model.bias_dropout_fusion": _always(True),
    "model.persist_layer_norm": _UNREAD,  # by apex's norms alone
    "model.memory_efficient_layer_norm": _UNREAD,
    "model.masked_softmax_fusion": _UNREAD,  # by megatron-core's own attention alone
    "model.interleaved_attn_pattern": _called("model.window_attn_skip_freq", "model.window_attn_skip_freq=6"),
    "model.apply_query_key_layer_scaling": _absent("scores are computed in float32 anyway"),
    "model.parallel_output": _always(True),
    "model.perform_initialization": _always(True),
    "model.fp16_lm_cross_entropy": _absent("the loss is computed in float32"),
    "model.params_dtype": _DTYPE,
    "model.pipeline_dtype": _DTYPE,
    "model.autocast_dtype": _DTYPE,
    "model.pipeline_model_parallel_layout": _absent(
        "the first and the last stage may have numbers of layers of their own",
        "model.num_layers_in_first_pipeline_stage=N model.num_layers_in_last_pipeline_stage=N",
    ),
    "model.deallocate_pipeline_outputs": _Meaning("what was sent is always freed", _LEAVE_OUT, (None, True, False)),
    "model.fp8": _NO_FP8,
    "model.fp4": _NO_FP8,
    "model.fp8_recipe": _UNREAD,
    "model.fp8_param": _NO_FP8,
    "model.fp4_recipe": _UNREAD,
    "model.fp8_dot_product_attention": _NO_FP8,
    "model.first_last_layers_bf16": _UNREAD,
    "model.enable_cuda_graph": _NO_GRAPHS,
    "model.external_cuda_graph": _NO_GRAPHS,
    "model.cuda_graph_impl": _NO_GRAPHS,
    "model.cuda_graph_scope": _UNREAD,
    "model.cuda_graph_modules": _UNREAD,
    "model.cuda_graph_warmup_steps": _UNREAD,
    "model.use_te_rng_tracker": _NO_GRAPHS,
    "model.use_transformer_engine_op_fuser": _absent("Transformer Engine's layers are used as they are"),
    "model.tp_comm_overlap": _NO_TP_OVERLAP,
    "model.tp_comm_overlap_cfg": _UNREAD,
    "model.fine_grained_activation_offloading": _absent("there is recomputation", "model.recompute_granularity=full"),
    "model.offload_modules": _UNREAD,
    "model.moe_shared_expert_overlap": _absent("shared experts are not overlapped with messages"),
    "model.moe_router_force_load_balancing": _absent("tokens go where the router sends them"),
    "model.moe_router_fusion": _absent("the router's kernels are not fused"),
    "model.moe_permute_fusion": _absent("the dispatcher's kernels are not fused"),
    "model.moe_router_padding_for_fp8": _NO_FP8,
    "model.moe_expert_capacity_factor": _absent("experts compute all tokens that they are sent"),
    "model.moe_enable_deepep": _absent("dispatchers are alltoall and allgather"),
    "model.moe_flex_dispatcher_backend": _UNREAD,
    "model.moe_flex_dispatcher_num_sms": _UNREAD,
    "model.moe_deepep_num_sms": _UNREAD,
    "model.moe_hybridep_num_sms": _UNREAD,
    # Precision.
    "mixed_precision.params_dtype": _DTYPE,
    "mixed_precision.pipeline_dtype": _DTYPE,
    "mixed_precision.autocast_dtype": _DTYPE,
    "mixed_precision.autocast_enabled": _absent("the model has one precision"),
    "mixed_precision.fp8": _NO_FP8,
    "mixed_precision.fp8_recipe": _UNREAD,
    "mixed_precision.fp8_param": _NO_FP8,
    "mixed_precision.fp8_param_gather": _NO_FP8,
    "mixed_precision.fp8_dot_product_attention": _NO_FP8,
    "mixed_precision.reuse_grad_buf_for_mxfp8_param_ag": _NO_FP8,
    "mixed_precision.fp4": _NO_FP8,
    "mixed_precision.fp4_recipe": _UNREAD,
    # Optimizer and schedule.
    "optimizer.use_precision_aware_optimizer": _absent("the optimizer's state is float32"),
    "optimizer.main_grads_dtype": _FLOAT32,
    "optimizer.main_params_dtype": _FLOAT32,
    "optimizer.exp_avg_dtype": _FLOAT32,
    "optimizer.exp_avg_sq_dtype": _FLOAT32,
    "optimizer.store_param_remainders": _UNREAD,
    "optimizer.params_dtype": _DTYPE,
    "optimizer.decoupled_weight_decay": _always(True),
    "optimizer.overlap_param_gather_with_optimizer_step": _absent("ddp.overlap_param_gather is"),
    "optimizer.optimizer_offload_fraction": _UNREAD,
    "scheduler.max_lr": _called("optimizer.lr"),
    "scheduler.no_weight_decay_cond_type": _absent("biases and norms alone do not decay"),
    # Data parallelism and checkpoints.
    "ddp.use_megatron_fsdp": _NO_FSDP,
    "ddp.use_custom_fsdp": _NO_FSDP,
    "ddp.data_parallel_sharding_strategy": _UNREAD,
    "ddp.num_distributed_optimizer_instances": _always(1),
    "ddp.align_param_gather": _absent("stages do not wait for each other to gather"),
    "ddp.check_for_large_grads": _absent("gradients that are not finite are found", "ddp.check_for_nan_in_grad=true"),
    "ddp.nccl_ub": _absent("NCCL's user buffers are not used"),
    "ddp.fp8_param_gather": _NO_FP8,
    "dist.use_megatron_fsdp": _NO_FSDP,
    "dist.use_torch_fsdp2": _NO_FSDP,
    "dist.lazy_mpu_init": _absent("groups are built before the model"),
    "dist.use_sharp": _absent("NCCL is left to choose"),
    "dist.enable_megatron_core_experimental": _absent("no experimental part of megatron-core is used"),
    "checkpoint.ckpt_format": _always("torch_dist"),
    "checkpoint.fully_parallel_load": _absent("each rank reads the state of its part of the model"),
    "checkpoint.ckpt_assume_constant_structure": _absent("a checkpoint's plan is made each time"),
    "checkpoint.load_main_params_from_ckpt": _absent("without its state the optimizer begins with the model's weights"),
    # Steps, evaluation and data.
    "train.manual_gc_eval": _absent("the loop collects between steps", "train.manual_gc_interval=100"),
    "train.rampup_batch_size": _absent("the global batch has one size"),
    "train.decrease_batch_size_if_needed": _absent("the global batch has one size"),
    "train.num_epochs": _absent("a run's length is not given in epochs", "train.train_iters=N"),
    "train.empty_unused_memory_level": _absent("CUDA's allocator keeps its memory"),
    "train.skip_sync_grad_norm_across_mp": _absent("the gradient norm is that of all ranks"),
    "validation.full_validation": _absent("an evaluation is validation.eval_iters batches"),
    "validation.multiple_validation_sets": _absent(
        "files of one set are a blend", '"dataset.valid_data_path=[PATH,PATH]"'
    ),
    "validation.start_eval_at_iter": _absent("evaluations start at the first interval", "validation.eval_interval=N"),
    "dataset.blend": _called(
        "dataset.data_path", 'dataset.data_path=PATH, or "dataset.data_path=[WEIGHT,PATH,WEIGHT,PATH]"'
    ),
    "dataset.blend_per_split": _called(
        "dataset.valid_data_path", "dataset.data_path=PATH dataset.valid_data_path=PATH dataset.test_data_path=PATH"
    ),
    "dataset.sequence_length": _called("dataset.seq_length"),
    "dataset.seed": _called("dataset.random_seed"),
    "dataset.dataset_root": _called("dataset.data_path", "dataset.data_path=PATH (a .jsonl file)"),
    "dataset.skip_getting_attention_mask_from_dataset": _always(True),
    "dataset.create_attention_mask": _absent("attention knows its mask"),
    "dataset.dataloader_type": _always("single"),
    "dataset.data_sharding": _UNREAD,
    "dataset.num_dataset_builder_threads": _always(1),
    "dataset.pin_memory": _always(True),
    "dataset.mmap_bin_files": _always(True),
    "dataset.packed_sequence_specs": _PACKING,
    "dataset.enable_in_batch_packing": _PACKING,
    "dataset.enable_offline_packing": _PACKING,
    "tokenizer.vocab_file": _called(
        "tokenizer.tokenizer_model", "tokenizer.tokenizer_model=PATH (a folder or a tokenizer.json)"
    ),
    "tokenizer.tokenizer_hf_no_include_special_tokens": _Meaning(
        "is 'tokenizer.add_bos' here", "tokenizer.add_bos=false", (None, False)
    ),
    "tokenizer.hf_tokenizer_kwargs": _absent("a tokenizer is loaded as it was saved"),
    "rng.te_rng_tracker": _NO_GRAPHS,
    "rng.inference_rng_tracker": _absent("there is no inference"),
    # What is logged: a number too many harms nobody.
    "logger.log_throughput": _ALWAYS_WRITTEN,
    "logger.log_throughput_to_tensorboard": _ALWAYS_WRITTEN,
    "logger.log_timers_to_tensorboard": _ALWAYS_WRITTEN,
    "logger.log_loss_scale_to_tensorboard": _ALWAYS_WRITTEN,
    "logger.log_memory_to_tensorboard": _ALWAYS_WRITTEN,
    "logger.timing_log_level": _absent("a step's phases are timed, always"),
    "logger.log_params_norm": _absent("the gradient's norm is written"),
    "logger.log_num_zeros_in_grad": _absent("the gradient's norm is written"),
    "logger.log_validation_ppl_to_tensorboard": _absent("the loss is written, whose exponential it is"),
    "logger.mlflow_experiment": _OTHER_LOGGER,
    "logger.comet_project": _OTHER_LOGGER,
    # Of sections that are otherwise not offered.
    "comm_overlap.tp_comm_overlap": _NO_TP_OVERLAP,
    "comm_overlap.overlap_grad_reduce": _called("ddp.overlap_grad_reduce"),
    "comm_overlap.overlap_param_gather": _called("ddp.overlap_param_gather"),
    "comm_overlap.bucket_size": _called("ddp.bucket_size"),
    "rerun_state_machine.check_for_nan_in_loss": _always(True, fix="train.on_nonfinite=skip (leaves such steps out)"),
    "rerun_state_machine.rerun_mode": _always("disabled"),
}
_TE = "model.attention_backend=te: Transformer Engine takes the fastest; env_vars.{}=0 takes the other away from it"
# megatron-core's choices of a kernel of Transformer Engine's.
_BACKENDS = {
    "flash": _TE.format("NVTE_FUSED_ATTN"),
    "fused": _TE.format("NVTE_FLASH_ATTN"),
    "unfused": "model.attention_backend=native: Transformer Engine's unfused attention has no context parallelism",
    "local": "model.attention_backend=native: our own attention; model.transformer_impl=local: none of its layers",
}


def called_here(name: str) -> str | None:
    """Our setting for one of Bridge's or megatron-core's, whose bare name is given, where it has another name here."""
    known = instead_of(name)
    return known[0].split("'")[1] if known and known[0].startswith("is '") else None


def instead_of(name: str) -> tuple[str, str] | None:
    """Why a setting of Bridge's or megatron-core's, by its bare name, is not offered, and what to do instead."""
    found = next((meaning for full, meaning in _NAMES.items() if full.partition(".")[2] == name), None)
    return found and (found.message, found.fix)


def settle(settings: dict[str, Any]) -> list[Violation]:
    """Take Bridge's names out of a run's settings, nested by sections, in place; returns those that cannot be obeyed.

    Names that neither Bridge nor this project knows stay where they are.
    """
    problems = []
    for section in list(settings):
        whole = _WHOLE_SECTION.get(section)
        values = settings[section] if isinstance(settings[section], dict) else {}
        found = {name: _NAMES.get(f"{section}.{name}", whole) for name in values}
        for name, meaning in found.items():
            if meaning is None:
                continue
            value = values.pop(name)
            agrees = meaning is _DTYPE and settings["mixed_precision"].get(_PRECISION_OF.get(str(value)))
            if not agrees and not meaning.accepts(value):
                problems.append(Violation("K1", "error", f"{section}.{name}", meaning.message, meaning.fix, value))
        if whole is not None:
            value = settings.pop(section)
            if not isinstance(value, dict) and not whole.accepts(value):
                problems.append(Violation("K1", "error", section, whole.message, whole.fix, value))
    if settings["train"].get("train_iters", 0) is None and settings["train"].get("train_samples") is not None:
        del settings["train"]["train_iters"]  # a length in samples takes the place of a recipe's iterations
    return problems + _settle_optimizer(settings) + _settle_attention(settings)


def _settle_optimizer(settings: dict[str, Any]) -> list[Violation]:
    """Bridge says in two places whether the optimizer is distributed; both must agree there, too."""
    name = "use_distributed_optimizer"
    said, decided = settings["ddp"].pop(name, None), settings["optimizer"].get(name)
    if said is None or said == decided:
        return []
    fix = f"optimizer.{name}={str(said).lower()}"
    return [Violation("K1", "error", f"ddp.{name}", f"is 'optimizer.{name}' here, which is {decided}", fix, said)]


def _settle_attention(settings: dict[str, Any]) -> list[Violation]:
    model = settings["model"]
    backend = model.get("attention_backend")
    if backend is None:  # of megatron-core: Transformer Engine decides
        model["attention_backend"] = "auto"
    if not isinstance(backend, str) or backend not in _BACKENDS:
        return []
    model["attention_backend"] = "auto"
    message = "kernels of Transformer Engine are not chosen one by one"
    return [Violation("K2", "error", "model.attention_backend", message, _BACKENDS[backend], backend)]
