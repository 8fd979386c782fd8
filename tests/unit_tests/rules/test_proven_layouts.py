"""No false reject: layouts that training tests cover pass every rule.

They pass on GPUs too.
"""

import pytest

from megatron_cp.config.run_config import RunConfig
from megatron_cp.rules import check
from tests.packed_runs import lengths_file, packed_config
from tests.training_runs import tiny_config
from tests.unit_tests.training.layouts.cases import LAYOUTS
from tests.unit_tests.training.layouts.test_model_variants import CASES
from tests.unit_tests.training.packed.test_equivalence import CASES as PACKED


def errors(overrides: dict, ranks: int) -> list[str]:
    return errors_of(tiny_config(**overrides), ranks)


def errors_of(config: RunConfig, ranks: int) -> list[str]:
    found = [violation for name in ("cpu", "gpu") for violation in check(config, ranks, environment=name)]
    return [str(violation) for violation in found if violation.severity == "error"]


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


@pytest.mark.parametrize("name", PACKED)
def test_packs(name, tmp_path):
    ranks, model, layout = PACKED[name]
    assert errors_of(packed_config(lengths_file(tmp_path), model | layout), ranks) == []
