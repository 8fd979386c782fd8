"""``megatron-cp profile``: a GPU's traces, made by hand, and a CPU's from PyTorch."""

from __future__ import annotations

import gzip
import json
import math
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.profiler import ProfilerActivity, profile, record_function

from megatron_cp.cli import main
from megatron_cp.common.errors import DataError
from megatron_cp.report import traces
from megatron_cp.report.traces import PYTHON, kind_of, read_trace
from megatron_cp.training.monitor import phases

GEMM = "nvjet_hsh_128x256_64x4_1x2_h_bz_coopA_NNT"
FLASH = "cudnn_generated_fort_native_sdpa_sm90_flash_fprop_wgmma_f16_knob_7_64x128x64_4x1x1_cga1x1x1_kernel0_0"
NCCL = "ncclDevKernel_SendRecv(ncclDevKernelArgsStorage<4096ul>)"
ADAM = "void multi_tensor_apply_kernel<transformer_engine::multi_tensor_adam::AdamFunctorMaster<...>>"


def event(cat: str, name: str, begin: float, dur: float, tid: int = 7, **arguments: Any) -> dict[str, Any]:
    return {"ph": "X", "cat": cat, "name": name, "ts": begin, "dur": dur, "pid": 1, "tid": tid, "args": arguments}


def kernel(number: int, name: str, launched: float, begin: float, dur: float) -> list[dict[str, Any]]:
    """Return the events of a kernel's launch and its run, in microseconds."""
    return [
        event("cuda_runtime", "cudaLaunchKernel", launched, 2, correlation=number),
        event("kernel", name, begin, dur, tid=20, correlation=number, stream=20),
    ]


def written(folder: Path, events: list[dict[str, Any]], name: str = "rank0_iterations_2-3.json.gz") -> Path:
    folder.mkdir(parents=True, exist_ok=True)
    content = {"deviceProperties": [{"name": "NVIDIA H200"}], "traceEvents": events}
    with gzip.open(folder / name, "wt") as file:
        json.dump(content, file)
    return folder / name


def two_steps() -> list[dict[str, Any]]:
    """Return the events of two steps of 1000 us each.

    Idle for the data, a product, attention, a message half behind it, idle before the optimizer.
    """
    events: list[dict[str, Any]] = [{"ph": "M", "name": "process_name"}, {"ph": "i", "name": "mark", "ts": 3}]
    # Before the first: over, under way when it begins, and a wait.
    events += [*kernel(98, ADAM, -300, -200, 100), *kernel(99, ADAM, -300, -30, 40)]
    events += [event("cuda_runtime", "cudaDeviceSynchronize", -50, 20)]
    for step in (0, 1):
        at = 1000.0 * step
        events += [
            event("user_annotation", f"iteration {step + 2}", at, 1000),
            event("user_annotation", "forward_backward", at, 500),
            event("user_annotation", "data", at, 90),
            event("user_annotation", "optimizer", at + 500, 400),
            event("user_annotation", "Optimizer.step#Adam.step", at + 700, 50),  # PyTorch's, no phase
            *kernel(10 * step, GEMM, at + 85, at + 100, 300),
            *kernel(10 * step + 1, FLASH, at + 150, at + 400, 200),
            *kernel(10 * step + 2, NCCL, at + 160, at + 500, 200),  # 100 of it beside attention
            *kernel(10 * step + 3, ADAM, at + 720, at + 750, 200),
            event("cuda_runtime", "cudaStreamSynchronize", at + 900, 60),
        ]
    return events


def test_a_gpu_trace_is_read_by_kind_of_kernel(tmp_path: Path) -> None:
    found = read_trace(written(tmp_path, two_steps()))
    assert found.device == "NVIDIA H200" and found.iterations == 2
    assert found.seconds == pytest.approx(1e-3)
    in_us = {kind: pytest.approx(1e6 * seconds) for kind, seconds in found.kinds.items()}
    assert in_us == {"matrix products": 300, "attention": 200, "communication": 200, "optimizer": 205}
    assert found.exposed == pytest.approx(100e-6)
    # 90 and 150 before the products, whose launch is in the data's phase (50 of them are the first step's end, but
    # there is no kernel between), 50 before each optimizer's kernel, and 50 at the end.
    assert {name: 1e6 * seconds for name, seconds in found.idle.items()} == {
        "data": pytest.approx((90 + 150) / 2), "optimizer": pytest.approx(50), "other": pytest.approx(25),
    }  # fmt: skip
    assert found.waits == (1, pytest.approx(60e-6))
    assert found.kernels[0].name == GEMM and found.kernels[0].calls == 1


