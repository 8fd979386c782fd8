"""Text output of a comparison."""

from __future__ import annotations

from collections.abc import Sequence

from rich.console import Console
from rich.table import Table

from megatron_cp.common.terminal import printable
from megatron_cp.config.names import NAME
from megatron_cp.parallel.layout import RankLayout
from megatron_cp.verify.compare import GRADIENT_TOLERANCE, NORM, RATE_TOLERANCE, TOKEN_LOSSES, Comparison, Row
from megatron_cp.verify.tensors import Replicas, TensorDifferences


def show(result: Comparison, names: tuple[str, str], console: Console) -> None:
    """Print the table, the verdict and, if results differ, where to look."""
    table = Table(box=None, pad_edge=False, header_style="bold")
    for column in ("", *names, "difference", "tolerance", "verdict"):
        table.add_column(column, justify="left" if column in ("", "verdict") else "right", overflow="fold")
    for row in _shown(result):
        difference = f"{row.difference:.1e}" if row.tolerance else f"{row.difference:g}"
        tolerance = f"{row.tolerance:.0e}" if row.tolerance else "none"
        verdict = "[green]ok[/]" if row.equal else "[red]WRONG[/]"
        name = row.name if row.step is None else f"{row.name}, step {row.step}"
        table.add_row(name, *row.values, difference, tolerance, verdict)
    console.print(table)
    console.print(
        f"{result.gradients.number} parameters compared; runs took {result.seconds[0]:.1f} s and "
        f"{result.seconds[1]:.1f} s; differences are relative"
    )
    console.print("[bold green]EQUAL[/]: results match the reference" if result.equal else "[bold red]DIFFERENT[/]")
    for line in diagnose(result):
        console.print(f"  {printable(line)}", markup=False)


def _shown(result: Comparison) -> list[Row]:
    """Select rows of the first step, the last loss, and all differing rows."""
    last = len(result.reference)
    return [
        row
        for row in result.rows()
        if not row.equal or row.step in (None, 1) or (row.step == last and row.name == "loss")
    ]


def diagnose(result: Comparison) -> list[str]:
    """Suggest where to look, from what differs and what matches."""
    if result.equal:
        return []
    lines = []
    if result.fault is not None:
        lines.append(f"the layout did not run: {result.fault}")
    if result.probe is not None:
        lines.append(result.probe)
    if result.fault is not None:
        return lines
    wrong = [row.name for row in result.rows() if row.step == 1 and not row.equal]
    forward = _diagnose_forward(result, wrong)
    lines += forward
    if result.gradients.replicas is not None:
        lines.append(_describe_replicas("gradients", result.gradients.replicas, result.ranks))
    elif not forward:
        lines += _diagnose_backward(result, wrong)
    if not lines:
        lines += _diagnose_optimizer(result)
    return lines


def _diagnose_forward(result: Comparison, wrong: Sequence[str]) -> list[str]:
    """Diagnose the forward pass from ``wrong``, the differing first-step rows."""
    if "tokens" in wrong:
        return [
            f"the first loss covers {result.layout[0].tokens} tokens instead of {result.reference[0].tokens}. Check "
            "how batches are distributed and sliced, and how the loss is reduced"
        ]
    if TOKEN_LOSSES in wrong:
        main = result.tokens[0]
        return [
            f"the first forward pass differs in {main.wrong} of {main.number} token losses. Check attention "
            "communication"
            + (" (the attention probe passed)" if result.probe is None else "")
            + ", positions (RoPE), batch slicing, and the output layer with the loss (in chunks of "
            f"{NAME.model.cross_entropy_chunk_size})"
        ]
    if "loss" in wrong:
        return [
            "token losses match, but the reported loss differs. Check how losses are masked, summed over ranks and "
            "normalized"
        ]
    found = []
    depths = [name.removeprefix(f"{TOKEN_LOSSES}, ") for name in wrong if name.startswith(TOKEN_LOSSES)]
    if of_mtp := [name for name in wrong if name.startswith("MTP")] or depths:
        found.append(
            f"the main loss matches, but multi-token prediction differs ({', '.join(of_mtp)}). Check how MTP tokens, "
            "labels and masks are shifted between ranks, the MTP layers, and the MTP token counts"
        )
    if routers := [name for name in wrong if name in result.reference[0].router_losses]:
        found.append(
            f"token losses match, but router losses differ ({', '.join(routers)}). Check which tokens routers count "
            "(padding), and over which ranks"
        )
    return found


def _diagnose_backward(result: Comparison, wrong: Sequence[str]) -> list[str]:
    found = result.gradients
    if not found.difference <= GRADIENT_TOLERANCE:
        off = abs(found.ratio - 1)
        if off > GRADIENT_TOLERANCE and found.residual < min(1e-3, off / 10):  # one factor explains the difference
            return [f"all gradients are {found.ratio:.4g} times the reference gradients. Check the gradient scaling"]
        which = f"{len(found.wrong)} of {found.number} gradients (most: {_worst(found)})"
        if found.wrong and all(".router." in name for name in found.wrong):
            return [f"all losses match, but {which} differ, all of routers. Check the weights of router losses"]
        return [
            f"all losses of the forward pass match, but {which} differ. Check the backward pass of the layers after "
            "these parameters, and the reduction of their gradients"
        ]
    if NORM in wrong:
        return ["gradients match, but the gradient norm differs. Check the reduction of the norm over ranks"]
    return []


def _diagnose_optimizer(result: Comparison) -> list[str]:
    difference, expected, rate = result.rates
    if difference > RATE_TOLERANCE:
        return [f"a learning rate is {rate} instead of {expected}. Check the learning-rate schedule"]
    if result.updates.replicas is not None:
        return [_describe_replicas("weights after the last step", result.updates.replicas, result.ranks)]
    which = f"{len(result.updates.wrong)} of {result.updates.number} weights (most: {_worst(result.updates)})"
    return [
        f"losses and gradients of the first step match, but {which} change differently. Check the optimizer (clipping, "
        "parameter groups, state), and the gathering of weights for the next forward pass"
    ]


def _worst(found: TensorDifferences) -> str:
    return "none" if found.worst is None else found.worst.name


def _describe_replicas(what: str, copies: Replicas, ranks: RankLayout) -> str:
    a, b = copies.ranks
    first, second = ranks.coordinates(a), ranks.coordinates(b)
    names = {"tp": "tensor-parallel", "pp": "pipeline", "cp": "context-parallel", "dp": "data-parallel"}
    over = " and ".join(name for key, name in names.items() if first[key] != second[key])
    where = f"copies of a parameter have different {what} ({copies.name} on ranks {a} and {b})"
    if what == "gradients":
        return f"{where}: gradients are not reduced over all {over} ranks"
    return f"{where}: {over} ranks take different optimizer steps, or do not gather all shards"
