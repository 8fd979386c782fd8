"""No false reject: each rule's own example fails without the rule.

It ends in an error or trains something else. This file lists the effect of each error rule's example without the
rule, as far as a machine without a GPU can try it. A new rule needs an entry.
"""

import re
from pathlib import Path
from typing import Any

import pytest

from megatron_cp.config.recipes import load_recipe
from megatron_cp.config.run_config import RunConfig
from megatron_cp.config.single_rank import on_single_rank
from megatron_cp.data.samples.datasets import build_datasets
from megatron_cp.data.text.tokenizers import build_tokenizer
from megatron_cp.rules import RULES, check
from megatron_cp.training.open_steps import open_steps
from megatron_cp.training.setup import setup
from megatron_cp.verify.compare import compare_with_single_rank
from megatron_cp.verify.reduce import ADAM_EPS
from megatron_cp.verify.report import diagnose
from tests.ranks import RanksFailed, run_ranks

WRONG = {
    "G2": "losses of the forward pass match, but .* gradients .* differ",
    "K5": "the first forward pass differs in",  # bf16 overrides fp32 without a message
    "K21": "losses of the forward pass match, but .* gradients .* differ",
    # A router that runs again by itself balances over the ranks of the configured group.
    "H17": "token losses match, but router losses differ",
    "K22": "the first forward pass differs in",
    "K33": "token losses match, but router losses differ",
    "E15": "the first forward pass differs in",  # fused cross-entropy in float32, as K21
}
ERROR = {
    "A1": "AssertionError",
    "A2": "world size 4 is not divisible by tp \\* pp \\* cp = 8",
    "A3": "num_experts|is not divisible by etp",
    "A4": "num_attention_heads \\(6\\) must be a multiple of tensor_model_parallel_size \\(4\\)",
    "A5": "num_query_groups|shape|must be a multiple or divisor",
    "A7": "the data ends after",
    "A8": "the data parallel size of the attention and moe layers must be the same",
    "A9": "sequence parallelism",
    "A15": "divisible",
    "A16": "interleaved|pipeline",
    "A17": "micro-?batches",
    "A18": "num_moe_experts must be non None to use expert-parallel",
    "A19": "size of tensor a \\(129\\) must match the size of tensor b \\(128\\)",  # the rows of one rank
    "B1": "is not divisible by 2 \\* cp_size = 8",
    "B2": "First dimension of the tensor should be divisible by tensor parallel size",
    "B3": "the batches of step 1 cannot be used",
    "B4": "index out of range",
    "C1": "comm_type 'ring' is unknown",
    "C3": "Length of cp_comm_type",
    "C4": "needs hierarchical_context_parallel_sizes",
    "C5": "multiply to 8, not to the context parallel size 4",
    "C6": "needs hierarchical_context_parallel_sizes=\\[a2a, p2p\\]",
    "C7": r"hierarchical\[0\] must be an integer of at least 1",
    "D1": "query has 6 heads on this rank, which are not divisible",
    "D2": "query has 9 heads on this rank, which are not divisible",
    "D14": "don.t multiply up to the size of dim 2",
    "D15": "shape|size of tensor",
    "E11": "attention_dropout=0.1 is not supported",
    "F18": "which is not divisible by 2 \\* context-parallel size",
    "G1": "Cannot average in collective when calculating per-token loss!",
    "H6": "world size 4 is not divisible by tp \\* pp \\* cp = 3",
    "H8": "min_cp_size=8: must be between 1 and the number of ranks",
    "H19": "index out of range",
    "H22": "allgather does not support variable sequence length",
    "H14": "tokens does not fit: 4 ranks of max_seqlen_per_rank=8 hold 32 tokens",
    "I9": "AssertionError",
    "I14": "recompute_num_layers must be 1 for MTP recompute",
    "K7": "recompute_method",
    "K9": "Only Adam",
    "K10": "Error",
    "K11": "dataset.data_path: is not set",
    "K12": "window_size must be two integers",
    "K13": "gradients are not finite",
    "K14": "a hybrid model needs layers",
    "K15": "selected index k out of range",
    "K16": "dropout probability has to be between 0 and 1",
    "K17": "must match the size of tensor",
    "K18": "is invalid for input of size",
    "K19": "Error",  # multi-token prediction of hybrid models is not built
    "K55": "'<=' not supported",
    "K24": "95 is not divisible by 2",
    "K25": "KeyError",
    "K29": "invalid tensor size",
    "K28": "KeyError",  # megatron-core's optimizer looks for parameters on a GPU
    "K26": "lognorml: cannot be read",
    "K27": "Fix: dataset.text_key=",
    "K30": "non-negative",
    "K34": "apply_rope_fusion is not available",
    "K31": "97 is not divisible by 2",
    "K58": "weight",
    "K69": "share 0 must be above zero",
    "K37": "mat1 and mat2 shapes cannot be multiplied",
    "K61": "Cannot specify both num_buckets and bucket_size",
    "K62": r"Length of no_rope list \(2\) must match the number of layers \(4\)",
}
# Runs, and is right about what it runs, which is not what was asked for.
IGNORED = {
    "A6": "samples that fill no micro batch on all replicas are not trained, alike under every layout",
    "D12": "the layer is narrower than asked: five heads of 48 are 240 of 256 channels",
    "D7": "ranks with unequal shares of Mamba's heads compute the same; the rule keeps their work equal",
    "C9": "no layer uses the sizes: the run is a plain ring, as if they were not set",
    "E8": "no mask is made or read: documents see each other as before",
    "E9": "RoPE does not read position_ids: they count on over documents",
    "H15": "the scheduler's name says nothing: packs of the configured size, where dynamic ones were asked for",
    "H21": "only evaluation packs, and counts on where training starts again",
    "I2": "what is predicted is in sight: the loss falls, alike under every layout, and nothing is learnt",
    "K6": "the process group that runs already is used; torch.distributed refuses to start with NCCL and no GPU",
    "K8": "without a GPU our own attention is used whatever the name says",
    "K40": "an empty range profiles nothing, without a word",
    "K41": "only the loop profiles, and it ends with an error of torch.cuda",
    "K42": "only the loop logs, and it warns and goes on without",
    "K43": "only the loop logs",
    "K50": "only the loop saves, and keeps multiples of both",
    "K51": "only the loop saves, and takes 0 for never",
    "K53": "only the loop saves, into the current folder",
    "K56": "the samples are not read: the schedule has the length in iterations",
    "K36": "the last token is looked for, which is none of the data's: all tokens have a loss, as without the setting",
    "K54": "the path is not looked at: the run learns random tokens",
    "K32": "mock data has every part whatever the split",
    "K60": "the tests have the package that the example lacks, and Muon trains",
    "K63": "CPUs compute what is asked for; fused kernels of GPUs would leave it out",
    "K64": "one norm is made of the two, and the weights of the other do not exist",
    "K65": "trains as it says; what it saves cannot be resumed under another layout",
    "E22": "the norm of queries and keys undoes the clipping: their weights shrink, and the scores stay",
    "K70": "the samples are pieces of fixed length: a mean over them is computed, and says nothing about documents",
    "K59": "variables are set by the command: the comparison sets none",
}
NOT_TRIED = {
    "H18": "every balancing loss depends on which samples share a microbatch: no comparison can tell right from wrong",
}
# Examples that need more ranks or other data than a test has, as another run: world size and overrides.
ONE_CP_RANK = [
    "model.context_parallel_size=1", "model.cp_comm_type=p2p", "model.hierarchical_context_parallel_sizes=null",
]  # fmt: skip
DYNAMIC = [
    "model.dynamic_context_parallel=true", "model.max_seqlen_per_dp_cp_rank=16", "dataset.mock_lengths=lognormal",
    "model.dynamic_context_parallel_calibration_iters=0", "train.global_batch_size=12",
    "model.cp_comm_type=p2p", "model.hierarchical_context_parallel_sizes=null",
]  # fmt: skip
SMALLER: dict[str, tuple[int, list[str]]] = {
    "A4": (4, [
        *ONE_CP_RANK, "model.num_attention_heads=6", "model.num_query_groups=2", "model.tensor_model_parallel_size=4",
        "model.kv_channels=16",
    ]),
    "A7": (4, ["validation.eval_iters=1", "validation.eval_global_batch_size=9", "train.micro_batch_size=2"]),
    "A15": (3, [*ONE_CP_RANK, "model.pipeline_model_parallel_size=3"]),
    "D12": (4, [
        "model.architecture=hybrid", "model.hybrid_layer_pattern='M*M*'", "model.mamba_head_dim=48",
        "model.mamba_num_groups=1", *ONE_CP_RANK,
    ]),
    "H14": (4, [
        "model.dynamic_context_parallel=true", "model.max_seqlen_per_dp_cp_rank=8", "dataset.mock_lengths=bimodal",
    ]),
    "H17": (4, [
        *DYNAMIC, "model.context_parallel_size=1", "model.num_moe_experts=4", "model.moe_aux_loss_coeff=1.0",
        "model.recompute_granularity=selective", "model.recompute_modules=[moe]",
    ]),
    "H19": (4, [
        *DYNAMIC, "model.context_parallel_size=1", "model.multi_latent_attention=true", "model.num_query_groups=8",
        "model.num_attention_heads=8",
    ]),
    "K25": (4, ["dataset.kind=mock_documents"]),
    "K29": (4, [
        *ONE_CP_RANK, "model.tensor_model_parallel_size=2", "model.sequence_parallel=true", "model.num_moe_experts=4",
        "model.expert_model_parallel_size=2", "train.micro_batch_size=2", "model.moe_aux_loss_coeff=0.01",
    ]),
    "K33": (4, [
        "model.context_parallel_size=2", "model.num_moe_experts=4", "train.micro_batch_size=2",
        "model.moe_router_load_balancing_type=global_aux_loss", "model.moe_aux_loss_coeff=1.0", *ONE_CP_RANK[1:],
    ]),
}  # fmt: skip
BASE = [
    "dataset.kind=mock", "dataset.mock_masked_fraction=0.4", "dataset.seq_length=64", "train.micro_batch_size=1",
    "train.global_batch_size=4", "train.train_iters=2", "scheduler.lr_warmup_iters=0", "model.init_method_std=0.15",
    "mixed_precision.fp32=true", "dist.attention_probe=false", "dist.distributed_timeout_minutes=0.4",
    f"optimizer.adam_eps={ADAM_EPS}",
]  # fmt: skip


