"""Short YAML files that expand to a billion values are refused quickly.

There is one message.
"""

import time
from collections.abc import Callable
from pathlib import Path

import pytest

from megatron_cp.cli import main
from megatron_cp.common.errors import EXIT_CONFIG, ConfigError
from megatron_cp.common.yaml_files import MOST_BYTES, MOST_VALUES, TooLargeError, read_yaml
from megatron_cp.config.recipes import load_recipe
from megatron_cp.report.runs import _config
from megatron_cp.rules import Environment

TINY = "llama_tiny_pretrain_config"
SECONDS = 3.0  # of this process alone; without the bounds it takes minutes or does not end


def laughs(levels: int = 30) -> str:
    lines = [f"  A{n}: &a{n} [{', '.join([f'*a{n - 1}'] * 9)}]" for n in range(1, levels)]
    return "\n".join(["env_vars:", "  A0: &a0 [x, x, x, x, x, x, x, x, x]", *lines])


def merged_laughs(levels: int = 30) -> str:
    lines = [f"a{n}: &a{n} {{x: {{<<: *a{n - 1}}}, y: {{<<: *a{n - 1}}}}}" for n in range(1, levels)]
    return "\n".join(["a0: &a0 {x: 1, y: 1}", *lines])


BOMBS = {
    "aliases": (laughs(), "expands to more than"),
    "merged aliases": (merged_laughs(), "expands to more than"),
    "an alias in itself": ("env_vars: &a {A: *a}", "refers to itself by *a"),
    "long texts by aliases": (f"a: &a '{'x' * 10_000}'\nb: [{', '.join(['*a'] * 1_000)}]", "expands to more than"),
    "many values": ("env_vars:\n" + "".join(f"  A{n}: v\n" for n in range(MOST_VALUES)), "expands to more than"),
    "nested lists": (f"a: {'[' * 100_000}{']' * 100_000}", "is nested deeper than"),
    "nested mappings": ("\n".join(f"{' ' * n}a:" for n in range(1_000)), "is nested deeper than"),
    "a large file": ("# comment\n" * (MOST_BYTES // 10 + 1), "is larger than"),
    "a long number": (f"train: {{train_iters: {'9' * 4_000}}}", "has a value of 4000 characters without quotes"),
    "a long hexadecimal number": (f"train: {{train_iters: 0x{'f' * 100_000}}}", "characters without quotes"),
    "a long number to the base of 60": (f"train: {{train_iters: 1{':59' * 50_000}}}", "characters without quotes"),
}


@pytest.fixture(autouse=True, scope="module")
def imported() -> None:
    """Import what a recipe needs: the time of imports is not measured."""
    load_recipe(TINY)


def refused(call: Callable[[], object], expected: str) -> str:
    began = time.process_time()
    with pytest.raises(ConfigError) as error:
        call()
    assert time.process_time() - began < SECONDS
    assert expected in str(error.value) and "fix: " in str(error.value)
    assert len(str(error.value)) < 1_000
    return str(error.value)


@pytest.mark.timeout(60)
@pytest.mark.parametrize("name", BOMBS)
def test_an_alias_bomb_is_refused_at_once(name: str, tmp_path: Path) -> None:
    text, expected = BOMBS[name]
    bomb, recipe = tmp_path / "config.yaml", tmp_path / "mine.yaml"
    bomb.write_text(text)
    recipe.write_text("defaults: [config, _self_]\n")
    for call in (
        lambda: load_recipe(bomb),
        lambda: load_recipe(recipe),  # names it in its defaults list
        lambda: load_recipe(TINY, files=[bomb]),
        lambda: Environment.of(str(bomb)),
    ):
        refused(call, expected)
    assert _config(tmp_path) == {}  # a report leaves it out
    with pytest.raises(TooLargeError, match="Fix: "):
        read_yaml(bomb)


@pytest.mark.timeout(60)
def test_the_command_ends_with_one_message(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "mine.yaml").write_text(laughs())
    assert main(["train", "--recipe", str(tmp_path / "mine.yaml"), "--dry-run"]) == EXIT_CONFIG
    out, err = capsys.readouterr()
    assert not out and err.count("error ") == 1 and err.endswith("fix: write fewer values, without aliases (*name)\n")


@pytest.mark.timeout(60)
def test_defaults_lists_that_double(tmp_path: Path) -> None:
    for number in range(21):
        (tmp_path / f"f{number}.yaml").write_text(f"defaults: [f{number + 1}@a, f{number + 1}@b, _self_]\n")
    (tmp_path / "f21.yaml").write_text("x: 1\n")
    refused(lambda: load_recipe(tmp_path / "f0.yaml"), "or the defaults lists include too many files")
    (tmp_path / "f1.yaml").write_text("defaults: [f0, _self_]\n")
    (tmp_path / "f0.yaml").write_text("defaults: [f1, _self_]\n")
    refused(lambda: load_recipe(tmp_path / "f0.yaml"), "included by its own defaults list")


@pytest.mark.timeout(60)
@pytest.mark.parametrize("times", [1, 2, 9])
def test_interpolations_that_double_or_go_round(times: int, tmp_path: Path) -> None:
    path = tmp_path / "mine.yaml"
    lines = [f"  A{n}: '{f'${{env_vars.A{n + 1}}}' * times}'\n" for n in range(40)]
    path.write_text(f"defaults: [{TINY}, _self_]\nenv_vars:\n{''.join(lines)}  A40: x\n")
    refused(lambda: load_recipe(path), "interpolations refer to interpolated values, more than 16")
    path.write_text(path.read_text().replace("A40: x", "A40: ${env_vars.A0}"))
    refused(lambda: load_recipe(path), "interpolations refer to interpolated values")
    path.write_text("logger: {wandb_project: '${logger.wandb_entity}', wandb_entity: '${logger.wandb_project}'}\n")
    refused(lambda: load_recipe(path), "cannot resolve the configuration: Recursive interpolation detected")


def test_many_plain_interpolations_are_fine(tmp_path: Path) -> None:
    path = tmp_path / "mine.yaml"
    paths = ", ".join(f"'${{tokenizer.tokenizer_model}}/{n}-${{oc.env:HOME}}'" for n in range(40))
    path.write_text(
        f"defaults: [{TINY}, _self_]\ntokenizer: {{tokenizer_model: t}}\ndataset: {{data_path: [{paths}]}}\n"
    )
    found = load_recipe(path).dataset.data_path
    assert isinstance(found, list) and len(found) == 40


def test_a_blend_of_thousands_of_files_is_fine(tmp_path: Path) -> None:
    path = tmp_path / "mine.yaml"
    path.write_text(f"defaults: [{TINY}, _self_]\ndataset: {{data_path: [{', '.join(['corpus'] * 3_000)}]}}\n")
    assert len(load_recipe(path, ["parallel=cp4_p2p"]).dataset.data_path or "") == 3_000


def test_a_recipe_names_no_modules_for_hydra_to_search(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "evil").mkdir()
    (tmp_path / "evil" / "__init__.py").write_text(f"open({str(tmp_path / 'marker')!r}, 'w')\n")
    monkeypatch.syspath_prepend(tmp_path)
    path = tmp_path / "mine.yaml"
    path.write_text(f"defaults: [{TINY}, _self_]\nhydra: {{searchpath: ['pkg://evil']}}\n")
    load_recipe(path)
    path.write_text(f"defaults: [{TINY}, _self_]\nmodel: {{_target_: evil.run}}\n")
    with pytest.raises(ConfigError, match=r"unknown key 'model\._target_'"):
        load_recipe(path)
    assert not (tmp_path / "marker").exists()
