"""A checkpoint of unknown origin runs no code.

Invalid content is refused before use.
"""

import math
import os
import pickle
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch.distributed.checkpoint.filesystem import _StorageInfo
from torch.distributed.checkpoint.metadata import Metadata, MetadataIndex

from megatron_cp.common.errors import RuntimeFault, UnusableCheckpoint
from megatron_cp.mcore.checkpoint_index import INDEX, read_index
from megatron_cp.mcore.checkpoint_reader import load_object
from megatron_cp.training.checkpoint.content import check_random_state, read_common
from megatron_cp.training.checkpoint.saver import load_checkpoint
from megatron_cp.training.checkpoint.verification import problems_of
from tests.crafted_checkpoints import (
    Command,
    as_written_before_checksums,
    renew_checksums,
    replace_index,
    replace_object,
    saved,
)
from tests.ranks import run_ranks
from tests.training_runs import save_checkpoint, start, tiny_config
from tests.unit_tests.training.layouts.cases import CP2

slow = pytest.mark.slow
ONE_LAYER = {"model__num_layers": 1, **CP2}


def save_one(folder: str) -> None:
    run, batches = start(tiny_config(**ONE_LAYER))
    run.progress.iteration = 1
    save_checkpoint(run, folder, {"train": batches.state_dict()})


def load_it(folder: str) -> str:
    run, _ = start(tiny_config(**ONE_LAYER))
    try:
        load_checkpoint(run, folder, 1)
    except RuntimeFault as fault:
        return str(fault)
    return ""


