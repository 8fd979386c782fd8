"""Composition of recipes: layers, types, suggestions."""

import tomllib
from dataclasses import asdict
from pathlib import Path

import pytest
import yaml

from megatron_cp.common.errors import ConfigError
from megatron_cp.config.recipes import list_recipes, load_recipe, to_yaml
from megatron_cp.config.run_config import RunConfig
from megatron_cp.rules import check
from megatron_cp.rules.remedies import parse_fix

TINY = "llama_tiny_pretrain_config"


def problem(*overrides: str, recipe: str | Path = TINY, **more) -> str:
    with pytest.raises(ConfigError) as caught:
        load_recipe(recipe, overrides, **more)
    return str(caught.value)


@pytest.mark.parametrize("name", list_recipes())
def test_every_recipe_composes_and_has_a_description(name):
    config = load_recipe(name)
    assert config.recipe == name
    assert config.checkpoint.save == f"runs/{name}"
    assert config.recipe_world_size is not None
    description, mock = list_recipes()[name], config.dataset.kind in ("mock", "mock_documents")
    assert description and description.endswith(" [mock data]") == mock
    comments = (Path(__file__).parents[3] / "recipes" / f"{name}.yaml").read_text().partition("defaults:")[0]
    assert ("# MOCK DATA (random tokens). For real data set dataset.data_path=PREFIX" in comments) == mock
    assert load_recipe(name, ["dataset.data_path=PREFIX"]).dataset.kind in ("indexed", "documents")


def test_overrides_are_typed_and_reach_every_kind_of_field():
    config = load_recipe(
        TINY,
        [
            "model.cp_comm_type=a2a+p2p",
            "model.hierarchical_context_parallel_sizes=[4,1]",
            "optimizer.lr=1e-3",
            "optimizer.min_lr=0",
            "model.transformer.qk_layernorm=true",
            "+train.exit_interval=7",
            "++checkpoint.load='a=b'",
            "env_vars.NCCL_ALGO=Ring",
            "env_vars.CUDA_DEVICE_MAX_CONNECTIONS=1",
            "env_vars.SWITCH=true",
            "env_vars.NCCL_PROTO=LL",
            "env_vars.NCCL_PROTO=null",
            "dataset.data_path=[0.3,a,0.7,b]",
            "dataset.split='100,0,0'",
            "train.global_batch_size=${train.micro_batch_size}",
        ],
    )
    assert config.model.hierarchical_context_parallel_sizes == [4, 1]
    assert config.optimizer.lr == 1e-3
    assert config.optimizer.min_lr == 0.0 and isinstance(config.optimizer.min_lr, float)
    assert config.model.qk_layernorm is True
    assert config.train.exit_interval == 7
    assert config.checkpoint.load == "a=b"
    assert config.env_vars == {"NCCL_ALGO": "Ring", "CUDA_DEVICE_MAX_CONNECTIONS": "1", "SWITCH": "True"}
    assert config.dataset.data_path == [0.3, "a", 0.7, "b"] and config.dataset.kind == "indexed"
    assert config.dataset.split == "100,0,0"
    assert config.train.global_batch_size == config.train.micro_batch_size


def test_group_choices_replace_a_file_of_the_recipe():
    config = load_recipe(TINY, ["parallel=cp4_p2p", "model=llama32_1b"])
    assert config.model.cp_comm_type == "p2p" and config.model.hierarchical_context_parallel_sizes is None
    assert config.model.hidden_size == 2048


def test_a_group_that_the_recipe_has_no_file_of_is_laid_over_it(tmp_path):
    for plus in ("", "+"):
        config = load_recipe("llama3_8b_1m_hcp_config", [f"{plus}parallel=cp4_p2p", "model=llama3_70b"])
        assert (config.model.context_parallel_size, config.model.cp_comm_type) == (4, "p2p")
        assert config.model.hierarchical_context_parallel_sizes is None
        assert (config.model.tensor_model_parallel_size, config.model.hidden_size) == (2, 8192)
    assert load_recipe("llama3_8b_1m_hcp_config", ["parallel=cp4_p2p", "model.context_parallel_size=8"]).model == (
        load_recipe("llama3_8b_1m_hcp_config", ["model.context_parallel_size=8", "parallel=cp4_p2p"]).model
    )
    path = tmp_path / "config.yaml"
    path.write_text(to_yaml(load_recipe(TINY)))
    assert load_recipe(path, ["parallel=cp4_p2p"]).model.cp_comm_type == "p2p"


