"""What is given where a recipe is expected and is none: a published model, a run's folder, a misspelled name. Pure."""

from __future__ import annotations

import os
import re
import shlex
from collections.abc import Sequence

from megatron_cp.config.schema import nearest

_ID = re.compile(r"[\w.-]+/[\w.-]+")


def not_a_recipe(text: str, names: Sequence[str]) -> tuple[str, str]:
    """What is wrong with a recipe's name or file that is not there, and what to type instead.

    Args:
        names: of the recipes that come with the package.
    """
    if os.path.isfile(config := os.path.join(text, "config.yaml")):
        return f"{text} is the folder of a run", f"its configuration is a recipe: --recipe {config}"
    if is_model(text):
        return f"{text} is a model of Hugging Face's, not a recipe", commands_to_import(text)
    if os.path.isdir(text):
        return f"{text} is a folder, not a recipe file", "name a YAML file in it"
    if text.endswith((".yaml", ".yml")) or "/" in text:
        return f"recipe file not found: {text}", "check the path, and that you may enter its folders"
    fix = "megatron-cp recipes lists them all; a file of your own is given by its path, ending in .yaml"
    return f"unknown recipe '{text}'{nearest(text, list(names))}", fix


def is_model(text: str) -> bool:
    """Whether a text names a model of Hugging Face's hub, or a folder with one, and no path that was mistyped."""
    if os.path.isdir(text):
        return os.path.isfile(os.path.join(text, "config.json"))
    is_path = text.endswith((".yaml", ".yml")) or os.path.isdir(text.partition("/")[0])
    return _ID.fullmatch(text) is not None and not is_path


def commands_to_import(model: str) -> str:
    """The commands that bring a model in, and where its recipe is then."""
    name = os.path.basename(os.path.normpath(model))
    folder = model if os.path.isdir(model) else f"models/{name}"
    imported = shlex.join(["megatron-cp", "convert", "import", "--hf-model", folder, "--megatron-path", f"runs/{name}"])
    download = "" if os.path.isdir(model) else shlex.join(["hf", "download", model, "--local-dir", folder]) + " && "
    return f"{download}{imported}; then --recipe {shlex.quote(f'runs/{name}/recipe.yaml')}"
