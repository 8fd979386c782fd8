import json
import re
from types import SimpleNamespace
from typing import NamedTuple

import numpy as np
import pytest

from megatron_cp.cli.schedule import main
from megatron_cp.common.terminal import UsageError
from megatron_cp.dynamic_cp import PRESETS, CostModel, Schedule, schedule
from megatron_cp.dynamic_cp.analysis.recorded import record
from megatron_cp.dynamic_cp.analysis.simulate import simulate
from megatron_cp.dynamic_cp.cost import DEFAULT_COST
from megatron_cp.dynamic_cp.distributions import DISTRIBUTIONS, sample_lengths


class Scheduled(NamedTuple):
    schedule: Schedule
    lengths: list[int]
    cost: CostModel


SMALL = ["--distribution", "documents", "--count", "64", "--longest", "16384", "--ranks", "8"]


def test_prints_what_to_expect(capsys):
    assert main(SMALL) == 0
    text = capsys.readouterr().out
    assert "64 samples" in text and "CP size" in text and "imbalance" in text
    assert re.search(r"dynamic CP: simulated \d\.\d\dx as fast as static CP 2, balanced packing", text)


def test_json_figures_add_up(capsys):
    assert main([*SMALL, "--json", "--sync-ranks", "4"]) == 0
    figures = json.loads(capsys.readouterr().out)
    for name in ("dynamic", "static", "dp_balanced"):
        one = figures[name]
        assert one["useful"] + one["overhead"] + one["idle"] == pytest.approx(1)
        assert one["imbalance"] >= 1 and one["simulated_seconds"] > 0
    assert sum(size["tokens"] for size in figures["dynamic"]["cp_sizes"].values()) == int(
        sample_lengths("documents", 64, 16384).sum()
    )


def test_draws_a_picture(tmp_path):
    from matplotlib import image

    png, plan = tmp_path / "step.png", tmp_path / "plan.json"
    assert main([*SMALL, "--plot", str(png), "--output", str(plan)]) == 0
    pixels = image.imread(png)
    assert pixels.shape[1] > 1000 and len(np.unique(pixels.reshape(-1, pixels.shape[2]), axis=0)) > 10
    groups = [group for groups in json.loads(plan.read_text()) for group in groups]
    assert sorted(x for _, ids in groups for x in ids) == list(range(64))


def test_ranks_of_a_picture_are_whole_numbers(tmp_path, monkeypatch):
    from matplotlib import pyplot

    monkeypatch.setattr(pyplot, "close", lambda figure: None)  # as the picture's is
    assert main(["--distribution", "chat", "--count", "8", "--ranks", "2", "--plot", str(tmp_path / "step.png")]) == 0
    figure = pyplot.gcf()
    monkeypatch.undo()
    ticks = [float(tick) for axis in figure.axes for tick in axis.get_yticks()]
    pyplot.close(figure)
    assert {0, 1} <= set(ticks) and all(tick.is_integer() for tick in ticks)


ALIKE = ["--distribution", "chat", "--count", "64", "--longest", "512", "--ranks", "4"]  # static CP 1 is as good


@pytest.mark.parametrize(("options", "gain"), [(SMALL, True), (ALIKE, False)], ids=["faster", "no faster"])
def test_simulated_values_are_labelled_and_labels_do_not_overlap_bars(options, gain, tmp_path, monkeypatch, capsys):
    from matplotlib import pyplot

    monkeypatch.setattr(pyplot, "close", lambda figure: None)
    assert main([*options, "--plot", str(tmp_path / "step.png")]) == 0
    figure = pyplot.gcf()
    monkeypatch.undo()
    headline = figure.get_suptitle()
    words = r"simulated \d\.\d\dx as fast as static CP" if gain else r"simulated no faster \(1\.00x\) than static CP"
    for text in (capsys.readouterr().out, headline):
        assert re.search(words, text) and "x faster" not in text and "saved" not in text
    _, dynamic = figure.axes
    assert all("simulated" in axis.get_title(loc="left") for axis in figure.axes)
    assert dynamic.get_xlabel().startswith("simulated seconds")
    figure.canvas.draw()
    labels = [label for axis in figure.axes for label in axis.texts if label.get_text()]
    assert [label.get_text().endswith("s less (simulated)") for label in labels] == [True] * gain
    for label in labels:
        box, end = label.get_window_extent(), dynamic.lines[0].get_xdata()[0]
        left, right = (dynamic.transData.transform((x, 0))[0] for x in (end, dynamic.get_xlim()[1]))
        assert left < box.x0 and box.x1 < right
    pyplot.close(figure)


