"""``megatron-cp plan`` as a user types it: what is ranked and refused.

The commands and settings that it prints work.
"""

import dataclasses
import itertools
import json
import re
import shlex
import subprocess
import sys

import pytest

from megatron_cp import cli
from megatron_cp.config.recipes import load_recipe
from megatron_cp.dynamic_cp.distributions import sample_lengths
from megatron_cp.estimate.device import load_device
from megatron_cp.estimate.memory import memory_estimate
from megatron_cp.planner import estimator, search
from megatron_cp.planner.estimator import Estimator
from megatron_cp.planner.found import Models
from megatron_cp.planner.packed import packed_time, quick_seconds
from megatron_cp.planner.request import Amount, amount, model_recipe
from megatron_cp.planner.search import Search
from megatron_cp.planner.space import Space, with_settings
from megatron_cp.rules import Environment, check
from megatron_cp.rules.job import job_of
from megatron_cp.rules.remedies import Case, with_overrides

RECIPE = "llama3_8b_128k_pretrain_config"
SMALL = ("--model", "llama32_1b", "--gpus", "4", "--gpu", "h100", "--global-batch-size", "8")


@pytest.fixture
def plan(capsys):
    def run(*argv):
        code = cli.main(["plan", *argv])
        captured = capsys.readouterr()
        return code, captured.out, captured.err

    return run


def found(plan, *argv):
    code, out, err = plan(*argv, "--json")
    assert code == 0, err
    return json.loads(out)


def test_layouts_are_ranked_and_the_rules_accept_them_as_they_are_pasted(plan):
    plans = found(plan, "--recipe", RECIPE, "--gpus", "16", "--gpu", "h100", "--top", "4")
    seconds = [each["seconds"] for each in plans["layouts"]]
    assert seconds == sorted(seconds) and len(seconds) == 4
    environment = dataclasses.replace(Environment.of("gpu"), gpus_per_node=plans["gpus_per_node"])
    base = load_recipe(RECIPE)
    for number, each in enumerate(plans["layouts"]):
        words = shlex.split(" ".join(plans["overrides"])) if number == 0 else words_of(base, each["settings"])
        config = with_overrides(base, words)
        assert check(config, 16, 8, environment) == []
        assert memory_estimate(job_of(Case(config, 16, 8, environment))).total == pytest.approx(each["peak_bytes"])
        assert sum(each["seconds_by_kind"].values()) == pytest.approx(each["seconds"])
        assert each["peak_bytes"] <= plans["usable_bytes"]
        assert each["mfu"] < 1


def test_stages_of_a_hybrid_have_equally_many_layers(plan):
    """52 layers are not divisible by 8 stages, which the GPUs would allow."""
    recipe = "nemotron_3_nano_128k_dynamic_cp_pretrain_config"
    layouts = found(plan, "--recipe", recipe, "--gpus", "64", "--gpu", "h100", "--top", "3")["layouts"]
    assert all(52 % each["settings"]["model.pipeline_model_parallel_size"] == 0 for each in layouts)


def words_of(base, settings):
    return [
        f"{name}={json.dumps(value) if not isinstance(value, str) else value}"
        for name, value in settings.items()
        if value != base.value_at(name) and value is not None
    ] + [f"{name}=null" for name, value in settings.items() if value is None and base.value_at(name) is not None]


def test_the_search_finds_what_trying_everything_finds():
    """The queue of least times must leave nothing faster out."""
    config = load_recipe("llama32_1b_pretrain_config", ["train.global_batch_size=16", "train.check_memory=false"])
    case = Case(config, 8, 4, dataclasses.replace(Environment.of("gpu"), gpus_per_node=4))
    models = Models.on(load_device("h100"), 4)
    space, capacity = Space(case, (), 4), 30e9
    search = Search(space, capacity, models)
    best = search.run(1).fitting[0]
    for grid in itertools.islice(space.grids(), 0, None, 3):
        for schedule, transport in itertools.product(space.schedules(grid), space.transports(grid)):
            for step in space.savings(grid, schedule):
                settings = grid | schedule | transport | step
                if models.time(job_of(with_settings(case, settings))).seconds < 0.999 * best.time.seconds:
                    tried = with_settings(case, settings)
                    is_refused = any(each.severity == "error" for each in check(tried.config, 8, 4, tried.environment))
                    assert is_refused or Estimator(space, models).memory(settings).total > capacity, settings


def test_the_fastest_memory_savings_are_chosen_not_the_first():
    """Half of the layers recomputed takes less time than all MLPs, which come first."""
    case = Case(load_recipe("gemma3_1b_pretrain_config"), 1, 1, Environment.of("gpu"))
    device = load_device("h100")
    best = Search(Space(case, (), 1), 0.9 * device.memory, Models.on(device, 1)).run(1).fitting[0]
    assert best.settings["model.recompute_method"] == "block"


