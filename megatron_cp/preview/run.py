"""Read and show one step of a configuration."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING, Any, cast

from rich.console import Console

from megatron_cp.common.terminal import in_a_line
from megatron_cp.config.names import NAME
from megatron_cp.data.samples.epochs import iterations_of_epochs
from megatron_cp.data.samples.streams import check_files
from megatron_cp.data.summary import TokensUsed, log_data
from megatron_cp.data.text.tokenizers import build_tokenizer
from megatron_cp.preview.lengths import as_lines, length_rows
from megatron_cp.preview.show import StepView
from megatron_cp.preview.step import build_training_data, read_step
from megatron_cp.rules.remedies import Case
from megatron_cp.training.monitor.metrics import start_logging

if TYPE_CHECKING:
    from megatron_cp.data.samples.contents import HasSources


def preview(case: Case, step: int, num_decoded: int, most: int | None, *, as_data: bool) -> dict[str, Any] | None:
    """Print a step, counted from 1; with ``as_data`` return it instead.

    Args:
        num_decoded: samples to decode.
        most: tokens to show of a sample; None shows all.

    Raises:
        DataError: a file or a sample cannot be read.
    """
    config = case.config
    start_logging(0, live=False)
    tokenizer = build_tokenizer(config.tokenizer)
    check_files(config.dataset, tokenizer, config.tokenizer)
    if config.train.train_epochs is not None:
        config = config.with_iterations(iterations_of_epochs(config.train, config.dataset, tokenizer))
        case = replace(case, config=config)
    iterations, batch = config.train.train_iters or 0, config.train.global_batch_size
    datasets = build_training_data(case, tokenizer, step)
    used = TokensUsed(0, iterations * batch, batch, config.validation, config.evaluation_batch[0])
    log_data(config.dataset, config.tokenizer, datasets, tokenizer.eod, used)
    train_data = cast("HasSources", datasets.train)
    seen = read_step(case, datasets.train, step, num_decoded)
    view = StepView(seen, tokenizer, most, is_packed=config.model.sequence_packing_scheduler is not None)
    head = {"recipe": config.recipe, "step": step, "steps": iterations, "world_size": case.world_size}
    rows = length_rows(train_data, iterations * batch)
    if as_data:
        return head | view.as_dict() | {"length_mixture": [row._asdict() for row in rows]}
    console = Console(highlight=False, markup=False, emoji=False)
    first, last = seen.samples[0].number, seen.samples[-1].number
    of = f"step {step:,} of {iterations:,}"
    console.print(
        f"{in_a_line(config.recipe)}: {of}, samples {first:,} to {last:,}, on {case.world_size:,} ranks", soft_wrap=True
    )
    calibrated = config.model.dynamic_context_parallel_calibration_iters
    if config.model.dynamic_context_parallel and calibrated:
        message = f"the run may choose other groups after it measured {calibrated} iterations"
        console.print(f"{message} ({NAME.model.dynamic_context_parallel_calibration_iters})", soft_wrap=True)
    view.print(console)
    if rows:
        console.print("", *as_lines(rows), sep="\n", soft_wrap=True)
    return None
