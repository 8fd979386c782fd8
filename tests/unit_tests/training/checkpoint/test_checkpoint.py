"""Resuming: exact under the same layout, within float32's rounding under another."""

import os
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch

from megatron_cp.common.errors import ConfigError, RuntimeFault
from megatron_cp.training.checkpoint.files import (
    checkpoint_folder,
    create_partial,
    existing_folder,
    latest_iteration,
    put_in_place,
)
from megatron_cp.training.checkpoint.saver import load_checkpoint
from megatron_cp.training.step import train_step
from tests.ranks import RanksFailed, run_ranks
from tests.training_runs import Losses, losses_of, save_checkpoint, start, tiny_config, train_losses, worst_difference
from tests.unit_tests.training.layouts.cases import CP2, CP4, HCP, LAYOUTS, PP2, SIX_LAYERS, TP2, VPP2, layers_for

OVERLAPPED = {"ddp__overlap_grad_reduce": True, "ddp__overlap_param_gather": True}
# Buckets that end within a layer, each with padding of its own.
BUCKETS = {"ddp__overlap_grad_reduce": True, "ddp__bucket_size": 20_000}
SGD = {"optimizer__optimizer": "sgd", "optimizer__use_distributed_optimizer": False}
BF16 = {"mixed_precision__fp32": False, "mixed_precision__bf16": True}


def save_after(overrides: dict[str, Any], folder: str, steps: int) -> Losses:
    run, batches = start(tiny_config(**overrides))
    results = [train_step(run, next(batches).microbatches) for _ in range(steps)]
    run.progress.iteration = steps
    save_checkpoint(run, folder, {"train": batches.state_dict()})
    run.close()
    return [losses_of(result) for result in results]


def resume(overrides: dict[str, Any], folder: str, steps: int) -> Losses:
    run, batches = start(tiny_config(**overrides))
    iteration = latest_iteration(folder)
    assert iteration is not None
    batches.load_state_dict(load_checkpoint(run, folder, iteration)["train"])
    assert run.progress.iteration == iteration
    results = [train_step(run, next(batches).microbatches) for _ in range(steps)]
    run.close()
    return [losses_of(result) for result in results]


@pytest.mark.parametrize("steps", [2, pytest.param(10, marks=pytest.mark.slow)])
@pytest.mark.parametrize(
    ("world_size", "overrides"),
    [
        pytest.param(1, {}, id="one rank", marks=pytest.mark.slow),
        pytest.param(1, {"optimizer__use_distributed_optimizer": False}, id="plain optimizer", marks=pytest.mark.slow),
        pytest.param(1, SGD, id="sgd"),
        pytest.param(2, CP2 | SGD | BF16, id="cp2 sgd bf16", marks=pytest.mark.slow),
        pytest.param(1, SGD | {"optimizer__sgd_momentum": 0.0}, id="sgd without momentum", marks=pytest.mark.slow),
        pytest.param(4, CP4 | HCP, id="cp4 a2a+p2p", marks=pytest.mark.slow),
        pytest.param(4, CP4 | HCP | {"dist__use_decentralized_pg": True}, id="cp4 a2a+p2p decentralized"),
        pytest.param(4, PP2 | VPP2 | CP2, id="pp2 vpp2 cp2"),
        pytest.param(2, CP2 | {"model__hidden_dropout": 0.1, "train__micro_batch_size": 2}, id="cp2 with dropout"),
        pytest.param(2, CP2 | BF16 | {"train__micro_batch_size": 2}, id="cp2 bf16"),
        pytest.param(4, CP2 | OVERLAPPED, id="dp2 cp2 overlapped"),
    ],
)
def test_resuming_continues_exactly(tmp_path: Path, world_size: int, overrides: dict[str, Any], steps: int) -> None:
    overrides = layers_for(overrides) | overrides
    uninterrupted = run_ranks(train_losses, world_size, overrides, 2 * steps)[0]
    first = run_ranks(save_after, world_size, overrides, str(tmp_path), steps)[0]
    rest = run_ranks(resume, world_size, overrides, str(tmp_path), steps)[0]
    assert first + rest == uninterrupted


