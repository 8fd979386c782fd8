"""Results of evaluations of files: figures, JSON, table and picture."""

from __future__ import annotations

import json
import math
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

from megatron_cp.common.atomic_files import write_text
from megatron_cp.common.terminal import say

FOLDER = "evaluations"  # in a run folder
_MOST_DOCUMENTS = 1000  # listed one by one
_QUANTILES = (0.0, 0.1, 0.25, 0.5, 0.75, 0.9, 1.0)


def figures(sums: np.ndarray, num_bytes: float | None = None) -> dict[str, Any]:
    """Return the figures of sums: loss, tokens and correct predictions, float64 [3].

    ``num_bytes``: bytes of the tokens' text; None if there is no text.
    """
    loss, tokens, correct = sums.tolist()
    if not tokens:
        return {"tokens": 0}
    found: dict[str, Any] = {
        "tokens": int(tokens),
        "loss": loss / tokens,
        "perplexity": math.exp(min(loss / tokens, 700.0)),
        "accuracy": correct / tokens,
    }
    if num_bytes:
        found |= {"bytes": int(num_bytes), "bits_per_byte": loss / math.log(2) / num_bytes}
    return found


def by_position(positions: np.ndarray) -> list[dict[str, Any]]:
    """Return figures by the number of tokens before a label, in powers of two."""
    return [{"after_tokens": [2**k, 2 ** (k + 1) - 1], **figures(row)} for k, row in enumerate(positions) if row[1] > 0]


def by_document(documents: np.ndarray, num_bytes: np.ndarray | None) -> dict[str, Any]:
    """Return the documents' figures: all of up to 1000, and quantiles of their losses.

    Documents without a token in the loss are left out.
    """
    used = np.flatnonzero(documents[:, 1] > 0)
    losses = documents[used, 0] / documents[used, 1]
    found: dict[str, Any] = {"count": len(used)}
    if len(used):
        found["mean_loss"] = float(losses.mean())
        quantiles = np.quantile(losses, _QUANTILES).tolist()
        found["loss_quantiles"] = dict(zip(map(str, _QUANTILES), quantiles, strict=True))
    if len(used) <= _MOST_DOCUMENTS:
        of_document = [None if num_bytes is None else float(num_bytes[k]) for k in used]
        found["documents"] = [
            {"document": int(k), **figures(documents[k], size)} for k, size in zip(used, of_document, strict=True)
        ]
    return found


def write_result(folder: Path, name: str, result: dict[str, Any]) -> Path:
    """Write ``folder/evaluations/NAME.json``; return its path.

    A name that exists gets a number.
    """
    target = folder / FOLDER
    target.mkdir(exist_ok=True)
    free = next(path for n in range(1, 1_000_000) if not (path := target / f"{name}{f'-{n}' * (n > 1)}.json").exists())
    write_text(free, json.dumps(result, indent=1) + "\n")
    return free


def read_results(folder: Path) -> dict[str, dict[str, Any]]:
    """Return the evaluations of a run folder by name; damaged files are left out."""
    found = {}
    for path in sorted((folder / FOLDER).glob("*.json")):
        try:
            values = json.loads(path.read_text(encoding="utf-8"))
        except (OSError, ValueError):
            continue
        if isinstance(values, dict) and isinstance(values.get("loss"), float):
            found[path.stem] = values
    return found


def draw(path: Path, positions: Sequence[dict[str, Any]], title: str) -> None:
    """Draw the loss against the number of tokens before a label."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(7, 4), layout="constrained")
    axes = figure.subplots()
    axes.plot([row["after_tokens"][0] for row in positions], [row["loss"] for row in positions], marker="o")
    axes.set_xscale("log", base=2)
    axes.set_xlabel("tokens of the sample before the label, at least")
    axes.set_ylabel("loss per token")
    axes.set_title(title)
    axes.grid(alpha=0.3)
    figure.savefig(path, dpi=120)


def print_result(result: dict[str, Any]) -> None:
    """Print the figures of an evaluation: all, by file, by position."""
    files = result["files"] if len(result["files"]) > 1 else []
    rows = [("all", result), *((each["path"], each) for each in files)]
    rows += [(f"after {row['after_tokens'][0]:,} tokens", row) for row in result["positions"]]
    head = ("", "tokens", "loss", "perplexity", "bits/byte", "accuracy")
    lines = [head, *((name, *_cells(row)) for name, row in rows)]
    widths = [max(len(line[k]) for line in lines) for k in range(len(head))]
    for line in lines:
        cells = [f"{cell:>{width}}" for cell, width in zip(line[1:], widths[1:], strict=True)]
        say("  ".join([f"{line[0]:{widths[0]}}", *cells]))


def _cells(row: dict[str, Any]) -> tuple[str, ...]:
    per_byte = f"{row['bits_per_byte']:.4f}" if "bits_per_byte" in row else ""
    if not row["tokens"]:
        return ("0", "", "", "", "")
    return (f"{row['tokens']:,}", f"{row['loss']:.4f}", f"{row['perplexity']:,.3f}", per_byte, f"{row['accuracy']:.2%}")
