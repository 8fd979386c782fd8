"""``model.memory_savings=auto`` takes the fastest savings that fit a GPU."""

from __future__ import annotations

from dataclasses import replace

import pytest

from megatron_cp.config.recipes import list_recipes, load_recipe
from megatron_cp.estimate.device import load_device
from megatron_cp.estimate.time import time_estimate
from megatron_cp.rules import Environment, check
from megatron_cp.rules.job import assumed_job
from megatron_cp.rules.memory import NEARLY_FULL, choose_savings, estimated, possible_head_groups, savings
from megatron_cp.rules.remedies import Case
from megatron_cp.rules.resolve import resolve_auto

AUTO = "model.memory_savings=auto"
WIDE = ["model.tensor_model_parallel_size=4", "model.sequence_parallel=true", "train.global_batch_size=8"]


def case_of(length: int, *overrides: str, device: str = "gpu") -> Case:
    """Return Llama 3.1 8B on eight ranks with samples of ``length`` tokens."""
    lengths = [f"dataset.seq_length={length}", f"model.max_position_embeddings={length}"]
    config = load_recipe("llama31_8b_pretrain_config", [AUTO, *WIDE, *lengths, *overrides])
    return Case(config, 8, 8, Environment.of(device))


def share(case: Case) -> float:
    """Return the estimated peak as a share of what may be used of a GPU."""
    found = estimated(case)
    assert found is not None and case.environment.gpu_memory_gib is not None
    return found.total / (NEARLY_FULL * case.environment.gpu_memory_gib * 2**30)


@pytest.mark.parametrize("length", [2**15, 2**17, 2**18, 2**19, 2**20])
def test_the_fastest_savings_that_fit_are_taken(length: int) -> None:
    case = case_of(length)
    chosen, text = choose_savings(case)
    fitting = []
    for step in ({}, *savings(case.config.model, length // 2, 32, True)):
        fields = {name.removeprefix("model."): value for name, value in step.items()}
        config = replace(case.config, model=replace(case.config.model, memory_savings="off", **fields))
        one = replace(case, config=config)
        if share(one) <= 1:
            fitting.append(one)
    as_it_is = fitting[0] if fitting[0].config.model == replace(case.config.model, memory_savings="off") else None
    assert chosen == (as_it_is or min(fitting, key=seconds))
    assert chosen in fitting
    assert AUTO in text


def seconds(case: Case) -> float:
    """Return the estimated step time on an H100."""
    return time_estimate(assumed_job(case), load_device("h100")).seconds


def test_half_of_the_layers_is_recomputed_where_all_mlps_take_longer() -> None:
    """Recomputation of MLPs comes before it, and fits too."""
    config = load_recipe("gemma3_1b_pretrain_config", [AUTO, "model.recompute_granularity=null"])
    chosen, _ = choose_savings(Case(config, 1, 1, Environment.of("gpu")))
    assert (chosen.config.model.recompute_method, chosen.config.model.recompute_num_layers) == ("block", 13)
    assert share(chosen) <= 1


def test_more_is_saved_for_longer_samples() -> None:
    short, long = (choose_savings(case_of(length))[0].config.model for length in (8192, 5 * 2**18))
    assert (short.recompute_granularity, short.mlp_chunk_size, short.offload_layer_inputs) == ("selective", None, False)
    assert (long.recompute_granularity, long.mlp_chunk_size, long.offload_layer_inputs) == ("full", 8192, True)


@pytest.mark.parametrize(("tp", "groups"), [(4, 2), (2, 2)])
def test_attention_is_divided_at_last(tp: int, groups: int) -> None:
    """Each all-to-all rank keeps whole heads of a group."""
    layout = [f"model.tensor_model_parallel_size={tp}", f"model.context_parallel_size={8 // tp}"]
    alone = ["model.cp_comm_type=a2a", "train.global_batch_size=1", "train.micro_batch_size=1"]
    case = case_of(3 * 2**20, *layout, *alone)
    chosen, text = choose_savings(case)
    assert chosen.config.model.attention_head_groups == groups and f"model.attention_head_groups={groups}" in text
    assert chosen.config.model.offload_layer_inputs and share(chosen) <= 1
    assert not [each for each in check(chosen.config, 8, 8, "gpu") if each.severity == "error"]


def test_six_million_tokens_fit_eight_gpus() -> None:
    """Each of four groups has a query head, and projects the key/value head again."""
    layout = ["model.tensor_model_parallel_size=8", "model.context_parallel_size=1"]
    case = case_of(6 * 2**20, *layout, "train.global_batch_size=1", "train.micro_batch_size=1")
    chosen, _ = choose_savings(case)
    assert share(chosen) <= 1 and chosen.config.model.attention_head_groups == 4
    assert not [each for each in check(chosen.config, 8, 8, "gpu") if each.severity == "error"]


def test_latent_attention_is_not_divided() -> None:
    model = case_of(2**17).config.model
    assert possible_head_groups(model, 2) == [2, 4, 8, 16] and possible_head_groups(model, 1, [8]) == [2, 4]
    assert possible_head_groups(model, 8) == [2, 4] and possible_head_groups(model, 16) == []
    assert possible_head_groups(replace(model, multi_latent_attention=True), 2) == []


def test_what_does_not_fit_with_all_savings_is_refused() -> None:
    case = case_of(2**24)
    chosen, _ = choose_savings(case)
    assert chosen.config.model.offload_layer_inputs
    assert "K66" in {violation.rule for violation in check(case.config, 8, 8, "gpu")}


def test_a_cpu_saves_nothing_and_names_the_reason() -> None:
    case = case_of(2**20, device="cpu")
    config, text = resolve_auto(case.config, 8, 8, case.environment)
    assert config == replace(case.config, model=replace(case.config.model, memory_savings="off"))
    assert text == f"{AUTO} saves nothing: the memory of a rank is not known"


def test_the_choice_follows_that_of_the_transport() -> None:
    case = case_of(2**18, "model.context_parallel_size=2", "model.cp_comm_type=auto")
    config, text = resolve_auto(case.config, 8, 8, case.environment)
    assert text is not None
    first, second = text.splitlines()
    assert first.startswith("model.cp_comm_type=auto is ") and second.startswith(AUTO)
    assert config.model.memory_savings == "off" and "auto" not in config.model.transports


FAST = "llama31_8b_pretrain_config"
RECIPES = [
    pytest.param(name, marks=[] if name == FAST else pytest.mark.slow)
    for name in sorted(list_recipes())
    if "_tiny_" not in name
]


@pytest.mark.parametrize("times", [4, 64])
@pytest.mark.parametrize("recipe", RECIPES)
def test_no_choice_breaks_a_rule(recipe: str, times: int) -> None:
    """Only the memory may be refused: a length may need more than all savings."""
    length = load_recipe(recipe).model.seq_length or 0
    longer = [f"dataset.seq_length={length * times}", f"model.max_position_embeddings={length * times}"]
    pieces = "model.mlp_chunks_for_training=4"
    for overrides in (longer, [*longer, pieces]):
        ranks = load_recipe(recipe).recipe_world_size or 1
        found = [check(load_recipe(recipe, [*overrides, *each]), ranks, 8, "gpu") for each in ([], [AUTO])]
        without, with_savings = ({each.rule for each in some if each.severity == "error"} for some in found)
        assert with_savings <= without | {"K66"}


def test_layers_of_multi_token_prediction_are_recomputed_one_by_one() -> None:
    model = replace(case_of(2**17).config.model, mtp_num_layers=1)
    methods = {step["model.recompute_method"] for step in savings(model, 2**17, 32, True)}
    assert methods == {None, "uniform"}
