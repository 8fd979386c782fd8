"""Environment values in recipes are used and named, but never written or printed."""

import copy
import pickle
from collections.abc import Iterator
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import pytest
import yaml

from megatron_cp.cli import main
from megatron_cp.common import terminal
from megatron_cp.common.errors import EXIT_CONFIG, EXIT_OK, ConfigError
from megatron_cp.common.interpolation import FromEnvironment, as_written, substitute_environment
from megatron_cp.config.recipes import load_recipe, to_yaml
from megatron_cp.config.run_config import RunConfig, settings_affecting
from megatron_cp.config.setting import DATA
from megatron_cp.rules import check
from megatron_cp.rules.environment import Environment
from megatron_cp.training.checkpoint import differences as settings
from megatron_cp.training.checkpoint.resume import is_own_checkpoint
from megatron_cp.training.consistency import differences, digest, fingerprint


def data_differences(config: RunConfig, common: dict[str, Any]) -> list[str]:
    return settings.describe(settings.differences(common["config"], asdict(config), settings_affecting(DATA)))


TINY = "llama_tiny_pretrain_config"
SECRET = "hunter2-hunter2"
RECIPE = f"""\
defaults: [{TINY}, _self_]
logger: {{wandb_project: mine, wandb_exp_name: '${{oc.env:SECRET}}', wandb_entity: 'of ${{logger.wandb_exp_name}}'}}
dataset:
  data_path: [1, '/data/${{oc.env:SECRET}}/a', 2, /data/b]
  mock_num_samples: '${{oc.decode:${{oc.env:NUMBER}}}}'
env_vars: {{NCCL_ALGO: '${{oc.env:SECRET}}', NVTE_DEBUG: '${{oc.env:NOT_SET,0}}'}}
"""


