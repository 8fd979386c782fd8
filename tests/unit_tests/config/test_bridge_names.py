"""Names of Megatron-Bridge are accepted or explained.

Settings without effect are accepted. All others are explained.
"""

from __future__ import annotations

import re
from dataclasses import asdict
from pathlib import Path
from typing import Any

import pytest
import yaml

from megatron_cp.common.errors import ConfigError, format_violations
from megatron_cp.config import schema
from megatron_cp.config.bridge_names import _BACKENDS, names, settle
from megatron_cp.config.recipes import load_recipe, settings_of
from megatron_cp.config.run_config import RunConfig, default_at
from megatron_cp.config.schema import field_paths, section_names
from megatron_cp.rules.remedies import parse_fix, with_overrides

TINY = "llama_tiny_pretrain_config"
OURS = set(field_paths(RunConfig))
_NAMES, _WHOLE_SECTION = names()

# As a recipe of Bridge's writes them (recipes/common.py and recipes/llama), where this project has no such setting.
BRIDGE = {
    "model": {
        "pipeline_model_parallel_layout": None,
        "pipeline_dtype": None,
        "cuda_graph_impl": "none",
        "cuda_graph_scope": "full",
        "cuda_graph_warmup_steps": 3,
        "attention_backend": None,
        "fine_grained_activation_offloading": False,
        "offload_modules": None,
        "attention_softmax_in_fp32": True,
        "persist_layer_norm": True,
        "fp8": None,
    },
    "optimizer": {
        "use_precision_aware_optimizer": False,
        "main_grads_dtype": "torch.float32",
        "main_params_dtype": "torch.float32",
        "exp_avg_dtype": "torch.float32",
        "exp_avg_sq_dtype": "torch.float32",
    },
    "ddp": {
        "use_distributed_optimizer": True,
        "use_megatron_fsdp": False,
        "data_parallel_sharding_strategy": "optim_grads_params",
    },
    "dataset": {
        "num_dataset_builder_threads": 1,
        "blend": None,
        "blend_per_split": None,
        "data_sharding": True,
        "dataloader_type": "single",
        "skip_getting_attention_mask_from_dataset": True,
    },
    "logger": {"log_timers_to_tensorboard": True},
    "checkpoint": {"ckpt_format": "torch_dist"},
    "comm_overlap": None,
    "peft": None,
}


def problem(*overrides: str) -> str:
    with pytest.raises(ConfigError) as raised:
        load_recipe(TINY, overrides)
    return str(raised.value)


def settled(**sections: Any) -> tuple[dict[str, Any], str]:
    """Settle Bridge's names among the default settings; return settings and problems.

    ``sections``: settings added to the defaults.
    """
    settings = asdict(RunConfig())
    for section, values in sections.items():
        settings[section] = settings.get(section, {}) | values if isinstance(values, dict) else values
    problems = settle(settings)
    return settings, format_violations(problems)


def one(name: str, value: Any) -> tuple[dict[str, Any], str]:
    section, _, setting = name.partition(".")
    return settled(**{section: {setting: value}})


def test_a_recipe_of_bridges_is_taken(tmp_path: Path) -> None:
    file = tmp_path / "bridge.yaml"
    file.write_text(yaml.safe_dump(BRIDGE))
    assert settings_of(load_recipe(TINY, files=[file])) == settings_of(load_recipe(TINY))


def test_no_row_hides_a_setting() -> None:
    assert not OURS & set(_NAMES)
    assert not set(section_names(RunConfig)) & set(_WHOLE_SECTION)
    assert {name.partition(".")[0] for name in _NAMES} <= {*section_names(RunConfig), *_WHOLE_SECTION}


def test_every_name() -> None:
    """Values without effect must be accepted, and all others explained.

    A value that always applies is accepted, too.
    """
    ours = asdict(RunConfig())
    for name, meaning in _NAMES.items():
        for value in ("anything", 3, True) if meaning.accepted is None else meaning.accepted:
            assert one(name, value) == (ours, ""), name
        if meaning.accepted is not None:
            expected = f"error K1: {name}=something: {meaning.message}\n    fix: {meaning.fix}"
            assert one(name, "something") == (ours, expected)


# What is done outside of the configuration, or needs several settings.
BY_HAND = {
    "remove it",
    "megatron-cp convert export",
    "megatron-cp verify",
    "torchrun --max-restarts=N",
    "train.on_nonfinite and train.loss_spike_factor check losses",
}


