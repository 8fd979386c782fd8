"""Start gloo ranks on this machine for benchmarks, without torchrun."""

from __future__ import annotations

import multiprocessing
import tempfile
from collections.abc import Callable
from typing import Any

import torch.distributed as dist


def run_on_ranks(size: int, run: Callable[..., None], *args: Any) -> None:
    """Fork ``size`` ranks and call ``run(*args)`` on each.

    torch.distributed is started before. Exits with 1 if one fails.
    """
    with tempfile.TemporaryDirectory() as folder:
        context = multiprocessing.get_context("fork")
        ranks = [context.Process(target=_rank, args=(k, size, f"{folder}/store", run, args)) for k in range(size)]
        for process in ranks:
            process.start()
        for process in ranks:
            process.join()
        if any(process.exitcode for process in ranks):
            raise SystemExit(1)


def _rank(rank: int, size: int, store: str, run: Callable[..., None], args: tuple[Any, ...]) -> None:
    dist.init_process_group("gloo", store=dist.FileStore(store, size), rank=rank, world_size=size)
    run(*args)
    dist.destroy_process_group()
