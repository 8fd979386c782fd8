"""Models that cannot be converted: all reasons at once, and exit code 2.

No files are left.
"""

import json
import os
import pickle
import random
import resource
import shutil
import signal
import struct
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from tests.crafted_checkpoints import Command, flip, replace_index, replace_object, saved
from tests.unit_tests.convert.published import publish


def change(folder: Path, **values: Any) -> None:
    """Change values in ``config.json``."""
    path = folder / "hf/config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | values))


def change_weights(folder: Path, **shapes: Any) -> None:
    """Change tensors in the weights' file; ``None`` removes one."""
    path = folder / "hf/model.safetensors"
    tensors = load_file(path)
    for name, make in shapes.items():
        name = name.replace("__", ".")
        if make is None:
            del tensors[name]
        else:
            tensors[name] = make(tensors)
    save_file(tensors, path, metadata={"format": "pt"})


def change_header(folder: Path, length: int | None = None, **values: Any) -> None:
    """Change the header of the weights' file: its length, or the last norm's entry."""
    path = folder / "hf/model.safetensors"
    content = path.read_bytes()
    (size,) = struct.unpack_from("<Q", content)
    header = json.loads(content[8 : 8 + size])
    header["model.norm.weight"] |= values
    written = json.dumps(header).encode()
    path.write_bytes(struct.pack("<Q", length or len(written)) + written + content[8 + size :])


def other_index(folder: Path, places: Any) -> None:
    (folder / "hf/model.safetensors").unlink()
    (folder / "hf/model.safetensors.index.json").write_text(json.dumps({"weight_map": places}))


def cut(path: Path, size: int) -> None:
    path.write_bytes(path.read_bytes()[:size])


