"""A step's gradients: made ready and measured while the device still computes them, and applied once they are known.

megatron-core's ``optimizer.step()`` does both, and the host waits for the norm in between; whether all gradients are
finite would be one more reading of them, and one more wait. Here the norm tells both, and is read with the losses.
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
Counted = list[tuple[MegatronOptimizer, list[Tensor]]]  # the gradients that the norm of all is made of


@torch.no_grad()
def measure_gradients(run: Run) -> tuple[Tensor, Tensor]:
    """The norm of all gradients, and 1 where one of this rank's may not be finite, else 0: [1] each, on the device.

    Makes the gradients ready for :func:`apply_gradients`. Collective. Those that are large are suspected, too: their
    squares overflow. The norm leaves out what a rank has copies of; for a fault of its own these are looked at as well.
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
    """Unscale fp16 gradients and adapt the loss scale; return their norm, or None if they overflowed. Collective."""
    if run.optimizer.prepare_grads():
        return None
    return exact_norm(run, float(_norm_of_all(run, _counted(run), _norm_in_float32)))


@torch.no_grad()
def exact_norm(run: Run, measured: float) -> float:
    """Return ``measured``, or where it is not finite the same norm with squares in float64. Collective.

    Float64 holds the squares of all float32 numbers: the result is finite if all gradients are.
    """
    return measured if math.isfinite(measured) else float(_norm_of_all(run, _counted(run), _norm_in_float64))


def overflows_in_optimizer(optimizer: OptimizerConfig, norm: float) -> bool:
    """Whether clipped gradients of this ``norm`` may overflow Adam's second moment, from which it never recovers."""
    clipped = min(norm, optimizer.clip_grad or norm)
    return not math.isfinite(norm) or (optimizer.optimizer != "sgd" and clipped > _LARGEST_WITH_A_SQUARE)


def _counted(run: Run) -> Counted:
    return [(each, each.get_grads_for_grad_norm()) for each in run.optimizer.chained_optimizers]


def _norm_of_all(run: Run, counted: Counted, norm: Norm) -> Tensor:
    """The norm over all ranks, where ``norm`` is that of a list: [1], float64."""
    square = torch.zeros(1, dtype=torch.float64, device=run.device)
    for optimizer, grads in counted:  # the optimizer of experts sums over other ranks
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
    """Clip the gradients of this ``norm`` and step; whether that was possible."""
    for each in optimizer.chained_optimizers:
        if each.config.clip_grad > 0.0:
            clip_grads.clip_grad_by_total_norm_fp32(each.get_parameters(), each.config.clip_grad, norm)
    return optimizer.step_with_ready_grads()
