"""The device of a rank."""

import socket
from typing import Any

import pytest
import torch

from megatron_cp.common.errors import ConfigError, RuntimeFault
from megatron_cp.config.run_config import DistributedConfig
from megatron_cp.parallel import device
from megatron_cp.parallel.device import check_gpus, start_distributed
from tests.ranks import run_ranks


def compile_threads() -> int:
    from torch._inductor import config

    return int(config.compile_threads)


def test_ranks_compile_without_a_process_for_each_core() -> None:
    assert run_ranks(compile_threads, 1) == [1]


def test_nccl_with_too_few_gpus_is_reported() -> None:
    check_gpus("staged", 4, 1)
    check_gpus("nccl", 4, 4)
    with pytest.raises(ConfigError, match=r"4 ranks on a node with 1 GPU: [\s\S]*distributed_backend=staged"):
        check_gpus("nccl", 4, 1)


@pytest.mark.parametrize("at", ["set_device", "zeros"])
def test_a_gpu_that_is_broken_is_named(monkeypatch: pytest.MonkeyPatch, at: str) -> None:
    def fail(*args: Any, **kwargs: Any) -> None:
        raise RuntimeError("CUDA error: uncorrectable ECC error encountered\nCUDA kernel errors might be ...")

    monkeypatch.setenv("RANK", "13")
    monkeypatch.setenv("LOCAL_RANK", "5")
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 8)
    monkeypatch.setattr(torch.cuda, "set_device", lambda gpu: None)
    monkeypatch.setattr(*((torch.cuda, "set_device") if at == "set_device" else (torch, "zeros")), fail)
    text = f"rank 13, on {socket.gethostname()}: GPU 5 of 8 cannot be used: CUDA error: uncorrectable ECC error encount"
    with pytest.raises(RuntimeFault, match=text) as caught:
        start_distributed(DistributedConfig())
    assert "\n" not in str(caught.value) and not caught.value.on_all_ranks


class StartedError(Exception): ...


@pytest.mark.parametrize(("by_torchrun", "refused"), [(False, False), (True, True)])
def test_a_task_that_sees_its_own_gpu_only_shares_none(
    monkeypatch: pytest.MonkeyPatch, by_torchrun: bool, refused: bool
) -> None:
    """Slurm's tasks with --gpus-per-task see one GPU, torchrun's ranks all of a node."""

    def rendezvous(means: str, timeout: object) -> None:
        assert means == "nccl"
        raise StartedError

    for name, value in {"RANK": "1", "LOCAL_RANK": "1", "LOCAL_WORLD_SIZE": "2", "SLURM_LOCALID": "1"}.items():
        monkeypatch.setenv(name, value)
    if by_torchrun:
        monkeypatch.setenv("TORCHELASTIC_RUN_ID", "none")
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 1)
    taken = []
    monkeypatch.setattr(torch.cuda, "set_device", taken.append)
    monkeypatch.setattr(torch, "zeros", lambda *args, **kwargs: None)
    monkeypatch.setattr(device, "rendezvous", rendezvous)
    with pytest.raises(ConfigError if refused else StartedError):
        start_distributed(DistributedConfig())
    assert taken == [0]
