"""Rules on vocabulary, schedule and groups report only where they apply.

They are on the padded vocabulary (A19), the schedule (I9) and dynamic groups (H23).
"""

from __future__ import annotations

import pytest

from megatron_cp.config.recipes import load_recipe
from megatron_cp.dynamic_cp import PRESETS, schedule
from megatron_cp.dynamic_cp.analysis.report import cp_sizes
from megatron_cp.dynamic_cp.distributions import sample_lengths
from megatron_cp.rules import check
from megatron_cp.rules.remedies import parse_fix

TP3 = ["parallel=none", "model.num_attention_heads=6", "model.num_query_groups=3", "model.kv_channels=16"]
TP3 += ["model.tensor_model_parallel_size=3", "model.hidden_size=96"]


def found(overrides: list[str], rule: str, world_size: int) -> list[tuple[str, str, str]]:
    violations = check(load_recipe("llama_tiny_pretrain_config", overrides), world_size, environment="cpu")
    return [(v.severity, v.message, v.fix) for v in violations if v.rule == rule]


@pytest.mark.parametrize(
    ("vocabulary", "rows"),
    [
        (["model.vocab_size=255"], "to 384 rows here and to 256 on one rank"),
        (["tokenizer.tokenizer_type=ByteLevelTokenizer"], None),  # 257: 384 rows in any case
        (["model.vocab_size=380"], None),
        (["model.vocab_size=255", "model.make_vocab_size_divisible_by=384"], None),
        (["tokenizer.tokenizer_type=NullTokenizer", "tokenizer.vocab_size=255"], "to 384 rows here"),
        (["tokenizer.tokenizer_type=ByteLevelTokenizer", "tokenizer.vocab_size=255"], None),  # which does not read it
        (["tokenizer.tokenizer_type=HuggingFaceTokenizer", "tokenizer.tokenizer_model=folder"], "to a multiple of 384"),
    ],
)
def test_a_vocabulary_that_tensor_parallelism_would_pad_otherwise(vocabulary: list[str], rows: str | None) -> None:
    reported = found([*TP3, *vocabulary], "A19", 3)
    if rows is None:
        assert not reported
    else:
        [(severity, message, fix)] = reported
        assert rows in message and "make_vocab_size_divisible_by=384 " in fix
        assert severity == ("warning" if "multiple" in rows else "error")


@pytest.mark.parametrize(
    ("schedule", "left"),
    [
        (["scheduler.lr_decay_iters=100"], 200),
        (["scheduler.lr_decay_iters=280"], None),
        (["scheduler.lr_decay_iters=100", "scheduler.lr_decay_style=constant"], None),
        (["scheduler.lr_decay_iters=1000"], None),
        ([], None),
    ],
)
def test_a_run_that_is_longer_than_its_schedule(schedule: list[str], left: int | None) -> None:
    reported = found([*schedule, "train.train_iters=300"], "I9", 4)
    if left is None:
        assert not reported
    else:
        [(severity, message, fix)] = reported
        assert severity == "warning" and f"ends {left} iterations before" in message and "lr_decay_iters=300" in fix


def test_dynamic_groups_of_one_rank_warn_and_the_fix_widens_them():
    """The warning must follow from schedules of the recipe's own samples."""
    alone = ["model.dynamic_context_parallel=true", "model.context_parallel_size=1", "model.cp_comm_type=p2p",
             "model.hierarchical_context_parallel_sizes=null", "train.micro_batch_size=1",
             "dataset.seq_length=4096"]  # fmt: skip
    (warning,) = check(load_recipe("llama_tiny_pretrain_config", alone), 4, environment="cpu")
    assert warning.rule == "H23" and warning.severity == "warning" and "no gain over static packing" in warning.message
    sizes = []
    for more in ((), parse_fix(warning.fix)[0].overrides):
        config = load_recipe("llama_tiny_pretrain_config", [*alone, *more])
        assert check(config, 4, environment="cpu") == ([] if more else [warning])
        limit = config.model.max_seqlen_per_dp_cp_rank
        batches = [sample_lengths("documents", 64, 4096, seed) for seed in range(5)]
        sizes.append([set(cp_sizes(schedule(lengths, 4, limit, cost=PRESETS["h100_8b"]))) for lengths in batches])
    assert sizes[0] == 5 * [{1}] and all(max(each) > 1 for each in sizes[1])
