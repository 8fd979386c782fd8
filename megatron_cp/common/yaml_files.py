"""Read YAML files within limits, also of their expanded aliases."""

from __future__ import annotations

import io
import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from megatron_cp.common.input_files import decode_text, read_bytes

# A recipe with all settings has 300 values; a blend of thousands of files fits too.
MOST_BYTES, MOST_VALUES, DEEPEST = 2**20, 5_000, 32
# Files that Hydra reads: 90 for a recipe with a file of another group, 3 for each further file and each 100 values.
MOST_LOOK_UPS = 400
_LONGEST_PLAIN = 1_000  # characters without quotes: a longer number takes long to parse
_TEXT_OF_A_VALUE = 100  # characters that count as one value


class TooLargeError(ValueError):
    """YAML file beyond the size of any recipe; ``what`` is wrong with it, and ``fix``."""

    def __init__(self, what: str, fix: str) -> None:
        super().__init__(f"{what}. Fix: {fix}")
        self.what, self.fix = what, fix


def bounded_text(path: str | os.PathLike[str]) -> str:
    """Read the text of a YAML file.

    Raises:
        OSError: the file cannot be read.
        TooLargeError: too large (also with aliases expanded), nested too deeply, or a number is too long.
        ValueError, YAMLError: not UTF-8, or not YAML.
    """
    content = read_bytes(path, MOST_BYTES + 1)
    if len(content) > MOST_BYTES:
        raise TooLargeError(f"is larger than {MOST_BYTES} bytes", "name fewer files in it")
    text = decode_text(content, path)
    count_values(text)
    return text


def read_yaml(path: str | os.PathLike[str]) -> Any:
    """Return the plain values of a YAML file; raises as :func:`bounded_text` does."""
    import yaml

    return yaml.safe_load(bounded_text(Path(path)))


@contextmanager
def bounded_hydra() -> Iterator[None]:
    """Limit the size and number of files that Hydra reads.

    Two files that each name the next one twice would be read exponentially often.
    """
    from hydra._internal.config_repository import CachingConfigRepository
    from hydra._internal.sources_registry import SourcesRegistry
    from hydra.core.plugins import Plugins
    from hydra.plugins.config_source import ConfigResult
    from omegaconf import OmegaConf

    Plugins.instance()  # loads the class that reads files
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
        # As Hydra's own method, which reads a byte order mark as text and then misses "# @package".
        config, header = OmegaConf.load(io.StringIO(text)), self._get_header_dict(text)
        return ConfigResult(self.provider, f"{self.scheme()}://{self.path}", config, header)

    def look_up(self: Any, config_path: str) -> Any:
        nonlocal left
        left -= 1 + values.get(config_path, 0) / 100
        if left < 0:
            what = "a file is included by its own defaults list, or the defaults lists include too many files"
            raise TooLargeError(what, "include fewer files in 'defaults', each once")
        return usual_look_up(self, config_path)

    source.load_config, repository.load_config = read, look_up
    try:
        yield
    finally:
        source.load_config, repository.load_config = usual_read, usual_look_up


def count_values(text: str) -> float:
    """Count the values of a YAML text, aliases expanded.

    Counts the parser's events: aliases are not followed, the values that they repeat were counted before. Raises as
    :func:`bounded_text`.
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
            what = f"expands to more than {MOST_VALUES} values, aliases included"
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
                raise TooLargeError(f"refers to itself by *{event.anchor}", "write the value instead")
            close(known.get(str(event.anchor), 1), None)
        elif isinstance(event, yaml.ScalarEvent):
            if event.style in (None, "") and len(event.value) > _LONGEST_PLAIN:
                what = f"has a value of {len(event.value)} characters without quotes"
                raise TooLargeError(what, "put long texts in quotes, and use shorter numbers")
            close(1 + len(event.value) / _TEXT_OF_A_VALUE, event.anchor)
    return counts[0]
