"""Index tables of a layout are copied to the device once for all layers."""

import numpy as np
import pytest
import torch

from megatron_cp.attention import tables
from megatron_cp.attention.sharding import Layout, regroup_order
from megatron_cp.attention.tables import regroup_rows
from megatron_cp.models.layers.mamba.exchange import sequences_of


@pytest.fixture
def sent(monkeypatch: pytest.MonkeyPatch) -> list[np.ndarray]:
    """Record the tables that go to the device from now on."""
    seen: list[np.ndarray] = []
    really = tables.on_device

    def on_device(table: np.ndarray, device: torch.device) -> torch.Tensor:
        seen.append(table)
        return really(table, device)

    monkeypatch.setattr(tables, "on_device", on_device)
    monkeypatch.setattr("megatron_cp.models.layers.mamba.exchange.on_device", on_device)
    tables._regroup_index.cache_clear()
    sequences_of.cache_clear()
    return seen


@pytest.mark.parametrize(("size", "group"), [(2, 2), (4, 2), (6, 3), (8, 4), (4, 1)])
def test_rows_are_regrouped_and_brought_back(size: int, group: int) -> None:
    layout = Layout((3, 2 * size, 5 * size), (2 * size, 2 * size, 6 * size), size)
    order = torch.from_numpy(regroup_order(layout, group).copy())
    x = torch.randn(len(order), 2, dtype=torch.float64, requires_grad=True)
    there = regroup_rows(x, layout, group)
    assert torch.equal(there, x[order])
    assert torch.equal(regroup_rows(there, layout, group, inverse=True), x)
    weights = torch.randn_like(there)
    (gradient,) = torch.autograd.grad(there, x, weights)
    assert torch.equal(gradient[order], weights)


def test_layers_share_copied_tables(sent: list[np.ndarray]) -> None:
    layout, x = Layout((5, 8), (8, 16), 4), torch.randn(24, 1)
    with torch.inference_mode():  # as an evaluation might
        regroup_rows(x, layout, 4)
    for _layer in range(3):
        there = regroup_rows(x.requires_grad_(), layout, 4)
        regroup_rows(there, layout, 4, inverse=True).sum().backward()
        sequences_of(layout, x.device)
    assert len(sent) == 4, "the order, its inverse, the sequences' numbers and the padding"


def test_few_layouts_are_kept(sent: list[np.ndarray]) -> None:
    for length in range(1, 4 * tables.KEPT):
        layout = Layout((length, 8), (4 * tables.KEPT, 8), 2)
        regroup_rows(torch.zeros(4 * tables.KEPT + 8), layout, 2)
        sequences_of(layout, torch.device("cpu"))
    for kept in (tables._regroup_index, sequences_of, regroup_order):
        assert kept.cache_info().currsize <= tables.KEPT
