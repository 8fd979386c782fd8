"""K rules on data: paths, kinds, splits, keys and blends."""

from __future__ import annotations

from collections.abc import Iterator

from megatron_cp.config.names import NAME
from megatron_cp.config.schema import nearest, nearest_first
from megatron_cp.data.data_path import number_in, paths_and_weights
from megatron_cp.data.split import shares
from megatron_cp.rules.base import Context, Finding, broken, rule
from megatron_cp.rules.proposals import typed

_SPLIT = f"\"{NAME.dataset.split}='98,1,1'\""
_ONE_LENGTH = {"documents": "indexed", "jsonl": "indexed", "mock_documents": "mock"}
_VARYING_LENGTHS = {"indexed": "documents", "mock": "mock_documents"}


@rule(
    "K11",
    "The data and the tokenizer have paths.",
    "Checked here, before the model is built.",
    broken(dataset=dict(kind="indexed")),
)
def data_is_named(c: Context) -> Iterator[Finding]:
    data, tokenizer = c.config.dataset, c.config.tokenizer
    if data.kind in ("indexed", "documents", "jsonl") and not data.data_path:
        what = "a .jsonl file" if data.kind == "jsonl" else "the prefix of a .bin and .idx file"
        path, mock = "=PATH", f"{NAME.dataset.kind}=mock_documents"
        if data.kind == "indexed":
            path, mock = "=PREFIX (megatron-cp preprocess writes one)", f"{NAME.dataset.kind}=mock"
        yield Finding(NAME.dataset.data_path, f"{NAME.dataset.kind}={data.kind} needs {what}", path, mock)
    if tokenizer.tokenizer_type == "HuggingFaceTokenizer" and not tokenizer.tokenizer_model:
        yield Finding(
            NAME.tokenizer.tokenizer_model,
            "HuggingFaceTokenizer needs a folder or a tokenizer.json",
            "=PATH",
            f"{NAME.tokenizer.tokenizer_type}=ByteLevelTokenizer",
        )
    if tokenizer.tokenizer_type == "NullTokenizer" and not tokenizer.vocab_size:
        yield Finding(NAME.tokenizer.vocab_size, "NullTokenizer needs a vocabulary size", "=128256")
    if tokenizer.vocab_size and c.model.vocab_size and tokenizer.vocab_size > c.model.vocab_size:
        yield Finding(
            NAME.model.vocab_size,
            f"the tokenizer has {tokenizer.vocab_size} tokens, more than this vocabulary",
            f"={tokenizer.vocab_size}",
        )


@rule(
    "K25",
    "Samples of varying length are packed; samples of one length are not.",
    "Documents of varying length do not fit into a [batch, sequence] tensor. Windows cut from a token stream do not "
    "gain from packing.",
    broken(dataset=dict(kind="documents", data_path="corpus")),
)
def kind_fits_packing(c: Context) -> Iterator[Finding]:
    data, scheduler = c.config.dataset, NAME.model.sequence_packing_scheduler
    if not c.packed and data.kind in _ONE_LENGTH:
        path = f" {NAME.dataset.data_path}=PREFIX" if data.kind == "jsonl" else ""
        yield Finding(
            NAME.dataset.kind,
            f"samples of varying length need packing, but {scheduler} is not set",
            f"{scheduler}=dp_balanced",
            f"{NAME.model.dynamic_context_parallel}=true",
            f"={_ONE_LENGTH[data.kind]}{path} (samples of one length)",
        )
    if c.packed and data.kind in _VARYING_LENGTHS:
        yield Finding(
            NAME.dataset.kind,
            f"samples have one length, but {scheduler}={c.model.sequence_packing_scheduler} packs samples of varying "
            "length",
            f"={_VARYING_LENGTHS[data.kind]}",
            f"{scheduler}=null {NAME.model.dynamic_context_parallel}=false",
        )


