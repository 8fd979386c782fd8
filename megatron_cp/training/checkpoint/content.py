"""Declared shape of a checkpoint's non-tensor state, checked before use.

A value of another type or out of range would otherwise fail later with a misleading error, or train wrongly.
"""

from __future__ import annotations

import io
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from itertools import chain, pairwise
from pathlib import Path
from typing import Any

import numpy as np
from torch import Tensor

from megatron_cp.common.errors import UnusableCheckpoint
from megatron_cp.dynamic_cp.cost import CostModel
from megatron_cp.mcore.checkpoint_reader import COMMON_FILE, load_common_file, load_object
from megatron_cp.training.checkpoint.checksums import CHECKSUMS, read_checksums, read_common_bytes
from megatron_cp.training.checkpoint.settings import is_number, problems_of_settings, short_repr, with_defaults

# Format of a checkpoint's non-tensor state; newer formats cannot be read.
FORMAT = 1


@dataclass(frozen=True)
class _Value:
    """A condition on a value, and its description."""

    description: str
    accepts: Callable[[Any], bool]


def _is_step(value: Any) -> bool:
    number = value.item() if isinstance(value, Tensor) and value.numel() == 1 else value
    return is_number(number) and number >= 0


def _is_cost(value: Any) -> bool:
    try:
        numbers = vars(CostModel(**value)) | {"transport": 0, "placement": 0}
        return all(map(is_number, numbers.values()))
    except (TypeError, ValueError, AttributeError):
        return False


def _are_times(value: Any) -> bool:
    """Accept ``[([([length, ...], ranks), ...], seconds), ...]``, per rank and step."""
    try:
        return isinstance(value, list) and all(
            is_number(seconds)
            and all(_AT_LEAST_ONE.accepts(ranks) and all(map(_COUNT.accepts, lengths)) for lengths, ranks in work)
            for work, seconds in value
        )
    except (TypeError, ValueError):
        return False


def _are_buckets(value: Any) -> bool:
    numbers = value if isinstance(value, list) else [0]
    return all(map(_AT_LEAST_ONE.accepts, numbers)) and all(low < high for low, high in pairwise(numbers))


def _is_numpy_state(value: Any) -> bool:
    """Accept the state of numpy's MT19937.

    numpy would read a position out of range from outside of the array.
    """
    if not isinstance(value, tuple) or len(value) != 5:
        return False
    name, keys, position, has_gauss, _ = value
    fits = isinstance(keys, np.ndarray) and keys.dtype == np.uint32 and keys.shape == (624,)
    return name == "MT19937" and fits and type(position) is int and 0 <= position <= 624 and has_gauss in (0, 1)


def _or_none(value: _Value) -> _Value:
    return _Value(f"{value.description} or null", lambda found: found is None or value.accepts(found))


_COUNT = _Value("an integer of at least 0", lambda value: type(value) is int and 0 <= value < 2**62)
_WHOLE = _Value("an integer", lambda value: type(value) is int and abs(value) < 2**62)
_AT_LEAST_ONE = _Value("an integer of at least 1", lambda value: type(value) is int and 1 <= value < 2**31)
_NUMBER = _Value("a finite number", is_number)
_TEXT = _Value("a string", lambda value: isinstance(value, str))
_BOOL = _Value("true or false", lambda value: isinstance(value, bool))
_STEP = _Value("a number of at least 0", _is_step)
_COST = _Value("a cost model", _is_cost)
_BYTES = _Value("a tensor of bytes", lambda value: isinstance(value, Tensor) and value.dtype.itemsize == 1)
_TENSOR = _Value("a tensor", lambda value: isinstance(value, Tensor))