def on_a_cpu() -> list[str]:
    return [id for id, rule in RULES.items() if rule.severity == "error" and rule.example.environment == "cpu"]


def loaded(overrides: list[str]) -> RunConfig:
    base = [*BASE]
    if any("sequence_packing_scheduler=" in text or "dynamic_context_parallel=true" in text for text in overrides):
        base += ["dataset.kind=mock_documents"]
    return load_recipe("llama_tiny_pretrain_config", [*base, *overrides])


def unchecked(overrides: list[str]) -> tuple[bool, str]:
    config = loaded(overrides)
    result = compare_with_single_rank(config, on_single_rank(config))
    return result.equal, " ".join(diagnose(result))


def evaluated(overrides: list[str]) -> tuple[bool, str]:
    """Do as :func:`unchecked` does, on samples as evaluation deals them."""
    config = loaded(overrides)
    tokenizer = build_tokenizer(config.tokenizer)
    run = setup(config, tokenizer.vocab_size)
    next(open_steps(run, build_datasets(config.dataset, tokenizer, 8).train, 0, training=False))
    return True, ""


def outcome(rule_id: str) -> tuple[str, str]:
    example = RULES[rule_id].example
    world_size, overrides = SMALLER.get(rule_id, (example.world_size, list(example.overrides)))
    trial = evaluated if rule_id in ("A7", "H6") else unchecked
    try:
        equal, reported = run_ranks(trial, world_size, overrides, timeout=40)[0]
    except RanksFailed as failure:
        return "error", str(failure)
    if "the layout did not run" in reported:
        return "error", reported
    return ("equal" if equal else "wrong"), reported


