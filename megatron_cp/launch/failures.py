"""What a command prints when it fails: once, by one rank of all that failed alike."""

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

_SECONDS_TO_SPEAK = 3.0


def report(error: BaseException, text: str, program: str = "megatron-cp") -> None:
    """Print what every rank has found (wrong settings, data or arguments), and tell the ranks of other nodes."""
    text = f"{program}: {_its_turn()}{text}"
    if not (_has_torchs_launcher() and _leave_for_launcher(text)):
        say(text, file=sys.stderr, flush=True)
    report_to_other_nodes(error)


def report_fault(fault: RuntimeFault) -> None:
    """Print what ended a run, at once."""
    if fault.on_all_ranks and not launcher.is_first_rank():
        time.sleep(_SECONDS_TO_SPEAK)
    else:
        text = f"megatron-cp: {fault}"
        say(text, file=sys.stderr, flush=True)
        if _has_torchs_launcher():
            _leave_for_launcher(text)
    report_to_other_nodes(fault)


def report_limit(error: Exception) -> bool:
    """Report an error to the other nodes, and print the system's limit behind it; returns whether there is one."""
    limit = reached_limit(error)
    if limit is not None:
        rank = launcher.number("RANK") or 0
        say(f"megatron-cp: rank {rank}, on {socket.gethostname()}: {limit}", file=sys.stderr, flush=True)
    report_to_other_nodes(error if limit is None else RuntimeFault(limit))
    return limit is not None


def report_to_other_nodes(error: BaseException) -> None:
    """Their ranks may wait for this one, where only this node lacks something or is set up otherwise."""
    if isinstance(error, Exception) and launcher.can_tell_other_nodes():
        with contextlib.suppress(ImportError, OSError):  # torch itself may be what is broken
            from megatron_cp.launch.rendezvous import publish_failure

            publish_failure(error)


def _its_turn() -> str:
    """Wait until this rank is to say what all ranks have found, as a rule; returns who it says that it is.

    The first rank does at once, and its launcher stops the ranks of its node. Another node may be alone with it (a file
    that only this one lacks): so the first of each node does after a while, and then any that is still there.
    """
    if launcher.is_first_rank():
        return ""
    time.sleep(_SECONDS_TO_SPEAK * (2 if launcher.local_rank() else 1))
    return f"rank {launcher.rank()}, on {socket.gethostname()}: "


def _has_torchs_launcher() -> bool:
    return "TORCHELASTIC_ERROR_FILE" in os.environ and not has_own_launcher()


def _leave_for_launcher(text: str) -> bool:
    """Leave a text to torch's launcher, which prints it at the end, below its own traceback; returns whether it will.

    The file is what torch 2.11's ``ProcessFailure`` reads (distributed/elastic/multiprocessing/errors/__init__.py:113).
    """
    message = {"message": printable(text), "extraInfo": {"timestamp": str(int(time.time()))}}
    try:
        with open(os.environ["TORCHELASTIC_ERROR_FILE"], "w", encoding="utf-8") as file:
            json.dump({"message": message}, file)
    except OSError:
        return False
    return True
