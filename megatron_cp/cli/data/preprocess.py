"""``megatron-cp preprocess``: tokenize text into Megatron's .bin/.idx files."""

from __future__ import annotations

import argparse
import os
import signal
import sys
import time
from collections.abc import Sequence

from megatron_cp.common.errors import EXIT_CONFIG, EXIT_INTERRUPTED, EXIT_OK, EXIT_TERMINATED, DataError
from megatron_cp.common.terminal import ArgumentParser, say
from megatron_cp.config.run_config import TokenizerConfig
from megatron_cp.data.text.preprocess import preprocess
from megatron_cp.data.text.text_files import DEFAULT_SUFFIXES, read_documents, search
from megatron_cp.data.text.tokenizers import train_bpe


def _parse(arguments: Sequence[str]) -> argparse.Namespace:
    parser = ArgumentParser(
        "megatron-cp preprocess",
        description="Tokenize text into Megatron PREFIX.bin and PREFIX.idx. A text file is one document, and so "
        "is each line of a .jsonl or .json file. A document begins with the tokenizer's BOS token where it has "
        "one, and ends with its end-of-document token.",
        epilog="example: megatron-cp preprocess --input corpus/ notes.txt --output-prefix data/corpus "
        "--tokenizer-model data/tokenizer",
    )
    parser.add_argument("--input", nargs="+", required=True, metavar="PATH", help="files, or folders to search")
    parser.add_argument("--output-prefix", required=True, metavar="PREFIX", help="where PREFIX.bin and PREFIX.idx go")
    parser.add_argument(
        "--json-key", default="text", metavar="KEY", help=".jsonl, .json: the key of the text (default: text)"
    )
    parser.add_argument(
        "--suffix",
        nargs="+",
        default=list(DEFAULT_SUFFIXES),
        metavar=".EXT",
        help=f"endings of the files of a folder to read (default: {' '.join(DEFAULT_SUFFIXES)}); named files are read "
        "with any ending",
    )
    parser.add_argument("--tokenizer-type", choices=["HuggingFaceTokenizer", "ByteLevelTokenizer", "NullTokenizer"])
    parser.add_argument("--tokenizer-model", metavar="PATH", help="a tokenizer.json, or the folder that holds one")
    parser.add_argument(
        "--train-bpe",
        type=int,
        metavar="VOCAB_SIZE",
        help="first train a byte-level BPE tokenizer on the input and write it to the folder --tokenizer-model",
    )
    parser.add_argument("--vocab-size", type=int, help="vocabulary size of a NullTokenizer, which reads numbers")
    parser.add_argument(
        "--add-bos",
        action=argparse.BooleanOptionalAction,
        help="begin documents with the BOS token (default: as the tokenizer's post-processor does)",
    )
    parser.add_argument("--workers", type=int, default=os.cpu_count() or 1, help="processes (default: one per CPU)")
    options = parser.parse_args(arguments)
    if options.tokenizer_type is None:
        if options.tokenizer_model is None:
            parser.error("no tokenizer. Fix: --tokenizer-model PATH, or --tokenizer-type ByteLevelTokenizer")
        options.tokenizer_type = "HuggingFaceTokenizer"
    if options.train_bpe is not None and options.tokenizer_type != "HuggingFaceTokenizer":
        parser.error("--train-bpe trains a HuggingFaceTokenizer. Fix: leave out --tokenizer-type")
    if options.train_bpe is not None and options.tokenizer_model is None:
        parser.error("--train-bpe needs a folder for the tokenizer. Fix: --tokenizer-model FOLDER")
    if options.train_bpe is not None and os.path.exists(options.tokenizer_model):
        parser.error(f"--tokenizer-model={options.tokenizer_model}: exists. Fix: name a new folder")
    return options


def main(arguments: Sequence[str]) -> int:
    options = _parse(arguments)
    # Raise SystemExit, so that unfinished files are removed.
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(EXIT_TERMINATED))
    tokenizer = TokenizerConfig(
        options.tokenizer_type, options.tokenizer_model, options.vocab_size, add_bos=options.add_bos
    )
    start = time.perf_counter()
    try:
        if options.train_bpe is not None:
            files, _ = search(options.input, options.suffix)
            texts = (text for file in files for text, _ in read_documents(file, options.json_key))
            train_bpe(texts, options.train_bpe, options.tokenizer_model)
            say(f"{options.tokenizer_model}: byte-level BPE tokenizer, {time.perf_counter() - start:.1f} s")
        summary = preprocess(
            options.input,
            options.output_prefix,
            tokenizer,
            json_key=options.json_key,
            suffixes=options.suffix,
            workers=options.workers,
            progress="tokenizing",
        )
    except (DataError, OSError) as error:
        say(f"megatron-cp: {error}", file=sys.stderr)
        return EXIT_CONFIG
    except KeyboardInterrupt:
        say("megatron-cp: interrupted; nothing was written.", file=sys.stderr)
        return EXIT_INTERRUPTED
    seconds = time.perf_counter() - start
    skipped = f" ({summary.empty_documents} empty ones skipped)" if summary.empty_documents else ""
    say(
        f"{summary.prefix}.bin, .idx: {summary.documents:,} documents{skipped}, {summary.tokens:,} tokens "
        f"of {summary.text_bytes / 1e6:.1f} MB text in {seconds:.1f} s; a document is: {summary.form}"
    )
    if summary.left_out:
        say(f"skipped in folders, by file ending: {summary.left_out}")
    return EXIT_OK
