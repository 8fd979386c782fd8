from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from megatron_cp.common.errors import ConfigError
from megatron_cp.estimate.device import device_names, load_device


@pytest.mark.parametrize("name", device_names())
def test_presets_are_whole_and_physical(name: str) -> None:
    device = load_device(name)
    assert device.name == name
    assert all(0 < share < 1 for share in device.matmul_efficiency.values())
    assert set(device.matmul_efficiency) == set(device.matmul_flops)
    assert device.inter_bandwidth <= device.intra_bandwidth < device.memory_bandwidth
    assert max(device.attention_flops) <= device.matmul_flops["bf16"]


def test_the_gpus_that_the_planner_names_are_there() -> None:
    assert {"a100", "h100", "h200", "h800", "b200", "b300", "gb200", "gb300", "cpu"} == set(device_names())
    assert load_device("H100") == load_device("h100")


def test_a_file_takes_what_it_leaves_out_from_its_base(tmp_path: Path) -> None:
    path = tmp_path / "mine.yaml"
    path.write_text("base: h100\nname: mine\ninter_bandwidth: 1e11\n")
    assert load_device(str(path)) == replace(load_device("h100"), name="mine", inter_bandwidth=1e11)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("base: h100\nintra_bandwith: 1e11\n", "name it intra_bandwidth"),
        ("base: h10\n", "--gpu h100"),
        ("base: h100\nmemory_bandwidth: 0\n", "memory_bandwidth must be more than 0"),
        ("base: h100\nmemory: lots\n", "memory=lots"),
        ("name: mine\n", "base: h100"),
        ("- 1\n", "not a device description"),
    ],
)
def test_files_that_are_no_device(tmp_path: Path, text: str, message: str) -> None:
    path = tmp_path / "mine.yaml"
    path.write_text(text)
    with pytest.raises(ConfigError, match=message):
        load_device(str(path))


def test_an_unknown_name_and_a_missing_file() -> None:
    with pytest.raises(ConfigError, match="Fix: --gpu h100"):
        load_device("h101")
    with pytest.raises(ConfigError, match="cannot be read"):
        load_device("nowhere.yaml")


def test_a_format_that_a_gpu_does_not_have_is_computed_in_the_next() -> None:
    a100 = load_device("a100")
    assert a100.matmul_rate("fp8") == a100.matmul_rate("bf16")
