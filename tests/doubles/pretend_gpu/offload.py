"""Offload layer inputs as on a GPU: copies and waits, lifetimes, and bytes.

The order of copies and waits is checked. The bytes are those on the device.
``tests/unit_tests/doubles/test_pretend_gpu.py`` runs this file in a process with a pretended GPU. The stand-in for the
copying stream copies as late as a GPU may: not before the computing stream waits for it.
"""

from __future__ import annotations

import weakref
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, NamedTuple

import pytest
import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode

from megatron_cp.training.setup import Run
from megatron_cp.training.step import train_step
from tests.doubles.pretend_gpu import placement
from tests.live_memory import LiveMemory
from tests.ranks import run_ranks
from tests.training_runs import losses_of, start, tiny_config
from tests.unit_tests.models.layers.test_recomputed_layers import FULL, OFFLOAD
from tests.unit_tests.training.layouts.cases import PP2, VPP2

pytestmark = pytest.mark.gpu  # chosen with those of other files
BF16 = {"mixed_precision__fp32": False, "mixed_precision__bf16": True}
ALONE = FULL | BF16 | {"train__global_batch_size": 1}


class Copy(NamedTuple):
    to: Tensor
    values: Tensor
    source: weakref.ref  # its storage


class LateStream(TorchFunctionMode):
    """A stream whose copies run when another stream waits for an event behind them.

    Until then a destination holds no numbers. A source that is freed before is a fault.
    """

    def __init__(self, log: Callable[[str], None]) -> None:
        super().__init__()
        self._log, self._queue, self._begun, self._done, self._ordered = log, deque[Copy](), 0, 0, False

    def wait_stream(self, stream: Any) -> None:
        self._ordered = True

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is not Tensor.copy_:
            return func(*args, **(kwargs or {}))
        to, source = args
        assert self._ordered and kwargs == {"non_blocking": True}, "not ordered behind the computing stream"
        assert (to if source.is_cuda else source).is_pinned()
        self._log("out" if source.is_cuda else "back")
        self._run_copies(self._begun if not source.is_cuda else self._done)  # one stream: earlier copies end before
        self._queue.append(Copy(to, source.clone(), weakref.ref(source.untyped_storage())))
        if to.is_cuda:
            to.fill_(torch.nan)
        self._begun, self._ordered = self._begun + 1, False
        return to

    def record_event(self) -> int:
        return self._begun

    def wait_event(self, event: int) -> None:
        """Record a wait of the computing stream."""
        self._log("wait")
        self._run_copies(event)

    def _run_copies(self, event: int) -> None:
        while self._done < event:
            copy = self._queue.popleft()
            assert copy.source() is not None, "the source was freed before it was copied"
            with torch._C.DisableTorchFunction():
                copy.to.copy_(copy.values)
            self._done += 1


@contextmanager
def late_copies(run: Run, log: Callable[[str], None]) -> Iterator[None]:
    late, usual, computing = LateStream(log), torch.cuda.stream, torch.cuda.current_stream()
    run.host_memory.__dict__["_stream"] = late
    torch.cuda.stream = lambda stream: stream if stream is late else usual(stream)  # type: ignore[assignment]
    computing.wait_event = late.wait_event  # type: ignore[method-assign]
    yield
    torch.cuda.stream = usual  # type: ignore[misc]


def order_of_a_step(overrides: dict[str, Any]) -> list[str]:
    run, batches = start(tiny_config(**overrides))
    found: list[str] = []
    for number, layer in enumerate(run.model[0].module.module.decoder.layers):

        def runs(*_: Any, number: int = number) -> None:
            found.append(f"{'backward' if torch.is_grad_enabled() else 'forward'} {number}")

        layer.register_forward_pre_hook(runs)
    with late_copies(run, found.append):
        train_step(run, next(batches).microbatches)
    run.close()
    return found


def test_inputs_leave_behind_their_layer_and_return_one_layer_ahead() -> None:
    [found] = run_ranks(order_of_a_step, 1, ALONE | OFFLOAD)
    forward = "forward 0, out, forward 1, wait, out, forward 2, wait, out, forward 3, wait"
    # The last layer's input has stayed. Each wait is for the copy that the layer before has started.
    backward = "back, backward 3, wait, back, backward 2, wait, back, backward 1, wait, backward 0"
    assert ", ".join(found) == f"{forward}, {backward}"


def losses(overrides: dict[str, Any], late: bool) -> list[tuple[float, ...]]:
    run, batches = start(tiny_config(**overrides))
    found = []
    for _ in range(2):
        if late:
            with late_copies(run, lambda what: None):
                found.append(losses_of(train_step(run, next(batches).microbatches)))
            assert run.host_memory is not None and run.host_memory.bytes == 0
        else:
            found.append(losses_of(train_step(run, next(batches).microbatches)))
    run.close()
    return found


@pytest.mark.parametrize(
    ("ranks", "layout"),
    [pytest.param(1, {}, marks=pytest.mark.slow), (2, PP2 | VPP2 | {"model__num_layers": 8})],
    ids=["one rank", "interleaved stages"],
)
def test_late_copies_give_the_same_bits(ranks: int, layout: dict[str, Any]) -> None:
    overrides = FULL | BF16 | layout
    assert run_ranks(losses, ranks, overrides | OFFLOAD, True) == run_ranks(losses, ranks, overrides, False)


class DeviceMemory(LiveMemory):
    """Counts what is on the device."""

    def _see(self, tensor: Tensor, made_by: Any) -> None:
        if placement.place_of(tensor) != placement.HOST:
            super()._see(tensor, made_by)


def peak(overrides: dict[str, Any]) -> int:
    """Return the most bytes on the device in the layers' passes, without weights."""
    run, batches = start(tiny_config(**overrides))
    train_step(run, next(batches).microbatches)
    microbatches = next(batches).microbatches
    with DeviceMemory(run) as memory:
        train_step(run, microbatches)
    run.close()
    states = ("weights", "gradients", "optimizer")
    passes = [each for module, each in memory.peaks.items() if ".layers." in module]
    return max(sum(size for kind, size in each.items() if kind not in states) for each in passes)


def test_device_bytes_do_not_grow_with_the_layers() -> None:
    tokens = 128
    of_input = tokens * 64 * 2  # hidden size, bf16
    sizes = ALONE | {"dataset__seq_length": tokens}
    few, many = ({"model__num_layers": layers} for layers in (4, 8))
    [[kept_few], [kept_many], [sent_few], [sent_many]] = [
        run_ranks(peak, 1, sizes | layers | more) for more in ({}, OFFLOAD) for layers in (few, many)
    ]
    assert kept_many - kept_few == pytest.approx(4 * of_input, rel=0.05)
    assert sent_many - sent_few <= 0.1 * 4 * of_input
    assert sent_few < kept_few
