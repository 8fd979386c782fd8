"""Measure what checksums add to saving and loading, and their own speed.

    python benchmarks/checkpoint_checksums.py                    # two gloo ranks on this machine, about 1 GB
    python benchmarks/checkpoint_checksums.py --ranks 1 --millions 100 --folder /the/file/system

Saving and loading alternate between with and without checksums, in an order that changes each round. Each ratio
compares two times of one round. Printed are the median over rounds, the smallest and the largest:

- ``wall``: time of the slowest rank.
- ``cpu``: CPU time of all ranks together. Other programs on the machine disturb it less.
- ``best``: ratio of the shortest times of the two sides, which other programs disturb least.
- ``loading`` reads from the page cache, where checksums cost the most. ``cold`` reads from the disk, as a run does that
  resumes after a reboot.
"""

from __future__ import annotations

import argparse
import functools
import hashlib
import os
import platform
import shutil
import statistics
import sys
import tempfile
import time
import zlib
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
import xxhash
from torch.distributed.checkpoint.filesystem import _StorageWriterTransforms

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from benchmarks.gloo_ranks import run_on_ranks
from megatron_cp.config.run_config import RunConfig
from megatron_cp.parallel.collectives import gather_objects
from megatron_cp.training.checkpoint import writer as checkpoint_writer
from megatron_cp.training.checkpoint.checksums import FileSum
from megatron_cp.training.checkpoint.saver import CheckpointSaver, load_checkpoint
from megatron_cp.training.setup import Run, setup


class Unsummed(_StorageWriterTransforms):
    """Torch's transformation of items when no checksums are computed."""

    result = FileSum(0, "")


def configuration(options: argparse.Namespace) -> RunConfig:
    config = RunConfig()
    config.model.num_layers, config.model.hidden_size, config.model.ffn_hidden_size = 8, 512, 2048
    config.model.num_attention_heads, config.model.context_parallel_size = 8, options.ranks
    # The layers have 34 million parameters; the vocabulary's embedding and output layer have the rest.
    config.model.vocab_size = max(1024, int((options.millions - 34) * 1e6 / 1024))
    config.dataset.kind, config.dataset.seq_length, config.mixed_precision.fp32 = "mock", 64, True
    config.model.use_cpu_initialization = True
    return config.finalize()


def timed(call: Callable[[], Any]) -> tuple[float, float]:
    """Return the wall seconds of the slowest rank and the CPU seconds of all ranks."""
    gather_objects(None)
    wall, cpu = time.perf_counter(), time.process_time()
    call()
    both = gather_objects((time.perf_counter() - wall, time.process_time() - cpu))
    return max(each for each, _ in both), sum(each for _, each in both)


def save(run: Run, folder: str, summed: bool) -> None:
    """Save a checkpoint.

    Without checksums torch computes its archives' CRC-32, which nothing compares.
    """
    before = checkpoint_writer.SummingTransforms, checkpoint_writer.write_checksums
    set_crc32 = torch.serialization.set_crc32_options
    if not summed:
        torch.serialization.set_crc32_options = lambda wanted: None
        checkpoint_writer.SummingTransforms = Unsummed  # type: ignore[assignment, misc]
        checkpoint_writer.write_checksums = lambda *args: None
    try:
        CheckpointSaver(run, folder).save({})
    finally:
        checkpoint_writer.SummingTransforms, checkpoint_writer.write_checksums = before  # type: ignore[misc]
        torch.serialization.set_crc32_options = set_crc32


def load(run: Run, folder: str, summed: bool) -> None:
    run.config = replace(run.config, checkpoint=replace(run.config.checkpoint, verify_checksums=summed))
    load_checkpoint(run, folder, 1)


def forget(folder: str) -> None:
    """Drop a checkpoint's files from the page cache."""
    if torch.distributed.get_rank() == 0:
        for path in Path(folder).rglob("*"):
            if path.is_file():
                descriptor = os.open(path, os.O_RDONLY)
                os.fsync(descriptor)  # only written pages can be dropped
                os.posix_fadvise(descriptor, 0, 0, os.POSIX_FADV_DONTNEED)
                os.close(descriptor)


def rank_main(options: argparse.Namespace, folder: str) -> None:
    torch.set_num_threads(1)
    config = configuration(options)
    assert config.model.vocab_size is not None
    run = setup(config, config.model.vocab_size)
    run.progress.iteration = 1
    first = torch.distributed.get_rank() == 0
    for what, step in (("saving", save), ("loading", load), ("cold", load)):
        folders = {summed: f"{folder}/{'with' if summed else 'without'}" for summed in (True, False)}
        ratios: list[tuple[float, ...]] = []
        for number in range(options.rounds + 1):
            order = (True, False) if number % 2 else (False, True)
            both = {}
            for each in order:
                if what == "cold":
                    forget(folders[each])
                both[each] = timed(functools.partial(step, run, folders[each], each))
            if number:  # the first round fills caches
                ratios.append(
                    (*(a / b for a, b in zip(both[True], both[False], strict=True)), *both[True], *both[False])
                )
        if first and what == "saving":
            size = sum(path.stat().st_size for path in Path(folders[True], "iter_0000001").iterdir())
            print(f"checkpoint of {size / 1e9:.2f} GB, {options.ranks} ranks", flush=True)
        if first:
            wall, cpu, *seconds = (sorted(column) for column in zip(*ratios, strict=True))
            best = [column[0] for column in seconds]
            print(
                f"{what:8s} wall {format_ratios(wall)} best {best[0] / best[2]:.3f}  cpu {format_ratios(cpu)} best "
                f"{best[1] / best[3]:.3f}  without, at best: {best[2]:.2f} s wall, {best[3]:.2f} s cpu",
                flush=True,
            )
    run.close()


def format_ratios(ratios: list[float]) -> str:
    return f"{statistics.median(ratios):.3f} [{ratios[0]:.3f} {ratios[-1]:.3f}]"


def speeds() -> None:
    content = memoryview(np.random.default_rng(0).integers(0, 255, 1 << 27, dtype=np.uint8))
    ways: dict[str, Callable[[Any], Any]] = {
        "zlib.crc32": zlib.crc32,
        "hashlib.blake2b": hashlib.blake2b,
        "hashlib.sha256": hashlib.sha256,
        "xxhash.xxh3_128": xxhash.xxh3_128,
    }
    for name, way in ways.items():
        times = []
        for _ in range(5):
            began = time.perf_counter()
            way(content)
            times.append(time.perf_counter() - began)
        print(f"{name:16s} {content.nbytes / min(times) / 1e9:.1f} GB/s")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--millions", type=float, default=60.0, help="parameters; a checkpoint has 16 bytes for each")
    parser.add_argument("--rounds", type=int, default=9)
    parser.add_argument("--folder", help="folder to write to (default: a temporary one)")
    options = parser.parse_args()
    print(
        f"{platform.processor() or platform.machine()}, Python {platform.python_version()}, torch {torch.__version__}"
    )
    speeds()
    folder = tempfile.mkdtemp(prefix="checksums", dir=options.folder)
    try:
        run_on_ranks(options.ranks, rank_main, options, folder)
    finally:
        shutil.rmtree(folder, ignore_errors=True)


if __name__ == "__main__":
    main()
