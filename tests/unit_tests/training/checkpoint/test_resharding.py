"""Resuming under another layout: the same samples and the same loss.

The samples have the same order. The loss is the same within float32's rounding.
"""

from contextlib import closing
from dataclasses import asdict
from pathlib import Path
from typing import Any

import pytest

from megatron_cp.common.errors import ConfigError
from megatron_cp.data.text.tokenizers import build_tokenizer
from megatron_cp.training.checkpoint.resume import check_fits
from megatron_cp.training.checkpoint.saver import load_checkpoint
from megatron_cp.training.open_steps import open_steps
from megatron_cp.training.setup import setup
from megatron_cp.training.step import train_step
from tests.packed_runs import BALANCED, DYNAMIC, lengths_file, packed_config, train_dataset
from tests.ranks import RanksFailed, run_ranks
from tests.training_runs import losses_of, save_checkpoint, tiny_config, train_losses, worst_difference
from tests.unit_tests.training.checkpoint.test_checkpoint import resume, save_after
from tests.unit_tests.training.layouts.cases import CP2, CP4, HCP, PP2, SP, TP2, VPP2, layers_for, over

DECENTRALIZED = {"dist__use_decentralized_pg": True}
FOUR_BY_ONE = {"model__cp_comm_type": "a2a+p2p", "model__hierarchical_context_parallel_sizes": [4, 1]}
HEADS = {"model__num_query_groups": 8}  # an all-to-all over four ranks needs four heads of each
EXPERTS = {
    "model__num_moe_experts": 4,
    "model__moe_ffn_hidden_size": 16,
    "model__moe_router_load_balancing_type": "none",  # a balancing loss depends on who shares a microbatch
}
SHARED = EXPERTS | {"model__moe_shared_expert_intermediate_size": 32, "model__moe_shared_expert_gate": True}
MIXED = SHARED | {"model__moe_layer_freq": [0, 0, 1, 1]}
BIASED = EXPERTS | {
    "model__moe_router_score_function": "sigmoid",
    "model__moe_router_enable_expert_bias": True,
    "model__moe_router_bias_update_rate": 0.1,
}
EP2 = {"model__expert_model_parallel_size": 2}
ETP1 = TP2 | SP | {"model__expert_tensor_parallel_size": 1}
PLAIN = {"optimizer__use_distributed_optimizer": False}
slow = pytest.mark.slow


@pytest.mark.parametrize(
    ("model", "before", "after"),
    [
        pytest.param({}, (4, CP4 | HCP), (4, CP4 | DECENTRALIZED | HCP), id="MPU to decentralized"),
        pytest.param({}, (4, CP4 | over("p2p")), (4, CP4 | HCP), id="p2p to a2a+p2p", marks=slow),
        pytest.param(HEADS, (4, CP4 | HCP), (4, CP4 | FOUR_BY_ONE), id="[2,2] to [4,1]", marks=slow),
        pytest.param({}, (4, CP4 | over("all_gather")), (1, {}), id="cp4 to cp1", marks=slow),
        pytest.param({}, (4, DECENTRALIZED | PP2 | CP2), (4, TP2 | CP2), id="decentralized pp to MPU tp", marks=slow),
        pytest.param({}, (4, {}), (4, CP4), id="dp4 to cp4", marks=slow),
        pytest.param({}, (4, PP2 | CP2), (4, PP2 | VPP2 | CP2), id="pp to vpp", marks=slow),
        pytest.param({}, (4, PP2 | VPP2 | CP2), (4, PP2), id="vpp to pp dp", marks=slow),
        pytest.param({}, (2, TP2), (4, TP2 | SP | CP2), id="tp to tp sp cp", marks=slow),
        pytest.param({}, (4, TP2 | SP | PP2), (2, CP2), id="tp sp pp to cp", marks=slow),
        pytest.param({"model__share_embeddings_and_output_weights": True}, (2, PP2), (2, CP2), id="tied", marks=slow),
        pytest.param(PLAIN, (2, CP2), (2, TP2), id="plain", marks=slow),
        pytest.param(EXPERTS, (2, {}), (2, CP2 | EP2), id="experts, each rank all, to spread"),
        pytest.param(EXPERTS, (2, EP2), (1, {}), id="experts, spread to one rank"),
        pytest.param(EXPERTS, (4, EP2 | ETP1), (2, PP2), id="experts, spread in tp to pp", marks=slow),
        pytest.param(EXPERTS, (1, {}), (2, ETP1), id="experts, whole in tp", marks=slow),
        pytest.param(EXPERTS, (4, PP2 | VPP2 | EP2), (2, ETP1), id="experts, spread to whole", marks=slow),
        pytest.param(SHARED, (2, EP2), (2, ETP1), id="shared experts, spread to whole in tp", marks=slow),
        pytest.param(BIASED, (2, EP2), (2, ETP1), id="biased experts, spread to whole in tp", marks=slow),
        pytest.param(MIXED, (4, PP2 | EP2), (4, PP2 | EP2), id="experts in some layers, a stage without"),
        pytest.param(MIXED, (4, PP2 | EP2), (2, ETP1), id="experts in some layers, a stage without to tp", marks=slow),
        pytest.param(MIXED, (2, PP2), (2, EP2), id="experts in some layers, whole to spread", marks=slow),
        pytest.param(MIXED, (1, {}), (4, PP2 | EP2), id="experts in some layers, to a stage without", marks=slow),
        pytest.param(
            MIXED | PLAIN, (4, PP2 | EP2), (4, PP2 | EP2), id="experts in some layers, plain, same", marks=slow
        ),
        pytest.param(MIXED | PLAIN, (4, PP2 | EP2), (1, {}), id="experts in some layers, plain", marks=slow),
        pytest.param(EXPERTS | PLAIN, (2, {}), (2, CP2 | EP2), id="experts, plain, to spread", marks=slow),
        pytest.param(EXPERTS | PLAIN, (2, EP2), (1, {}), id="experts, plain, to one rank", marks=slow),
    ],
)
def test_another_layout_resumes_with_the_same_losses(
    tmp_path: Path, model: dict[str, Any], before: tuple, after: tuple
) -> None:
    model = layers_for(model, before[1], after[1]) | model
    uninterrupted = run_ranks(train_losses, 1, model, 4)[0]
    run_ranks(save_after, before[0], model | before[1], str(tmp_path), 2)
    rest = run_ranks(resume, after[0], model | after[1], str(tmp_path), 2)[0]
    assert max(worst_difference(rest, uninterrupted[2:])) < 2e-6


