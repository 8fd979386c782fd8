"""K, of the data: it is named, its kind fits how samples become microbatches, and its settings mean something."""

from __future__ import annotations

from collections.abc import Iterator

from megatron_cp.config.names import NAME
from megatron_cp.config.schema import nearest, nearest_first
from megatron_cp.data.data_path import number_in, paths_and_weights
from megatron_cp.data.split import shares
from megatron_cp.rules.base import Context, Finding, broken, rule
from megatron_cp.rules.proposals import either, one_of, typed

_SPLIT = f"\"{NAME.dataset.split}='98,1,1'\""
_ONE_LENGTH = {"documents": "indexed", "jsonl": "indexed", "mock_documents": "mock"}
_OWN_LENGTHS = {"indexed": "documents", "mock": "mock_documents"}


@rule(
    "K11",
    "The data and the tokenizer are named.",
    "Found out here, not after the model is built.",
    broken(f"{NAME.dataset.kind}=indexed"),
)
def data_is_named(c: Context) -> Iterator[Finding]:
    data, tokenizer = c.config.dataset, c.config.tokenizer
    if data.kind == "indexed" and not data.data_path:
        yield Finding(
            NAME.dataset.data_path,
            f"{NAME.dataset.kind}=indexed needs the prefix of a .bin and .idx file",
            f"{NAME.dataset.data_path}=PREFIX (megatron-cp preprocess writes one), or {NAME.dataset.kind}=mock",
        )
    if data.kind in ("documents", "jsonl") and not data.data_path:
        what = "a .jsonl file" if data.kind == "jsonl" else "the prefix of a .bin and .idx file"
        yield Finding(
            NAME.dataset.data_path,
            f"{NAME.dataset.kind}={data.kind} needs {what}",
            f"{NAME.dataset.data_path}=PATH, or {NAME.dataset.kind}=mock_documents",
        )
    if tokenizer.tokenizer_type == "HuggingFaceTokenizer" and not tokenizer.tokenizer_model:
        yield Finding(
            NAME.tokenizer.tokenizer_model,
            "HuggingFaceTokenizer needs a folder or a tokenizer.json",
            f"{NAME.tokenizer.tokenizer_model}=PATH, or {NAME.tokenizer.tokenizer_type}=ByteLevelTokenizer",
        )
    if tokenizer.tokenizer_type == "NullTokenizer" and not tokenizer.vocab_size:
        yield Finding(
            NAME.tokenizer.vocab_size, "NullTokenizer needs a vocabulary size", f"{NAME.tokenizer.vocab_size}=128256"
        )
    if tokenizer.vocab_size and c.config.model.vocab_size and tokenizer.vocab_size > c.config.model.vocab_size:
        yield Finding(
            NAME.model.vocab_size,
            f"the tokenizer's {tokenizer.vocab_size} tokens do not fit a vocabulary of {c.config.model.vocab_size}",
            f"{NAME.model.vocab_size}={tokenizer.vocab_size}",
        )


@rule(
    "K25",
    "Samples of their own lengths are packed, samples of one length are not.",
    "Documents of different lengths fit no [batch, sequence] tensor; windows cut from a token stream without regard to "
    "documents have nothing to gain from packing.",
    broken(f"{NAME.dataset.kind}=documents", f"{NAME.dataset.data_path}=corpus"),
)
def kind_fits_packing(c: Context) -> Iterator[Finding]:
    data, packing = c.config.dataset, c.config.model.sequence_packing_scheduler
    if not c.packed and data.kind in _ONE_LENGTH:
        other = _ONE_LENGTH[data.kind]
        yield Finding(
            NAME.dataset.kind,
            "has samples of their own lengths, which are trained in packs, and "
            f"{NAME.model.sequence_packing_scheduler} is not "
            "set",
            either(
                f"{NAME.model.sequence_packing_scheduler}=dp_balanced",
                f"{NAME.model.dynamic_context_parallel}=true",
                f"{NAME.dataset.kind}={other}{f' {NAME.dataset.data_path}=PREFIX' * (data.kind == 'jsonl')} (samples "
                "of one length)",
            ),
        )
    if c.packed and data.kind in _OWN_LENGTHS:
        yield Finding(
            NAME.dataset.kind,
            f"has samples of one length, and {NAME.model.sequence_packing_scheduler}={packing} packs samples of "
            "their own "
            "lengths",
            either(
                f"{NAME.dataset.kind}={_OWN_LENGTHS[data.kind]}",
                f"{NAME.model.sequence_packing_scheduler}=null {NAME.model.dynamic_context_parallel}=false",
            ),
        )