@pytest.mark.parametrize(
    ("choice", "meant", "others"),
    [
        ("parallel=cp4_pp", "cp4_p2p", "cp4_a2a"),
        ("parallel=cp4_hpc", "cp4_hcp", "none"),
        ("optimizer=adm", "adam", "sgd"),
        ("scheduler=cosin", "cosine", "wsd"),
    ],
)
@pytest.mark.parametrize("recipe", [TINY, "llama3_8b_1m_hcp_config"])
def test_a_choice_that_does_not_exist_names_those_that_do(choice, meant, others, recipe):
    text = problem(choice, recipe=recipe)
    group = choice.partition("=")[0]
    assert choice in text and f"did you mean '{meant}'?" in text and f"{group} is one of {meant}, " in text
    assert others in text and "file://" not in text and "search path" not in text


@pytest.mark.parametrize(
    ("override", "expected"),
    [
        ("model.contxt_parallel_size=4", "did you mean 'model.context_parallel_size'?"),
        ("+model.contxt_parallel_size=4", "did you mean 'model.context_parallel_size'?"),
        ("++modl.context_parallel_size=4", "unknown key 'modl'; did you mean 'model'?"),
        ("modle.num_layers=3", "unknown key 'modle'; did you mean 'model'?"),  # codespell:ignore modle
        ("datset.seq_length=256", "unknown key 'datset'; did you mean 'dataset'?"),  # codespell:ignore datset
        ("bridge.hidden_size=3", "unknown key 'bridge.hidden_size'; did you mean 'model.hidden_size'?"),
        ("paralel=cp4_p2p", "unknown key 'paralel'; did you mean 'parallel'?"),  # codespell:ignore paralel
        ("context_parallel_size=4", "did you mean 'model.context_parallel_size'?"),
        ("train.lr=1", "did you mean 'optimizer.lr'?"),
        ("model.transformer.contxt_parallel_size=4", "did you mean 'model.context_parallel_size'?"),
        ("model.context_parallel_size=abc", "model.context_parallel_size: expected int, got 'abc'"),
        ("model.context_parallel_size=4.0", "expected int, got 4.0"),
        ("model.context_parallel_size=''", "expected int, got ''"),
        ("model.context_parallel_size=null", "expected int, got None"),
        ("model.context_parallel_size=true", "expected int, got True"),
        ("train.train_iters=1e3", "expected int or null, got 1000.0"),
        ("model.sequence_parallel=1", "expected bool, got 1"),
        ("optimizer.lr=high", "expected finite number, got 'high'"),
        ("optimizer.lr=inf", "expected finite number, got inf"),
        ("model.softmax_scale=nan", "expected finite number or null, got nan"),
        (f"optimizer.clip_grad=1{'0' * 400}", "expected finite number, got 1000"),
        ("model.num_layers=9223372036854775808", "expected int, got 9223372036854775808; 9223372036854775808... does"),
        ("model.window_size=[inf,0]", "expected list of int or null, got [inf, 0]; inf is not finite"),
        ("model.window_size=[64.0,0]", "\n    fix: model.window_size=[64,0]"),
        ("profiling.profile_ranks=[true]", "expected list of int, got [True]"),
        ("dataset.data_path=[nan,a]", "list of (str or int or finite number) or null, got [nan, 'a']; nan is not"),
        ("model.cp_comm_type=3", "model.cp_comm_type: cp_comm_type must be a str or list of str, got 3"),
        ("model.hierarchical_context_parallel_sizes=[2,x]", "expected list of int or null"),
        (
            "model.hierarchical_context_parallel_sizes=2,2",
            "for a list write model.hierarchical_context_parallel_sizes=[2,2]",
        ),
        ("model.hierarchical_context_parallel_sizes=(2,2)", "cannot parse"),
        ("checkpoint.save=/a/b:c=d", "quote"),
        ("optimizer.optimizer=adm", "did you mean 'adam'?"),
        ("model.recompute_granularity=ful", "did you mean 'full'?"),
        ("mixed_precision=bf61", "did you mean 'bf16'?"),
        ("model=4", "expected a mapping of settings"),
        ("~model.seq_length", "fix: set the value you want: model.seq_length=value"),
        ("~model", "fix: set the value you want: model.name=value"),
        ("~parallel", "settings cannot be deleted"),
        ("model=null", "a whole section cannot be null"),
        ("parallel=[cp4_p2p,none]", "'parallel' is a config group: expected one file name"),
        ("+parallel=[cp4_p2p,none]", "fix: parallel is one of cp4_a2a, "),
        ("model=[llama_tiny,llama32_1b]", "fix: model is one of deepseek_v2_lite, "),
        ("parallel=4", "error K2: parallel=4: 'parallel' is a config group"),
        ("parallel=null", "fix: set the value you want: parallel=value"),
        ("dataset=null", "a whole section cannot be null"),
        ("nonsense", "expected key=value"),
        (
            "dataset.seq_length=${model.seq_lenth}",
            "error K3: dataset.seq_length: cannot resolve the configuration: there is no setting model.seq_lenth; did "
            "you mean 'model.seq_length'?\n    fix: write ${section.setting} for a setting's value",
        ),
        (
            "checkpoint.save=${oc.env:NO_SUCH_PLACE}",
            "error K3: checkpoint.save: cannot resolve the configuration: the environment variable NO_SUCH_PLACE is "
            "not set\n    fix: export NO_SUCH_PLACE=VALUE, or give a default: ${oc.env:NO_SUCH_PLACE,VALUE}",
        ),
        ("train.train_iters=${nonsense:1}", "Unsupported interpolation type nonsense\n    fix: write ${"),
        (f"model.num_layers={'9' * 5000}", "cannot parse: Exceeds the limit"),
    ],
)
def test_a_wrong_override_is_explained(override, expected):
    assert expected in problem(override)


