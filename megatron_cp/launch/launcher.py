"""Environment variables of the launcher (torchrun, Slurm) and of recipes."""

from __future__ import annotations

import os
import re
from collections.abc import Mapping

from megatron_cp.common.errors import ConfigError, Violation


def number(variable: str, fix: str = "start the run with torchrun, or unset it") -> int | None:
    """Return a variable's number; None if it is not set.

    Raises:
        ConfigError: not a number. Not checked by ``str.isdigit``, which accepts digits that ``int`` refuses.
    """
    text = os.environ.get(variable)
    if text is None:
        return None
    if not re.fullmatch(r"[0-9]{1,18}", text):
        message = f"the variable must be a number, got '{text[:40]}'"
        raise ConfigError([Violation("K35", "error", variable, message, fix)])
    return int(text)


def rank() -> int:
    """Return this process's rank; 0 without a launcher.

    Raises:
        ConfigError: RANK, LOCAL_RANK or a size is not a number, or RANK is not below WORLD_SIZE.
    """
    rank, ranks = number("RANK") or 0, world_size()
    local_rank(), local_world_size()  # checked here, before ranks wait for each other
    if ranks is not None and rank >= ranks:
        message = f"the variable must be below WORLD_SIZE={ranks}: ranks count from 0"
        raise ConfigError(
            [Violation("K35", "error", "RANK", message, "start the run with torchrun, or unset both", rank)]
        )
    return rank


def world_size() -> int | None:
    """Return the number of ranks; None without a launcher."""
    return number("WORLD_SIZE")


def local_rank() -> int | None:
    """Return this process's rank on its node; None without a launcher."""
    return number("LOCAL_RANK")


def local_world_size() -> int | None:
    """Return the number of ranks on this node; None without a launcher."""
    return number("LOCAL_WORLD_SIZE")


def on_one_node() -> bool:
    """Return whether all ranks are known to be on this node."""
    size = world_size()
    return size in (None, 1, local_world_size())


def is_first_rank() -> bool:
    """Return whether this process reports for all ranks."""
    try:
        return rank() == 0
    except ConfigError:
        return True


def can_notify_other_nodes() -> bool:
    """Return whether other nodes exist and a launcher keeps the store.

    The launcher stops the ranks of its own node itself. Not after a restart: the new ranks would read the report of the
    first start.
    """
    environment = os.environ
    return (
        environment.get("TORCHELASTIC_USE_AGENT_STORE") == "True"
        and environment.get("LOCAL_WORLD_SIZE") != environment.get("WORLD_SIZE")
        and environment.get("TORCHELASTIC_RESTART_COUNT", "0") == "0"
    )


def add_variables(variables: Mapping[str, str]) -> None:
    """Set a recipe's ``env_vars``, except variables that are set already."""
    for name, value in variables.items():
        os.environ.setdefault(name, value)
