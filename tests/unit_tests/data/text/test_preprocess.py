import gzip
import json
import signal
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace

import pytest
from megatron.core.datasets.indexed_dataset import IndexedDataset

from megatron_cp import cli
from megatron_cp.common.errors import DataError
from megatron_cp.config.run_config import TokenizerConfig
from megatron_cp.data.text.preprocess import preprocess
from megatron_cp.data.text.text_files import search
from megatron_cp.data.text.tokenizers import build_tokenizer
from megatron_cp.data.text.tokenizing import indexed_writer

BYTES = TokenizerConfig("ByteLevelTokenizer")


@pytest.fixture(scope="module")
def script() -> SimpleNamespace:
    """Return ``megatron-cp preprocess`` as ``main(arguments)``."""
    return SimpleNamespace(main=lambda arguments: cli.main(["preprocess", *arguments]))


@pytest.fixture(autouse=True)
def sigterm_as_before() -> Iterator[None]:
    """Restore SIGTERM's handler, which the command sets for its own process."""
    before = signal.getsignal(signal.SIGTERM)
    yield
    signal.signal(signal.SIGTERM, before)


def _documents(prefix: str) -> list[str]:
    documents = []
    for ids in IndexedDataset(prefix):
        assert ids[-1] == 256
        documents.append(bytes(ids[:-1].tolist()).decode())
    return documents


@pytest.fixture
def mixed(tmp_path: Path) -> Path:
    folder = tmp_path / "in"
    (folder / "deep").mkdir(parents=True)
    (folder / "b.txt").write_text("second")
    (folder / "a.jsonl").write_text('{"text": "first", "body": "1"}\n\n{"text": "", "body": "2"}\n{"text": "\u00e9"}\n')
    (folder / "deep" / "c.txt").write_text("third\n")
    (folder / "deep" / "c.py").write_text("code")
    return folder


@pytest.mark.parametrize("workers", [1, 2])
def test_files_folders_and_lines(mixed: Path, tmp_path: Path, workers: int) -> None:
    summary = preprocess([mixed, mixed / "deep" / "c.py"], tmp_path / "out" / "x", BYTES, workers=workers)
    assert _documents(summary.prefix) == ["first", "\u00e9", "second", "third\n", "code"]
    assert (summary.documents, summary.empty_documents) == (5, 2)
    assert summary.tokens == len(b"first\xc3\xa9secondthird\ncode") + 5
    assert sorted(p.name for p in (tmp_path / "out").iterdir()) == ["x.bin", "x.idx", "x.meta.json"]


def test_json_key_and_suffixes(mixed: Path, tmp_path: Path) -> None:
    (mixed / "a.jsonl").write_text('{"body": "one"}\n{"body": "two"}')
    assert _documents(preprocess([mixed / "a.jsonl"], tmp_path / "x", BYTES, json_key="body").prefix) == ["one", "two"]
    (mixed / "a.jsonl").rename(mixed / "a.json")
    assert _documents(preprocess([mixed / "a.json"], tmp_path / "x", BYTES, json_key="body").prefix) == ["one", "two"]
    (mixed / "a.json").write_text('[\n{"body": "one"}\n]\n')
    with pytest.raises(DataError, match=r"a.json:1: not valid JSON"):
        preprocess([mixed / "a.json"], tmp_path / "x", BYTES, json_key="body")
    for suffix in (".py", "py"):
        assert [p.name for p in search([mixed], [suffix])[0]] == ["c.py"]