@pytest.mark.parametrize(
    ("override", "fix"),
    [
        ("dataset.split=90,5,5", "for a text write dataset.split=\"'90,5,5'\""),
        ("env_vars.NCCL_ALGO=Ring,Tree", "for a text write env_vars.NCCL_ALGO=\"'Ring,Tree'\""),
        ("model.transformer.window_size=8,4", "for a list write model.transformer.window_size=[8,4]"),
        (
            "model.cp_comm_type=p2p,a2a",
            "for a list write model.cp_comm_type=[p2p,a2a], for a text write model.cp_comm_type=\"'p2p,a2a'\"",
        ),
        ("optimizer.lr=1e-3,1e-4", "there are no sweeps: start one run for each value, with optimizer.lr=VALUE"),
        ("optimizer.lr=choice(1e-3,1e-4)", "there are no sweeps: start one run for each value, with optimizer.lr="),
        ("dataset.split=choice(a,b)", "there are no sweeps: start one run for each value, with dataset.split=VALUE"),
        ("optimizer=adam,sgd", "there are no sweeps: start one run for each value, with optimizer=VALUE"),
        ("parallel=glob(*)", "there are no sweeps: start one run for each value, with parallel=VALUE"),
        ("no.such=1,2", "there are no sweeps: start one run for each value, with no.such=VALUE"),
    ],
)
def test_several_values_are_a_list_a_text_or_several_runs(override, fix):
    text = problem(override)
    assert f"error K3: {override}: several values for one setting\n    fix: {fix}" in text
    assert text.count("write") == fix.count("write")


