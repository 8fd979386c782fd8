"""Check that all ranks run the same configuration, code and checkpoint.

Ranks compare a :func:`digest` of their :func:`fingerprint`. If digests differ, the fingerprints are gathered and their
:func:`differences` shown.
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
    format_ranks,
    format_violations,
    ranks_by_value,
)
from megatron_cp.common.interpolation import FromEnvironment
from megatron_cp.config.names import NAME
from megatron_cp.parallel.collectives import gather_objects
from megatron_cp.rules.environment import Environment, installed_version
from megatron_cp.training.checkpoint.resume import ResumePoint

Fingerprint = dict[str, str]

# Hardware and files of a node: values may differ between nodes.
_OF_THE_NODE = ("NCCL_SOCKET_IFNAME", "NCCL_IB_HCA", "NCCL_TOPO_FILE", "NCCL_DEBUG_FILE")
_LIBRARIES = ("torch", "megatron-core", "transformer-engine", "flash-attn", "numpy")


def check_consistency(settings: dict[str, Any]) -> None:
    """Compare settings, code and environment of all ranks. Collective, one exchange.

    Raises:
        RuntimeFault: on every rank, with the differing fields and the ranks of each value.
    """
    own = fingerprint(settings, Environment.detect())
    if len(set(gather_objects(digest(own)))) == 1:
        return
    found = format_violations(differences(gather_objects(own)))
    what = "ranks differ in settings, code or environment; training not started"
    raise RuntimeFault(f"{what}.\n{found}", on_all_ranks=True)


def common_resume_point(find: Callable[[], ResumePoint | None]) -> ResumePoint | None:
    """Return the resume point of ``find`` if all ranks found the same. Collective.

    Nodes may see different files under one name.

    Raises:
        ConfigError: raised by ``find``; on every rank.
        RuntimeFault: on every rank, if ranks found different checkpoints.
    """
    start, error = None, None
    try:
        start = find()
        found = f"iteration {start.iteration} of {start.root}" if start else "no checkpoint"
    except ConfigError as refused:
        error, found = refused, first_line(refused)
    gathered = gather_objects(found)
    if len(set(gathered)) > 1:
        raise RuntimeFault(
            f"ranks found different checkpoints to resume from; training not started: {_ranks_per_value(gathered)}. "
            f"Fix: set {NAME.checkpoint.save} and {NAME.checkpoint.load} to folders that all nodes share",
            on_all_ranks=True,
        )
    if error is not None:
        raise error
    return start


def fingerprint(settings: dict[str, Any], environment: Environment) -> Fingerprint:
    """Return everything that must be equal on all ranks, as field -> text.

    Covers settings, code, libraries and key environment variables.
    """
    entries = dict(_flatten(settings))
    entries["code"] = _code_digest()
    entries |= {f"version of {name}": str(installed_version(name)) for name in _LIBRARIES}
    entries["device"] = environment.device
    entries["compute capability"] = str(environment.compute_capability)
    entries |= {f"variable {k}": v for k, v in environment.variables.items() if k not in _OF_THE_NODE}
    return entries


def digest(entries: Mapping[str, str]) -> str:
    """Return the SHA-256 of a fingerprint, as 64 hexadecimal digits."""
    text = "\n".join(f"{name}={value}" for name, value in sorted(entries.items()))
    return hashlib.sha256(text.encode()).hexdigest()


def differences(fingerprints: Sequence[Mapping[str, str]]) -> list[Violation]:
    """Return one error per differing field, with the ranks of each value.

    ``fingerprints[rank]`` is the fingerprint of that rank.
    """
    found = []
    for name in sorted({name for entries in fingerprints for name in entries}):
        values = [entries.get(name, "not set") for entries in fingerprints]
        if len(set(values)) > 1:
            fix = "start all ranks with the same command, code, libraries and variables"
            found.append(Violation("K20", "error", name, f"differs between ranks: {_ranks_per_value(values)}", fix))
    return found


def _ranks_per_value(values: Sequence[str]) -> str:
    """Return each distinct value of ``values[rank]`` with its ranks."""
    return "; ".join(f"{value} on {format_ranks(ranks)}" for value, ranks in ranks_by_value(values).items())


def _flatten(value: Any, prefix: str = "") -> list[tuple[str, str]]:
    if isinstance(value, dict) and (value or not prefix):
        return [
            entry for key, inner in value.items() for entry in _flatten(inner, f"{prefix}.{key}" if prefix else key)
        ]
    if isinstance(value, FromEnvironment):  # compared by digest, never shown
        return [(prefix, f"{value!r} of digest {hashlib.sha256(value.encode()).hexdigest()[:8]}")]
    return [(prefix, repr(value))]


@cache
def _code_digest() -> str:
    """Return a digest of this package's source, which detects nodes with an old copy.

    Cached: the loaded code does not change.
    """
    root = Path(megatron_cp.__file__).parent
    combined = hashlib.sha256()
    for path in sorted(root.rglob("*.py")):
        combined.update(str(path.relative_to(root)).encode())
        combined.update(path.read_bytes())
    return combined.hexdigest()[:16]
