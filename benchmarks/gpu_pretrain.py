"""Measure tokens/s and model-FLOPs utilization of training on one device.

    python benchmarks/gpu_pretrain.py                                         # a GPU: 1B, 4K to 128K tokens
    python benchmarks/gpu_pretrain.py --sizes 8192,32768 --recompute none     # the two that matter most, some minutes
    python benchmarks/gpu_pretrain.py --models 1b,8b --sizes 8192,32768 --recompute none,mlp,full
    python benchmarks/gpu_pretrain.py --models tiny --sizes 256 --matmul 512  # on a CPU, to try the script
    python benchmarks/gpu_pretrain.py model.apply_rope_fusion=false           # without one of the fused kernels
    python benchmarks/gpu_pretrain.py --attention native model.transformer_impl=local  # without Transformer Engine
    python benchmarks/gpu_pretrain.py --sizes 8192 --profile traces           # and profile a step

Utilization is relative to the rate of large bf16 matrix products in the same run, not to a data sheet. Operations are
counted as in ``megatron_cp/estimate/flops.py`` (causal attention, no recomputation). A busy GPU slows down after some
seconds because of its power limit. Training is therefore compared with the rate that products reach then. The initial
rate is printed too, and beside each utilization its operations per second.

``8b`` has the 8B model's widths and four of its layers. Each case is a step of the recipe, with its data and its
optimizer. Printed are the median over steps and, in brackets, the slowest and the fastest. ``mlp`` recomputes MLPs in
the backward pass: it keeps a third of the activations and costs a fraction of ``full``. A case that fails or does not
fit in memory has a row with the reason, and the other cases still run. The exit code is 1 if a case failed.

``--profile`` profiles one further step of each case, into a subfolder per case, and prints the summary of ``megatron-cp
profile`` at the end.
"""

from __future__ import annotations

import argparse
import gc
import statistics
import sys
import time
import traceback
from collections.abc import Callable, Iterator
from contextlib import closing, contextmanager
from itertools import product
from pathlib import Path

import torch

from megatron_cp.cli import profile as profile_cli
from megatron_cp.common.errors import ConfigError
from megatron_cp.config.flags import add_overrides
from megatron_cp.config.recipes import load_recipe
from megatron_cp.config.run_config import ProfilingConfig, RunConfig
from megatron_cp.data.samples.datasets import build_datasets
from megatron_cp.data.text.tokenizers import build_tokenizer
from megatron_cp.estimate.flops import training_flops
from megatron_cp.models.vocabulary import padded_vocab_size
from megatron_cp.parallel.device import device, start_distributed, stop_distributed
from megatron_cp.rules import check
from megatron_cp.training.batches import Steps
from megatron_cp.training.monitor.metrics import start_logging
from megatron_cp.training.monitor.profiling import Profiler
from megatron_cp.training.open_steps import open_steps
from megatron_cp.training.setup import Run, setup
from megatron_cp.training.step import train_step

MODELS = {
    "1b": ("llama32_1b_pretrain_config", []),
    "8b": ("llama3_8b_pretrain_config", ["model.context_parallel_size=1", "model.num_layers=4"]),
    "tiny": ("llama_tiny_pretrain_config", ["parallel=none"]),
}
RECOMPUTE = {
    "none": ["model.recompute_granularity=null"],
    "mlp": ["model.recompute_granularity=selective", "model.recompute_modules=[mlp]"],
    "full": ["model.recompute_granularity=full", "model.recompute_method=uniform", "model.recompute_num_layers=1"],
}


_WARM_UP, _COUNTED = 3, 20  # matrix products


def wait() -> None:
    if torch.cuda.is_available():
        torch.cuda.synchronize()