@pytest.mark.parametrize(
    ("override", "fix"),
    [
        ("train.train_iters=1e2", "train.train_iters=100"),
        ("train.train_iters=1.5", "set train.train_iters to a whole number"),
        ("train.train_iters=many", "set train.train_iters to a whole number"),
        ("model.num_layers=null", "set model.num_layers to a whole number, or remove it"),
        ("optimizer.lr=null", "set optimizer.lr to a number, or remove it"),
        ("optimizer.optimizer=adagrad", "set optimizer.optimizer to one of adam, sgd, muon, lion"),
        ("model.recompute_granularity=3", "set model.recompute_granularity to one of full, selective or null"),
        ("model.sequence_parallel=1", "model.sequence_parallel=true"),
        ("model.sequence_parallel=2", "set model.sequence_parallel to true or false"),
        ("dataset.split=[90,5,5]", "dataset.split=\"'90,5,5'\""),
        ("checkpoint.save=3", "checkpoint.save=\"'3'\""),
        ("model.hierarchical_context_parallel_sizes=4", "model.hierarchical_context_parallel_sizes=[4]"),
        (
            "model.hierarchical_context_parallel_sizes=[4.5]",
            "set model.hierarchical_context_parallel_sizes to a list, [VALUE, VALUE] or null",
        ),
    ],
)
def test_a_value_of_a_wrong_type_comes_with_one_that_fits(override, fix):
    text = problem(override)
    assert f"error K2: {override.partition('=')[0]}: expected " in text and f"\n    fix: {fix}" in text
    if not fix.startswith("set"):  # as a shell hands it on
        load_recipe(TINY, [fix.replace('"', "")])


def test_all_problems_are_reported_at_once():
    text = problem("model.foo=1", "train.train_iters=x", "optimizer.lr=y")
    assert all(part in text for part in ("model.foo", "train.train_iters", "optimizer.lr"))
    text = problem("a=1,2", "~b", "c")
    assert all(part in text for part in ("a=1,2", "~b", "c"))


def test_unknown_recipe_suggests_the_nearest():
    assert f"did you mean '{TINY}'" in problem(recipe="llama_tiny_pretrain_confg")
    assert "recipe file not found" in problem(recipe="no/such/file.yaml")


def test_the_folder_of_a_run_has_a_recipe_in_it(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    run = Path("runs/a")
    run.mkdir(parents=True)
    assert "runs/a is a folder, not a recipe file\n    fix: name a YAML file in the folder" in problem(recipe="runs/a")
    (run / "config.yaml").write_text(to_yaml(load_recipe(TINY)))
    for name in ("runs/a", "runs/a/"):
        text = problem(recipe=name)
        assert f"{name} is a run folder, not a recipe\n    fix: --recipe runs/a/config.yaml" in text
    monkeypatch.chdir("runs")
    assert "fix: --recipe a/config.yaml" in problem(recipe="a")


def test_config_error_is_a_value_error_and_carries_the_violations():
    with pytest.raises(ValueError) as caught:
        load_recipe(TINY, ["model.foo=1"])
    assert isinstance(caught.value, AssertionError)
    assert [(v.rule, v.field) for v in caught.value.violations] == [("K1", "model.foo")]


def test_precedence_recipe_then_files_then_flags_then_overrides(tmp_path):
    first, second = tmp_path / "first.yaml", tmp_path / "second.yaml"
    first.write_text("train: {train_iters: 1, global_batch_size: 11}\nmodel: {num_layers: 11}\n")
    second.write_text("train: {train_iters: 2, micro_batch_size: 22}\nmodel: {transformer: {hidden_size: 22}}\n")
    flags = {"train.train_iters": 3, "train.micro_batch_size": 33}
    config = load_recipe(TINY, ["train.train_iters=4"], files=[first, second], flags=flags)
    assert (config.train.train_iters, config.train.micro_batch_size, config.train.global_batch_size) == (4, 33, 11)
    assert (config.model.num_layers, config.model.hidden_size) == (11, 22)
    first.write_text("model:\n  # nothing yet\n")
    assert load_recipe(TINY, files=[first]) == load_recipe(TINY)


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("model: {contxt_parallel_size: 4}", "did you mean 'model.context_parallel_size'?"),
        ("model: {context_parallel_size: abc}", "expected int, got 'abc'"),
        ("model: [1, 2]", "expected a mapping of settings"),
        ("model: 4", "model: expected a mapping of settings"),
        ("- 1", "does not hold a mapping"),
        ("a: [", "cannot read"),
        (f"a: {'9' * 5000}", "cannot read"),
        (f"a: {'[' * 3000}{']' * 3000}", "it is nested deeper than 32 levels"),
        ("model: {num_layers: 2, transformer: {num_layers: 3}}", "by model.transformer.num_layers to 3"),
    ],
)
def test_a_wrong_yaml_file_is_explained(tmp_path, text, expected):
    path = tmp_path / "extra.yaml"
    path.write_text(text)
    assert expected in problem(files=[path])
    assert "missing.yaml\n    fix: check the path" in problem(files=[tmp_path / "missing.yaml"])
    assert f"fix: check the path, which is relative to {Path.cwd()}" in problem(files=["no/missing.yaml"])


