"""Fuzz arguments: overrides in Hydra's grammar, flags and options."""

from __future__ import annotations

from tests.functional_tests.fuzzing.case import Case, checked_or_trained
from tests.functional_tests.fuzzing.mutations import random_bytes

_OVERRIDES = (
    "optimizer.lr=0.01",
    "model.num_layers=2",
    "model.context_parallel_size=1",
    "model.cp_comm_type=[p2p]",
    "mixed_precision=fp32",
    "optimizer=adam",
    "dataset.split='9,1,0'",
    "env_vars={NCCL_ALGO: Ring}",
    "dataset.split='8,1,1'",
    "+optimizer.adam_eps=1e-6",
    "dataset.data_path=null",
    "scheduler.lr_decay_iters=200",
    "tokenizer.tokenizer_model=null",
    "profiling.profile_ranks=[0]",
)
_WORDS = (
    *("null", "-1", "0", "1e308", "1" + "0" * 30, "9" * 5000, "nan", "inf", "''", "[]", "{}", "[[1]]", "true", "???"),
    *("[" * 500 + "]" * 500, "{a: " * 200, "a" * 50_000, "é\u202e", "\udcff", "${model.seq_length}", "${oc.env:X}"),
    *("1,2", "range(1,9)", "glob(*)", "choice(1,2)", "$(id)", "\t", "\n", "a=b=c", "'", '"', "\\", "..", "/dev/zero"),
)


def _text(case: Case, text: str) -> str:
    if case.valid:
        return text
    rng, (key, equals, value) = case.rng, text.partition("=")
    match rng.randrange(5):
        case 0 | 1:
            return key + equals + rng.choice(_WORDS)
        case 2:
            place = rng.randrange(len(key) + 1)
            return (
                key[:place] + rng.choice([*_WORDS, "+", "++", "~", ".", "@", "/", ":"]) + key[place:] + equals + value
            )
        case 3:
            place = rng.randrange(len(value) + 1)
            return key + equals + value[:place] + rng.choice(_WORDS) + value[place:]
        case _:
            data = random_bytes(rng, text.encode("utf-8", "surrogateescape")).replace(b"\0", b"")
            return data.decode("utf-8", "surrogateescape")


def overrides(case: Case) -> list[str]:
    chosen = case.rng.sample(_OVERRIDES, case.rng.choice([1, 1, 2, 3]))
    return checked_or_trained(case, "--recipe", str(case.take("recipe.yaml")), *(_text(case, each) for each in chosen))


_FLAGS = ("-ms=1", "-gb=2", "-mb=1", "-sl=16", "-tp=1", "-cp=1", "--lr=0.1", "--save_interval=1", "--min_lr=0.001")
_OPTIONS = ("--explain=K1", "--recipe=llama_tiny_pretrain_config", "--gpus-per-node=8")
_BYTES, _NEW = ("--tokenizer-type=ByteLevelTokenizer",), ("--megatron-path=out/new",)
# Commands and their example inputs.
_MORE: tuple[tuple[str | None, tuple[str, ...]], ...] = (
    (None, ("schedule", "--distribution=documents", "--count=16", "--ranks=4", "--longest=900", "--seed=1", "--json")),
    (None, ("schedule", "--distribution=lognormal", "--ranks=8", "--longest=9000", "--cost=h100_8b", "--sync-ranks=2")),
    (None, ("doctor", "--recipe=llama_tiny_pretrain_config")),
    (None, ("recipes",)),
    ("run", ("report", "input/run", "--html=out/a.html")),
    ("gpu.json", ("profile", "input/gpu.json", "--kernels=3")),
    ("text.txt", ("preprocess", "--input=input/text.txt", "--output-prefix=out/data", "--workers=1", *_BYTES)),
    ("published/llama", ("convert", "import", "--hf-model=input/llama", *_NEW, "--torch-dtype=bfloat16")),
    ("run", ("convert", "export", "--megatron-path=input/run", "--hf-path=out/new", "--iteration=4")),
)


def flags(case: Case) -> list[str]:
    rng = case.rng
    if rng.random() < 0.5:
        chosen = [*rng.sample(_FLAGS, 2), *rng.sample(_OPTIONS, rng.randrange(2))]
        changed = [_text(case, each) if rng.random() < 0.6 else each for each in chosen]
        return checked_or_trained(case, "--recipe", str(case.take("recipe.yaml")), *changed)
    example, (command, *options) = rng.choice(_MORE)
    if example is not None:
        case.take(example)
    # Output paths are not changed: the command would correctly write to another place.
    return [command, *(_text(case, each) if rng.random() < 0.4 and "=out/" not in each else each for each in options)]