def test_what_the_user_fixes_stays(plan):
    plans = found(plan, *SMALL, "model.tensor_model_parallel_size=2", "model.recompute_granularity=null", "-cp", "2")
    assert {each["settings"]["model.tensor_model_parallel_size"] for each in plans["layouts"]} == {2}
    assert {each["settings"]["model.context_parallel_size"] for each in plans["layouts"]} == {2}
    assert {each["settings"]["model.recompute_granularity"] for each in plans["layouts"]} == {None}


def test_the_table_has_limits_layouts_that_do_not_fit_and_settings(plan):
    code, out, _ = plan(*SMALL, "--seq-length", "64K", "model.tensor_model_parallel_size=1")
    assert code == 0
    assert "tokens/s/GPU" in out and "limited by" in out and "time:   " in out and "GiB:    " in out
    assert "GiB over limit" in out and "fits with" in out
    assert "dataset.seq_length=65536" in line_of(out, "settings of layout 1: ")


def test_a_written_recipe_is_what_was_planned(plan, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    _, _, err = plan(*SMALL, "--write", "my_run.yaml", "-tp", "2", "optimizer.lr=0.001")
    assert "my_run.yaml" in err
    config = load_recipe("my_run.yaml")
    assert (config.recipe_world_size, config.optimizer.lr, config.model.tensor_model_parallel_size) == (4, 0.001, 2)
    assert check(config, 4, 4, "gpu") == []


def test_the_picture_is_written(plan, tmp_path):
    path = tmp_path / "plan.png"
    assert plan(*SMALL, "--plot", str(path))[0] == 0
    assert path.read_bytes().startswith(b"\x89PNG") and path.stat().st_size > 20_000


def test_uneven_samples_are_packed_and_dynamic_cp_is_considered(plan, tmp_path):
    lengths = tmp_path / "lengths.txt"
    lengths.write_text("\n".join(["512"] * 60 + ["65536"] * 2))
    command = ("--model", "llama32_1b", "--gpus", "8", "--gpu", "h100", "--seq-length", "64K")
    plans = found(plan, *command, "--global-batch-size", "62", "--lengths", str(lengths), "--top", "3")
    best = plans["layouts"][0]["settings"]
    assert plans["tokens_per_step"] == 60 * 512 + 2 * 65536
    assert best["model.dynamic_context_parallel"]  # a static group of eight would share samples of 512 tokens
    base = ["model.sequence_packing_scheduler=dp_balanced", "model.dynamic_context_parallel=false"]
    packed = found(plan, *command, "--global-batch-size", "62", "--lengths", str(lengths), "--top", "1", *base)
    assert plans["layouts"][0]["seconds"] <= packed["layouts"][0]["seconds"]
    assert not packed["layouts"][0]["settings"]["model.dynamic_context_parallel"]


def test_experts_may_lie_on_more_ranks_than_share_samples():
    """Eight expert ranks on four tensor parallel ranks are two ranks of packs."""
    words = ["tensor_model_parallel_size=4", "expert_model_parallel_size=8", "context_parallel_size=1"]
    words += ["expert_tensor_parallel_size=1", "pipeline_model_parallel_size=1", "sequence_parallel=true"]
    words += ["dynamic_context_parallel=true", "max_seqlen_per_dp_cp_rank=32768", "cp_comm_type=p2p"]
    words += ["hierarchical_context_parallel_sizes=null", "num_moe_experts=8", "moe_ffn_hidden_size=1024"]
    recipe = "llama32_1b_pretrain_config"
    config = load_recipe(recipe, [f"model.{word}" for word in words] + ["train.micro_batch_size=1"])
    lengths = (512,) * 60 + (32768,) * 2
    estimated = packed_time(Case(config, 16, 8, Environment.of("gpu")), lengths, Models.on(load_device("h100"), 8))
    assert 0 < estimated.kinds["matrix products"] < estimated.seconds


def test_virtual_stages_shorten_the_bubble_of_packs():
    """Four virtual stages leave a quarter of the pipeline's fill and drain time."""
    words = ["model.pipeline_model_parallel_size=2", "model.sequence_packing_scheduler=default_dynamic_cp"]
    words += ["model.dynamic_context_parallel=true", "model.max_seqlen_per_dp_cp_rank=8192"]
    words += ["model.min_dynamic_context_parallel_size=1", "model.context_parallel_size=4", "train.micro_batch_size=1"]
    waits = []
    for virtual in ("null", "4"):
        word = f"model.virtual_pipeline_model_parallel_size={virtual}"
        config = load_recipe("llama32_1b_pretrain_config", [*words, word])
        case = Case(config, 8, 8, Environment.of("gpu"))
        estimated = packed_time(case, (8192,) * 32, Models.on(load_device("h100"), 8))
        waits.append(estimated.kinds["imbalance"])
    assert waits[0] / waits[1] == pytest.approx(4, rel=0.02)


@pytest.mark.parametrize(("stages", "virtual"), [(1, "null"), (2, "null"), (2, "4")])
def test_the_quick_estimate_of_packs_is_near_their_time(stages, virtual):
    words = [f"model.pipeline_model_parallel_size={stages}", "model.sequence_packing_scheduler=default_dynamic_cp"]
    words += [f"model.virtual_pipeline_model_parallel_size={virtual}", "model.dynamic_context_parallel=true"]
    words += ["model.max_seqlen_per_dp_cp_rank=8192", "model.context_parallel_size=8", "train.micro_batch_size=1"]
    case = Case(load_recipe("llama31_8b_pretrain_config", words), 64, 8, Environment.of("gpu"))
    lengths, models = tuple(sample_lengths("documents", 512, 65536).tolist()), Models.on(load_device("h100"), 8)
    assert quick_seconds(case, lengths, models) == pytest.approx(packed_time(case, lengths, models).seconds, rel=0.12)


def test_refused_packs_do_not_hide_accepted_ones(monkeypatch):
    """Most dynamic groups are too large for this hybrid's Mamba heads."""
    monkeypatch.setattr(search, "_MOST_REFUSED", 20)
    config = load_recipe("nemotron_3_nano_128k_dynamic_cp_pretrain_config", ["dataset.seq_length=65536"])
    device = load_device("h100")
    space = Space(Case(config, 256, 8, Environment.of("gpu")), (), 8, tuple(sample_lengths("documents", 256, 65536)))
    assert Search(space, 0.9 * device.memory, Models.on(device, 8)).run(1).fitting


@pytest.fixture
def few_schedules(monkeypatch):
    """Return a search that schedules nine layouts, four for the frontier; and those."""
    scheduled = []
    monkeypatch.setattr(search, "_MOST_SIMULATED", 5)
    monkeypatch.setattr(search, "_MOST_FOR_FRONTIER", 4)
    monkeypatch.setattr(estimator, "packed_time", lambda *args: scheduled.append(1) or packed_time(*args))
    config = with_overrides(load_recipe(RECIPE), ["model.sequence_packing_scheduler=default_dynamic_cp"])
    space = Space(Case(config, 16, 8, Environment.of("gpu")), (), 8, (512,) * 60 + (32768,) * 2)
    return Search(space, 72 * 2**30, Models.on(load_device("h100"), 8)), scheduled


def test_a_search_of_packs_schedules_few_layouts(few_schedules):
    """Layouts that do not fit take one each."""
    packs, scheduled = few_schedules
    best = packs.run(20)
    assert len(scheduled) <= 5 + 4 + len(best.too_large) and best.fitting and best.frontier
    shown = [each.layout.time.seconds for each in best.too_large]
    assert shown == sorted(shown)


def test_refused_layouts_of_packs_are_not_scheduled(few_schedules, monkeypatch):
    """Accepted layouts are found although many faster ones are refused."""
    packs, _ = few_schedules
    real, refused = Search._accepted, []

    def refuses_the_first(self, settings):
        if len(refused) < 8:
            refused.append(settings)
            return False
        return real(self, settings)

    monkeypatch.setattr(Search, "_accepted", refuses_the_first)
    assert packs.run(1).fitting


@pytest.mark.parametrize(
    ("argv", "message"),
    [
        (("--model", "lama3_8b", "--gpus", "8", "--gpu", "h100"), r"--model lama3_8b: .*Fix: --model llama3_8b"),
        (("--model", "llama3_8b", "--gpus", "8", "--gpu", "h10"), r"h10.*Fix: --gpu h100"),
        (("--model", "llama3_8b", "--gpus", "0", "--gpu", "h100"), r"--gpus: 0: must be from 1 to"),
        (("--gpus", "8", "--gpu", "h100"), "one of --recipe and --model"),
        ((*SMALL, "--global-batch-size", "many"), "global-batch-size"),
        ((*SMALL, "--lengths", "nowhere.txt"), r"--lengths nowhere.txt: .*Fix: "),
        ((*SMALL, "--write", "no/such/folder/x.yaml"), r"Fix: --write x.yaml"),
    ],
)
def test_bad_input_is_one_message_and_exit_2(plan, argv, message):
    code, out, err = plan(*argv)
    assert code == 2 and not out and re.search(message, err, re.DOTALL), err


def test_an_impossible_request_has_a_fix(plan):
    command = ["--recipe", RECIPE, "--gpu", "h100", "train.global_batch_size=64"]
    code, _, err = plan(*command, "--gpus", "2")
    assert code == 2
    gpus, length = re.search(r"Fix: --gpus (\d+), or --seq-length (\d+)", err).groups()
    assert plan(*command, "--gpus", gpus)[0] == 0
    assert plan(*command, "--gpus", "2", "--seq-length", length)[0] == 0


@pytest.mark.parametrize("name", ["llama31_8b", "Llama-3.1-8B", "meta-llama/Meta-Llama-3.1-8B", "Llama 3.1 8B"])
def test_a_model_is_found_by_what_people_call_it(name):
    assert {"model": "llama31_8b"} in model_recipe(name)["defaults"]


@pytest.mark.parametrize(
    ("text", "expected"),
    [("512", Amount(512, False)), ("4M", Amount(4 * 2**20, True)), ("4194304 tokens", Amount(2**22, True))],
)
def test_a_batch_is_of_samples_or_of_tokens(text, expected):
    assert amount(text) == expected


@pytest.mark.parametrize(
    "words",
    [
        "--model llama3_70b --global-batch-size 512",
        "--model llama31_8b --global-batch-size 4096 --seq-length 128K --lengths documents",
    ],
    ids=["equal lengths", "packs"],
)
def test_a_thousand_gpus_take_seconds_and_no_torch(words):
    code = (
        "import sys, time\n"
        "from megatron_cp.cli.plan import main\n"
        "begin = time.process_time()\n"
        f"main('{words} --gpus 1024 --gpu h100 --json'.split())\n"
        "assert time.process_time() - begin < 10, time.process_time() - begin\n"
        "assert not {'torch', 'megatron.core'} & sys.modules.keys()\n"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr[-2000:]


def test_a_folder_of_hugging_faces_format_is_planned_for(plan, tmp_path):
    """The config.json must be enough."""
    config = dict(model_type="llama", architectures=["LlamaForCausalLM"], hidden_size=2048, num_hidden_layers=16)
    config |= dict(num_attention_heads=32, num_key_value_heads=8, intermediate_size=8192, vocab_size=128256)
    (tmp_path / "config.json").write_text(json.dumps(config | dict(max_position_embeddings=131072)))
    argv = ("--model", str(tmp_path), "--gpus", "4", "--gpu", "h100", "--global-batch-size", "8")
    assert found(plan, *argv)["layouts"][0]["peak_bytes"] > 10e9


def line_of(out: str, begin: str) -> str:
    (line,) = [line for line in out.splitlines() if line.startswith(begin)]
    return line.removeprefix(begin)


def test_the_last_line_trains_the_layout_that_was_found(plan, tmp_path, monkeypatch):
    """The line must also have the flags, which a recipe does not have."""
    code, out, _ = plan("--recipe", RECIPE, "--gpus", "16", "--gpu", "h100", "-tp", "4", "--top", "1")
    assert code == 0
    words = shlex.split(line_of(out, "train layout 1: megatron-cp train "))
    assert cli.main(["validate", *words, "--world-size", "16", "--environment", "gpu"]) == 0
    assert "model.tensor_model_parallel_size=4" in words
    monkeypatch.chdir(tmp_path)
    _, out, _ = plan(*SMALL)
    find, train = line_of(out, "train layout 1: ").split(" && ")
    assert cli.main(shlex.split(find)[1:]) == 0
    assert train == "megatron-cp train plan.yaml"
    assert cli.main(["validate", "plan.yaml", "--environment", "gpu"]) == 0


def test_a_model_without_a_known_vocabulary_is_refused(plan):
    words = "tokenizer.tokenizer_type=HuggingFaceTokenizer", "tokenizer.tokenizer_model=tokens"
    code, _, err = plan("--recipe", "llama_tiny_pretrain_config", "--gpus", "4", "--gpu", "h100", *words)
    assert code == 2 and "model.vocab_size=null: a plan needs" in err
    code, _, err = plan(
        "--recipe", "llama_tiny_pretrain_config", "--gpus", "4", "--gpu", "h100", *words, "model.vocab_size=128256"
    )
    assert code == 0, err


@pytest.mark.parametrize(
    ("words", "fix"),
    [
        (("ddp.num_buckets=2", "ddp.bucket_size=100"), "ddp.num_buckets=null"),
        (("model.qk_clip=true", "model.qk_layernorm=true", "model.attention_backend=native"), "model.qk_clip=false"),
    ],
)
def test_settings_that_break_a_rule_under_every_layout(plan, words, fix):
    """The rules are asked once a layout is looked at, and once for each transport."""
    code, _, err = plan(*SMALL, *words)
    assert code == 2 and "the rules reject the layouts" in err and f"Fix: {fix}" in err
    assert plan(*SMALL, *words, fix)[0] == 0
