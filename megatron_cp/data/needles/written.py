"""Write retrieval tasks to train on: JSON lines of a prompt and a response."""

from __future__ import annotations

import json
from pathlib import Path

from megatron_cp.common.atomic_files import atomic_write
from megatron_cp.common.errors import DataError
from megatron_cp.config.names import NAME
from megatron_cp.config.run_config import DatasetConfig
from megatron_cp.data.needles.source import NeedleSource


def write_rows(path: str, source: NeedleSource, config: DatasetConfig) -> int:
    """Write all samples, those of different cells by turns; return their number.

    Whole words replace the cut line at a sample's start, so a row may have a few tokens less than its length.

    Raises:
        DataError: the file exists or cannot be written, or the recipe has no keys for prompts and responses.
    """
    prompt, response = config.prompt_key, config.response_key
    if not prompt or not response:
        name = NAME.dataset.response_key if prompt else NAME.dataset.prompt_key
        raise DataError(
            f"{name}=null: rows have a prompt and a response. Fix: {name}={'response' if prompt else 'prompt'}"
        )
    file = Path(path)
    if file.exists():
        raise DataError(f"--write {path}: exists. Fix: delete it, or name another file")
    cells = len(source.cells)
    try:
        with atomic_write(file) as (partial,), open(partial, "w", encoding="utf-8") as rows:
            for number in range(len(source)):
                written = source.write(number % cells * source.per_cell + number // cells)
                rows.write(json.dumps({prompt: written.prompt, response: written.response}) + "\n")
    except OSError as error:
        raise DataError(f"--write {path}: cannot be written: {error.strerror}.") from error
    return len(source)
