"""Compare training steps with plain transformers on the same cores.

Whole steps are timed, in turns in one run.

    python benchmarks/training_step.py                                   # 512 to 4096 tokens, two model sizes
    python benchmarks/training_step.py --models small --sizes 512,1024 --rounds 20
    python benchmarks/training_step.py --ways "one rank" --sizes 512 --trace one.json  # a trace of one step of each way

The peer is transformers' Llama with PyTorch's attention, fused AdamW and gradient clipping: one process with all cores.
``one rank`` is this package in one process with all cores. ``cp2`` and ``tp2`` are two processes with half of the cores
each, for every transport. Shapes, dtype (float32) and tokens of a step are equal. A round steps every way once, and
only the way whose turn it is runs. Printed are ratios to the peer: the median over rounds and, in brackets, smallest
and largest.
"""

from __future__ import annotations

import argparse
import multiprocessing
import os
import statistics
import sys
import tempfile
import time
import warnings
from collections.abc import Callable
from multiprocessing.connection import Connection
from pathlib import Path

import torch
import torch.distributed as dist

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))
warnings.filterwarnings("ignore")

from megatron_cp.attention.transports.registry import TRANSPORTS  # noqa: E402
from megatron_cp.config.run_config import RunConfig  # noqa: E402
from megatron_cp.data.samples.mock import MockDataset  # noqa: E402
from megatron_cp.training.monitor.metrics import start_logging  # noqa: E402
from megatron_cp.training.open_steps import open_steps  # noqa: E402
from megatron_cp.training.setup import setup  # noqa: E402
from megatron_cp.training.step import train_step  # noqa: E402

MODELS = {  # layers, hidden size, MLP's hidden size, heads, key/value heads, vocabulary
    "small": (4, 512, 1536, 8, 4, 4096),
    "larger": (8, 768, 2304, 12, 4, 8192),
}
PEER, ONE = "transformers", "one rank"
WAYS = [PEER, ONE, *(f"cp2 {name}" for name, each in TRANSPORTS.items() if not each.hierarchical), "tp2"]
LEARNING_RATE, CLIP = 1e-4, 1.0
Step = Callable[[], float]  # trains one step and returns its loss


def our_step(way: str, shape: str, tokens: int) -> Step:
    """Return a training step of this package. Collective."""
    layers, hidden, ffn, heads, groups, vocabulary = MODELS[shape]
    config = RunConfig()
    model = config.model
    model.num_layers, model.hidden_size, model.ffn_hidden_size = layers, hidden, ffn
    model.num_attention_heads, model.num_query_groups = heads, groups
    if way == "tp2":
        model.tensor_model_parallel_size, model.sequence_parallel = 2, True
    elif way != ONE:
        model.context_parallel_size, model.cp_comm_type = 2, way.removeprefix("cp2 ")
    config.dataset.seq_length = tokens
    config.train.global_batch_size, config.train.train_iters = 1, 10_000
    config.optimizer.lr, config.optimizer.clip_grad = LEARNING_RATE, CLIP
    config.dist.use_decentralized_pg = True  # several runs in one process: none may own the global state
    config.tokenizer.tokenizer_type, config.tokenizer.vocab_size = "NullTokenizer", vocabulary
    config.finalize()
    run = setup(config, vocabulary)
    steps = open_steps(run, MockDataset(config.dataset, vocabulary, 1, 10_000), 0, training=True)

    def step() -> float:
        result = train_step(run, next(steps).microbatches)
        run.progress.iteration += 1
        return result.loss

    return step


def peer_step(shape: str, tokens: int) -> Step:
    """Return a training step of plain transformers and PyTorch."""
    from transformers import LlamaConfig, LlamaForCausalLM

    layers, hidden, ffn, heads, groups, vocabulary = MODELS[shape]
    config = LlamaConfig(
        vocab_size=vocabulary,
        hidden_size=hidden,
        intermediate_size=ffn,
        num_hidden_layers=layers,
        num_attention_heads=heads,
        num_key_value_heads=groups,
        max_position_embeddings=tokens,
        tie_word_embeddings=False,
        use_cache=False,
        attn_implementation="sdpa",
    )
    model = LlamaForCausalLM(config).train()
    optimizer = torch.optim.AdamW(model.parameters(), lr=LEARNING_RATE, fused=True)

    def step() -> float:
        batch = torch.randint(vocabulary, (1, tokens))
        loss = model(input_ids=batch, labels=batch).loss
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), CLIP)
        optimizer.step()
        optimizer.zero_grad()
        return float(loss.detach())

    return step