def test_a_plain_optimizer_in_bf16_resumes_if_a_stage_has_no_experts(tmp_path: Path) -> None:
    """For an optimizer without parameters nothing is saved, and upstream looks for it."""
    first = {"model__moe_layer_freq": [1, 1, 0, 0], "mixed_precision__fp32": False, "mixed_precision__bf16": True}
    layout = MIXED | PLAIN | PP2 | EP2 | first
    uninterrupted = run_ranks(train_losses, 4, layout, 4)[0]
    run_ranks(save_after, 4, layout, str(tmp_path), 2)
    assert run_ranks(resume, 4, layout, str(tmp_path), 2)[0] == uninterrupted[2:]


BF16 = {"mixed_precision__fp32": False, "mixed_precision__bf16": True}
EMBEDDING_ALONE = PP2 | {"model__num_layers": 1, "model__account_for_embedding_in_pipeline_split": True}


@pytest.mark.parametrize(
    ("before", "after"),
    [
        pytest.param((2, EMBEDDING_ALONE), (2, EMBEDDING_ALONE), id="the same"),
        pytest.param((2, EMBEDDING_ALONE), (1, {"model__num_layers": 1}), id="to one rank", marks=slow),
        pytest.param((1, {"model__num_layers": 1}), (2, EMBEDDING_ALONE), id="from one rank", marks=slow),
    ],
)
def test_a_plain_optimizer_in_bf16_resumes_if_a_stage_is_an_embedding(
    before: tuple, after: tuple, tmp_path: Path
) -> None:
    """The stage has no parameters without weight decay.

    Of that group nothing is saved, where other stages have some.
    """
    uninterrupted = run_ranks(train_losses, after[0], PLAIN | BF16 | after[1], 4)[0]
    run_ranks(save_after, before[0], PLAIN | BF16 | before[1], str(tmp_path), 2)
    rest = run_ranks(resume, after[0], PLAIN | BF16 | after[1], str(tmp_path), 2)[0]
    if before == after:
        assert rest == uninterrupted[2:]
    assert max(worst_difference(rest, uninterrupted[2:])) < 2e-3  # two steps in bf16 under the other layout


def packed_steps(
    lengths: str, overrides: dict[str, Any], folder: str, load: int | None, steps: int
) -> tuple[list[tuple[float, float]], list[tuple[int, ...]], Any]:
    """Return (loss, gradient norm) and the samples of each step.

    Begins with a checkpoint if one is given, and saves at the end.
    """
    config = packed_config(lengths, overrides)
    run = setup(config, build_tokenizer(config.tokenizer).vocab_size)
    state = load_checkpoint(run, folder, load)["train"] if load is not None else None
    losses, samples = [], []
    with closing(open_steps(run, train_dataset(config), run.progress.consumed_samples, training=True)) as walk:
        if state is not None:
            walk.load_state_dict(state)
            assert walk.state_dict()["consumed_samples"] == run.progress.consumed_samples
        for _ in range(steps):
            step = next(walk)
            result = train_step(run, step.microbatches)
            run.progress.iteration += 1
            run.progress.consumed_samples += len(step.lengths)
            walk.observe()
            losses.append(losses_of(result))
            samples.append(step.plan.samples)
        state = walk.state_dict()
        save_checkpoint(run, folder, {"train": state})
    return losses, samples, state.get("calibration")


