"""Run the same microbatches through our model and through megatron-core's own.

megatron-core's is ``GPTModel`` with its spec of Transformer Engine's layers and ``TEDotProductAttention``. Both have
the same configuration, data parallelism, schedule and fused kernels.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import closing, contextmanager
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import torch
from megatron.core.models.gpt.gpt_layer_specs import get_gpt_layer_with_transformer_engine_spec
from megatron.core.models.gpt.gpt_model import GPTModel
from megatron.core.pipeline_parallel import get_forward_backward_func
from megatron.core.transformer.module import Float16Module
from torch import Tensor

from megatron_cp.data.text.tokenizers import build_tokenizer
from megatron_cp.dynamic_cp.runtime.active_group import active_group
from megatron_cp.models.build import Build
from megatron_cp.models.builder import fuse_gradient_sums, move_to_device
from megatron_cp.models.transformer_config import transformer_config
from megatron_cp.training.batches import Microbatch
from megatron_cp.training.forward_backward import forward_backward
from megatron_cp.training.open_steps import open_steps
from megatron_cp.training.optimizer import build_optimizer
from megatron_cp.training.setup import Run, connect_schedule, setup, wrap_data_parallel
from tests.packed_runs import BALANCED, DYNAMIC, packed_config, train_dataset
from tests.training_runs import start, tiny_config
from tests.unit_tests.training.layouts.cases import CP2

_UNCALIBRATED = {"model__dynamic_context_parallel_calibration_iters": 0, "model__max_seqlen_per_dp_cp_rank": 64}


class Kind(NamedTuple):
    """Kind of steps: number of ranks, and settings."""

    ranks: int
    settings: dict[str, Any]


KINDS = {
    "dense": Kind(1, {}),
    "packed": Kind(1, BALANCED),
    "dense, cp2": Kind(2, CP2),
    "dynamic, groups of 2": Kind(2, DYNAMIC | _UNCALIBRATED),
}
OURS, BARE = "ours", "bare"
_BF16 = {"mixed_precision__fp32": False, "mixed_precision__bf16": True}

type Passes = dict[str, Callable[[int], object]]  # of each side: a number of equal microbatches, forward and backward
type Measure = Callable[[Callable[[], object]], Counter[str]]
type Counts = dict[str, Counter[str]]  # of each side


@contextmanager
def both_sides(kind: str, layers: int, lengths: str) -> Iterator[Passes]:
    """Build both models on these ranks. Collective.

    kind: of :data:`KINDS`. lengths: a file of documents' lengths.
    """
    settings = _BF16 | {"model__num_layers": layers, "train__global_batch_size": 4} | KINDS[kind].settings
    if "dense" in kind:
        run, steps = start(tiny_config(**settings))
    else:
        config = packed_config(lengths, settings)
        run = setup(config, build_tokenizer(config.tokenizer).vocab_size)
        steps = open_steps(run, train_dataset(config), 0, training=True)
    with closing(run), closing(steps):
        microbatch = next(steps).microbatches[0]
        bare = _bare_model(run)

        def ours(number: int) -> None:
            run.model[0].zero_grad_buffer()
            forward_backward(run, [microbatch] * number, forward_only=False)

        def megatrons(number: int) -> None:
            bare.zero_grad_buffer()
            # megatron-core's rotary embedding reads a pack's group from the model's groups.
            with active_group(run.groups, _values_of(microbatch).get("packed_seq_params")):
                _bare_forward_backward(run, bare, [microbatch] * number)

        yield {OURS: ours, BARE: megatrons}


def write_lengths(folder: Path) -> str:
    """Write lengths of documents that need two ranks in dynamic steps."""
    path = folder / "lengths.txt"
    path.write_text("128\n100\n")
    return str(path)


def counts(kind: str, lengths: str, measures: Sequence[Measure]) -> list[tuple[Counts, Counts]]:
    """Count a microbatch's work by each measure. Collective.

    Returns:
        For each measure the counts of both sides: in a layer, and in the rest of the model.
    """
    found: dict[int, list[Counts]] = {}
    for layers in (1, 2):
        with both_sides(kind, layers, lengths) as passes:
            for run in passes.values():
                run(2)  # fills caches
            found[layers] = [{side: _difference(measure, run) for side, run in passes.items()} for measure in measures]
    return [
        (
            {side: _minus(two[side], one[side]) for side in one},
            {side: _minus(one[side], _minus(two[side], one[side])) for side in one},
        )
        for one, two in zip(found[1], found[2], strict=True)
    ]


def _difference(measure: Measure, run: Callable[[int], object]) -> Counter[str]:
    """Return the counts of a microbatch, without those of a step."""
    return _minus(measure(partial(run, 2)), measure(partial(run, 1)))


def _minus(a: Counter[str], b: Counter[str]) -> Counter[str]:
    difference = Counter(a)
    difference.subtract(b)
    return Counter({name: count for name, count in difference.items() if count})


def _bare_model(run: Run) -> Any:
    config = run.config
    core_config = transformer_config(config.model, config.mixed_precision, None)
    chunk: Any = GPTModel(
        core_config,
        get_gpt_layer_with_transformer_engine_spec(),
        vocab_size=run.vocab_rows,
        max_sequence_length=config.model.max_position_embeddings,
        share_embeddings_and_output_weights=config.model.share_embeddings_and_output_weights,
        position_embedding_type="rope",
        pg_collection=run.groups,
    )
    build = Build(config.model, core_config, run.groups, config.rng.seed, object)
    fuse_gradient_sums(chunk, build)  # megatron-core's setting for it wants apex
    move_to_device(chunk, build)
    distributed = config.optimizer.use_distributed_optimizer
    chunks = [Float16Module(core_config, chunk)]
    model = wrap_data_parallel(config.ddp, core_config, chunks, run.groups, distributed)
    optimizer = build_optimizer(config.optimizer, config.mixed_precision, model, run.groups, core_config.params_dtype)
    connect_schedule(core_config, model, optimizer, run.groups)
    return model[0]


def _bare_forward_backward(run: Run, model: Any, microbatches: Sequence[Microbatch]) -> None:
    get_forward_backward_func(pp_size=1, vp_size=None)(
        forward_step_func=_forward_step,
        data_iterator=iter(microbatches),
        model=model,
        num_microbatches=len(microbatches),
        seq_length=run.config.model.seq_length,
        micro_batch_size=1,
        forward_only=False,
        pg_collection=run.groups,
    )


def _values_of(microbatch: Microbatch) -> dict[str, Any]:
    return microbatch if isinstance(microbatch, dict) else vars(microbatch)


def _forward_step(microbatches: Iterator[Microbatch], model: Any) -> tuple[Tensor, Callable]:
    """Compute what megatron-core's example of pre-training computes."""
    values = _values_of(next(microbatches))
    losses = model(
        values["tokens"],
        values["position_ids"],
        None,
        labels=values["labels"],
        packed_seq_params=values.get("packed_seq_params"),
    )
    return losses, partial(_masked_sum, values["loss_mask"])


def _masked_sum(loss_mask: Tensor, losses: Tensor) -> tuple[Tensor, Tensor, dict[str, Tensor]]:
    mask = loss_mask.view(-1).float()
    loss = (losses.view(-1).float() * mask).sum()
    tokens = mask.sum().detach().to(torch.int)
    return loss, tokens, {"lm loss": torch.cat([loss.detach().view(1), tokens.view(1)])}
