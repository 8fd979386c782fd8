"""The command line: exit codes, messages, output, and light imports."""

import os
import shlex
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest
import yaml

from megatron_cp import cli
from megatron_cp.common.errors import ConfigError, DataError, RuntimeFault
from megatron_cp.config.recipes import list_recipes

ROOT = Path(__file__).parents[3]
TINY = "llama_tiny_pretrain_config"


@pytest.fixture(autouse=True)
def _no_launcher(monkeypatch):
    for name in ("WORLD_SIZE", "RANK", "LOCAL_WORLD_SIZE", "LOCAL_RANK"):
        monkeypatch.delenv(name, raising=False)


@pytest.fixture
def run(capsys):
    def call(*argv: str) -> tuple[int, str, str]:
        code = cli.main(argv)
        captured = capsys.readouterr()
        return code, captured.out, captured.err

    return call


@pytest.fixture
def started(monkeypatch):
    """Record the configurations that would have been trained."""
    configs = []
    module = type(sys)("megatron_cp.training.train")
    module.run = lambda config: configs.append(config) or 0
    package = type(sys)("megatron_cp.training")
    monkeypatch.setitem(sys.modules, "megatron_cp.training", package)
    monkeypatch.setitem(sys.modules, "megatron_cp.training.train", module)
    return configs


def test_dry_run_prints_the_yaml_the_groups_and_the_verdict(run):
    code, out, err = run("train", "--recipe", TINY, "--dry-run", "--environment", "cpu")
    assert (code, err) == (0, "")
    resolved, _, report = out.partition("# llama_tiny_pretrain_config on 4 ranks\n")
    assert yaml.safe_load(resolved)["model"]["hierarchical_context_parallel_sizes"] == [2, 2]
    assert report.splitlines() == [
        "data: MOCK DATA (random tokens) | real: dataset.kind=null dataset.data_path=PREFIX",
        "CONTEXT_PARALLEL_GROUP [[0,1,2,3]]",
        "HIERARCHICAL_CONTEXT_PARALLEL_GROUPS a2a=[[0,1],[2,3]] p2p=[[0,2],[1,3]]",
        "DATA_PARALLEL_GROUP [[0],[1],[2],[3]]",
        "no setting breaks a rule; memory is not checked",
    ]


def test_the_seed_command_line(run):
    line = (
        "--recipe llama32_1b_pretrain_config model.context_parallel_size=4 model.cp_comm_type=a2a+p2p "
        "model.hierarchical_context_parallel_sizes=[2,2] train.train_iters=2"
    )
    code, out, _ = run("train", *line.split(), "--dry-run", "--world-size", "4")
    assert code == 0 and "a2a=[[0,1],[2,3]] p2p=[[0,2],[1,3]]" in out


@pytest.mark.parametrize("command", [("train", "--dry-run"), ("validate",)])
def test_violations_exit_2_and_are_all_listed(run, command):
    code, out, err = run(
        *command, "--recipe", TINY, "model.hierarchical_context_parallel_sizes=[2,3]", "--world-size", "6"
    )
    assert code == 2
    assert "# llama_tiny_pretrain_config on 6 ranks" in out
    assert "error A2: model.context_parallel_size=4" in err and "error C5" in err and "fix:" in err


def test_a_run_gets_the_composed_configuration(run, started, monkeypatch):
    monkeypatch.setenv("WORLD_SIZE", "4")
    flags = (
        "-ms 5 -gb 32 -mb 4 -sl 128 -cp 4 --lr 1e-4 --min-lr 1e-5 --warmup_iters 1 "
        "--save_dir s --load-dir l --save_interval 2"
    )
    code, _, _ = run("train", "--recipe", TINY, *flags.split(), "train.train_iters=7")
    assert code == 0
    (config,) = started
    assert (config.train.train_iters, config.train.global_batch_size, config.train.micro_batch_size) == (7, 32, 4)
    assert (config.dataset.seq_length, config.model.seq_length, config.optimizer.lr) == (128, 128, 1e-4)
    assert (config.checkpoint.save, config.checkpoint.load, config.checkpoint.save_interval) == ("s", "l", 2)


def test_every_parallel_size_has_bridges_short_flag(run):
    sizes = {"tp": "tensor_model", "pp": "pipeline_model", "vp": "virtual_pipeline_model", "cp": "context"}
    sizes |= {"ep": "expert_model", "etp": "expert_tensor"}
    for number, (short, name) in enumerate(sizes.items(), 2):
        for flag in (f"-{short}", f"--{name}_parallel_size", f"--{name}-parallel-size".replace("_", "-")):
            code, out, _ = run("train", "--recipe", TINY, flag, str(number), "--print-config")
            assert code == 0 and yaml.safe_load(out)["model"][f"{name}_parallel_size"] == number


