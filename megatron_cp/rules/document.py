"""Write ``docs/constraints.md`` from the table: ``python -m megatron_cp.rules.document``."""

from __future__ import annotations

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

# Rules that upstream does not check: training runs, and the model is wrong or the setting has no effect.
SILENT_UPSTREAM = frozenset(["A13", "A19", "B3", "C4", "C9", "E8", "E9", "G2", "H6", "H8", "K21", "K22", "K33", "K36"])
PATH = Path(__file__).resolve().parents[2] / "docs" / "constraints.md"

_KEYS = textwrap.fill(", ".join(f"`{field.name}`" for field in fields(Environment)), 118)
_HEAD = f"""\
# Constraints

<!-- Written by `python -m megatron_cp.rules.document`; change the rules in megatron_cp/rules/, not this file. -->

A run that breaks a rule of severity "error" does not start; warnings are printed, and it goes on. All violations are
reported at once, errors before warnings, each with the setting, its value and a fix. Fixes are tried before they are
shown: the overrides of any alternative, typed at the end of the same command, mend the violation and cause no other
error. Text in parentheses is a note; `PATH`, `PREFIX`, `NAME` and `ID` stand for values of yours.

`megatron-cp validate --recipe R --world-size N` checks without starting anything, also for a machine you are not on:
`--environment gpu`, `cpu` or a YAML file with any of
{_KEYS}:

```yaml
device: gpu
gpus_per_node: 8
compute_capability: 9.0        # Hopper
transformer_engine: "2.17.1"   # null: not installed
variables: {{CUDA_DEVICE_MAX_CONNECTIONS: "1"}}
```

`megatron-cp train --explain C9` tells about one rule, and shows such a file where the example has one. Where
megatron-core or Megatron-Bridge words the same rule, the message has its wording.

Each example is an override of `{EXAMPLE_RECIPE}` (4 layers, 8 heads, 4 key/value heads, cp 4 as
{" 2 x ".join(LEVELS)} 2) that breaks the rule. "Silent" marks what upstream does not notice: training runs, and the
model is wrong or the setting has no effect. Ids that are missing here are in
[other_constraints.md](other_constraints.md).
"""


def _cell(text: str) -> str:
    return " ".join(text.split()).replace("|", "\\|")


def table(head: list[str], rows: Iterable[list[str]]) -> Iterator[str]:
    yield "| " + " | ".join(head) + " |"
    yield "|" + "---|" * len(head)
    for row in rows:
        yield "| " + " | ".join(_cell(cell) for cell in row) + " |"


def _rule_row(rule: Rule) -> list[str]:
    arguments = example_command(rule.example).partition(EXAMPLE_RECIPE)[2].strip()
    silent = "silent" if rule.id in SILENT_UPSTREAM else ""
    return [rule.id, rule.severity, rule.title, rule.why, silent, f"`{arguments}`"]


def document() -> str:
    """The whole page."""
    lines = [_HEAD]
    for section, title in SECTIONS.items():
        rules = [RULES[id] for id in sorted(RULES, key=order) if id.startswith(section)]
        lines.append(f"## {section}. {title}\n")
        lines += table(["id", "severity", "constraint", "why", "upstream", "example"], map(_rule_row, rules))
        lines.append("")
    return "\n".join(lines)


if __name__ == "__main__":
    PATH.write_text(document(), encoding="utf-8")
    say(f"{PATH}: {len(RULES)} rules")