@pytest.mark.parametrize(
    ("before", "after"),
    [
        ((4, CP4 | HCP), (1, {})),
        ((1, {}), (4, CP4 | HCP)),
        pytest.param((2, CP2), (4, TP2 | CP2), marks=pytest.mark.slow),
        ((4, PP2 | VPP2 | CP2), (2, TP2)),
        pytest.param((4, LAYOUTS["dp2 cp2"][1]), (4, PP2 | CP2), marks=pytest.mark.slow),
    ],
    ids=["hcp to one", "one to hcp", "cp2 to tp2 cp2", "pp2 vpp2 cp2 to tp2", "dp2 cp2 to pp2 cp2"],
)
def test_resuming_under_another_layout(tmp_path: Path, before: tuple, after: tuple) -> None:
    model = layers_for(before[1], after[1])
    uninterrupted = run_ranks(train_losses, 1, model, 4)[0]
    run_ranks(save_after, before[0], model | before[1], str(tmp_path), 2)
    rest = run_ranks(resume, after[0], model | after[1], str(tmp_path), 2)[0]
    worst_loss, worst_norm = worst_difference(rest, uninterrupted[2:])
    assert worst_loss < 2e-6 and worst_norm < 2e-6, (worst_loss, worst_norm)


def test_resuming_with_other_numbers_of_layers_in_a_stage(tmp_path: Path) -> None:
    model, first = SIX_LAYERS, "model__num_layers_in_first_pipeline_stage"
    uninterrupted = run_ranks(train_losses, 1, model, 4)[0]
    run_ranks(save_after, 2, model | PP2 | VPP2 | {first: 2}, str(tmp_path), 2)
    rest = run_ranks(resume, 2, model | PP2 | {first: 5}, str(tmp_path), 2)[0]
    assert max(worst_difference(rest, uninterrupted[2:])) < 2e-6


def test_weights_are_saved_whole_where_their_gathering_is_overlapped(tmp_path: Path) -> None:
    """After a step each rank has only its shards of the new weights.

    The next forward pass gathers them.
    """
    uninterrupted = run_ranks(train_losses, 4, CP2 | layers_for(), 3)[0]
    run_ranks(save_after, 4, CP2 | OVERLAPPED | layers_for(), str(tmp_path), 2)
    weights_alone = run_ranks(resume, 1, layers_for() | {"checkpoint__load_optim": False}, str(tmp_path), 1)[0]
    assert max(worst_difference(weights_alone, uninterrupted[2:])) < 1e-6


def test_optimizer_state_of_several_buckets(tmp_path: Path) -> None:
    """Upstream splits saved state at offsets that include padding.

    It does not save the padding.
    """
    model = layers_for()
    uninterrupted = run_ranks(train_losses, 4, model | CP2 | BUCKETS, 4)[0]
    run_ranks(save_after, 4, model | CP2 | BUCKETS, str(tmp_path), 2)
    assert run_ranks(resume, 4, model | CP2 | BUCKETS, str(tmp_path), 2)[0] == uninterrupted[2:]
    elsewhere = run_ranks(resume, 1, model, str(tmp_path), 2)[0]
    assert max(worst_difference(elsewhere, uninterrupted[2:])) < 2e-6


def test_another_models_checkpoint_is_refused_with_what_differs(tmp_path: Path) -> None:
    run_ranks(save_after, 1, {}, str(tmp_path), 1)
    with pytest.raises(RanksFailed, match=r"of a different model: model.num_layers is 2 here and 4 in the checkpoint"):
        run_ranks(resume, 1, {"model__num_layers": 2}, str(tmp_path), 1)


def test_a_table_of_positions_has_a_size_and_rotary_embeddings_have_none(tmp_path: Path) -> None:
    learned, longer = {"model__position_embedding_type": "learned_absolute"}, {"model__max_position_embeddings": 64}
    run_ranks(save_after, 1, learned, str(tmp_path / "learned"), 1)
    with pytest.raises(
        RanksFailed, match=r"of a different model: model.max_position_embeddings is 64 here and 32 in the"
    ):
        run_ranks(resume, 1, learned | longer, str(tmp_path / "learned"), 1)
    run_ranks(save_after, 1, {}, str(tmp_path / "rotary"), 1)
    run_ranks(resume, 1, longer, str(tmp_path / "rotary"), 1)


@pytest.mark.parametrize("other", [{"optimizer__use_distributed_optimizer": False}, SGD])
def test_another_optimizers_state_is_refused(tmp_path: Path, other: dict[str, Any]) -> None:
    run_ranks(save_after, 1, {}, str(tmp_path), 1)
    refused = r"state of a different optimizer: optimizer\..* in the checkpoint.*checkpoint.load_optim=false"
    with pytest.raises(RanksFailed, match=refused):
        run_ranks(resume, 1, other, str(tmp_path), 1)
    run_ranks(resume, 1, other | {"checkpoint__load_optim": False}, str(tmp_path), 1)


