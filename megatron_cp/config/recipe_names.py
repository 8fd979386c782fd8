"""Errors for names that are not recipes: models, run folders, misspellings. Pure."""

from __future__ import annotations

import os
import re
import shlex
from collections.abc import Sequence

from megatron_cp.config.schema import nearest

_ID = re.compile(r"[\w.-]+/[\w.-]+")


def not_a_recipe(text: str, names: Sequence[str]) -> tuple[str, str]:
    """Return the message and the fix for a recipe that does not exist.

    Args:
        names: recipes of the package.
    """
    if os.path.isfile(config := os.path.join(text, "config.yaml")):
        return f"{text} is a run folder, not a recipe", f"--recipe {config} (the run's configuration)"
    if is_model(text):
        return f"{text} is a Hugging Face model, not a recipe", commands_to_import(text)
    if os.path.isdir(text):
        return f"{text} is a folder, not a recipe file", "name a YAML file in the folder"
    if text.endswith((".yaml", ".yml")) or "/" in text:
        return f"recipe file not found: {text}", "check the path and the permissions of its folders"
    fix = "megatron-cp recipes (lists all names), or --recipe PATH.yaml for your own file"
    return f"unknown recipe '{text}'{nearest(text, list(names))}", fix


def is_model(text: str) -> bool:
    """Return whether a text names a Hugging Face model or a folder with one."""
    if os.path.isdir(text):
        return os.path.isfile(os.path.join(text, "config.json"))
    is_path = text.endswith((".yaml", ".yml")) or os.path.isdir(text.partition("/")[0])
    return _ID.fullmatch(text) is not None and not is_path


def commands_to_import(model: str) -> str:
    """Return the commands that import a model, and the path of the new recipe."""
    name = os.path.basename(os.path.normpath(model))
    folder = model if os.path.isdir(model) else f"models/{name}"
    imported = shlex.join(["megatron-cp", "convert", "import", "--hf-model", folder, "--megatron-path", f"runs/{name}"])
    download = "" if os.path.isdir(model) else shlex.join(["hf", "download", model, "--local-dir", folder]) + " && "
    return f"{download}{imported}; then --recipe {shlex.quote(f'runs/{name}/recipe.yaml')}"
