"""Environment variables: what the launcher (torchrun, Slurm) says of this process, and what a recipe adds."""

from __future__ import annotations

import os
import re
from collections.abc import Mapping

from megatron_cp.common.errors import ConfigError, Violation


def number(variable: str, fix: str = "start the run with torchrun, or unset it") -> int | None:
    """A variable that holds a number; None where it is not set. ``fix`` says what to do where it holds something else.

    Raises:
        ConfigError: it holds something else. Not by ``str.isdigit``, which knows digits that ``int`` does not.
    """
    text = os.environ.get(variable)
    if text is None:
        return None
    if not re.fullmatch(r"[0-9]{1,18}", text):
        message = f"the variable must be a number, got '{text[:40]}'"
        raise ConfigError([Violation("K35", "error", variable, message, fix)])
    return int(text)


def rank() -> int:
    """This process's rank; 0 without a launcher.

    Raises:
        ConfigError: it is no number, or none of the ranks that were started; or what is said of its node is none.
    """
    rank, ranks = number("RANK") or 0, world_size()
    local_rank(), local_world_size()  # here, before ranks wait for each other
    if ranks is not None and rank >= ranks:
        message = f"the variable must be below WORLD_SIZE, which is {ranks}: ranks count from 0"
        raise ConfigError(
            [Violation("K35", "error", "RANK", message, "start the run with torchrun, or unset both", rank)]
        )
    return rank


def world_size() -> int | None:
    """The number of ranks that were started; None without a launcher."""
    return number("WORLD_SIZE")


def local_rank() -> int | None:
    """This process's rank among those of its node; None without a launcher."""
    return number("LOCAL_RANK")


def local_world_size() -> int | None:
    """The number of ranks on this node; None without a launcher."""
    return number("LOCAL_WORLD_SIZE")


def on_one_node() -> bool:
    """Whether all ranks are known to be on this node."""
    size = world_size()
    return size in (None, 1, local_world_size())


def is_first_rank() -> bool:
    """Whether this process is the one that speaks for all. So is each one whose rank is no number."""
    try:
        return rank() == 0
    except ConfigError:
        return True


def can_tell_other_nodes() -> bool:
    """Whether there are other nodes and a launcher that keeps the store. (It ends those of its own node itself; and
    what was said in a first start would be heard in the next.)"""
    said = os.environ
    return (
        said.get("TORCHELASTIC_USE_AGENT_STORE") == "True"
        and said.get("LOCAL_WORLD_SIZE") != said.get("WORLD_SIZE")
        and said.get("TORCHELASTIC_RESTART_COUNT", "0") == "0"
    )


def add_variables(variables: Mapping[str, str]) -> None:
    """Set a recipe's environment variables (``env_vars``), but none that the launcher or the shell has set."""
    for name, value in variables.items():
        os.environ.setdefault(name, value)