def test_a_plain_optimizers_state_belongs_to_a_precision(tmp_path: Path) -> None:
    """Only the distributed optimizer uses the same names in both precisions.

    Both optimizers have the same state.
    """
    plain, bf16 = {"optimizer__use_distributed_optimizer": False}, {"mixed_precision__bf16": True}
    run_ranks(save_after, 1, plain, str(tmp_path / "plain"), 1)
    with pytest.raises(RanksFailed, match=r"state of a different optimizer: mixed_precision is 'bf16' here and 'fp32'"):
        run_ranks(resume, 1, plain | bf16 | {"mixed_precision__fp32": False}, str(tmp_path / "plain"), 1)
    run_ranks(save_after, 1, {}, str(tmp_path / "distributed"), 1)
    run_ranks(resume, 1, bf16 | {"mixed_precision__fp32": False}, str(tmp_path / "distributed"), 1)


@pytest.mark.parametrize("damage", ["shards emptied", "metadata gone", "folder gone"])
def test_unreadable_checkpoints_are_reported(tmp_path: Path, damage: str) -> None:
    run_ranks(save_after, 2, CP2, str(tmp_path), 1)
    folder = tmp_path / "iter_0000001"
    if damage == "shards emptied":
        for shard in folder.glob("*.distcp"):
            shard.write_bytes(b"")
    elif damage == "metadata gone":
        (folder / ".metadata").unlink()
    else:
        folder.rename(tmp_path / "elsewhere")
    with pytest.raises(RanksFailed, match=r"RuntimeFault: (there is no )?checkpoint .*iter_0000001") as failed:
        run_ranks(resume, 2, CP2, str(tmp_path), 1)
    assert str(failed.value).count("RuntimeFault: ") == 2, "every rank must say so"


def test_without_a_tracker_the_newest_folder_counts(tmp_path: Path) -> None:
    assert latest_iteration(tmp_path) is None
    for name in ("iter_0000009", "iter_0000010", ".iter_0000011.partial-0a0b0c0d"):
        (tmp_path / name).mkdir()
    assert latest_iteration(tmp_path) == 10
    (tmp_path / "latest_checkpointed_iteration.txt").write_text("9")
    assert latest_iteration(tmp_path) == 9


def test_an_unreadable_tracker_is_reported(tmp_path: Path) -> None:
    (tmp_path / "latest_checkpointed_iteration.txt").write_text("soon")
    with pytest.raises(ConfigError, match="does not hold an iteration number"):
        latest_iteration(tmp_path)


def test_a_name_that_is_too_long_holds_no_checkpoint(tmp_path: Path) -> None:
    folder = tmp_path / ("x" * 300)
    assert latest_iteration(folder) is None and existing_folder(folder, 3) is None


def failing_save(overrides: dict[str, Any], folder: str) -> str:
    """Fill the disk, as it were, while rank 0 puts the second checkpoint in its place."""
    from megatron_cp.training.checkpoint import saver as checkpoint

    run, batches = start(tiny_config(**overrides))
    train_step(run, next(batches).microbatches)
    run.progress.iteration = 1
    save_checkpoint(run, folder, {})

    def full(partial: Path, final: Path) -> None:
        raise OSError(28, "No space left on device")

    checkpoint.put_in_place = full
    run.progress.iteration = 2
    try:
        save_checkpoint(run, folder, {})
    except RuntimeFault as fault:
        return str(fault)
    return "no fault"


def test_a_failed_save_is_reported_by_every_rank_and_leaves_the_previous_one(tmp_path: Path) -> None:
    messages = run_ranks(failing_save, 2, CP2, str(tmp_path))
    assert all("rank 0: OSError: [Errno 28] No space left" in message for message in messages), messages
    assert latest_iteration(tmp_path) == 1
    assert not (tmp_path / "iter_0000002").exists()


