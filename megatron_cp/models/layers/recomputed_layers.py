"""Hold less of recomputed layers.

With whole-layer recomputation a layer, or a group of layers, saves its input and nothing else that grows with the
layers. In its backward pass megatron-core holds what it computed again, and the gradient that the pass began with, to
the end: :func:`free_outputs` frees both. With ``offload_layer_inputs`` the input leaves for the host while the next
layer computes. In the backward pass it returns while the layer after it computes.
"""

from __future__ import annotations

from functools import partial
from typing import Any

import torch
from megatron.core import tensor_parallel
from torch import Tensor
from torch.autograd.graph import saved_tensors_hooks

from megatron_cp.attention.once_differentiable import once_differentiable
from megatron_cp.mcore.private_names import in_backward_pass, recomputing_layers_with
from megatron_cp.parallel.host_memory import HostMemory, KeptTensor


def free_outputs(block: Any) -> None:
    """Free outputs of a block's recomputed layers, and their gradients, once used."""
    forward = block.forward

    def run(*args: Any, **kwargs: Any) -> Any:
        with recomputing_layers_with(_checkpoint):
            return forward(*args, **kwargs)

    block.forward = run


def _checkpoint(function: Any, distribute: bool, *tensors: Any) -> Any:
    return tensor_parallel.checkpoint(partial(_with_ending, function), distribute, *tensors)


def _with_ending(function: Any, *tensors: Any) -> tuple[Tensor, Any]:
    hidden_states, context = function(*tensors)
    return (_Ending.apply(hidden_states) if in_backward_pass() else hidden_states), context


class _Ending(torch.autograd.Function):
    """The end of a recomputed forward pass, where the backward pass begins.

    Autograd needs the shape of an output, not its values. And it passes a gradient on, but its callers hold the same
    tensor: that is left without memory. No other node may be given it: the output is read in one place, or its gradient
    is a sum or a view, which are tensors of their own.
    """

    @staticmethod
    def forward(ctx: Any, output: Tensor) -> Tensor:
        return _without_memory(output)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor]:
        (held,) = gradients
        gradient = held.detach()
        held.data = _without_memory(held)
        return (gradient,)


def _without_memory(tensor: Tensor) -> Tensor:
    """Return a tensor of the same shape, of one element."""
    return tensor.new_empty(1).expand(tensor.shape)


class OffloadedInputs:
    """A block of layers whose recomputed layers keep their inputs on the host.

    Two inputs stay on the device. The pipeline schedule holds what another stage has sent, so a copy would free
    nothing. And the model's last layer is the first of the backward pass.

    Args:
        block: megatron-core's block of layers.
        received: another pipeline stage sends the first layer's input.
        ends_model: the loss follows the block.
    """

    def __init__(self, block: Any, host: HostMemory, received: bool, ends_model: bool) -> None:
        self._forward, self._host = block.forward, host
        config, layers = block.config, len(block.layers)
        uniform = config.recompute_method == "uniform"
        groups = -(-layers // config.recompute_num_layers) if uniform else min(layers, config.recompute_num_layers)
        self._staying = {0} if received else set()
        if ends_model and (uniform or groups == layers):
            self._staying.add(groups - 1)
        self._number = 0  # of the next layer or group
        self._input: Tensor | None = None  # of the layer or group that runs
        self._latest: KeptTensor | None = None  # of the microbatch that runs
        block.forward = self.forward

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """Run the block on a microbatch; its backward pass reads the inputs in reverse."""
        self._number = 0
        with recomputing_layers_with(self._checkpoint):
            try:
                return self._forward(*args, **kwargs)
            finally:
                self._latest = None

    def _checkpoint(self, function: Any, distribute: bool, hidden_states: Tensor, *others: Any) -> Any:
        """Run megatron-core's checkpoint; of what it saves, only the hidden states leave."""
        self._input = hidden_states
        try:
            with saved_tensors_hooks(self._pack, self._unpack):
                return _checkpoint(function, distribute, hidden_states, *others)
        finally:
            self._input = None  # the hooks live as long as what they pack

    def _pack(self, saved: Tensor) -> Tensor | KeptTensor:
        if saved is not self._input:
            return saved  # positions and masks, which all layers share
        keep = self._host.keep if self._number in self._staying else self._host.send
        self._latest = keep(saved, self._latest)
        self._number += 1
        return self._latest

    def _unpack(self, packed: Tensor | KeptTensor) -> Tensor:
        return self._host.take(packed) if isinstance(packed, KeptTensor) else packed
