"""Read run folders, including running and killed runs."""

from __future__ import annotations

import os
from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml

from megatron_cp.attention.transports.registry import RING, known_transports
from megatron_cp.common.errors import DataError, readable
from megatron_cp.common.jsonl_log import METRICS, read_lines
from megatron_cp.common.yaml_files import read_yaml

_LARGEST = 1e100
Points = tuple[list[int], list[float]]  # iterations and values


@dataclass(frozen=True)
class LoggedRun:
    """Content of a run folder.

    steps: lines of optimizer steps, by iteration. events: other lines (evaluations), in order of writing.
    measured: evaluations of other data or weights (train.skip_train), each with ``measured_with``.
    config: content of ``config.yaml``, {} if missing.
    """

    folder: Path
    name: str
    config: Mapping[str, Any]
    steps: Sequence[Mapping[str, Any]]
    events: Sequence[Mapping[str, Any]]
    measured: Sequence[Mapping[str, Any]] = ()

    def points(self, field: str) -> Points:
        """Return iterations and values of a field; the latest value counts."""
        latest = {line["iteration"]: number_of(line[field]) for line in (*self.steps, *self.events) if field in line}
        kept = [(i, value) for i, value in sorted(latest.items()) if value is not None]
        return [i for i, _ in kept], [value for _, value in kept]

    def setting(self, section: str, name: str) -> Any:
        """Return a configuration value, None if missing."""
        values = self.config.get(section)
        return values.get(name) if isinstance(values, Mapping) else None

    @property
    def ranks(self) -> int | None:
        """The number of devices, from whole and per-device rates."""
        for step in self.steps:
            whole, one = number_of(step.get("tokens_per_s")), number_of(step.get("tokens_per_s_per_device"))
            if whole and one and (ranks := number_of(whole / one)):
                return round(ranks)
        return None

    @property
    def phase_seconds(self) -> dict[str, float]:
        """Mean seconds per iteration in each phase.

        Evaluation and checkpoint times are spread over the iterations.
        """
        sums: dict[str, float] = defaultdict(float)
        covered, last = 0, self.steps[0]["iteration"] - 1
        for step in self.steps:
            if not isinstance(step.get("timers_s"), dict):
                continue
            iterations, last = step["iteration"] - last, step["iteration"]  # the mean over these
            covered += iterations
            for name, seconds in step["timers_s"].items():
                sums[name] += iterations * (number_of(seconds) or 0.0)
        return {name: seconds / covered for name, seconds in sums.items()}

    @property
    def layout(self) -> str:
        """The parallel layout: ``4 ranks: cp 4 (a2a+p2p [2, 2]), dp 1``."""
        sizes = {
            short: value if isinstance(value := self.setting("model", f"{name}_parallel_size"), int) else 1
            for short, name in (
                ("tp", "tensor_model"),
                ("cp", "context"),
                ("pp", "pipeline_model"),
                ("ep", "expert_model"),
            )
        }
        parts = [f"{short} {size}" for short, size in sizes.items() if size > 1 and short != "cp"]
        if self.setting("model", "dynamic_context_parallel"):
            parts.insert(0, f"dynamic cp up to {sizes['cp']}")
        elif sizes["cp"] > 1:
            kinds = self.setting("model", "cp_comm_type") or RING.name
            names = list(dict.fromkeys(map(str, kinds if isinstance(kinds, list) else [kinds])))
            hierarchical = any(transport.hierarchical for transport in known_transports(names))
            levels = self.setting("model", "hierarchical_context_parallel_sizes") if hierarchical else None
            parts.insert(0, f"cp {sizes['cp']} ({', '.join(names)}{f' {levels}' if levels else ''})")
        if self.ranks and isinstance(self.config.get("model"), Mapping):
            replicas = self.ranks // max(1, sizes["tp"] * sizes["cp"] * sizes["pp"])
            parts += [f"dp {replicas}"] if replicas > 1 else []
        ranks = "? ranks" if self.ranks is None else "1 rank" if self.ranks == 1 else f"{self.ranks} ranks"
        return f"{ranks}: {', '.join(parts)}" if parts else ranks


def number_of(value: Any) -> float | None:
    """Return a logged number; None if not finite, too large to draw or no number."""
    return float(value) if isinstance(value, int | float) and abs(value) <= _LARGEST else None


def read_runs(folders: Sequence[Path]) -> list[LoggedRun]:
    """Read run folders, each with a distinct name.

    Raises:
        DataError: a folder is missing, is not a run folder, or has no step yet.
    """
    names = _names(folders)
    return [_read(folder, name) for folder, name in zip(folders, names, strict=True)]


def _read(folder: Path, name: str) -> LoggedRun:
    if not os.path.isdir(folder):  # unlike Path.is_dir, never raises
        raise DataError(f"there is no run folder {folder}")
    metrics = folder / METRICS
    if not os.path.isfile(metrics):
        inside = sorted(path.parent.name for path in folder.glob(f"*/{METRICS}"))
        hint = f"; run folders in it: {', '.join(inside[:8])}" if inside else ""
        raise DataError(f"{folder} is not a run folder: {METRICS} is missing{hint}")
    steps: dict[int, Mapping[str, Any]] = {}
    events: list[Mapping[str, Any]] = []
    measured: list[Mapping[str, Any]] = []
    with readable(metrics):
        lines = read_lines(metrics)
    for line in lines:
        if "lm_loss" in line:
            steps[line["iteration"]] = line
        else:
            (measured if line.get("measured_with") else events).append(line)
    if not steps:
        raise DataError(
            f"{metrics} has no complete training step: the run ended before the first step, or has just started"
        )
    return LoggedRun(folder, name, _config(folder), [steps[i] for i in sorted(steps)], events, measured)


def _config(folder: Path) -> Mapping[str, Any]:
    try:
        config = read_yaml(folder / "config.yaml")
    except (OSError, yaml.YAMLError, ValueError, RecursionError):
        return {}
    return config if isinstance(config, dict) else {}


def _names(folders: Sequence[Path]) -> list[str]:
    """Return the shortest trailing path parts that are distinct."""
    paths = [folder.absolute() for folder in folders]
    for count in range(1, max(len(path.parts) for path in paths) + 1):
        names = ["/".join(path.parts[-count:]) for path in paths]
        if len(set(names)) == len(set(paths)):
            return names
    return [str(path) for path in paths]