@rule(
    "K26",
    "The lengths of mock documents have a known distribution or a file.",
    f"No sample is longer than {NAME.dataset.seq_length}. The distribution of long samples starts at 8192 tokens.",
    broken(
        model=dict(sequence_packing_scheduler="dp_balanced"),
        dataset=dict(kind="mock_documents", mock_lengths="lognorml"),
    ),
)
def mock_lengths_exist(c: Context) -> Iterator[Finding]:
    data = c.config.dataset
    # The run checks that the file exists: this may be another machine.
    if data.kind != "mock_documents" or any(mark in data.mock_lengths for mark in "./"):
        return
    from megatron_cp.dynamic_cp.distributions import DISTRIBUTIONS, LEAST_LONGEST

    if data.mock_lengths not in DISTRIBUTIONS:
        suggestion = nearest(data.mock_lengths, list(DISTRIBUTIONS))
        known = f" (one of {', '.join(DISTRIBUTIONS)}, or a path with a / or a dot)"
        yield Finding(
            NAME.dataset.mock_lengths,
            f"unknown distribution{suggestion or known}",
            values=nearest_first(data.mock_lengths, DISTRIBUTIONS)[:3],
        )
    least = LEAST_LONGEST.get(data.mock_lengths, 1)
    if 1 <= data.seq_length < least:  # rule A1 reports less than 1
        message = f"{NAME.dataset.mock_lengths}={data.mock_lengths} has no lengths below {least}"
        yield Finding(NAME.dataset.seq_length, message, f"={least}", f"{NAME.dataset.mock_lengths}=lognormal")


@rule(
    "K27",
    "Rows have a text, a prompt and a response, or a dialogue.",
    "At least one key must be named, and one key cannot have two purposes.",
    broken(
        model=dict(sequence_packing_scheduler="dp_balanced"),
        dataset=dict(kind="jsonl", data_path="chats.jsonl", text_key=None, response_key=None),
    ),
)
def keys_of_json_lines(c: Context) -> Iterator[Finding]:
    data = c.config.dataset
    if data.kind != "jsonl":
        return
    keys = {
        "text_key": data.text_key,
        "prompt_key": data.prompt_key,
        "response_key": data.response_key,
        "messages_key": data.messages_key,
    }
    if (data.prompt_key is None) != (data.response_key is None):
        missing = "response_key" if data.response_key is None else "prompt_key"
        yield Finding(f"dataset.{missing}", "prompt_key and response_key must be set together", "=NAME")
    elif data.text_key is None and data.prompt_key is None and data.messages_key is None:
        yield Finding(NAME.dataset.text_key, "must be set: no key of a row is named", "=text")
    named = [key for key in keys.values() if key is not None]
    for name, key in keys.items():
        if key is not None and named.count(key) > 1:
            yield Finding(
                f"dataset.{name}", f"{key!r} is already the key of another setting", "=NAME (another key)", "=null"
            )


@rule(
    "K32",
    "The split has a share for each set that is used, or the set has files of its own.",
    "megatron-core extracts digits from any text. Mock data has all sets without shares. If validation or test has "
    f"files of its own, all of {NAME.dataset.data_path} is for training.",
    broken(dataset=dict(split="a,b,c")),
)
def split_is_shares(c: Context) -> Iterator[Finding]:
    data, evaluates = c.config.dataset, c.config.validation.evaluates
    try:
        train, valid, *_ = *shares(data.split), 0.0
    except ValueError as error:
        yield Finding(NAME.dataset.split, str(error), _SPLIT)
        return
    if data.kind in ("mock", "mock_documents"):
        return
    if not data.divides:
        if evaluates and data.valid_data_path is None:
            yield Finding(
                NAME.dataset.valid_data_path,
                f"must be set: with {NAME.dataset.test_data_path}, all of {NAME.dataset.data_path} is for training",
                "=PATH",
                _no_evaluation(c),
            )
        return
    missing = "train" if train == 0 else "validation" if evaluates and valid == 0 else None
    if missing:
        other = _no_evaluation(c) if missing == "validation" else ""
        yield Finding(NAME.dataset.split, f"has no share for the {missing} set", _SPLIT, other)


def _no_evaluation(c: Context) -> str:
    """Return the overrides that turn evaluation off."""
    off = f"{NAME.validation.eval_iters}=0"
    return f"{off} {NAME.validation.full_validation}=false" if c.config.validation.full_validation else off


@rule(
    "K70",
    f"{NAME.validation.full_validation} is for packs.",
    "A sample of fixed length is a piece of a stream of documents, or several documents. A mean over samples is of "
    "use for samples that are whole documents, as dialogues are.",
    broken(validation=dict(full_validation=True)),
)
def whole_validation_of_packs(c: Context) -> Iterator[Finding]:
    if c.config.validation.full_validation and not c.packed:
        yield Finding(
            NAME.validation.full_validation,
            "evaluates samples of packs, and this run has samples of fixed length",
            f"=false {NAME.validation.eval_iters}=10",
            f"{NAME.model.sequence_packing_scheduler}=dp_balanced {NAME.dataset.kind}=null",
        )