def filled_in(word: str) -> str:
    """Return an override with values for placeholders."""
    setting, _, value = word.partition("=")
    plain = re.sub("PATH|NAME|PREFIX", "some", value).replace("WEIGHT", "1.0").replace("OWN/AHEAD", "M*/*")
    if value in ("VALUE", "N"):
        alternatives = schema.alternatives(schema.kind_of(RunConfig, setting))
        default = default_at(setting)
        plain = (
            "4"
            if default is None and {int, float} & {*alternatives}
            else "some"
            if default is None
            else str(default).lower()
        )
    return f"{setting}={plain}"


def test_every_fix_is_typed_as_it_is_written() -> None:
    fixes = {fix for each in (*_NAMES.values(), *_WHOLE_SECTION.values()) for fix in map(str, parse_fix(each.fix))}
    assert fixes > BY_HAND
    config = load_recipe(TINY)
    for fix in sorted(fixes - BY_HAND):
        (parsed,) = parse_fix(fix)
        assert parsed.overrides, fix
        with_overrides(config, [filled_in(word) for word in parsed.overrides])


@pytest.mark.parametrize("section", _WHOLE_SECTION)
def test_sections_that_are_not_offered(section: str) -> None:
    for quiet in (None, {}, {"anything": None}, {"anything": {"inside": False}}):
        assert settled(**{section: quiet}) == (asdict(RunConfig()), "")
    message = _WHOLE_SECTION[section].message
    assert one(f"{section}.anything", 3)[1].startswith(f"error K1: {section}.anything=3: {message}")
    assert settled(**{section: "some"})[1].startswith(f"error K1: {section}=some: {message}")


@pytest.mark.parametrize("name", [name for name, meaning in _NAMES.items() if meaning.renamed])
def test_other_names_are_settings(name: str) -> None:
    assert _NAMES[name].message == f"named '{_NAMES[name].setting}' here" and _NAMES[name].setting in OURS


@pytest.mark.parametrize(
    ("override", "expected"),
    [
        ("dataset.blend=[a]", "named 'dataset.data_path' here\n    fix: dataset.data_path=PATH"),
        ("model.cuda_graph_impl=local", "not supported: CUDA graphs\n    fix: remove it"),
        ("model.fp8=hybrid", "not supported: FP8 and FP4 training"),
        ("optimizer.main_grads_dtype=torch.bfloat16", "only float32 is supported"),
        ("model.attention_softmax_in_fp32=1", "only true is supported"),
        ("comm_overlap.tp_comm_overlap=true", "overlap of tensor-parallel messages"),
        ("model.transformer.fp8=hybrid", "error K1: model.fp8=hybrid"),
        ("model.linear_attention_freq=4", "not supported: sparse or linear attention"),
        ("model.bf16=true", "set mixed_precision instead"),
        (
            "+train.linear_attention_freq=4",
            "train.linear_attention_freq=4: belongs to 'model.linear_attention_freq' upstream",
        ),
        ("+dsa_indexer_topk=4", "belongs to 'model.dsa_indexer_topk' upstream: it has no effect here"),
        ("ddp.use_distributed_optimizer=false", "named 'optimizer.use_distributed_optimizer' here, which is True"),
    ],
)
def test_examples(override: str, expected: str) -> None:
    text = problem(override)
    assert expected in text and "did you mean" not in text


def test_the_distributed_optimizer_has_two_names() -> None:
    config = load_recipe(TINY, ["optimizer.use_distributed_optimizer=false", "ddp.use_distributed_optimizer=false"])
    assert config.optimizer.use_distributed_optimizer is False


def test_a_dtype_equal_to_the_precision_is_accepted() -> None:
    load_recipe(TINY, ["mixed_precision=bf16_mixed", "model.pipeline_dtype=torch.bfloat16"])
    assert "set mixed_precision instead" in problem("mixed_precision=fp32", "model.pipeline_dtype=torch.bfloat16")


@pytest.mark.parametrize("backend", _BACKENDS)
def test_kernels_of_attention(backend: str) -> None:
    fix = _BACKENDS[backend]
    assert fix in problem(f"model.attention_backend={backend}")
    (parsed,) = parse_fix(fix)
    config = load_recipe(TINY, parsed.overrides)
    assert config.value_at("model.attention_backend") in ("te", "native")


def test_a_null_backend_means_auto() -> None:
    assert load_recipe(TINY, ["model.attention_backend=null"]).model.attention_backend == "auto"
