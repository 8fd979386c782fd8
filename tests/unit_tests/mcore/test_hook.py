"""megatron-core is prepared in every way of importing it.

Each case needs its own interpreter.
"""

import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from megatron_cp.rules.environment import installed_version
from megatron_cp.rules.nvml import read_driver

pytestmark = pytest.mark.skipif(torch.cuda.is_available(), reason="the stand-ins are for machines without CUDA")

ROOT = Path(__file__).parents[3]
STEP = """
import torch
from megatron.core.transformer.transformer_config import TransformerConfig
from megatron.core.fusions.fused_bias_swiglu import swiglu
from megatron.core.tensor_parallel import random
assert torch.cuda.current_device() == torch.device("cpu")
assert not torch.cuda.is_available()
assert swiglu(torch.ones(2, 4)).shape == (2, 2)
random.model_parallel_cuda_manual_seed(3, tp_rank=0, ep_rank=0, etp_rank=0)
with random.get_cuda_rng_tracker().fork():
    a = torch.rand(3)
random.model_parallel_cuda_manual_seed(3, tp_rank=0, ep_rank=0, etp_rank=0)
with random.get_cuda_rng_tracker().fork():
    b = torch.rand(3)
assert torch.equal(a, b) and not torch.equal(a, torch.rand(3))
print("prepared")
"""
# Libraries that a run without their files or settings must not wait for.
NOT_NEEDED = ("IPython", "matplotlib", "pandas", "pyarrow", "scipy", "tokenizers", "transformers", "wandb")
RUN = f"""
import gc, sys
import megatron_cp.training.train
assert not (heavy := sys.modules.keys() & {set(NOT_NEEDED)}), heavy
assert gc.isenabled() and gc.get_freeze_count() > 100_000, "torch's objects are left out of collections"
"""


@pytest.mark.parametrize(
    "imports",
    ["import megatron_cp", RUN, "import megatron.core\nimport megatron_cp"],
    ids=["first", "by a run", "late"],
)
def test_megatron_core_is_prepared(imports: str) -> None:
    if imports.startswith("import megatron.core") and installed_version("transformer-engine") and read_driver() is None:
        pytest.skip("without a driver and with Transformer Engine megatron-core alone cannot be imported")
    done = subprocess.run([sys.executable, "-c", imports + STEP], capture_output=True, text=True, timeout=120)
    assert done.stdout.strip() == "prepared", done.stderr[-2000:]
    if "megatron.core\n" not in imports:
        assert done.stderr == "", "nothing of upstream's chatter about missing libraries"


def test_importing_the_package_is_cheap() -> None:
    code = (
        "import megatron_cp, sys; assert 'torch' not in sys.modules and 'megatron.core' not in sys.modules;"
        "import megatron_cp.torchrun; assert 'megatron.core' not in sys.modules, 'the launcher has no use for it'"
    )
    subprocess.run([sys.executable, "-c", code], check=True, timeout=180)


PLANTED = {
    "transformer_engine/__init__.py": "raise OSError('libcuda.so.1: cannot open shared object file')",
    "apex/__init__.py": "",
    "apex/optimizers.py": "class FusedAdam: ...\nclass FusedSGD: ...",
    "apex/multi_tensor_apply.py": "multi_tensor_applier = None",
    "amp_C.py": "multi_tensor_scale = multi_tensor_l2norm = None",
    "causal_conv1d/__init__.py": "",
    "causal_conv1d/cpp_functions.py": "",
    "mamba_ssm/__init__.py": "",
    "mamba_ssm/ops/triton/ssd_combined.py": "mamba_split_conv1d_scan_combined = 'taken'",
}
TAKEN = """
import megatron_cp
from megatron_cp.models.layers.mamba.kernel import fused_kernel
from megatron.core.extensions.transformer_engine import HAVE_TE
from megatron.core.optimizer import Adam
print(HAVE_TE, Adam.__module__, fused_kernel)
"""


def run_beside(folder: Path, packages: dict[str, str], code: str) -> subprocess.CompletedProcess[str]:
    """Run code in a new Python process that finds these packages first."""
    for name, text in packages.items():
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_text(text)
    environment = os.environ | {"PYTHONPATH": f"{folder}:{ROOT}"}
    command = [sys.executable, "-c", code]
    return subprocess.run(command, env=environment, capture_output=True, text=True, timeout=120, check=False)


def test_gpu_packages_are_not_imported_without_a_gpu(tmp_path: Path) -> None:
    """Nodes with and without GPUs may share a folder of packages.

    Importing some of them fails here, others compute on GPUs only.
    """
    done = run_beside(tmp_path, PLANTED, TAKEN)
    assert done.stdout.split() == ["False", "torch.optim.adamw", "None"], done.stderr[-2000:]


# As it is found on a GPU machine where it was compiled for another PyTorch (it imports, and its part for PyTorch does
# not), and where a library is missing.
UNDEFINED = "undefined symbol: _ZN3c104cuda"
BROKEN = [
    (
        f"Transformer Engine: is installed and transformer_engine.pytorch cannot be imported: ImportError: {UNDEFINED}",
        "--gpu",
        {
            "transformer_engine/__init__.py": "",
            "transformer_engine/pytorch.py": f"raise ImportError('{UNDEFINED}\\nmore')",
        },
    ),
    (
        "Transformer Engine: is installed and transformer_engine.pytorch cannot be imported: OSError: no libcudnn.so.9",
        "--gpu",
        {"transformer_engine/__init__.py": "raise OSError('no libcudnn.so.9')"},
    ),
    (
        f"mamba-ssm: is installed and causal_conv1d.cpp_functions cannot be imported: ImportError: {UNDEFINED}",
        "--mamba",
        {
            "causal_conv1d/__init__.py": "",
            "causal_conv1d/cpp_functions.py": f"raise ImportError('{UNDEFINED}')",
            "mamba_ssm/__init__.py": "",
            "mamba_ssm/ops/triton/ssd_combined.py": "mamba_split_conv1d_scan_combined = None",
        },
    ),
    (
        "mamba-ssm: is installed and mamba_ssm.ops.triton.ssd_combined cannot be imported: OSError: no libtvm_ffi.so",
        "--mamba",
        {
            "causal_conv1d/__init__.py": "",
            "causal_conv1d/cpp_functions.py": "",
            "mamba_ssm/__init__.py": "raise OSError('no libtvm_ffi.so')",
        },
    ),
]
WITH_A_GPU = """
import sys, torch
torch.cuda.is_available = lambda: True
from megatron_cp.cli import main
sys.exit(main(["{command}", "--recipe", "mamba_hybrid_tiny_pretrain_config", "parallel=none",
    "dist.distributed_backend=gloo"]))
"""


@pytest.mark.parametrize(
    ("message", "option", "packages"),
    [BROKEN[0], *(pytest.param(*each, marks=pytest.mark.slow) for each in BROKEN[1:])],
)
def test_broken_packages_are_reported(tmp_path: Path, message: str, option: str, packages: dict[str, str]) -> None:
    command = "verify" if "mamba_ssm.ops" in message else "train"  # the other command that starts ranks
    done = run_beside(tmp_path, packages, WITH_A_GPU.format(command=command))
    assert done.returncode == 2, done.stderr[-2000:]
    lines = done.stderr.splitlines()
    assert lines[1] == f"error: {message}"
    assert lines[2].startswith(f"    fix: in the clone: scripts/setup.sh {option}") and len(lines) == 3
