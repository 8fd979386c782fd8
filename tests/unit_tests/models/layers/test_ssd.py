"""The chunked scan equals the recurrence that it computes.

It is tested in float64, with odd lengths, packs and gradients.
"""

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from megatron_cp.models.layers.mamba.ssd import causal_conv, conv_and_scan, ssd_scan


def recurrence(x: Tensor, dt: Tensor, a: Tensor, b: Tensor, c: Tensor, seq_idx: Tensor | None = None) -> Tensor:
    """Compute token by token, from the definition."""
    repeats = x.shape[2] // b.shape[2]
    b, c = (t.repeat_interleave(repeats, dim=2) for t in (b, c))
    state = x.new_zeros(*x.shape[:1], *x.shape[2:], b.shape[-1])
    outputs = []
    for t in range(x.shape[1]):
        if seq_idx is not None and t:
            state = state * (seq_idx[:, t] == seq_idx[:, t - 1])[:, None, None, None]
        decay = (dt[:, t] * a).exp()
        state = decay[..., None, None] * state + torch.einsum("bh,bhp,bhn->bhpn", dt[:, t], x[:, t], b[:, t])
        outputs.append(torch.einsum("bhpn,bhn->bhp", state, c[:, t]))
    return torch.stack(outputs, dim=1)


def inputs(length: int, dtype: torch.dtype = torch.float64, heads: int = 4, groups: int = 2) -> list[Tensor]:
    generator = torch.Generator().manual_seed(length)

    def draw(*shape: int) -> Tensor:
        return torch.randn(*shape, generator=generator, dtype=torch.float64).to(dtype)

    dt, a = draw(2, length, heads).abs(), -draw(heads).abs() * 8  # from hardly any decay to next to everything
    return [draw(2, length, heads, 3), dt, a, draw(2, length, groups, 5), draw(2, length, groups, 5)]


def sequences(*lengths: int) -> Tensor:
    """Return sequence indices [2, l]: the lengths in order, and in reverse order."""
    rows = [torch.arange(len(each)).repeat_interleave(torch.tensor(each)) for each in (lengths, lengths[::-1])]
    return torch.stack(rows).int()


LENGTHS = [1, 2, 7, 8, 9, 16, 31, 64]
PACKS = {
    "ones": (1,) * 9,
    "within a chunk": (3, 2, 1),
    "on the edges": (8, 8, 16),
    "across": (5, 20, 1, 13),
    "one": (19,),
}


@pytest.mark.parametrize("length", LENGTHS)
def test_scan_is_the_recurrence(length: int) -> None:
    torch.testing.assert_close(
        ssd_scan(*inputs(length), chunk_size=8), recurrence(*inputs(length)), rtol=1e-12, atol=1e-12
    )


