"""Kill, stop, restart and re-lay out a long run on forked ranks, many times.

    python -m tests.functional_tests.soak --iterations 3000 --kind changing

The run is compared with the same run without interruptions. In one layout every loss must be identical, in changing
layouts equal within 1e-5. No process may grow, and only the checkpoints to keep may remain.
"""

from __future__ import annotations

import argparse
import inspect
import json
import os
import random
import signal
import socket
import sys
import tempfile
import threading
import time
from collections import Counter
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any
from unittest import mock

import psutil

from megatron_cp.cli import main
from megatron_cp.config.run_config import TokenizerConfig
from megatron_cp.data.text.preprocess import preprocess
from megatron_cp.training.checkpoint.files import latest_iteration
from tests.ranks import RanksFailed, free_port, run_ranks

HCP = ("model.cp_comm_type=a2a+p2p", "model.hierarchical_context_parallel_sizes=[2,2]")
RING = ("model.cp_comm_type=p2p", "model.hierarchical_context_parallel_sizes=null")
# World size and settings by kind of soak; the uninterrupted run uses the first layout.
LAYOUTS: dict[str, list[tuple[int, tuple[str, ...]]]] = {
    "same": [(4, ("model.context_parallel_size=4", *HCP))],
    "changing": [
        (4, ("model.context_parallel_size=4", *HCP)),
        (4, ("model.context_parallel_size=4", *RING)),
        (1, ("model.context_parallel_size=1", *RING)),
        (4, ("model.context_parallel_size=2", "model.pipeline_model_parallel_size=2", *RING)),
        (4, ("model.context_parallel_size=2", "model.tensor_model_parallel_size=2", *RING)),
        (4, ("model.context_parallel_size=2", "dist.use_decentralized_pg=true", *RING)),
        (2, ("model.context_parallel_size=2", *RING)),
    ],
    "dynamic": [
        (4, ("model.context_parallel_size=4", *RING)),
        (2, ("model.context_parallel_size=2", *RING)),
        (4, ("model.context_parallel_size=2", *RING)),
        (1, ("model.context_parallel_size=1", *RING)),
    ],
}
TINY = (
    *("dataset.seq_length=64", "dataset.eod_mask_loss=true", "tokenizer.tokenizer_type=ByteLevelTokenizer"),
    *("model.num_layers=2", "model.hidden_size=32", "model.ffn_hidden_size=64"),
    *("model.num_attention_heads=4", "model.num_query_groups=4", "model.kv_channels=8"),
    *("train.global_batch_size=4", "train.micro_batch_size=1", "train.manual_gc=false"),
    # Adam divides by the root of a mean square: with a tiny epsilon it amplifies the layouts' rounding. With a
    # tenfold learning rate training is chaotic: two correct layouts diverge by a factor of ten every hundred steps.
    *("optimizer.adam_eps=1e-3", "optimizer.lr=3e-4", "optimizer.min_lr=1e-4"),
    *("checkpoint.save_interval=40", "checkpoint.async_save=true", "checkpoint.most_recent_k=2"),
    *("logger.progress=none", "logger.tensorboard=false", "dist.distributed_timeout_minutes=0.5"),
)
DYNAMIC = (
    "model.dynamic_context_parallel=true",
    "model.max_seqlen_per_dp_cp_rank=64",
    "dataset.eod_mask_loss=false",  # each sample is one document: nothing is masked
)


@dataclass(frozen=True)
class Doom:
    """End of a launch by a signal to some ranks.

    They get it some seconds after they begin the step of an iteration.
    """

    number: int
    ranks: tuple[int, ...]
    iteration: int
    delay: float


@dataclass
class Soak:
    """Result of a soak test.

    ``rss`` has the resident bytes of each rank at a tenth and at the end of the uninterrupted run.
    """

    losses: list[float]
    uninterrupted: list[float]
    lives: int = 0
    ends: Counter[str] = field(default_factory=Counter)
    rss: list[tuple[int, int]] = field(default_factory=list)
    left: list[str] = field(default_factory=list)

    @property
    def worst(self) -> float:
        """Return a loss's largest relative difference from the uninterrupted run."""
        return max(abs(a - b) / abs(b) for a, b in zip(self.losses, self.uninterrupted, strict=True))

    @property
    def growth(self) -> float:
        """Return the largest growth of a rank's memory.

        It is measured over the last nine tenths of the uninterrupted run.
        """
        return max(end / early - 1 for early, end in self.rss)