def test_a_recipe_of_ones_own(tmp_path):
    path = tmp_path / "dir with 'quotes'" / "mine.yaml"
    path.parent.mkdir()
    path.write_text(f"defaults: [{TINY}, _self_]\ntrain: {{train_iters: 3}}\n")
    config = load_recipe(path)
    assert (config.recipe, config.train.train_iters, config.model.hidden_size) == ("mine", 3, 128)
    path.write_text("defaults: [model: llama_tny]\n")
    text = problem(recipe=path)
    assert "mine.yaml: there is no file model/llama_tny.yaml; did you mean 'llama_tiny'?" in text
    path.write_text("defaults: [modle: llama_tiny]\n")  # codespell:ignore modle
    text = problem(recipe=path)
    missing = "there is no config group modle; did you mean 'model'?"  # codespell:ignore modle
    assert f"mine.yaml: {missing}\n    fix: the groups are model, " in text
    path.write_text("defaults: [llama_tiny_pretrain_confg]\n")
    text = problem(recipe=path)
    assert f"mine.yaml: there is no recipe llama_tiny_pretrain_confg; did you mean '{TINY}'?\n    fix: mega" in text
    path.write_text("model: {num_layrs: 3}\n")
    assert "did you mean 'model.num_layers'?" in problem(recipe=path)


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("defaults: text", "defaults must be a list"),
        ("defaults: {a: b}", "defaults must be a list"),
        ("defaults: [{a: b, c: d}]", "Too many keys in default item"),
        ("defaults: [5]", "Unsupported type in defaults"),
        ("defaults: [[a]]", "Unsupported type in defaults"),
        ("defaults: [{5: a}]", "key in the defaults list is not text"),
        ("defaults: [mine, _self_]", "included by its own defaults list"),
        (f"model: {'[' * 3000}{']' * 3000}", "mine.yaml is nested deeper than 32 levels"),
        (f"model: {{num_layers: {'9' * 5000}}}", "cannot compose"),
    ],
)
def test_a_wrong_recipe_file_is_explained(tmp_path, text, expected):
    path = tmp_path / "mine.yaml"
    path.write_text(text)
    found = problem(recipe=path)
    assert "--recipe: cannot compose" in found and expected in found


def test_a_recipe_file_that_cannot_be_one(tmp_path):
    path = tmp_path / "mine.yml"
    path.write_text("model: {num_layers: 3}\n")
    assert "fix: rename it to mine.yaml" in problem(recipe=path)
    for name in (f"{'x' * 300}.yaml", f"{'x' * 300}"):
        assert f"'{name}'" in problem(recipe=name) or f"not found: {name}" in problem(recipe=name)


def test_the_resolved_configuration_is_a_recipe_that_gives_itself(tmp_path):
    for name in (TINY, "llama31_405b_pretrain_config"):
        config = load_recipe(name)
        path = tmp_path / "config.yaml"
        path.write_text(to_yaml(config))
        assert asdict(load_recipe(path)) == asdict(config)
    assert list(yaml.safe_load(to_yaml(config))) == list(asdict(RunConfig()))


