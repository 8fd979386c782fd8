"""What a comparison says to a person."""

from __future__ import annotations

from rich.console import Console
from rich.table import Table

from megatron_cp.terminal import printable
from megatron_cp.verify.compare import GRADIENT_TOLERANCE, LOSS_TOLERANCE, NORM_TOLERANCE, Comparison


def show(result: Comparison, names: tuple[str, str], console: Console) -> None:
    """The table, the verdict and, if it is a bad one, where to look."""
    table = Table(box=None, pad_edge=False, header_style="bold")
    for column in ("", *names, "difference", "tolerance", "verdict"):
        table.add_column(column, justify="left" if column in ("", "verdict") else "right", overflow="fold")
    if result.fault is None:
        first, last = result.reference[0], result.reference[-1]
        mine, my_last = result.layout[0], result.layout[-1]
        count = len(result.reference)
        table.add_row("tokens, step 1", str(first.tokens), str(mine.tokens), "", "equal",
                      _verdict(first.tokens == mine.tokens))  # fmt: skip
        table.add_row("loss, step 1", f"{first.loss:.7f}", f"{mine.loss:.7f}", "", "", "")
        table.add_row(f"loss, step {count}", f"{last.loss:.7f}", f"{my_last.loss:.7f}",
                      f"{result.loss_difference:.1e}", f"{LOSS_TOLERANCE:.0e}",
                      _verdict(result.loss_difference <= LOSS_TOLERANCE))  # fmt: skip
        table.add_row("gradient norm, step 1", f"{first.grad_norm:.6f}", f"{mine.grad_norm:.6f}",
                      f"{result.norm_difference:.1e}", f"{NORM_TOLERANCE:.0e}",
                      _verdict(result.norm_difference <= NORM_TOLERANCE))  # fmt: skip
        if result.worst is not None:
            table.add_row(f"worst gradient: {result.worst.name}", "", f"on rank {result.worst.rank}",
                          f"{result.worst.difference:.1e}", f"{GRADIENT_TOLERANCE:.0e}",
                          _verdict(result.worst.difference <= GRADIENT_TOLERANCE))  # fmt: skip
    console.print(table)
    console.print(
        f"{result.num_parameters} parameters compared; {result.seconds[0]:.1f} s and {result.seconds[1]:.1f} s; "
        f"differences are relative, the worst of {len(result.reference)} steps"
    )
    console.print("[bold green]EQUAL[/]: the same model is trained" if result.equal else "[bold red]DIFFERENT[/]")
    for line in diagnose(result):
        console.print(f"  {printable(line)}", markup=False)


def _verdict(good: bool) -> str:
    return "[green]ok[/]" if good else "[red]WRONG[/]"


def diagnose(result: Comparison) -> list[str]:
    """Where to look, from what differs and what does not."""
    if result.equal:
        return []
    said = []
    if result.fault is not None:
        said.append(f"the layout did not run: {result.fault}")
    if result.probe is not None:
        said.append(result.probe)
    if result.fault is not None or not result.layout:
        return said
    first, mine = result.reference[0], result.layout[0]
    forward_differs = abs(first.loss - mine.loss) > LOSS_TOLERANCE * abs(first.loss) or mine.loss != mine.loss
    if first.tokens != mine.tokens:
        said.append(
            f"{mine.tokens} tokens took part in the first loss and not {first.tokens}: look at how batches are dealt "
            "to ranks and sliced, and at the reduction of the loss"
        )
    elif forward_differs:
        said.append(
            "the first loss differs already, before any gradient: look at attention's communication"
            + (" (the probe found nothing wrong with it)" if result.probe is None else "")
            + ", at positions (RoPE), at how batches are sliced, and at how the loss is normalized"
        )
    if result.replicas is not None:
        said.append(
            f"copies of a parameter have different gradients ({result.replicas}): they are not reduced over all data- "
            "and context-parallel ranks"
        )
    elif not forward_differs and result.num_wrong:
        off = abs(result.ratio - 1)
        if off > GRADIENT_TOLERANCE and result.residual < min(1e-3, off / 10):  # the factor explains the difference
            said.append(f"all gradients are {result.ratio:.4g} times the reference's: look at how they are scaled")
        else:
            said.append(
                f"the forward pass agrees and {result.num_wrong} of {result.num_parameters} gradients do not: look at "
                "the backward pass of what these parameters feed, and at what reduces their gradients"
            )
    if not said:
        said.append("the first step agrees and later ones do not: look at the optimizer and its schedule")
    return said