class Ranks:
    """Processes that train the ways of one number of ranks, each way on request."""

    def __init__(self, size: int, ways: list[str], options: argparse.Namespace, shape: str, tokens: int) -> None:
        self._folder = tempfile.TemporaryDirectory()
        context = multiprocessing.get_context("fork")
        ends = [context.Pipe() for _ in range(size)]
        threads = max(1, options.threads // size)
        self._pipes = [mine for mine, _ in ends]
        self._processes = [
            context.Process(
                target=_serve,
                args=(theirs, rank, size, f"{self._folder.name}/store", ways, threads, shape, tokens),
                daemon=True,
            )
            for rank, (_, theirs) in enumerate(ends)
        ]
        for process in self._processes:
            process.start()
        self._everyone("")  # built

    def step(self, way: str, trace: str = "") -> tuple[float, float]:
        """Train one step; return wall seconds, and the CPU seconds of all ranks."""
        wall = time.perf_counter()
        cpu = self._everyone((way, trace))
        return time.perf_counter() - wall, cpu

    def close(self) -> None:
        for pipe in self._pipes:
            pipe.send(None)
        for process in self._processes:
            process.join()
        self._folder.cleanup()

    def _everyone(self, message: object) -> float:
        for pipe in self._pipes:
            pipe.send(message)
        try:
            return sum(pipe.recv() for pipe in self._pipes)
        except EOFError:
            raise SystemExit("a rank ended: its error is above") from None


def _serve(
    pipe: Connection, rank: int, size: int, store: str, ways: list[str], threads: int, shape: str, tokens: int
) -> None:
    """Build the ways, then train a step for each message."""
    torch.set_num_threads(threads)
    start_logging(1, False)  # only warnings, so the results stay readable
    os.environ |= {"RANK": str(rank), "LOCAL_RANK": str(rank), "WORLD_SIZE": str(size), "LOCAL_WORLD_SIZE": str(size)}
    dist.init_process_group("gloo", store=dist.FileStore(store, size), rank=rank, world_size=size)
    steps = {way: peer_step(shape, tokens) if way == PEER else our_step(way, shape, tokens) for way in ways}
    pipe.recv()
    pipe.send(0.0)
    while (message := pipe.recv()) is not None:
        way, trace = message
        if trace and rank == 0:
            with torch.profiler.profile() as profile:
                steps[way]()
            profile.export_chrome_trace(trace)
            print(f"{way}:\n{profile.key_averages().table(sort_by='self_cpu_time_total', row_limit=25)}")
            pipe.send(0.0)
            continue
        cpu = time.process_time()
        steps[way]()
        pipe.send(time.process_time() - cpu)
    os._exit(0)  # groups of runs that are still open would wait for each other


def compare(shape: str, tokens: int, options: argparse.Namespace) -> None:
    """Train all ways in turns, and print their ratios to the peer."""
    sizes = {size: [way for way in options.ways if ranks_of(way) == size] for size in (1, 2)}
    ranks = {size: Ranks(size, ways, options, shape, tokens) for size, ways in sizes.items() if ways}
    walls: dict[str, list[float]] = {way: [] for way in options.ways}
    cpus: dict[str, list[float]] = {way: [] for way in options.ways}
    for index in range(options.warm_up + options.rounds):
        for way in options.ways:
            wall, cpu = ranks[ranks_of(way)].step(way)
            if index >= options.warm_up:
                walls[way].append(wall)
                cpus[way].append(cpu)
    for way in options.ways if options.trace else ():
        ranks[ranks_of(way)].step(way, f"{options.trace}.{way.replace(' ', '_')}.json")
    for each in ranks.values():
        each.close()
    base = PEER if PEER in options.ways else options.ways[0]
    cells = [f"{_ratio(walls[way], walls[base])} ({_ratio(cpus[way], cpus[base], short=True)})" for way in options.ways]
    print("| " + " | ".join([shape, str(tokens), *cells]) + " |", flush=True)


def ranks_of(way: str) -> int:
    return 1 if way in (PEER, ONE) else 2


def _ratio(ours: list[float], theirs: list[float], short: bool = False) -> str:
    ratios = [a / b for a, b in zip(ours, theirs, strict=True)]
    middle = f"{statistics.median(ratios):.2f}"
    return middle if short else f"{middle} [{min(ratios):.2f} {max(ratios):.2f}]"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--models", type=lambda text: text.split(","), default=list(MODELS))
    parser.add_argument("--sizes", type=lambda text: [int(part) for part in text.split(",")], default=[512, 1024, 4096])
    parser.add_argument("--ways", type=lambda text: text.split(","), default=WAYS, help=", ".join(WAYS))
    parser.add_argument("--rounds", type=int, default=9, help="measured steps of each way")
    parser.add_argument("--warm-up", type=int, default=3, help="steps before")
    parser.add_argument("--threads", type=int, default=len(os.sched_getaffinity(0)), help="cores of each way")
    parser.add_argument("--trace", default="", help="file to which traces of a further step of each way are written")
    options = parser.parse_args()
    print(f"wall time over {PEER}'s: median [smallest largest] (CPU time of all processes)")
    print("| " + " | ".join(["model", "tokens", *options.ways]) + " |")
    print("|" + "---|" * (2 + len(options.ways)), flush=True)
    for shape in options.models:
        for tokens in options.sizes:
            compare(shape, tokens, options)


if __name__ == "__main__":
    main()
