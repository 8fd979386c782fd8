"""Compare runs in numbers: the rows of the report's table."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from statistics import median
from typing import Any

from megatron_cp.common.terminal import in_a_line
from megatron_cp.report.evaluations import read_results
from megatron_cp.report.runs import LoggedRun

_WARM_UP = 2  # the first steps allocate buffers and connections


def table(runs: Sequence[LoggedRun]) -> list[tuple[str, list[str]]]:
    """Return rows of a name and one cell per run, without empty rows."""
    rows = [(name, [cell(run) for run in runs]) for name, cell in _ROWS.items()]
    return [(name, cells) for name, cells in (*rows, *_evaluations(runs)) if any(cells)]


def _evaluations(runs: Sequence[LoggedRun]) -> list[tuple[str, list[str]]]:
    """Return a row for each name in the runs' ``evaluations`` folders."""
    found = [read_results(run.folder) for run in runs]
    names = sorted({name for results in found for name in results})
    return [(f"evaluation {name}", [_evaluation(results.get(name)) for results in found]) for name in names]


def _evaluation(result: Mapping[str, Any] | None) -> str:
    if result is None:
        return ""
    if "exact" in result:
        return f"{result['exact']:.1%} of answers right (iteration {result.get('iteration')})"
    per_byte = f", {result['bits_per_byte']:.4f} bits a byte" if "bits_per_byte" in result else ""
    return f"{result['loss']:.4f}{per_byte} ({result.get('tokens', 0):,} tokens, iteration {result.get('iteration')})"


def as_text(runs: Sequence[LoggedRun]) -> str:
    """Format the table for a terminal."""
    rows = [("", [run.name for run in runs]), *table(runs)]
    rows = [(name, [in_a_line(cell) for cell in cells]) for name, cells in rows]
    first = max(len(name) for name, _ in rows)
    widths = [max(len(cells[k]) for _, cells in rows) for k in range(len(runs))]
    lines = []
    for name, cells in rows:
        padded = [f"{cell:{width}}" for cell, width in zip(cells, widths, strict=True)]
        lines.append("  ".join([f"{name:{first}}", *padded]).rstrip())
    return "\n".join(lines)


def _setting(section: str, field: str) -> Any:
    def cell(run: LoggedRun) -> str:
        value = run.setting(section, field)
        return "" if value is None else f"{value:,}" if type(value) is int else str(value)

    return cell


def _typical(values: Sequence[float]) -> float:
    """Return the median over the steps after the first two."""
    return median(values[_WARM_UP:] or values)


def _number(field: str, form: str, scale: float = 1.0, of: Callable[[Sequence[float]], float] = _typical) -> Any:
    def cell(run: LoggedRun) -> str:
        values = run.points(field)[1]
        return form.format(of(values) * scale) if values else ""

    return cell


def _iterations(run: LoggedRun) -> str:
    done, total = run.steps[-1]["iteration"], run.setting("train", "train_iters")
    return f"{done:,} of {total:,}" if isinstance(total, int) else f"{done:,}"


def first_and_last_loss(run: LoggedRun) -> str:
    """Format the first and last finite step loss."""
    losses = run.points("lm_loss")[1]
    return f"{losses[0]:.4f} -> {losses[-1]:.4f}" if losses else "not finite"


def _last(field: str) -> Callable[[LoggedRun], str]:
    """Return a cell with the last value of a loss, "" if there is none."""

    def cell(run: LoggedRun) -> str:
        losses = run.points(field)[1]
        return f"{losses[-1]:.4f}" if losses else ""

    return cell


validation_loss = _last("validation_loss")


def _measured(run: LoggedRun) -> str:
    """Format the latest loss of each iteration, split and data."""
    latest: dict[str, str] = {}
    for line in run.measured:
        of = line["measured_with"]
        settings = ", ".join(f"{name}={value}" for name, value in of.items()) if isinstance(of, Mapping) else str(of)
        for part in ("validation", "test"):
            loss = line.get(f"{part}_loss")
            if isinstance(loss, int | float):
                latest[f"{part}, iteration {line['iteration']:,}, {settings}"] = f"{loss:.4f}"
    return "; ".join(f"{loss} ({what})" for what, loss in latest.items())


def _skipped(run: LoggedRun) -> str:
    return str(sum(bool(step.get("skipped")) for step in run.steps))


def _phases(run: LoggedRun) -> str:
    seconds = run.phase_seconds
    total = sum(seconds.values())
    shares = sorted(((value / total, name) for name, value in seconds.items()), reverse=True) if total else []
    return ", ".join(f"{name.replace('_', '-')} {share:.0%}" for share, name in shares if share >= 0.005)


def _whole_iteration(run: LoggedRun) -> str:
    total = sum(run.phase_seconds.values())
    return f"{1e3 * total:.1f}" if total else ""


_ROWS = {
    "recipe": lambda run: str(run.config.get("recipe", "")),
    "layout": lambda run: run.layout,
    "sequence length": _setting("model", "seq_length"),
    "global batch, samples": _setting("train", "global_batch_size"),
    "iterations": _iterations,
    "lm loss, first and last step": first_and_last_loss,
    "validation loss": validation_loss,
    "validation loss per sample": _last("validation_loss_per_sample"),
    "other evaluations": _measured,
    "tokens/s (median)": _number("tokens_per_s", "{:,.0f}"),
    "tokens/s a device (median)": _number("tokens_per_s_per_device", "{:,.0f}"),
    "TFLOP/s a device (median)": _number("tflops_per_device", "{:.4g}"),
    "MFU of a given peak (median)": _number("mfu_of_given_peak", "{:.3f}"),
    "MFU of a measured peak (median)": _number("mfu_of_measured_peak", "{:.3f}"),
    "step alone, ms (median)": _number("step_time_s", "{:.1f}", 1e3),
    "iteration with evaluations and checkpoints, ms (mean)": _whole_iteration,
    "time by phase": _phases,
    "peak memory a rank, GB": _number("peak_memory_bytes", "{:.2f}", 1e-9, max),
    "padding (median)": _number("padding_fraction", "{:.2%}"),
    "imbalance (median)": _number("imbalance", "{:.3f}"),
    "skipped steps": _skipped,
}