@pytest.mark.parametrize("name", PACKS)
def test_state_is_reset_at_each_sequence(name: str) -> None:
    seq_idx = sequences(*PACKS[name])
    values = inputs(seq_idx.shape[1])
    packed = ssd_scan(*values, seq_idx=seq_idx, chunk_size=8)
    torch.testing.assert_close(packed, recurrence(*values, seq_idx), rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("seq_idx", [None, sequences(3, 4, 6)], ids=["one sequence", "pack"])
def test_gradients_are_the_recurrences(seq_idx: Tensor | None) -> None:
    ours, exact = ([x.requires_grad_() for x in inputs(13)] for _ in range(2))
    got = ssd_scan(*ours, seq_idx=seq_idx, chunk_size=4)
    want = recurrence(*exact, seq_idx)
    dout = torch.randn(got.shape, generator=torch.Generator().manual_seed(0), dtype=got.dtype)
    for x, y in zip(torch.autograd.grad(got, ours, dout), torch.autograd.grad(want, exact, dout), strict=True):
        torch.testing.assert_close(x, y, rtol=1e-11, atol=1e-12)


def test_gradcheck() -> None:
    seq_idx = torch.tensor([[0, 0, 0, 1, 1]])
    values = [x[:1].requires_grad_() if x.ndim > 1 else x.requires_grad_() for x in inputs(5, heads=2)]
    assert torch.autograd.gradcheck(lambda *args: ssd_scan(*args, seq_idx=seq_idx, chunk_size=2), values)


def test_chunk_size_does_not_matter_in_float32() -> None:
    """With a long decay small differences of large sums count.

    Sums of exponents reach hundreds within a chunk.
    """
    x, dt, a, b, c = inputs(100, torch.float32)
    want = recurrence(*(t.double() for t in (x, dt, a, b, c)))
    for size in (16, 64, 128):
        got = ssd_scan(x, dt, a, b, c, chunk_size=size)
        assert got.dtype == torch.float32
        assert float((got - want).abs().max() / want.abs().max()) < 1e-6


def test_strong_decay_gives_finite_gradients() -> None:
    x, dt, a, b, c = (t.requires_grad_() for t in inputs(64, torch.float32))
    grads = torch.autograd.grad(ssd_scan(x, dt * 100, a, b, c).sum(), (x, dt, a, b, c))
    assert all(torch.isfinite(grad).all() for grad in grads)


@pytest.mark.parametrize("length", [1, 2, 3, 4, 11])
def test_convolution_is_torchs(length: int) -> None:
    x, weight, bias = (torch.randn(*shape, dtype=torch.float64) for shape in ((2, length, 6), (6, 4), (6,)))
    want = F.conv1d(F.pad(x.mT, (3, 0)), weight[:, None], bias, groups=6).mT
    torch.testing.assert_close(causal_conv(x, weight, bias), want)


def layer_inputs(length: int, dtype: torch.dtype = torch.float64) -> tuple[list[Tensor], dict[str, Any]]:
    heads, groups, head_dim, state = 4, 2, 3, 5
    inner, convolved = heads * head_dim, heads * head_dim + 2 * groups * state
    generator = torch.Generator().manual_seed(length)
    shapes = [(1, length, inner + convolved + heads), (convolved, 4), (convolved,), (heads,), (heads,), (heads,)]
    values = [torch.randn(*shape, generator=generator, dtype=torch.float64).to(dtype) for shape in shapes]
    values[4] = -values[4].abs()
    return values, {"head_dim": head_dim, "groups": groups}


def test_a_pack_is_its_sequences_one_by_one() -> None:
    lengths = (1, 70, 3, 64, 9)
    (x, *weights), sizes = layer_inputs(sum(lengths))
    seq_idx = sequences(*lengths)[:1]
    packed = conv_and_scan(x, *weights, **sizes, seq_idx=seq_idx)
    alone = [conv_and_scan(part, *weights, **sizes) for part in x.split(list(lengths), dim=1)]
    torch.testing.assert_close(packed, torch.cat(alone, dim=1), rtol=1e-12, atol=1e-12)


def test_later_sequences_do_not_reach_earlier_ones_nor_the_other_way_round() -> None:
    (x, *weights), sizes = layer_inputs(20)
    seq_idx = sequences(7, 6, 7)[:1]
    changed = x.clone()
    changed[:, 7:13] += 1
    before, after = (conv_and_scan(t, *weights, **sizes, seq_idx=seq_idx) for t in (x, changed))
    assert torch.equal(before[:, :7], after[:, :7])
    # The chunk's sum of exponents continues over a sequence's start, so its rounding differs.
    torch.testing.assert_close(before[:, 13:], after[:, 13:], rtol=1e-13, atol=1e-13)
    assert not torch.allclose(before[:, 7:13], after[:, 7:13], rtol=1e-3)


def test_bf16_is_computed_in_float32() -> None:
    (x, *weights), sizes = layer_inputs(40, torch.bfloat16)
    out = conv_and_scan(x, *weights, **sizes)
    want = conv_and_scan(x.float(), *(w.float() for w in weights), **sizes)
    assert out.dtype == torch.bfloat16 and torch.equal(out, want.bfloat16())