@rule(
    "K36",
    "A NullTokenizer needs tokenizer.eod_id where a document's end matters.",
    "A NullTokenizer has only a number of tokens. megatron-core assumes that the last token ends a document, which "
    "may not match the data. Then it silently masks no loss and restarts no positions.",
    broken(
        tokenizer=dict(tokenizer_type="NullTokenizer", vocab_size=512),
        dataset=dict(data_path="corpus", eod_mask_loss=True),
    ),
)
def end_of_document_is_set(c: Context) -> Iterator[Finding]:
    data, tokenizer = c.config.dataset, c.config.tokenizer
    end, size = tokenizer.eod_id, tokenizer.vocab_size
    if tokenizer.tokenizer_type != "NullTokenizer":
        if end is not None:
            message = f"has no effect: {tokenizer.tokenizer_type} defines the token"
            yield Finding(NAME.tokenizer.eod_id, message, "=null")
    elif not size:
        return  # K11
    elif end is not None and not 0 <= end < size:
        yield Finding(NAME.tokenizer.eod_id, f"must be from 0 to {size - 1}", values=[0 if end < 0 else size - 1])
    elif end is None and data.kind == "indexed":
        looking = [name for name in ("eod_mask_loss", "reset_position_ids") if getattr(data, name)]
        if looking:
            yield Finding(
                NAME.tokenizer.eod_id,
                f"dataset.{looking[0]}=true needs the token that ends a document, which NullTokenizer does not define",
                f"=ID (from 0 to {size - 1}, as in the files of {NAME.dataset.data_path})",
                f"dataset.{looking[0]}=false",
            )


@rule(
    "K54",
    "Settings of the data are used.",
    "Mock data does not read a data path. eod_mask_loss masks the step from one document to the next, which only "
    "samples cut from a stream of documents contain. Nothing is evaluated without eval_iters.",
    broken(dataset=dict(kind="mock", data_path="corpus")),
)
def data_settings_are_used(c: Context) -> Iterator[Finding]:
    data, validation = c.config.dataset, c.config.validation
    iterations, evaluate = NAME.validation.eval_iters, f"{NAME.validation.eval_iters}=10"
    held_out = [name for name in ("valid_data_path", "test_data_path") if getattr(data, name)]
    for name in ["data_path", *held_out] if data.data_path else held_out:
        if data.kind in ("mock", "mock_documents"):
            path = "" if data.data_path else f" {NAME.dataset.data_path}=PATH"
            kinds = ("documents", "jsonl") if c.packed else ("indexed",)
            fixes = [f"{NAME.dataset.kind}={kind}{path}" for kind in kinds]
            yield Finding(f"dataset.{name}", f"has no effect with {NAME.dataset.kind}={data.kind}", "=null", *fixes)
        elif name in held_out and not validation.evaluates:
            message = f"has no effect: {iterations} is 0"
            yield Finding(f"dataset.{name}", message, "=null", evaluate, severity="warning")
    if c.config.train.skip_train and not validation.evaluates:
        message = f"the run has nothing to do: {iterations} is 0"
        yield Finding(NAME.train.skip_train, message, evaluate, "=false")
    if data.eod_mask_loss and data.kind != "indexed":
        yield Finding(
            NAME.dataset.eod_mask_loss,
            f"has no effect with {NAME.dataset.kind}={data.kind}: no sample crosses a document boundary",
            "=false",
        )
    if validation.eval_interval and not validation.evaluates:
        message = f"has no effect: {iterations} is 0"
        yield Finding(NAME.validation.eval_interval, message, evaluate, "=null", severity="warning")


@rule(
    "K58",
    "A blend is weight, path, weight, path, ..., and each weight is above zero.",
    "A file's share is its weight divided by the sum. One weight that is nan or too large makes every share invalid.",
    broken(dataset=dict(kind="indexed", data_path=["1e308", "a", "1e308", "b"])),
)
def blends_have_weights(c: Context) -> Iterator[Finding]:
    for name in ("data_path", "valid_data_path", "test_data_path"):
        given = getattr(c.config.dataset, name)
        try:
            paths_and_weights(given or "")
        except ValueError as error:
            paths = [item for item in given if isinstance(item, str) and number_in(item) is None]
            plain = typed(f"dataset.{name}", paths or "PATH")
            yield Finding(f"dataset.{name}", str(error), f"{plain} (files weighted by size)")