def test_reads_text_and_gzip(tmp_path, capsys):
    import gzip

    plain, packed = tmp_path / "lengths.txt", tmp_path / "lengths.txt.gz"
    plain.write_text("100, 200\n300 5000\n")
    packed.write_bytes(gzip.compress(b"100\n200\n300\n5000\n"))
    outputs = []
    for path in (plain, packed):
        assert main(["--lengths", str(path), "--ranks", "4", "--max-seqlen-per-rank", "2048", "--json"]) == 0
        outputs.append(json.loads(capsys.readouterr().out)["dynamic"])
    assert outputs[0] == outputs[1]


def test_reads_a_megatron_index(tmp_path, capsys):
    import torch
    from megatron.core.datasets.indexed_dataset import IndexedDatasetBuilder

    builder = IndexedDatasetBuilder(str(tmp_path / "text.bin"), dtype=np.int32)
    for length in (7, 0, 300, 1, 2500):  # two of them have nothing to predict
        builder.add_document(torch.arange(length, dtype=torch.int32), [length])
    builder.finalize(str(tmp_path / "text.idx"))
    assert main(["--lengths", str(tmp_path / "text.idx"), "--ranks", "4", "--max-seqlen-per-rank", "1024"]) == 0
    assert "3 samples, 2807 tokens (longest 2500" in capsys.readouterr().out


def test_lengths_of_a_file_are_cut_on_request(tmp_path, capsys):
    path = tmp_path / "lengths.txt"
    path.write_text("200000 100 200")
    options = ["--lengths", str(path), "--ranks", "64"]
    assert main(options) == 0
    shown = capsys.readouterr()
    assert "3 samples, 200300 tokens (longest 200000" in shown.out and shown.err == ""
    assert main([*options, "--longest", "150"]) == 0
    shown = capsys.readouterr()
    assert "3 samples, 400 tokens (longest 150" in shown.out
    assert shown.err == "2 of 3 samples cut to --longest 150\n"
    path.write_text("1000000")
    assert main(options) == 2
    assert "a shorter sample (--max-seqlen-per-rank, --ranks, --longest)" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("content", "options", "message"),
    [
        ("12 twelve", [], "'twelve' is not a whole number"),
        ("", [], "has no lengths"),
        ("0 5", [], "'0' is not a whole number of 1 or more"),
        ("9000", ["--max-seqlen-per-rank", "64"], "sample 0 of 9000 tokens does not fit"),
        ("10", ["--sync-ranks", "3"], "sync_ranks=3"),
        ("10", ["--static-cp-size", "5"], "cp_size=5"),
        ("10\n99999999999999999999999", [], "lengths.txt:2: a number of 23 digits is too long for a length"),
        ("9" * 5000, [], "a number of 5000 digits"),
        ("10", ["--iteration", "3"], "Fix: use it with --from-run"),
        ("10", ["--seed", "0"], "Fix: use it with --distribution"),
    ],
)
def test_wrong_input_is_one_line_and_2(tmp_path, capsys, content, options, message):
    path = tmp_path / "lengths.txt"
    path.write_text(content)
    assert main(["--lengths", str(path), "--ranks", "4", *options]) == 2
    error = capsys.readouterr().err
    assert message in error and error.count("\n") == 1


