"""The staged backend carries what gloo carries.

Every operation, whole training runs, and its rules of waiting are tested. Host tensors are copied as a GPU's are, so
without a GPU everything runs except CUDA streams. The tests marked ``gpu`` cover those, with several ranks on one
device.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable
from datetime import timedelta
from typing import Any

import pytest
import torch
import torch.distributed as dist

from megatron_cp.parallel import staged
from tests.packed_runs import BALANCED, DYNAMIC, Losses, lengths_file, packed_losses
from tests.ranks import RanksFailed, run_ranks
from tests.training_runs import train_losses, worst_difference
from tests.unit_tests.training.layouts.cases import LAYOUTS, PP2, VPP2

NO_GPU = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs an NVIDIA GPU")
DEVICES = ["cpu", pytest.param("cuda", marks=[pytest.mark.gpu, NO_GPU])]
DTYPES = [torch.float32, torch.bfloat16, torch.int64, torch.bool, torch.float8_e4m3fn, torch.int16]


def start(folder: str, device: str, timeout: float = 120.0) -> None:
    """Start the staged backend as this rank's default group."""
    staged.register()
    staged.register()
    if device == "cuda":
        torch.cuda.set_device(int(os.environ["RANK"]) % torch.cuda.device_count())
    store = dist.FileStore(os.path.join(folder, "store"), int(os.environ["WORLD_SIZE"]))
    rank, size = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    dist.init_process_group("staged", store=store, rank=rank, world_size=size, timeout=timedelta(seconds=timeout))


def own(rank: int, device: str, dtype: torch.dtype = torch.float32, shape: tuple[int, ...] = (3, 4)) -> torch.Tensor:
    """Return a rank's tensor: bits that differ by rank and place."""
    values = torch.arange(torch.Size(shape).numel(), device=device).reshape(shape) * 3 + 50 * rank
    return (values % 7 > 2) if dtype == torch.bool else (values % 100).to(dtype)


def same(a: torch.Tensor, b: torch.Tensor) -> None:
    assert a.shape == b.shape and a.dtype == b.dtype
    assert torch.equal(a.cpu().contiguous().view(torch.uint8), b.cpu().contiguous().view(torch.uint8))


def moves(folder: str, device: str) -> None:
    """Compare collectives that only move data with each rank's tensor.

    In every dtype.
    """
    start(folder, device)
    rank, size = dist.get_rank(), dist.get_world_size()
    for dtype in DTYPES:
        mine, all_of_them = own(rank, device, dtype), [own(r, device, dtype) for r in range(size)]
        got = mine.clone()
        dist.broadcast(got, src=1)
        same(got, all_of_them[1])
        parts = [torch.empty_like(mine) for _ in range(size)]
        dist.all_gather(parts, mine)
        same(torch.stack(parts), torch.stack(all_of_them))
        into = torch.empty(size * 3, 4, dtype=dtype, device=device)
        work = dist.all_gather_into_tensor(into, mine, async_op=True)
        work.wait()
        work.wait()  # again: nothing happens
        same(into, torch.cat(all_of_them))
        dist.gather(mine, parts if rank == 0 else None, dst=0)
        if rank == 0:
            same(torch.stack(parts), torch.stack(all_of_them))
        got = torch.empty_like(mine)
        dist.scatter(got, [own(10 + r, device, dtype) for r in range(size)] if rank == 0 else None, src=0)
        same(got, own(10 + rank, device, dtype))
        into = torch.empty(size * 3, 4, dtype=dtype, device=device)
        sent = torch.cat([own(10 * rank + r, device, dtype) for r in range(size)])
        dist.all_to_all_single(into, sent)
        same(into, torch.cat([own(10 * r + rank, device, dtype) for r in range(size)]))
    # Uneven, and with parts of nothing.
    sizes = [[(a + 2 * b) % 4 for b in range(size)] for a in range(size)]
    sent = torch.cat([own(10 * rank + r, device, shape=(sizes[rank][r], 2)) for r in range(size)])
    incoming = [sizes[r][rank] for r in range(size)]
    into = torch.empty(sum(incoming), 2, device=device)
    dist.all_to_all_single(into, sent, incoming, sizes[rank], async_op=True).wait()
    same(into, torch.cat([own(10 * r + rank, device, shape=(sizes[r][rank], 2)) for r in range(size)]))
    # Tensors that are not contiguous, and one number.
    strided = own(rank, device).T
    assert not strided.is_contiguous()
    dist.broadcast(strided, src=2)
    same(strided, own(2, device).T)
    number = torch.tensor(float(rank), device=device)
    dist.broadcast(number, src=1)
    assert number.item() == 1.0
    reported: list[Any] = [None] * size
    dist.all_gather_object(reported, {"rank": rank})
    assert reported == [{"rank": r} for r in range(size)]
    listed = [f"from {rank}"]
    dist.broadcast_object_list(listed, src=1)
    assert listed == ["from 1"]
    dist.barrier()


