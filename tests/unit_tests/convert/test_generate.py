"""Generated text equals transformers' and our own model's.

The export is reused.
"""

import io
import json
import os
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from megatron_cp.cli import main
from megatron_cp.common.errors import ConfigError
from megatron_cp.common.terminal import printable
from megatron_cp.config.run_config import TokenizerConfig
from megatron_cp.convert.checkpoint import find_checkpoint, single_rank_config, whole_model
from megatron_cp.convert.exporting import copy_chat_template
from megatron_cp.convert.generating import Sampling, TextModel
from megatron_cp.convert.origin import write_origin
from megatron_cp.data.text.tokenizers import train_bpe
from tests.ranks import run_ranks
from tests.unit_tests.convert.published import publish

PROMPT = "the rain in spain stays"
TEMPLATE = "{% for m in messages %}[{{ m['role'] }}] {{ m['content'] }}\n{% endfor %}[a]"
NEW = 12
GREEDY = Sampling(NEW, 0.0, None, None, 0)


def imported(folder: Path, **changes: Any) -> Path:
    """Import a random model with tokenizer and chat template; return the run's folder."""
    publish(folder / "hf", "llama", vocab_size=300, **changes)
    train_bpe([f"{PROMPT} mainly in the plain"] * 4, 300, folder / "tokenizer")
    settings = json.loads((folder / "tokenizer/tokenizer_config.json").read_text())
    for path in (folder / "tokenizer").iterdir():
        (folder / "hf" / path.name).write_bytes(path.read_bytes())
    (folder / "hf/tokenizer_config.json").write_text(json.dumps(settings | {"chat_template": TEMPLATE}))
    assert main(["convert", "import", "--hf-model", f"{folder}/hf", "--megatron-path", f"{folder}/run"]) == 0
    return folder / "run"


def generate(*arguments: Any, typed: str = "") -> tuple[int, str, str]:
    """Return exit code, standard output and standard error of the command."""
    outputs = sys.stdout, sys.stderr, sys.stdin
    sys.stdout, sys.stderr = printed, logged = io.StringIO(), io.StringIO()
    sys.stdin = io.TextIOWrapper(io.BytesIO(typed.encode()))
    try:
        code = main(["generate", *map(str, arguments)])
    finally:
        sys.stdout, sys.stderr, sys.stdin = outputs
    return code, printed.getvalue(), logged.getvalue()


def transformers_text(folder: Path, ids: list[int]) -> str:
    model = AutoModelForCausalLM.from_pretrained(folder)
    found = model.generate(torch.tensor([ids]), max_new_tokens=NEW, do_sample=False)
    return printable(AutoTokenizer.from_pretrained(folder).decode(found[0, len(ids) :]))


def own_tokens(run: Path, ids: list[int], count: int) -> list[int]:
    """Return the most probable tokens by the logits of our own model."""
    found, tokens = find_checkpoint(run, None), torch.tensor([ids])
    config = single_rank_config(found.config, found.dtype)
    with whole_model(config) as whole, torch.no_grad():
        whole.load(found.folder)
        whole.module.eval()
        for _ in range(count):
            logits = whole.module(tokens, torch.arange(tokens.shape[1])[None], None)
            tokens = torch.cat([tokens, logits[:, -1:].argmax(-1)], 1)
    return tokens[0, len(ids) :].tolist()


def all_ways(folder: str) -> dict[str, Any]:
    os.environ.pop("RANK", None)
    os.environ.pop("WORLD_SIZE", None)
    path = Path(folder)
    run, new = imported(path), ("--max-new-tokens", NEW)
    results = {"first": generate(run, PROMPT, *new)}
    weights = run / "exported/iteration_0000000/model.safetensors"
    written = weights.stat().st_mtime_ns
    results["two"] = generate(run, PROMPT, "-", *new, typed="in the plain\n")
    assert weights.stat().st_mtime_ns == written
    hf = run / "exported/iteration_0000000"
    results["chat"] = generate(hf, PROMPT, "--chat", *new)
    results["sampled"] = [generate(hf, PROMPT, "--temperature", 2, "--seed", seed, *new)[1] for seed in (1, 1, 2)]
    assert main(["convert", "export", "--megatron-path", str(run), "--hf-path", f"{path}/out"]) == 0
    tokenizer = AutoTokenizer.from_pretrained(path / "out")
    ids = tokenizer(PROMPT)["input_ids"]
    results["theirs"] = transformers_text(path / "out", ids)
    results["ours"] = printable(tokenizer.decode(own_tokens(run, ids, NEW)))
    turn = [{"role": "user", "content": PROMPT}]
    chat = tokenizer.apply_chat_template(turn, add_generation_prompt=True)["input_ids"]
    results["their chat"] = transformers_text(path / "out", chat)
    weights.unlink()  # no longer complete
    results["again"] = generate(run, PROMPT, *new)
    (run / "iter_0000000/checksums.json").write_text("{}")  # no longer the same checkpoint
    results["changed"] = generate(run, PROMPT, *new)
    return results