def test_every_rule_that_a_cpu_can_break_is_entered() -> None:
    assert set(on_a_cpu()) == {*WRONG, *ERROR, *IGNORED, *NOT_TRIED}


@pytest.mark.parametrize("rule_id", ["C4", "G2", "C9"])
def test_silent_ones_upstream(rule_id: str) -> None:
    check_outcome(rule_id)


@pytest.mark.slow
@pytest.mark.parametrize("rule_id", [id for id in on_a_cpu() if id not in NOT_TRIED])
def test_without_the_rule(rule_id: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "chats.jsonl").write_text('{"prompt": "What is it?", "response": "A test."}\n' * 50)
    monkeypatch.chdir(tmp_path)
    check_outcome(rule_id)


@pytest.mark.parametrize("rule_id", SMALLER)
def test_a_smaller_run_breaks_the_same_rule(rule_id: str) -> None:
    world_size, overrides = SMALLER[rule_id]
    config = loaded(overrides)
    assert [v.rule for v in check(config, world_size, environment="cpu") if v.severity == "error"] == [rule_id]


def check_outcome(rule_id: str) -> None:
    kind, reported = outcome(rule_id)
    expected: Any = "wrong" if rule_id in WRONG else "error" if rule_id in ERROR else "equal"
    assert kind == expected, reported
    assert re.search((WRONG | ERROR).get(rule_id, ""), reported), reported[-1500:]