@pytest.fixture(autouse=True)
def environment(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setattr(terminal, "_hidden", {})
    monkeypatch.setenv("SECRET", SECRET)
    monkeypatch.setenv("NUMBER", "77")
    monkeypatch.delenv("NOT_SET", raising=False)
    yield


def loaded(folder: Path, text: str = RECIPE) -> RunConfig:
    (folder / "mine.yaml").write_text(text)
    return load_recipe(folder / "mine.yaml")


def test_values_are_used_and_interpolations_written(tmp_path: Path) -> None:
    config = loaded(tmp_path)
    assert config.logger.wandb_exp_name == SECRET and config.logger.wandb_entity == f"of {SECRET}"
    assert config.dataset.data_path == [1, f"/data/{SECRET}/a", 2, "/data/b"]
    assert config.dataset.mock_num_samples == 77  # a number is its value
    assert config.env_vars == {"NCCL_ALGO": SECRET, "NVTE_DEBUG": "0"}
    for changed in (config, copy.deepcopy(config), replace(config), pickle.loads(pickle.dumps(config))):
        written = changed.as_written()
        assert SECRET not in f"{written}{to_yaml(changed)}{changed!r}"
        assert written["logger"]["wandb_exp_name"] == "${oc.env:SECRET}"
        assert written["dataset"]["data_path"] == [1, "/data/${oc.env:SECRET}/a", 2, "/data/b"]
        assert written["env_vars"] == {"NCCL_ALGO": "${oc.env:SECRET}", "NVTE_DEBUG": "${oc.env:NOT_SET,0}"}
        assert all(type(text) is str for text in written["env_vars"].values())
    (tmp_path / "config.yaml").write_text(to_yaml(config))
    again = load_recipe(tmp_path / "config.yaml")
    assert again == config and again.as_written() == config.as_written()


def test_overrides_and_files_too(tmp_path: Path) -> None:
    (tmp_path / "more.yaml").write_text("checkpoint: {save: '${oc.env:SECRET}'}")
    config = load_recipe(TINY, ["logger.wandb_entity=${oc.env:SECRET}"], files=[tmp_path / "more.yaml"])
    assert config.checkpoint.load == config.checkpoint.save == config.logger.wandb_entity == SECRET
    assert SECRET not in to_yaml(config)


def test_a_run_resumes_with_another_secret(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    config = loaded(tmp_path)
    common = {"config": config.as_written()}
    monkeypatch.setenv("SECRET", "another-secret")
    again = loaded(tmp_path)
    assert again != config and is_own_checkpoint(again, common) and not data_differences(again, common)
    assert is_own_checkpoint(config, {"config": asdict(config)})  # as checkpoints had it before
    monkeypatch.setenv("NUMBER", "78")
    other = loaded(tmp_path)
    assert not is_own_checkpoint(other, common)
    assert data_differences(other, common) == ["dataset.mock_num_samples is 78 here and 77 in the checkpoint"]
    other.dataset.data_path = ["/data/c"]
    assert SECRET not in str(data_differences(other, common))
    assert "${oc.env:SECRET}/a" in str(data_differences(other, common))


def test_ranks_compare_secrets_without_printing_them(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    mine = fingerprint(asdict(loaded(tmp_path)), Environment())
    monkeypatch.setenv("SECRET", "another-secret")
    other = fingerprint(asdict(loaded(tmp_path)), Environment())
    assert digest(mine) != digest(other)
    reported = "\n".join(map(str, differences([mine, other])))
    assert "logger.wandb_exp_name" in reported and SECRET not in reported and "another-secret" not in reported


@pytest.mark.parametrize(
    "text",
    [
        "train: {train_iters: '${oc.env:SECRET}'}",
        "train: {train_iters: '${oc.decode:${oc.env:LIST}}'}",
        "model: {cp_comm_type: '${oc.env:SECRET}'}",
        "model: {num_layers: '${oc.env:SECRET}', normalization: '${oc.env:SECRET}'}",
        "mixed_precision: {fp32: '${oc.env:SECRET}'}",
        "dataset: {split: '${oc.env:SECRET}'}",
        "dataset: {kind: '${oc.env:SECRET}'}",
        "dataset: {data_path: '${oc.decode:${oc.env:LIST}}'}",
        "env_vars: '${oc.create:{A: ${oc.env:SECRET}}}'",
        "env_vars: {LD_PRELOAD: '${oc.env:SECRET}'}",
        "optimizer: {lr: '${oc.decode:${oc.env:SECRET}}'}",
        "optimizer: {lr: '${oc.decode:${oc.env:UNBALANCED}}'}",
        "checkpoint: {save: '${oc.env:SECRET}', load: ''}",
        "recipe: ${oc.env:SECRET}",
        "tokenizer: {tokenizer_type: '${oc.env:SECRET}'}",
        "model: {attention_backend: '${oc.env:SECRET}'}",
        "peft: '${oc.env:SECRET}'",
    ],
)
def test_no_message_shows_a_value(
    text: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("LIST", f"[{SECRET},{SECRET}]")
    monkeypatch.setenv("UNBALANCED", f"[{SECRET}")
    file = tmp_path / "mine.yaml"
    file.write_text(f"defaults: [{TINY}, _self_]\n{text}\n")
    assert main(["validate", "--recipe", str(file)]) == EXIT_CONFIG
    out, err = capfd.readouterr()
    assert SECRET not in out + err and "error " in err
    with pytest.raises(ConfigError) as error:  # as a caller from Python shows it
        raise ConfigError(check(load_recipe(file), 4))
    assert SECRET not in str(error.value)


def test_a_file_that_a_variable_names(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    file = tmp_path / "mine.yaml"
    file.write_text(f"defaults: [{TINY}, 'override optimizer: ${{oc.env:SECRET}}']\n")
    assert main(["validate", "--recipe", str(file)]) == EXIT_CONFIG
    assert SECRET not in "".join(capfd.readouterr())


def test_the_variables_are_named_and_the_dry_run_keeps_them(
    tmp_path: Path,
    capfd: pytest.CaptureFixture[str],
    caplog: pytest.LogCaptureFixture,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    loaded(tmp_path)
    caplog.clear()
    assert main(["train", "--recipe", str(tmp_path / "mine.yaml"), "--print-config"]) == EXIT_OK
    assert caplog.messages == ["recipe mine reads environment variables: SECRET, NUMBER, NOT_SET"]
    out, _ = capfd.readouterr()
    assert SECRET not in out and yaml.safe_load(out)["logger"]["wandb_exp_name"] == "${oc.env:SECRET}"
    monkeypatch.setenv("RANK", "1")
    monkeypatch.setenv("WORLD_SIZE", "2")
    load_recipe(tmp_path / "mine.yaml")  # one rank logs it
    monkeypatch.setenv("RANK", "0")
    load_recipe(TINY)
    assert len(caplog.messages) == 1


def test_environment_variables_are_substituted() -> None:
    found = substitute_environment("/data/${oc.env:SECRET}/${oc.env:NOT_SET}/${oc.env:NOT_SET,here}")
    assert found == f"/data/{SECRET}/${{oc.env:NOT_SET}}/here" and isinstance(found, FromEnvironment)
    assert as_written({"a": [found, 1]}) == {"a": [found.written, 1]}
    assert type(substitute_environment("/data/tokenizer")) is str
