"""``megatron-cp doctor`` on simulated machines: drivers, packages and GPUs."""

import ctypes
import dataclasses
import os
import subprocess
import sys
from pathlib import Path

import pytest

from megatron_cp.cli import doctor, main
from megatron_cp.cli.doctor import MEGATRON_CORE, Library, Survey
from megatron_cp.rules import nvml
from megatron_cp.rules.environment import PRESETS
from megatron_cp.rules.nvml import Driver, Gpu

ROOT = Path(__file__).parents[3]
TINY, HCP = "llama_tiny_pretrain_config", "llama32_1b_pretrain_hcp_config"
H100 = Gpu("NVIDIA H100 80GB HBM3", 9.0, 80 * 2**30)
DRIVER = Driver("580.65.06", (13, 0), (H100,) * 8)
NAMES = ("megatron-core", "torch", "NCCL", "gloo", "transformer-engine", "flash-attn", "apex", "mamba-ssm")
VERSIONS = dict(
    zip(NAMES, (MEGATRON_CORE, "2.11.0", "2.28.9", "torch's", "2.16.1", "2.8.3", "0.1", "2.3"), strict=True)
)
GPU_MACHINE = Survey(
    dataclasses.replace(PRESETS["gpu"], variables={"CUDA_DEVICE_MAX_CONNECTIONS": "1"}),
    DRIVER,
    (*tuple(Library(name, version) for name, version in VERSIONS.items()), Library("causal-conv1d", "1.5")),
    "13.0",
)


def machine(found=GPU_MACHINE, **versions):
    """Return the survey with other versions of some libraries.

    Names have underscores for dashes; None stands for a missing library.
    """
    renamed = {name.replace("_", "-"): version for name, version in versions.items()}
    libraries = tuple(dataclasses.replace(x, version=renamed.get(x.name, x.version)) for x in found.libraries)
    known = {name: version for name, version in versions.items() if hasattr(found.environment, name)}
    environment = dataclasses.replace(found.environment, **known)
    return dataclasses.replace(found, libraries=libraries, environment=environment)


@pytest.fixture
def run(monkeypatch, capsys):
    monkeypatch.delenv("WORLD_SIZE", raising=False)

    def call(found, *argv):
        monkeypatch.setattr(doctor, "survey", lambda: found)
        code = main(["doctor", *argv])
        out, err = capsys.readouterr()
        return code, out, err

    return call


def test_a_complete_gpu_machine(run):
    code, out, _ = run(GPU_MACHINE, "--recipe", HCP)
    assert code == 0
    assert "  GPU                8 x NVIDIA H100 80GB HBM3, compute capability 9.0, 80 GiB\n" in out
    assert "  NVIDIA driver      580.65.06, supports CUDA 13.0 and older\n" in out
    assert "  transformer-engine 2.16.1\n" in out
    assert "  attention          Transformer Engine's: Transformer Engine 2.16.1 supports this" in out
    assert "  fused kernels      rotary embedding, weight gradient sums, cross-entropy" in out
    assert "  communication      nccl\n" in out and out.endswith("nothing to do\n")


def test_experts_are_among_the_fused_kernels(run):
    recipe = "nemotron_3_nano_128k_dynamic_cp_pretrain_config"
    fused = "  fused kernels      weight gradient sums, cross-entropy"
    assert f"{fused}, grouped experts\n" in run(GPU_MACHINE, "--recipe", recipe)[1]
    assert f"{fused}\n" in run(GPU_MACHINE, "--recipe", recipe, "model.moe_grouped_gemm=false")[1]


