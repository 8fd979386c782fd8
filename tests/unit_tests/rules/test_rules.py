"""The rule table: its examples, the reference, and the page.

Its example breaks each entry, the reference is covered, and the page is current.
"""

import dataclasses
import re
import time
from pathlib import Path

import pytest

from megatron_cp.common.errors import ConfigError
from megatron_cp.config.recipes import load_recipe
from megatron_cp.config.run_config import RunConfig
from megatron_cp.config.schema import field_paths, section_names
from megatron_cp.rules import RULES, check, check_or_raise
from megatron_cp.rules.base import SECTIONS, order
from megatron_cp.rules.document import PATH, SILENT_UPSTREAM, document
from megatron_cp.rules.explain import EXAMPLE_RECIPE, OTHER_CHECKS, example_violations, explain

TESTS = Path(__file__).parents[1]

# Constraint without a rule -> its row of the page: title, what happens, upstream, test.
OTHERS = {
    id: cells.split(" | ")
    for id, cells in re.findall(
        r"^\| <a id=\"\w+\"></a>([A-K]\d+) \| (.*) \|$",
        (PATH.parent / "constraints_without_rules.md").read_text(),
        re.M,
    )
}

# The sections of the reference collection and how many constraints each has.
REFERENCE = {"A": 14, "B": 12, "C": 17, "D": 11, "E": 19, "F": 16, "G": 8, "H": 13, "I": 13}

# The wording of megatron-core, Transformer Engine or Megatron-Bridge for the same rule.
UPSTREAM_WORDING = {
    "A2": "world_size (4) is not divisible by 8",
    "A3": "is not divisible by expert_tensor_model_pipeline_parallel size (3)",
    "A4": "num_attention_heads (6) must be a multiple of tensor_model_parallel_size (4)",
    "A5": "num_query_groups (3) must be a multiple or divisor of tensor_model_parallel_size (2)",
    "A6": "is not divisible by micro batch size (8) times data parallel size (1)",
    "A7": "must be divisible by eval_micro_batch_size * eval_data_parallel_size (16 * 1 = 16)",
    "A8": "the data parallel size of the attention and moe layers must be the same",
    "A9": "Cannot use sequence parallelism without tensor parallelism",
    "A15": "num_layers=4 should be divisible by config.pipeline_model_parallel_size=3",
    "A16": "pipeline-model-parallel size should be greater than 1 with interleaved schedule",
    "A17": "should be 0, or larger than or equal to the pipeline-parallel size",
    "A18": "num_moe_experts must be non None to use expert-parallel",
    "B1": "Sequence length must be divisible by 2 * context parallel size if context parallel is used",
    "B2": "First dimension of the tensor should be divisible by tensor parallel size",
    "B3": "Please ensure sequence length configuration in model config and dataset config match.",
    "C1": "Unsupported communication type: ring",
    "C3": "Length of cp_comm_type (2) must equal num_layers (4)",
    "C4": "hierarchical_context_parallel_sizes must be set when cp_comm_type contains 'a2a+p2p'",
    "C5": "Product of hierarchical_context_parallel_sizes [2, 4] (=8) must equal context_parallel_size (=4).",
    "C6": "requires cp_group = [a2a_cp_group, p2p_cp_group]",
    "D1": "cp_comm_type='a2a' requires num_heads % cp_size == 0",
    "D7": "nheads must be evenly divisible by tp_size * cp_size",
    "E13": "No dot product attention backend is available",
    "E15": "Cross Entropy Fusion is currently not deterministic",
    "G1": "Cannot average in collective when calculating per-token loss!",
    "H6": "world size (4) is not divisible by eval model parallel size (3)",
    "K7": 'recompute_method must be "block" or "uniform"',
}

# Concrete numbers that the fix must name.
FIXES = {
    "A2": "start 8 ranks",
    "A6": "train.global_batch_size=8, or train.global_batch_size=16",
    "A13": "model.cp_comm_type=p2p",
    "A15": "model.num_layers=3, or model.num_layers=6",
    "B1": "dataset.seq_length=248, or dataset.seq_length=256",
    "B2": "dataset.seq_length=256, or dataset.seq_length=264",
    "C1": "model.cp_comm_type=p2p",
    "C4": "[2,2]",
    "D1": "[2,2]",
    "D2": "model.cp_comm_type=p2p",
    "H14": "model.max_seqlen_per_dp_cp_rank=64",
}


@pytest.mark.parametrize("rule", RULES.values(), ids=lambda rule: rule.id)
def test_the_example_breaks_the_rule(rule):
    found = [v for v in example_violations(rule.id) if v.rule == rule.id]
    assert found, "the example keeps the rule"
    assert found[0].severity == rule.severity
    assert UPSTREAM_WORDING.get(rule.id, "") in found[0].message
    assert FIXES.get(rule.id, "") in found[0].fix
    for violation in found:
        assert violation.message and violation.field and violation.fix, violation
        assert not violation.message.endswith(".") or rule.id in UPSTREAM_WORDING


def test_the_length_of_a_list_of_transports_is_reported_in_both_wordings():
    (found,) = [v for v in example_violations("C3") if v.rule == "C3"]
    assert "Length of cp_comm_type (2) should equal to the total number of transformer layers (4)" in found.message


def test_the_number_of_layers_includes_the_embedding():
    overrides = ["model.pipeline_model_parallel_size=2", "model.account_for_embedding_in_pipeline_split=true"]
    (found,) = [v for v in check(load_recipe(EXAMPLE_RECIPE, overrides), 8, environment="cpu") if v.rule == "A15"]
    assert found.message.startswith("num_layers=5 should be divisible by config.pipeline_model_parallel_size=2")


