"""User errors: one clear message and the documented exit code, never a traceback."""

import json
import math
import os
import re
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch.distributed as dist

from megatron_cp.common.errors import ConfigError
from megatron_cp.config.recipes import load_recipe
from megatron_cp.rules import check
from megatron_cp.training import loop
from megatron_cp.training.monitor import sinks
from megatron_cp.training.train import run
from tests.training_runs import tiny_config


@pytest.fixture(scope="module")
def finished_run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return where the first test that needs a finished run puts it for others."""
    return tmp_path_factory.mktemp("finished")


@pytest.fixture
def trained(cli: Any, finished_run: Path, tmp_path: Path) -> Path:
    """Return a finished run that the test may change: trained once, then copied."""
    folder = tmp_path / "run"
    if not (finished_run / "run").exists():
        assert cli()[0] == 0
        shutil.copytree(folder, finished_run / "run")
    else:
        shutil.copytree(finished_run / "run", folder)
    return folder


def files(folder: Path) -> list[str]:
    return sorted(str(path.relative_to(folder)) for path in folder.rglob("*") if not path.name.startswith("stderr"))


def test_a_valid_run_exits_with_zero_and_can_be_repeated(cli: Any, tmp_path: Path) -> None:
    code, text = cli()
    assert code == 0 and "CONTEXT_PARALLEL_GROUP [[0,1]]" in text and "saved checkpoint" in text, text
    assert {"run/config.yaml", "run/metrics.jsonl", "run/latest_checkpointed_iteration.txt"} <= set(files(tmp_path))
    code, text = cli()
    assert code == 0 and "nothing to do: already at iteration 1" in text, text


@pytest.mark.parametrize("written", [".config.yaml.partial", "metrics.jsonl"])
def test_a_full_disk_names_the_run_folder_and_keeps_the_configuration(cli: Any, tmp_path: Path, written: str) -> None:
    def write_into_what_is_full() -> None:
        sinks.keep_lines_until = lambda *args: None  # reading /dev/full would never end

    run = tmp_path / "run"
    run.mkdir()
    (run / "config.yaml").write_text("an earlier start's")
    (run / written).symlink_to("/dev/full")
    code, text = cli(before=write_into_what_is_full)
    assert (
        code == 1 and f"megatron-cp: the run folder {run} cannot be written: No space left on device. Fix:" in text
    ), text
    assert ((run / "config.yaml").read_text() == "an earlier start's") == (written == ".config.yaml.partial")


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["dataset.kind=indexed", "dataset.data_path=/nowhere/corpus"], "/nowhere/corpus"),
        (["dataset.kind=indexed"], "dataset.data_path: dataset.kind=indexed needs the prefix"),
        (["tokenizer.tokenizer_type=HuggingFaceTokenizer", "tokenizer.tokenizer_model=/nowhere"], "/nowhere"),
        (
            ["model.vocab_size=200"],
            "model.vocab_size=200: the tokenizer has 257 tokens, more than the vocabulary of 200",
        ),
        (["checkpoint.load=/nowhere"], "checkpoint.load=/nowhere: there is no checkpoint"),
        (
            ["checkpoint.pretrained_checkpoint=/nowhere"],
            "(no iter_* folder). Fix: checkpoint.pretrained_check",
        ),
        ([f"checkpoint.load={'x' * 300}"], "xxx: there is no checkpoint"),
        ([f"checkpoint.save={'x' * 300}"], "cannot be used as the run folder: File name too long"),
        (["checkpoint.finetune=true"], "Fix: checkpoint.pretrained_checkpoint=PATH, or checkpoint.finetune=false"),
        (["checkpoint.save=/proc/run"], "checkpoint.save=/proc/run: cannot be used as the run folder"),
        (["checkpoint.save=/etc/hostname"], "checkpoint.save=/etc/hostname: cannot be used as the run folder: File ex"),
        (["model.tensor_model_parallel_size=4"], "world size"),
        (["model.context_parallel_size=abc"], "model.context_parallel_size"),
        (["dataset.seq_length=31"], "Sequence length must be divisible by 2 * context parallel size"),
        (["model.cp_comm_type=a2a+p2p"], "hierarchical_context_parallel_sizes"),
    ],
)
def test_configuration_errors_exit_with_two_before_any_file_is_written(
    cli: Any, tmp_path: Path, arguments: list[str], message: str
) -> None:
    code, text = cli(*arguments)
    assert code == 2 and message in text, (code, text)
    assert files(tmp_path) == []


@pytest.mark.parametrize(
    "overrides",
    [
        {"dataset__mock_num_samples": 0},
        {"dataset__mock_masked_fraction": 1.0},
        {"dataset__seq_length": 0},
        {"dataset__too_long": "drop"},
        {"dataset__reset_attention_mask": True},
        {"train__global_batch_size": 0},
    ],
    ids=lambda overrides: next(iter(overrides)),
)
def test_a_run_that_python_starts_is_checked_before_it_has_groups(overrides: dict[str, Any]) -> None:
    """The code that builds data and batches takes these settings as they are."""
    (field,) = (name.replace("__", ".") for name in overrides)
    with pytest.raises(ConfigError, match=re.escape(field)):
        run(tiny_config(**overrides))
    assert not dist.is_initialized()


@pytest.mark.usefixtures("trained")
def test_another_models_checkpoint_exits_with_two(cli: Any, tmp_path: Path) -> None:
    before = files(tmp_path)
    code, text = cli("model.hidden_size=64", "train.train_iters=2")
    assert code == 2 and text.count("model.hidden_size is 64 here and 128 in the checkpoint") == 1, (code, text)
    assert "_PARALLEL_GROUP" not in text, "reported before any group is made"
    assert files(tmp_path) == before


@pytest.mark.usefixtures("trained")
def test_another_vocabulary_is_another_model(cli: Any, tmp_path: Path) -> None:
    """megatron-core loads the rows that both have: it takes them for padding."""
    for begun in ([], [f"checkpoint.pretrained_checkpoint={tmp_path}/run", f"checkpoint.save={tmp_path}/next"]):
        code, text = cli("model.vocab_size=1000", "train.train_iters=2", *begun)
        assert code == 2 and text.count("model.vocab_size is 1000 here and 257 in the checkpoint") == 1, (code, text)
        code, text = cli("model.make_vocab_size_divisible_by=500", "train.train_iters=2", *begun)
        assert code == 2 and "the vocabulary is padded to 500 rows here and 384 in the checkpoint" in text, (code, text)
        assert "Fix: model.make_vocab_size_divisible_by=384 (the checkpoint's values)" in text


@pytest.mark.usefixtures("trained")
def test_weights_may_begin_a_model_that_computes_something_else(cli: Any, tmp_path: Path) -> None:
    """A larger rotary base may begin with saved weights, but never unnoticed.

    Longer sequences need one. Only the weights are loaded.
    """
    code, text = cli("model.rotary_base=500000")
    assert code == 2 and "model.rotary_base is 500000.0 here and 10000.0 in the checkpoint" in text, (code, text)
    begin = f"checkpoint.pretrained_checkpoint={tmp_path}/run"
    assert f", or {begin} checkpoint.load=null checkpoint.save={tmp_path}/run_2 (a new run with its weights)" in text
    assert cli("model.rotary_base=500000", begin, f"checkpoint.save={tmp_path}/longer")[0] == 0


@pytest.mark.usefixtures("trained")
def test_the_weights_of_rotary_positions_may_begin_a_model_with_yarn(cli: Any, tmp_path: Path) -> None:
    yarn = ["model.position_embedding_type=yarn", "model.yarn_original_max_position_embeddings=64"]
    yarn += ["model.yarn_rotary_scaling_factor=8.0"]
    code, text = cli(*yarn)
    assert code == 2 and "model.position_embedding_type is 'yarn' here and 'rope' in the checkpoint" in text, text
    begin = [f"checkpoint.pretrained_checkpoint={tmp_path}/run", f"checkpoint.save={tmp_path}/longer"]
    assert f", or {begin[0]} checkpoint.load=null checkpoint.save={tmp_path}/run_2 (a new run" in text, text
    assert cli(*yarn, *begin)[0] == 0
    code, text = cli(*yarn, "model.yarn_beta_fast=16.0", begin[1])
    assert code == 2 and "model.yarn_beta_fast is 16.0 here and 32.0 in the checkpoint" in text, text


@pytest.mark.usefixtures("trained")
def test_a_missing_checkpoint_exits_with_two(cli: Any, tmp_path: Path) -> None:
    (tmp_path / "run" / "iter_0000001").rename(tmp_path / "run" / "elsewhere")
    code, text = cli()
    assert code == 2 and "there is no iter_0000001. Fix: checkpoint.load=null" in text, (code, text)


@pytest.mark.usefixtures("trained")
def test_another_schedule_exits_with_two_and_names_both_fixes(cli: Any) -> None:
    code, text = cli("train.train_iters=5")
    assert code == 2 and text.count("trained with a different learning-rate schedule") == 1, (code, text)
    assert "_PARALLEL_GROUP" not in text, "reported before any group is made"
    assert "train.train_iters is 5 here and 1 in the checkpoint" in text
    assert cli("train.train_iters=5", "scheduler.override_opt_param_scheduler=true")[0] == 0
    code, text = cli(
        "train.train_iters=6", "scheduler.use_checkpoint_opt_param_scheduler=true", "dataset.random_seed=9"
    )
    assert code == 0 and text.count("the sample order differs") == 1, text
    assert "dataset.random_seed is 9 here and" in text


def test_the_recipe_of_a_short_run_can_be_trained_further(cli: Any, tmp_path: Path) -> None:
    """The recorded warmup must be used: the recipe's is longer than the run."""
    assert cli("scheduler.lr_warmup_iters=10")[0] == 0
    longer = load_recipe(tmp_path / "run" / "config.yaml", ["train.train_iters=3"])
    assert [v for v in check(longer, 2, environment="cpu") if v.severity == "error"] == []