@pytest.mark.parametrize(
    ("found", "code", "reported"),
    [
        (machine(transformer_engine=None), 0, "  install Transformer Engine for the fastest"),
        (machine(transformer_engine="2.9.0"), 0, "  update Transformer Engine from 2.9.0 to at least 2.10.0"),
        (machine(megatron_core=None), 1, f"  needed: install megatron-core=={MEGATRON_CORE}"),
        (machine(megatron_core="0.17.0"), 1, f"  needed: install megatron-core=={MEGATRON_CORE} instead of 0.17.0"),
        (machine(torch=None), 1, "  needed: install torch"),
        (
            dataclasses.replace(GPU_MACHINE, torch_cuda=None),
            1,
            "  needed: install torch with CUDA instead of 2.11.0",
        ),
        (
            dataclasses.replace(GPU_MACHINE, driver=Driver("550.54", (12, 4), (H100,))),
            1,
            "  needed: update the driver: 550.54 supports CUDA up to 12.4, but torch 2.11.0 is built for CUDA 13.0",
        ),
        (dataclasses.replace(GPU_MACHINE, torch_cuda="12.8"), 0, "nothing to do"),
        (machine(flash_attn=None, apex=None, mamba_ssm=None, causal_conv1d=None, NCCL=None), 0, "nothing to do"),
    ],
)
def test_missing_packages_are_named(run, found, code, reported):
    assert run(found)[0] == code
    assert reported in run(found)[1]


@pytest.mark.parametrize(
    ("found", "overrides", "attention"),
    [
        (GPU_MACHINE, [], "Transformer Engine's: Transformer Engine 2.16.1 supports this recipe"),
        (
            GPU_MACHINE,
            ["model.attention_backend=native"],
            "our own, with Transformer Engine's kernels: model.attention_backend=native selects it",
        ),
        (
            GPU_MACHINE,
            ["model.transformer_impl=local"],
            "our own: model.transformer_impl=local disables Transformer Engine",
        ),
        (machine(transformer_engine=None), [], "our own: Transformer Engine is not installed"),
        (
            GPU_MACHINE,
            ["model.window_size=[64,0]"],
            "our own, with Transformer Engine's kernels: Transformer Engine 2.16.1, model.window_size: no sliding",
        ),
        (GPU_MACHINE, ["mixed_precision=fp32"], "our own: Transformer Engine 2.16.1, mixed_precision.fp32: "),
        (dataclasses.replace(GPU_MACHINE, environment=PRESETS["cpu"]), [], "our own: no GPU"),
    ],
)
def test_which_attention_and_why(run, found, overrides, attention):
    code, out, err = run(found, "--recipe", TINY, *overrides)
    assert f"  attention          {attention}" in out and code == 0, err
    # Also around our attention, wherever it is installed: but products in float32 are TF32 there.
    te_layers = found is GPU_MACHINE and not {"mixed_precision=fp32", "model.transformer_impl=local"} & {*overrides}
    assert f"  layers             {"Transformer Engine's" if te_layers else "megatron-core's own"}\n" in out
    assert ("  fused kernels      none of Transformer Engine's" in out) == (not te_layers)


def test_missing_packages_of_a_recipe_are_listed_once(run):
    """Missing packages must be named in the words of rule K57 (missing packages).

    Packages that the recipe does not use are not named.
    """
    found = machine(transformer_engine=None, mamba_ssm=None)
    hybrid = ("--recipe", "mamba_hybrid_tiny_pretrain_config")
    code, out, err = run(found, *hybrid)
    assert code == 0 and "K57" not in err, err
    te, mamba = out.partition("\nto do\n")[2].splitlines()
    assert te.startswith("  Transformer Engine is not installed: ") and "scripts/setup.sh --gpu" in te
    assert mamba.startswith("  mamba-ssm is not installed: ") and mamba.endswith("scripts/setup.sh --mamba")
    assert run(found, *hybrid, "mixed_precision=fp32")[1].endswith("nothing to do\n")


def test_a_recipe_that_cannot_run_here_ends_with_two(run):
    code, out, err = run(machine(transformer_engine=None), "--recipe", TINY, "model.attention_backend=te")
    assert code == 2 and "error K8: model.attention_backend=te" in err and "libraries" in out
    code, out, err = run(GPU_MACHINE, "--recipe", TINY, "model.attention_backend=te", "model.window_size=[64,0]")
    assert code == 2 and "attention          Transformer Engine's: model.attention_backend=te selects it" in out
    code, _, err = run(GPU_MACHINE, "--recipe", "llama_tinny_pretrain_config")
    assert code == 2 and "did you mean" in err
    code, _, err = run(GPU_MACHINE, "model.num_layers=2")
    assert code == 2 and "need --recipe NAME" in err
    code, _, err = run(GPU_MACHINE, "-cp", "2")
    assert code == 2 and "need --recipe NAME" in err


