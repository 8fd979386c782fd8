"""Only the user sets the variables by which Transformer Engine chooses a kernel."""

from __future__ import annotations

import os
from typing import Any

import pytest

from tests.ranks import run_ranks
from tests.training_runs import start, tiny_config
from tests.unit_tests.models.hybrids import HYBRID

VARIABLES = ("NVTE_FLASH_ATTN", "NVTE_FUSED_ATTN", "NVTE_UNFUSED_ATTN")


def after_building(overrides: dict[str, Any]) -> list[str | None]:
    run, _ = start(tiny_config(**overrides, model__attention_backend="native"))
    run.close()
    return [os.environ.get(name) for name in VARIABLES]


@pytest.mark.parametrize("model", [{}, HYBRID], ids=["gpt", "hybrid"])
@pytest.mark.parametrize("values", [[None, "0", None], ["0", "1", "0"]], ids=str)
def test_a_disabled_kernel_stays_off_and_models_build(
    values: list[str | None], model: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    for name, value in zip(VARIABLES, values, strict=True):
        if value is None:
            monkeypatch.delenv(name, raising=False)
        else:
            monkeypatch.setenv(name, value)
    assert run_ranks(after_building, 1, model) == [values]
