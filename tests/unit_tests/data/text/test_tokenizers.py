import io
import json
import os
import pickle
import shutil
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from megatron_cp.common.errors import DataError
from megatron_cp.config.run_config import TokenizerConfig
from megatron_cp.data.text.tokenizers import ByteLevelTokenizer, HuggingFaceTokenizer, build_tokenizer, train_bpe

TEXT = "the cat sat on the mat. def function(argument):\n    return argument\n" * 20


@pytest.fixture(scope="module")
def bpe(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("bpe")
    return train_bpe([TEXT], 300, folder / "tokenizer")


@given(st.text())
def test_bytes_survive_a_round_trip(text: str) -> None:
    tokenizer = ByteLevelTokenizer()
    ids = tokenizer.tokenize(text.encode("utf-8", "ignore").decode())
    assert all(0 <= i < tokenizer.vocab_size for i in ids)
    assert tokenizer.eod not in ids
    assert bytes(ids).decode() == text


def test_bpe_comes_back_and_compresses(bpe: Path) -> None:
    tokenizer = HuggingFaceTokenizer(bpe)
    text = "def the_cat(mat):\n    return '\u00e9\u4e2d'\n"
    ids = tokenizer.tokenize(text)
    assert tokenizer._tokenizer.decode([*ids, tokenizer.eod]) == text
    assert len(ids) < len(text.encode())
    assert 257 < tokenizer.vocab_size <= 300
    assert tokenizer.eod == 0


def test_bpe_training_is_deterministic(bpe: Path, tmp_path: Path) -> None:
    again = train_bpe([TEXT], 300, tmp_path / "again")
    assert (again / "tokenizer.json").read_bytes() == (bpe / "tokenizer.json").read_bytes()
    assert sorted(p.name for p in again.iterdir()) == ["tokenizer.json", "tokenizer_config.json"]


def test_tokenizer_json_alone_and_folder_are_the_same(bpe: Path) -> None:
    alone = build_tokenizer(TokenizerConfig("HuggingFaceTokenizer", str(bpe / "tokenizer.json")))
    assert alone.unique_identifiers == HuggingFaceTokenizer(bpe).unique_identifiers


def test_end_token_named_as_a_dictionary(bpe: Path, tmp_path: Path) -> None:
    (tmp_path / "tokenizer.json").write_bytes((bpe / "tokenizer.json").read_bytes())
    (tmp_path / "tokenizer_config.json").write_text(json.dumps({"eos_token": {"content": "a"}}))
    tokenizer = HuggingFaceTokenizer(tmp_path)
    assert [tokenizer.eod] == tokenizer.tokenize("a")


@pytest.mark.parametrize(
    ("config", "message"),
    [
        (TokenizerConfig("HuggingFaceTokenizer"), "tokenizer_model: is not set"),
        (TokenizerConfig("HuggingFaceTokenizer", "nowhere"), "tokenizer_model=nowhere: no such file or folder"),
        (TokenizerConfig("HuggingFaceTokenizer", "x" * 300), "x: no such file or folder"),
        (TokenizerConfig("NullTokenizer"), "vocab_size=None"),
        (TokenizerConfig("NullTokenizer", vocab_size=9, eod_id=9), "eod_id=9: must be from 0 to 8"),
        (TokenizerConfig("SentencePiece"), "tokenizer_type=SentencePiece: is unknown"),
    ],
)
def test_bad_settings(config: TokenizerConfig, message: str) -> None:
    with pytest.raises(DataError, match=message):
        build_tokenizer(config)


def test_corrupt_file(tmp_path: Path) -> None:
    (tmp_path / "tokenizer.json").write_text("{")
    with pytest.raises(DataError, match="cannot be read as a tokenizer"):
        HuggingFaceTokenizer(tmp_path)


def test_a_config_that_is_not_an_object(bpe: Path, tmp_path: Path) -> None:
    (tmp_path / "tokenizer.json").write_bytes((bpe / "tokenizer.json").read_bytes())
    (tmp_path / "tokenizer_config.json").write_text("[]")
    with pytest.raises(DataError, match=r"tokenizer_config\.json: must be a JSON object, found list"):
        HuggingFaceTokenizer(tmp_path)


@pytest.mark.parametrize("token", [["</s>"], 3, {"content": []}, {"content": {}}])
def test_an_end_token_that_is_not_a_string(bpe: Path, tmp_path: Path, token: object) -> None:
    shutil.copytree(bpe, tmp_path / "odd")
    (tmp_path / "odd/special_tokens_map.json").write_text(json.dumps({"eos_token": token}))
    with pytest.raises(DataError, match=r"special_tokens_map\.json: eos_token=.*: must be a string"):
        HuggingFaceTokenizer(tmp_path / "odd")


def test_a_config_that_is_nested_too_deeply(bpe: Path, tmp_path: Path) -> None:
    shutil.copytree(bpe, tmp_path / "deep")
    (tmp_path / "deep/special_tokens_map.json").write_text("[" * 100_000)
    with pytest.raises(DataError, match=r"special_tokens_map\.json: not valid JSON: nested too deeply"):
        HuggingFaceTokenizer(tmp_path / "deep")


@pytest.mark.parametrize("name", ["tokenizer.json", "tokenizer_config.json", "vocab.json"])
def test_pipes_and_devices_are_not_read(bpe: Path, tmp_path: Path, name: str) -> None:
    for place, make in ((tmp_path / "pipe", os.mkfifo), (tmp_path / "device", lambda p: p.symlink_to("/dev/zero"))):
        shutil.copytree(bpe, place)
        (place / name).unlink(missing_ok=True)
        make(place / name)
        with pytest.raises(DataError, match=f"{name} is neither a file nor a folder. Fix: rm "):
            HuggingFaceTokenizer(place)


def test_null_tokenizer_reads_numbers() -> None:
    tokenizer = build_tokenizer(TokenizerConfig("NullTokenizer", vocab_size=1000))
    assert (tokenizer.vocab_size, tokenizer.eod, tokenizer.pad) == (1000, 999, -1)
    assert tokenizer.tokenize("5 7") == [5, 7]


def test_null_tokenizer_takes_the_datas_end_of_document() -> None:
    assert build_tokenizer(TokenizerConfig("NullTokenizer", vocab_size=1000, eod_id=2)).eod == 2


def test_too_small_a_vocabulary(tmp_path: Path) -> None:
    with pytest.raises(DataError, match="257 or more"):
        train_bpe([TEXT], 256, tmp_path)


@pytest.mark.parametrize("alone", [True, False], ids=["tokenizer.json", "folder"])
def test_documents_are_neither_cut_nor_padded(bpe: Path, tmp_path: Path, alone: bool) -> None:
    """A tokenizer.json may contain limits of the process that saved it."""
    from tokenizers import Tokenizer

    whole = HuggingFaceTokenizer(bpe).tokenize("a few words " * 50)
    saved = Tokenizer.from_file(str(bpe / "tokenizer.json"))
    saved.enable_truncation(8)
    saved.enable_padding(length=4096)
    saved.save(str(tmp_path / "tokenizer.json"))
    (tmp_path / "tokenizer_config.json").write_text((bpe / "tokenizer_config.json").read_text())
    path = tmp_path / "tokenizer.json" if alone else tmp_path
    assert HuggingFaceTokenizer(path).tokenize("a few words " * 50) == whole


CODE = """open({marker!r}, "w").write("ran")
class Evil:
    pass
"""
AUTO_MAP = {"AutoTokenizer": ["evil.Evil", "evil.Evil"], "AutoConfig": "evil.Evil"}
OWN_CODE = {
    "a tokenizer of its own": {"tokenizer_config.json": {"tokenizer_class": "Evil", "auto_map": AUTO_MAP}},
    "a model of its own": {"config.json": {"model_type": "\x1b[2Jevil", "auto_map": AUTO_MAP}},
    "code of the hub": {"tokenizer_config.json": {"auto_map": {"AutoTokenizer": "somebody/something--evil.Evil"}}},
    "pickles": {"config.json": {"model_type": "llama", "auto_map": AUTO_MAP}, "tokenizer_config.json": {}},
}


class _Runs:
    def __init__(self, marker: Path) -> None:
        self.marker = marker

    def __reduce__(self) -> tuple[Any, ...]:
        return open, (str(self.marker), "w")


@pytest.mark.parametrize("answers", ["y\n" * 50, "", None], ids=["yes", "no more input", "closed"])
@pytest.mark.parametrize("name", OWN_CODE)
def test_code_of_a_folder_is_never_run(
    name: str, answers: str | None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr("sys.stdin", None if answers is None else io.StringIO(answers))
    folder, marker = tmp_path / "tokenizer", tmp_path / "marker"
    folder.mkdir()
    for file, content in OWN_CODE[name].items():
        (folder / file).write_text(json.dumps(content))
    (folder / "evil.py").write_text(CODE.format(marker=str(marker)))
    if name == "pickles":
        for file in ("vocab.pkl", "vocab.bin", "tokenizer.pkl", "tokenizer.model", "pytorch_model.bin", "vocab.json"):
            (folder / file).write_bytes(pickle.dumps(_Runs(marker)))
    with pytest.raises(DataError, match=r"needs its own Python code|cannot be read as a tokenizer") as error:
        HuggingFaceTokenizer(folder)
    assert not marker.exists() and "trust_remote_code" not in str(error.value) and "\n" not in str(error.value)
    assert capfd.readouterr() == ("", "")
    if name == "a tokenizer of its own":
        assert "save it as" in str(error.value)
