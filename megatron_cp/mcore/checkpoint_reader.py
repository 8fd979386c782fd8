"""Read a checkpoint's files without running code that they refer to.

torch reads the index (``.metadata``) and every non-tensor object with an unrestricted unpickler. A pickle can call any
function, so a crafted checkpoint could run any command. Here each is read with a list of allowed classes; anything else
is refused by name.
"""

from __future__ import annotations

import io
import pickletools
import zipfile
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import IO, Any

import numpy as np
import torch
from torch._weights_only_unpickler import _get_allowed_globals
from torch.distributed.checkpoint import FileSystemReader
from torch.distributed.checkpoint._nested_dict import set_element
from torch.distributed.checkpoint.metadata import Metadata, StorageMeta
from torch.distributed.checkpoint.planner import LoadPlan, LoadPlanner, ReadItem
from torch.futures import Future

from megatron_cp.common.errors import UnusableCheckpoint
from megatron_cp.common.input_files import file_or_pipe
from megatron_cp.mcore.checkpoint_index import read_index, refusal

COMMON_FILE = "common.pt"
# In addition to torch's own list (tensors, storages, dtypes): numpy's random state, and extra states of older
# Transformer Engine versions. numpy 2 has renamed a module.
_OF_OBJECTS = {
    "numpy._core.multiarray._reconstruct": np.empty(0).__reduce__()[0],
    "numpy.core.multiarray._reconstruct": np.empty(0).__reduce__()[0],
    "numpy.ndarray": np.ndarray,
    "numpy.dtype": np.dtype,
    "numpy.dtypes.UInt32DType": type(np.dtype(np.uint32)),
    "_io.BytesIO": io.BytesIO,
}


class CheckpointReader(FileSystemReader):
    """torch's ``torch_dist`` reader, restricted to allowed classes."""

    def read_metadata(self, *args: Any, **kwargs: Any) -> Metadata:
        metadata = read_index(Path(self.path))
        metadata.storage_meta = metadata.storage_meta or StorageMeta()
        metadata.storage_meta.load_id = self.load_id
        return metadata

    def read_data(self, plan: LoadPlan, planner: LoadPlanner) -> Future[None]:
        planner.load_bytes = partial(self._load_bytes, planner)  # type: ignore[method-assign]
        return super().read_data(plan, planner)

    def _load_bytes(self, planner: Any, item: ReadItem, content: io.BytesIO) -> None:
        """Replace the unpickler of ``DefaultLoadPlanner.load_bytes``."""
        name = item.dest_index.fqn
        loaded = load_object(content, f"{self.path}: {name}")
        if planner.flatten_state_dict:
            set_element(planner.original_state_dict, planner.mappings[name], loaded)
        else:
            planner.state_dict[name] = loaded


def load_common_file(folder: str | Path) -> Any:
    """Load ``common.pt``, the non-tensor state of earlier megatron-core versions."""
    path = Path(folder) / COMMON_FILE
    with open(path, "rb", opener=file_or_pipe) as file:
        return load_object(file, str(path))


def load_object(content: IO[bytes], name: str) -> Any:
    """Load a ``torch.save`` of plain values, tensors or numpy's random state.

    Args:
        name: of the content, for messages.

    Raises:
        UnusableCheckpoint: the content has anything else, or is damaged.
    """
    try:
        with _only(_OF_OBJECTS):
            return torch.load(content, weights_only=True)
    except Exception as error:  # invalid content can raise any error
        others = _disallowed_in(content)
        if others:
            raise UnusableCheckpoint(refusal(name, others)) from error
        raise UnusableCheckpoint(f"{name} is damaged, or holds more than plain values and tensors") from error


@contextmanager
def _only(allowed: dict[str, Any]) -> Iterator[None]:
    """Limit ``torch.load`` to ``allowed`` and torch's own types; others add more."""
    before = torch.serialization.get_safe_globals()
    torch.serialization.clear_safe_globals()
    torch.serialization.add_safe_globals([(value, name) for name, value in allowed.items()])
    try:
        yield
    finally:
        torch.serialization.clear_safe_globals()
        torch.serialization.add_safe_globals(before)


def _disallowed_in(content: IO[bytes]) -> list[str]:
    """List functions and classes that an object refers to and that are not allowed."""
    try:
        content.seek(0)
        if zipfile.is_zipfile(content):
            with zipfile.ZipFile(content) as archive:
                pickles = [archive.read(name) for name in archive.namelist() if name.endswith(".pkl")]
        else:
            content.seek(0)
            pickles = [content.read()]
        found = {name for each in pickles for name in _names(each)}
    except Exception:  # damaged content can raise any error
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
