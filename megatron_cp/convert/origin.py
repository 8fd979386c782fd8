"""Origin of an export: checkpoint, settings of the tokenizer, and files."""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
from dataclasses import asdict, dataclass, replace
from hashlib import sha256
from pathlib import Path
from typing import Any

from megatron_cp.common import input_files
from megatron_cp.common.errors import Violation
from megatron_cp.config.run_config import TokenizerConfig
from megatron_cp.config.schema import build
from megatron_cp.mcore.checkpoint_index import INDEX
from megatron_cp.training.checkpoint.checksums import CHECKSUMS

ORIGIN = "megatron_cp.json"  # other programs ignore it


@dataclass(frozen=True)
class RunExport:
    """A folder in Hugging Face's format in a run's folder; ``report`` describes it."""

    folder: Path
    report: str


def folder_of_export(root: Path, iteration: int) -> Path:
    """Return the folder of a checkpoint's export; the name is no checkpoint's."""
    return root.resolve() / "exported" / f"iteration_{iteration:07d}"


def size_of(folder: Path) -> str:
    """Return the size of a folder's files in MB or GB."""
    size = sum(_files(folder).values())
    return f"{size / 1e9:.1f} GB" if size >= 1e9 else f"{size / 1e6:.1f} MB"


def write_origin(folder: Path, checkpoint: Path, tokenizer: TokenizerConfig) -> None:
    """Record the origin of an export whose other files are complete."""
    origin = {
        "checkpoint": str(checkpoint),
        "digest": _digest(checkpoint),
        "tokenizer": asdict(tokenizer),
        "files": _files(folder),
    }
    (folder / ORIGIN).write_text(json.dumps(origin, indent=2) + "\n", encoding="utf-8")


def tokenizer_of(folder: Path) -> TokenizerConfig:
    """Return the settings of an export's tokenizer, which reads the folder's files."""
    problems: list[Violation] = []
    given = _read_origin(folder).get("tokenizer")
    settings: TokenizerConfig = build(TokenizerConfig, given if isinstance(given, dict) else {}, problems)
    files = settings.tokenizer_type == "HuggingFaceTokenizer"
    return replace(settings, tokenizer_model=str(folder) if files else None)


def is_of(folder: Path, checkpoint: Path) -> bool:
    """Return whether a folder is a complete export of a checkpoint as it is now."""
    origin = _read_origin(folder)
    return (origin.get("digest"), origin.get("files")) == (_digest(checkpoint), _files(folder))


def _digest(checkpoint: Path) -> str | None:
    """Return a digest of a checkpoint's checksums; of its index in one without any."""
    for name in (CHECKSUMS, INDEX):
        try:
            return sha256(input_files.read_bytes(checkpoint / name)).hexdigest()
        except FileNotFoundError:
            continue
        except OSError:
            return None
    return None


def _read_origin(folder: Path) -> Mapping[str, Any]:
    """Read an export's origin; empty without one."""
    try:
        origin = input_files.read_json(folder / ORIGIN)
    except (OSError, ValueError):
        return {}
    return origin if isinstance(origin, dict) else {}


def _files(folder: Path) -> dict[str, int]:
    """Return the sizes of a folder's files by name, without the origin's."""
    if not os.path.isdir(folder):
        return {}
    return {path.name: path.stat().st_size for path in sorted(folder.iterdir()) if path.name != ORIGIN}