def test_overrides_may_stand_anywhere(run, started, monkeypatch):
    monkeypatch.setenv("WORLD_SIZE", "4")
    assert run("train", "train.train_iters=1", "--recipe", TINY, "model.num_layers=2", "-ms", "9", "rng.seed=3")[0] == 0
    assert (started[0].train.train_iters, started[0].model.num_layers, started[0].rng.seed) == (1, 2, 3)


def test_a_run_that_breaks_a_rule_does_not_start(run, started):
    code, _, err = run("train", "--recipe", TINY)  # one rank, but four are needed
    assert code == 2 and not started
    assert "world size (1) is not divisible by total_model_size (4)" in err
    assert "start 4 ranks (megatron-cp train -n 4 or a multiple)" in err


def test_a_run_logs_auto_settings_and_warnings(run, started, monkeypatch):
    monkeypatch.setenv("WORLD_SIZE", "4")
    code, out, _ = run(
        "train", "--recipe", TINY, "model.cp_comm_type=auto", "model.hierarchical_context_parallel_sizes=null",
        "model.window_size=[8,4]", "--gpus-per-node", "2",
    )  # fmt: skip
    assert code == 0 and "model.cp_comm_type=auto is all_gather: the fastest of 4 " in out and "warning K12" in out
    assert started[0].model.cp_comm_type == "all_gather"
    code, out, _ = run("train", "--recipe", TINY)
    assert (code, out) == (0, "")


def test_a_described_environment_is_for_looking_only(run, started):
    for flag in (["--environment", "gpu"], ["--world-size", "4"]):
        code, _, err = run("train", "--recipe", TINY, *flag)
        assert code == 2 and "need --dry-run" in err and not started


@pytest.mark.parametrize(
    ("rank", "local_rank", "waits", "begin"),
    [("0", "0", [], ""), ("4", "0", [3.0], "rank 4, on node1: "), ("5", "1", [6.0], "rank 5, on node1: ")],
    ids=["the first rank", "the first of another node", "another"],
)
def test_one_rank_of_a_node_reports(run, started, monkeypatch, rank, local_rank, waits, begin):
    """Only one rank of a node may report.

    The launcher ends the other ranks of its node as soon as one fails; ranks of other nodes get no message.
    """
    slept = []
    monkeypatch.setattr("time.sleep", slept.append)
    monkeypatch.setattr("socket.gethostname", lambda: "node1")
    for name, value in {"RANK": rank, "LOCAL_RANK": local_rank, "WORLD_SIZE": "7", "LOCAL_WORLD_SIZE": "4"}.items():
        monkeypatch.setenv(name, value)
    code, _, err = run("train", "--recipe", TINY)
    assert code == 2 and err.startswith(f"megatron-cp: {begin}the configuration cannot run\nerror ") and slept == waits


@pytest.mark.parametrize("text", ["four", "", "\u00b2", "-1", "9" * 5000])
def test_invalid_launcher_variables(run, started, monkeypatch, text):
    monkeypatch.setenv("WORLD_SIZE", text)
    for command in (["train"], ["validate"], ["verify"]):
        code, _, err = run(*command, "--recipe", TINY)
        assert code == 2 and f"K35: WORLD_SIZE: the variable must be a number, got '{text[:40]}'" in err and not started
    monkeypatch.setenv("WORLD_SIZE", "4")
    monkeypatch.setenv("RANK", text)
    for command in (["train"], ["verify"]):
        code, _, err = run(*command, "--recipe", TINY)
        assert code == 2 and f"K35: RANK: the variable must be a number, got '{text[:40]}'" in err and not started
    monkeypatch.setenv("RANK", "0")
    for name in ("LOCAL_RANK", "LOCAL_WORLD_SIZE"):
        with monkeypatch.context() as local:
            local.setenv(name, text)
            code, _, err = run("train", "--recipe", TINY)
        assert code == 2 and f"K35: {name}: the variable must be a number, got '{text[:40]}'" in err and not started
    code, _, err = run("validate", "--recipe", "nope")
    assert code == 2 and "unknown recipe 'nope'" in err


def test_a_missing_rank(run, started, monkeypatch):
    """A missing rank must be reported before the others wait for it."""
    monkeypatch.setenv("WORLD_SIZE", "4")
    monkeypatch.setenv("RANK", "4")
    for command in (["train"], ["verify"]):
        code, _, err = run(*command, "--recipe", TINY)
        assert code == 2 and "K35: RANK=4: the variable must be below WORLD_SIZE=4" in err and not started