@pytest.mark.parametrize(
    ("value", "chosen"),
    [("bf16_mixed", "bf16"), ("bf16-mixed", "bf16"), ("bf16", "bf16"), ("fp32", "fp32"), ("fp16_mixed", "fp16")],
)
def test_bridge_precision_names(value, chosen):
    assert getattr(load_recipe(TINY, [f"mixed_precision={value}"]).mixed_precision, chosen)
    assert (
        load_recipe(TINY, [f"mixed_precision.{chosen}=true"]).mixed_precision
        == load_recipe(TINY, [f"mixed_precision={value}"]).mixed_precision
    )


def test_one_sequence_length_serves_model_and_data(tmp_path):
    for override in ("model.seq_length=512", "dataset.seq_length=512"):
        config = load_recipe(TINY, [override])
        assert config.model.seq_length == config.dataset.seq_length == config.model.max_position_embeddings == 512
    path = tmp_path / "config.yaml"
    path.write_text(to_yaml(load_recipe(TINY)))
    config = load_recipe(path, ["dataset.seq_length=512"])
    assert config.model.seq_length == config.dataset.seq_length == 512
    config = load_recipe(TINY, ["model.seq_length=512", "dataset.seq_length=256"])
    assert (config.model.seq_length, config.dataset.seq_length) == (512, 256)  # rule B3 reports it


def test_a_short_run_of_a_long_recipe_ends_its_warmup():
    def warmup(*overrides):
        config = load_recipe("llama32_1b_pretrain_config", overrides)
        return config.scheduler.warmup_iters(config.train.train_iters)

    assert (warmup(), warmup("train.train_iters=2"), warmup("train.train_iters=1")) == (2000, 1, 0)
    longer = ["train.train_iters=2", "scheduler.lr_decay_iters=3000"]
    assert (warmup(*longer), warmup(*longer, "scheduler.lr_warmup_fraction=0.1")) == (2000, 300)


def test_lengths_in_samples_are_whole_global_batches(tmp_path):
    own = [
        *("train.train_iters=null", "train.global_batch_size=16", "train.train_samples=1000"),
        *("scheduler.lr_warmup_iters=0", "scheduler.lr_warmup_samples=100", "scheduler.lr_decay_samples=900"),
        *("scheduler.lr_decay_style=WSD", "scheduler.lr_wsd_decay_samples=161"),
    ]
    config = load_recipe(TINY, own)
    schedule = config.scheduler
    assert config.train.train_iters == 62
    assert (schedule.lr_warmup_iters, schedule.lr_decay_iters, schedule.lr_wsd_decay_iters) == (6, 56, 10)
    assert load_recipe(TINY, [*own[:3], "scheduler.lr_decay_iters=null"]).scheduler.lr_decay_iters == 62
    assert check(config, 4, environment="cpu") == []
    assert config.finalize() is config and config.train.train_iters == 62
    file = tmp_path / "config.yaml"
    file.write_text(to_yaml(config))
    assert load_recipe(file) == config
    assert [each.message for each in check(load_recipe(TINY, own[:1]), 4)] == ["the run has no length"]


@pytest.mark.parametrize(
    "length", ["train.train", "scheduler.lr_warmup", "scheduler.lr_decay", "scheduler.lr_wsd_decay"]
)
def test_a_length_in_samples_and_iterations_is_refused(length):
    config = load_recipe(TINY, [f"{length}_iters=5", f"{length}_samples=160", "scheduler.lr_decay_style=WSD"])
    (found,) = [violation for violation in check(config, 4, environment="cpu") if violation.rule == "K56"]
    assert found.field == f"{length}_samples" and f"together with {length}_iters=5" in found.message
    ours, theirs = parse_fix(found.fix)
    for fix in (ours, theirs):
        typed = [f"{length}_iters=5", f"{length}_samples=160", "scheduler.lr_decay_style=WSD", *fix.overrides]
        mended = load_recipe(TINY, typed)
        assert not [violation for violation in check(mended, 4, environment="cpu") if violation.rule == "K56"]


