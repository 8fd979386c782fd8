"""What a family's tensors are called on either side, and how the one side's are made of the other's.

megatron-core keeps the query, key and value projections in one matrix, the rows of each group of heads together (its
queries', then its key's, then its value's), and the two halves of a gated MLP's first matrix, gate first.
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
# Of any model: rounded, another expert would be chosen.
KEPT_IN_FLOAT32 = "gate.e_score_correction_bias"
_LAYER = re.compile(r"decoder\.layers\.(\d+)\.(.+)")
_EXPERT = re.compile(r"(?<=\.local_experts\.)\d+")
# Published files may hold them, and nothing is lost without: computed, or the embedding once more.
_SPARE = re.compile(r"rotary_emb\.inv_freq$")

# Query, key and value projections by group of heads; two halves, one after the other, or as pairs of columns.
How = Literal["same", "stacked", "by group", "paired", "transposed"]


@dataclass(frozen=True)
class WeightMapping:
    """The published tensors of which one of megatron-core's parameters is made, in order, and how.

    expert: the expert's number, where a published tensor is of all experts and the parameter is made of its slice.
    """

    published: tuple[str, ...]
    how: How
    expert: int | None = None

    def join(self, tensors: list[Tensor], model: ModelConfig) -> Tensor:
        """The parameter, from the published tensors or their slices."""
        if self.how == "paired":
            return torch.cat([tensors[0].t()[start::2] for start in range(2)])
        if self.how == "transposed":
            return tensors[0].t()
        if self.how == "by group":
            return torch.cat([t.reshape(model.kv_heads, -1, *t.shape[1:]) for t in tensors], dim=1).flatten(0, 1)
        return torch.cat(tensors) if self.how == "stacked" else tensors[0]

    def split(self, parameter: Tensor, model: ModelConfig) -> list[Tensor]:
        """The published tensors or their slices, from the parameter; what :meth:`join` undoes."""
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
    """The published names of a family's tensors, by megatron-core's names for the parameters.

    layers: what stands before the number of a layer.
    outside, in_a_layer: without and with a layer's prefix; ``{}`` is an expert's number. Several tensors make up one
        parameter: query, key and value projections, or the halves of a gated MLP's first matrix. A published name
        without ``{}`` is of all experts: their transposed matrices, with gate and up projection as pairs of columns.
    """

    layers: str
    outside: Mapping[str, str]
    in_a_layer: Mapping[str, tuple[str, ...]]

    def and_in_a_layer(self, further: Mapping[str, tuple[str, ...]]) -> WeightNames:
        return WeightNames(self.layers, self.outside, {**self.in_a_layer, **further})

    def mapping_of(self, name: str) -> WeightMapping:
        """What makes up the parameter that a whole, undivided model calls ``name``."""
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
        """Whether a published tensor may be left where it is."""
        tied = model.share_embeddings_and_output_weights and published == self.outside[OUTPUT]
        return tied or _SPARE.search(published) is not None


def multi_token_prediction(names: set[str]) -> set[str]:
    """Of published tensors those of layers for multi-token prediction, after the last layer or apart from all."""
    marks = re.compile(r"(model\.layers\.\d+\.)eh_proj\.weight")
    prefixes = tuple(found[1] for found in map(marks.fullmatch, names) if found)
    return {name for name in names if name.startswith((*prefixes, "mtp."))}
