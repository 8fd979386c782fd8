"""megatron-core is prepared whichever way it is imported. Each case needs an interpreter of its own."""

import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

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


@pytest.mark.parametrize(
    "imports",
    ["import megatron_cp", "import megatron_cp.attention", "import megatron.core\nimport megatron_cp"],
    ids=["first", "by a submodule", "late"],
)
def test_megatron_core_is_prepared(imports: str) -> None:
    done = subprocess.run([sys.executable, "-c", imports + STEP], capture_output=True, text=True, timeout=120)
    assert done.stdout.strip() == "prepared", done.stderr[-2000:]
    if "megatron.core\n" not in imports:
        assert done.stderr == "", "nothing of upstream's chatter about missing libraries"


def test_importing_the_package_is_cheap() -> None:
    code = "import megatron_cp, sys; assert 'torch' not in sys.modules and 'megatron.core' not in sys.modules"
    subprocess.run([sys.executable, "-c", code], check=True, timeout=180)


PLANTED = {
    "transformer_engine/__init__.py": "raise OSError('libcuda.so.1: cannot open shared object file')",
    "apex/__init__.py": "",
    "apex/optimizers.py": "class FusedAdam: ...\nclass FusedSGD: ...",
    "apex/multi_tensor_apply.py": "multi_tensor_applier = None",
    "amp_C.py": "multi_tensor_scale = multi_tensor_l2norm = None",
}
TAKEN = """
import megatron_cp
from megatron.core.extensions.transformer_engine import HAVE_TE
from megatron.core.optimizer import Adam
print(HAVE_TE, Adam.__module__)
"""


def test_what_is_for_gpus_is_not_taken_without_one(tmp_path: Path) -> None:
    """A folder of packages that nodes with and without GPUs share: importing some of them fails here, others compute
    on GPUs only."""
    for name, text in PLANTED.items():
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_text(text)
    environment = os.environ | {"PYTHONPATH": f"{tmp_path}:{ROOT}"}
    command = [sys.executable, "-c", TAKEN]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=120)
    assert done.stdout.split() == ["False", "torch.optim.adamw"], done.stderr[-2000:]
