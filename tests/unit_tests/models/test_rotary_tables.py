"""All layers of latent attention use one rotary embedding, and so one table."""

import torch

from tests.random_layouts import LATENT
from tests.ranks import run_ranks
from tests.training_runs import start, tiny_config


def embeddings() -> int:
    """Return how many rotary embeddings the layers of a model have."""
    run, _ = start(tiny_config(**LATENT, model__num_layers=3))
    found = [getattr(module, "rotary_pos_emb", None) for chunk in run.model for module in chunk.modules()]
    layers = [each for each in found if isinstance(each, torch.nn.Module)]
    run.close()
    assert len(layers) == 3
    return len(set(map(id, layers)))


def test_layers_of_latent_attention_share_a_rotary_embedding() -> None:
    assert run_ranks(embeddings, 1) == [1]
