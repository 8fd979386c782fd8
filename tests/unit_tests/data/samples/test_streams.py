"""Samples of variable length, from files and mock.

Content, order, and errors of bad files are tested.
"""

import json
import os
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from megatron_cp.common.errors import DataError
from megatron_cp.config.run_config import RunConfig
from megatron_cp.data.samples.blend import BlendOrder
from megatron_cp.data.samples.datasets import build_datasets
from megatron_cp.data.samples.streams import Stream, check_files
from megatron_cp.data.samples.varlen import MockVarlenDataset
from megatron_cp.data.text.tokenizers import ByteLevelTokenizer, HuggingFaceTokenizer, train_bpe
from tests.ranks import run_ranks

TOKENIZER = ByteLevelTokenizer()


@pytest.fixture
def packed(config: RunConfig) -> RunConfig:
    config.model.sequence_packing_scheduler = "dp_balanced"
    config.dataset.seq_length = 200
    return config


@pytest.fixture
def lines(tmp_path: Path) -> Callable[..., str]:
    def write(*values: Any, name: str = "data.jsonl") -> str:
        text = [value if isinstance(value, str) else json.dumps(value) for value in values]
        (tmp_path / name).write_text("".join(line + "\n" for line in text))
        return str(tmp_path / name)

    return write


def stream(config: RunConfig, data_path: Any, train: int, valid: int = 0) -> Any:
    config.dataset.data_path = data_path
    config.finalize()
    datasets = build_datasets(config.dataset, TOKENIZER, train, valid)
    return (datasets.train, datasets.valid) if valid else datasets.train


def text_of(sample: dict[str, torch.Tensor]) -> bytes:
    assert torch.equal(sample["tokens"][1:], sample["labels"][:-1])
    return bytes([*sample["tokens"].tolist(), *sample["labels"][-1:].clamp(max=255).tolist()])


def order(samples: Any, count: int) -> list[tuple[int, ...]]:
    return [tuple(samples[i]["tokens"].tolist()) for i in range(count)]


def test_the_kind_follows_from_the_data_and_the_scheduler() -> None:
    def kind(data_path: Any, scheduler: Any, dynamic: bool = False) -> str | None:
        config = RunConfig()
        config.dataset.data_path, config.model.sequence_packing_scheduler = data_path, scheduler
        config.model.dynamic_context_parallel = dynamic
        return config.finalize().dataset.kind

    assert kind(None, None) == "mock" and kind("corpus", None) == "indexed"
    assert kind(None, "dp_balanced") == "mock_documents" and kind(None, None, dynamic=True) == "mock_documents"
    assert kind("corpus", "dp_balanced") == kind([1, "a", 2, "b"], "dp_balanced") == "documents"
    assert kind("chats.jsonl", "dp_balanced") == kind([1, "a.jsonl", 2, "b.jsonl"], "dp_balanced") == "jsonl"


def test_documents(packed: RunConfig, corpus: Callable[..., str], tmp_path: Path) -> None:
    train, valid = stream(packed, corpus(), 100, 20)  # 32 and 8 documents
    sources = {path.read_bytes() for path in (tmp_path / "corpus-source").iterdir()}
    for part, count in ((train, 32), (valid, 8)):
        epoch = [part[i] for i in range(count)]
        assert part.lengths(np.arange(count)).tolist() == [len(sample["tokens"]) for sample in epoch]
        texts = [text_of(sample) for sample in epoch]
        assert len({text[:-1] for text in texts}) == count and {text[:-1] for text in texts} <= sources
        assert all(sample["labels"][-1] == TOKENIZER.eod and sample["loss_mask"].all() for sample in epoch)
    assert not {text_of(train[i]) for i in range(32)} & {text_of(valid[i]) for i in range(8)}
    assert len(train) == 100 and len(valid) == 20


