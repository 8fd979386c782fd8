"""Time model: seconds of a step from the work of each stage. Pure."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

from megatron_cp.config.model_config import ModelConfig
from megatron_cp.estimate.device import Device
from megatron_cp.estimate.flops import numbered_layer_types, pairs_of_samples, training_flops
from megatron_cp.estimate.job import Job, TimeEstimate
from megatron_cp.estimate.keys import model_key
from megatron_cp.estimate.links import Links
from megatron_cp.estimate.memory.stages import chunks_of_stages
from megatron_cp.estimate.rank import NOTHING, Passes, Rank, Work, item_size
from megatron_cp.estimate.work import loss_work, work_of
from megatron_cp.models.vocabulary import padded_vocab_size

# Bytes moved by Adam per parameter of a rank's shard: gradient, master weight and both moments, read and written.
ADAM_BYTES = 32
GRADIENT_BYTES = 8  # per parameter of a rank: zeroed once, read once for the norm
# Kinds of time in which a rank only waits. Messages between processes take a core's time, too.
_WAITS = {"bubble", "imbalance"}


@dataclass(frozen=True)
class Stage:
    """A pipeline stage on one rank.

    passes: work of one microbatch through all layers of the stage, and parameters.
    counts: number of layer parts by type letter.
    copies: exposed seconds of a microbatch's copies to and from host memory.
    """

    passes: Passes
    counts: Mapping[str, int]
    copies: float = 0.0

    @property
    def backward(self) -> Work:
        return self.passes.backward.plus(self.passes.again)

    def seconds(self, device: Device) -> float:
        """Return seconds of both passes of a microbatch, limited by GPU or host."""
        return self.copies + sum(_paced(each, device) for each in (self.passes.forward, self.backward))


def _paced(work: Work, device: Device) -> float:
    host = work.kernels * device.launch_seconds
    return max(host, work.seconds + work.kernels * device.kernel_seconds + device.host_serial * host)


def time_estimate(job: Job, device: Device, gpus_per_node: int | None = None) -> TimeEstimate:
    """Estimate seconds of a training step of ``job`` on ``device``.

    The slowest stage runs all microbatches without gaps. The other stages add the pipeline's fill and drain time.
    """
    layout, count = job.layout, job.microbatches
    links = Links(device, gpus_per_node or device.gpus_per_node)
    stages = _stages(job, _rank(job, device, links))
    times = [stage.seconds(device) for stage in stages]
    slowest = stages[times.index(max(times))]
    virtual = job.model.virtual_pipeline_model_parallel_size or 1
    forward, backward, again = slowest.passes.forward, slowest.passes.backward, slowest.passes.again
    both = forward.plus(backward)
    sent = _exposed_pp(job, links, device) * count
    exposed_dp, optimizer = _between_steps(job, links, device, slowest)
    kinds = {
        "matrix products": count * both.matmul,
        "attention": count * both.attention,
        "elementwise": count * (both.elementwise + device.kernel_seconds * both.kernels),
        "recomputation": count * (again.matmul + again.attention + again.elementwise),
        "exposed tp": count * (both.tp + again.tp),
        "exposed cp": count * (both.cp + again.cp),
        "exposed ep": count * (both.ep + again.ep),
        "exposed dp": exposed_dp,
        "exposed pp": sent,
        "exposed offload": count * slowest.copies,
        "bubble": (sum(times) - max(times)) / virtual,
        "optimizer": optimizer,
    }
    busy = sum(kinds[each] for each in kinds if each not in ("exposed dp", "exposed pp", "bubble", "optimizer"))
    kinds["host"] = max(0.0, count * max(times) - busy) + device.step_seconds
    if device.cores:
        coupled, balance = layout.tp * layout.cp * layout.ep * layout.etp, sum(times) / len(times) / max(times)
        kinds = on_shared_cores(kinds, device.cores, min(layout.world_size, links.per_node), coupled, balance)
    documents, copies = _documents(job)
    key = (*model_key(job.model), job.vocab_size, documents)
    if key not in _FLOPS:
        _FLOPS[key] = training_flops(job.model, job.vocab_size, documents)
    return TimeEstimate(kinds, _FLOPS[key] * copies * count * layout.dp)


def on_shared_cores(
    kinds: Mapping[str, float], cores: int, ranks: int, coupled: int, balance: float = 1.0
) -> dict[str, float]:
    """Return seconds by kind where the ranks of a node share its processor cores.

    A waiting rank leaves its core to the others. So a step takes at least the work of all ranks over the cores, and
    gaps add to that only as far as the other ranks do not fill them.

    Args:
        ranks: ranks on a node.
        coupled: ranks that wait for each other in every layer.
        balance: mean over maximum of the stages' work.
    """
    work = {kind: seconds for kind, seconds in kinds.items() if kind not in _WAITS}
    waits = {kind: seconds for kind, seconds in kinds.items() if kind in _WAITS}
    alone = max(1.0, min(coupled, ranks) / cores)
    rounds = max(alone, ranks * balance / cores)
    hidden = (rounds - alone) * sum(work.values())
    left = max(0.0, 1 - hidden / (sum(waits.values()) or 1.0))
    return {kind: seconds * rounds for kind, seconds in work.items()} | {k: v * left for k, v in waits.items()}


def microbatch_seconds(job: Job, device: Device, gpus_per_node: int | None = None) -> tuple[float, float]:
    """Estimate seconds of a microbatch on the slowest stage.

    Also returns its seconds of exposed context parallel messages.
    """
    stages = _stages(job, _rank(job, device, Links(device, gpus_per_node or device.gpus_per_node)))
    slowest = max(stages, key=lambda stage: stage.seconds(device))
    return slowest.seconds(device), slowest.passes.forward.cp + slowest.backward.cp


def _documents(job: Job) -> tuple[tuple[int, ...], int]:
    """Return lengths, and how many times a microbatch has documents of these lengths."""
    return (job.lengths, 1) if job.lengths else ((job.model.seq_length or 1,), job.micro_batch_size)


def _rank(job: Job, device: Device, links: Links) -> Rank:
    model, layout, (documents, copies) = job.model, job.layout, _documents(job)
    key = (*model_key(model), documents)
    if key not in _SUMS:
        attending = sum("*" in parts for _, parts in numbered_layer_types(model))
        whole = sum(pairs_of_samples(model, documents).tolist())
        square = float(sum(length * length for length in documents))
        _SUMS[key] = (whole / attending if attending else 0.0), square, max(documents)
    pairs, square, longest = _SUMS[key]
    return Rank(
        device=device,
        links=links,
        gemm=job.gemm,
        tokens=float(job.tokens_per_rank),
        pairs=pairs * copies,
        square=square * copies,
        longest=longest,
        tp=layout.tp,
        cp=layout.cp,
        ep=layout.ep,
        etp=layout.etp,
        levels=layout.hierarchical,
        split=layout.tp if model.sequence_parallel else 1,
    )


def _stages(job: Job, rank: Rank) -> list[Stage]:
    model = job.model
    parts = {part: work_of(model, rank, part) for part in model.layer_letters}
    loss = loss_work(model, rank, padded_vocab_size(model, job.vocab_size))
    made: dict[tuple[Any, ...], Stage] = {}
    found = []
    counts = _layers_of_stages(model)
    for number, letters in enumerate(counts):
        last = number == len(counts) - 1
        key = (tuple(letters.items()), number == 0, last)
        if key not in made:
            made[key] = _stage(job, rank, parts, letters, loss if last else None, first=number == 0)
        found.append(made[key])
    return found


def _stage(
    job: Job, rank: Rank, parts: Mapping[str, Passes], letters: Mapping[str, int], loss: Passes | None, first: bool
) -> Stage:
    model = job.model
    forward = backward = again = NOTHING
    weights = expert_weights = 0.0
    share = _recomputed_share(model, sum(letters.values()) / max(1, len(model.layer_types[0])))
    counts = Counter(letters)
    if loss is not None:
        for letter in model.layer_types[-1] * (model.mtp_num_layers or 0) if model.architecture == "gpt" else "":
            counts[letter] += 1
        times = 1 + (model.mtp_num_layers or 0)
        forward, backward = forward.plus(loss.forward, times), backward.plus(loss.backward, times)
        weights += loss.weights
    for letter, count in counts.items():
        passes = parts[letter]
        forward = forward.plus(passes.forward, count)
        backward = backward.plus(passes.backward, count)
        again = again.plus(passes.again, count * share)
        weights += count * passes.weights
        expert_weights += count * passes.expert_weights
    if first and not (loss is not None and model.share_embeddings_and_output_weights):
        weights += padded_vocab_size(model, job.vocab_size) * model.hidden_size / job.layout.tp
    copies = _exposed_copies(job, rank, parts, letters, is_last=loss is not None)
    return Stage(Passes(forward, backward, again, weights, expert_weights), letters, copies)


def _exposed_copies(
    job: Job, rank: Rank, parts: Mapping[str, Passes], letters: Mapping[str, int], is_last: bool
) -> float:
    """Estimate exposed seconds of the copies of layer inputs, for one microbatch.

    An input leaves while the next recomputed group of layers computes, and returns one group before its backward pass.
    The first return has nothing to hide behind but on the last stage, where this input stays on the device.
    """
    model, layers = job.model, sum(letters.values()) / max(1, len(job.model.layer_types[0]))
    if not (model.offload_layer_inputs and layers):
        return 0.0
    size = (model.recompute_num_layers or 1) if model.recompute_method == "uniform" else 1
    groups = layers * _recomputed_share(model, layers) / size
    forward = backward = NOTHING
    for letter, count in letters.items():
        forward = forward.plus(parts[letter].forward, count * size / layers)
        backward = backward.plus(parts[letter].backward.plus(parts[letter].again), count * size / layers)
    saved = rank.split * (job.layout.tp if model.distribute_saved_activations else 1)
    held, links = rank.tokens * model.hidden_size * rank.item / saved, rank.links
    exposed = sum(links.exposed_copy(held, _paced(each, rank.device)) for each in (forward, backward))
    return groups * exposed + (0.0 if is_last else links.exposed_copy(held, 0.0))


def _recomputed_share(model: ModelConfig, layers: float) -> float:
    """Return the fraction of layers under full recomputation.

    With ``recompute_method=block``, only the first layers of each virtual stage are recomputed.
    """
    if model.recompute_granularity != "full" or model.recompute_method != "block" or not layers:
        return 1.0
    virtual = model.virtual_pipeline_model_parallel_size or 1
    return min(1.0, (model.recompute_num_layers or 0) * virtual / layers)


def _layers_of_stages(model: ModelConfig) -> list[Mapping[str, int]]:
    """Count layer parts by type letter for each pipeline stage.

    Layers that do not divide by the stages are split as evenly as possible.
    """
    key = model_key(model)
    if key not in _STAGES:
        layers = model.layer_types
        try:
            stages = [[parts for chunk in chunks for parts in chunk] for chunks in chunks_of_stages(model)]
        except ValueError:
            stages = []
        if sum(map(len, stages)) != len(layers):
            pp = model.pipeline_model_parallel_size
            cuts = [len(layers) * stage // pp for stage in range(pp + 1)]
            stages = [list(layers[start:end]) for start, end in pairwise(cuts)]
        _STAGES[key] = [Counter("".join(stage)) for stage in stages]
    return _STAGES[key]


def _exposed_pp(job: Job, links: Links, device: Device) -> float:
    """Estimate exposed pipeline communication of one microbatch, in seconds.

    Each virtual stage sends one message forward and one backward.
    """
    model, layout = job.model, job.layout
    if layout.pp == 1:
        return 0.0
    stride = layout.world_size // layout.pp if layout.order == "tp-cp-ep-dp-pp" else layout.tp * layout.cp
    split = layout.tp if model.sequence_parallel else 1
    held = job.tokens_per_rank * model.hidden_size * item_size(job.gemm) / split
    virtual = model.virtual_pipeline_model_parallel_size or 1
    overlapped = virtual > 1 and model.overlap_p2p_comm is not False
    exposed = 1 - device.overlap["pp"] if overlapped else 1.0
    return 2 * virtual * links.hop(layout.pp, stride, held) * exposed


def _between_steps(job: Job, links: Links, device: Device, stage: Stage) -> tuple[float, float]:
    """Estimate exposed data parallel communication and optimizer time, in seconds."""
    layout, passes = job.layout, stage.passes
    dense = (layout.dp * layout.cp, layout.tp, passes.weights)
    experts = (layout.world_size // layout.expert_model_size, layout.etp * layout.ep, passes.expert_weights)
    item = 4 if job.ddp.grad_reduce_in_fp32 or job.gemm == "fp32" else 2
    reduced = gathered = moved = 0.0
    for size, stride, weights in (dense, experts):
        if not weights:
            continue
        sharded = job.optimizer.use_distributed_optimizer
        one = links.gather(size, stride, weights)
        reduced += one * item * (1 if sharded else 2)
        gathered += one * item_size(job.gemm) if sharded else 0.0
        moved += weights * (GRADIENT_BYTES + ADAM_BYTES / (size if sharded else 1))
    # Gradient messages overlap the last backward pass, weight messages the first forward pass.
    hidden = device.overlap["dp"] * stage.backward.seconds if job.ddp.overlap_grad_reduce else 0.0
    exposed = max(0.0, reduced - hidden)
    hidden = device.overlap["dp"] * passes.forward.seconds if job.ddp.overlap_param_gather else 0.0
    exposed += max(0.0, gathered - hidden)
    return exposed, moved / device.memory_bandwidth


_FLOPS: dict[tuple[Any, ...], float] = {}
_SUMS: dict[tuple[Any, ...], tuple[float, float, int]] = {}  # pairs, squares and longest of documents
_STAGES: dict[tuple[Any, ...], list[Mapping[str, int]]] = {}