def test_device_work_after_the_last_step_belongs_to_it(tmp_path: Path) -> None:
    events = [event("user_annotation", "iteration 2", 0, 100), *kernel(1, GEMM, 10, 50, 450)]
    events += [event("cuda_runtime", "cudaDeviceSynchronize", 110, 390)]  # the profiler's own, before it writes
    found = read_trace(written(tmp_path, events))
    assert found.seconds == pytest.approx(500e-6) and found.kinds["matrix products"] == pytest.approx(450e-6)
    assert found.waits == (0, 0)


@pytest.mark.parametrize(
    ("name", "kind"),
    [
        ("void cutlass::device_kernel<flash::enable_sm90<flash::FlashAttnFwdSm90<...>>>", "attention"),
        ("void pytorch_flash::flash_bwd_dq_dk_dv_loop_seqk_parallel_kernel<...>", "attention"),
        ("transformer_engine::fused_attn::thd_lse_kernel", "attention"),
        (
            "void cutlass::Kernel2<cutlass_80_tensorop_bf16_s16816gemm_relu_bf16_256x128_32x3_tn_align8>",
            "matrix products",
        ),
        ("void transformer_engine::normalization::rmsnorm_fwd_tuned_kernel<...>", "norms"),
        ("void multi_tensor_apply_kernel<transformer_engine::multi_tensor_l2norm::L2NormFunctor<...>>", "optimizer"),
        ("cross_entropy_kernel", "loss"),
        ("online_softmax_kernel", "loss"),
        ("element_mul_kernel", "loss"),
        ("void transformer_engine::fused_rope_forward_kernel<__nv_bfloat16>", "positions"),
        ("triton_poi_fused_mul_silu_0", "activations"),
        ("_chunk_scan_fwd_kernel", "state spaces"),
        ("void causal_conv1d_fwd_kernel<...>", "state spaces"),
        ("Memcpy HtoD (Pinned -> Device)", "copies"),
        ("void at::native::elementwise_kernel<128, 4, at::native::direct_copy_kernel_cuda(...)>", "copies"),
        ("void at::native::vectorized_elementwise_kernel<4, at::native::CUDAFunctor_add<float>>", "others"),
        ("void at::native::scatter_kernel", "others"),
    ],
)
def test_the_kind_of_a_kernel(name: str, kind: str) -> None:
    assert kind_of(name) == kind


def test_phases_are_named_as_in_training() -> None:
    assert set(traces.PHASES) <= set(phases.PHASES)
    assert set(phases.PHASES) - set(traces.PHASES) == {"evaluation", "checkpoint", "other"}


def test_a_trace_of_the_host_as_pytorch_writes_it(tmp_path: Path) -> None:
    with profile(activities=[ProfilerActivity.CPU], acc_events=True) as trace:
        for index in (1, 2):
            with record_function(f"iteration {index}"), record_function("forward_backward"):
                a = torch.randn(300, 300, requires_grad=True)
                for _ in range(3):
                    torch.nn.functional.linear(a, a).softmax(-1).sum().backward()
    trace.export_chrome_trace(str(tmp_path / "trace.json"))
    found = read_trace(tmp_path / "trace.json")
    assert found.device is None and found.iterations == 2 and found.waits == (0, 0)
    by_name = {k.name: k for k in found.kernels}
    assert by_name["aten::mm"].calls == 9 and by_name["aten::mm"].kind == "matrix products"
    # Each moment is one operator's or none's.
    total = sum(k.seconds for k in found.kernels) + sum(found.idle.values())
    assert total == pytest.approx(found.seconds, rel=1e-3)
    assert found.kinds["matrix products"] > 0 and found.kinds[PYTHON] > 0


def test_operators_of_the_host_are_distinguished(tmp_path: Path) -> None:
    events = [
        event("user_annotation", "iteration 2", 0, 100),
        event("cpu_op", "aten::t", 10, 5),  # begins with what calls it
        event("cpu_op", "aten::linear", 10, 40),
        event("cpu_op", "aten::addmm", 15, 20),
        event("cpu_op", "aten::copy_", 35, 5),  # begins where the one before ends
        event("cpu_op", "aten::mul", 50, 10),
        event("cpu_op", "_RingBackward", 60, 10),
        event("cpu_op", "aten::mul", 10, 80, tid=8),  # another thread's
        event("cpu_op", "aten::mul", 100, 5),  # after the step
    ]
    found = read_trace(written(tmp_path, events))
    assert found.device is None
    assert {k.name: (k.calls, pytest.approx(1e6 * k.seconds)) for k in found.kernels} == {
        "aten::t": (1, 5), "aten::linear": (1, 10), "aten::addmm": (1, 20), "aten::copy_": (1, 5), "aten::mul": (1, 10),
        "_RingBackward": (1, 10),
    }  # fmt: skip
    assert found.kinds[PYTHON] == pytest.approx(10e-6) and sum(found.idle.values()) == pytest.approx(40e-6)


