"""Forward and backward pass of one global batch, and the batch's losses."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import nullcontext
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from megatron.core.pipeline_parallel import get_forward_backward_func
from torch import Tensor

from megatron_cp.dynamic_cp.runtime.packing import PackedMicrobatch
from megatron_cp.models.layers.mtp import depth_weights, unmasked_tokens
from megatron_cp.models.layers.router_losses import RouterLosses
from megatron_cp.parallel.collectives import pack, sum_over_ranks, unpack
from megatron_cp.parallel.pipeline import PipelineCommunicator
from megatron_cp.training.batches import Microbatch
from megatron_cp.training.setup import Run


@dataclass(frozen=True)
class StepLosses:
    """Losses of one global batch; equal on all ranks."""

    loss: float  # mean over the unmasked tokens of the global batch
    tokens: int  # unmasked tokens of the global batch
    mtp_losses: tuple[float, ...]  # of each MTP depth, over the unmasked tokens of that depth
    router_losses: dict[str, float]  # by megatron-core's names, unweighted


@dataclass(frozen=True)
class LossSums:
    """Sums over unmasked tokens, in float64 on the device.

    Of one microbatch on this rank, or of the global batch.
    """

    loss: Tensor  # []
    tokens: Tensor  # []
    mtp_losses: Tensor  # [depths]


@dataclass(frozen=True)
class PendingLosses(LossSums):
    """:class:`StepLosses` on the device, possibly still computing; equal on all ranks."""

    router_losses: dict[str, Tensor]

    def read(self, packed: Tensor | None = None) -> StepLosses:
        """Wait for the device, or read ``packed``, a host copy made by :func:`pack`."""
        found = unpack(pack(self).cpu() if packed is None else packed, self)
        routers = {name: float(value) for name, value in found.router_losses.items()}
        return StepLosses(float(found.loss), int(found.tokens), tuple(found.mtp_losses.tolist()), routers)


Observe = Callable[[Any, Tensor], None]  # called with a microbatch and its losses per token


def forward_backward(
    run: Run, microbatches: Sequence[Microbatch], forward_only: bool, observe: Observe | None = None
) -> PendingLosses:
    """Run the pipeline schedule and return the losses, equal on every rank.

    With ``forward_only`` MTP and router losses are left out. ``observe`` is called on the last stage, for each
    microbatch; losses that it sees as negative count by their size.
    """
    model = run.config.model
    stages = model.virtual_pipeline_model_parallel_size
    with run.phases("data"):
        depth_tokens = [] if forward_only else _depth_tokens(run, microbatches)
    schedule = get_forward_backward_func(pp_size=model.pipeline_model_parallel_size, vp_size=stages)
    shapes = [_stage_shape(run, each) for each in microbatches]
    if run.router_losses is not None:
        run.router_losses.begin()
    timed = run.work_clock(run.core_config) if run.work_clock and not forward_only else nullcontext()
    with run.phases("forward_backward"), timed:
        reports = schedule(
            forward_step_func=partial(
                forward_step, mtp_weights=depth_weights(run.core_config, depth_tokens), observe=observe
            ),
            # Every virtual stage needs an iterator of its own.
            data_iterator=iter(microbatches) if stages is None else [iter(microbatches) for _ in range(stages)],
            model=run.model if stages is not None else run.model[0],
            num_microbatches=len(microbatches),
            seq_length=model.seq_length,
            # Evaluation may use a different size.
            micro_batch_size=_values_of(microbatches[0])["tokens"].shape[0],
            forward_only=forward_only,
            p2p_communicator=PipelineCommunicator(run.groups.pp, run.core_config, shapes),
            pg_collection=run.groups,
        )
        return _reduce_losses(run, reports, depth_tokens, None if forward_only else run.router_losses)


def _stage_shape(run: Run, microbatch: Microbatch) -> tuple[int, int, int]:
    """Return the shape [sequence, batch, hidden] that pipeline stages pass on."""
    rows, tokens = _values_of(microbatch)["tokens"].shape
    parts = run.groups.tp.size() if run.core_config.sequence_parallel else 1
    return tokens // parts, rows, run.core_config.hidden_size


def _values_of(microbatch: Microbatch) -> dict[str, Any]:
    return vars(microbatch) if isinstance(microbatch, PackedMicrobatch) else microbatch


def _depth_tokens(run: Run, microbatches: Sequence[Microbatch]) -> list[float]:
    """Count unmasked tokens of the global batch, for the main loss and each MTP depth."""
    depths = run.config.model.mtp_num_layers or 0
    if not depths:
        return []
    values = [_values_of(microbatch) for microbatch in microbatches]
    counts = [unmasked_tokens(each["loss_mask"], each["position_ids"], depths) for each in values]
    total = torch.stack(counts).sum(dim=0)
    return sum_over_ranks(total, run.groups.dp_cp).tolist()


def forward_step(
    microbatches: Iterator[Microbatch],
    model: Any,
    mtp_weights: tuple[float, ...] = (),
    observe: Observe | None = None,
) -> tuple[Tensor, Callable]:
    """Run one microbatch through this rank's chunk (megatron-core's forward-step API)."""
    microbatch = next(microbatches)
    values = _values_of(microbatch)
    output = model(
        input_ids=values["tokens"],
        position_ids=values["position_ids"],
        attention_mask=None,
        labels=values["labels"],
        loss_mask=values["loss_mask"],
        packed_seq_params=values.get("packed_seq_params"),
        # Router losses must not count padding.
        padding_mask=values.get("padding_mask") if model.config.num_moe_experts else None,
    )
    sums_of = partial(loss_function, values["loss_mask"], mtp_weights)
    if observe is None:
        return output, sums_of

    def observed(losses: Tensor) -> tuple[Tensor, Tensor, LossSums]:
        observe(microbatch, losses)
        return sums_of(losses.abs())

    return output, observed


def loss_function(loss_mask: Tensor, mtp_weights: tuple[float, ...], losses: Tensor) -> tuple[Tensor, Tensor, LossSums]:
    """Return masked loss sum, number of unmasked tokens, and both for reporting.

    losses: per token, [b, s_local]; with ``mtp_weights`` [1 + depths, b, s_local]. The sum of each MTP depth is added
    to the total, times the weight of the depth.
    """
    main, depth_sums = losses, losses.new_empty(0, dtype=torch.float64)
    if mtp_weights:
        main, depth_sums = losses[0], losses[1:].float().flatten(1).sum(dim=1)
    loss_mask = loss_mask.reshape(-1).float()
    total = (main.float().reshape(-1) * loss_mask).sum()
    tokens = loss_mask.sum()
    sums = LossSums(total.detach().double(), tokens.double(), depth_sums.detach().double())
    for weight, depth_sum in zip(mtp_weights, depth_sums, strict=True):
        total = total + weight * depth_sum
    return total, tokens.to(torch.int), sums


def _reduce_losses(
    run: Run, microbatches: list[LossSums], depth_tokens: list[float], routers: RouterLosses | None
) -> PendingLosses:
    """Sum losses over ranks. Collective.

    Only the last pipeline stage computes losses; other stages add zeros.
    """
    zeros = torch.zeros(2 + len(depth_tokens[1:]), dtype=torch.float64, device=run.device)
    total = sum((pack(each) for each in microbatches), start=zeros)
    for group in (run.groups.dp_cp, run.groups.pp):
        if group.size() > 1:
            sum_over_ranks(total, group)
    sums = unpack(total, LossSums(zeros[0], zeros[1], zeros[2:]))
    means = [each / max(count, 1.0) for each, count in zip(sums.mtp_losses, depth_tokens[1:], strict=True)]
    return PendingLosses(
        sums.loss / sums.tokens.clamp(min=1.0),
        sums.tokens,
        torch.stack(means) if means else sums.mtp_losses,
        {} if routers is None else routers.means(run.all_ranks),
    )