@pytest.mark.parametrize(
    ("error", "code"),
    [
        (ConfigError("no such file"), 2),
        (DataError("empty corpus"), 2),
        (RuntimeFault("rank 3 died"), 1),
        (RuntimeFault("corpus holds token 502", on_all_ranks=True, of_data=True), 2),
        (KeyboardInterrupt(), 130),
    ],
)
def test_errors_of_a_run_become_exit_codes(run, started, monkeypatch, error, code):
    def fail(config):
        raise error

    monkeypatch.setattr(sys.modules["megatron_cp.training.train"], "run", fail)
    monkeypatch.setenv("WORLD_SIZE", "4")
    got, _, err = run("train", "--recipe", TINY)
    assert got == code and str(error) in err and "Traceback" not in err


@pytest.mark.parametrize("rank", [0, 1])
@pytest.mark.parametrize("module", ["megatron_cp.rules", "hydra"], ids=["before the command", "in it"])
@pytest.mark.parametrize("program", ["-m", "run_recipe.py"])
def test_an_interrupted_command_prints_no_traceback(program, module, rank):
    start = 'runpy.run_module("megatron_cp", run_name="__main__")'
    if program == "run_recipe.py":
        start = 'runpy.run_path("scripts/training/run_recipe.py", run_name="__main__")'
    script = f"""
import os, runpy, signal, sys
class Interrupting:
    def find_spec(self, name, *others):
        if name == {module!r}:
            os.kill(os.getpid(), signal.SIGINT)
sys.meta_path.insert(0, Interrupting())
sys.argv = ["megatron-cp", *{["train"] * (program == "-m")}, "--recipe", {TINY!r}]
{start}
"""
    done = subprocess.run(
        [sys.executable, "-c", script], cwd=ROOT, env=os.environ | {"RANK": str(rank)},
        capture_output=True, text=True, timeout=180, check=False,
    )  # fmt: skip
    reported = "" if rank else "megatron-cp: interrupted\n"  # the first reports for all
    assert (done.returncode, done.stdout, done.stderr) == (130, "", reported)


def test_the_installed_program_is_the_module():
    """The module answers Ctrl-C from its first line on."""
    programs = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["scripts"]
    assert programs == {"megatron-cp": "megatron_cp.__main__:main"}


def test_faults_of_data_exit_with_two(run, started, monkeypatch):
    def fail(config):
        raise DataError("corpus.jsonl:2: not valid JSON")

    monkeypatch.setattr(sys.modules["megatron_cp.training.train"], "run", fail)
    monkeypatch.setenv("WORLD_SIZE", "4")
    assert run("train", "--recipe", TINY)[::2] == (2, "megatron-cp: corpus.jsonl:2: not valid JSON\n")


@pytest.mark.parametrize(
    ("argv", "expected"),
    [
        ([], "usage: megatron-cp COMMAND"),
        (["trian"], "did you mean 'train'?"),  # codespell:ignore trian
        (["train"], "no recipe is given. Fix: --recipe NAME"),
        (["train", "--recipe", TINY, "--no-such-flag"], "unrecognized arguments: --no-such-flag"),
        (["train", "--recipe", TINY, "-ms", "many"], "invalid int value"),
        (["train", "--recipe", "llama_tiny"], "did you mean"),
        (
            ["validate", "--recipe", TINY, "--environment", "nowhere.yaml"],
            "K35: --environment: 'nowhere.yaml' is not cpu or gpu, and not a readable file",
        ),
        (["validate", "--recipe", TINY, "--environment", "x" * 300], "xxx' is not cpu or gpu, and not a readable file"),
        (["validate", "--recipe", TINY, "--gpus-per-node", "0"], "--gpus-per-node: must be an integer of at least 1"),
        (["train", "--recipe", TINY, "--gpus-per-node", "-3"], "--gpus-per-node: must be an integer of at least 1"),
        (["train", "--recipe", TINY, "--lr", "inf"], "optimizer.lr: expected finite number, got inf"),
        (["validate", "--recipe", TINY, "--save_dir", ""], "checkpoint.save=: an empty path names no folder"),
        (["verify", "--recipe", TINY, "--against", "a 'b"], '--against "a \'b": No closing quotation'),
        (["validate", "--explain", "Z9"], "K35: --explain: no rule 'Z9'"),
    ],
)
def test_usage_errors_exit_2(run, argv, expected):
    code, _, err = run(*argv)
    assert code == 2 and expected in err


def test_lists_prints_and_explains(run):
    for argv in (["recipes"], ["train", "--list-recipes"]):
        code, out, _ = run(*argv)
        assert code == 0 and [line.split()[0] for line in out.splitlines()] == list(list_recipes())
    code, out, _ = run("train", "--recipe", TINY, "--print-config", "rng.seed=5")
    assert code == 0 and yaml.safe_load(out)["rng"]["seed"] == 5
    code, out, _ = run("train", "--explain", "c9")
    assert code == 0 and out.startswith("C9 (error)") and "megatron-cp validate" in out and "fix:" in out
    code, out, _ = run("train", "--help")
    assert code == 0 and "-> train.train_iters" in out and "-> model.context_parallel_size" in out