def test_a_recorded_warmup_by_fraction_is_one_warmup(cli: Any, tmp_path: Path) -> None:
    assert cli("scheduler.lr_warmup_fraction=0.5", "scheduler.lr_warmup_iters=0", "train.train_iters=2")[0] == 0
    again = load_recipe(tmp_path / "run" / "config.yaml")
    assert [v for v in check(again, 2, environment="cpu") if v.severity == "error"] == []


@pytest.mark.slow  # test_pretrained_weights_are_loaded_once trains for longer, too
def test_training_for_longer_needs_only_a_schedule_of_its_own_length(cli: Any) -> None:
    schedule = ["scheduler.lr_decay_iters=9", "scheduler.lr_warmup_iters=1"]
    assert cli(*schedule)[0] == 0
    code, text = cli(*schedule, "train.train_iters=2")
    assert code == 0 and "resumed from iteration 1" in text, text


def test_pretrained_weights_are_loaded_once(cli: Any, tmp_path: Path) -> None:
    def losses(name: str) -> list[float]:
        lines = (tmp_path / name / "metrics.jsonl").read_text().splitlines()
        return [line["lm_loss"] for line in map(json.loads, lines) if "lm_loss" in line]

    long = ["scheduler.lr_decay_iters=9", "scheduler.lr_warmup_iters=1", "optimizer.lr=0.05"]
    assert cli(*long, "train.train_iters=3")[0] == 0
    tuned = [*long, f"checkpoint.pretrained_checkpoint={tmp_path}/run", f"checkpoint.save={tmp_path}/tuned"]
    code, text = cli(*tuned)
    assert code == 0 and "started with the weights of iteration 3 of" in text, text
    fresh, begun = losses("run")[0], losses("tuned")[0]
    assert abs(begun - fresh) > 0.01, "the same first samples: only other weights give another loss"
    code, text = cli(*tuned, "train.train_iters=2")
    assert code == 0 and f"resumed from iteration 1 of {tmp_path}/tuned" in text, text
    assert len(losses("tuned")) == 2
    code, text = cli(*tuned, "train.train_iters=3", "checkpoint.ckpt_step=3")
    assert code == 0 and f"resumed from iteration 2 of {tmp_path}/tuned" in text, "ckpt_step is the pretrained one's"


