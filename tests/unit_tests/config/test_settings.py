"""Facts of a setting are stated only where it is declared.

Everything else is derived from the declaration.
"""

from __future__ import annotations

import ast
import math
from dataclasses import dataclass, field, fields

import pytest
from megatron.core.transformer.transformer_config import TransformerConfig

from megatron_cp.config import run_config
from megatron_cp.config.model_config import ModelConfig
from megatron_cp.config.names import NAME
from megatron_cp.config.run_config import RunConfig, settings
from megatron_cp.config.schema import build
from megatron_cp.config.setting import LAYOUT, Facts, equals, facts_of, given, setting
from megatron_cp.config.single_rank import on_single_rank
from megatron_cp.models.transformer_config import transformer_config
from megatron_cp.rules import RULES, Environment
from megatron_cp.rules.base import Context
from megatron_cp.rules.unused_settings import unused_settings
from scripts import write_settings
from tests import house


@dataclass
class OneMore(ModelConfig):
    config_logger_dir: str = setting("", "folder that megatron-core writes its configuration to", LAYOUT)
    moe_input_jitter_eps: float = setting(
        0.0, "noise of the router's input", least=0, when=given("model.mtp_num_layers", 1)
    )


@dataclass
class WithOneMore(RunConfig):
    model: OneMore = field(default_factory=OneMore)


@pytest.fixture
def one_more(monkeypatch: pytest.MonkeyPatch) -> type[RunConfig]:
    """Add two settings to the configuration, each of one line."""
    monkeypatch.setattr(run_config, "RunConfig", WithOneMore)
    settings.cache_clear()
    yield WithOneMore
    settings.cache_clear()


def test_one_line_adds_a_setting_that_is_passed_on(one_more: type[RunConfig]) -> None:
    problems: list = []
    config = build(one_more, {"model": {"config_logger_dir": "somewhere", "moe_input_jitter_eps": -1.0}}, problems)
    assert not problems
    config.finalize()
    built = transformer_config(config.model, config.mixed_precision)
    assert (built.config_logger_dir, built.moe_input_jitter_eps) == ("somewhere", -1.0)
    context = Context(config, 1, None, Environment.detect())
    for found in (
        unused_settings(config),
        RULES["K30"].check(context),
    ):  # the note that the setting is unused, and its range
        assert [each.field for each in found] == ["model.moe_input_jitter_eps"]
    assert on_single_rank(config).model.config_logger_dir == ""
    build(one_more, {"model": {"config_logger_dir": 3}}, problems)
    assert [each.field for each in problems] == ["model.config_logger_dir"]


def test_every_setting_is_declared_with_its_facts() -> None:
    for name, facts in settings().items():
        assert facts.help, name
        assert facts.allows(RunConfig().value_at(name)), name
    assert len(settings()) > 200


def test_translated_settings_exist_in_megatron_core() -> None:
    """Other settings are neither passed on nor translated, so no mark may say so."""
    for section, upstream in write_settings.UPSTREAM.items():
        known = {each.name for each in fields(upstream)}
        for name, facts in facts_of(type(getattr(RunConfig(), section))).items():
            assert not facts.translated or name in known | {"activation_func", "attention_backend", "fp32"}, name


def test_ranges() -> None:
    assert [Facts(kind="share", least=0, most=1).allows(value) for value in (0, 0.5, 1)] == [True, True, False]
    assert [Facts(kind="positive", least=0).allows(value) for value in (0, 1e-9, math.inf)] == [False, True, True]
    assert [Facts(least=1, most=3).allows(value) for value in (0, 1, 3, 4, None, True)] == [
        *(False, True, True, False),
        *(True, True),
    ]


def test_when_a_setting_is_read() -> None:
    config = RunConfig()
    when = equals("model.position_embedding_type", "rope", "yarn")
    assert (when.switch, when.turn_on) == (
        "model.position_embedding_type=rope or yarn",
        "model.position_embedding_type=rope",
    )
    assert when.holds(config) and not given("model.num_moe_experts", 8).holds(config)


def test_names_are_those_of_settings() -> None:
    assert NAME.model.num_layers == "model.num_layers"
    used = 0
    for path in house.modules().values():
        for node in ast.walk(house.tree(path)):
            match node:
                case ast.Attribute(value=ast.Attribute(value=ast.Name(id="NAME"), attr=section), attr=name):
                    used += 1
                    assert f"{section}.{name}" in settings(), f"{path}: {section}.{name}"
    assert used > 500


def test_the_reference_is_current() -> None:
    assert write_settings.PATH.read_text(encoding="utf-8") == write_settings.document()


def test_megatron_cores_own_field_is_what_is_passed_on() -> None:
    """The two settings of the test above are fields that nothing here declares."""
    known = {each.name for each in fields(TransformerConfig)}
    assert {each.name for each in fields(OneMore)} - {each.name for each in fields(ModelConfig)} <= known