@rule(
    "K26",
    "Mock documents have lengths that can be drawn.",
    f"By the name of a distribution, or from a file of lengths. No sample is longer than {NAME.dataset.seq_length}, "
    "and the "
    "distribution of long samples begins at 8192 tokens.",
    broken(
        f"{NAME.model.sequence_packing_scheduler}=dp_balanced",
        f"{NAME.dataset.kind}=mock_documents",
        f"{NAME.dataset.mock_lengths}=lognorml",
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
            one_of(NAME.dataset.mock_lengths, nearest_first(data.mock_lengths, DISTRIBUTIONS)[:3]),
        )
    least = LEAST_LONGEST.get(data.mock_lengths, 1)
    if 1 <= data.seq_length < least:  # less than 1 is rule A1's
        message = f"{NAME.dataset.mock_lengths}={data.mock_lengths} has no lengths below {least}"
        yield Finding(
            NAME.dataset.seq_length,
            message,
            f"{NAME.dataset.seq_length}={least}, or {NAME.dataset.mock_lengths}=lognormal",
        )


@rule(
    "K27",
    "JSON lines have a text, or a prompt and a response.",
    "Keys that are not given cannot be found in a line, and one key cannot serve two purposes.",
    broken(
        f"{NAME.model.sequence_packing_scheduler}=dp_balanced",
        f"{NAME.dataset.kind}=jsonl",
        f"{NAME.dataset.data_path}=chats.jsonl",
        f"{NAME.dataset.text_key}=null",
        f"{NAME.dataset.response_key}=null",
    ),
)
def keys_of_json_lines(c: Context) -> Iterator[Finding]:
    data = c.config.dataset
    if data.kind != "jsonl":
        return
    keys = {"text_key": data.text_key, "prompt_key": data.prompt_key, "response_key": data.response_key}
    if (data.prompt_key is None) != (data.response_key is None):
        missing = "response_key" if data.response_key is None else "prompt_key"
        yield Finding(f"dataset.{missing}", "a prompt and a response go together", f"dataset.{missing}=NAME")
    elif data.text_key is None and data.prompt_key is None:
        yield Finding(NAME.dataset.text_key, "no key of a line is named", f"{NAME.dataset.text_key}=text")
    named = [key for key in keys.values() if key is not None]
    for name, key in keys.items():
        if key is not None and named.count(key) > 1:
            yield Finding(
                f"dataset.{name}",
                f"{key!r} is the key of two things",
                either(f"dataset.{name}=NAME (another key)", f"dataset.{name}=null"),
            )


@rule(
    "K32",
    "The data is divided into shares, one for each part that is read, or each part has files of its own.",
    "megatron-core takes the digits out of any text. Mock data has every part without a share of its own. Where "
    f"validation or test has files of its own, all of {NAME.dataset.data_path} is for training.",
    broken(f"{NAME.dataset.split}='a,b,c'"),
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
                f"{NAME.dataset.valid_data_path}=PATH, or {NAME.validation.eval_iters}=0",
            )
        return
    missing = "train" if train == 0 else "validation" if evaluates and valid == 0 else None
    if missing:
        other = f"{NAME.validation.eval_iters}=0" if missing == "validation" else ""
        yield Finding(NAME.dataset.split, f"has no share for the {missing} set", either(_SPLIT, other))


@rule(
    "K36",
    "A NullTokenizer is told which token ends a document where one is looked for.",
    "It knows no text, only a number of tokens. Taken for granted as the last of them, as in megatron-core, it is not "
    "found in data that was tokenized elsewhere: no loss is masked and no position starts again, silently.",
    broken(
        f"{NAME.tokenizer.tokenizer_type}=NullTokenizer",
        f"{NAME.tokenizer.vocab_size}=512",
        f"{NAME.dataset.data_path}=corpus",
        f"{NAME.dataset.eod_mask_loss}=true",
    ),
)
def end_of_document_is_known(c: Context) -> Iterator[Finding]:
    data, tokenizer = c.config.dataset, c.config.tokenizer
    end, size = tokenizer.eod_id, tokenizer.vocab_size
    if tokenizer.tokenizer_type != "NullTokenizer":
        if end is not None:
            message = f"is not read: a {tokenizer.tokenizer_type} knows its own"
            yield Finding(NAME.tokenizer.eod_id, message, f"{NAME.tokenizer.eod_id}=null")
    elif not size:
        return  # K11
    elif end is not None and not 0 <= end < size:
        yield Finding(
            NAME.tokenizer.eod_id,
            f"is none of the {size} tokens",
            one_of(NAME.tokenizer.eod_id, [0 if end < 0 else size - 1]),
        )
    elif end is None and data.kind == "indexed":
        looking = [name for name in ("eod_mask_loss", "reset_position_ids") if getattr(data, name)]
        if looking:
            yield Finding(
                NAME.tokenizer.eod_id,
                f"dataset.{looking[0]}=true looks for the token that ends a document, and a NullTokenizer does not "
                "know it",
                either(
                    f"{NAME.tokenizer.eod_id}=ID (from 0 to {size - 1}, as in the files of {NAME.dataset.data_path})",
                    f"dataset.{looking[0]}=false",
                ),
            )


@rule(
    "K54",
    "What is configured of the data is read.",
    "A data path is not read by mock data, which a run's own config.yaml may name. Only samples cut from a "
    "stream of documents have the step from one document to the next that eod_mask_loss masks. Without eval_iters "
    "nothing is evaluated.",
    broken(f"{NAME.dataset.kind}=mock", f"{NAME.dataset.data_path}=corpus"),
)
def data_settings_are_read(c: Context) -> Iterator[Finding]:
    data, validation = c.config.dataset, c.config.validation
    held_out = [name for name in ("valid_data_path", "test_data_path") if getattr(data, name)]
    for name in ["data_path", *held_out] if data.data_path else held_out:
        if data.kind in ("mock", "mock_documents"):
            path = "" if data.data_path else f" {NAME.dataset.data_path}=PATH"
            kinds = [
                f"{NAME.dataset.kind}={kind}{path}" for kind in (("documents", "jsonl") if c.packed else ("indexed",))
            ]
            fix = either(f"dataset.{name}=null", *kinds)
            yield Finding(f"dataset.{name}", f"is not read by {NAME.dataset.kind}={data.kind}", fix)
        elif name in held_out and not validation.eval_iters:
            message, fix = f"is not read while {NAME.validation.eval_iters} is 0", f"dataset.{name}=null"
            yield Finding(
                f"dataset.{name}", message, either(fix, f"{NAME.validation.eval_iters}=10"), severity="warning"
            )
    if c.config.train.skip_train and not validation.eval_iters:
        message = f"leaves nothing to do while {NAME.validation.eval_iters} is 0"
        yield Finding(
            NAME.train.skip_train, message, f"{NAME.validation.eval_iters}=10, or {NAME.train.skip_train}=false"
        )
    if data.eod_mask_loss and data.kind != "indexed":
        yield Finding(
            NAME.dataset.eod_mask_loss,
            f"masks nothing with {NAME.dataset.kind}={data.kind}: no token of a sample predicts another document",
            f"{NAME.dataset.eod_mask_loss}=false",
        )
    if validation.eval_interval and not validation.eval_iters:
        yield Finding(
            NAME.validation.eval_interval,
            f"evaluates nothing while {NAME.validation.eval_iters} is 0",
            f"{NAME.validation.eval_iters}=10, or {NAME.validation.eval_interval}=null",
            severity="warning",
        )


@rule(
    "K58",
    "A blend is weight, path, weight, path, ..., and each weight is a number above zero.",
    "The shares of all files follow from their sum: one weight that is nan, or too large to add, spoils every share.",
    broken(f"{NAME.dataset.kind}=indexed", f"{NAME.dataset.data_path}=[1e308,a,1e308,b]"),
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
