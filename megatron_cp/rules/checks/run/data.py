"""K, of the data: it is named, its kind fits how samples become microbatches, and its settings mean something."""

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
_OWN_LENGTHS = {"indexed": "documents", "mock": "mock_documents"}


@rule(
    "K11",
    "The data and the tokenizer are named.",
    "Found out here, not after the model is built.",
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
            f"the tokenizer's {tokenizer.vocab_size} tokens do not fit a vocabulary of {c.model.vocab_size}",
            f"={tokenizer.vocab_size}",
        )


@rule(
    "K25",
    "Samples of their own lengths are packed, samples of one length are not.",
    "Documents of different lengths fit no [batch, sequence] tensor; windows cut from a token stream without regard to "
    "documents have nothing to gain from packing.",
    broken(dataset=dict(kind="documents", data_path="corpus")),
)
def kind_fits_packing(c: Context) -> Iterator[Finding]:
    data, scheduler = c.config.dataset, NAME.model.sequence_packing_scheduler
    if not c.packed and data.kind in _ONE_LENGTH:
        path = f" {NAME.dataset.data_path}=PREFIX" if data.kind == "jsonl" else ""
        yield Finding(
            NAME.dataset.kind,
            f"has samples of their own lengths, which are trained in packs, and {scheduler} is not set",
            f"{scheduler}=dp_balanced",
            f"{NAME.model.dynamic_context_parallel}=true",
            f"={_ONE_LENGTH[data.kind]}{path} (samples of one length)",
        )
    if c.packed and data.kind in _OWN_LENGTHS:
        yield Finding(
            NAME.dataset.kind,
            f"has samples of one length, and {scheduler}={c.model.sequence_packing_scheduler} packs samples of their "
            "own lengths",
            f"={_OWN_LENGTHS[data.kind]}",
            f"{scheduler}=null {NAME.model.dynamic_context_parallel}=false",
        )


@rule(
    "K26",
    "Mock documents have lengths that can be drawn.",
    f"By the name of a distribution, or from a file of lengths. No sample is longer than {NAME.dataset.seq_length}, "
    "and the distribution of long samples begins at 8192 tokens.",
    broken(
        model=dict(sequence_packing_scheduler="dp_balanced"),
        dataset=dict(kind="mock_documents", mock_lengths="lognorml"),
    ),
)
def mock_lengths_exist(c: Context) -> Iterator[Finding]:
    data = c.config.dataset
    # Whether a file is there is found by the run: this may be another machine.
    if data.kind != "mock_documents" or any(mark in data.mock_lengths for mark in "./"):
        return
    from megatron_cp.dynamic_cp.distributions import DISTRIBUTIONS, LEAST_LONGEST

    if data.mock_lengths not in DISTRIBUTIONS:
        suggestion = nearest(data.mock_lengths, list(DISTRIBUTIONS))
        known = f" (one of {', '.join(DISTRIBUTIONS)})"
        yield Finding(
            NAME.dataset.mock_lengths,
            f"is no distribution{suggestion or known}, and no path of a file of lengths",
            values=nearest_first(data.mock_lengths, DISTRIBUTIONS)[:3],
        )
    least = LEAST_LONGEST.get(data.mock_lengths, 1)
    if 1 <= data.seq_length < least:  # less than 1 is rule A1's
        message = f"{NAME.dataset.mock_lengths}={data.mock_lengths} has no lengths below {least}"
        yield Finding(NAME.dataset.seq_length, message, f"={least}", f"{NAME.dataset.mock_lengths}=lognormal")


@rule(
    "K27",
    "JSON lines have a text, or a prompt and a response.",
    "Keys that are not given cannot be found in a line, and one key cannot serve two purposes.",
    broken(
        model=dict(sequence_packing_scheduler="dp_balanced"),
        dataset=dict(kind="jsonl", data_path="chats.jsonl", text_key=None, response_key=None),
    ),
)
def keys_of_json_lines(c: Context) -> Iterator[Finding]:
    data = c.config.dataset
    if data.kind != "jsonl":
        return
    keys = {"text_key": data.text_key, "prompt_key": data.prompt_key, "response_key": data.response_key}
    if (data.prompt_key is None) != (data.response_key is None):
        missing = "response_key" if data.response_key is None else "prompt_key"
        yield Finding(f"dataset.{missing}", "a prompt and a response go together", "=NAME")
    elif data.text_key is None and data.prompt_key is None:
        yield Finding(NAME.dataset.text_key, "no key of a line is named", "=text")
    named = [key for key in keys.values() if key is not None]
    for name, key in keys.items():
        if key is not None and named.count(key) > 1:
            yield Finding(f"dataset.{name}", f"{key!r} is the key of two things", "=NAME (another key)", "=null")


