"""Write docs/reference/settings.md from the declarations of the settings.

The declarations are in megatron_cp/config.

    python scripts/write_settings.py
"""

from __future__ import annotations

import inspect
import math
from collections.abc import Iterator
from dataclasses import fields, is_dataclass
from pathlib import Path
from typing import Any

from megatron.core.distributed import DistributedDataParallelConfig
from megatron.core.optimizer import OptimizerConfig
from megatron.core.transformer.transformer_config import MLATransformerConfig

from megatron_cp.common.terminal import say
from megatron_cp.config.overrides import override
from megatron_cp.config.run_config import RunConfig
from megatron_cp.config.schema import describe, hints
from megatron_cp.config.setting import Facts, facts_of
from megatron_cp.rules.document import table

PATH = Path(__file__).resolve().parents[1] / "docs" / "reference" / "settings.md"
UPSTREAM = {
    "model": MLATransformerConfig,
    "optimizer": OptimizerConfig,
    "mixed_precision": OptimizerConfig,
    "ddp": DistributedDataParallelConfig,
}
_HEAD = """\
# Settings

<!-- Written by `python scripts/write_settings.py`; change megatron_cp/config/model/ and sections/, not this file. -->

All settings of a run. [Write a recipe](../how-to/write_a_recipe.md) explains how values are merged. The
[rules](rules.md) list the combinations that are errors.

The column "affects" names what a setting changes. To resume from a checkpoint, all except `layout` must match:

- `weights`: names and shapes of the weights.
- `function`: the computation. Another run may load the weights as pretrained weights.
- `optimizer`, `schedule`, `data`: the optimizer's state, the learning rate, the samples.
- `layout`: parallelism, memory and kernels.

The column "megatron-core" names the destination of a setting. `same`: the field of the same name. `translated`: one or
more other fields. Empty: megatron-core does not have this setting.
"""


def document() -> str:
    """Return the whole page."""
    lines = [_HEAD]
    for section, kind in hints(RunConfig).items():
        if not is_dataclass(kind):
            continue
        lines.append(f"## {section}\n")
        for part in reversed(kind.__bases__) if section == "model" else (kind,):
            if section == "model":
                lines.append(f"### {(inspect.getmodule(part).__doc__ or '').strip()}\n")
            head = ["setting", "meaning", "value", "default", "affects", "megatron-core"]
            lines += table(head, _rows(section, part))
            lines.append("")
    lines.append("## env_vars\n\nEnvironment variables of the run: name and text. Exported variables override them.\n")
    return "\n".join(lines)


def _rows(section: str, part: Any) -> Iterator[list[str]]:
    defaults, known = part(), {field.name for field in fields(UPSTREAM[section])} if section in UPSTREAM else set()
    for name, facts in facts_of(part).items():
        where = "" if name not in known else "translated" if facts.translated else "same"
        read = "".join(f"; needs {_code(when.switch)}" for when in facts.when)
        flags = "".join(f", `{flag}`" for flag in facts.flags)
        default = override(name, getattr(defaults, name)).partition("=")[2]
        value = describe(hints(part)[name]) + _range(facts)
        yield [f"`{name}`{flags}", facts.help + read, value, f"`{default}`", ", ".join(facts.affects), where]


def _code(switch: str) -> str:
    return " or ".join(f"`{each}`" for each in switch.split(" or "))


def _range(facts: Facts) -> str:
    least = f", {'above' if facts.kind == 'positive' else 'at least'} {facts.least:.10g}"
    most = f", {'below' if facts.kind == 'share' else 'at most'} {facts.most:.10g}"
    return (least if facts.least > -math.inf else "") + (most if facts.most < math.inf and facts.kind != "size" else "")


if __name__ == "__main__":
    PATH.write_text(document(), encoding="utf-8")
    say(f"{PATH}: {sum(len(facts_of(kind)) for kind in hints(RunConfig).values() if is_dataclass(kind))} settings")