def per_rank(tokens: int) -> dict[str, Any]:
    return DYNAMIC | {"model__max_seqlen_per_dp_cp_rank": tokens}


@pytest.mark.parametrize(
    ("before", "after"),
    [
        pytest.param((4, BALANCED | CP2), (4, per_rank(32) | CP2), id="static to dynamic"),
        pytest.param((4, per_rank(32) | CP2), (4, per_rank(32) | CP2), id="dynamic, the same"),
        pytest.param((4, per_rank(32) | CP2), (2, BALANCED | CP2), id="dynamic to static", marks=slow),
        pytest.param((4, per_rank(32)), (2, per_rank(64)), id="dynamic 4 to 2", marks=slow),
        pytest.param((4, per_rank(64) | TP2), (4, per_rank(64) | PP2), id="dynamic tp to pp", marks=slow),
    ],
)
def test_packed_runs_resume_with_the_same_samples(tmp_path: Path, before: tuple, after: tuple) -> None:
    lengths = lengths_file(tmp_path)
    whole, order, _ = run_ranks(packed_steps, 1, lengths, BALANCED, str(tmp_path / "one"), None, 4)[0]
    first = run_ranks(packed_steps, before[0], lengths, before[1], str(tmp_path / "run"), None, 2)[0]
    rest = run_ranks(packed_steps, after[0], lengths, after[1], str(tmp_path / "run"), 2, 2)[0]
    assert first[1] + rest[1] == order
    assert max(worst_difference(first[0] + rest[0], whole)) < 2e-6


def newer_format(folder: str) -> None:
    from megatron_cp.training.checkpoint import saver as checkpoint

    checkpoint.FORMAT = 99
    save_after({}, folder, 1)


def test_a_newer_format_is_refused(tmp_path: Path) -> None:
    run_ranks(newer_format, 1, str(tmp_path))
    with pytest.raises(RanksFailed, match="has format 99, newer than this version's 1"):
        run_ranks(resume, 1, {}, str(tmp_path), 1)


def test_another_programs_checkpoint_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="was written by another program"):
        check_fits(tiny_config(), {"iteration": 3}, tmp_path, finetune=True)


def test_a_setting_that_an_older_version_did_not_know_was_at_its_default(tmp_path: Path) -> None:
    before = asdict(tiny_config(**EXPERTS))
    del before["model"]["moe_shared_expert_intermediate_size"]
    common = {"format": 1, "iteration": 3, "config": before}
    check_fits(tiny_config(**EXPERTS), common, tmp_path, finetune=True)
    with pytest.raises(ConfigError, match="intermediate_size is 64 here and None in the checkpoint"):
        check_fits(
            tiny_config(**EXPERTS, model__moe_shared_expert_intermediate_size=64), common, tmp_path, finetune=True
        )


def test_how_its_experts_are_multiplied_makes_no_other_model(tmp_path: Path) -> None:
    """An older version multiplied experts one by one by default."""
    for saved, now in ((False, None), (None, False), (True, None)):
        common = {"format": 1, "config": asdict(tiny_config(**EXPERTS, model__moe_grouped_gemm=saved))}
        check_fits(tiny_config(**EXPERTS, model__moe_grouped_gemm=now), common, tmp_path, finetune=True)


def test_changed_bytes_are_detected(tmp_path: Path) -> None:
    """A disk that returns other bytes than were written must be detected.

    The bytes are in the middle of the tensors, not in a header.
    """
    run_ranks(save_after, 1, {}, str(tmp_path), 1)
    shard = next((tmp_path / "iter_0000001").glob("__0_0.distcp"))
    content = bytearray(shard.read_bytes())
    for position in range(len(content) // 4, len(content), 4096):
        content[position] ^= 0xFF
    shard.write_bytes(bytes(content))
    with pytest.raises(RanksFailed, match=r"checkpoint .*iter_0000001 (could not be loaded|cannot be read)"):
        run_ranks(resume, 1, {}, str(tmp_path), 1)


def test_layers_of_experts_have_two_notations(tmp_path: Path) -> None:
    ones, alternating = {"model__moe_layer_freq": [1] * 4}, {"model__moe_layer_freq": [1, 0, 1, 0]}
    for saved, now in ((EXPERTS, ones), (EXPERTS | ones, {}), (EXPERTS | alternating, {"model__moe_layer_freq": 2})):
        common = {"format": 1, "config": asdict(tiny_config(**saved))}
        check_fits(tiny_config(**EXPERTS | now), common, tmp_path, finetune=True)
    with pytest.raises(ConfigError, match=r"model.moe_layer_freq is 1 here and \[1, 0, 1, 0\] in the checkpoint"):
        check_fits(
            tiny_config(**EXPERTS), common | {"config": asdict(tiny_config(**EXPERTS | alternating))}, tmp_path, True
        )
