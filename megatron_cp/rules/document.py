"""Write ``docs/reference/rules.md``: ``python -m megatron_cp.rules.document``."""

from __future__ import annotations

import re
import textwrap
from collections.abc import Iterable, Iterator
from dataclasses import fields
from pathlib import Path

from megatron_cp.common.terminal import say
from megatron_cp.parallel.layout import LEVELS
from megatron_cp.rules import RULES, Rule
from megatron_cp.rules.base import SECTIONS, order
from megatron_cp.rules.environment import Environment
from megatron_cp.rules.explain import EXAMPLE_RECIPE, example_command

# Rules without a check upstream: training runs, but the model is wrong or the setting has no effect.
SILENT_UPSTREAM = frozenset(["A13", "A19", "B3", "C4", "C9", "E8", "E9", "G2", "H6", "H8", "K21", "K22", "K33", "K36"])
PATH = Path(__file__).resolve().parents[2] / "docs" / "reference" / "rules.md"

_KEYS = textwrap.indent(textwrap.fill(", ".join(f"`{field.name}`" for field in fields(Environment)), 116), "  ")
_HEAD = f"""\
# Rules

<!-- Written by `python -m megatron_cp.rules.document`; change the rules in megatron_cp/rules/, not this file. -->

A run with an error does not start. A warning is printed, and the run continues. All violations are reported at once,
errors first. Each names the setting, its value and a fix.

Fixes are tried before they are shown. Type the overrides of one alternative at the end of the same command: they remove
the violation and cause no other error. Text in parentheses is a note. `PATH`, `PREFIX`, `NAME` and `ID` stand for your
own values. If megatron-core or Megatron-Bridge has a message for the same rule, that message is used.

- `megatron-cp validate --recipe R --world-size N` checks a recipe without starting a run.
- `megatron-cp train --explain C9` explains one rule.
- `--environment gpu`, `cpu` or a YAML file checks for another machine. The file may have any of
{_KEYS}:

```yaml
device: gpu
gpus_per_node: 8
compute_capability: 9.0        # Hopper
transformer_engine: "2.16.1"   # null: not installed
variables: {{CUDA_DEVICE_MAX_CONNECTIONS: "1"}}
```

Each example below is a command that breaks the rule. Its recipe, `{EXAMPLE_RECIPE}`, has 4 layers, 8 heads,
4 key/value heads, and cp 4 as {" 2 x ".join(LEVELS)} 2. `FILE` is such a YAML file; `--explain` shows it.

"Silent upstream" marks rules that megatron-core does not check: training runs, but the model is wrong or the setting
has no effect. Missing ids are in [constraints without rules](constraints_without_rules.md).
"""


def _cell(text: str) -> str:
    return " ".join(text.split()).replace("|", "\\|")


def table(head: list[str], rows: Iterable[list[str]]) -> Iterator[str]:
    yield "| " + " | ".join(head) + " |"
    yield "|" + "---|" * len(head)
    for row in rows:
        yield "| " + " | ".join(_cell(cell) for cell in row) + " |"


def _rule(rule: Rule) -> list[str]:
    silent = " Silent upstream." if rule.id in SILENT_UPSTREAM else ""
    return [
        f"### {rule.id}\n",
        f"**{rule.title}** {rule.severity.capitalize()}.{silent}\n",
        f"{rule.why}\n",
        f"```text\n{_example(rule)}\n```\n",
    ]


def _example(rule: Rule) -> str:
    """Return the command that breaks the rule, with its overrides on a separate line."""
    return re.sub(r' (?=(--gpus-per-node|"?[\w.+]+=))', " \\\\\n  ", example_command(rule.example), count=1)


def document() -> str:
    """Return the whole page."""
    lines = [_HEAD]
    for section, title in SECTIONS.items():
        lines.append(f"## {section}. {title}\n")
        for id in sorted(RULES, key=order):
            lines += _rule(RULES[id]) if id.startswith(section) else []
    return "\n".join(lines)


if __name__ == "__main__":
    PATH.write_text(document(), encoding="utf-8")
    say(f"{PATH}: {len(RULES)} rules")