def test_the_command_prints_a_run_s_profiles(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    written(tmp_path / "run" / "profile", two_steps())
    written(tmp_path / "run" / "profile", two_steps(), "rank1_iterations_2-3.json.gz")
    assert main(["profile", str(tmp_path / "run"), "--kernels", "2"]) == 0
    text = capsys.readouterr().out
    folder = tmp_path / "run" / "profile"
    assert text.startswith(f"{folder}/rank0_iterations_2-3.json.gz: 2 profiled iterations of 1.0 ms on NVIDIA H200\n")
    assert f"\n\n{folder}/rank1_iterations_2-3.json.gz: " in text
    assert "  30.0 %       0.30 ms  matrix products\n" in text
    assert "  20.0 %       0.20 ms  communication: 10.0 % exposed\n" in text
    assert "  19.5 %       0.20 ms  idle: data 12.0 %, optimizer 5.0 %, other 2.5 %\n" in text
    assert "host waits for the device: 1 an iteration, 0.1 ms in total\n" in text
    assert text.count(f"1 x {GEMM}\n") == 2 and text.count(" x ") == 4


@pytest.mark.parametrize(
    ("content", "says"),
    [
        (b"{", "cannot be read as a trace"),
        (b"[]", "the list traceEvents is missing"),
        (b'{"traceEvents": [{"ph": "X", "cat": "cpu_op", "name": "a", "ts": 1}]}', "no iteration is in this trace"),
    ],
)
def test_files_that_are_no_traces_are_reported(tmp_path: Path, content: bytes, says: str) -> None:
    (tmp_path / "trace.json").write_bytes(content)
    with pytest.raises(DataError, match=says):
        read_trace(tmp_path / "trace.json")


@pytest.mark.parametrize(
    ("field", "value"),
    [
        *(("ts", value) for value in (math.nan, math.inf, -math.inf, 1e300, 10**30, "12", None, [1], {}, True)),
        *(("dur", value) for value in (math.nan, -1.0, 1e300, "long", None, [])),
    ],
)
def test_times_that_are_none_are_refused(
    tmp_path: Path, field: str, value: Any, capsys: pytest.CaptureFixture[str]
) -> None:
    events = two_steps()
    events[-1][field] = value
    assert main(["profile", str(written(tmp_path, events))]) == 2
    reported = capsys.readouterr().err
    assert f"is damaged: the event 'cudaStreamSynchronize': {field}={value} is not a number of micro" in reported


def test_a_trace_that_takes_no_time_is_refused(tmp_path: Path) -> None:
    with pytest.raises(DataError, match="its iterations take no time"):
        read_trace(written(tmp_path, [event("user_annotation", "iteration 2", 5, 0)]))


def test_an_invalid_correlation_is_left_out(tmp_path: Path) -> None:
    events = two_steps()
    for each in events:
        if each.get("cat") in ("kernel", "cuda_runtime"):
            each["args"]["correlation"] = {"a": [1]}
    assert read_trace(written(tmp_path, events)).iterations == 2


@pytest.mark.parametrize("content", [b"[" * 100_000, b'{"a":' * 100_000, b"9" * 5000, b"\xff\xfe\x00"])
def test_json_beyond_pythons_limits_is_no_trace(tmp_path: Path, content: bytes) -> None:
    (tmp_path / "trace.json").write_bytes(content)
    with pytest.raises(DataError, match="cannot be read as a trace"):
        read_trace(tmp_path / "trace.json")


def test_truncated_or_missing_data_is_reported(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = written(tmp_path, two_steps())
    path.write_bytes(path.read_bytes()[:-40])
    with pytest.raises(DataError, match="cannot be read as a trace"):
        read_trace(path)
    empty = tmp_path / "run"
    empty.mkdir()
    assert main(["profile", str(empty)]) == 2
    assert "use_pytorch_profiler" in capsys.readouterr().err
    assert main(["profile", str(tmp_path / "none.json")]) == 2
    assert "none.json" in capsys.readouterr().err
