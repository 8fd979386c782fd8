"""Read a checkpoint's index, a pickle, with a list of allowed classes."""

from __future__ import annotations

import io
import pickle
from collections import OrderedDict
from pathlib import Path, PurePosixPath
from typing import IO, Any

import torch
from torch.distributed.checkpoint.filesystem import _StorageInfo
from torch.distributed.checkpoint.metadata import (
    _MEM_FORMAT_ENCODING,
    BytesStorageMetadata,
    ChunkStorageMetadata,
    Metadata,
    MetadataIndex,
    StorageMeta,
    TensorProperties,
    TensorStorageMetadata,
)

from megatron_cp.common.errors import UnusableCheckpoint
from megatron_cp.common.input_files import read_bytes

INDEX = ".metadata"
_OUR_CLASSES = (
    BytesStorageMetadata,
    ChunkStorageMetadata,
    Metadata,
    MetadataIndex,
    StorageMeta,
    TensorProperties,
    TensorStorageMetadata,
    _StorageInfo,
)
_OF_THE_INDEX: dict[tuple[str, str], Any] = {
    **{(each.__module__, each.__qualname__): each for each in (*_OUR_CLASSES, _MEM_FORMAT_ENCODING, OrderedDict)},
    ("torch", "Size"): torch.Size,
    ("torch.serialization", "_get_layout"): torch.serialization._get_layout,  # looks a name up in a table
    **{("torch", str(each).removeprefix("torch.")): each for each in torch.storage._dtype_to_storage_type_map()},
    **{("torch", str(each).removeprefix("torch.")): each for each in torch.storage._new_dtypes()},
}


def read_index(folder: Path) -> Metadata:
    """Read a checkpoint's index: its tensors and objects, and their places in files.

    Raises:
        UnusableCheckpoint: the index is unreadable, refers to other classes, or to files outside of the folder.
    """
    path = folder / INDEX
    try:
        content = read_bytes(path)
    except OSError as error:
        raise UnusableCheckpoint(f"{path} cannot be read: {error.strerror}") from error
    before = [dict(vars(each)) for each in _OUR_CLASSES]
    try:
        index = _IndexUnpickler(path, io.BytesIO(content)).load()
    except UnusableCheckpoint:
        raise
    except Exception as error:  # invalid pickles can raise any error
        raise UnusableCheckpoint(f"{path} is not a checkpoint index: {type(error).__name__}: {error}") from error
    finally:
        altered = _restore(before)
    problem = f"it alters the class {altered}" if altered else _problem_of(index)
    if problem:
        raise UnusableCheckpoint(f"{path} is not a checkpoint index: {problem}")
    return index


class _IndexUnpickler(pickle.Unpickler):
    def __init__(self, path: Path, file: IO[bytes]) -> None:
        super().__init__(file)
        self._path = path

    def find_class(self, module: str, name: str) -> Any:
        try:
            return _OF_THE_INDEX[module, name]
        except KeyError:
            raise UnusableCheckpoint(refusal(self._path, [f"{module}.{name}"])) from None


def _restore(before: list[dict[str, Any]]) -> str:
    """Undo changes of a pickle to class attributes; return the class's name.

    An unpickler cannot refuse such changes.
    """
    found = ""
    for each, attributes in zip(_OUR_CLASSES, before, strict=True):
        now = dict(vars(each))
        for name in now.keys() | attributes.keys():
            if name not in attributes:
                delattr(each, name)
            elif now.get(name) is not attributes[name]:
                setattr(each, name, attributes[name])
            else:
                continue
            found = each.__name__
    return found


def _problem_of(index: Any) -> str:
    """Return what makes an index unusable, ``""`` if nothing."""
    if not isinstance(index, Metadata):
        return f"it holds {type(index).__name__}"
    entries, places = (getattr(index, name, None) for name in ("state_dict_metadata", "storage_data"))
    if not isinstance(entries, dict) or not isinstance(places, dict):
        return "the tables of tensors and storage places are missing"
    for name, entry in entries.items():
        if not isinstance(name, str) or not (isinstance(entry, BytesStorageMetadata) or _is_tensor(entry)):
            return f"entry {str(name)[:80]!r} is neither a tensor nor an object"
    for key, place in places.items():
        if not isinstance(key, MetadataIndex) or not isinstance(getattr(key, "fqn", None), str):
            return "the table of storage places has an invalid key"
        if not _is_place(place):
            return f"the place of {key.fqn[:80]!r} is not a range of a file in the folder"
    return ""


def _is_tensor(entry: Any) -> bool:
    attributes = vars(entry) if isinstance(entry, TensorStorageMetadata) else {}
    chunks, properties = attributes.get("chunks"), attributes.get("properties")
    return (
        isinstance(attributes.get("size"), torch.Size)
        and isinstance(properties, TensorProperties)
        and isinstance(vars(properties).get("dtype"), torch.dtype)
        and isinstance(chunks, list)
        and all(
            isinstance(chunk, ChunkStorageMetadata)
            and isinstance(vars(chunk).get("offsets"), torch.Size)
            and isinstance(vars(chunk).get("sizes"), torch.Size)
            for chunk in chunks
        )
    )


def _is_place(place: Any) -> bool:
    attributes = vars(place) if isinstance(place, _StorageInfo) else {}
    name, start, length = (attributes.get(each) for each in ("relative_path", "offset", "length"))
    return (
        isinstance(name, str)
        and name not in ("", "..")
        and PurePosixPath(name).name == name
        and type(start) is int
        and type(length) is int
        and start >= 0
        and length >= 0
        and not attributes.get("transform_descriptors")
    )


def refusal(where: str | Path, names: list[str]) -> str:
    shown = ", ".join(name[:80] for name in names[:4])
    return f"{where} refers to {shown}, which checkpoints of megatron_cp never use: refused, no code was run"