def reduces(folder: str, device: str) -> None:
    start(folder, device)
    rank, size = dist.get_rank(), dist.get_world_size()
    for dtype in (torch.float32, torch.float64, torch.bfloat16, torch.float16, torch.int32, torch.int64):
        everyone = torch.stack([own(r, device, dtype) % 7 for r in range(size)])  # sums are exact in any dtype
        for op, expected in ((dist.ReduceOp.SUM, everyone.sum(0)), (dist.ReduceOp.MAX, everyone.amax(0))):
            got = everyone[rank].clone()
            dist.all_reduce(got, op=op)
            same(got, expected.to(dtype))
        whole = torch.cat([everyone[rank] * (r + 1) for r in range(size)])
        into = torch.empty_like(everyone[0])
        dist.reduce_scatter_tensor(into, whole, async_op=True).wait()
        same(into, (everyone.sum(0) * (rank + 1)).to(dtype))
        dist.reduce_scatter(into, list(whole.chunk(size)))
        same(into, (everyone.sum(0) * (rank + 1)).to(dtype))
    average = torch.full((5,), float(rank), device=device)
    dist.all_reduce(average, op=dist.ReduceOp.AVG)
    same(average, torch.full((5,), (size - 1) / 2))
    into = torch.empty(2, device=device)
    dist.reduce_scatter_tensor(into, torch.full((2 * size,), float(rank), device=device), op=dist.ReduceOp.AVG)
    same(into, torch.full((2,), (size - 1) / 2))


