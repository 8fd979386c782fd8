"""Messages of failed commands, each printed once by one rank."""

from __future__ import annotations

import contextlib
import json
import os
import socket
import sys
import time

from megatron_cp.common.errors import RuntimeFault
from megatron_cp.common.limits import reached_limit
from megatron_cp.common.terminal import printable, say
from megatron_cp.launch import launcher
from megatron_cp.launch.process import has_own_launcher

_REPORT_DELAY = 3.0


def report(error: BaseException, text: str, program: str = "megatron-cp") -> None:
    """Print an error that all ranks have found, and notify the other nodes."""
    text = f"{program}: {_wait_for_turn()}{text}"
    if not (_has_torch_launcher() and _write_error_file(text)):
        say(text, file=sys.stderr, flush=True)
    notify_other_nodes(error)


def report_fault(fault: RuntimeFault) -> None:
    """Print the fault that ended a run, at once."""
    if fault.on_all_ranks and not launcher.is_first_rank():
        time.sleep(_REPORT_DELAY)
    else:
        text = f"megatron-cp: {fault}"
        say(text, file=sys.stderr, flush=True)
        if _has_torch_launcher():
            _write_error_file(text)
    notify_other_nodes(fault)


def report_limit(error: Exception) -> bool:
    """Notify the other nodes, and print the system limit, if any, and return it."""
    limit = reached_limit(error)
    if limit is not None:
        rank = launcher.number("RANK") or 0
        say(f"megatron-cp: rank {rank}, on {socket.gethostname()}: {limit}", file=sys.stderr, flush=True)
    notify_other_nodes(error if limit is None else RuntimeFault(limit))
    return limit is not None


def notify_other_nodes(error: BaseException) -> None:
    """Publish an error for ranks of other nodes, which may wait for this rank."""
    if isinstance(error, Exception) and launcher.can_notify_other_nodes():
        with contextlib.suppress(ImportError, OSError):  # torch itself may be what is broken
            from megatron_cp.launch.rendezvous import publish_failure

            publish_failure(error)


def _wait_for_turn() -> str:
    """Wait until this rank should print; return the prefix that names the rank.

    The first rank prints at once, and its launcher then stops the other ranks of the node. On another node the error
    may exist only there (a missing file): the node's first rank prints after a delay, the others after twice the delay.
    """
    if launcher.is_first_rank():
        return ""
    time.sleep(_REPORT_DELAY * (2 if launcher.local_rank() else 1))
    return f"rank {launcher.rank()}, on {socket.gethostname()}: "


def _has_torch_launcher() -> bool:
    return "TORCHELASTIC_ERROR_FILE" in os.environ and not has_own_launcher()


def _write_error_file(text: str) -> bool:
    """Write torch's error file; return whether it was written.

    ``ProcessFailure`` of torch 2.11 reads it (distributed/elastic/multiprocessing/errors/__init__.py:113).
    """
    message = {"message": printable(text), "extraInfo": {"timestamp": str(int(time.time()))}}
    try:
        with open(os.environ["TORCHELASTIC_ERROR_FILE"], "w", encoding="utf-8") as file:
            json.dump({"message": message}, file)
    except OSError:
        return False
    return True