def put_half_a_file_in_place(folder: str) -> str:
    run, _ = start(tiny_config())
    run.progress.iteration = 1
    save_checkpoint(run, folder, {})
    final = checkpoint_folder(folder, 2)
    partial = create_partial(final)
    shutil.copytree(checkpoint_folder(folder, 1), partial, dirs_exist_ok=True)
    largest = max(partial.glob("*.distcp"), key=lambda path: path.stat().st_size)
    os.truncate(largest, largest.stat().st_size // 2)
    with pytest.raises(OSError) as raised:
        put_in_place(partial, final)
    return str(raised.value)


def test_incomplete_checkpoints_are_not_published(tmp_path: Path) -> None:
    (message,) = run_ranks(put_half_a_file_in_place, 1, str(tmp_path))
    assert "the written files are incomplete: " in message and " bytes, expected " in message
    assert latest_iteration(tmp_path) == 1 and not (tmp_path / "iter_0000002").exists()


def keep_two(folder: str) -> None:
    run, _ = start(tiny_config(checkpoint__most_recent_k=2))
    for iteration in (1, 2, 3, 3):
        run.progress.iteration = iteration
        save_checkpoint(run, folder, {})


def test_most_recent_k_and_saving_an_iteration_again(tmp_path: Path) -> None:
    run_ranks(keep_two, 1, str(tmp_path))
    assert sorted(path.name for path in tmp_path.iterdir()) == [
        "iter_0000002",
        "iter_0000003",
        "latest_checkpointed_iteration.txt",
    ]


def manager_started(folder: str) -> bool:
    import multiprocessing.managers as managers

    started = []
    original = managers.BaseManager.start
    managers.BaseManager.start = lambda self, *args, **kwargs: (started.append(self), original(self, *args, **kwargs))
    run, _ = start(tiny_config())
    save_checkpoint(run, folder, {})
    return bool(started)


def test_saving_starts_no_process_that_would_run_the_users_script_again(tmp_path: Path) -> None:
    assert run_ranks(manager_started, 1, str(tmp_path)) == [False]


def adam_steps(overrides: dict[str, Any], folder: str) -> list[float]:
    """Return Adam's step counts after one step on a loaded checkpoint.

    There is one count a parameter.
    """
    run, batches = start(tiny_config(**overrides))
    batches.load_state_dict(load_checkpoint(run, folder, 2)["train"])
    train_step(run, next(batches).microbatches)
    inner = run.optimizer.chained_optimizers[0].optimizer
    return [float(state["step"]) for state in inner.state.values()]


def test_loaded_adam_counts_one_step_for_each_parameter(tmp_path: Path) -> None:
    """Upstream gives all parameters one shared counter.

    Each parameter then increments it.
    """
    run_ranks(save_after, 1, {}, str(tmp_path), 2)
    steps = run_ranks(adam_steps, 1, {}, str(tmp_path))[0]
    assert len(steps) > 10 and set(steps) == {3.0}


class WithStateOfItsOwn:
    """Module with an extra state of its own.

    Transformer Engine's norms and attention are such modules, even where nothing is quantized.
    """

    def get_extra_state(self) -> torch.Tensor:
        return torch.zeros(2, dtype=torch.uint8)

    def set_extra_state(self, state: torch.Tensor) -> None:
        assert torch.equal(state, torch.zeros(2, dtype=torch.uint8))


def save_as_one_kind_and_load_as_the_other(folder: str, state_first: bool) -> None:
    def begin(with_state: bool) -> Any:
        run, _ = start(tiny_config(model__context_parallel_size=2))
        decoder = run.model[0].module.decoder
        for module in (decoder.final_layernorm, *(layer.self_attention.core_attention for layer in decoder.layers)):
            if with_state:
                module.__class__ = type("Module", (WithStateOfItsOwn, type(module)), {})
        return run

    run = begin(state_first)
    run.progress.iteration = 1
    saved = {name: parameter.detach().clone() for name, parameter in run.model[0].named_parameters()}
    save_checkpoint(run, folder, {})
    run.close()
    run = begin(not state_first)
    for parameter in run.model[0].parameters():
        parameter.data.zero_()
    load_checkpoint(run, folder, 1)
    for name, parameter in run.model[0].named_parameters():
        assert torch.equal(parameter, saved[name]), name
    run.close()


@pytest.mark.parametrize("state_first", [False, True])
def test_layers_without_extra_state_resume_as_layers_with_one(tmp_path: Path, state_first: bool) -> None:
    """Checkpoints without Transformer Engine must resume with it, and back.

    So must imports.
    """
    run_ranks(save_as_one_kind_and_load_as_the_other, 2, str(tmp_path), state_first)
