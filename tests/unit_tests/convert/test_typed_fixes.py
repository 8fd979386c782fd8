"""The fix of a refused conversion, typed literally, lets the conversion continue."""

import os
import shlex
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from megatron_cp.common.errors import ConfigError
from megatron_cp.convert.exporting import export_model
from megatron_cp.convert.hf_folder import PublishedWeights, check_absent
from megatron_cp.convert.importing import import_model
from tests.ranks import run_ranks
from tests.unit_tests.convert.published import publish


def fix_of(call: Any, *arguments: Any, **options: Any) -> list[str]:
    """Return the words of the first alternative, split as a shell does."""
    with pytest.raises(ConfigError, match="Fix: ") as refused:
        call(*arguments, **options)
    return shlex.split(str(refused.value).partition("Fix: ")[2].partition(" (")[0])


def typed(folder: str) -> None:
    path = Path(folder) / "the models"
    publish(path / "hf", "llama")
    import_model(path / "hf", path / "mcore")
    option, new = fix_of(import_model, path / "hf", path / "mcore")
    assert option == "--megatron-path"
    import_model(path / "hf", Path(new))
    for root, step in ((path / "mcore", 7), (path / "mcore/iter_0000000", None), (path, None)):
        words = fix_of(export_model, root, path / "out", step)
        options = dict(zip(words[::2], words[1::2], strict=True))
        export_model(
            Path(options.get("--megatron-path", root)),
            path / f"out of {step} {root.name}",
            int(options["--iteration"]) if "--iteration" in options else None,
        )


def test_folders_and_iterations(tmp_path: Path) -> None:
    run_ranks(typed, 1, str(tmp_path))


def test_fixes_name_a_folder_that_does_not_exist(tmp_path: Path) -> None:
    for name in ("models", "models_2"):
        (tmp_path / name).mkdir()
        (tmp_path / name / "file").touch()
    _, new = fix_of(check_absent, tmp_path / "models", "--hf-path")
    assert new == f"{tmp_path}/models_3"
    check_absent(Path(new), "--hf-path")


def without_safetensors(folder: str) -> None:
    path = Path(folder) / "a model"
    publish(path, "llama")
    tensors = load_file(path / "model.safetensors")
    torch.save(tensors, path / "pytorch_model.bin")
    os.remove(path / "model.safetensors")
    program, option, script, *arguments = fix_of(PublishedWeights, path)
    assert (program, option) == ("python", "-c")
    sys.argv = ["-c", *arguments]
    exec(script, {})
    made = PublishedWeights(Path(arguments[1]))
    assert all(torch.equal(made.read(name), tensor) for name, tensor in tensors.items())


def test_weights_in_another_format(tmp_path: Path) -> None:
    run_ranks(without_safetensors, 1, str(tmp_path))
