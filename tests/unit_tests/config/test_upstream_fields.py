"""Every upstream configuration field is a setting or listed with a reason.

The fields are those of megatron-core's and Megatron-Bridge's configurations. A new release of megatron-core fails these
tests with the names that it adds. The names of Megatron-Bridge are stored beside this file, because it is not
installed.
"""

from __future__ import annotations

import copy
import dataclasses
from dataclasses import asdict
from pathlib import Path

import pytest
import torch
import yaml
from megatron.core.distributed import DistributedDataParallelConfig
from megatron.core.model_parallel_config import ModelParallelConfig
from megatron.core.optimizer import OptimizerConfig
from megatron.core.transformer.transformer_config import MLATransformerConfig, TransformerConfig

from megatron_cp.common.errors import ConfigError, format_violations
from megatron_cp.config.bridge_names import names, settle
from megatron_cp.config.recipes import load_recipe
from megatron_cp.config.run_config import MixedPrecisionConfig, RunConfig
from megatron_cp.config.schema import field_paths

OURS = set(field_paths(RunConfig))
SAID_TWICE = "ddp.use_distributed_optimizer"  # upstream has it in the optimizer's section as well
CORE = [
    ("model", TransformerConfig),
    ("model", MLATransformerConfig),
    ("model", ModelParallelConfig),
    ("optimizer", OptimizerConfig),
    ("ddp", DistributedDataParallelConfig),
]
BRIDGE: dict[str, str] = yaml.safe_load((Path(__file__).parent / "bridge_0_6_2_fields.yaml").read_text())
# Fields of published configurations, or of earlier releases whose recipes are still in use.
OTHERS = {
    *("model.rope_theta", "model.tie_word_embeddings", "model.rms_norm_eps", "model.intermediate_size"),
    *("model.num_hidden_layers", "model.num_key_value_heads", "model.head_dim"),
    "model.interleaved_attn_pattern",
    *("optimizer.optimizer_offload_fraction", "scheduler.max_lr", "dataset.seed", "dataset.dataset_root"),
    *("dataset.packed_sequence_specs", "dataset.skip_getting_attention_mask_from_dataset"),
}


def upstream() -> set[str]:
    core = {f"{section}.{field.name}" for section, config in CORE for field in dataclasses.fields(config)}
    return core | {f"{section}.{name}" for section, listed in BRIDGE.items() for name in listed.split()}


@pytest.mark.parametrize(("section", "config"), CORE)
def test_megatron_core(section: str, config: type) -> None:
    fields = {f"{section}.{field.name}" for field in dataclasses.fields(config)}
    assert sorted(fields - OURS - set(names().settings) - {SAID_TWICE}) == []


@pytest.mark.parametrize("section", BRIDGE)
def test_megatron_bridge(section: str) -> None:
    known = OURS | set(names().settings) | {SAID_TWICE}
    left = sorted(name for name in BRIDGE[section].split() if f"{section}.{name}" not in known)
    assert left == [] or section in names().sections


def test_every_listed_name_exists_upstream() -> None:
    assert sorted(set(names().settings) - upstream() - OTHERS) == []


@pytest.mark.parametrize(("section", "config"), [each for each in CORE if each[1] is not MLATransformerConfig])
def test_upstream_defaults_are_accepted(section: str, config: type) -> None:
    """A configuration may write out all defaults of megatron-core.

    It writes dtypes as Bridge does. The defaults of latent attention ask for YaRN.
    """
    settings = asdict(RunConfig(mixed_precision=MixedPrecisionConfig(fp32=True)))
    before = copy.deepcopy(settings)
    for field in dataclasses.fields(config):
        name, default = f"{section}.{field.name}", field.default
        if name not in OURS | {SAID_TWICE} and default is not dataclasses.MISSING and not callable(default):
            settings[section][field.name] = str(default) if isinstance(default, torch.dtype) else default
    assert format_violations(settle(settings)) == ""
    assert settings == before


def test_no_name_of_upstreams_gets_a_neighbour() -> None:
    """No other setting may be proposed for a name that upstream has.

    The name stands in its own section, in another one, or in none.
    """
    named = sorted(set(names().settings))
    in_a_wrong_section = [f"env.{name.partition('.')[2]}" for name in named]
    for name in (*named, *in_a_wrong_section):
        settings = asdict(RunConfig())
        section, _, leaf = name.partition(".")
        settings.setdefault(section, {})[leaf] = {"no": "value that is taken"}
        settle(settings)
        assert leaf not in settings.get(section, {}) or leaf in {path.rpartition(".")[2] for path in OURS}, name


def test_an_unknown_name_still_gets_its_neighbour() -> None:
    with pytest.raises(ConfigError, match=r"unknown key 'model\.num_layrs'; did you mean 'model\.num_layers'"):
        load_recipe("llama_tiny_pretrain_config", ["+model.num_layrs=3"])
