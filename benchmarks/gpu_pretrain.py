"""Tokens/s and model-FLOPs utilization of training on one device, beside the matrix products that it can do.

    python benchmarks/gpu_pretrain.py                                         # a GPU: 1B, 4K to 128K tokens
    python benchmarks/gpu_pretrain.py --sizes 8192,32768 --recompute none     # the two that matter most, some minutes
    python benchmarks/gpu_pretrain.py --models 1b,8b --sizes 8192,32768 --recompute none,mlp,full
    python benchmarks/gpu_pretrain.py --models tiny --sizes 256 --matmul 512  # what a CPU can do, to try the script
    python benchmarks/gpu_pretrain.py model.apply_rope_fusion=false           # without one of the fused kernels
    python benchmarks/gpu_pretrain.py --attention native model.transformer_impl=local  # nothing of Transformer Engine
    python benchmarks/gpu_pretrain.py --sizes 8192 --profile traces           # and where a step's time goes

Utilization is that of the rate measured in the same run for large bf16 matrix products, not of a data sheet's:
operations are counted as in ``megatron_cp/estimate/flops.py`` (causal attention, no recomputation). A GPU slows
down when it has been busy for a while, by its limit of power; training, which lasts, is compared with what the products
reach then. Their first rate is printed too, and beside each utilization the operations a second that it stands for.

``8b`` has the 8B model's widths and four of its layers. Each case is a step of the recipe, with its data and its
optimizer; printed are the median over steps and, in brackets, the slowest and fastest. ``mlp`` computes MLPs again in
the backward pass, which keeps a third of the activations for a fraction of the work of ``full``. A case that does not
fit in memory, or fails, says so in its row, and the others are measured all the same; the exit code is then 1 for one
that failed. With ``--profile`` each case has one step more, which is profiled as a run's would be, into a folder of its
own in that one; ``megatron-cp profile`` sums it up, and so does this at its end.
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
    "none": [],
    "mlp": ["model.recompute_granularity=selective", "model.recompute_modules=[mlp]"],
    "full": ["model.recompute_granularity=full", "model.recompute_method=uniform", "model.recompute_num_layers=1"],
}


_WARM_UP, _COUNTED = 3, 20  # matrix products


def wait() -> None:
    if torch.cuda.is_available():
        torch.cuda.synchronize()


def matmul_rates(size: int, seconds: float) -> tuple[float, float]:
    """FLOP/s of products of square matrices, of the first ones and of those after so many ``seconds`` of them; medians.

    In bf16 on a GPU, float32 as the recipes use it on a CPU.
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


def told_rates_of_products(size: int, seconds: float) -> float:
    """Measures and prints them with the device; the lasting one."""
    first, lasting = matmul_rates(size, seconds)
    where = torch.cuda.get_device_name() if torch.cuda.is_available() else "CPU"
    print(
        f"{where}, torch {torch.__version__}: {lasting / 1e12:.3g} TFLOP/s in matrix products of {size} after "
        f"{seconds:g} s of them, {first / 1e12:.3g} at first\n"
    )
    return lasting


def config_of(model: str, size: int, attention: str, recompute: str, options: argparse.Namespace) -> RunConfig:
    """One case: a published model on one rank, with made-up tokens."""
    recipe, overrides = MODELS[model]
    settings = [
        *overrides,
        "train.check_memory=false",  # it measures what fits
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
    """A run that is ready, its global batches, and the rows of its embedding.

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
    """Yields the operations of a step, then the seconds of each step; the first ones, which warm up, among them.

    One step more, at last, is not measured but profiled, if ``profiles`` says where to.
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
    """Of the device too; Python's garbage is collected before and not meanwhile, as the recipes have it."""
    gc.collect()
    wait()
    began = time.perf_counter()
    step()
    wait()
    return time.perf_counter() - began


def measure(model: str, size: int, attention: str, recompute: str, peak: float, options: argparse.Namespace) -> str:
    """One case as a row of the table; with a profile, if one is wanted."""
    name = f"| {model} | {size} | {attention} | {recompute} |"
    if torch.cuda.is_available():
        torch.cuda.reset_peak_memory_stats()
    profiles = options.profile and options.profile / f"{model}_{size}_{attention}_{recompute}"
    try:
        flops, *seconds = steps_of(config_of(model, size, attention, recompute, options), profiles)
        seconds = seconds[options.warm_up :]
    except Exception as error:
        return f"{name} {told(error)} | | | |"
    finally:
        gc.collect()
        if torch.cuda.is_available():
            torch.cuda.empty_cache()
    median, tokens = statistics.median(seconds), max(1, options.tokens // size) * size
    used = [f"{100 * flops / each / peak:.1f}" for each in (median, max(seconds), min(seconds))]
    memory = f"{torch.cuda.max_memory_allocated() / 1e9:.1f}" if torch.cuda.is_available() else ""
    rate = f"{flops / median / 1e12:.3g}"
    return f"{name} {tokens / median:.0f} | {rate} | {used[0]} [{used[1]} {used[2]}] | {memory} |"


def told(error: Exception) -> str:
    """What a row says of its case's error, the traceback of one that nobody expects going to standard error."""
    if isinstance(error, ConfigError):
        return error.violations[0].message
    # Extensions make a plain RuntimeError of torch's own.
    if isinstance(error, torch.OutOfMemoryError) or "out of memory" in str(error):
        return "does not fit in memory"
    traceback.print_exception(error)
    return f"failed: {type(error).__name__}: {(str(error).splitlines() or [''])[0]}"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    add_overrides(parser, "settings of every case")
    names = {"type": lambda text: text.split(",")}
    parser.add_argument("--models", **names, default=["1b"], help=", ".join(MODELS))
    parser.add_argument("--sizes", **names, default=["4096", "8192", "16384", "32768", "65536", "131072"])
    parser.add_argument("--attention", **names, default=["te", "native"], help="te, native")
    parser.add_argument("--recompute", **names, default=["none", "mlp"], help=", ".join(RECOMPUTE))
    parser.add_argument("--tokens", type=int, default=131072, help="tokens of a step")
    parser.add_argument("--chunk", type=int, default=32768, help="model.cross_entropy_chunk_size")
    parser.add_argument("--steps", type=int, default=5, help="measured steps of each case")
    parser.add_argument("--warm-up", type=int, default=3, help="steps before them")
    parser.add_argument("--matmul", type=int, default=8192, help="rows and columns of the matrices")
    parser.add_argument("--matmul-seconds", type=float, default=5.0, help="of products, before the rate that lasts")
    parser.add_argument("--profile", type=Path, metavar="FOLDER", help="profile a step of each case, into this folder")
    options = parser.parse_args()
    start_logging(1, False)  # only warnings
    peak = told_rates_of_products(options.matmul, options.matmul_seconds)
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
