"""Examples on pages about recipes, settings and Python work unchanged."""

import ast
import re
from importlib.util import find_spec
from pathlib import Path

import pytest

from megatron_cp import cli
from megatron_cp.config.recipes import load_recipe
from megatron_cp.config.run_config import default_at
from megatron_cp.rules import check

DOCS = Path(__file__).parents[3] / "docs"
PAGE = (DOCS / "how-to/write_a_recipe.md").read_text(encoding="utf-8")


def blocks(language: str, page: str = PAGE) -> list[str]:
    """Return the fenced blocks of a language; "" for those without one."""
    fenced = re.findall(r"^```(\w*)\n(.*?)^```$", page, flags=re.DOTALL | re.MULTILINE)
    return [text for name, text in fenced if name == language]


@pytest.fixture
def folder(tmp_path, monkeypatch):
    """Return a folder with the page's recipes, as a reader would save them."""
    own, derived = blocks("yaml")
    (tmp_path / "my_run.yaml").write_text(own)
    (tmp_path / "derived.yaml").write_text(derived)
    (tmp_path / "big_batch.yaml").write_text("train: {global_batch_size: 64}\n")
    monkeypatch.chdir(tmp_path)
    monkeypatch.delenv("WORLD_SIZE", raising=False)
    return tmp_path


def test_the_complete_recipe(folder, capsys):
    config = load_recipe("my_run.yaml")
    assert (config.recipe, config.model.num_layers, config.model.hidden_size) == ("my_run", 6, 128)
    assert config.model.hierarchical_context_parallel_sizes == [2, 2] and config.dataset.kind == "indexed"
    assert check(config, 8, environment="cpu") == []
    assert cli.main(["train", "--recipe", "my_run.yaml", "--dry-run", "--environment", "cpu"]) == 0
    assert "# my_run on 8 ranks" in capsys.readouterr().out


def test_the_derived_recipe(folder):
    config = load_recipe("derived.yaml")
    assert config.model.cp_comm_type == "p2p" and config.model.num_layers == 4


def test_the_command_with_everything(folder, capsys):
    (line,) = [line for block in blocks("") for line in block.splitlines() if "big_batch.yaml" in line]
    words = [word.strip('"') for word in line.split()[1:]]
    assert cli.main([*words, "--print-config"]) == 0
    printed = capsys.readouterr().out
    assert "global_batch_size: 64" in printed and "train_iters: 1000" in printed and "lr: 0.001" in printed
    load_recipe("my_run.yaml", re.findall(r'`"(dataset.split=[^`]*)"`', PAGE))


def test_the_hybrid_with_experts(capsys):
    page = (DOCS / "how-to/train_other_models.md").read_text(encoding="utf-8")
    (command,) = [block for block in blocks("", page) if "hybrid_layer_pattern" in block]
    _, *words = command.replace("\\\n", " ").split()
    assert cli.main([*words, "--dry-run", "--environment", "cpu"]) == 0
    assert "no setting breaks a rule; memory is not checked" in capsys.readouterr().out


def test_the_python_example(folder, capsys):
    page = (DOCS / "reference/python_api.md").read_text(encoding="utf-8")
    (code, _) = blocks("python", page)  # the other one: training/test_api.py
    exec(code)
    assert "error" not in capsys.readouterr().out


def test_the_settings_and_flags_that_the_page_names_exist():
    for group, choice in re.findall(r"`(parallel|model|optimizer)=(\w+)`", PAGE):
        load_recipe("llama_tiny_pretrain_config", [f"{group}={choice}"])


# Modules of megatron-core with the defaults of a section; only Bridge's own classes have the others.
CLASSES = {
    "model": ("core/transformer/transformer_config.py", "TransformerConfig"),
    "train": ("training/config/training_config.py", "TrainingConfig"),
    "validation": ("training/config/training_config.py", "ValidationConfig"),
    "logger": ("training/config/training_config.py", "LoggerConfig"),
    "scheduler": ("training/config/training_config.py", "SchedulerConfig"),
    "optimizer": ("core/optimizer/optimizer_config.py", "OptimizerConfig"),
    "ddp": ("core/distributed/distributed_data_parallel_config.py", "DistributedDataParallelConfig"),
}
BRIDGES_OWN = {"model.position_embedding_type", "model.share_embeddings_and_output_weights"}


def defaults_of_their_class(section: str) -> dict[str, str]:
    """Read, not imported: megatron.training takes long."""
    (folder,) = find_spec("megatron").submodule_search_locations
    file, name = CLASSES[section]
    (found,) = [
        node
        for node in ast.parse((Path(folder) / file).read_text()).body
        if isinstance(node, ast.ClassDef) and node.name == name
    ]
    fields = [node for node in found.body if isinstance(node, ast.AnnAssign) and node.value is not None]
    texts = {field.target.id: ast.unparse(field.value).strip("'").removeprefix("F.") for field in fields}
    return texts | {
        field.target.id: str(keyword.value.value)
        for field in fields
        if isinstance(field.value, ast.Call)
        for keyword in field.value.keywords
        if keyword.arg == "default" and isinstance(keyword.value, ast.Constant)
    }


def test_the_defaults_that_differ():
    page = (DOCS / "reference/bridge_differences.md").read_text(encoding="utf-8")
    rows = re.findall(r"^\| (`[a-z_.`, 0-9]+`) \| `([^`]*)`[^|]*\| `([^`]*)` \|", page, flags=re.MULTILINE)
    assert len(rows) == 21
    for settings, here, theirs in rows:
        for setting in re.findall("`([^`]*)`", settings):
            section, _, name = setting.partition(".")
            assert str(default_at(setting)).lower() == here.lower(), setting
            if setting not in BRIDGES_OWN:
                assert defaults_of_their_class(section)[name].lower() == theirs.lower(), setting