def test_a_run_with_another_start_resumes_from_its_own_checkpoint(cli: Any, tmp_path: Path) -> None:
    """The same command must resume the run's own folder.

    The first checkpoint is only the start.
    """
    schedule = ["scheduler.lr_decay_iters=9", "scheduler.lr_warmup_iters=1"]
    assert cli(*schedule, "train.train_iters=2", "checkpoint.save_interval=1")[0] == 0
    again = [*schedule, "train.exit_interval=1", "train.train_iters=4", "checkpoint.ckpt_step=1"]
    again += [f"checkpoint.load={tmp_path}/run", f"checkpoint.save={tmp_path}/next"]
    for begun in (f"1 of {tmp_path}/run", f"2 of {tmp_path}/next", f"3 of {tmp_path}/next"):
        code, text = cli(*again)
        assert code == 0 and f"resumed from iteration {begun}" in text, text


def test_a_recorded_recipe_may_be_trained_into_another_folder(cli: Any, tmp_path: Path) -> None:
    assert cli()[0] == 0
    code, text = cli(f"checkpoint.save={tmp_path}/other", recipe=str(tmp_path / "run" / "config.yaml"))
    assert code == 0 and "resumed" not in text and "nothing to do" not in text, text
    assert files(tmp_path / "other") and "iter_0000001" in " ".join(files(tmp_path / "other"))


def test_nonfinite_parameters_are_not_saved(cli: Any, tmp_path: Path) -> None:
    def damaging() -> None:
        step = loop.train_step

        def damaged(run: Any, *args: Any) -> Any:
            result = step(run, *args)
            if run.progress.iteration == 1 and os.environ["RANK"] == "1":
                next(run.model[0].parameters()).data.view(-1)[3] = math.nan
            return result

        loop.train_step = damaged

    code, text = cli("train.train_iters=2", "checkpoint.save_interval=1", before=damaging)
    assert code == 1 and "iter_0000002 could not be written: parameters are not finite" in text, text
    assert "iter_0000001" in " ".join(files(tmp_path / "run")) and "iter_0000002" not in " ".join(files(tmp_path))


@pytest.mark.parametrize("name", ["metrics.jsonl", "schedules.jsonl", "config.yaml", "verified_layouts.json"])
def test_a_pipe_in_the_run_folder_does_not_block(cli: Any, tmp_path: Path, name: str) -> None:
    (tmp_path / "run").mkdir()
    os.mkfifo(tmp_path / "run" / name)
    code, text = cli()
    assert code == 2 and f"run/{name} is a pipe" in text, (code, text)