NORM = "model__norm__weight"
# Change to a published model, and the message.
BROKEN = {
    "no config": (lambda f: os.remove(f / "hf/config.json"), "config.json: cannot be read: No such file"),
    "no json": (lambda f: cut(f / "hf/config.json", 40), "config.json: is not valid JSON"),
    "no object": (lambda f: (f / "hf/config.json").write_text("[]"), "must be a JSON object"),
    "family": (
        lambda f: change(f, model_type="gemma2"),
        "model_type='gemma2': is not supported. Fix: choose a model of one of deep",
    ),
    "no family": (lambda f: change(f, model_type=None), "model_type=None: is not supported"),
    "activation": (lambda f: change(f, hidden_act="gelu"), "hidden_act=gelu"),
    "bias": (lambda f: change(f, attention_bias=True), "attention_bias=True: not supported"),
    "quantized": (lambda f: change(f, quantization_config={"quant_method": "fp8"}), "quantization_config"),
    "rope": (
        lambda f: change(f, rope_parameters={"rope_type": "dynamic", "factor": 4.0, "rope_theta": 1e4}),
        "rope_type=dynamic",
    ),
    "llama 3 rope": (
        lambda f: change(
            f,
            rope_parameters={
                "rope_type": "llama3",
                "factor": 4.0,
                "low_freq_factor": 1.0,
                "high_freq_factor": 4.0,
                "original_max_position_embeddings": 4096,
                "rope_theta": 1e4,
            },
        ),
        "rope_scaling.original_max_position_embeddings=4096: must be 8192, fixed in megatron-core",
    ),
    "rope base": (
        lambda f: change(f, rope_parameters={"rope_type": "default", "rope_theta": 10000.5}),
        "rope_theta=10000.5: must be a whole number above 0",
    ),
    "wrong type": (lambda f: change(f, hidden_size="wide"), "hidden_size"),
    "no weights": (lambda f: os.remove(f / "hf/model.safetensors"), "has neither model.safetensors nor"),
    "cut weights": (lambda f: cut(f / "hf/model.safetensors", 5000), "model.safetensors: cannot be read"),
    "missing": (lambda f: change_weights(f, **{NORM: None}), "model.norm.weight is missing"),
    "more": (
        lambda f: change_weights(f, extra=lambda t: t["model.norm.weight"].clone()),
        "extra is unknown",
    ),
    "shape": (
        lambda f: change_weights(f, **{NORM: lambda t: t["model.norm.weight"][:32].clone()}),
        "model.norm.weight has shape (32,) instead of (64,)",
    ),
    "layers": (lambda f: change(f, num_hidden_layers=3), "num_hidden_layers=3: the weights have 2 layers"),
    # Sizes that would fill the memory, mostly before a tensor is created.
    "many layers": (lambda f: change(f, num_hidden_layers=10**9), "=1000000000: the weights have 2 layers"),
    "wide": (lambda f: change(f, hidden_size=10**9), "hidden_size=1000000000: the weights' largest dimension is 192"),
    "wide heads": (lambda f: change(f, head_dim=10**30), "head_dim=1000000000000000000000000000000: the weights'"),
    "all wide": (
        lambda f: (
            change_weights(f, extra=lambda t: torch.zeros(10**6))
            or change(f, intermediate_size=10**6, vocab_size=10**6, hidden_size=10**6)
        ),
        "model.embed_tokens.weight has shape (192, 64) instead of (1000000, 1000000)",
    ),
    "deep": (lambda f: (f / "hf/config.json").write_text("[" * 10**5), "is not valid JSON: nested too deeply"),
    "digits": (lambda f: (f / "hf/config.json").write_text("9" * 5000), "is not valid JSON: Exceeds the limit"),
    "device": (lambda f: (f / "hf/a").symlink_to("/dev/zero"), "hf/a: is neither a file nor a folder. Fix: rm "),
    "pipe": (
        lambda f: os.mkfifo(f / "hf/tokenizer.json"),
        "hf/tokenizer.json: is neither a file nor a folder. Fix: rm ",
    ),
    "dtype": (
        lambda f: change_weights(f, model__embed_tokens__weight=lambda t: t["model.embed_tokens.weight"].double()),
        "has weights of F64. Fix: use a model with F32, BF16, F16 weights",
    ),
    "quantized weights": (
        lambda f: change_weights(f, **{NORM: lambda t: t["model.norm.weight"].to(torch.float8_e4m3fn)}),
        "has weights of F8_E4M3. Fix: use a model with F32, BF16, F16 weights",
    ),
    "another output layer": (
        lambda f: change(f, tie_word_embeddings=True),
        "lm_head.weight must equal model.embed_tokens.weight, but the weights differ",
    ),
    "another family after all": (
        lambda f: change(f, model_type="mistral", sliding_window=4, layer_types=["sliding_attention"] * 2),
        "config.json",
    ),
    "heads in groups": (lambda f: change(f, num_key_value_heads=3), "num_query_groups"),
    "family of families": (lambda f: change(f, model_type=["llama"]), "model_type=['llama']: is not supported"),
    "index of numbers": (lambda f: other_index(f, {"a": 3}), "has no weight_map from tensors to files"),
    "index of nothing": (lambda f: other_index(f, None), "has no weight_map from tensors to files"),
    "header length": (lambda f: change_header(f, length=2**62), "model.safetensors: cannot be read"),
    "header beyond": (lambda f: change_header(f, data_offsets=[0, 2**40]), "model.safetensors: cannot be read"),
    "header overlaps": (lambda f: change_header(f, data_offsets=[64, 320]), "model.safetensors: cannot be read"),
    "header negative": (lambda f: change_header(f, data_offsets=[-8, 248]), "model.safetensors: cannot be read"),
    "header dtype": (lambda f: change_header(f, dtype="F99"), "model.safetensors: cannot be read"),
    "header shape": (lambda f: change_header(f, shape=[2**40]), "model.safetensors: cannot be read"),
    "index of other folders": (lambda f: other_index(f, {"a": "../b"}), "names '../b', a file outside of the folder"),
    "index of paths": (lambda f: other_index(f, {"a": "/etc/passwd"}), "names '/etc/passwd', a file outside"),
    "index": (
        lambda f: (
            (f / "hf/model.safetensors").rename(f / "hf/other")
            and (f / "hf/model.safetensors.index.json").write_text('{"weight_map": {"a": "gone.safetensors"}}')
        ),
        "gone.safetensors: cannot be read",
    ),
    "target": (lambda f: (f / "mcore").mkdir() or (f / "mcore/x").touch(), "--megatron-path"),
    "target above": (lambda f: (f / "mcore").touch(), "already exists"),
}


def publish_and(folder: Path, damage: Any) -> None:
    publish(folder / "hf", "llama")
    damage(folder)
    space = int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize()
    resource.setrlimit(resource.RLIMIT_AS, (space + 2**31,) * 2)


@pytest.mark.parametrize("what", BROKEN)
def test_a_model_that_cannot_be_imported(convert: Any, tmp_path: Path, what: str) -> None:
    damage, expected = BROKEN[what]
    before = lambda folder: publish_and(folder, damage)  # noqa: E731
    code, text = convert("import", "--hf-model", tmp_path / "hf", "--megatron-path", tmp_path / "mcore", before=before)
    assert code == 2
    assert expected in text
    assert what.startswith("target") or not (tmp_path / "mcore").exists()


def test_all_settings_without_counterpart_are_reported_together(convert: Any, tmp_path: Path) -> None:
    def before(folder: Path) -> None:
        publish(folder / "hf", "mistral")
        change(folder, hidden_act="gelu", mlp_bias=True, attention_bias=True)

    code, text = convert("import", "--hf-model", tmp_path / "hf", "--megatron-path", tmp_path / "mcore", before=before)
    assert code == 2
    assert all(name in text for name in ("hidden_act", "mlp_bias", "attention_bias"))


