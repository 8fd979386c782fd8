"""Flags of Megatron-LM and Megatron-Bridge are errors that name settings.

The settings work when typed.
"""

import re
import shlex
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import yaml

from megatron_cp import cli
from megatron_cp.config import foreign_flags
from megatron_cp.config.recipe_names import commands_to_import, not_a_recipe
from megatron_cp.config.recipes import load_recipe
from megatron_cp.config.run_config import RunConfig
from megatron_cp.config.schema import field_paths

TINY = "llama_tiny_pretrain_config"


def answered(capsys: pytest.CaptureFixture[str], *arguments: str) -> str:
    assert cli.main(["train", TINY, *arguments]) == 2
    return capsys.readouterr().err


@pytest.mark.parametrize(
    ("flags", "settings"),
    [
        ("--num-layers 4", ["model.num_layers=4"]),
        ("--num-layers=4", ["model.num_layers=4"]),
        ("--train-iters 10 --bf16", ["train.train_iters=10", "mixed_precision=bf16_mixed"]),
        ("--data-path my/corpus", ["dataset.data_path=my/corpus"]),
        ("--data-path 0.3 a 0.7 b", ["dataset.data_path=[0.3,a,0.7,b]"]),
        ("--cp-comm-type a2a+p2p", ["model.cp_comm_type=a2a+p2p"]),
        ("--cp-comm-type p2p a2a", ["model.cp_comm_type=[p2p,a2a]"]),
        ("--hierarchical-context-parallel-sizes 2 2", ["model.hierarchical_context_parallel_sizes=[2,2]"]),
        ("--use-distributed-optimizer --overlap-grad-reduce",
         ["optimizer.use_distributed_optimizer=true", "ddp.overlap_grad_reduce=true"]),
        ("--save runs/a --load runs/b", ["checkpoint.save=runs/a", "checkpoint.load=runs/b"]),
        ("--split 969,30,1", ["dataset.split='969,30,1'"]),
        ("--window-size 64,0", ["model.window_size=[64,0]"]),
        ("--no-save-optim --no-rope-fusion", ["checkpoint.save_optim=false", "model.apply_rope_fusion=false"]),
        ("--wandb-project 123", ["logger.wandb_project='123'"]),
        ("--norm-epsilon 1e-6", ["model.layernorm_epsilon=1e-6"]),
        ("--rope-theta 500000", ["model.rotary_base=500000"]),
        ("--adam-beta2 0.98 --swiglu",
         ["optimizer.adam_beta2=0.98", "model.activation_func=silu", "model.gated_linear_unit=true"]),
        ("--window-attn-skip-freq 4", ["model.window_attn_skip_freq=4"]),
    ],
)  # fmt: skip
def test_the_printed_command_composes(
    flags: str, settings: list[str], capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    text = answered(capsys, *flags.split(), "rng.seed=7")
    fix = text.splitlines()[-1].removeprefix("Fix: ")
    command = shlex.split(fix)
    assert command == ["megatron-cp", "train", TINY, "rng.seed=7", *settings]
    assert cli.main([*command[1:], "--print-config"]) == 0
    assert yaml.safe_load(capsys.readouterr().out)["rng"]["seed"] == 7


def test_our_flags_are_kept_and_others_removed(capsys: pytest.CaptureFixture[str]) -> None:
    text = answered(
        capsys, "--micro-batch-size", "2", "--use-flash-attn", "--tp-comm-overlap", "--moe-router-topkk", "2"
    )
    assert text.splitlines()[-1] == f"Fix: megatron-cp train {TINY} --micro-batch-size 2"
    assert "--use-flash-attn      remove it: model.attention_backend=auto" in text
    assert "--tp-comm-overlap     remove it: not supported: overlap of tensor-parallel messages" in text
    assert "--moe-router-topkk 2  no setting has this name; did you mean 'moe_router_topk'?" in text


def test_every_setting_has_its_flag() -> None:
    settings = foreign_flags._settings()
    names = {path.rpartition(".")[2] for path in field_paths(RunConfig) if "." in path}
    assert names <= settings.keys() and set(settings.values()) <= set(field_paths(RunConfig))
    for means in foreign_flags._REPLACED.values():
        load_recipe(TINY, means)


def test_other_commands_answer_too(capsys: pytest.CaptureFixture[str]) -> None:
    for command in ("validate", "verify", "evaluate", "doctor"):
        assert cli.main([command, "--recipe", TINY, "--num-layers", "4"]) == 2
        fix = f"Fix: megatron-cp {command} --recipe {TINY} model.num_layers=4\n"
        assert capsys.readouterr().err.endswith(fix)


def test_a_published_model_is_brought_in_by_two_commands(
    capsys: pytest.CaptureFixture[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    model = "meta-llama/Llama-3.2-1B"
    commands = (
        f"hf download {model} --local-dir models/Llama-3.2-1B && megatron-cp convert import --hf-model "
        "models/Llama-3.2-1B --megatron-path runs/Llama-3.2-1B; then --recipe runs/Llama-3.2-1B/recipe.yaml"
    )
    assert cli.main(["train", "--recipe", model]) == 2
    assert f"{model} is a Hugging Face model, not a recipe\n    fix: {commands}\n" in capsys.readouterr().err
    assert cli.main(["train", TINY, "--hf_path", model]) == 2
    assert f"--hf_path {model}  first {commands}\n" in capsys.readouterr().err
    (tmp_path / "models").mkdir()
    assert not_a_recipe("models/typo", [])[0] == "recipe file not found: models/typo"
    (tmp_path / "models/m").mkdir()
    (tmp_path / "models/m/config.json").touch()
    assert commands_to_import("models/m").startswith("megatron-cp convert import --hf-model models/m --megatron-path")
    program = shutil.which("hf", path=str(Path(sys.executable).parent))
    assert program is not None, "huggingface-hub has another program"
    done = subprocess.run([program, "download", "--help"], capture_output=True, text=True, timeout=180, check=False)
    assert "--local-dir" in re.sub(r"\x1b\[[\d;]*m", "", done.stdout)


def test_the_first_word_is_the_recipe(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    (tmp_path / "r.yaml").write_text(f"defaults: [{TINY}, _self_]\n")
    for words in ([TINY, "rng.seed=5"], ["rng.seed=5", TINY], [str(tmp_path / "r.yaml"), "rng.seed=5"]):
        assert cli.main(["train", "--print-config", *words]) == 0
        assert yaml.safe_load(capsys.readouterr().out)["rng"]["seed"] == 5
    assert cli.main(["train", TINY, "another"]) == 2
    assert "'another' is not an override: expected key=value" in capsys.readouterr().err
