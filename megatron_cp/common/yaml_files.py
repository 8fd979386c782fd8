"""YAML files from anywhere: read within bounds, since a few lines of aliases can stand for a billion values."""

from __future__ import annotations

import io
import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from megatron_cp.common.input_files import decode_text, read_bytes

# A recipe with all settings has 300 values; a blend of thousands of files fits.
MOST_BYTES, MOST_VALUES, DEEPEST = 2**20, 5_000, 32
# Of files by Hydra: 90 for a recipe with another file of a group, 3 for each further file and each 100 values in it.
MOST_LOOK_UPS = 400
_LONGEST_PLAIN = 1_000  # a number has no quotes, and one of more digits takes long to calculate with
_TEXT_OF_A_VALUE = 100  # characters that count as much as a value


class TooLargeError(ValueError):
    """A YAML file stands for more than a recipe can need.

    ``what`` is wrong with the file, and ``fix`` what to do.
    """

    def __init__(self, what: str, fix: str) -> None:
        super().__init__(f"{what}. Fix: {fix}")
        self.what, self.fix = what, fix


def bounded_text(path: str | os.PathLike[str]) -> str:
    """The text of a YAML file.

    Raises:
        OSError: it cannot be read.
        TooLargeError: it is too large, also with its aliases written out, too deep, or holds too long a number.
        ValueError, YAMLError: it is no UTF-8, or no YAML.
    """
    content = read_bytes(path, MOST_BYTES + 1)
    if len(content) > MOST_BYTES:
        raise TooLargeError(f"is larger than {MOST_BYTES} bytes", "name fewer files in it")
    text = decode_text(content, path)
    count_values(text)
    return text


def read_yaml(path: str | os.PathLike[str]) -> Any:
    """The plain values of a YAML file; raises as :func:`bounded_text` does."""
    import yaml

    return yaml.safe_load(bounded_text(Path(path)))


@contextmanager
def bounded_hydra() -> Iterator[None]:
    """Let Hydra read files only as far as :func:`bounded_text` allows, and only so many by defaults lists.

    Two files that each name the next one twice would be read as often as aliases are written out.
    """
    from hydra._internal.config_repository import CachingConfigRepository
    from hydra._internal.sources_registry import SourcesRegistry
    from hydra.core.plugins import Plugins
    from hydra.plugins.config_source import ConfigResult
    from omegaconf import OmegaConf

    Plugins.instance()  # loads the class that reads files, under a name of its own
    source: Any = SourcesRegistry.instance().types["file"]
    repository: Any = CachingConfigRepository
    usual_read, usual_look_up = source.load_config, repository.load_config
    left: float = MOST_LOOK_UPS
    values: dict[str, float] = {}

    def read(self: Any, config_path: str) -> Any:
        file = Path(self.path, self._normalize_file_name(config_path))
        try:
            text = bounded_text(file)
            values[config_path] = count_values(text)
        except TooLargeError as error:
            raise TooLargeError(f"{file.name} {error.what}", error.fix) from error
        # As Hydra's own method does. That one reads a byte order mark as text, and then misses "# @package".
        config, header = OmegaConf.load(io.StringIO(text)), self._get_header_dict(text)
        return ConfigResult(self.provider, f"{self.scheme()}://{self.path}", config, header)

    def look_up(self: Any, config_path: str) -> Any:
        nonlocal left
        left -= 1 + values.get(config_path, 0) / 100
        if left < 0:
            what = "a file names itself in its defaults list, or the lists name too many files"
            raise TooLargeError(what, "name fewer files in 'defaults', each once")
        return usual_look_up(self, config_path)

    source.load_config, repository.load_config = read, look_up
    try:
        yield
    finally:
        source.load_config, repository.load_config = usual_read, usual_look_up


def count_values(text: str) -> float:
    """The number of values that a YAML text stands for, aliases written out; raises as :func:`bounded_text` does.

    Counted from the parser's events: aliases are not followed, what they name was counted before.
    """
    import yaml

    counts: list[float] = [0]
    names: list[str | None] = [None]
    known: dict[str, float] = {}

    def close(count: float, name: str | None) -> None:
        if name is not None:
            known[name] = count
        counts[-1] += count
        if counts[-1] > MOST_VALUES:
            what = f"stands for more than {MOST_VALUES} values with its aliases written out"
            raise TooLargeError(what, "write fewer values, without aliases (*name)")

    for event in yaml.parse(text, Loader=getattr(yaml, "CSafeLoader", yaml.SafeLoader)):
        if isinstance(event, yaml.CollectionStartEvent):
            counts.append(1)
            names.append(event.anchor)
            if len(counts) > DEEPEST:
                raise TooLargeError(f"is nested deeper than {DEEPEST} levels", "write sections of plain values")
        elif isinstance(event, yaml.CollectionEndEvent):
            close(counts.pop(), names.pop())
        elif isinstance(event, yaml.AliasEvent):
            if event.anchor in names:
                raise TooLargeError(f"names itself by *{event.anchor}", "write the value instead")
            close(known.get(str(event.anchor), 1), None)
        elif isinstance(event, yaml.ScalarEvent):
            if event.style in (None, "") and len(event.value) > _LONGEST_PLAIN:
                what = f"holds a value of {len(event.value)} characters without quotes"
                raise TooLargeError(what, "write a text in quotes, and a number that a run can have")
            close(1 + len(event.value) / _TEXT_OF_A_VALUE, event.anchor)
    return counts[0]