@pytest.fixture(scope="module")
def original(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("original")
    run_ranks(save_one, 2, str(folder))
    return folder / "iter_0000001"


@pytest.fixture
def folder(original: Path, tmp_path: Path) -> Path:
    return Path(shutil.copytree(original, tmp_path / "root/iter_0000001"))


def with_command(folder: Path, where: str, marker: Path, protocol: int = 2) -> None:
    """Put a command into one of the places of a checkpoint that are unpickled.

    torch or megatron-core unpickles them.
    """
    command = Command(marker)
    if where == "index":
        replace_index(folder, pickle.dumps(command, protocol=protocol))
    elif where == "inside of the index":
        index = read_index(folder)
        index.planner_data = command
        replace_index(folder, pickle.dumps(index, protocol=protocol))
    elif where == "common.pt":
        (folder / "common.pt").write_bytes(saved(command, protocol))
        renew_checksums(folder)
    else:
        # A list, as megatron-core wraps every object.
        replace_object(folder, where, saved([{"format": command}], protocol))


PLACES = ["index", "inside of the index", "common.pt", "common_state", "rng"]


@pytest.mark.parametrize("protocol", [2, 4])
@pytest.mark.parametrize("where", PLACES)
def test_no_place_of_a_checkpoint_runs_a_command(folder: Path, where: str, protocol: int) -> None:
    """torch's planner reads the random states with the tensors, and all else before."""
    marker = folder.parent / "marker"
    with_command(folder, where, marker, protocol)
    if where == "rng":
        reported = run_ranks(load_it, 2, str(folder.parent))[0]
    else:
        reported = "; ".join(problems_of(folder, verify=True))
    assert "posix.system, which checkpoints of megatron_cp never use: refused" in reported, reported
    assert str(folder) in reported, "the file is named"
    assert not marker.exists()


def test_the_commands_are_real(folder: Path) -> None:
    """torch and megatron-core must run the commands, or the tests above show nothing."""
    marker = folder.parent / "marker"
    with_command(folder, "inside of the index", marker)
    pickle.loads((folder / INDEX).read_bytes())
    assert marker.exists()
    marker.unlink()
    torch.load(folder_object(saved([Command(marker)])), weights_only=False)
    assert marker.exists()


def folder_object(content: bytes) -> Any:
    import io

    return io.BytesIO(content)


@pytest.mark.parametrize(
    "where", ["index", "rng", *(pytest.param(place, marks=slow) for place in ("common_state", "common.pt"))]
)
def test_a_run_refuses_a_crafted_checkpoint(cli: Any, tmp_path: Path, where: str) -> None:
    assert cli()[0] == 0
    with_command(tmp_path / "run/iter_0000001", where, tmp_path / "marker")
    more = ["train.train_iters=2", "scheduler.override_opt_param_scheduler=true"]
    code, text = cli(*more)
    assert code == 1 and text.count("posix.system") == (2 if where == "rng" else 1), text
    assert not (tmp_path / "marker").exists()


def altered_class(attributes: dict[str, Any]) -> bytes:
    """Return a pickle that sets attributes on a class itself.

    Python's unpickler does not forbid it.
    """
    module, name = Metadata.__module__, Metadata.__qualname__
    return b"".join(
        (f"c{module}\n{name}\n".encode(), pickle.dumps((None, attributes), protocol=2)[2:-1], b"b.")
    )  # fmt: skip


BAD_INDEXES: dict[str, Callable[[Metadata], Any]] = {
    "a function": lambda index: len,
    "a number": lambda index: 3,
    "a deep list": lambda index: deep(100_000),
    "no tables": lambda index: Metadata(None),  # type: ignore[arg-type]
    "other tables": lambda index: Metadata({"x": 3}, storage_data={}),  # type: ignore[dict-item]
    "a key": lambda index: placed(index, key="x"),
    "a file above": lambda index: placed(index, name="../common.pt"),
    "a file elsewhere": lambda index: placed(index, name="/dev/zero"),
    "the folder": lambda index: placed(index, name=".."),
    "a negative place": lambda index: placed(index, start=-1),
    "a length of text": lambda index: placed(index, length="1"),
    "a path as a name": lambda index: placed(index, name=Path("x")),
    "a wrong size": lambda index: sized(index, (1, 2)),
    "no chunks": lambda index: sized(index, torch.Size([1]), None),
}


class deep:
    def __init__(self, levels: int) -> None:
        self.content = b"\x80\x02" + b"]" * levels + b"a" * (levels - 1) + b"."


def placed(index: Metadata, key: Any = None, name: Any = "__0_0.distcp", start: Any = 0, length: Any = 1) -> Metadata:
    index.storage_data[key or MetadataIndex("x")] = _StorageInfo(name, start, length)
    return index


def sized(index: Metadata, size: Any, chunks: Any = ()) -> Metadata:
    entry = index.state_dict_metadata["embedding.word_embeddings.weight"]
    entry.size, entry.chunks = size, list(chunks) if chunks is not None else None  # type: ignore[union-attr, assignment]
    return index


@pytest.mark.parametrize("what", BAD_INDEXES)
def test_an_index_contains_only_known_types(folder: Path, what: str) -> None:
    wrong = BAD_INDEXES[what](read_index(folder))
    replace_index(folder, wrong.content if isinstance(wrong, deep) else pickle.dumps(wrong))
    (problem,) = problems_of(folder, verify=True)
    assert str(folder / INDEX) in problem and ("is not a checkpoint index" in problem or "refused" in problem), problem


def test_an_index_does_not_modify_classes(folder: Path) -> None:
    before = dict(vars(Metadata))
    replace_index(folder, altered_class({"__init__": None, "new": 1}))
    (problem,) = problems_of(folder, verify=True)
    assert "it alters the class Metadata" in problem, problem
    assert dict(vars(Metadata)) == before


@pytest.mark.parametrize(
    "content",
    [
        b"",
        b"damage",
        saved(os.getcwd),
        saved(Path("x")),
        saved(np.array([len], dtype=object)),
        saved(deep),
        pickle.dumps(len),
        b"\x80\x02" + b"(" * 50_000 + b"l" * 50_000 + b".",
        saved([1])[:-30],
    ],
    ids=lambda content: str(len(content)),
)
def test_an_object_is_of_plain_values(content: bytes) -> None:
    with pytest.raises(UnusableCheckpoint, match="somewhere: x"):
        load_object(folder_object(content), "somewhere: x")


def test_values_of_checkpoints_are_read_unchanged() -> None:
    value = {"state": np.random.get_state(), "tensor": torch.arange(3), "list": [1, None, (2.5, "text", b"bytes")]}
    found = load_object(folder_object(saved(value)), "x")
    assert torch.equal(found["tensor"], value["tensor"]) and found["list"] == value["list"]  # type: ignore[arg-type]
    assert np.array_equal(found["state"][1], value["state"][1]) and found["state"][2:] == value["state"][2:]  # type: ignore[index]
    before = torch.serialization.get_safe_globals()
    assert before and set(torch.serialization.get_safe_globals()) == set(before), "others' lists are as before"


# Place outside of tensors, the value put there, and the message.
ALTERED: list[tuple[str, Any]] = [
    *((f"progress.{name}", value) for name in ("iteration", "consumed_samples", "consumed_tokens", "skipped_iterations")
      for value in (None, -1, "3", 2.0)),
    ("progress.iteration", [1]),
    ("progress.iteration", 2**70),
    ("progress.iteration", 10**500),
    ("progress.iteration", True),
    ("progress", None),
    ("progress", [1, 2]),
    ("format", "1"),
    ("format", 0),
    ("format", -1),
    ("format", math.nan),
    ("world_size", None),
    ("world_size", 0),
    ("world_size", "two"),
    ("data", None),
    ("data", 3),
    ("data.train", []),
    ("data.train.consumed_samples", None),
    ("data.train.consumed_samples", -8),
    ("data.train.consumed_samples", math.inf),
    ("scheduler", None),
    ("scheduler", "cosine"),
    ("scheduler.max_lr", None),
    ("scheduler.max_lr", math.nan),
    ("scheduler.min_lr", "0.1"),
    ("scheduler.num_steps", -4),
    ("scheduler.num_steps", [4]),
    ("scheduler.lr_decay_steps", None),
    ("scheduler.lr_decay_style", 3),
    ("scheduler.start_wd", math.inf),
    ("optimizer.optimizer", None),
    ("optimizer.optimizer.param_groups", None),
    ("optimizer.optimizer.param_groups", 3),
    ("optimizer.optimizer.param_groups.0", None),
    ("optimizer.optimizer.param_groups.0.step", -1.0),
    ("optimizer.optimizer.param_groups.0.step", math.nan),
    ("optimizer.optimizer.param_groups.0.step", "2"),
    ("optimizer.optimizer.param_groups.0.wd_mult", "x"),
    ("optimizer.optimizer.param_groups.0.lr_mult", [1]),
    ("config", None),
    ("config", []),
    ("config.model", None),
    ("config.model.hidden_size", "64"),
    ("config.model.hidden_size", [64]),
    ("config.model.num_layers", None),
    ("config.model.num_layers", 2.5),
    ("config.model.vocab_size", "many"),
    ("config.model.make_vocab_size_divisible_by", 0),
    ("config.model.tensor_model_parallel_size", 0),
    ("config.model.rotary_base", math.nan),
    ("config.model.rope_scaling", None),
    ("config.checkpoint.save_optim", None),
    ("config.optimizer.sgd_momentum", "0"),
    ("config.mixed_precision", 3),
    ("config.dist.use_tp_pp_dp_mapping", None),
    ("config.train.global_batch_size", -4),
    ("config.dataset.data_path", {"a": 1}),
    ("config.env_vars", 3),
    ("config.recipe", None),
]  # fmt: skip
CALIBRATION = {
    "of": {},
    "cost": {"per_microbatch": 1.0, "quadratic": 1e-9, "linear": 1e-6},
    "measured": 2,
    "observed": [([([8, 24], 2)], 0.5)],
}
DYNAMIC: list[tuple[str, Any]] = [
    ("data.train.calibration", 3),
    ("data.train.calibration.cost", {"quadratic": 1.0}),
    ("data.train.calibration.cost.linear", math.nan),
    ("data.train.calibration.cost.linear", "x"),
    ("data.train.calibration.cost.linear", -1.0),
    ("data.train.calibration.measured", None),
    ("data.train.calibration.observed", 3),
    ("data.train.calibration.observed", [3]),
    ("data.train.calibration.observed", [([([8, "x"], 2)], 0.5)]),
    ("data.train.calibration.observed", [([([8], 0)], 0.5)]),
    ("data.train.calibration.observed", [([([8], 1)], math.nan)]),
    ("data.train.cost", {"unknown": 1}),
    *[("data.train.token_buckets.tokens", tokens) for tokens in (8, ["8"], [0, 8], [8, 8], [2**40])],
]


def altered(common: dict[str, Any], path: str, value: Any) -> None:
    *way, last = path.split(".")
    holder: Any = common
    for name in way:
        if isinstance(holder, dict) and 0 in holder and name == "optimizer":
            holder = holder[0]
        holder = holder[int(name)] if isinstance(holder, list) else holder[name]
    holder[int(last) if isinstance(holder, list) else last] = value


def alter(folder: Path, path: str, value: Any) -> None:
    common = read_common(folder)
    if path.startswith("optimizer.") and 0 in common["optimizer"]:
        common["optimizer"] = common["optimizer"][0]
    if "calibration" in path:
        common["data"]["train"]["calibration"] = CALIBRATION | {"cost": dict(CALIBRATION["cost"])}  # type: ignore[call-overload]
    if "token_buckets" in path:
        common["data"]["train"]["token_buckets"] = {"of": {}, "tokens": []}
    altered(common, path, value)
    replace_object(folder, "common_state", saved([common]))


@pytest.mark.parametrize(("path", "value"), ALTERED + DYNAMIC, ids=lambda each: str(each)[:20])
def test_an_altered_entry_is_named(folder: Path, path: str, value: Any) -> None:
    alter(folder, path, value)
    (problem,) = problems_of(folder, verify=True)
    named = path if not path.startswith("data.train.calibration.cost.") else "data.train.calibration.cost"
    assert problem.startswith(f"entry {named} is "), problem


@pytest.mark.parametrize(
    "path",
    ["progress", "progress.iteration", "world_size", "config", "data", "data.train.consumed_samples",
     "scheduler.num_steps", "optimizer.optimizer", "optimizer.optimizer.param_groups"],
)  # fmt: skip
def test_an_entry_that_is_missing_is_named(folder: Path, path: str) -> None:
    common = read_common(folder)
    if 0 in common["optimizer"]:
        common["optimizer"] = common["optimizer"][0]
    *way, last = path.split(".")
    holder = common
    for name in way:
        holder = holder[name]
    del holder[last]
    replace_object(folder, "common_state", saved([common]))
    (problem,) = problems_of(folder, verify=True)
    assert problem == f"entry {path} is missing" or path.startswith("optimizer"), problem
    assert "is missing" in problem


@pytest.mark.parametrize("value", [None, 3, [], {}, "text"], ids=repr)
def test_a_common_state_of_another_type(folder: Path, value: Any) -> None:
    replace_object(folder, "common_state", saved(value))
    assert problems_of(folder, verify=True) == [] if value == {} else problems_of(folder, verify=True)


def test_settings_that_are_not_recorded_are_those_by_default(folder: Path) -> None:
    common = read_common(folder)
    del common["config"]["model"]["softmax_type"], common["config"]["profiling"]
    replace_object(folder, "common_state", saved([common]))
    assert read_common(folder)["config"]["model"]["softmax_type"] == "vanilla"
    assert problems_of(folder, verify=True) == []


def test_a_content_of_before_is_accepted(folder: Path) -> None:
    as_written_before_checksums(folder)
    assert problems_of(folder, verify=True) == []


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("numpy", None),
        ("numpy", ("MT19937", np.zeros(624, dtype=np.uint32), 625, 0, 0.0)),
        ("numpy", ("MT19937", np.zeros(624, dtype=np.uint32), -1, 0, 0.0)),
        ("numpy", ("MT19937", np.zeros(3, dtype=np.uint32), 0, 0, 0.0)),
        ("torch", [1, 2]),
        ("torch", torch.zeros(3)),
        ("python", None),
        ("tracker", {"a": 3}),
        ("tracker", 3),
    ],
)
def test_a_random_state_is_one(name: str, value: Any) -> None:
    good = {"python": (3, (1,), None), "numpy": np.random.get_state(), "torch": torch.get_rng_state()}
    good |= {"device": torch.get_rng_state(), "tracker": {"a": torch.get_rng_state()}}
    check_random_state(good, "rng")
    with pytest.raises(UnusableCheckpoint, match=rf"rng\.{name}"):
        check_random_state(good | {name: value}, "rng")


@pytest.mark.parametrize(
    ("path", "value", "reported"),
    [
        ("progress.consumed_samples", None, "entry progress.consumed_samples is None, expected an integer"),
        ("optimizer.optimizer.param_groups.0.wd_mult", 7.0, "could not be loaded"),
        pytest.param("scheduler.num_steps", 10**9, "", marks=slow),
        pytest.param("config.model.num_layers", 10**9, "num_layers is 1 here and 1000000000 in", marks=slow),
    ],
)
def test_a_run_names_the_altered_entry(cli: Any, tmp_path: Path, path: str, value: Any, reported: str) -> None:
    assert cli()[0] == 0
    alter(tmp_path / "run/iter_0000001", path, value)
    code, text = cli("train.train_iters=2", "scheduler.override_opt_param_scheduler=true")
    assert code in ((1, 2) if reported else (0, 1)) and text.count(reported) >= 1, (code, text)