@pytest.mark.parametrize(
    ("option", "value", "bounds"),
    [
        ("--count", "0", "at least 1 and at most 10,000,000"),
        ("--count", "99999999999999", "at least 1 and at most 10,000,000"),
        ("--longest", "99999999999999999999999", "at least 1 and at most 9,223,372,036,854,775,807"),
        ("--seed", "-1", "at least 0 and at most 9,223,372,036,854,775,807"),
        ("--ranks", "9" * 20, "at least 1 and at most 1,000,000"),
        ("--ranks", "0", "at least 1 and at most 1,000,000"),
        ("--max-seqlen-per-rank", "9" * 400, "at least 1 and at most 2,147,483,647"),
        ("--min-cp-size", "9" * 30, "at least 1 and at most 1,000,000"),
        ("--sync-ranks", "0", "at least 1 and at most 1,000,000"),
        ("--pipeline-size", "9" * 30, "at least 1 and at most 1,000"),
        ("--microbatch-multiple", "9" * 30, "at least 1 and at most 1,000"),
        ("--sequence-parallel-size", "9" * 30, "at least 1 and at most 10,000"),
    ],
)
def test_a_number_that_cannot_be_meant_is_2(option, value, bounds):
    with pytest.raises(UsageError) as stop:
        main(["--distribution", "mock", "--ranks", "4", option, value])
    assert f"argument {option}: {value}: must be {bounds}\n" in stop.value.text


def test_a_distribution_names_the_option(capsys):
    assert main(["--distribution", "long", "--longest", "1000", "--ranks", "4"]) == 2
    error = capsys.readouterr().err
    assert "longest=1000: the distribution 'long' needs --longest 8192" in error and error.count("\n") == 1


def test_a_damaged_archive_is_explained(tmp_path, capsys):
    import gzip

    path = tmp_path / "lengths.gz"
    packed = bytearray(gzip.compress(b"100 200 300\n" * 50))
    packed[12:20] = b"\xff" * 8
    path.write_bytes(packed)
    assert main(["--lengths", str(path), "--ranks", "4"]) == 2
    assert f"{path}: cannot be read" in capsys.readouterr().err


def test_simulation_settings_are_checked(tmp_path, capsys):
    step = SimpleNamespace(schedule=schedule([10, 20], 4, 64), lengths=[10, 20], cost=DEFAULT_COST)
    (tmp_path / "schedules.jsonl").write_text(json.dumps({"iteration": 1} | record(step)) + "\n")
    assert main(["--from-run", str(tmp_path)]) == 0
    assert main(["--from-run", str(tmp_path), "--sync-ranks", "3"]) == 2
    assert "--sync-ranks 3: must divide the run's number of ranks (4)" in capsys.readouterr().err


@pytest.mark.parametrize("option", ["--ranks", "--count", "--longest", "--seed", "--max-seqlen-per-rank"])
def test_recorded_settings_of_a_run_cannot_be_given(tmp_path, capsys, option):
    assert main(["--from-run", str(tmp_path), option, "4"]) == 2
    error = capsys.readouterr().err
    assert f"{option}: --from-run ignores it. Fix: use it with" in error


RUN = {"context_parallel_size": 2, "microbatch_multiple": 4, "sync_ranks": 2, "pipeline_size": 3}