def test_text_is_transformers_and_our_own_models(tmp_path: Path) -> None:
    [found] = run_ranks(all_ways, 1, str(tmp_path))
    code, printed, logged = found["first"]
    assert code == 0 and printed == f"prompt: {PROMPT}\ntext: {found['theirs']}\n", logged
    assert found["theirs"] == found["ours"]
    folder = tmp_path / "run/exported/iteration_0000000"
    assert re.search(rf"exported .*, [\d.]+ MB\): {folder}\n", logged)
    assert f"vllm serve {folder} (or" in logged.splitlines()[-1]
    assert found["two"][1].startswith(printed + "\nprompt: in the plain\ntext: ")
    assert f"reusing the export of {tmp_path}/run/iter_0000000: {folder}" in found["two"][2]
    assert found["chat"][1] == f"prompt: {PROMPT}\ntext: {found['their chat']}\n"
    assert found["their chat"] != found["theirs"]
    first, same, other = found["sampled"]
    assert first == same != other
    assert found["again"][:2] == found["first"][:2] and "exported" in found["again"][2]
    # The checksums do not fit the files: the checkpoint is read again, and refused.
    assert found["changed"][0] == 1 and "cannot be read" in found["changed"][2]


def model_of(folder: Path, tokenizer: TokenizerConfig) -> TextModel:
    """Write a model without tokenizer files, as the run's export has it."""
    publish(folder, "llama", vocab_size=300)
    write_origin(folder, folder, tokenizer)
    model = TextModel(folder)
    model.load()
    return model


@pytest.mark.parametrize(
    ("tokenizer", "prompt", "ids"),
    [
        (TokenizerConfig("ByteLevelTokenizer"), "né", [110, 195, 169]),
        (TokenizerConfig("NullTokenizer", vocab_size=300), "5 299", [5, 299]),
    ],
)
def test_runs_without_tokenizer_files_generate(
    tmp_path: Path, tokenizer: TokenizerConfig, prompt: str, ids: list[int]
) -> None:
    model = model_of(tmp_path, tokenizer)
    assert model.encode(prompt, chat=False) == ids and not model.has_tokenizer_files
    pieces: list[str] = []
    tokens = model.generate(ids, GREEDY, pieces.append)
    theirs = AutoModelForCausalLM.from_pretrained(tmp_path).generate(
        torch.tensor([ids]), max_new_tokens=NEW, do_sample=False
    )[0, len(ids) :]
    assert tokens == theirs[: len(tokens)].tolist()
    if tokenizer.tokenizer_type == "NullTokenizer":
        assert "".join(pieces) == " ".join(map(str, tokens))


def test_a_run_tuned_with_a_template_of_its_own_talks_with_it(tmp_path: Path) -> None:
    model = model_of(tmp_path / "export", TokenizerConfig("ByteLevelTokenizer"))
    with pytest.raises(ConfigError, match=r"has no chat template\. Fix: leave out --chat"):
        model.encode("hi", chat=True)
    (tmp_path / "mine.jinja").write_text(TEMPLATE)
    assert copy_chat_template(f"{tmp_path}/mine.jinja", tmp_path / "export") == ""
    assert bytes(model.encode("hi", chat=True)).decode() == "[user] hi\n[a]"
    assert "gone.jinja: cannot be read: No such file" in copy_chat_template(f"{tmp_path}/gone.jinja", tmp_path)
    assert copy_chat_template(None, tmp_path) == "" and not (tmp_path / "chat_template.jinja").exists()
    (tmp_path / "export/chat_template.jinja").write_text("{{ raise_exception('users first') }}")
    with pytest.raises(ConfigError, match=r"failed: .*users first\. Fix: leave out --chat"):
        model.encode("hi", chat=True)


