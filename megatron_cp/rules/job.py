"""Convert a case into a job for estimates of memory and time. Pure."""

from __future__ import annotations

from dataclasses import replace

from megatron_cp.estimate.device import Device, load_device, preset_for
from megatron_cp.estimate.job import Gemm, Job
from megatron_cp.models.vocabulary import known_vocab_size
from megatron_cp.parallel.layout import layout_of
from megatron_cp.rules.environment import Environment
from megatron_cp.rules.remedies import Case

ASSUMED_VOCABULARY = 32768  # assumed if only a tokenizer's file has the size


def job_of(case: Case, lengths: tuple[int, ...] | None = None) -> Job | None:
    """Return the job of a finalized configuration; None if the vocabulary is unknown.

    Args:
        lengths: documents of a typical packed microbatch; by default one that is as long as a group's ranks may hold.

    Raises:
        ValueError: the layout is impossible.
    """
    config, model = case.config, case.config.model
    vocab_size = known_vocab_size(model, config.tokenizer)
    if vocab_size is None:
        return None
    packed = model.sequence_packing_scheduler is not None
    if packed and lengths is None:
        lengths = ((model.max_seqlen_per_dp_cp_rank or model.tokens_per_rank) * model.context_parallel_size,)
    return Job(
        model,
        config.optimizer,
        config.ddp,
        layout_of(model, config.dist, case.world_size),
        config.train.micro_batch_size,
        config.train.global_batch_size,
        vocab_size,
        _gemm(case),
        lengths if packed else None,
    )


def assumed_job(case: Case) -> Job:
    """Return the job of a finalized configuration.

    An unknown vocabulary is replaced by an assumed one.

    Good enough to compare transports and packs, which the vocabulary does not depend on.

    Raises:
        ValueError: the layout is impossible.
    """
    config = case.config
    if known_vocab_size(config.model, config.tokenizer) is None:
        config = replace(config, model=replace(config.model, vocab_size=ASSUMED_VOCABULARY))
    job = job_of(replace(case, config=config))
    assert job is not None
    return job


def device_of(environment: Environment) -> Device:
    """Return the device preset of an environment."""
    if environment.device == "cpu":
        return load_device("cpu")
    return load_device(preset_for(environment.gpu, environment.compute_capability, environment.gpu_memory_gib))


def _gemm(case: Case) -> Gemm:
    precision = case.config.mixed_precision
    half = precision.bf16 or precision.fp16
    return "fp32" if precision.fp32 or (case.environment.device == "cpu" and not half) else "bf16"