@pytest.mark.parametrize(
    ("recorded", "options", "like", "size"),
    [
        (RUN, [], [], 2),
        (RUN | {"context_parallel_size": 1}, ["--pipeline-size", "5"], ["--pipeline-size", "5"], 2),
        (RUN | {"context_parallel_size": 4}, [], [], 4),
        ({}, ["--sync-ranks", "2", "--pipeline-size", "3", "--static-cp-size", "4"], [], 4),
    ],
    ids=["as it was", "asked for", "a larger size", "of an older version"],
)
def test_a_run_is_simulated_in_lockstep_as_it_trained(tmp_path, capsys, recorded, options, like, size):
    """The simulation must have the run's steps.

    The longest sample needs two ranks. The run is like a plan of the same lengths, but for its dynamic schedule.
    """
    lengths = [100, *range(5, 60)]
    found = Scheduled(schedule(lengths, 4, 64, sync_ranks=2, pipeline_size=3), lengths, PRESETS["h100_8b"])
    line = {"iteration": 1} | record(found, **recorded)
    (tmp_path / "schedules.jsonl").write_text(json.dumps(line) + "\n")
    assert main(["--from-run", str(tmp_path), "--json", *options]) == 0
    shown = json.loads(capsys.readouterr().out)
    (tmp_path / "lengths.txt").write_text(" ".join(map(str, lengths)))
    keeping_step = ["--sync-ranks", "2", "--pipeline-size", "3", "--static-cp-size", str(size)]
    keeping_step += ["--microbatch-multiple", str(recorded.get("microbatch_multiple", 1)), *like]
    plan = ["--lengths", str(tmp_path / "lengths.txt"), "--ranks", "4", "--max-seqlen-per-rank", "64"]
    assert main([*plan, "--json", *keeping_step]) == 0
    planned = json.loads(capsys.readouterr().out)
    assert [shown[name] for name in ("static", "dp_balanced")] == [planned[name] for name in ("static", "dp_balanced")]
    stages = 5 if like else 3
    expected = simulate(found.schedule, np.array(lengths), found.cost, sync_ranks=2, pipeline_size=stages)
    assert shown["run"]["simulated_seconds"] == expected.seconds


def test_damaged_lines_of_a_run_are_left_out(tmp_path, capsys):
    """Damaged lines of schedules and metrics must be left out, as reports do."""
    step = SimpleNamespace(schedule=schedule([10, 20], 4, 64), lengths=[10, 20], cost=DEFAULT_COST)
    damaged = ['{"iteration": 1, "step_ti{"iteration": 1, "step_time_s": 3.0}', "\0\0\0", "[1]", '{"step_time_s": 4.0}']
    metrics = [*damaged, '{"iteration": 2, "step_time_s": 1.5}', '{"iteration": 2, "validation_loss": 5.0}', '{"iter']
    schedules = [json.dumps({"iteration": iteration} | record(step)) for iteration in (1, 2)]
    (tmp_path / "schedules.jsonl").write_text("\n".join([*damaged, *schedules, schedules[0][:40]]))
    (tmp_path / "metrics.jsonl").write_bytes("\n".join(metrics).encode() + b"\xff")
    for options, iteration, seconds in ((), 2, 1.5), (("--iteration", "1"), 1, None):
        assert main(["--from-run", str(tmp_path), "--json", *options]) == 0, capsys.readouterr().err
        shown = json.loads(capsys.readouterr().out)
        assert (shown["iteration"], shown["measured_seconds"]) == (iteration, seconds)


@pytest.mark.parametrize(
    ("field", "value"),
    [
        *(("num_ranks", value) for value in (0, -1, 10**30, "4", None, 2.0)),
        *(("lengths", value) for value in ([], None, ["a", "b"], [10, -5], [10, 10**30], {"a": 1})),
        *(("microbatches", value) for value in (None, [], [[[0, 10**9, [0, 1]]]], [[[9, 1, [0, 1]]]], [[[0, 1, [0]]]])),
        *(("microbatches", value) for value in ([[[0, 1, [0, "a"]]]], [[["a", 1, [0, 1]]]], [[[0, 1]]], 3)),
        *(("cost", value) for value in (None, [], {}, {"quadratic": "a"}, {"per_microbatch": 10**400})),
        *(("pipeline_size", value) for value in (0, None, "2", 10**30)),
    ],
)
def test_a_recorded_step_with_other_values_is_refused(tmp_path, capsys, field, value):
    step = SimpleNamespace(schedule=schedule([10, 20], 4, 64), lengths=[10, 20], cost=DEFAULT_COST)
    line = {"iteration": 1} | record(step) | {field: value}
    (tmp_path / "schedules.jsonl").write_text(json.dumps(line) + "\n")
    assert main(["--from-run", str(tmp_path)]) == 2
    error = capsys.readouterr().err
    assert "schedules.jsonl: " in error and error.count("\n") == 1


