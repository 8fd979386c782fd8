"""Norms, products and dropout of megatron-core's layers on a CPU, as steps. Pure.

Counted by ``tests/live_memory.py``. ``b`` is the bytes of an element.
"""

from __future__ import annotations

from dataclasses import replace

from megatron_cp.config.model_config import ModelConfig
from megatron_cp.estimate.memory.tape import RESIDUAL, Step
from megatron_cp.models.fusions import fuses_gate


def norm_steps(model: ModelConfig, b: int, name: str) -> list[Step]:
    """Return the steps of a residual norm; RMSNorm also keeps its normalized input."""
    return _norm(model, b, (RESIDUAL, f"{name} input"), name)


def last_norm_steps(model: ModelConfig, b: int) -> list[Step]:
    """Return the steps of the model's last norm.

    Its input's gradient has no residual to be added to in place, so RMSNorm's last part has one tensor more.
    """
    first, *rest = norm_steps(model, b, "ending")
    return [replace(first, gradients=first.gradients + residual(model, b)) if rest else first, *rest]


def _norm(model: ModelConfig, b: int, input_: tuple[str, str], name: str) -> list[Step]:
    """Return the steps of a norm of ``input_``.

    RMSNorm frees the normalized input before the last part of its backward pass, the power's, which needs as much more.
    """
    stream, root = residual(model, b), b / sequence_parts(model)
    if model.normalization != "RMSNorm":
        return [Step({input_: stream, (RESIDUAL, f"{name} root"): 2 * root}, 2 * stream)]
    return [
        Step({input_: stream, (RESIDUAL, f"{name} root"): root}, 4 * stream + root),  # and the root's gradient
        Step({(RESIDUAL, f"{name} normalized"): stream}, 3 * stream),
    ]


def residual(model: ModelConfig, b: int) -> float:
    """Return bytes a token of the residual stream on this rank."""
    return model.hidden_size * b / sequence_parts(model)


def sequence_parts(model: ModelConfig) -> int:
    return model.tensor_model_parallel_size if model.sequence_parallel else 1


def received_parts(model: ModelConfig, b: int) -> float:
    """Return bytes a token of other ranks' parts of a sum that is scattered.

    In truth at most 4 MiB exist (mcore/shards.py).
    """
    return model.hidden_size * b - residual(model, b)


def column_step(model: ModelConfig, b: int, name: str, width: float) -> Step:
    """Return the step of a column-parallel product, ``width`` on this rank."""
    whole = model.hidden_size * b
    scattered = whole if model.sequence_parallel else 0.0  # this rank's part of the sum, and those it receives
    return Step({(RESIDUAL, f"{name} output"): residual(model, b)}, width * b + whole + scattered, whole * width)


def gate_keeps(model: ModelConfig, kind: str, size: float, name: str = "") -> dict[tuple[str, str], float]:
    """Return what a gated activation keeps beside its input; ``size``: of its output.

    Nothing where one function computes it.
    """
    separate = model.gated_linear_unit and not fuses_gate(model)
    return {(kind, f"{name}gate"): size, (kind, f"{name}offset"): size} if separate else {}


def row_step(model: ModelConfig, b: int, keeps: tuple[str, str], width: float) -> Step:
    """Return the step of a row-parallel product."""
    whole = model.hidden_size * b
    gathered = whole if model.sequence_parallel else 0
    return Step({keeps: width * b}, width * b + gathered, whole * width)


def after_steps(model: ModelConfig, b: int, kind: str, name: str) -> list[Step]:
    """Return the steps of sandwich norm and dropout, before the residual is added."""
    steps = _norm(model, b, (kind, f"{name} output"), f"{name} after") if model.sandwich_norm else []
    if model.hidden_dropout:
        steps.append(dropout_step(model, b, name))
    return steps


def dropout_step(model: ModelConfig, b: int, name: str) -> Step:
    """Return dropout's step; on a CPU its mask has the activations' own dtype."""
    stream = residual(model, b)
    return Step({(RESIDUAL, f"{name} mask"): stream}, stream)