def matmul_rates(size: int, seconds: float) -> tuple[float, float]:
    """Return the FLOP/s of products of square matrices.

    Medians: initially, and after ``seconds`` of them. In bf16 on a GPU, in float32 as the recipes use it on a CPU.
    """
    dtype = torch.bfloat16 if torch.cuda.is_available() else torch.float32
    a, b = (torch.randn(size, size, device=device()).to(dtype) for _ in range(2))
    times: list[float] = []
    while len(times) < _WARM_UP + _COUNTED or sum(times) < seconds:
        wait()
        began = time.perf_counter()
        torch.matmul(a, b)
        wait()
        times.append(time.perf_counter() - began)
    first, last = times[_WARM_UP : _WARM_UP + _COUNTED], times[-_COUNTED:]
    return 2 * size**3 / statistics.median(first), 2 * size**3 / statistics.median(last)


def add_matmul(parser: argparse.ArgumentParser) -> None:
    """Add the arguments of :func:`print_matmul_rates`."""
    parser.add_argument("--matmul", type=int, default=8192, help="size of the square matrices to compare with")
    parser.add_argument("--matmul-seconds", type=float, default=5.0, help="warm-up of the matrix products")


def print_matmul_rates(size: int, seconds: float) -> float:
    """Measure the rates of matrix products and print them with the device.

    Returns the sustained rate.
    """
    first, lasting = matmul_rates(size, seconds)
    where = torch.cuda.get_device_name() if torch.cuda.is_available() else "CPU"
    print(
        f"{where}, torch {torch.__version__}: {lasting / 1e12:.3g} TFLOP/s in matrix products of {size} after "
        f"{seconds:g} s of them, {first / 1e12:.3g} at first\n"
    )
    return lasting


def config_of(model: str, size: int, attention: str, recompute: str, options: argparse.Namespace) -> RunConfig:
    """Return the configuration of a case.

    It is a published model on one rank, with mock data.
    """
    recipe, overrides = MODELS[model]
    settings = [
        *overrides,
        "train.check_memory=false",  # whether a case fits is measured
        f"dataset.seq_length={size}",
        f"train.global_batch_size={max(1, options.tokens // size)}",
        "train.micro_batch_size=1",
        f"train.train_iters={options.warm_up + options.steps + 1}",
        "scheduler.lr_warmup_iters=1",
        "dataset.kind=mock",
        "validation.eval_iters=0",
        f"model.attention_backend={attention}",
        f"model.cross_entropy_chunk_size={options.chunk}",
        *RECOMPUTE[recompute],
        *options.overrides,
    ]
    return load_recipe(recipe, settings)


@contextmanager
def running(config: RunConfig) -> Iterator[tuple[Run, Steps, int]]:
    """Set up a run; yield it with its global batches and the padded vocabulary size.

    Raises:
        ConfigError: this machine cannot run the case.
    """
    violations = [v for v in check(config, 1) if v.severity == "error"]
    if violations:
        raise ConfigError(violations)
    start_distributed(config.dist)
    tokenizer = build_tokenizer(config.tokenizer)
    count = config.train.train_iters * config.train.global_batch_size
    dataset = build_datasets(config.dataset, tokenizer, count).train
    assert dataset is not None
    run = setup(config, tokenizer.vocab_size)
    gc.disable()
    try:
        with closing(open_steps(run, dataset, 0, training=True)) as steps:
            yield run, steps, padded_vocab_size(config.model, tokenizer.vocab_size)
    finally:
        gc.enable()
        run.close()


def steps_of(config: RunConfig, profiles: Path | None = None) -> Iterator[float]:
    """Yield the operations of a step, then the seconds of each step.

    Warm-up steps are included. With ``profiles`` one further step is profiled into this folder instead of measured.
    """
    with running(config) as (run, steps, rows):
        yield training_flops(config.model, rows, [config.dataset.seq_length] * config.train.global_batch_size)
        done = config.train.train_iters - 1
        for _ in range(done):
            yield seconds_of(lambda: train_step(run, next(steps).microbatches))
        if profiles is not None:
            chosen = ProfilingConfig(use_pytorch_profiler=True, profile_step_start=done, profile_step_end=done + 1)
            profiler = Profiler(chosen, profiles, 0, run.phases)
            gc.collect()
            wait()
            with profiler.step(done):
                train_step(run, next(steps).microbatches)
                wait()


