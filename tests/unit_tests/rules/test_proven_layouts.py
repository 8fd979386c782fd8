"""No false reject: what the training tests prove to train like one rank keeps every rule."""

import pytest

from megatron_cp.rules import check
from tests.training_runs import tiny_config
from tests.unit_tests.training.layouts import LAYOUTS
from tests.unit_tests.training.test_model_variants import CASES


def errors(overrides: dict, ranks: int) -> list[str]:
    return [str(v) for v in check(tiny_config(**overrides), ranks, environment="cpu") if v.severity == "error"]


@pytest.mark.parametrize("name", LAYOUTS)
@pytest.mark.parametrize("decentralized", [False, True], ids=["mpu", "decentralized"])
def test_layouts(name, decentralized):
    ranks, overrides = LAYOUTS[name]
    assert errors(overrides | {"dist__use_decentralized_pg": decentralized}, ranks) == []


@pytest.mark.parametrize("name", CASES)
def test_model_variants(name):
    model, ranks, layout = CASES[name]
    assert errors(model | layout, ranks) == []
    assert errors(model, 1) == []
