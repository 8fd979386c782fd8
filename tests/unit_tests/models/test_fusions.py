"""The fused kernels that a configuration selects."""

from __future__ import annotations

from typing import Any

import pytest

from megatron_cp.models.fusions import fused_loss, fuses_gradient_sum, fuses_rotary_embedding
from tests.training_runs import tiny_config

YARN = {"position_embedding_type": "yarn", "yarn_rotary_scaling_factor": 4.0}


def chosen(te_layers: bool, **model: Any) -> tuple[bool, bool, str | None]:
    config = tiny_config(**{f"model__{name}": value for name, value in model.items()})
    return (
        fuses_rotary_embedding(config.model, te_layers),
        fuses_gradient_sum(config.model, te_layers),
        fused_loss(config.model, te_layers),
    )


@pytest.mark.parametrize(
    ("model", "with_te_layers", "with_others"),
    [
        ({}, (True, True, "te"), (False, False, None)),
        ({"multi_latent_attention": True}, (False, True, "te"), (False, False, None)),
        (YARN, (False, True, "te"), (False, False, None)),
        (YARN | {"yarn_mscale": 0.0, "yarn_mscale_all_dim": 0.0}, (True, True, "te"), (False, False, None)),
        ({"position_embedding_type": "none"}, (False, True, "te"), (False, False, None)),
        ({"deterministic_mode": True}, (True, True, None), (False, False, None)),
        (
            {"apply_rope_fusion": False, "gradient_accumulation_fusion": False},
            (False, False, "te"),
            (False,) * 2 + (None,),
        ),
        ({"apply_rope_fusion": True}, (True, True, "te"), (True, False, None)),
        ({"cross_entropy_loss_fusion": True}, (True, True, "te"), (False, False, "native")),
        ({"cross_entropy_loss_fusion": False}, (True, True, None), (False, False, None)),
        ({"cross_entropy_fusion_impl": "native"}, (True, True, None), (False, False, None)),
        (
            {"cross_entropy_fusion_impl": "native", "cross_entropy_loss_fusion": True},
            (True, True, "native"),
            (False, False, "native"),
        ),
        (
            {"cross_entropy_fusion_impl": "te", "cross_entropy_loss_fusion": True},
            (True, True, "te"),
            (False, False, "te"),
        ),
    ],
    ids=str,
)
def test_kernels_by_layers(model: dict[str, Any], with_te_layers: tuple, with_others: tuple) -> None:
    assert chosen(True, **model) == with_te_layers
    assert chosen(False, **model) == with_others
