"""Train a tiny Llama to find needles, lengthen it with YaRN, and test both.

    python benchmarks/retrieval.py FOLDER mixed_precision.fp32=false mixed_precision.bf16=true  # a GPU: some minutes
    python benchmarks/retrieval.py FOLDER --scale 0.002                       # on a CPU, to try the script: two minutes
    python benchmarks/retrieval.py FOLDER --test-with-ranks 1,4               # test again what FOLDER has

The first training has samples of up to 2K tokens, the second of up to 8K. Everything is made in FOLDER: a tokenizer
with a token for each word and each two digits, samples (``megatron-cp evaluate --needles --write``), a model of two
layers, its extension with 100 further steps, and the scores of both. On a CPU the whole training takes hours.
"""

from __future__ import annotations

import argparse
import itertools
import json
import re
import string
import subprocess
import sys
from pathlib import Path

from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from megatron_cp.config.flags import add_overrides

RECIPE = """\
defaults:
  - model: llama_tiny
  - parallel: none
  - optimizer: adam
  - scheduler: cosine
  - _self_
recipe_world_size: 1
model:
  num_layers: 2
  hidden_size: 128
  ffn_hidden_size: 256
  num_attention_heads: 4
  num_query_groups: 4
  sequence_packing_scheduler: dp_balanced
  max_seqlen_per_dp_cp_rank: 131072
train:
  global_batch_size: 256
dataset:
  kind: jsonl
  seq_length: 2048
  split: "1,0,0"
validation:
  eval_iters: 0
optimizer:
  lr: 2.0e-3
  min_lr: 2.0e-4
scheduler:
  lr_warmup_iters: 30
"""
# Tasks, tokens of a sample, samples
SHORT = [
    ("multi_query:4", "128", 40_000), ("multi_query:8", "256", 20_000), ("multi_query:12", "512", 8_000),
    ("multi_query:16", "1K", 5_000), ("multi_query:16", "2K", 4_000), ("single,multi_key:8", "512", 120),
    ("single,multi_key:8", "2K", 60),
]  # fmt: skip
SHORT_STEPS, LONG_STEPS = 1300, 100
LONG = [("multi_query:16", "2K", 2_000), ("multi_query:16", "4K", 500), ("multi_query:16", "8K", 1_000)]
YARN = (
    "dataset.seq_length=8192", "model.position_embedding_type=yarn", "model.yarn_rotary_scaling_factor=4",
    "model.yarn_original_max_position_embeddings=2048", "train.global_batch_size=32", "optimizer.lr=5e-4",
    "optimizer.min_lr=5e-5", "scheduler.lr_warmup_iters=5",
)  # fmt: skip
PIECES = r" ?\d\d|\d| ?[A-Za-z]+|\n|[^A-Za-z\d]"


def command(*arguments: str) -> None:
    subprocess.run([sys.executable, "-m", "megatron_cp", *arguments], check=True)


def write_tokenizer(folder: Path, recipe: Path) -> str:
    """Write the tokenizer into ``folder`` and return the override that names it."""
    texts = folder / "texts.jsonl"
    request = ("--needles", "single,multi_query:64", "--lengths", "16K", "--samples", "40", "--write", str(texts))
    command("evaluate", str(recipe), *request, "tokenizer.tokenizer_type=ByteLevelTokenizer")
    pairs = [f"{number:02d}" for number in range(100)]
    rows = [json.loads(line) for line in texts.read_text().splitlines()]
    found = {piece for row in rows for piece in re.findall(PIECES, row["prompt"] + row["response"])}
    found |= {*pairs, *(f" {pair}" for pair in pairs), *string.digits}  # numbers have five digits
    found |= {piece.strip(" ") for piece in found} - {""}  # a cut first line begins with any word
    names = ["<unk>", "<eos>", *sorted(found)]
    tokenizer = Tokenizer(models.WordLevel({name: place for place, name in enumerate(names)}, unk_token="<unk>"))
    tokenizer.pre_tokenizer = pre_tokenizers.Split(Regex(PIECES), "isolated")
    tokenizer.decoder = decoders.Fuse()
    (folder / "tokenizer").mkdir()
    tokenizer.save(str(folder / "tokenizer" / "tokenizer.json"))
    described = {"tokenizer_class": "PreTrainedTokenizerFast", "eos_token": "<eos>", "unk_token": "<unk>"}
    (folder / "tokenizer" / "tokenizer_config.json").write_text(json.dumps(described))
    return f"tokenizer.tokenizer_model={folder / 'tokenizer'}"


def write_samples(
    path: Path, recipe: Path, tokenizer: str, tasks: list[tuple[str, str, int]], scale: float, first_seed: int
) -> None:
    with path.open("wb") as samples:
        for seed, (task, length, count) in enumerate(tasks, first_seed):
            part = path.with_name("part.jsonl")
            number = str(max(1, round(count * scale)))
            request = ("--needles", task, "--lengths", length, "--samples", number, "--seed", str(seed))
            command("evaluate", str(recipe), *request, "--write", str(part), tokenizer)
            samples.write(part.read_bytes())
            part.unlink()


def train(folder: Path, scale: float, overrides: list[str]) -> None:
    folder.mkdir(parents=True)
    recipe = folder / "recipe.yaml"
    recipe.write_text(RECIPE)
    tokenizer = write_tokenizer(folder, recipe)
    write_samples(folder / "short.jsonl", recipe, tokenizer, SHORT, scale, 100)
    write_samples(folder / "long.jsonl", recipe, tokenizer, LONG, scale, 200)
    started = ("train", "-n", "1", "--recipe", str(recipe), tokenizer, "logger.log_interval=50")
    steps = [max(2, round(count * scale)) for count in (SHORT_STEPS, LONG_STEPS)]
    if scale < 1:
        overrides = [*overrides, "scheduler.lr_warmup_iters=1", "train.global_batch_size=16"]
    short, long = folder / "short", folder / "long"
    data = f"dataset.data_path={folder / 'short.jsonl'}", f"train.train_iters={steps[0]}"
    command(*started, *data, f"checkpoint.save={short}", *overrides)
    data = f"dataset.data_path={folder / 'long.jsonl'}", f"train.train_iters={steps[1]}"
    saved = f"checkpoint.pretrained_checkpoint={short}", f"checkpoint.save={long}"
    command(*started, *data, *YARN, *saved, *overrides)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", type=Path, help="new folder for everything, or one that has both runs")
    add_overrides(parser, "settings for training and tests, such as a precision")
    parser.add_argument("--scale", type=float, default=1.0, help="share of samples and steps, to try the script")
    parser.add_argument("--test-with-ranks", default="1", help="sizes of context parallelism to test with, such as 1,4")
    options = parser.parse_args()
    folder, overrides = options.folder.resolve(), list(options.overrides)
    if folder.exists() and not (folder / "long").exists():
        parser.error(f"{folder}: exists and has no run named long. Fix: delete it, or name another folder")
    if not folder.exists():
        train(folder, options.scale, overrides)
    samples = str(max(1, round(10 * min(1.0, options.scale))))
    for run, ranks in itertools.product(("short", "long"), options.test_with_ranks.split(",")):
        request = ("--needles", "single", "--lengths", "2K,4K,8K", "--samples", samples, "--depths", "0,25,50,75,100")
        layout = (f"model.context_parallel_size={ranks}", f"model.max_seqlen_per_dp_cp_rank={16384 // int(ranks)}")
        command("evaluate", "-n", ranks, str(folder / run), *request, *layout, *overrides)


if __name__ == "__main__":
    main()
