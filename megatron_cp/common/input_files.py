"""Read files of unknown origin without blocking; parse JSON."""

from __future__ import annotations

import codecs
import errno
import json
import os
import shlex
import stat
from pathlib import Path
from typing import Any

# Byte order marks of encodings other than UTF-8. UTF-32 first: its mark starts with UTF-16's.
_OTHER_MARKS = {
    codecs.BOM_UTF32_LE: "UTF-32",
    codecs.BOM_UTF32_BE: "UTF-32",
    codecs.BOM_UTF16_LE: "UTF-16",
    codecs.BOM_UTF16_BE: "UTF-16",
}


def file_or_pipe(path: str, flags: int) -> int:
    """Open a regular file, or a pipe with a writer: the ``opener`` of ``open``.

    A named pipe without a writer reads as an empty file instead of blocking. A shell's ``<(...)`` has a writer.

    Raises:
        OSError: the file cannot be opened, or is a folder or a device (a device may have no end).
    """
    descriptor = os.open(path, flags | os.O_NONBLOCK)
    mode = os.fstat(descriptor).st_mode
    if stat.S_ISREG(mode) or stat.S_ISFIFO(mode):
        os.set_blocking(descriptor, True)
        return descriptor
    os.close(descriptor)
    number = errno.EISDIR if stat.S_ISDIR(mode) else errno.ENODEV
    raise OSError(number, "Is a directory" if stat.S_ISDIR(mode) else "Is a device, not a file", path)


def read_bytes(path: str | os.PathLike[str], most: int = -1) -> bytes:
    """Read a file or pipe, or its first ``most`` bytes.

    Raises:
        OSError: as :func:`file_or_pipe`, and for a pipe without content.
    """
    with open(path, "rb", opener=file_or_pipe) as file:
        content = file.read(most)
        if not content and stat.S_ISFIFO(os.fstat(file.fileno()).st_mode):
            raise OSError(errno.ENODATA, "Is a pipe without a writer", str(path))
        return content


def decode_text(content: bytes, path: str | os.PathLike[str]) -> str:
    """Decode UTF-8, without a byte order mark.

    Raises:
        ValueError: ``content`` is not UTF-8; the message has the command that converts the file ``path``.
    """
    if encoding := _other_encoding(content):
        file, copy = shlex.quote(str(path)), shlex.quote(f"{path}.utf8")
        convert = f"iconv -f {encoding} -t UTF-8 {file} > {copy} && mv {copy} {file}"
        raise ValueError(f"is {encoding} text; only UTF-8 is read. Fix: {convert}")
    try:
        return content.removeprefix(codecs.BOM_UTF8).decode("utf-8")
    except UnicodeDecodeError as error:
        raise ValueError(f"is not UTF-8 text (byte {error.start}): {error.reason}.") from error


def _other_encoding(content: bytes) -> str | None:
    """Detect UTF-16 or UTF-32, by its mark or by the zero bytes of ASCII."""
    for mark, encoding in _OTHER_MARKS.items():
        if content.startswith(mark):
            return encoding
    zeros = "".join("0" if byte == 0 else "x" for byte in content[:4])
    return {"x0x0": "UTF-16LE", "0x0x": "UTF-16BE"}.get(zeros)


def parse_json(text: str | bytes) -> Any:
    """Parse JSON in UTF-8, UTF-16 or UTF-32.

    Raises:
        ValueError: not JSON, nested too deeply, or a number with thousands of digits.
    """
    try:
        return json.loads(text)
    except RecursionError as error:
        raise ValueError("nested too deeply") from error


def read_json(path: Path) -> Any:
    """Parse a JSON file; raises OSError, and ValueError as :func:`parse_json`."""
    return parse_json(read_bytes(path))


def special_files(folder: Path) -> list[Path]:
    """List a folder's devices, pipes and sockets, and links to them.

    Libraries that open files themselves would read a device without end, or block on a pipe.
    """
    there = sorted(folder.iterdir()) if os.path.isdir(folder) else [folder]
    return [path for path in there if os.path.exists(path) and not (os.path.isfile(path) or os.path.isdir(path))]