def live(folder: str, arguments: list[str], doom: Doom | None, iterations: int) -> tuple[int, list[int]]:
    """Run one rank; return its exit code and resident bytes.

    The bytes are those at a tenth of all iterations and at the end.
    """
    from megatron_cp.training import loop

    rank, process = int(os.environ["RANK"]), psutil.Process()
    original, rss = loop.train_step, []
    sys.stderr = open(f"{folder}/stderr{rank}", "a", buffering=1)  # noqa: SIM115 - for the life of the process

    def step(run: Any, *args: Any) -> Any:
        now = run.progress.iteration + 1
        if doom is not None and now == doom.iteration and rank in doom.ranks:
            threading.Timer(doom.delay, os.kill, (os.getpid(), doom.number)).start()
        if now in (iterations // 10, iterations):
            rss.append(process.memory_info().rss)
        return original(run, *args)

    loop.train_step = step
    return main(["train", "--recipe", "llama_tiny_pretrain_config", *arguments]), rss


def paragraphs(folder: Path) -> str:
    """Return short tokenized texts of very different lengths.

    They are the paragraphs of a few modules.
    """
    texts = [text for module in (argparse, json, random, socket) for text in inspect.getsource(module).split("\n\n")]
    lines = folder / "paragraphs.jsonl"
    lines.write_text("".join(json.dumps({"text": text}) + "\n" for text in texts if text))
    return preprocess([lines], folder / "paragraphs", TokenizerConfig("ByteLevelTokenizer")).prefix


def losses_of(folder: Path) -> list[float]:
    lines = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    steps = {line["iteration"]: line["lm_loss"] for line in lines if "lm_loss" in line}
    assert list(steps) == list(range(1, len(steps) + 1)), "iterations are missing, repeated or out of order"
    return list(steps.values())


@mock.patch.dict(os.environ)
def soak(kind: str, iterations: int, folder: Path, seed: int = 1, log: Any = print) -> Soak:
    """Run the soak test; ``kind`` is one of :data:`LAYOUTS`."""
    draw = random.Random(seed)
    os.environ |= {"MEGATRON_CP_TEST_NO_INIT": "1", "MASTER_ADDR": "127.0.0.1"}
    common = [*TINY, f"dataset.data_path={paragraphs(folder)}", f"train.train_iters={iterations}"]
    common += DYNAMIC if kind == "dynamic" else ()

    def one_life(name: str, layout: tuple[int, tuple[str, ...]], doom: Doom | None) -> list[tuple[int, list[int]]]:
        os.environ["MASTER_PORT"] = str(free_port())
        arguments = [*common, *layout[1], f"checkpoint.save={folder / name}"]
        return run_ranks(live, layout[0], str(folder), arguments, doom, iterations, timeout=1800, grace=20)

    began = time.monotonic()
    lives = one_life("uninterrupted", LAYOUTS[kind][0], None)
    assert {code for code, _ in lives} == {0}, (folder / "stderr0").read_text()[-3000:]
    log(f"uninterrupted: {iterations} iterations in {time.monotonic() - began:.0f} s")
    result = Soak([], losses_of(folder / "uninterrupted"), rss=[(rss[0], rss[1]) for _, rss in lives])
    while True:
        layout = draw.choice(LAYOUTS[kind])
        start = latest_iteration(folder / "run") or 0
        number = draw.choice([signal.SIGKILL, signal.SIGKILL, signal.SIGTERM])
        some = draw.choice([tuple(range(layout[0])), (draw.randrange(layout[0]),)])
        at = start + draw.randrange(1, max(2, iterations // 6))
        doom = Doom(number, some, at, draw.random() * 0.1)
        result.lives += 1
        try:
            codes = {code for code, _ in one_life("run", layout, doom)}
        except RanksFailed as failed:
            assert "SIGKILL" in str(failed), failed
            codes = {-9}
        reached = latest_iteration(folder / "run") or 0
        log(
            f"life {result.lives}: {layout[0]} ranks, from {start}, {signal.Signals(number).name} of {some} at {at}: "
            f"codes {codes}, saved {reached}"
        )
        assert reached >= start and codes <= {0, 1, 143, -9}, (folder / "stderr0").read_text()[-3000:]
        result.ends[str(max(codes, key=abs))] += 1
        if codes == {0}:
            break
        assert result.lives < 200, "the run does not come to its end"
    result.losses = losses_of(folder / "run")
    result.left = sorted(path.name for path in (folder / "run").iterdir() if "iter_" in path.name)
    return result


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--kind", choices=list(LAYOUTS), default="changing")
    parser.add_argument("--iterations", type=int, default=3000)
    parser.add_argument("--seed", type=int, default=1)
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as scratch:
        found = soak(options.kind, options.iterations, Path(scratch), options.seed)
    print(f"{found.lives} lives, ended by {dict(found.ends)}; loss {found.losses[0]:.4f} -> {found.losses[-1]:.4f}")
    print(
        f"worst relative difference of a loss {found.worst:.2e}; memory grew by {found.growth:.2%}; left {found.left}"
    )
