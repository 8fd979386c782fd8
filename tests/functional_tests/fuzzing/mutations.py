"""Mutate files: bytes, values, and the kind of file at a path."""

from __future__ import annotations

import gzip
import json
import os
import random
import shutil
import struct
from collections.abc import Callable
from pathlib import Path
from typing import Any

import yaml

_MARK = "@@raw%d@@"
_NUMBERS = (-1, 0, 1, 2, 7, 2**31 - 1, 2**31, -(2**31), 2**63 - 1, 2**63, -(2**63), 2**64 - 1, 10**30)
_VALUES: tuple[Any, ...] = (
    *_NUMBERS,
    None,
    True,
    "",
    "x",
    -0.0,
    0.5,
    1e308,
    1e-320,
    float("nan"),
    float("inf"),
    [],
    {},
    [[]],
    [1, 2, 3],
    {"a": 1},
    [None, "x", {"b": []}],
    "\x00",
    "\ufeff",
    "\u202eabc",
    "é" * 3,
    "a" * 100_000,
    "../../outside",
    "/nonexistent/file",
    "/dev/zero",
    "1e5",
    "null",
    "0x10",
)
# Text in place of a value that no dumper writes.
_RAW_JSON = (
    "NaN",
    "-Infinity",
    "1e999",
    "-1e999",
    "9" * 5000,
    "[" * 100_000 + "]" * 100_000,
    '{"a":' * 3000 + "1" + "}" * 3000,
    '"\\ud800"',
    '{"a": 1, "a": 2}',
    "tru",  # codespell:ignore tru
    "",
    "{",
)
_RAW_YAML = (
    ".nan",
    "-.inf",
    "9" * 5000,
    "[" * 3000 + "]" * 3000,
    "2020-01-01",
    "!!python/object/apply:os.getcwd []",
    "!!binary aGVsbG8=",
    "!!set {a, b}",
    "!unknown x",
    "*nowhere",
    "&loop [*loop]",
    "&loop {a: *loop}",
    "???",
    "${model.nothing}",
    "${oc.env:HOME}",
    "${oc.env:NOT_SET}",
    "${model.num_layers}",
    "${",
    "{a: 1, a: 2}",
    "{? [1, 2] : 3}",
    "{1: 2}",
    "{null: 2}",
    "'",
    "\t- x",
    "<<: 3",
)


def replacement(rng: random.Random, raws: list[str], texts: tuple[str, ...]) -> Any:
    """Return a value to put anywhere.

    A raw text is kept in ``raws``, with a mark in its place until the dump.
    """
    if rng.random() < 0.35:
        raws.append(rng.choice(texts))
        return _MARK % (len(raws) - 1)
    return rng.choice(_VALUES)


def _edit(rng: random.Random, value: Any, raws: list[str], texts: tuple[str, ...]) -> Any:
    """Return ``value`` with one change."""
    if isinstance(value, dict | list) and value and rng.random() < 0.85:
        key = rng.choice(list(value) if isinstance(value, dict) else range(len(value)))
        what = rng.random()
        if what < 0.12:
            del value[key]
        elif what < 0.2 and isinstance(value, dict):
            value[f"{key}{rng.choice(['', 'x', chr(0x1F600), '.', ' '])}2"] = value[key]
        elif what < 0.2:
            value.extend([value[key]] * rng.choice([1, 50]))
        elif what < 0.27 and isinstance(value, dict):
            value[rng.choice(list(value))] = value[key]
        else:
            value[key] = _edit(rng, value[key], raws, texts)
        return value
    if type(value) in (int, float) and rng.random() < 0.5:
        return rng.choice([-value, value + 1, value * 2, value * 10**9, str(value), [value], float(value)])
    return replacement(rng, raws, texts)


def _filled(text: str, raws: list[str]) -> str:
    for number, raw in enumerate(raws):
        for mark in (f'"{_MARK % number}"', f"'{_MARK % number}'", _MARK % number):
            text = text.replace(mark, raw)
    return text


def json_values(rng: random.Random, content: bytes) -> bytes:
    """Change one to three values of a JSON document."""
    value, raws = json.loads(content), list[str]()
    for _ in range(rng.choice([1, 1, 1, 2, 3])):
        value = _edit(rng, value, raws, _RAW_JSON)
    return _filled(json.dumps(value), raws).encode("utf-8", "surrogatepass")


