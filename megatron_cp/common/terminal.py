"""Safe text for a terminal: control characters are escaped, secrets are hidden.

Every message, log line and table goes through here: names and values may come from files of unknown origin.
"""

from __future__ import annotations

import argparse
import logging
import os
import re
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from typing import IO, Any, NoReturn

# C0 and C1 controls except tab and newline, line separators, marks that change the text's direction, lone surrogates
# (bytes of a file name that are not UTF-8).
_UNSAFE = re.compile("[\x00-\x08\x0b-\x1f\x7f-\x9f\u061c\u200e\u200f\u2028-\u202e\u2066-\u2069\ud800-\udfff]")
# A shorter value may occur in unrelated text.
_SHORTEST_HIDDEN = 8
_hidden: dict[str, str] = {}


def hide(value: str, shown: str) -> None:
    """Print ``shown`` instead of ``value`` from now on, unless it is short or a path."""
    if len(value) >= _SHORTEST_HIDDEN and not os.path.exists(value):
        _hidden[value] = shown


def printable(text: object) -> str:
    """Escape control characters as Python does (``\\x1b``), and hide values."""
    shown = str(text)
    for value, instead in _hidden.items():
        shown = shown.replace(value, instead)
    return _UNSAFE.sub(lambda found: found[0].encode("unicode_escape", "surrogatepass").decode(), shown)


def in_a_line(text: object) -> str:
    """Make text :func:`printable`, with newlines escaped too."""
    return printable(text).replace("\n", "\\n")


def say(*texts: object, sep: str = " ", end: str = "\n", file: IO[str] | None = None, flush: bool = False) -> None:
    """Print texts made :func:`printable`."""
    print(*map(printable, texts), sep=sep, end=end, file=file, flush=flush)


class PrintableRecords(logging.Filter):
    """Make the message of each log record printable."""

    def filter(self, record: logging.LogRecord) -> bool:
        record.msg, record.args = printable(record.getMessage()), ()
        return True


@contextmanager
def quiet() -> Iterator[None]:
    """Log only errors in the body, for work that is logged again later."""
    ours = logging.getLogger("megatron_cp")
    before = ours.level
    ours.setLevel(logging.ERROR)
    try:
        yield
    finally:
        ours.setLevel(before)


class UsageError(SystemExit):
    """Wrong arguments of a program; one of several ranks prints it."""

    def __init__(self, program: str, text: str) -> None:
        super().__init__(2)
        self.program, self.text = program, text


class ArgumentParser(argparse.ArgumentParser):
    """Parser with printable messages; raises :class:`UsageError`."""

    def error(self, message: str) -> NoReturn:
        raise UsageError(self.prog, f"{message}\n'{self.prog} --help' lists the options.")

    def _print_message(self, message: str, file: Any = None) -> None:
        super()._print_message(printable(message) if message else message, file or sys.stderr)
