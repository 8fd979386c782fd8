"""Folder in Hugging Face's format: config.json, safetensors and tokenizer files."""

from __future__ import annotations

import itertools
import json
import logging
import os
import shlex
import shutil
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from safetensors import SafetensorError, safe_open
from torch import Tensor

from megatron_cp.common import input_files
from megatron_cp.common.atomic_files import atomic_write
from megatron_cp.common.errors import ConfigError, RuntimeFault
from megatron_cp.config.run_config import ModelConfig
from megatron_cp.convert.sizes import check_sizes
from megatron_cp.data.text.tokenizer_files import CHAT_TEMPLATE
from megatron_cp.models.families import FAMILIES, model_from_hf

_INDEX = "model.safetensors.index.json"
_SINGLE = "model.safetensors"
_LARGEST = 2**24  # size in a config.json without weights
_DTYPES = {"F32": "float32", "BF16": "bfloat16", "F16": "float16"}
# Files of the tokenizer, and defaults for generation.
_COMPANIONS = (
    "tokenizer.json",
    "tokenizer.model",
    "tokenizer_config.json",
    "special_tokens_map.json",
    "added_tokens.json",
    "vocab.json",
    "merges.txt",
    CHAT_TEMPLATE,
    "generation_config.json",
)
TOKEN_IDS = ("bos_token_id", "eos_token_id", "pad_token_id")


def read_model(folder: Path) -> dict[str, Any]:
    """Return a folder's model settings that differ from the defaults.

    Reads ``config.json`` only.

    Raises:
        ConfigError: as :func:`read_config` does.
    """
    _, model = model_from_hf(read_config(folder, None))
    return {name: value for name, value in vars(model).items() if value != getattr(ModelConfig(), name)}


def read_config(folder: Path, shapes: Mapping[str, tuple[int, ...]] | None) -> dict[str, Any]:
    """Read ``config.json``, with the defaults of the family's class in transformers.

    Args:
        shapes: of the weights, by tensor name. Sizes are checked first: transformers allocates lists of these sizes.
            None for a folder without weights, whose sizes are bounded only.

    Raises:
        ConfigError: the file is missing or cannot be read, the family is not supported, or a size is larger than the
            weights'.
    """
    written = read_json(folder / "config.json")
    _check_family(folder, written.get("model_type"))
    if shapes is None and any(type(value) is int and value > _LARGEST for value in written.values()):
        raise ConfigError(f"{folder / 'config.json'} has a size above {_LARGEST}. Fix: {_fetch(folder)}")
    if shapes is not None:
        check_sizes(written, shapes)
    from transformers import AutoConfig

    logging.getLogger("transformers").setLevel(logging.ERROR)  # its warnings quote the file
    try:
        config = AutoConfig.from_pretrained(str(folder), local_files_only=True, trust_remote_code=False)
        # The attribute map has the names that all families share.
        values = config.to_dict() | {name: getattr(config, name) for name in config.attribute_map}
    except Exception as error:  # bad values raise errors of many types
        raise ConfigError(
            f"{folder / 'config.json'}: cannot be read as a model's configuration: {_in_a_line(error)}. "
            f"Fix: {_fetch(folder)}"
        ) from error
    _check_family(folder, values.get("model_type"))  # some settings change the family
    if shapes is not None:
        check_sizes(values, shapes)  # again, with shared names and defaults
    return values


def _check_family(folder: Path, model_type: Any) -> None:
    if not isinstance(model_type, str) or model_type not in FAMILIES:
        raise ConfigError(
            f"{folder / 'config.json'}: model_type={model_type!r}: is not supported. Fix: choose a model of one of "
            f"{', '.join(sorted(FAMILIES))}"
        )