def test_every_epoch_is_shuffled_and_its_order_is_a_function_of_the_sample_number(
    packed: RunConfig, corpus: Callable[..., str]
) -> None:
    packed.dataset.split = "1,0,0"
    prefix = corpus()
    train = order(stream(packed, prefix, 130), 130)
    assert sorted(train[:40]) == sorted(train[40:80]) == sorted(train[80:120])
    assert train[:40] != train[40:80] != train[80:120]
    longer = stream(packed, prefix, 1000)
    assert order(longer, 130) == train, "a longer run deals the same samples first"
    packed.dataset.random_seed += 1
    assert order(stream(packed, prefix, 130), 40) != train[:40]


def test_a_blend_has_its_shares_of_tokens(packed: RunConfig, corpus: Callable[..., str], lines: Any) -> None:
    prefixes = [corpus("a"), corpus("b", letters="nopqrstuvwxyz")]
    packed.dataset.seq_length, packed.dataset.split = 60, "1,0,0"  # documents are cut into pieces of uneven length
    train = stream(packed, [0.75, prefixes[0], 0.25, prefixes[1]], 2000)
    tokens = [0, 0]
    for i in range(2000):
        tokens[int((train[i]["tokens"] > ord("m")).any())] += len(train[i]["tokens"])
    assert tokens[0] / sum(tokens) == pytest.approx(0.75, abs=0.02)
    assert order(stream(packed, [0.75, prefixes[0], 0.25, prefixes[1]], 300), 300) == order(train, 300)
    # Without weights every file contributes all its samples once, except around the end of an epoch.
    both = stream(packed, prefixes, 100)
    size = sum(len(source) for source in both._sources)
    assert len(set(order(both, size))) > 0.97 * size


def test_a_source_too_small_for_a_period_gets_a_turn_or_a_raised_weight() -> None:
    lengths = [1, 1, 10**6, 2 * 10**6]
    with pytest.raises(DataError, match=r"source 1 would give less than one sample in 65536\. Fix: raise its weight"):
        BlendOrder(lengths)
    turns = BlendOrder(lengths, keep_small=True)
    period = 65536 + 1  # the other small one has a turn of its own
    dealt = [turns(i) for i in range(2 * period)]
    for number in range(4):
        assert [nth for source, nth in dealt if source == number] == list(range(sum(s == number for s, _ in dealt)))
    assert [i for i, (source, _) in enumerate(dealt) if source == 1] == [period - 1, 2 * period - 1]
    sources = [MockVarlenDataset(np.full(length, 3), 9, 0) for length in (1, 1, 10**5, 2 * 10**5)]
    assert Stream(sources, None, 0, 10).lengths(np.arange(3)).tolist() == [3] * 3
    with pytest.raises(DataError, match=r"has 40000 files or classes of length, more than 32767\. Fix: join"):
        BlendOrder([1.0] * 40000)
    with pytest.raises(DataError, match="raise its weight"):
        Stream(sources, [1e-9, 1e-9, 1.0, 2.0], 0, 10)


def test_json_lines(packed: RunConfig, lines: Any) -> None:
    packed.dataset.split = "1,0,0"
    path = lines({"text": "hello"}, {"prompt": "2+2=", "response": "4", "id": 7}, "", {"text": " "})
    train = stream(packed, path, 10)
    found = {text_of(train[i]): train[i]["loss_mask"].tolist() for i in range(2)}
    assert found == {b"hello\xff": [1.0] * 5, b"2+2=4\xff": [0.0, 0.0, 0.0, 1.0, 1.0]}


def test_the_loss_of_a_response_that_is_cut(packed: RunConfig, lines: Any) -> None:
    packed.dataset.split, packed.dataset.seq_length = "1,0,0", 4
    train = stream(packed, lines({"prompt": "abcdef", "response": "ghij"}), 3)
    found = {bytes(train[i]["tokens"].tolist()): train[i]["loss_mask"].tolist() for i in range(3)}
    # Labels bcde, fghi, j and the end; the loss begins with g.
    assert found == {b"abcd": [0, 0, 0, 0], b"efgh": [0, 1, 1, 1], b"ij": [1, 1]}


def test_other_keys(packed: RunConfig, lines: Any) -> None:
    packed.dataset.split = "1,0,0"
    packed.dataset.text_key, packed.dataset.prompt_key, packed.dataset.response_key = None, "question", "answer"
    train = stream(packed, lines({"question": "?", "answer": "!", "text": "unused"}), 1)
    assert text_of(train[0]) == b"?!\xff"


