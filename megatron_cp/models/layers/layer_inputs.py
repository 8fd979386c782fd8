"""Keep recomputed layers' inputs on the host (``offload_layer_inputs``).

With whole-layer recomputation a layer, or a group of layers, saves its input and nothing else that grows with the
layers. The input leaves for the host while the next layer computes. In the backward pass it returns while the layer
after it computes.
"""

from __future__ import annotations

from typing import Any

from megatron.core import tensor_parallel
from torch import Tensor
from torch.autograd.graph import saved_tensors_hooks

from megatron_cp.mcore.private_names import recomputing_layers_with
from megatron_cp.parallel.host_memory import HostMemory, KeptTensor


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
                return tensor_parallel.checkpoint(function, distribute, hidden_states, *others)
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