def seconds_of(step: Callable[[], object]) -> float:
    """Return a step's seconds, the device's included.

    Python's garbage is collected before, not during the step.
    """
    gc.collect()
    wait()
    began = time.perf_counter()
    step()
    wait()
    return time.perf_counter() - began


def measure(model: str, size: int, attention: str, recompute: str, peak: float, options: argparse.Namespace) -> str:
    """Return one case as a row of the table."""
    name = f"| {model} | {size} | {attention} | {recompute} |"
    if torch.cuda.is_available():
        torch.cuda.reset_peak_memory_stats()
    profiles = options.profile and options.profile / f"{model}_{size}_{attention}_{recompute}"
    try:
        flops, *seconds = steps_of(config_of(model, size, attention, recompute, options), profiles)
        seconds = seconds[options.warm_up :]
    except Exception as error:
        return f"{name} {error_cell(error)} | | | |"
    finally:
        gc.collect()
        if torch.cuda.is_available():
            torch.cuda.empty_cache()
    median, tokens = statistics.median(seconds), max(1, options.tokens // size) * size
    used = [f"{100 * flops / each / peak:.1f}" for each in (median, max(seconds), min(seconds))]
    memory = f"{torch.cuda.max_memory_allocated() / 1e9:.1f}" if torch.cuda.is_available() else ""
    rate = f"{flops / median / 1e12:.3g}"
    return f"{name} {tokens / median:.0f} | {rate} | {used[0]} [{used[1]} {used[2]}] | {memory} |"


def error_cell(error: Exception) -> str:
    """Return a failed case's cell.

    The traceback of an unexpected error goes to standard error.
    """
    if isinstance(error, ConfigError):
        return error.violations[0].message
    # Extensions raise a plain RuntimeError in place of torch's OutOfMemoryError.
    if isinstance(error, torch.OutOfMemoryError) or "out of memory" in str(error):
        return "does not fit in memory"
    traceback.print_exception(error)
    return f"failed: {type(error).__name__}: {(str(error).splitlines() or [''])[0]}"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    add_overrides(parser, "settings for all cases")
    names = {"type": lambda text: text.split(",")}
    parser.add_argument("--models", **names, default=["1b"], help=", ".join(MODELS))
    parser.add_argument("--sizes", **names, default=["4096", "8192", "16384", "32768", "65536", "131072"])
    parser.add_argument("--attention", **names, default=["te", "native"], help="te, native")
    parser.add_argument("--recompute", **names, default=["none", "mlp"], help=", ".join(RECOMPUTE))
    parser.add_argument("--tokens", type=int, default=131072, help="tokens per step")
    parser.add_argument("--chunk", type=int, default=32768, help="model.cross_entropy_chunk_size")
    parser.add_argument("--steps", type=int, default=5, help="measured steps of each case")
    parser.add_argument("--warm-up", type=int, default=3, help="warm-up steps of each case")
    add_matmul(parser)
    parser.add_argument("--profile", type=Path, metavar="FOLDER", help="profile one step of each case into this folder")
    options = parser.parse_args()
    start_logging(1, False)  # only warnings
    peak = print_matmul_rates(options.matmul, options.matmul_seconds)
    print("| model | tokens | attention | recompute | tokens/s | TFLOP/s | utilization, % | memory, GB |")
    print("|---|---|---|---|---|---|---|---|")
    rows = []
    for model, size, attention, recompute in product(
        options.models, options.sizes, options.attention, options.recompute
    ):
        rows.append(measure(model, int(size), attention, recompute, peak, options))
        print(rows[-1], flush=True)
    stop_distributed()
    profiled = sorted(path.parent for path in options.profile.glob("*/profile")) if options.profile else []
    if profiled:
        print(flush=True)
        profile_cli.main([*map(str, profiled), "--kernels=25"])
    sys.exit(any("| failed: " in row for row in rows))


if __name__ == "__main__":
    main()