def test_json_lines_are_tokenized_once_for_each_change_of_file_keys_and_tokenizer(
    packed: RunConfig, lines: Any, tmp_path: Path
) -> None:
    packed.dataset.split, packed.dataset.kind = "1,0,0", "jsonl"
    packed.dataset.path_to_cache = str(tmp_path / "elsewhere")

    def folders() -> set[Path]:
        return set((tmp_path / "elsewhere").glob("samples-*"))

    values = [{"text": f"sample {i}", "other": f"another {i}"} for i in range(5)]
    path = lines(*values)
    stream(packed, path, 5)
    (folder,) = folders()
    written = {p: p.stat().st_mtime_ns for p in folder.iterdir()}
    stream(packed, path, 500)
    assert folders() == {folder} and {p: p.stat().st_mtime_ns for p in folder.iterdir()} == written
    packed.dataset.text_key = "other"
    assert text_of(stream(packed, path, 5)[0]).startswith(b"another")
    packed.dataset.text_key = "text"
    changed = os.stat(path).st_mtime_ns
    Path(path).write_text(Path(path).read_text().replace("sample", "SAMPLE"))
    os.utime(path, ns=(changed, changed + 1))  # of the same size, a nanosecond later
    assert text_of(stream(packed, path, 5)[0]).startswith(b"SAMPLE")
    assert text_of(stream(packed, lines(*values[:-1], {"text": "new"}), 5)[0])
    assert len(folders()) == 4
    for seed in ("abc", "xyz"):  # two vocabularies of one size
        bpe = HuggingFaceTokenizer(train_bpe([f"{seed} {seed * 9}"] * 9, 258, tmp_path / seed))
        build_datasets(packed.dataset, bpe, 5)
    assert len(folders()) == 6


def test_mock_documents(packed: RunConfig, tmp_path: Path) -> None:
    packed.dataset.mock_num_samples, packed.dataset.mock_masked_fraction = 500, 0.3
    train, valid = stream(packed, None, 1000, 10)
    assert packed.dataset.kind == "mock_documents"
    lengths = train.lengths(np.arange(500)).tolist()
    assert max(lengths) == 200 and min(lengths) < 10 and len(set(lengths)) > 50
    assert sorted(lengths) == sorted(train.lengths(np.arange(500, 1000)))
    for i in range(5):
        sample = train[i]
        assert {key: len(value) for key, value in sample.items()} == dict.fromkeys(sample, lengths[i])
        assert [value.dtype for value in sample.values()] == [torch.int64, torch.int64, torch.float32]
    assert not torch.equal(train[0]["tokens"][:3], valid[0]["tokens"][:3])
    (tmp_path / "lengths.txt").write_text("3\n1, 250\n")
    packed.dataset.mock_lengths, packed.dataset.mock_num_samples = str(tmp_path / "lengths.txt"), 4
    train = stream(packed, None, 4)
    assert sorted(train.lengths(np.arange(4))) == [1, 3, 3, 200]


@pytest.mark.parametrize("weights", [None, [5.0, 1.0, 2.0]])
@pytest.mark.parametrize("sizes", [(40,), (30, 1, 700)])
def test_lengths_of_many_equal_those_of_the_samples(sizes: tuple[int, ...], weights: list[float] | None) -> None:
    """Many lengths at once are computed in another way than single ones."""
    rng = np.random.default_rng(0)
    sources = [MockVarlenDataset(rng.integers(1, 10**4, size), 9, seed=size) for size in sizes]
    samples = Stream(sources, weights and weights[: len(sizes)], 2**40, 10)
    indices = np.array([*range(200), *range(65_500, 65_600), 10**9, 7])  # of many epochs, and across a blend's period
    assert samples.lengths(indices).tolist() == [len(samples[i]["tokens"]) for i in indices.tolist()]