def test_a_recorded_step_that_is_nested_too_deeply_is_refused(tmp_path, capsys):
    (tmp_path / "schedules.jsonl").write_text('{"iteration": 1, "a": ' + "[" * 100_000 + "}\n")
    assert main(["--from-run", str(tmp_path)]) == 2
    assert "nested too deeply" in capsys.readouterr().err


def test_a_broken_index_is_explained(tmp_path, capfd):
    index = tmp_path / "broken.idx"
    index.write_bytes(b"abcd")
    assert main(["--lengths", str(index), "--ranks", "4"]) == 2
    error = capfd.readouterr().err
    assert "broken.bin: no such file" in error and error.count("\n") == 1
    index.with_suffix(".bin").write_bytes(b"tokens")
    assert main(["--lengths", str(index), "--ranks", "4"]) == 2
    error = capfd.readouterr().err
    assert "broken.idx: is not a Megatron index" in error and error.count("\n") == 1


@pytest.mark.parametrize("option", ["--output", "--plot"])
def test_unwritable_files_are_reported_before_any_work(tmp_path, capsys, monkeypatch, option):
    monkeypatch.chdir(tmp_path)
    nowhere = tmp_path / "no" / "x"
    for path, message in (
        (nowhere, f"{option} {nowhere}: no folder {nowhere.parent}. Fix: mkdir -p"),
        (tmp_path, f"{option} {tmp_path}: is a folder. Fix: name a file in it"),
        ("-", f"{option} -: is not a file name. Fix: {option} FILE"),
    ):
        assert main([*SMALL, option, str(path)]) == 2
        shown = capsys.readouterr()
        assert shown.out == "" and message in shown.err and shown.err.count("\n") == 1
    assert list(tmp_path.iterdir()) == []


def test_the_other_names_of_an_index_lead_to_it(tmp_path, capsys):
    for name in ("text.bin", "text.idx"):
        (tmp_path / name).write_bytes(b"\xff\x80")
    for source in ("text", "text.bin"):
        assert main(["--lengths", str(tmp_path / source), "--ranks", "4"]) == 2
        assert f"has no lengths. Fix: --lengths {tmp_path / 'text.idx'}\n" in capsys.readouterr().err
    (tmp_path / "text.idx").unlink()
    assert main(["--lengths", str(tmp_path / "text.bin"), "--ranks", "4"]) == 2
    message = "a file of lengths must have whole numbers, one a line or separated by spaces; the file is not UTF-8 text"
    assert f"text.bin: {message}" in capsys.readouterr().err


def test_a_missing_file_is_named(capsys):
    assert main(["--lengths", "no/such/file.txt", "--ranks", "4"]) == 2
    assert "no/such/file.txt" in capsys.readouterr().err


@pytest.mark.parametrize("name", DISTRIBUTIONS)
def test_distributions_are_reproducible_and_bounded(name):
    lengths = sample_lengths(name, 2000, 32768, seed=5)
    assert (lengths == sample_lengths(name, 2000, 32768, seed=5)).all()
    assert (lengths != sample_lengths(name, 2000, 32768, seed=6)).any()
    assert lengths.min() >= 1 and lengths.max() <= 32768 and len(np.unique(lengths)) > 100


def test_real_distributions_have_their_published_shape():
    wikipedia = sample_lengths("wikipedia", 50_000, 2_000_000)
    assert 900 < wikipedia.mean() < 1100 and 9_000 < np.percentile(wikipedia, 99) < 12_000
    documents = sample_lengths("documents", 50_000, 200_000)
    assert 0.70 < (documents <= 1024).mean() < 0.73 and 0.002 < (documents > 65536).mean() < 0.004
