"""Gradients of a step: prepared and measured on the device, then applied.

megatron-core's ``optimizer.step()`` does both, and the host waits for the norm in between. A check for non-finite
gradients would read them once more, and wait once more. Here the norm serves as the check, and is read together with
the losses.
"""

from __future__ import annotations

import math
from collections.abc import Callable

import torch
from megatron.core.optimizer import MegatronOptimizer, clip_grads
from torch import Tensor

from megatron_cp.config.run_config import OptimizerConfig
from megatron_cp.parallel.collectives import sum_over_ranks
from megatron_cp.training.setup import Run

_LARGEST_WITH_A_SQUARE = math.sqrt(torch.finfo(torch.float32).max)
Norm = Callable[[list[Tensor]], Tensor]
Counted = list[tuple[MegatronOptimizer, list[Tensor]]]  # the gradients that enter the norm


@torch.no_grad()
def measure_gradients(run: Run) -> tuple[Tensor, Tensor]:
    """Prepare the gradients and return norm and non-finite flag, [1] each. Collective.

    Both stay on the device. The flag is 1 if a gradient of this rank may not be finite; large gradients count too,
    because their squares overflow. The norm leaves out duplicated parameters, so the flag checks these as well.
    """
    run.optimizer.prepare_grads()
    counted = _counted(run)
    norm = _norm_of_all(run, counted, _norm_in_float32)
    seen = {id(grad) for _, grads in counted for grad in grads}
    grads = (parameter.grad for optimizer, _ in counted for parameter in optimizer.get_parameters())
    copies = [grad for grad in grads if grad is not None and id(grad) not in seen]
    finite = torch.isfinite(norm + torch.nn.utils.get_total_norm(copies))
    return norm, (~finite).double()


@torch.no_grad()
def unscale_gradients(run: Run) -> float | None:
    """Unscale fp16 gradients and adapt the loss scale. Collective.

    Returns:
        The gradient norm, or None after an overflow.
    """
    if run.optimizer.prepare_grads():
        return None
    return exact_norm(run, float(_norm_of_all(run, _counted(run), _norm_in_float32)))


@torch.no_grad()
def exact_norm(run: Run, measured: float) -> float:
    """Return ``measured``, or recompute a non-finite norm in float64. Collective.

    Float64 holds the squares of all float32 numbers: the result is finite if all gradients are.
    """
    return measured if math.isfinite(measured) else float(_norm_of_all(run, _counted(run), _norm_in_float64))


def overflows_in_optimizer(optimizer: OptimizerConfig, norm: float) -> bool:
    """Return whether clipped gradients of ``norm`` may overflow Adam's second moment.

    Adam never recovers from such an overflow.
    """
    clipped = min(norm, optimizer.clip_grad or norm)
    return not math.isfinite(norm) or (optimizer.optimizer != "sgd" and clipped > _LARGEST_WITH_A_SQUARE)


def _counted(run: Run) -> Counted:
    return [(each, each.get_grads_for_grad_norm()) for each in run.optimizer.chained_optimizers]


def _norm_of_all(run: Run, counted: Counted, norm: Norm) -> Tensor:
    """Return the norm over all ranks: [1], float64. ``norm`` computes it for one list."""
    square = torch.zeros(1, dtype=torch.float64, device=run.device)
    for optimizer, grads in counted:  # the expert optimizer sums over other ranks
        part = norm(grads).double() ** 2 if grads else torch.zeros_like(square)
        square += sum_over_ranks(part, optimizer.get_grad_stats_parallel_group())
    return square.sqrt()


def _norm_in_float32(grads: list[Tensor]) -> Tensor:
    overflow = torch.zeros(1, dtype=torch.int, device=grads[0].device)
    norm, _ = clip_grads.multi_tensor_applier(clip_grads.l2_norm_impl, overflow, [grads], False)
    return norm


def _norm_in_float64(grads: list[Tensor]) -> Tensor:
    norms = [torch.linalg.vector_norm(grad, dtype=torch.float64) for grad in grads]
    return torch.linalg.vector_norm(torch.stack(norms)).reshape(1)


@torch.no_grad()
def apply_gradients(optimizer: MegatronOptimizer, norm: float) -> bool:
    """Clip the gradients of this ``norm`` and step; return whether the step succeeded."""
    for each in optimizer.chained_optimizers:
        if each.config.clip_grad > 0.0:
            clip_grads.clip_grad_by_total_norm_fp32(each.get_parameters(), each.config.clip_grad, norm)
    return optimizer.step_with_ready_grads()
