import struct
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest

from megatron_cp.common.errors import DataError
from megatron_cp.data.formats.indexed import check_lengths, open_indexed


def test_a_good_pair(corpus: Callable[..., str]) -> None:
    files = open_indexed(corpus(documents=7))
    check_lengths(files)
    assert files.num_sequences == 7
    assert files.dtype is np.uint16
    assert files.num_tokens == Path(files.prefix + ".bin").stat().st_size // 2
    assert open_indexed(files.prefix + ".idx") == open_indexed(files.prefix + ".bin") == files


def _edit(path: Path, offset: int, data: bytes) -> None:
    content = bytearray(path.read_bytes())
    content[offset : offset + len(data)] = data
    path.write_bytes(content)


DAMAGE: dict[str, tuple[Callable[[Path, Path], object], str]] = {
    "no bin": (lambda b, i: b.unlink(), "c.bin: no such file"),
    "no idx": (lambda b, i: i.unlink(), "c.idx: no such file"),
    "neither": (lambda b, i: (b.unlink(), i.unlink()), "c.bin and .*c.idx: no such file"),
    "empty idx": (lambda b, i: i.write_bytes(b""), "c.idx: is empty"),
    "empty bin": (lambda b, i: b.write_bytes(b""), "hold no tokens"),
    "not an index": (lambda b, i: i.write_bytes(b"hello" * 100), "c.idx: is not a Megatron index"),
    "cut in the header": (lambda b, i: i.write_bytes(i.read_bytes()[:20]), "c.idx: is truncated: it has 20 bytes"),
    "cut idx": (lambda b, i: i.write_bytes(i.read_bytes()[:-1]), "c.idx: is truncated"),
    "cut bin": (lambda b, i: b.write_bytes(b.read_bytes()[:-1]), "c.bin: is truncated"),
    "longer bin": (lambda b, i: b.write_bytes(b.read_bytes() + b"xx"), "c.bin: does not match its .idx"),
    "longer idx": (lambda b, i: i.write_bytes(i.read_bytes() + b"x" * 3), "c.idx: is corrupt"),
    "version": (lambda b, i: _edit(i, 9, struct.pack("<Q", 7)), "index version 7"),
    "dtype": (lambda b, i: _edit(i, 17, struct.pack("<B", 6)), "dtype code 6"),
    "count": (lambda b, i: _edit(i, 18, struct.pack("<Q", 10**12)), "c.idx: is truncated"),
    "lengths": (lambda b, i: _edit(i, 34, struct.pack("<i", -5)), "offsets are not the running sum"),
}


@pytest.mark.parametrize("damage", DAMAGE)
def test_each_fault_is_named(corpus: Callable[..., str], damage: str) -> None:
    prefix = corpus("c", documents=5)
    action, message = DAMAGE[damage]
    action(Path(prefix + ".bin"), Path(prefix + ".idx"))
    with pytest.raises(DataError, match=message):
        check_lengths(open_indexed(prefix))