def import_a_model(folder: str) -> None:
    os.environ.pop("RANK", None)
    os.environ.pop("WORLD_SIZE", None)
    imported(Path(folder))


@pytest.mark.slow
def test_two_at_once_export_once(tmp_path: Path) -> None:
    run_ranks(import_a_model, 1, str(tmp_path))
    command = [sys.executable, "-m", "megatron_cp", "generate", str(tmp_path / "run"), PROMPT, "--max-new-tokens", "4"]
    both = [subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) for _ in range(2)]
    (one, first), (two, second) = (each.communicate() for each in both)
    assert [each.returncode for each in both] == [0, 0], first + second
    assert one == two and sorted("reusing the export" in text for text in (first, second)) == [False, True]


def test_a_model_that_computes_nan_is_reported(tmp_path: Path) -> None:
    model = model_of(tmp_path, TokenizerConfig("ByteLevelTokenizer"))
    next(model._model.parameters()).data.fill_(torch.nan)
    with pytest.raises(RuntimeError, match=r"computes nan\. Fix: choose an earlier checkpoint"):
        model.generate([1, 2], GREEDY, str)


BAD: list[tuple[list[Any], str]] = [
    (["run", ""], "PROMPT: is empty. Fix: write a text"),
    (["run", "-"], "PROMPT: is empty. Fix: write a text"),
    (["run", "a", "--temperature", -1], "--temperature=-1.0: must be 0 or more. Fix: --temperature 0"),
    (["run", "a", "--temperature", "nan"], "--temperature=nan: must be 0 or more"),
    (["run", "a", "--top-p", 0.5], "--top-p=0.5: has no effect with --temperature 0 (greedy). Fix: --temperature 1"),
    (["run", "a", "--temperature", 1, "--top-k", 0], "--top-k=0: must be at least 1. Fix: --top-k 50"),
    (["run", "a", "--max-new-tokens", 0], "--max-new-tokens=0: must be at least 1"),
    (["run", "a", "--iteration", 7], "megatron-cp generate run: has no checkpoint 7. Fix: --iteration 0 (of [0])"),
    (["none", "a"], "megatron-cp generate none: has no checkpoint. Fix: megatron-cp generate FOLDER (of a run)"),
    ([".", "a"], "Fix: megatron-cp generate run (run folders in .: run)"),
    (["run", "in " * 70], "tokens, and the model has 64 positions for prompt and text. Fix: a prompt of at most 63"),
    (["plain", "a"], "config.json does not match the weights: model.norm.weight"),
    (["plain", "a", "--iteration", 1], "--iteration: plain has no checkpoints. Fix: leave it out"),
    (["plain", "a", "--chat"], "--chat: plain has no chat template. Fix: leave out --chat"),
]


def bad_calls(folder: str) -> list[tuple[int, str, str]]:
    os.environ.pop("RANK", None)
    os.environ.pop("WORLD_SIZE", None)
    os.chdir(folder)
    imported(Path())
    found = [generate(*arguments) for arguments, _ in BAD[:-3]]
    plain = Path("run/exported/iteration_0000000").rename("plain")
    (plain / "tokenizer_config.json").write_text('{"eos_token": "<|endoftext|>"}')
    from safetensors.torch import load_file, save_file

    tensors = load_file(plain / "model.safetensors")
    del tensors["model.norm.weight"]
    save_file(tensors, plain / "model.safetensors", metadata={"format": "pt"})
    return found + [generate(*arguments) for arguments, _ in BAD[-3:]]


def test_bad_input_ends_with_exit_code_2(tmp_path: Path) -> None:
    [found] = run_ranks(bad_calls, 1, str(tmp_path))
    for (code, printed, logged), (arguments, message) in zip(found, BAD, strict=True):
        assert code == 2 and message in logged and not printed, (arguments, logged)
        assert "Traceback" not in logged and "error: error" not in logged