class PublishedWeights:
    """Tensors of a folder's ``*.safetensors``, read one at a time.

    Raises:
        ConfigError: a file is missing or damaged.
    """

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        if special := input_files.special_files(folder):  # a device has no end, a pipe waits for a writer
            raise ConfigError(f"{special[0]}: is neither a file nor a folder. Fix: rm {shlex.quote(str(special[0]))}")
        if os.path.exists(folder / _SINGLE):  # it has precedence over an index, as in transformers
            files = [_SINGLE]
        elif os.path.exists(folder / _INDEX):
            places = read_json(folder / _INDEX).get("weight_map")
            if not isinstance(places, dict) or not all(isinstance(file, str) for file in places.values()):
                raise ConfigError(f"{folder / _INDEX}: has no weight_map from tensors to files. Fix: {_fetch(folder)}")
            files = sorted(set(places.values()))
            if outside := [file for file in files if Path(file).name != file]:
                raise ConfigError(
                    f"{folder / _INDEX}: names {outside[0]!r}, a file outside of the folder. Fix: {_fetch(folder)}"
                )
        else:
            convert = (
                "import sys; from transformers import AutoModelForCausalLM as Model; "
                "Model.from_pretrained(sys.argv[1], dtype='auto').save_pretrained(sys.argv[2])"
            )
            old, new = (shlex.quote(str(path)) for path in (folder, folder.with_name(f"{folder.name}_safetensors")))
            raise ConfigError(
                f'{folder}: has neither {_SINGLE} nor {_INDEX}. Fix: python -c "{convert}" {old} {new} (converts '
                "weights of another format into the second folder)"
            )
        self._file_of: dict[str, Any] = {}
        for file in files:
            try:
                opened = safe_open(folder / file, framework="pt")
                self._file_of |= dict.fromkeys(opened.keys(), opened)
            except (OSError, SafetensorError) as error:
                raise ConfigError(
                    f"{folder / file}: cannot be read: {_in_a_line(error)}. Fix: {_fetch(folder)}"
                ) from error

        self.shapes = {name: tuple(file.get_slice(name).get_shape()) for name, file in self._file_of.items()}

    def dtype(self, names: Iterable[str]) -> tuple[str, bool]:
        """Return (torch dtype of the tensors, whether all have it); float32 if mixed."""
        given = {self._file_of[name].get_slice(name).get_dtype() for name in names}
        other = sorted(given - _DTYPES.keys())
        if other or not given:
            has = f"weights of {', '.join(other)}" if other else "no weights"
            raise ConfigError(f"{self._folder}: has {has}. Fix: use a model with {', '.join(_DTYPES)} weights")
        return (_DTYPES[given.pop()], True) if len(given) == 1 else ("float32", False)

    def read(self, name: str, index: int | None = None) -> Tensor:
        """Read a tensor, or entry ``index`` of its first dimension."""
        file = self._file_of[name]
        return file.get_tensor(name) if index is None else file.get_slice(name)[index]


def write_model(folder: Path, config: Mapping[str, Any], tensors: dict[str, Tensor]) -> None:
    """Write ``config.json`` and the weights; ``tensors`` must not share memory.

    Raises:
        OSError: the files cannot be written.
    """
    from huggingface_hub import save_torch_state_dict

    try:
        save_torch_state_dict(tensors, folder, metadata={"format": "pt"})
    except SafetensorError as error:  # safetensors wraps OSError
        raise OSError(str(error)) from error
    (folder / "config.json").write_text(json.dumps(config, indent=2) + "\n", encoding="utf-8")


def copy_companions(source: Path, target: Path) -> list[str]:
    """Copy a tokenizer's files between folders; return their names."""
    found = [name for name in _COMPANIONS if (source / name).is_file()]
    for name in found:
        shutil.copyfile(source / name, target / name)
    return found


def check_absent(folder: Path, setting: str) -> None:
    """Check that ``folder`` (absolute, without links) can be created.

    Raises:
        ConfigError: the folder exists and is not empty, or the parent is not writable.
    """
    if os.path.exists(folder) and not (os.path.isdir(folder) and not os.listdir(folder)):
        new = next(path for n in itertools.count(2) if not os.path.exists(path := f"{folder}_{n}"))
        raise ConfigError(f"{setting} {folder}: already exists. Fix: {setting} {shlex.quote(new)}")
    above = next(path for path in folder.parents if os.path.exists(path))
    if not os.path.isdir(above) or not os.access(above, os.W_OK | os.X_OK):
        raise ConfigError(
            f"{setting} {folder}: cannot be created: {above} is not a writable folder. Fix: {setting} FOLDER"
        )


@contextmanager
def new_folder(folder: Path) -> Iterator[Path]:
    """Yield a temporary folder that becomes ``folder``; remove it on errors.

    Raises:
        RuntimeFault: the folder could not be written.
    """
    try:
        with atomic_write(folder) as (partial,):  # check_absent ensures that an existing folder is empty
            partial.mkdir(parents=True)
            yield partial
    except OSError as error:
        raise RuntimeFault(f"{folder}: could not be written: {error}") from error


def read_json(file: Path) -> dict[str, Any]:
    """Read a JSON object; raise ConfigError if the file has none."""
    try:
        values = input_files.read_json(file)
    except OSError as error:
        fix = f". Fix: {_fetch(file.parent)} (this command downloads nothing)" * (not os.path.exists(file))
        raise ConfigError(f"{file}: cannot be read: {error.strerror}{fix}") from error
    except ValueError as error:
        raise ConfigError(f"{file}: is not valid JSON: {error}") from error
    if not isinstance(values, dict):
        raise ConfigError(f"{file}: must be a JSON object. Fix: {_fetch(file.parent)}")
    return values


def _fetch(folder: Path) -> str:
    """Return a command that downloads a model into a folder."""
    return f"hf download NAME --local-dir {shlex.quote(str(folder))}"


def _in_a_line(error: BaseException) -> str:
    text = " ".join(str(error).split())
    return f"{type(error).__name__}: {text[:300] or 'no details'}"
