"""Read a checkpoint's files without running code that they name.

torch reads two parts of a checkpoint with an unrestricted unpickler: the index (``.metadata``) and every object that is
not a tensor. A pickle can call any function, so a crafted checkpoint could run any command. Here each is read with a
list of the classes that our checkpoints hold; everything else is refused by name.
"""

from __future__ import annotations

import io
import pickle
import pickletools
import zipfile
from collections import OrderedDict
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path, PurePosixPath
from typing import IO, Any

import numpy as np
import torch
from torch._weights_only_unpickler import _get_allowed_globals
from torch.distributed.checkpoint import FileSystemReader
from torch.distributed.checkpoint._nested_dict import set_element
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
from torch.distributed.checkpoint.planner import LoadPlan, LoadPlanner, ReadItem
from torch.futures import Future

from megatron_cp.errors import UnusableCheckpoint

INDEX = ".metadata"
COMMON_FILE = "common.pt"
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
# Beside what torch allows of its own (tensors, storages, dtypes): numpy's random state, and what older versions of
# Transformer Engine keep an extra state in. numpy 2 has renamed a module.
_OF_OBJECTS = {
    "numpy._core.multiarray._reconstruct": np.empty(0).__reduce__()[0],
    "numpy.core.multiarray._reconstruct": np.empty(0).__reduce__()[0],
    "numpy.ndarray": np.ndarray,
    "numpy.dtype": np.dtype,
    "numpy.dtypes.UInt32DType": type(np.dtype(np.uint32)),
    "_io.BytesIO": io.BytesIO,
}


class CheckpointReader(FileSystemReader):
    """torch's reader of ``torch_dist`` checkpoints, which runs no code that the files name."""

    def read_metadata(self, *args: Any, **kwargs: Any) -> Metadata:
        metadata = read_index(Path(self.path))
        metadata.storage_meta = metadata.storage_meta or StorageMeta()
        metadata.storage_meta.load_id = self.load_id
        return metadata

    def read_data(self, plan: LoadPlan, planner: LoadPlanner) -> Future[None]:
        planner.load_bytes = partial(self._load_bytes, planner)  # type: ignore[method-assign]
        return super().read_data(plan, planner)

    def _load_bytes(self, planner: Any, item: ReadItem, content: io.BytesIO) -> None:
        """``DefaultLoadPlanner.load_bytes``, but for the unpickler."""
        name = item.dest_index.fqn
        loaded = load_object(content, f"{self.path}: {name}")
        if planner.flatten_state_dict:
            set_element(planner.original_state_dict, planner.mappings[name], loaded)
        else:
            planner.state_dict[name] = loaded


def read_index(folder: Path) -> Metadata:
    """A checkpoint's index: which tensors and objects it has, and where in its files they lie.

    Raises:
        UnusableCheckpoint: it cannot be read, or names what an index does not hold, or files outside of the folder.
    """
    path = folder / INDEX
    try:
        content = path.read_bytes()
    except OSError as error:
        raise UnusableCheckpoint(f"{path} cannot be read: {error.strerror}") from error
    before = [dict(vars(each)) for each in _OUR_CLASSES]
    try:
        index = _IndexUnpickler(path, io.BytesIO(content)).load()
    except UnusableCheckpoint:
        raise
    except Exception as error:  # bytes that are no pickle can end in any error
        raise UnusableCheckpoint(f"{path} is not an index: {type(error).__name__}: {error}") from error
    finally:
        altered = _restore(before)
    problem = f"it alters the class {altered}" if altered else _problem_of(index)
    if problem:
        raise UnusableCheckpoint(f"{path} is not an index: {problem}")
    return index


class _IndexUnpickler(pickle.Unpickler):
    def __init__(self, path: Path, file: IO[bytes]) -> None:
        super().__init__(file)
        self._path = path

    def find_class(self, module: str, name: str) -> Any:
        try:
            return _OF_THE_INDEX[module, name]
        except KeyError:
            raise UnusableCheckpoint(_refusal(self._path, [f"{module}.{name}"])) from None