@pytest.mark.parametrize("rule", RULES.values(), ids=lambda rule: rule.id)
def test_the_field_of_a_violation_is_a_setting(rule):
    settings = {*field_paths(RunConfig), *section_names(RunConfig)}
    for violation in example_violations(rule.id):
        assert violation.field in settings or violation.field.startswith("env_vars."), violation.field


def test_the_examples_recipe_keeps_every_rule():
    config = load_recipe(EXAMPLE_RECIPE)
    assert check(config, 4, environment="cpu") == []
    assert check_or_raise(config, 4, environment="cpu") == []


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("4",), "world_size must be an integer, got '4'"),
        ((None,), "world_size must be an integer, got None"),
        ((True,), "world_size must be an integer, got True"),
        ((4, "8"), "gpus_per_node must be an integer, got '8'"),
    ],
)
def test_numbers_of_ranks_are_integers(arguments, message):
    with pytest.raises(ValueError, match=message):
        check(load_recipe(EXAMPLE_RECIPE), *arguments)


def test_no_constraint_of_the_reference_is_lost():
    reference = {f"{section}{number}" for section, count in REFERENCE.items() for number in range(1, count + 1)}
    assert len(reference) == 123
    assert reference <= set(RULES) | set(OTHERS)
    assert not set(RULES) & set(OTHERS)
    assert set(RULES) >= SILENT_UPSTREAM
    assert {id[0] for id in {*RULES, *OTHERS}} == set(SECTIONS)


@pytest.mark.parametrize("id", sorted({**RULES, **OTHER_CHECKS}, key=order))
def test_every_rule_id_is_explained(id):
    text = explain(id.lower())
    assert text.startswith(f"{id} (")
    assert id in OTHERS or f" {id}: " in text.partition("example:")[2]


@pytest.mark.parametrize("row", OTHERS.values(), ids=OTHERS)
def test_the_test_that_a_constraint_names_exists(row):
    path, _, name = row[-1].strip("` |").partition("::")
    assert not name or f"def {name}(" in (TESTS.parent / path).read_text(encoding="utf-8")
    assert name or "silent" not in row or "no modelopt" in row[1].lower() or re.search(r"\b[A-K]\d+\b", row[1])


def test_the_page_is_current():
    assert PATH.read_text(encoding="utf-8") == document(), "run: python -m megatron_cp.rules.document"


def test_all_at_once_errors_first():
    overrides = ["model.hierarchical_context_parallel_sizes=[1,3]", "dataset.seq_length=250", "model.window_size=[8,4]"]
    config = load_recipe(EXAMPLE_RECIPE, [*overrides, "model.sequence_parallel=true"])
    violations = check(config, 6, environment="cpu")
    assert {"A2", "A9", "B1", "C5", "K12"} <= {v.rule for v in violations}
    severities = [v.severity for v in violations]
    assert severities == sorted(severities)
    with pytest.raises(ConfigError) as caught:
        check_or_raise(config, 6, environment="cpu")
    assert caught.value.violations == violations
    lines = str(caught.value).splitlines()
    assert any(line.startswith("error B1: dataset.seq_length=250: Sequence length") for line in lines)
    assert "    fix: dataset.seq_length=248, or dataset.seq_length=256" in lines


def test_a_wrong_type_in_a_hand_made_configuration_is_reported_not_raised():
    config = load_recipe(EXAMPLE_RECIPE)
    config.model.context_parallel_size = "four"
    config.model.cp_comm_type = 3
    found = check(config, 4, environment="cpu")
    assert [(v.rule, v.field) for v in found] == [("K2", "model.cp_comm_type"), ("K2", "model.context_parallel_size")][
        ::-1
    ]


@pytest.mark.parametrize("value", [-3, 0])
def test_no_check_crashes_on_sizes_that_make_no_sense(value):
    original = load_recipe(EXAMPLE_RECIPE)
    for field in dataclasses.fields(original.model):
        if type(getattr(original.model, field.name)) is int:
            model = dataclasses.replace(original.model, **{field.name: value})
            for world_size in (4, 0):
                assert isinstance(
                    check(dataclasses.replace(original, model=model), world_size, environment="gpu"), list
                )


def test_mamba_layers_need_variables_to_be_deterministic():
    hybrid = ("model.architecture=hybrid", "model.hybrid_layer_pattern=M*M*", "model.deterministic_mode=true")
    wanted = ("MAMBA_DETERMINISTIC", "CAUSAL_CONV1D_DETERMINISTIC")

    def named(environment, *overrides):
        found = check(load_recipe(EXAMPLE_RECIPE, [*hybrid, *overrides]), 4, environment=environment)
        return {v.field for v in found if v.rule == "E15"} & {f"env_vars.{name}" for name in wanted}

    assert len(named("gpu")) == 2
    assert not named("gpu", *(f"env_vars.{name}='1'" for name in wanted))
    assert not named("cpu")


def test_a_thousand_ranks_are_checked_in_milliseconds():
    overrides = ["model.hierarchical_context_parallel_sizes=[1,4]", "model.cp_comm_type=a2a+p2p"]
    config = load_recipe("llama31_405b_pretrain_config", overrides)
    seconds = []
    for _ in range(5):
        start = time.process_time()
        violations = check(config, 1024, environment="gpu")
        seconds.append(time.process_time() - start)
    assert {v.rule for v in violations} == {"C8", "D3"}
    assert min(seconds) < 0.05