def test_an_environment_from_a_file(run, tmp_path):
    path = tmp_path / "environment.yaml"
    path.write_text("device: gpu\ncompute_capability: 9.0\nvariables: {CUDA_DEVICE_MAX_CONNECTIONS: 8}\n")
    code, _, err = run("validate", "--recipe", TINY, "--environment", str(path))
    assert code == 0 and "warning A12" in err and "is 8" in err
    path.write_text("devise: gpu\n")
    code, _, err = run("validate", "--recipe", TINY, "--environment", str(path))
    assert code == 2 and "did you mean 'device'?" in err


def shell(*command: str) -> tuple[subprocess.CompletedProcess, float]:
    environment = {k: v for k, v in os.environ.items() if k not in ("WORLD_SIZE", "RANK")}
    before = os.times()
    result = subprocess.run(
        command, cwd=ROOT, env=environment, capture_output=True, text=True, timeout=180, check=False
    )
    after = os.times()
    return result, after.children_user + after.children_system - before.children_user - before.children_system


@pytest.mark.parametrize(
    "arguments",
    [
        ["--recipe", TINY, "--dry-run"],
        ["--recipe", "llama31_405b_pretrain_config", "--dry-run", "--world-size", "1024", "--environment", "gpu"],
        ["--recipe", TINY, "--print-config"],
        ["--list-recipes"],
        ["--help"],
        ["--explain", "C9"],
    ],
    ids=lambda arguments: " ".join(arguments),
)
def test_everything_but_a_run_takes_less_than_a_second_and_no_torch(arguments):
    script = (
        "import sys; from megatron_cp.cli import main; code = main(sys.argv[1:]);"
        "heavy = {'torch', 'numpy', 'megatron', 'transformers'} & set(sys.modules);"
        "assert not heavy, heavy; sys.exit(code)"
    )
    timings = []
    for _ in range(3):
        result, seconds = shell(sys.executable, "-c", script, "train", *arguments)
        assert result.returncode == 0, result.stderr
        timings.append(seconds)
    # CPU time, the best of three: the machine may be busy with other things.
    assert min(timings) < 1.0, timings


def test_the_script_is_the_train_command():
    script, command = (
        shell(sys.executable, *program, "--recipe", TINY, "--dry-run")[0]
        for program in (["scripts/training/run_recipe.py"], ["-m", "megatron_cp", "train"])
    )
    assert script.returncode == command.returncode == 0
    assert script.stdout == command.stdout


def test_a_closed_output_pipe_is_no_error():
    process = subprocess.run(
        f"{shlex.quote(sys.executable)} -m megatron_cp train --recipe {TINY} --print-config | head -1",
        shell=True, cwd=ROOT, capture_output=True, text=True, timeout=180, check=False,
    )  # fmt: skip
    assert process.stdout == "model:\n" and "Traceback" not in process.stderr


@pytest.mark.parametrize(
    ("command", "code", "reported"),
    [
        (f"validate --recipe {TINY} >&-", 0, ""),
        ("doctor >&-", 0, ""),
        ("recipes >/dev/full", 1, "megatron-cp: cannot write the output: No space left on device\n"),
        ("schedule --distribution mock --count 64 --longest 8192 --ranks 8 | true", 0, ""),
    ],
)
def test_an_unwritable_output_prints_no_traceback(command, code, reported):
    done = subprocess.run(
        ["bash", "-o", "pipefail", "-c", f"{shlex.quote(sys.executable)} -m megatron_cp {command}"],
        cwd=ROOT, capture_output=True, text=True, timeout=180, check=False,
    )  # fmt: skip
    assert (done.returncode, done.stderr) == (code, reported)


def test_a_recipes_variables_are_set_before_torch_and_exported_ones_win(run, started, monkeypatch):
    monkeypatch.setenv("NVTE_DEBUG", "0")
    monkeypatch.setenv("NVTE_DEBUG_LEVEL", "")
    monkeypatch.delenv("NVTE_DEBUG_LEVEL")
    code, _, error = run(
        "train", "--recipe", TINY, "model.context_parallel_size=1", "env_vars={NVTE_DEBUG: 1, NVTE_DEBUG_LEVEL: 2}"
    )
    assert code == 0 and len(started) == 1, error
    assert (os.environ["NVTE_DEBUG"], os.environ["NVTE_DEBUG_LEVEL"]) == ("0", "2")
