"""Checks of verification cards: the kinds, and how they are measured.

Each kind runs a command's arguments and returns numbers. See verification_cards.py. Commands run in this process or on
ranks forked from it. Only numbers that do not depend on speed are measured.
"""

from __future__ import annotations

import argparse
import contextlib
import io
import json
import math
import os
import re
import shlex
import tempfile
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from unittest import mock

import torch

from megatron_cp import cli
from megatron_cp.config.recipes import load_recipe
from megatron_cp.config.single_rank import on_single_rank
from megatron_cp.data.text.tokenizers import build_tokenizer
from megatron_cp.models.build import Build
from megatron_cp.models.builder import build_model
from megatron_cp.models.layer_specs import choose_attention
from megatron_cp.models.transformer_config import transformer_config
from megatron_cp.parallel.process_groups import build_process_groups
from megatron_cp.training import train  # noqa: F401 - no rank imports it for itself
from megatron_cp.verify import run as _verify  # noqa: F401 - as above
from tests.ranks import free_port, run_ranks

# CPUs and numbers of threads take float32 sums in another order: about 1e-7 in a loss and 1e-6 in a norm. Optimizer
# steps multiply that. The tolerance is a hundred times as large.
TOLERANCE = 1e-4
Measured = dict[str, Any]


@dataclass(frozen=True)
class Check:
    """Kind of check: the expected result, and a function that measures it.

    The function gets a command's arguments.
    """

    expected: str
    measure: Callable[[list[str]], Measured]


def _run(arguments: list[str]) -> tuple[int, str, str]:
    out, err = io.StringIO(), io.StringIO()
    with contextlib.redirect_stdout(out), contextlib.redirect_stderr(err):
        code = cli.main(arguments)
    return code, out.getvalue(), err.getvalue()


def _run_on_ranks(arguments: list[str]) -> str:
    """Run ``megatron-cp COMMAND -n N ...`` on N forked ranks.

    Returns what the first rank prints.
    """
    parser = argparse.ArgumentParser()
    parser.add_argument("-n", type=int, default=1)
    number, rest = parser.parse_known_args(arguments)
    variables = {"MEGATRON_CP_TEST_NO_INIT": "1", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free_port())}
    with mock.patch.dict(os.environ, variables):
        results = run_ranks(_run, number.n, rest, timeout=1500.0)
    for code, out, err in results:
        if code != 0:
            raise AssertionError(f"{shlex.join(arguments)}: exit code {code}\n{out}\n{err}")
    return str(results[0][1])


def dry_run(arguments: list[str]) -> Measured:
    """Measure the ranks and the warnings of a dry run."""
    code, out, err = _run(arguments)
    if code != 0:
        raise AssertionError(f"{shlex.join(arguments)}: exit code {code}\n{err}")
    (ranks,) = re.findall(r"^# \w+ on (\d+) ranks$", out, flags=re.MULTILINE)
    return {"ranks": int(ranks), "warnings": len(re.findall(r"^warning ", err, flags=re.MULTILINE))}


def parameters(arguments: list[str]) -> Measured:
    """Measure the number of parameters, in a rank of its own."""
    (number,) = run_ranks(count_parameters, 1, arguments[-1])
    return {"parameters": number}


def count_parameters(recipe: str) -> int:
    """Count the whole model's parameters, vocabulary padding included.

    The model is built without memory for weights.
    """
    config = on_single_rank(load_recipe(recipe))
    core = transformer_config(config.model, config.mixed_precision, None)
    core.perform_initialization = core.use_cpu_initialization = False
    attention = choose_attention(config.model, core, {1}, config.mixed_precision.fp32)
    build = Build(config.model, core, build_process_groups(config.model, config.dist), config.rng.seed, attention)
    with torch.device("meta"):
        (model,) = build_model(build, build_tokenizer(config.tokenizer).vocab_size)
    return sum(parameter.numel() for parameter in model.parameters())


_ROW = re.compile(r"^(\S.*?)(?:, step (\d+))?(?::.*?)? {2,}(?:.* )?(\S+) +(\d\.\de[+-]\d\d) +\de-\d\d +ok *$")


def verify(arguments: list[str]) -> Measured:
    """Measure the losses and differences that ``verify`` prints.

    ``verify`` itself checks that they are equal.
    """
    out = _run_on_ranks(arguments)
    differences: dict[str, float] = {}
    shown: dict[str, float] = {}
    for name, step, value, difference in (row.groups() for row in map(_ROW.match, out.splitlines()) if row):
        differences[name] = max(differences.get(name, 0.0), float(difference))
        if name in ("loss", "gradient norm"):
            shown[f"{name}, step {step}"] = _rounded(float(value))
    (tensors,) = re.findall(r"^(\d+) parameters compared", out, flags=re.MULTILINE)
    differences.pop("learning rates", None)
    return {"tensors": int(tensors), **shown, "worst_differences": differences}


def training(arguments: list[str]) -> Measured:
    """Measure loss and gradient norm of the first and the last iteration."""
    with tempfile.TemporaryDirectory(prefix="card") as folder:
        _run_on_ranks([*arguments, f"checkpoint.save={folder}", "logger.tensorboard=false"])
        lines = Path(folder, "metrics.jsonl").read_text(encoding="utf-8").splitlines()
    first, *_, last = map(json.loads, lines)
    names = ("iteration", "lm_loss", "grad_norm")
    return {place: {name: _rounded(line[name]) for name in names} for place, line in (("first", first), ("last", last))}


CHECKS = {
    "dry_run": Check("exit code 0, no error; ranks and warnings as measured", dry_run),
    "parameters": Check("the number as measured", parameters),
    "verify": Check(f"exit code 0, EQUAL; losses and norms as measured, relative {TOLERANCE:.0e}", verify),
    "train": Check(f"exit code 0; losses and norms as measured, relative {TOLERANCE:.0e}", training),
}


def _rounded(value: float) -> float:
    return value if isinstance(value, int) else float(f"{value:.6g}")


def measure(kind: str, command: str) -> Measured:
    """Run a card's command and return the measured numbers."""
    return CHECKS[kind].measure(shlex.split(command)[1:])


def differing(expected: Mapping[str, Any], found: Mapping[str, Any]) -> list[str]:
    """List numbers that differ by more than rounding.

    ``verify`` itself checks differences between layouts.
    """
    wrong = [] if expected.keys() == found.keys() else [f"names: {list(expected)} and {list(found)}"]
    for name in (expected.keys() & found.keys()) - {"worst_differences"}:
        a, b = expected[name], found[name]
        if isinstance(a, dict):
            wrong += differing(a, b)
        elif not (math.isclose(a, b, rel_tol=TOLERANCE) if isinstance(a, float) else a == b):
            wrong.append(f"{name}: {a} and {b}")
    return wrong