def _restore(before: list[dict[str, Any]]) -> str:
    """Undo what a pickle set on a class itself, which its unpickler cannot refuse; returns the class's name."""
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
    """What makes an index unusable, ``""`` if nothing does. What it says of files is used as it is later on."""
    if not isinstance(index, Metadata):
        return f"it holds {type(index).__name__}"
    entries, places = (getattr(index, name, None) for name in ("state_dict_metadata", "storage_data"))
    if not isinstance(entries, dict) or not isinstance(places, dict):
        return "it has no tables of tensors and of places"
    for name, entry in entries.items():
        if not isinstance(name, str) or not (isinstance(entry, BytesStorageMetadata) or _is_tensor(entry)):
            return f"its entry {str(name)[:80]!r} is neither a tensor nor an object"
    for key, place in places.items():
        if not isinstance(key, MetadataIndex) or not isinstance(getattr(key, "fqn", None), str):
            return "its table of places has a key that is none"
        if not _is_place(place):
            return f"the place of {key.fqn[:80]!r} is not a range of one of the folder's files"
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


def load_common_file(folder: str | Path) -> Any:
    """``common.pt``, in which earlier versions of megatron-core keep what is no tensor."""
    path = Path(folder) / COMMON_FILE
    with path.open("rb") as file:
        return load_object(file, str(path))


def load_object(content: IO[bytes], name: str) -> Any:
    """What ``torch.save`` wrote, if it is of plain values, tensors and numpy's random state.

    Args:
        name: of the content, for messages.

    Raises:
        UnusableCheckpoint: it holds anything else, or is damaged.
    """
    try:
        with _only(_OF_OBJECTS):
            return torch.load(content, weights_only=True)
    except Exception as error:  # bytes that are not what torch wrote can end in any error
        others = _others_in(content)
        if others:
            raise UnusableCheckpoint(_refusal(name, others)) from error
        raise UnusableCheckpoint(f"{name} is damaged, or of other than plain values and tensors") from error


@contextmanager
def _only(allowed: dict[str, Any]) -> Iterator[None]:
    """Have ``torch.load`` allow these and what torch itself does; megatron-core and others have added more."""
    before = torch.serialization.get_safe_globals()
    torch.serialization.clear_safe_globals()
    torch.serialization.add_safe_globals([(value, name) for name, value in allowed.items()])
    try:
        yield
    finally:
        torch.serialization.clear_safe_globals()
        torch.serialization.add_safe_globals(before)


def _others_in(content: IO[bytes]) -> list[str]:
    """The functions and classes that an object names and that are not allowed, as far as it can be read."""
    try:
        content.seek(0)
        if zipfile.is_zipfile(content):
            with zipfile.ZipFile(content) as archive:
                pickles = [archive.read(name) for name in archive.namelist() if name.endswith(".pkl")]
        else:
            content.seek(0)
            pickles = [content.read()]
        found = {name for each in pickles for name in _names(each)}
    except Exception:  # damaged bytes can end in any error
        return []
    return sorted(found - _OF_OBJECTS.keys() - _get_allowed_globals().keys())


def _names(pickled: bytes) -> Iterator[str]:
    texts: list[str] = []
    for operation, argument, _ in pickletools.genops(pickled):
        if operation.name in ("GLOBAL", "INST"):
            yield str(argument).replace(" ", ".", 1)
        elif operation.name == "STACK_GLOBAL":
            yield ".".join(texts[-2:])
        elif isinstance(argument, str):
            texts.append(argument)


def _refusal(where: str | Path, names: list[str]) -> str:
    shown = ", ".join(name[:80] for name in names[:4])
    return f"{where} names {shown}, which no checkpoint of megatron_cp does: it was refused, and nothing of it was run"
