"""``from megatron_cp import load_recipe, check, train``, as in a notebook."""

import os
import pydoc
import re
import subprocess
import sys
from pathlib import Path

import pytest

import megatron_cp
from megatron_cp.api import train
from tests.ranks import run_ranks

ROOT = Path(__file__).parents[3]
SMALL = ["train.global_batch_size=2", "train.micro_batch_size=1", "dataset.seq_length=32", "model.num_layers=1"]


def notebook(folder: str) -> tuple[list[str], list[int], str]:
    """Run the page's example, small, twice in one process without a launcher."""
    for name in ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE"):
        del os.environ[name]
    os.chdir(folder)
    code = re.findall(
        r"```python\n(from megatron_cp import ConfigError.*?)```",
        (ROOT / "docs/reference/python_api.md").read_text(),
        re.S,
    )
    assert len(code) == 1
    code = code[0].replace("overrides = [", f"overrides = [*{SMALL!r}, ")
    reported: list[str] = []
    names: dict = {"print": lambda *words: reported.append(" ".join(map(str, words)))}
    exec(code, names)
    result = names["result"]
    exec(code.replace("checkpoint.save=runs/notebook", "checkpoint.save=runs/second"), names)
    exec(code.replace("context_parallel_size=1", "context_parallel_size=4"), names)
    return reported, [result.exit_code, result.iteration, len(result.metrics())], str(result.folder)


def test_the_example_of_the_page_runs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MEGATRON_CP_TEST_NO_INIT", "1")
    ((reported, numbers, folder),) = run_ranks(notebook, 1, str(tmp_path))
    assert re.fullmatch(r"[\d.]+ -> [\d.]+ runs/notebook 5", reported[0]), reported
    assert reported[1] == reported[0].replace("notebook", "second"), "two runs in a process are the same"
    assert "rule='" in reported[2] and len(reported) == 3, reported
    assert numbers == [0, 5, 5] and folder == "runs/notebook"


def test_help_shows_the_names() -> None:
    text = pydoc.plain(pydoc.render_doc(megatron_cp))
    for name in megatron_cp.__all__:
        assert re.search(rf"^    (class )?{name}\b", text, re.M), name
    assert megatron_cp.train is train and set(megatron_cp.__all__) <= set(dir(megatron_cp))
    assert sorted(name for names in megatron_cp._MODULES.values() for name in names) == megatron_cp.__all__
    with pytest.raises(AttributeError, match="no attribute 'trian'"):
        megatron_cp.trian  # noqa: B018  # codespell:ignore trian


def test_reading_recipes_imports_no_heavy_package() -> None:
    code = (
        "import sys\nfrom megatron_cp import check, load_recipe, train\n"
        "check(load_recipe('llama_tiny_pretrain_config'), 4)\nassert not {'torch', 'megatron'} & sys.modules.keys()"
    )
    subprocess.run([sys.executable, "-c", code], check=True, timeout=180)