def test_the_flags_of_a_run_count(run):
    code, out, err = run(GPU_MACHINE, "--recipe", TINY, "--world-size", "16", "-tp", "16", "-cp", "1")
    assert code == 2 and f"{TINY} on 16 ranks" in out and "error A4: model.num_attention_heads=8" in err


def test_the_size_of_the_world(run):
    assert f"{TINY} on 8 ranks" in run(GPU_MACHINE, "--recipe", TINY, "--world-size", "8")[1]
    code, _, err = run(GPU_MACHINE, "--recipe", TINY, "--world-size", "6")
    assert code == 2 and "error A2" in err


def test_the_world_size_is_as_in_other_commands(run, monkeypatch):
    code, out, err = run(GPU_MACHINE, "--recipe", TINY, "--world-size", "0")
    assert code == 2 and f"{TINY} on 0 ranks" in out and "A1: world size: must be an integer of at least 1" in err
    monkeypatch.setenv("WORLD_SIZE", "16")
    assert f"{TINY} on 16 ranks" in run(GPU_MACHINE, "--recipe", TINY)[1]
    assert f"{TINY} on 8 ranks" in run(GPU_MACHINE, "--recipe", TINY, "--world-size", "8")[1]


def test_compilers_of_the_first_step_are_checked(run):
    """Triton compiles how each fused kernel is started."""
    code, out, _ = run(dataclasses.replace(GPU_MACHINE, to_compile=("a C compiler (gcc)", "Python's headers")))
    assert code == 1 and "  needed: install a C compiler (gcc) and Python's headers: " in out
    on_cpu = dataclasses.replace(
        GPU_MACHINE, environment=PRESETS["cpu"], driver=None, to_compile=("a C compiler (gcc)",)
    )
    assert "compiler" not in run(on_cpu)[1]


def test_a_compiler_is_looked_for_as_triton_does(monkeypatch, tmp_path):
    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.delenv("CC", raising=False)
    monkeypatch.setattr(doctor.sysconfig, "get_path", lambda name, scheme: str(tmp_path))
    assert doctor.survey().to_compile == ("a C compiler (gcc)", "Python's headers (python3-dev)")
    (tmp_path / "Python.h").touch()
    (tmp_path / "clang").touch(mode=0o755)
    assert doctor.survey().to_compile == ()
    (tmp_path / "clang").unlink()
    monkeypatch.setenv("CC", "/opt/cc")
    assert doctor.survey().to_compile == ()


def test_hidden_gpus(run, monkeypatch):
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    code, out, _ = run(dataclasses.replace(GPU_MACHINE, environment=PRESETS["cpu"]))
    assert code == 0 and "CUDA_VISIBLE_DEVICES= hides this machine's GPUs" in out


def test_nothing_installed_at_all(monkeypatch):
    monkeypatch.setattr(doctor, "installed_version", lambda name: None)
    monkeypatch.setattr(doctor.importlib.util, "find_spec", lambda name: None)
    monkeypatch.setattr(doctor, "read_driver", lambda: None)
    monkeypatch.setattr(doctor.Environment, "detect", lambda: PRESETS["cpu"])
    found = doctor.survey()
    assert {library.version for library in found.libraries} == {None}
    assert [finding.needed for finding in doctor.findings(found)] == [True, True]


