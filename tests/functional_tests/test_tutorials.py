"""Run each tutorial's code blocks, one after the other, in an empty folder.

A block with a title is saved under it; a ``bash`` block is run. Other blocks show other programs' commands, or output.
"""

import os
import re
import subprocess
import sys
import sysconfig
from collections.abc import Callable
from pathlib import Path

import pytest
from tokenizers import ByteLevelBPETokenizer
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

FOLDER = Path(__file__).parents[2] / "docs" / "tutorials"
PAGES = sorted(path.stem for path in FOLDER.glob("*.md"))
CHATML = (
    "{% for message in messages %}{{ '<|im_start|>' + message.role + '\n' + message.content + '<|im_end|>\n' }}"
    "{% endfor %}{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)
BLOCK = re.compile(r"^```(\w+)(?: title=\"([\w.]+)\")?\n(.*?)^```$", re.M | re.S)


def small_smollm2(folder: Path) -> None:
    """Write a model of SmolLM2's shape for 256 tokens, with random weights.

    Its tokenizer has SmolLM2's special tokens, and a chat template of the same form.
    """
    words = ByteLevelBPETokenizer()
    special = ["<|endoftext|>", "<|im_start|>", "<|im_end|>"]
    words.train([f"{sysconfig.get_path('stdlib')}/bisect.py"], vocab_size=512, special_tokens=special)
    ends = {"bos_token": "<|im_start|>", "eos_token": "<|im_end|>", "chat_template": CHATML}
    PreTrainedTokenizerFast(tokenizer_object=words._tokenizer, **ends).save_pretrained(folder)
    sizes = dict(hidden_size=72, intermediate_size=192, num_hidden_layers=2, num_attention_heads=9)
    config = LlamaConfig(
        vocab_size=512,
        num_key_value_heads=3,
        max_position_embeddings=256,
        tie_word_embeddings=True,
        eos_token_id=2,
        **sizes,
    )
    LlamaForCausalLM(config).save_pretrained(folder)


# A page's model, and smaller values for the variables of its shell scripts.
MODELS: dict[str, Callable[[Path], None]] = {"lengthen_and_tune": small_smollm2}
SMALL = {
    "lengthen_and_tune": {"SHORT": "256", "LONG": "1024", "NEEDLES": "256,512", "STEPS": "2", "TUNING_STEPS": "2"},
}


def with_values(text: str, values: dict[str, str]) -> str:
    """Return a shell script with other values for its variables."""
    for name, value in values.items():
        text, found = re.subn(rf"^{name}=.*$", f"{name}={value}", text, flags=re.M)
        assert found == 1, f"{name} must be set once"
    return text


def run_blocks(page: str, folder: Path, chosen: str = "") -> int:
    """Save and run a page's blocks that match ``chosen``; return how many ran."""
    if page in MODELS:
        MODELS[page](folder / "models" / "smollm2")
    programs = f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}"
    ran = 0
    for language, title, text in BLOCK.findall((FOLDER / f"{page}.md").read_text(encoding="utf-8")):
        if title:
            values = SMALL.get(page, {}) if title.endswith(".sh") else {}
            (folder / title).write_text(with_values(text, values), encoding="utf-8")
        elif language == "bash" and re.search(chosen, text):
            command = ["bash", "-euo", "pipefail", "-c", text]
            environment = {**os.environ, "PATH": programs, "OMP_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": ""}
            done = subprocess.run(command, cwd=folder, env=environment, capture_output=True, text=True, timeout=900)
            assert done.returncode == 0, f"{text}\n{done.stdout[-2000:]}\n{done.stderr[-2000:]}"
            ran += 1
    return ran


def test_there_are_tutorials() -> None:
    assert len(PAGES) >= 6
    assert all(BLOCK.search((FOLDER / f"{page}.md").read_text(encoding="utf-8")) for page in PAGES)


def test_dry_run_commands(tmp_path: Path) -> None:
    assert run_blocks("from_megatron_lm", tmp_path, "--dry-run") == 2


@pytest.mark.slow
@pytest.mark.timeout(1800)
@pytest.mark.parametrize("page", PAGES)
def test_a_tutorial_runs(page: str, tmp_path: Path) -> None:
    assert run_blocks(page, tmp_path) >= 1
