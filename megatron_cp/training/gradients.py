"""A step's gradients: made ready and measured while the device still computes them, and applied once they are known.

megatron-core's ``optimizer.step()`` does both, and the host waits for the norm in between; whether all gradients are
finite would be one more reading of them, and one more wait. Here the norm tells both, and is read with the losses.
"""

from __future__ import annotations

import torch
import torch.distributed as dist
from megatron.core.optimizer import MegatronOptimizer, clip_grads
from torch import Tensor

from megatron_cp.training.setup import Run


@torch.no_grad()
def measure_gradients(run: Run) -> Tensor:
    """The norm of all gradients, and 1 where one of this rank's may not be finite, else 0: [2], on the device.

    Makes the gradients ready for :func:`apply_gradients`. Collective. Those that are large are suspected, too: their
    squares overflow. The norm leaves out what a rank has copies of; for a fault of its own these are looked at as well.
    """
    run.optimizer.prepare_grads()
    square = torch.zeros(1, dtype=torch.float64, device=run.device)
    copies: list[Tensor] = []
    for optimizer in run.optimizer.chained_optimizers:  # that of experts sums over other ranks
        counted = optimizer.get_grads_for_grad_norm()
        part = _norm(counted, run.device) ** 2
        dist.all_reduce(part, group=optimizer.get_grad_stats_parallel_group())
        square += part
        seen = set(map(id, counted))
        grads = [parameter.grad for parameter in optimizer.get_parameters()]
        copies += [grad for grad in grads if grad is not None and id(grad) not in seen]
    norm = square.sqrt()
    finite = torch.isfinite(norm + torch.nn.utils.get_total_norm(copies))
    return torch.cat([norm, (~finite).double()])


def _norm(grads: list[Tensor], device: torch.device) -> Tensor:
    if not grads:
        return torch.zeros(1, dtype=torch.float64, device=device)
    overflow = torch.zeros(1, dtype=torch.int, device=device)
    norm, _ = clip_grads.multi_tensor_applier(clip_grads.l2_norm_impl, overflow, [grads], False)
    return norm.double()


@torch.no_grad()
def apply_gradients(optimizer: MegatronOptimizer, norm: float) -> bool:
    """Clip the gradients of this ``norm`` and step; whether that was possible."""
    for each in optimizer.chained_optimizers:
        if each.config.clip_grad > 0.0:
            clip_grads.clip_grad_by_total_norm_fp32(each.get_parameters(), each.config.clip_grad, norm)
    return optimizer.step_with_ready_grads()