def plant(folder, name, version):
    info = folder / f"{name.replace('-', '_')}-{version}.dist-info"
    info.mkdir()
    (info / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {name}\nVersion: {version}\n")


def doctor_with(folder, *arguments):
    environment = os.environ | {"PYTHONPATH": f"{folder}:{ROOT}"}
    command = [sys.executable, "-m", "megatron_cp", "doctor", *arguments]
    return subprocess.run(command, env=environment, capture_output=True, text=True, timeout=120, check=False)


def test_planted_packages(tmp_path):
    plant(tmp_path, "apex", "0.9.10")
    (tmp_path / "apex").mkdir()
    (tmp_path / "apex" / "__init__.py").write_text("raise RuntimeError('imported')")
    plant(tmp_path, "flash-attn", "2.8.3")
    (tmp_path / "flash_attn.py").write_text("import os; os.abort()")
    done = doctor_with(tmp_path)
    assert done.returncode == 0, done.stderr
    assert "apex               0.9.10; NOT NVIDIA's: another project of the same name" in done.stdout
    assert "uninstall apex" in done.stdout
    (tmp_path / "apex" / "multi_tensor_apply").mkdir()
    plant(tmp_path, "transformer-engine", "2.16.1")
    plant(tmp_path, "transformer-engine-torch", "2.16.1")
    out = doctor_with(tmp_path).stdout
    assert "apex               0.9.10; NVIDIA's\n" in out and "transformer-engine 2.16.1\n" in out


def test_transformer_engine_without_its_part_for_pytorch(monkeypatch):
    monkeypatch.setattr(doctor, "installed_version", {"transformer-engine": "2.16.1"}.get)
    found = doctor.survey()
    note = "the package transformer-engine-torch is missing"
    assert found["transformer-engine"].note == note
    expected = f"reinstall Transformer Engine ({note}): in the clone: scripts/setup.sh --gpu"
    assert expected in [finding.text for finding in doctor.findings(found)]


def test_checks_that_need_a_driver_are_skipped_without_one(run, monkeypatch):
    tried = []
    monkeypatch.setattr(doctor, "_try", lambda libraries: tried.extend(x.name for x in libraries) or {})
    te = "transformer-engine"
    gpu_libraries = tuple(dataclasses.replace(x, for_gpus=x.name == te) for x in GPU_MACHINE.libraries)
    with_driver = dataclasses.replace(GPU_MACHINE, libraries=gpu_libraries)
    assert "not tried" not in run(with_driver, "--try")[1] and te in tried
    tried.clear()
    login_node = dataclasses.replace(with_driver, driver=None, environment=PRESETS["cpu"])
    code, out, _ = run(login_node, "--try")
    assert code == 0 and "  transformer-engine 2.16.1 (not tried: no driver)\n" in out
    assert "torch" in tried and te not in tried
    assert "not tried" not in run(login_node)[1]


def test_libraries_that_cannot_be_imported(tmp_path, monkeypatch):
    (tmp_path / "dies.py").write_text("import os; os.abort()")
    (tmp_path / "fails.py").write_text("raise OSError('libcudart.so.13: cannot open shared object file')")
    (tmp_path / "refused.py").write_text("raise ValueError('error: two versions\\n    fix: unset CUDNN_HOME')")
    (tmp_path / "torch.py").write_text("")  # for speed
    monkeypatch.setenv("PYTHONPATH", f"{tmp_path}:{ROOT}")
    tried = [Library(name, "1", module=name) for name in ("dies", "fails", "refused", "json")] + [
        Library("absent", None, "", "x")
    ]
    assert doctor._try(tried) == {
        "dies": "exit code -6",
        "fails": "OSError: libcudart.so.13: cannot open shared object file",
        "refused": "ValueError: error: two versions; fix: unset CUDNN_HOME",
    }


class FakeNvml:
    """The functions of the driver's library that doctor calls."""

    nvmlInit_v2 = nvmlShutdown = staticmethod(lambda: 0)

    def nvmlSystemGetDriverVersion(self, buffer, length):
        buffer.value = b"580.65.06"

    def nvmlSystemGetCudaDriverVersion_v2(self, cuda):
        cuda._obj.value = 13000

    def nvmlDeviceGetCount_v2(self, count):
        count._obj.value = 8
        return 0

    def nvmlDeviceGetHandleByIndex_v2(self, index, handle):
        return 0

    def nvmlDeviceGetName(self, handle, name, length):
        name.value = b"NVIDIA H100 80GB HBM3"

    def nvmlDeviceGetCudaComputeCapability(self, handle, major, minor):
        major._obj.value, minor._obj.value = 9, 0

    def nvmlDeviceGetMemoryInfo(self, handle, memory):
        memory._obj.total = 80 * 2**30


def test_driver_versions(monkeypatch):
    monkeypatch.setattr(ctypes, "CDLL", lambda name: FakeNvml())
    assert nvml.read_driver() == DRIVER
    monkeypatch.setattr(FakeNvml, "nvmlInit_v2", staticmethod(lambda: 9))
    assert nvml.read_driver() is None
    monkeypatch.setattr(ctypes, "CDLL", lambda name: object())  # a library without these functions
    assert nvml.read_driver() is None
