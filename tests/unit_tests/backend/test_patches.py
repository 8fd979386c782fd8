"""Repairs of megatron-core that no test of training shows by itself."""

import pytest
import torch

from tests.ranks import run_ranks


def norms(elements: int) -> tuple[float, float]:
    """megatron-core's norm of a gradient, and the truth."""
    from megatron.core.optimizer.clip_grads import get_grad_norm_fp32

    gradient = torch.randn(elements, generator=torch.Generator().manual_seed(1))
    parts = [gradient[:7], gradient[7 : elements // 2], gradient[elements // 2 :]]
    return get_grad_norm_fp32(parts), gradient.double().norm().item()


@pytest.mark.parametrize("elements", [15, 5000, 20_000_000])
def test_gradient_norms_are_exact(elements: int) -> None:
    [(norm, truth)] = run_ranks(norms, 1, elements)
    assert norm == pytest.approx(truth, rel=1e-7)
