"""Write docs/reference/commands.md from each command's --help.

Run it with ``python scripts/write_commands.py``.
"""

from __future__ import annotations

import contextlib
import io
import os
from pathlib import Path
from unittest import mock

from megatron_cp import cli
from megatron_cp.common.terminal import say

PATH = Path(__file__).resolve().parents[1] / "docs" / "reference" / "commands.md"
_HEAD = """\
# Commands

<!-- Written by `python scripts/write_commands.py` from what --help prints; change the parsers, not this file. -->

Every command is `megatron-cp COMMAND`, or `python -m megatron_cp COMMAND`. [Exit codes](exit_codes.md) are the same for
all. Commands that take a recipe also take [any setting](settings.md) as `key=value`.

`python -m megatron_cp.torchrun` takes the arguments of torch's `torchrun`
([several nodes](../how-to/several_nodes.md)).
"""


def _help(*arguments: str) -> str:
    printed = io.StringIO()
    with mock.patch.dict(os.environ, COLUMNS="100"), contextlib.redirect_stdout(printed):
        cli.main([*arguments, "--help"])
    return printed.getvalue().strip()


def document() -> str:
    """Return the whole page."""
    parts = [_HEAD, f"```text\n{_help()}\n```\n"]
    for command in cli._MODULES:
        for words in [(command,)] + [(command, part) for part in ("import", "export") if command == "convert"]:
            title = "##" if len(words) == 1 else "###"
            parts.append(f"{title} {' '.join(words)}\n\n```text\n{_help(*words)}\n```\n")
    return "\n".join(parts)


if __name__ == "__main__":
    PATH.write_text(document(), encoding="utf-8")
    say(f"{PATH}: {len(cli._MODULES)} commands")