def test_a_full_disk_leaves_no_files(convert: Any, tmp_path: Path) -> None:
    def before(folder: Path) -> None:
        publish(folder / "hf", "llama")
        resource.setrlimit(resource.RLIMIT_FSIZE, (20_000, resource.RLIM_INFINITY))

    code, text = convert("import", "--hf-model", tmp_path / "hf", "--megatron-path", tmp_path / "mcore", before=before)
    assert code == 1
    assert "could not be written" in text
    assert sorted(path.name for path in tmp_path.iterdir()) == ["hf", "reported"]

    def import_first(folder: Path) -> None:
        from megatron_cp.convert.importing import import_model

        import_model(folder / "hf", folder / "mcore")
        resource.setrlimit(resource.RLIMIT_FSIZE, (20_000, resource.RLIM_INFINITY))

    out = ("export", "--megatron-path", tmp_path / "mcore", "--hf-path", tmp_path / "out")
    code, text = convert(*out, before=import_first)
    assert code == 1
    assert "could not be written" in text
    assert sorted(path.name for path in tmp_path.iterdir()) == ["hf", "mcore", "reported"]


def test_a_checkpoint_that_cannot_be_exported(convert: Any, tmp_path: Path) -> None:
    def before(folder: Path) -> None:
        from megatron_cp.convert.importing import import_model

        publish(folder / "hf", "llama")
        import_model(folder / "hf", folder / "mcore")
        (folder / "damaged/iter_0000000").mkdir(parents=True)
        (folder / "empty").mkdir()

    def export(root: str, *options: str, before: Any = None, expected: int = 2) -> str:
        out = ("--hf-path", tmp_path / "out")
        code, text = convert("export", "--megatron-path", tmp_path / root, *out, *options, before=before)
        assert code == expected
        assert not (tmp_path / "out").exists()
        return text

    assert "has no checkpoint 7. Fix: --iteration 0" in export("mcore", "--iteration", "7", before=before)
    assert "has no checkpoint. Fix: --megatron-path FOLDER" in export("empty")
    assert "has no checkpoint. Fix: --megatron-path FOLDER" in export("nowhere")
    run = tmp_path / "mcore"
    assert f"Fix: --megatron-path {run} --iteration 0" in export("mcore/iter_0000000")
    assert f"Fix: --megatron-path {tmp_path}/damaged (run folders in {tmp_path}: damaged, mcore)" in export("")
    assert "damaged/iter_0000000/.metadata cannot be read: No such file" in export("damaged", expected=1)
    for path in (tmp_path / "mcore/iter_0000000").glob("*.distcp"):
        path.write_bytes(path.read_bytes()[:100])
    assert "has 100 bytes, expected" in export("mcore", expected=1)


def test_a_damaged_or_crafted_checkpoint_is_not_exported(convert: Any, tmp_path: Path) -> None:
    def before(folder: Path) -> None:
        from megatron_cp.convert.importing import import_model

        publish(folder / "hf", "llama")
        import_model(folder / "hf", folder / "mcore")

    def export(*options: str, before: Any = None) -> tuple[int, str]:
        target = tmp_path / f"out{len(list(tmp_path.glob('out*')))}"
        code, text = convert("export", "--megatron-path", run, "--hf-path", target, *options, before=before)
        assert target.exists() == (code == 0)
        return code, text

    run, marker = tmp_path / "mcore", tmp_path / "marker"
    assert export(before=before)[0] == 0
    newer = Path(shutil.copytree(run / "iter_0000000", run / "iter_0000001"))
    code, text = export()
    assert code == 0 and "names this checkpoint, but iteration 1 is newer. Fix: --iteration 1" in text, text
    data = newer / "__0_0.distcp"
    flip(data, random.Random(1))
    code, text = export("--iteration", "1")
    assert code == 1 and f"{data} is corrupted (checksum mismatch)" in text, text
    assert "Iteration 0 is complete. Fix: --iteration 0\n" in text, text
    assert export("--iteration", "0")[0] == 0
    replace_object(newer, "common_state", saved(Command(marker)))
    code, text = export("--iteration", "1")
    assert code == 1 and "posix.system, which checkpoints of megatron_cp never use" in text, text
    replace_index(newer, pickle.dumps(Command(marker)))
    code, text = export("--iteration", "1")
    assert code == 1 and "posix.system, which checkpoints of megatron_cp never use" in text, text
    assert not marker.exists()


def test_several_processes_are_refused(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    from megatron_cp.cli import main

    monkeypatch.setenv("RANK", "0")
    monkeypatch.setenv("WORLD_SIZE", "2")
    assert main(["convert", "import", "--hf-model", "a", "--megatron-path", "b"]) == 2
    assert "conversion runs in a single process" in capsys.readouterr().err


def test_a_stop_leaves_no_files(convert: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def before(folder: Path) -> None:
        publish(folder / "hf", "llama")
        monkeypatch.setattr(
            "megatron_cp.convert.checkpoint.put_in_place", lambda *_: os.kill(os.getpid(), signal.SIGTERM)
        )

    paths = ("--hf-model", tmp_path / "hf", "--megatron-path", tmp_path / "mcore")
    assert convert("import", *paths, before=before)[0] == 143
    assert sorted(path.name for path in tmp_path.iterdir()) == ["hf", "reported"]
