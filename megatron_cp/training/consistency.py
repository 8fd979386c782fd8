"""Whether all ranks run the same thing: configuration, code, libraries, key variables and the checkpoint to begin with.

Each rank makes a :func:`fingerprint` and its :func:`digest`; the digests of all ranks are compared and, only if they
differ, the fingerprints gathered and their :func:`differences` shown.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Mapping, Sequence
from functools import cache
from pathlib import Path
from typing import Any

import megatron_cp
from megatron_cp.common.errors import (
    ConfigError,
    RuntimeFault,
    Violation,
    first_line,
    format_violations,
    ranks_by_value,
    shown_ranks,
)
from megatron_cp.common.interpolation import FromEnvironment
from megatron_cp.config.names import NAME
from megatron_cp.parallel.collectives import gather_objects
from megatron_cp.rules.environment import Environment, installed_version
from megatron_cp.training.checkpoint.resume import ResumePoint

Fingerprint = dict[str, str]

# These describe a node's own hardware and files, and may well differ between nodes.
_OF_THE_NODE = ("NCCL_SOCKET_IFNAME", "NCCL_IB_HCA", "NCCL_TOPO_FILE", "NCCL_DEBUG_FILE")
_LIBRARIES = ("torch", "megatron-core", "transformer-engine", "flash-attn", "numpy")


def check_all_ranks_agree(settings: dict[str, Any]) -> None:
    """Compare a digest of all settings and all else that must be equal; collective, one small exchange if all is well.

    Raises:
        RuntimeFault: on every rank, naming the fields that differ and which ranks have what.
    """
    mine = fingerprint(settings, Environment.detect())
    if len(set(gather_objects(digest(mine)))) == 1:
        return
    found = format_violations(differences(gather_objects(mine)))
    raise RuntimeFault(
        f"ranks differ in configuration, code or environment; training not started.\n{found}", on_all_ranks=True
    )


def common_resume_point(find: Callable[[], ResumePoint | None]) -> ResumePoint | None:
    """The start that ``find`` finds, the same on every rank; collective. Nodes may see other files under one name.

    Raises:
        ConfigError: as ``find`` does, on every rank.
        RuntimeFault: on every rank, where not all find the same checkpoint.
    """
    start, error = None, None
    try:
        start = find()
        found = f"iteration {start.iteration} of {start.root}" if start else "no checkpoint"
    except ConfigError as refused:
        error, found = refused, first_line(refused)
    everyone = gather_objects(found)
    if len(set(everyone)) > 1:
        raise RuntimeFault(
            f"ranks found different checkpoints to resume from; training not started: {_who_has_what(everyone)}. "
            f"Fix: set {NAME.checkpoint.save} and {NAME.checkpoint.load} to folders that all nodes share",
            on_all_ranks=True,
        )
    if error is not None:
        raise error
    return start


def fingerprint(settings: dict[str, Any], environment: Environment) -> Fingerprint:
    """Everything that must be equal on all ranks, as field -> text: settings, code, libraries, key variables."""
    entries = dict(_flatten(settings))
    entries["code"] = _code_digest()
    entries |= {f"version of {name}": str(installed_version(name)) for name in _LIBRARIES}
    entries["device"] = environment.device
    entries["compute capability"] = str(environment.compute_capability)
    entries |= {f"variable {k}": v for k, v in environment.variables.items() if k not in _OF_THE_NODE}
    return entries


def digest(entries: Mapping[str, str]) -> str:
    """A fingerprint in 64 hexadecimal digits."""
    text = "\n".join(f"{name}={value}" for name, value in sorted(entries.items()))
    return hashlib.sha256(text.encode()).hexdigest()


def differences(fingerprints: Sequence[Mapping[str, str]]) -> list[Violation]:
    """One error for each field that differs, naming who has what; ``fingerprints[rank]`` is that rank's."""
    found = []
    for name in sorted({name for entries in fingerprints for name in entries}):
        values = [entries.get(name, "not set") for entries in fingerprints]
        if len(set(values)) > 1:
            fix = "start all ranks with the same command, code, libraries and variables"
            found.append(Violation("K20", "error", name, f"differs between ranks: {_who_has_what(values)}", fix))
    return found


def _who_has_what(values: Sequence[str]) -> str:
    """``values[rank]``, each once with its ranks."""
    return "; ".join(f"{value} on {shown_ranks(ranks)}" for value, ranks in ranks_by_value(values).items())


def _flatten(value: Any, prefix: str = "") -> list[tuple[str, str]]:
    if isinstance(value, dict) and (value or not prefix):
        return [
            entry for key, inner in value.items() for entry in _flatten(inner, f"{prefix}.{key}" if prefix else key)
        ]
    if isinstance(value, FromEnvironment):  # compared, and not shown
        return [(prefix, f"{value!r} of digest {hashlib.sha256(value.encode()).hexdigest()[:8]}")]
    return [(prefix, repr(value))]


@cache
def _code_digest() -> str:
    """A digest of this package's source, so that a node with an old copy is found out. The code that is loaded does
    not change, so neither does this."""
    root = Path(megatron_cp.__file__).parent
    combined = hashlib.sha256()
    for path in sorted(root.rglob("*.py")):
        combined.update(str(path.relative_to(root)).encode())
        combined.update(path.read_bytes())
    return combined.hexdigest()[:16]