# A mapping has these keys (``?``: optional; ``*``: any key) and may have others. A list or tuple has any number of the
# one entry.
_GROUP = {
    **dict.fromkeys(("wd_mult?", "lr_mult?", "max_lr?", "min_lr?", "start_wd?", "end_wd?"), _or_none(_NUMBER)),
    **dict.fromkeys(("is_expert_parallel?", "is_decoupled_lr?", "default_config?"), _or_none(_BOOL)),
    "step?": _STEP,
}
_TORCH_OPTIMIZER = {"param_groups": [_GROUP], "state?": {"common_step?": _STEP}}
_SCALER = {"scale?": _TENSOR, "growth_tracker?": _WHOLE, "hysteresis_tracker?": _WHOLE}
_STEPS = {
    "consumed_samples": _COUNT,
    "cost?": _COST,
    "cost_of_next?": _COST,
    "token_buckets?": {"of": {}, "tokens": _Value("a list of ascending integers of at least 1", _are_buckets)},
    "calibration?": {
        "of": {},
        "cost": _COST,
        "measured": _COUNT,
        "observed": _Value("a list of times", _are_times),
    },
}
_CONTENT = {
    "world_size": _AT_LEAST_ONE,
    "progress": {
        **dict.fromkeys(("iteration", "consumed_samples", "consumed_tokens", "skipped_iterations"), _COUNT),
        "consumed_loss_tokens?": _COUNT,
    },
    "config": {},
    "data": {"train?": _STEPS},
    "scheduler?": {
        **dict.fromkeys(("max_lr", "min_lr", "start_wd", "end_wd"), _NUMBER),
        **dict.fromkeys(("lr_warmup_steps", "lr_decay_steps", "wd_incr_steps", "num_steps"), _STEP),
        **dict.fromkeys(("lr_decay_style", "wd_incr_style"), _TEXT),
        "wsd_decay_steps?": _or_none(_STEP),
        "lr_wsd_decay_style?": _or_none(_TEXT),
    },
    "optimizer?": {},
}
_RANDOM = {
    "python": _Value("a state of Python's random", lambda value: isinstance(value, tuple)),
    "numpy": _Value("a state of numpy's MT19937", _is_numpy_state),
    "torch": _BYTES,
    "device": _BYTES,
    "tracker": {"*": _Value("a tensor", _BYTES.accepts)},
}


def read_common(folder: Path, verify: bool = True) -> dict[str, Any]:
    """Read a checkpoint's non-tensor state, with the ``config`` completed by defaults.

    Args:
        verify: compare with the checksum, if the checkpoint has checksums.

    Raises:
        UnusableCheckpoint: the state is damaged, refers to code, or has an invalid entry.
        OSError: a file cannot be read.
    """
    sums = read_checksums(folder) if verify else None
    if (folder / COMMON_FILE).exists():  # megatron-core prefers this file
        common = load_common_file(folder)
    else:
        content = read_common_bytes(folder, sums)
        common = load_object(io.BytesIO(content), f"{folder}: common_state")
        common = common[0] if isinstance(common, list) and len(common) == 1 else common
    if not isinstance(common, dict):
        raise UnusableCheckpoint(f"{folder}: common_state is {short_repr(common)}, expected a mapping")
    version = common.get("format")
    if version is None or (type(version) is int and version > FORMAT):
        return common  # check_format reports other programs and newer versions
    problems = chain(
        _problems(common, {"format": _AT_LEAST_ONE} | _CONTENT, ""),
        problems_of_settings(common.get("config", {})),
        _optimizer_problems(common.get("optimizer")),
    )
    if problem := next(problems, ""):
        raise UnusableCheckpoint(f"entry {problem}")
    if verify and sums is None and "checksums" in common:
        raise UnusableCheckpoint(f"{folder / CHECKSUMS} is missing")
    return common | {"config": with_defaults(common["config"])}


def check_random_state(state: Any, name: str) -> None:
    """Raise UnusableCheckpoint if a checkpoint's random state is invalid."""
    if problem := next(_problems(state, _RANDOM, f"{name}."), ""):
        raise UnusableCheckpoint(problem)


def _problems(value: Any, expected: Any, path: str) -> Iterator[str]:
    """Describe all deviations from ``expected``, no deeper than ``expected``."""
    name = path.rstrip(".") or "common_state"
    if isinstance(expected, _Value):
        if not expected.accepts(value):
            yield f"{name} is {short_repr(value)}, expected {expected.description}"
    elif isinstance(expected, list):
        if not isinstance(value, list | tuple):
            yield f"{name} is {short_repr(value)}, expected a list"
            return
        for index, each in enumerate(value):
            yield from _problems(each, expected[0], f"{path}{index}.")
    elif not isinstance(value, dict):
        yield f"{name} is {short_repr(value)}, expected a mapping"
    else:
        for key, inner in expected.items():
            wanted = key.removesuffix("?")
            if key == "*":
                for each, found in value.items():
                    yield from _problems(found, inner, f"{path}{each}.")
            elif wanted in value:
                yield from _problems(value[wanted], inner, f"{path}{wanted}.")
            elif wanted == key:
                yield f"{path}{key} is missing"


def _optimizer_problems(state: Any) -> Iterator[str]:
    """Check the state of one optimizer, or of several by number."""
    if not state:
        return
    several = {f"optimizer.{index}.": each for index, each in state.items()} if 0 in state else {"optimizer.": state}
    for path, each in several.items():
        around = isinstance(each, dict) and "optimizer" in each
        expected = {"optimizer": _TORCH_OPTIMIZER, "grad_scaler?": _SCALER} if around else _TORCH_OPTIMIZER
        yield from _problems(each, expected, path)
