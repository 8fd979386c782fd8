"""A length in epochs is the run of as many iterations.

This holds in every file, and when it resumes.
"""

import json
from pathlib import Path
from typing import Any

import pytest
import yaml

from megatron_cp.config.recipes import load_recipe
from megatron_cp.rules import check

ALONE = ("model.context_parallel_size=1", "train.train_iters=null", "dataset.mock_num_samples=5")
EPOCHS = (*ALONE, "train.train_epochs=1.5", "optimizer.lr=0.01")


def losses(folder: Path) -> list[float]:
    lines = (json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines())
    return [line["lm_loss"] for line in lines]


def test_a_run_in_epochs_is_the_run_of_as_many_iterations(cli: Any, tmp_path: Path) -> None:
    """The run has seven and a half samples, in batches of two."""
    code, text = cli(*EPOCHS, "train.exit_interval=3", ranks=1)
    assert code == 0, text
    line = "train.train_epochs=1.5: 7.5 samples (5 an epoch), 4 iterations of 2, the last one with 0.5 samples more"
    assert line in text and "run: 1.6 epochs" in text
    code, text = cli(*EPOCHS, ranks=1)
    assert code == 0 and "resumed from iteration 3" in text, text
    run = tmp_path / "run"
    written = yaml.safe_load((run / "config.yaml").read_text())
    assert (written["train"]["train_iters"], written["train"]["train_epochs"]) == (4, None)
    assert written["scheduler"]["lr_decay_iters"] == 4
    run.rename(tmp_path / "epochs")
    code, text = cli(*EPOCHS[:1], *EPOCHS[2:3], "train.train_iters=4", *EPOCHS[4:], ranks=1)
    assert code == 0, text
    assert losses(tmp_path / "epochs") == losses(run)
    assert cli(*EPOCHS, ranks=1)[1].count("nothing to do: already at iteration 4") == 1
    # More epochs, as more iterations, need a choice of the schedule.
    longer = (*EPOCHS, "train.train_epochs=3")
    code, text = cli(*longer, ranks=1)
    assert code == 2 and "train.train_iters is 8 here and 4 in the checkpoint" in text, text
    code, text = cli(*longer, "scheduler.override_opt_param_scheduler=true", ranks=1)
    assert code == 0 and "iteration 8 of 8" in text, text
    # An evaluation needs no length.
    code, text = cli(*EPOCHS, "train.skip_train=true", "validation.eval_iters=1", ranks=1)
    assert code == 0 and "validation loss at iteration 8" in text and "epoch" not in text.split("data: ")[0], text


def test_ranks_count_the_same_epochs_and_check_the_schedule_again(cli: Any, tmp_path: Path) -> None:
    long = "x" * 40
    (tmp_path / "a.jsonl").write_text(f'{{"text": "one"}}\n{{"text": "two"}}\n{{"text": "{long}"}}\n')
    data = ("dataset.kind=jsonl", f"dataset.data_path={tmp_path}/a.jsonl", "dataset.split='1,0,0'")
    packs = ("model.sequence_packing_scheduler=dp_balanced", *data, "train.train_epochs=3", "train.train_iters=null")
    code, text = cli(*packs, "scheduler.lr_decay_style=WSD", "scheduler.lr_wsd_decay_iters=9")
    assert code == 2 and "scheduler.lr_wsd_decay_iters=9: must be from 1 to" in text, text
    code, text = cli(*packs, "scheduler.lr_warmup_iters=0", "dataset.too_long=keep_start")
    assert code == 0 and "9 samples (3 an epoch), 5 iterations of 2" in text, text
    assert text.count("dataset.too_long=keep_start: cut 1 documents") == 1, text  # the data are opened twice


@pytest.mark.parametrize(
    ("overrides", "fix"),
    [
        (["train.train_epochs=2", "train.train_iters=7"], "train.train_iters=null, or train.train_epochs=null"),
        (["train.train_epochs=2", "train.train_iters=null", "train.train_samples=80"], "train.train_epochs=null"),
        (["train.train_iters=null"], "train.train_iters=100, or train.train_epochs=1"),
        (["train.train_epochs=0", "train.train_iters=null"], "train.train_epochs="),
    ],
)
def test_one_length_is_given(overrides: list[str], fix: str) -> None:
    found = check(load_recipe("llama_tiny_p2p_pretrain_config", overrides), 4)
    assert next(violation.fix for violation in found if violation.field.startswith("train.train_")).startswith(fix)


def test_a_length_in_epochs_passes_the_rules_before_the_data_are_open() -> None:
    words = ["train.train_epochs=2", "train.train_iters=null", "scheduler.lr_warmup_fraction=0.1"]
    config = load_recipe("llama_tiny_p2p_pretrain_config", [*words, "scheduler.lr_warmup_iters=0"])
    assert check(config, 4) == []
