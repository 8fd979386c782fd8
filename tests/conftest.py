"""Set up the test process: threads, devices, signals, the order of tests."""

import logging
import os
import signal
from collections.abc import Iterator
from importlib.util import find_spec
from types import SimpleNamespace
from unittest import mock

import megatron_cp  # noqa: F401 - before torch and megatron.core: prepares both imports

# Ranks are forked from this process: one thread each, as many processes as cores.
os.environ.setdefault("OMP_NUM_THREADS", "1")
# The check for a GPU must not start CUDA here: a forked rank could not start it again.
os.environ.setdefault("PYTORCH_NVML_BASED_CUDA_CHECK", "1")
# Each rank compiles a GPU's fused functions in its own process. A pool of one process per core would import torch in
# each of them.
os.environ.setdefault("TORCHINDUCTOR_COMPILE_THREADS", "1")

# The signal is ignored under nohup and in a shell's background, and then also in every run that a test starts.
if signal.getsignal(signal.SIGHUP) == signal.SIG_IGN:
    signal.signal(signal.SIGHUP, signal.SIG_DFL)
if signal.getsignal(signal.SIGINT) == signal.SIG_IGN:
    signal.signal(signal.SIGINT, signal.default_int_handler)

if os.environ.get("MEGATRON_CP_PRETEND_GPU"):
    from tests.doubles import pretend_gpu

    pretend_gpu.load()

if os.environ.get("MEGATRON_CP_TE_FOLDER"):
    from tests.doubles import te_on_cpu

    te_on_cpu.load()

if os.environ.get("MEGATRON_CP_MAMBA_FOLDER"):
    from tests.doubles import mamba_on_cpu

    mamba_on_cpu.load()

import pytest
import torch

from megatron_cp.mcore.packages import cudnn_of_pytorch
from megatron_cp.rules.nvml import read_driver

# Files with few long tests run first. At the end of a run with several workers, one worker would be left with them.
_FIRST = ("test_te_on_cpu", "test_pretend_gpu", "test_te_on_pretended_gpu", "test_mamba_on_cpu", "test_quickstart")
# Folders with long files, most of them with several ranks. Quick files of other folders follow.
_EARLY = ("functional_tests", "unit_tests/training", "unit_tests/verify", "unit_tests/models", "unit_tests/launch")


def _import_transformer_engine(capability: float) -> None:
    """Import Transformer Engine without starting CUDA here.

    Beside flash-attn its import asks for the GPU's capability.
    """
    major, minor = str(capability).split(".")
    gpu = SimpleNamespace(major=int(major), minor=int(minor))
    with (
        mock.patch.multiple(torch.cuda, current_device=lambda: 0, get_device_properties=lambda device: gpu),
        cudnn_of_pytorch(),
    ):
        import transformer_engine.pytorch  # noqa: F401


if (
    torch.cuda.is_available()
    and find_spec("flash_attn")
    and find_spec("transformer_engine")
    and (found := read_driver())
):
    _import_transformer_engine(found.gpus[0].compute_capability)


@pytest.hookimpl(trylast=True)
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    early = tuple(f"tests/{folder}/" for folder in _EARLY)
    items.sort(key=lambda item: (item.path.stem not in _FIRST, not item.nodeid.startswith(early)))


@pytest.fixture(autouse=True)
def restore_logging() -> Iterator[None]:
    """Restore logging after a test that starts a run's logging in this process."""
    loggers = [logging.getLogger(name) for name in (None, "megatron_cp", "megatron")]
    before = [(each.level, list(each.handlers)) for each in loggers]
    yield
    for each, (level, handlers) in zip(loggers, before, strict=True):
        each.setLevel(level)
        each.handlers[:] = handlers