def yaml_values(rng: random.Random, content: bytes) -> bytes:
    """Change one to three values of a YAML document."""
    value, raws = yaml.safe_load(content), list[str]()
    for _ in range(rng.choice([1, 1, 1, 2, 3])):
        value = _edit(rng, value, raws, _RAW_YAML)
    return _filled(yaml.safe_dump(value, sort_keys=False, allow_unicode=True), raws).encode()


def json_lines(rng: random.Random, content: bytes) -> bytes:
    """Change values of some JSON lines."""
    lines = content.splitlines(keepends=True)
    for _ in range(rng.choice([1, 2, 4])):
        place = rng.randrange(len(lines))
        try:
            lines[place] = json_values(rng, lines[place]) + b"\n"
        except (ValueError, RecursionError):  # changed before
            continue
    return b"".join(lines)


def safetensors_header(rng: random.Random, content: bytes) -> bytes:
    """Change values of a safetensors file's header, or its stated length."""
    (size,) = struct.unpack_from("<Q", content)
    header = json_values(rng, content[8 : 8 + size])
    length = rng.choice([len(header)] * 6 + [size, 0, 2**63, 2**40, len(content)])
    return struct.pack("<Q", length) + header + content[8 + size :]


def index_fields(rng: random.Random, content: bytes) -> bytes:
    """Change numbers in the header or arrays of a Megatron ``.idx``."""
    changed = bytearray(content)
    for _ in range(rng.choice([1, 1, 2])):
        code, where = rng.choice([("<Q", 9), ("<B", 17), ("<Q", 18), ("<Q", 26), ("<i", 0), ("<q", 0)])
        size = struct.calcsize(code)
        where = where or rng.randrange(34, len(changed) - size, size)
        limit = 256**size
        number = rng.choice([*_NUMBERS, struct.unpack_from("<B", changed, where)[0] + 1]) % limit
        changed[where : where + size] = number.to_bytes(size, "little")
    return bytes(changed)


def random_bytes(rng: random.Random, content: bytes) -> bytes:
    """Flip bits, cut, repeat, splice, zero or randomize blocks."""
    data = bytearray(content or b"\n")
    for _ in range(rng.choice([1, 1, 2, 5])):
        if not data:
            break
        begin = rng.randrange(len(data))
        end = min(len(data), begin + rng.choice([1, 4, 8, 64, len(data)]))
        match rng.randrange(8):
            case 0:
                data[begin] ^= 1 << rng.randrange(8)
            case 1:
                del data[begin:]
            case 2:
                del data[begin:end]
            case 3:
                data[begin:begin] = data[begin:end] * rng.choice([1, 3])
            case 4:
                other = rng.randrange(len(data))
                data[begin:end] = data[other : other + end - begin]
            case 5:
                data[begin:end] = bytes(end - begin)
            case 6:
                data[begin:end] = rng.randbytes(end - begin)
            case _:
                data[begin:begin] = rng.choice(
                    [b"\x00", b"\xff\xfe", b"\xef\xbb\xbf", b"\r\n", b"\n\n", b"[", b'"', b"\\"]
                )
    return bytes(data)


def packed(change: Callable[[random.Random, bytes], bytes]) -> Callable[[random.Random, bytes], bytes]:
    """Make the same change within a gzip file."""
    return lambda rng, content: gzip.compress(change(rng, gzip.decompress(content)), 1, mtime=0)


_BY_NAME: dict[str, Callable[[random.Random, bytes], bytes]] = {
    ".json": json_values,
    ".jsonl": json_lines,
    ".yaml": yaml_values,
    ".json.gz": packed(json_values),
    ".txt.gz": packed(random_bytes),
    ".safetensors": safetensors_header,
    ".idx": index_fields,
}


def other_path(rng: random.Random, path: Path) -> None:
    """Replace a file by something that cannot be read as a file."""
    shutil.rmtree(path) if path.is_dir() else path.unlink()
    match rng.randrange(8):
        case 0:
            path.symlink_to(path.name)
        case 1:
            path.mkdir()
        case 2:
            os.mkfifo(path)
        case 3:
            path.symlink_to("/dev/zero")
        case 4:
            path.touch(mode=0)
        case 5:
            path.symlink_to("nowhere")
        case 6:
            path.touch()


def mutate(rng: random.Random, path: Path) -> None:
    """Change a file by one of the mutations; the file may be deleted."""
    what = rng.random()
    if what < 0.08:
        other_path(rng, path)
        return
    change = next((each for name, each in _BY_NAME.items() if path.name.endswith(name)), random_bytes)
    content = path.read_bytes()
    path.write_bytes((change if what < 0.65 else random_bytes)(rng, content))
