"""Tensor names of a family on both sides, and conversion of tensors.

megatron-core keeps query, key and value projections in one matrix, by query group: rows of the queries, of the key, of
the value. A gated MLP's first matrix has two halves, the gate first.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor

from megatron_cp.config.run_config import ModelConfig

EMBEDDING, OUTPUT = "embedding.word_embeddings.weight", "output_layer.weight"
# In any dtype of the model: rounding would choose other experts.
KEPT_IN_FLOAT32 = "gate.e_score_correction_bias"
_LAYER = re.compile(r"decoder\.layers\.(\d+)\.(.+)")
_EXPERT = re.compile(r"(?<=\.local_experts\.)\d+")
# Published tensors that may be ignored: computed, or a copy of the embedding.
_SPARE = re.compile(r"rotary_emb\.inv_freq$")

# by group: query, key and value rows by query group; stacked: one half after the other; paired: pairs of columns.
How = Literal["same", "stacked", "by group", "paired", "transposed"]


@dataclass(frozen=True)
class WeightMapping:
    """Published tensors of one parameter, in order, and how to join them.

    expert: the expert's index, if a published tensor holds all experts and the parameter is a slice.
    """

    published: tuple[str, ...]
    how: How
    expert: int | None = None

    def join(self, tensors: list[Tensor], model: ModelConfig) -> Tensor:
        """Return the parameter from published tensors or slices of them."""
        if self.how == "paired":
            return torch.cat([tensors[0].t()[start::2] for start in range(2)])
        if self.how == "transposed":
            return tensors[0].t()
        if self.how == "by group":
            return torch.cat([t.reshape(model.kv_heads, -1, *t.shape[1:]) for t in tensors], dim=1).flatten(0, 1)
        return torch.cat(tensors) if self.how == "stacked" else tensors[0]

    def split(self, parameter: Tensor, model: ModelConfig) -> list[Tensor]:
        """Return the published tensors, or slices of them; inverse of :meth:`join`."""
        if self.how == "paired":
            return [torch.stack(parameter.chunk(2), dim=1).flatten(0, 1).t()]
        if self.how == "transposed":
            return [parameter.t()]
        if self.how == "by group":
            by_group = parameter.reshape(model.kv_heads, -1, *parameter.shape[1:])
            head = by_group.shape[1] // (model.num_attention_heads // model.kv_heads + 2)
            return [t.flatten(0, 1) for t in by_group.split([by_group.shape[1] - 2 * head, head, head], dim=1)]
        return list(parameter.chunk(2)) if self.how == "stacked" else [parameter]


@dataclass(frozen=True)
class WeightNames:
    """Published names of a family's tensors, by megatron-core's parameter names.

    layers: prefix before the layer's number.
    outside, in_a_layer: names without and with a layer's prefix; ``{}`` is the expert's number. Several tensors make up
        one parameter: query, key and value projections, or the halves of a gated MLP's first matrix. A published name
        without ``{}`` holds all experts: transposed matrices, with gate and up projection as pairs of columns.
    """

    layers: str
    outside: Mapping[str, str]
    in_a_layer: Mapping[str, tuple[str, ...]]

    def with_layer_names(self, further: Mapping[str, tuple[str, ...]]) -> WeightNames:
        return WeightNames(self.layers, self.outside, {**self.in_a_layer, **further})

    def mapping_of(self, name: str) -> WeightMapping:
        """Return the mapping of a parameter, by its name in an unsharded model."""
        if name in self.outside:
            return WeightMapping((self.outside[name],), "same")
        layer = _LAYER.fullmatch(name)
        assert layer, name
        expert = _EXPERT.search(layer[2])
        published = self.in_a_layer[_EXPERT.sub("{}", layer[2])]
        of_all = expert is not None and "{}" not in published[0]
        how: How = "same"
        if len(published) > 1:
            how = "by group" if "linear_qkv" in name else "stacked"
        elif of_all:
            how = "paired" if "linear_fc1" in name else "transposed"
        numbered = (inner.format(expert[0]) if expert else inner for inner in published)
        names = tuple(f"{self.layers}.{layer[1]}.{inner}" for inner in numbered)
        return WeightMapping(names, how, int(expert[0]) if expert and of_all else None)

    def is_spare(self, published: str, model: ModelConfig) -> bool:
        """Return whether a published tensor may be ignored."""
        tied = model.share_embeddings_and_output_weights and published == self.outside[OUTPUT]
        return tied or _SPARE.search(published) is not None


def multi_token_prediction(names: set[str]) -> set[str]:
    """Select published tensors of multi-token prediction."""
    marks = re.compile(r"(model\.layers\.\d+\.)eh_proj\.weight")
    prefixes = tuple(found[1] for found in map(marks.fullmatch, names) if found)
    return {name for name in names if name.startswith((*prefixes, "mtp."))}