def test_skipped_files_are_reported(
    script: SimpleNamespace, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    for name in ("a.txt", "b.md", "c.md", "d.json", "LICENSE", "e.jsonl.gz"):
        (tmp_path / "in" / name[0]).mkdir(parents=True)
        (tmp_path / "in" / name[0] / name).write_text('{"text": "x"}')
    arguments = ["--input", str(tmp_path / "in"), "--output-prefix", str(tmp_path / "x"), "--workers", "1"]
    arguments += ["--tokenizer-type", "ByteLevelTokenizer"]
    assert script.main(arguments) == 0
    output = capsys.readouterr().out
    assert "1 documents" in output
    assert "2 .md, 1 without a suffix, 1 .gz, 1 .json. Fix: --suffix .txt .jsonl .md '' .json (reads them" in output
    assert "Uncompress .gz first" in output
    (tmp_path / "in" / "e" / "e.jsonl.gz").unlink()
    assert script.main([*arguments, "--suffix", "txt", "json", "md", ""]) == 0
    output = capsys.readouterr().out
    assert "5 documents" in output and "left out" not in output
    assert script.main([*arguments, "--suffix", ".py"]) == 2
    assert "the folder has no .py file. It has 2 .md" in capsys.readouterr().err


def test_large_input_in_several_chunks_keeps_its_order(tmp_path: Path) -> None:
    lines = [f"{number} " + "x" * 5000 for number in range(400)]
    (tmp_path / "a.jsonl").write_text("\n".join(json.dumps({"text": line}) for line in lines))
    assert _documents(preprocess([tmp_path / "a.jsonl"], tmp_path / "x", BYTES, workers=2).prefix) == lines


BAD = {
    "missing file": (None, "no such file or folder"),
    "no matching file": ({"a.md": b"x"}, "the folder has no .txt or .jsonl file. It has 1 .md"),
    "empty": ({"a.txt": b"", "b.txt": b" \n"}, "has no text"),
    "not UTF-8": ({"a.txt": b"ab\xff"}, r"a.txt: is not UTF-8 text \(byte 2\)"),
    "compressed": (
        {"a.txt": b"x", "b.jsonl.gz": gzip.compress(b"x")},
        "b.jsonl.gz: is compressed. Fix: gunzip -k .*gz$",
    ),
    "bad JSON": ({"a.jsonl": b'{"text": "x"}\n{"text": \n'}, r"a.jsonl:2: not valid JSON"),
    "not an object": ({"a.jsonl": b"[1]\n"}, r"a.jsonl:1: must be a JSON object, found list"),
    "a dialogue": (
        {"a.jsonl": b'{"messages": [{"role": "user", "content": "x"}]}\n'},
        r"a.jsonl:1: is a dialogue; .* Fix: leave out preprocess, and set dataset.data_path=\S+a.jsonl \(",
    ),
    "a dialogue of another key": (
        {"a.jsonl": b'{"conversations": [], "id": 1}\n'},
        r"a.jsonl:1: is a dialogue in ShareGPT's form; ",
    ),
    "a prompt": ({"a.jsonl": b'{"prompt": "x", "response": "y"}\n'}, r"a.jsonl:1: is a prompt and a response; "),
    "no such key": ({"a.jsonl": b'{"txt": "x"}\n'}, r"a.jsonl:1: has no key 'text'; its keys are \['txt'\]"),
    "not text": ({"a.jsonl": b'{"text": 3}\n'}, r"a.jsonl:1: the value of 'text' is int"),
    "half a pair": ({"a.jsonl": b'{"text": "x"}\n{"text": "a\\ud800b"}\n'}, "a.jsonl:2: .*has half a surrogate pair"),
    "too deep": ({"a.jsonl": b"[" * 200_000}, "a.jsonl:1: not valid JSON: nested too deeply"),
}


@pytest.mark.parametrize("workers", [1, 2])
@pytest.mark.parametrize("case", BAD)
def test_bad_input_is_named_and_leaves_no_files(tmp_path: Path, case: str, workers: int) -> None:
    contents, message = BAD[case]
    for name, content in (contents or {}).items():
        (tmp_path / "in").mkdir(exist_ok=True)
        (tmp_path / "in" / name).write_bytes(content)
    inputs = [tmp_path / "in", *tmp_path.glob("in/*.gz")]
    with pytest.raises(DataError, match=message):
        preprocess(inputs, tmp_path / "out" / "x", BYTES, workers=workers)
    assert list((tmp_path).glob("out/*")) == []


@pytest.mark.parametrize("prefix", ["", ".bin", "folder/"])
def test_output_without_a_name(mixed: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, prefix: str) -> None:
    monkeypatch.chdir(tmp_path)
    with pytest.raises(DataError, match="must end in a file name"):
        preprocess([mixed], prefix, BYTES)
    assert not list(tmp_path.glob(".*"))


def test_two_nodes_write_one_pair_at_once(tmp_path: Path) -> None:
    """Processes of two nodes may have the same number, as here."""
    prefix = str(tmp_path / "x")
    with indexed_writer(prefix, build_tokenizer(BYTES), "first") as first:
        first.add_document([1, 2, 256], [3])
        with indexed_writer(prefix, build_tokenizer(BYTES), "second") as second:
            second.add_document([98, 256], [2])
        assert _documents(prefix) == ["b"]
    assert _documents(prefix) == ["\x01\x02"]
    assert sorted(path.name for path in tmp_path.iterdir()) == ["x.bin", "x.idx", "x.meta.json"]


def test_a_failed_run_keeps_the_earlier_result(tmp_path: Path) -> None:
    (tmp_path / "good.txt").write_text("good")
    (tmp_path / "bad.txt").write_bytes(b"x" * 300_000 + b"\xff")
    prefix = preprocess([tmp_path / "good.txt"], tmp_path / "x", BYTES).prefix
    with pytest.raises(DataError):
        preprocess([tmp_path / "good.txt", tmp_path / "bad.txt"], tmp_path / "x", BYTES)
    assert _documents(prefix) == ["good"]


def test_command_line(script: SimpleNamespace, mixed: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    arguments = ["--output-prefix", str(tmp_path / "x"), "--tokenizer-type", "ByteLevelTokenizer", "--workers", "1"]
    assert script.main(["--input", str(mixed), *arguments]) == 0
    captured = capsys.readouterr()
    assert "4 documents (2 empty ones skipped)" in captured.out
    assert "tokenizing: 100%" in captured.err
    assert script.main(["--input", str(tmp_path / "nowhere"), *arguments]) == 2
    assert capsys.readouterr().err == f"megatron-cp: {tmp_path / 'nowhere'}: no such file or folder.\n"


def test_a_tokenizer_trained_on_the_input(
    script: SimpleNamespace, mixed: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    arguments = ["--input", str(mixed), "--output-prefix", str(tmp_path / "x"), "--workers", "1"]
    arguments += ["--tokenizer-model", str(tmp_path / "bpe"), "--train-bpe", "280"]
    assert script.main(arguments) == 0
    tokenizer = build_tokenizer(TokenizerConfig("HuggingFaceTokenizer", str(tmp_path / "bpe")))
    texts = [tokenizer._tokenizer.decode(ids.tolist()) for ids in IndexedDataset(str(tmp_path / "x"))]
    assert texts == ["first", "\u00e9", "second", "third\n"]
    assert script.main(arguments) == 2
    assert "exists. Fix: name a new folder" in capsys.readouterr().err


@pytest.mark.parametrize("text", ["abc", "-1 2", "1 9", "\u0663", "9" * 5000])
def test_text_without_token_ids_for_a_null_tokenizer(
    script: SimpleNamespace, tmp_path: Path, capsys: pytest.CaptureFixture[str], text: str
) -> None:
    (tmp_path / "a.txt").write_text(text)
    arguments = ["--input", str(tmp_path), "--output-prefix", str(tmp_path / "x"), "--workers", "1"]
    assert script.main([*arguments, "--tokenizer-type", "NullTokenizer", "--vocab-size", "9"]) == 2
    assert "is not a token id: a NullTokenizer reads numbers from 0 to 8" in capsys.readouterr().err


def test_inputs_that_the_file_system_refuses(
    script: SimpleNamespace, mixed: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    arguments = ["--output-prefix", str(tmp_path / "x"), "--workers", "1", "--input"]
    assert script.main([*arguments, "x" * 300, "--tokenizer-type", "ByteLevelTokenizer"]) == 2
    assert "no such file or folder" in capsys.readouterr().err
    assert script.main([*arguments, str(mixed), "--tokenizer-type", "HuggingFaceTokenizer", "--train-bpe", "300"]) == 2
    assert "--train-bpe needs a folder for the tokenizer" in capsys.readouterr().err


def test_output_that_cannot_be_written(
    script: SimpleNamespace, mixed: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    arguments = ["--input", str(mixed), "--tokenizer-type", "ByteLevelTokenizer", "--workers", "1"]
    assert script.main([*arguments, "--output-prefix", str(mixed / "b.txt" / "x")]) == 2
    assert "b.txt" in capsys.readouterr().err