def test_a_wheel_brings_every_file():
    """A wheel must have the files that an editable installation finds in the clone."""
    root = Path(__file__).parents[3]
    listed = tomllib.loads((root / "pyproject.toml").read_text())["tool"]["setuptools"]["data-files"]
    assert all(folder == f"share/megatron_cp/{Path(pattern).parent}" for folder, (pattern,) in listed.items())
    packed = {path for patterns in listed.values() for pattern in patterns for path in root.glob(pattern)}
    assert packed == {*(root / "recipes").rglob("*.yaml"), *(root / "configs").rglob("*.yaml")}


def test_a_missing_value_is_an_error(tmp_path):
    recipe = tmp_path / "r.yaml"
    recipe.write_text("model:\n  num_layers: ???\n  hidden_size: ???\ntrain:\n  train_iters: ???\n")
    with pytest.raises(ConfigError) as raised:
        load_recipe(recipe, ["train.train_iters=7", "model.hidden_size=64"])
    assert [(v.rule, v.field) for v in raised.value.violations] == [("K2", "model.num_layers")]
    config = load_recipe(recipe, ["train.train_iters=7", "model.hidden_size=64", "model.num_layers=3"])
    assert (config.train.train_iters, config.model.num_layers) == (7, 3)


def test_a_recipe_of_a_run_loads_from_where_it_saves(tmp_path):
    recipe = tmp_path / "config.yaml"
    recipe.write_text(to_yaml(load_recipe("llama_tiny_pretrain_config", ["checkpoint.save=runs/a"])))
    assert load_recipe(recipe).checkpoint.load == "runs/a"
    assert load_recipe(recipe, ["checkpoint.save=runs/b"]).checkpoint.load == "runs/b"
    recipe.write_text(to_yaml(load_recipe(recipe, ["checkpoint.save=runs/b", "checkpoint.load=runs/a"])))
    assert load_recipe(recipe, ["checkpoint.save=runs/c"]).checkpoint.load == "runs/a"


def test_a_single_override_needs_no_list():
    assert load_recipe(TINY, "model.num_layers=2").model.num_layers == 2


def test_derived_values_adapt_to_a_new_layout(tmp_path: Path) -> None:
    """A run's configuration is a recipe, and may get another layout or length."""
    layout = ["model.tensor_model_parallel_size=2", "model.cp_comm_type=p2p", "dataset.seq_length=128"]
    layout += ["model.hierarchical_context_parallel_sizes=null", "model.context_parallel_size=2"]
    other = ["model.tensor_model_parallel_size=1", "model.context_parallel_size=4", "dataset.seq_length=256"]
    for given, positions in (([], 256), (["model.max_position_embeddings=512"], 512)):
        config = load_recipe("llama_tiny_dynamic_cp_pretrain_config", [*layout, *given])
        assert config.model.max_seqlen_per_dp_cp_rank == 64
        (tmp_path / "config.yaml").write_text(to_yaml(config))
        assert load_recipe(tmp_path / "config.yaml").model == config.model
        model = load_recipe(tmp_path / "config.yaml", other).model
        assert (model.expert_tensor_parallel_size, model.max_position_embeddings) == (1, positions)
        assert (model.max_seqlen_per_dp_cp_rank, model.seq_length) == (64, 256)


def test_positions_that_are_part_of_the_model_stay(tmp_path: Path) -> None:
    """YaRN's scaling and rows of weights depend on these positions."""
    for overrides in (["model.position_embedding_type=learned_absolute"], ["model.position_embedding_type=yarn"]):
        config = load_recipe("llama_tiny_pretrain_config", [*overrides, "dataset.seq_length=128"])
        (tmp_path / "config.yaml").write_text(to_yaml(config))
        model = load_recipe(tmp_path / "config.yaml", ["dataset.seq_length=64"]).model
        assert model.max_position_embeddings == 128