@rule(
    "K32",
    "The data is divided into shares, one for each part that is read, or each part has files of its own.",
    "megatron-core takes the digits out of any text. Mock data has every part without a share of its own. Where "
    f"validation or test has files of its own, all of {NAME.dataset.data_path} is for training.",
    broken(dataset=dict(split="a,b,c")),
)
def split_is_shares(c: Context) -> Iterator[Finding]:
    data, evaluates = c.config.dataset, c.config.validation.eval_iters > 0
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
                f"is not set, and with {NAME.dataset.test_data_path} nothing of {NAME.dataset.data_path} is left for "
                "validation",
                "=PATH",
                f"{NAME.validation.eval_iters}=0",
            )
        return
    missing = "train" if train == 0 else "validation" if evaluates and valid == 0 else None
    if missing:
        other = f"{NAME.validation.eval_iters}=0" if missing == "validation" else ""
        yield Finding(NAME.dataset.split, f"has no share for the {missing} set", _SPLIT, other)


@rule(
    "K36",
    "A NullTokenizer is told which token ends a document where one is looked for.",
    "It knows no text, only a number of tokens. Taken for granted as the last of them, as in megatron-core, it is not "
    "found in data that was tokenized elsewhere: no loss is masked and no position starts again, silently.",
    broken(
        tokenizer=dict(tokenizer_type="NullTokenizer", vocab_size=512),
        dataset=dict(data_path="corpus", eod_mask_loss=True),
    ),
)
def end_of_document_is_known(c: Context) -> Iterator[Finding]:
    data, tokenizer = c.config.dataset, c.config.tokenizer
    end, size = tokenizer.eod_id, tokenizer.vocab_size
    if tokenizer.tokenizer_type != "NullTokenizer":
        if end is not None:
            message = f"is not read: a {tokenizer.tokenizer_type} knows its own"
            yield Finding(NAME.tokenizer.eod_id, message, "=null")
    elif not size:
        return  # K11
    elif end is not None and not 0 <= end < size:
        yield Finding(NAME.tokenizer.eod_id, f"is none of the {size} tokens", values=[0 if end < 0 else size - 1])
    elif end is None and data.kind == "indexed":
        looking = [name for name in ("eod_mask_loss", "reset_position_ids") if getattr(data, name)]
        if looking:
            yield Finding(
                NAME.tokenizer.eod_id,
                f"dataset.{looking[0]}=true looks for the token that ends a document, and a NullTokenizer does not "
                "know it",
                f"=ID (from 0 to {size - 1}, as in the files of {NAME.dataset.data_path})",
                f"dataset.{looking[0]}=false",
            )


@rule(
    "K54",
    "What is configured of the data is read.",
    "A data path is not read by mock data, which a run's own config.yaml may name. Only samples cut from a "
    "stream of documents have the step from one document to the next that eod_mask_loss masks. Without eval_iters "
    "nothing is evaluated.",
    broken(dataset=dict(kind="mock", data_path="corpus")),
)
def data_settings_are_read(c: Context) -> Iterator[Finding]:
    data, validation = c.config.dataset, c.config.validation
    iterations, evaluate = NAME.validation.eval_iters, f"{NAME.validation.eval_iters}=10"
    held_out = [name for name in ("valid_data_path", "test_data_path") if getattr(data, name)]
    for name in ["data_path", *held_out] if data.data_path else held_out:
        if data.kind in ("mock", "mock_documents"):
            path = "" if data.data_path else f" {NAME.dataset.data_path}=PATH"
            kinds = ("documents", "jsonl") if c.packed else ("indexed",)
            fixes = [f"{NAME.dataset.kind}={kind}{path}" for kind in kinds]
            yield Finding(f"dataset.{name}", f"is not read by {NAME.dataset.kind}={data.kind}", "=null", *fixes)
        elif name in held_out and not validation.eval_iters:
            message = f"is not read while {iterations} is 0"
            yield Finding(f"dataset.{name}", message, "=null", evaluate, severity="warning")
    if c.config.train.skip_train and not validation.eval_iters:
        message = f"leaves nothing to do while {iterations} is 0"
        yield Finding(NAME.train.skip_train, message, evaluate, "=false")
    if data.eod_mask_loss and data.kind != "indexed":
        yield Finding(
            NAME.dataset.eod_mask_loss,
            f"masks nothing with {NAME.dataset.kind}={data.kind}: no token of a sample predicts another document",
            "=false",
        )
    if validation.eval_interval and not validation.eval_iters:
        message = f"evaluates nothing while {iterations} is 0"
        yield Finding(NAME.validation.eval_interval, message, evaluate, "=null", severity="warning")


@rule(
    "K58",
    "A blend is weight, path, weight, path, ..., and each weight is a number above zero.",
    "The shares of all files follow from their sum: one weight that is nan, or too large to add, spoils every share.",
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
            yield Finding(f"dataset.{name}", str(error), f"{plain} (each file gets the share that it has)")