def test_lengths_of_a_stream_need_no_reads() -> None:
    class Source(MockVarlenDataset):
        def __getitem__(self, index: int) -> Any:
            raise AssertionError("read")

    samples = Stream([Source([3, 4, 5], 9, seed=0)], None, 1, 7)
    assert sorted(samples.lengths(np.arange(3))) == [3, 4, 5]


BAD_LINES = [
    ('{"text": "a"', r":2: not valid JSON"),
    ("[1]", r":2: must be a JSON object, found list"),
    ('{"txt": "a"}', r":2: has no 'text', or 'prompt' and 'response', or 'messages'; its keys are \['txt'\]"),
    ('{"prompt": "a"}', r":2: has no 'text', or 'prompt' and 'response'"),
    ('{"text": "a", "prompt": "b", "response": "c"}', r":2: has more than one of 'text', or"),
    ('{"text": 3}', r":2: the value of 'text' is int, not text"),
    ('{"prompt": "a", "response": null}', r":2: the value of 'response' is NoneType, not text"),
    ('{"prompt": "a", "response": "\\ud800"}', r":2: the value of 'response' has half a surrogate pair"),
    pytest.param("[" * 200_000, r":2: not valid JSON: nested too deeply", id="deep"),
]


@pytest.mark.parametrize(("line", "message"), BAD_LINES)
def test_a_bad_line_is_named(packed: RunConfig, lines: Any, tmp_path: Path, line: str, message: str) -> None:
    with pytest.raises(DataError, match=message):
        stream(packed, lines({"text": "good"}, line), 5)
    assert not list((tmp_path / "cache").iterdir()), "nothing half done stays"


def test_bad_json_files(packed: RunConfig, lines: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)  # the checkout may have runs/quickstart
    with pytest.raises(DataError, match="has no text"):
        stream(packed, lines({"text": ""}), 5)
    with pytest.raises(DataError, match=r"missing\.jsonl: cannot be read: No such file"):
        stream(packed, str(tmp_path / "missing.jsonl"), 5)
    packed.dataset.kind, packed.dataset.data_path = "jsonl", "runs/quickstart/data/dialogues.jsonl"
    with pytest.raises(DataError, match=r"such file .*Fix: megatron-cp quickstart \(writes it\), or name an existing"):
        check_files(packed.dataset, ByteLevelTokenizer(), packed.tokenizer)
    (tmp_path / "bytes.jsonl").write_bytes(b'{"text": "\xff"}\n')
    with pytest.raises(DataError, match=":1: is not UTF-8 text"):
        stream(packed, str(tmp_path / "bytes.jsonl"), 5)
    (tmp_path / "cut.jsonl").write_bytes(b'{"text": "a"}\n{"text": "b')
    with pytest.raises(DataError, match=r":2: not valid JSON.*The file ends in this line and may be truncated"):
        stream(packed, str(tmp_path / "cut.jsonl"), 5)
    (tmp_path / "empty.jsonl").write_text("")
    packed.dataset.data_path, packed.dataset.kind = str(tmp_path / "empty.jsonl"), "jsonl"
    with pytest.raises(DataError, match=r"empty\.jsonl: is empty"):
        check_files(packed.dataset, TOKENIZER, packed.tokenizer)


def test_a_document_too_long_is_refused_by_choice(packed: RunConfig, corpus: Callable[..., str], lines: Any) -> None:
    packed.dataset.seq_length, packed.dataset.too_long, packed.dataset.split = 50, "refuse", "1,0,0"
    with pytest.raises(DataError, match=r"document \d+ has \d+ tokens, more than 50 \+ 1. Fix: dataset.too_long=split"):
        stream(packed, corpus(), 5)
    packed.dataset.kind = None
    with pytest.raises(DataError, match=r"data.jsonl:3: the sample has 61 tokens"):
        stream(packed, lines({"text": "short"}, {"text": ""}, {"text": "x" * 60}), 5)


def test_a_part_without_documents(packed: RunConfig, corpus: Callable[..., str], lines: Any) -> None:
    prefix = corpus()
    packed.dataset.split = "9999,1,0"
    for kind, path, total in ("documents", prefix, 40), ("jsonl", lines({"text": "short"}, {"text": "x"}), 2):
        packed.dataset.kind = kind
        named = f"the valid part of dataset.split=9999,1,0: {path}: has none of its {total} documents in this part"
        with pytest.raises(DataError, match=rf"{re.escape(named)}\. Fix: \"dataset.split="):
            stream(packed, path, 10, 10)