def talks(folder: str, device: str) -> None:
    """Send messages with tags, in batches and in any order.

    Also several operations as one, and groups of some of the ranks.
    """
    start(folder, device)
    rank, size = dist.get_rank(), dist.get_world_size()
    ahead, behind = (rank + 1) % size, (rank - 1) % size
    arriving = [torch.empty(3, 4, device=device) for _ in range(2)]
    operations = [
        dist.P2POp(dist.isend, own(rank + 20 * k, device), ahead, tag=k) if kind == "send"
        else dist.P2POp(dist.irecv, arriving[k], behind, tag=k)
        for kind, k in (("send", 0), ("recv", 1), ("send", 1), ("recv", 0))
    ]  # fmt: skip
    for work in dist.batch_isend_irecv(operations):
        work.wait()
    for k in range(2):
        same(arriving[k], own(behind + 20 * k, device))
    if rank == 0:
        dist.recv(arriving[0], src=1)
        same(arriving[0], own(1, device))
    elif rank == 1:
        dist.send(own(1, device), dst=0)
    with dist.distributed_c10d._coalescing_manager(async_ops=True) as both:
        gathered = [torch.empty(size * n, device=device) for n in (2, 3)]
        for tensor, n in zip(gathered, (2, 3), strict=True):
            dist.all_gather_into_tensor(tensor, torch.full((n,), float(rank), device=device))
    both.wait()
    for tensor, n in zip(gathered, (2, 3), strict=True):
        same(tensor, torch.arange(size, dtype=torch.float32).repeat_interleave(n))
    with dist.distributed_c10d._coalescing_manager():
        scattered = [torch.empty(n, device=device) for n in (1, 2)]
        for tensor, n in zip(scattered, (1, 2), strict=True):
            dist.reduce_scatter_tensor(tensor, torch.ones(size * n, device=device), op=dist.ReduceOp.AVG)
    assert all(tensor.eq(1).all() for tensor in scattered)
    with dist.distributed_c10d._coalescing_manager():
        summed = [torch.full((n,), float(rank), device=device) for n in (1, 2)]
        for tensor in summed:
            dist.all_reduce(tensor)
    assert all(tensor.eq(size * (size - 1) / 2).all() for tensor in summed)

    pairs = [dist.new_group([a, a + 1], timeout=timedelta(seconds=30)) for a in range(0, size - 1, 2)]
    mine = next((group for group in pairs if group is not dist.GroupMember.NON_GROUP_MEMBER), None)
    if mine is not None:
        assert mine.size() == 2 and dist.get_backend(mine) == "staged" and isinstance(mine, staged.StagedGroup)
        number = torch.tensor(float(rank), device=device)
        dist.all_reduce(number, group=mine)
        assert number.item() == 2 * (rank // 2 * 2) + 1
        dist.destroy_process_group(mine)


def waits(folder: str, device: str) -> float:
    """Check when tensors may be used.

    Sent tensors may change at once. Received ones are valid after ``wait``, or once the work is complete.
    """
    start(folder, device)
    rank, size = dist.get_rank(), dist.get_world_size()
    mine, into = own(rank, device), torch.full((size * 3, 4), -1.0, device=device)
    dist.barrier()  # CUDA takes its time to start
    store = dist.distributed_c10d._get_default_store()
    if rank == size - 1:
        store.wait(["rank 0 has looked"])
    work = dist.all_gather_into_tensor(into, mine, async_op=True)
    mine.fill_(-2.0)
    if rank == 0:
        assert not work.is_completed() and into.eq(-1).all()
        store.set("rank 0 has looked", "")
    while not work.is_completed():
        time.sleep(0.01)
    same(into, torch.cat([own(r, device) for r in range(size)]))
    work = dist.all_gather_into_tensor(into, own(rank, device), async_op=True)
    assert work.get_future().wait()[0] is into
    # A rank that does not come: an error in time, not a wait for ever.
    late = dist.new_group(timeout=timedelta(seconds=1.0))
    if rank == 0:
        store.wait([f"rank {other} waits no longer" for other in range(1, size)])
        return 0.0
    begin = time.monotonic()
    with pytest.raises(RuntimeError, match=r"(?i)timed? ?out"):
        dist.all_reduce(torch.ones(1, device=device), group=late)
    store.set(f"rank {rank} waits no longer", "")
    return time.monotonic() - begin


def run_staged(fn: Any, ranks: int, tmp_path: Any, monkeypatch: pytest.MonkeyPatch, *args: Any) -> list[Any]:
    monkeypatch.setenv("MEGATRON_CP_TEST_NO_INIT", "1")
    return run_ranks(fn, ranks, str(tmp_path), *args)


def later_names(folder: str, device: str) -> None:
    """Call what torch 2.14 calls, with any torch."""
    start(folder, device)
    rank, size = dist.get_rank(), dist.get_world_size()
    group: Any = dist.group.WORLD
    mine, all_of_them = own(rank, device), torch.cat([own(r, device) for r in range(size)])

    def arrives(like: torch.Tensor, operation: Callable[[torch.Tensor], Any]) -> None:
        got = torch.zeros_like(like)
        operation(got).wait()
        same(got, like)

    arrives(all_of_them, lambda got: group.all_gather_single(got, mine, None))
    arrives(all_of_them, lambda got: group.all_gather_single_coalesced([got], [mine]))
    arrives(all_of_them, lambda got: group.all_to_all_single(got, mine.repeat(size, 1), [], []))
    arrives(mine * size, lambda got: group.reduce_scatter_single(got, all_of_them, None))
    arrives(mine * size, lambda got: group.reduce_scatter_single_coalesced([got], [all_of_them]))
    assert not getattr(group._get_backend(torch.device(device)), "supports_coalescing", False)


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("check", [moves, reduces, talks, later_names])
def test_it_matches_torch(check: Any, device: str, tmp_path: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    run_staged(check, 4 if check is talks else 3, tmp_path, monkeypatch, device)


@pytest.mark.parametrize("device", DEVICES)
def test_waiting(device: str, tmp_path: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    seconds = run_staged(waits, 3, tmp_path, monkeypatch, device)
    assert all(0.8 < s < 30 for s in seconds[1:])


def train_staged(folder: str, overrides: dict[str, Any], steps: int, device: str) -> list[tuple[float, float]]:
    start(folder, device)
    return train_losses(overrides, steps)


# Not compared bit for bit: the threads of gloo's sums may add in another order.
@pytest.mark.parametrize(
    ("name", "device"),
    [
        ("cp4 a2a+p2p [2,2]", "cpu"),
        ("pp2 cp2", "cpu"),
        *[pytest.param(name, "cpu", marks=pytest.mark.slow) for name in ("cp2 all_gather", "tp2 sp cp2", "dp2 cp2")],
        *[pytest.param(name, "cuda", marks=[pytest.mark.gpu, NO_GPU]) for name in LAYOUTS],
    ],
)
def test_training_equals_one_rank(name: str, device: str, tmp_path: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    world_size, overrides = LAYOUTS[name]
    steps = 3
    if device == "cpu":
        alone, tolerance = run_ranks(train_losses, 1, {}, steps)[0], 1e-5
    else:  # a GPU's atomic additions and other matrix kernels for other shapes
        (tmp_path / "alone").mkdir()
        alone = run_staged(train_staged, 1, tmp_path / "alone", monkeypatch, {}, steps, device)[0]
        tolerance = 1e-4
    results = run_staged(train_staged, world_size, tmp_path, monkeypatch, overrides, steps, device)
    assert all(result == results[0] for result in results), "ranks report different losses"
    for (loss, norm), (loss_alone, norm_alone) in zip(results[0], alone, strict=True):
        assert loss == pytest.approx(loss_alone, rel=tolerance) and norm == pytest.approx(norm_alone, rel=tolerance)


def packs_staged(folder: str, lengths: str, overrides: dict[str, Any], device: str) -> Losses:
    start(folder, device)
    return packed_losses(lengths, overrides, "gpu" if device == "cuda" else "cpu", steps=4)[0]


@pytest.mark.parametrize(
    "device", [pytest.param("cpu", marks=pytest.mark.slow), pytest.param("cuda", marks=[pytest.mark.gpu, NO_GPU])]
)
def test_packs_pass_through_virtual_stages(device: str, tmp_path: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """Messages of different lengths between two ranks must not be exchanged."""
    lengths = lengths_file(tmp_path)
    # A schedule with timed steps differs in each run.
    packs = DYNAMIC | {"model__max_seqlen_per_dp_cp_rank": 64, "model__dynamic_context_parallel_calibration_iters": 0}
    layout = packs | PP2 | VPP2 | {"dist__distributed_backend": "staged"}
    (tmp_path / "alone").mkdir()
    alone = run_staged(packs_staged, 1, tmp_path / "alone", monkeypatch, lengths, BALANCED, device)[0]
    several = run_staged(packs_staged, 4, tmp_path, monkeypatch, lengths, layout, device)
    assert all(losses == several[0] for losses in several), "ranks report different losses"
    assert max(worst_difference(several[0], alone)) < (1e-5 if device == "cpu" else 1e-4)


def test_without_the_copies_the_results_would_be_missing(tmp_path: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """The tests above must be able to fail.

    Were host tensors handed to gloo directly, a broken delivery would not be seen.
    """
    monkeypatch.setattr(staged, "to_device", lambda host, tensor: None)
    with pytest.raises(RanksFailed):
        run_staged(moves, 3, tmp_path, monkeypatch, "cpu")