@pytest.mark.parametrize("value", ["lognorml", "nowhere/lengths.txt", "{tmp}/bad.txt", "{tmp}/empty.txt"])
def test_bad_mock_lengths(packed: RunConfig, tmp_path: Path, value: str) -> None:
    (tmp_path / "bad.txt").write_text("3\n4 x\n")
    (tmp_path / "empty.txt").write_text("\n")
    packed.dataset.mock_lengths = value.format(tmp=tmp_path)
    expected = {"bad": r"bad\.txt:2: 'x' is not a whole number", "empty": "has no lengths"}
    match = next((text for name, text in expected.items() if name in value), "cannot be read: No such file")
    with pytest.raises(DataError, match=match):
        stream(packed, None, 10)


def damage(prefix: str, what: str) -> None:
    index = Path(prefix + ".idx")
    raw = index.read_bytes()
    if what == "truncated index":
        index.write_bytes(raw[:-9])
    elif what == "no index":
        index.unlink()
    elif what == "truncated tokens":
        os.truncate(prefix + ".bin", 100)
    elif what == "empty":
        index.write_bytes(b"")
    elif what == "length below zero":
        index.write_bytes(raw[:34] + np.int32(-5).tobytes() + raw[38:])
    elif what == "boundaries":
        index.write_bytes(raw[:-8] + np.int64(7).tobytes())


DAMAGES = {
    "truncated index": r"\.idx: is truncated",
    "no index": r"\.idx: no such file",
    "truncated tokens": r"\.bin: is truncated",
    "empty": r"\.idx: is empty",
    "length below zero": r"\.idx: is corrupt: its offsets",
    "boundaries": r"\.idx: is corrupt: its documents do not run from sequence 0 to 40",
}


@pytest.mark.parametrize("what", DAMAGES)
def test_damaged_files(packed: RunConfig, corpus: Callable[..., str], what: str) -> None:
    prefix = corpus()
    damage(prefix, what)
    with pytest.raises(DataError, match=DAMAGES[what]):
        stream(packed, prefix, 5)


def messages(config: RunConfig, only_rank: int | None, path: str) -> str:
    """Return the error of building on this rank.

    The data appears damaged only to ``only_rank``.
    """
    if only_rank is not None and int(os.environ["RANK"]) != only_rank:
        config.dataset.data_path = path
    try:
        build_datasets(config.dataset, TOKENIZER, 10)
    except DataError as error:
        return str(error)
    return "no error"


def test_a_fault_reaches_every_rank(packed: RunConfig, corpus: Callable[..., str], lines: Any) -> None:
    good, bad = corpus("good"), corpus("bad")
    damage(bad, "truncated index")
    packed.dataset.split, packed.dataset.data_path = "1,0,0", bad
    packed.finalize()
    for only_rank in (None, 0):
        found = run_ranks(messages, 2, packed, only_rank, good, timeout=120)
        assert found[0] == found[1] and "bad.idx: is truncated" in found[0]
    packed.dataset.kind, packed.dataset.data_path = "jsonl", lines({"text": "a"}, "{")
    found = run_ranks(messages, 2, packed, None, "", timeout=120)
    assert found[0] == found[1] and "data.jsonl:2: not valid JSON" in found[0]


def rank_order(config: RunConfig) -> list[tuple[int, ...]]:
    return order(build_datasets(config.dataset, TOKENIZER, 20).train, 20)


def test_ranks_share_one_tokenized_file(packed: RunConfig, lines: Any, tmp_path: Path) -> None:
    packed.dataset.split, packed.dataset.data_path = "1,0,0", lines(*({"text": f"line {i}"} for i in range(9)))
    packed.finalize()
    alone = rank_order(packed)
    assert run_ranks(rank_order, 3, packed) == [alone] * 3
    assert len(list((tmp_path / "cache").iterdir())) == 1
