"""``megatron-cp convert``: convert weights from and to the Hugging Face format."""

from __future__ import annotations

import logging
import os
import signal
import sys
from collections.abc import Sequence
from pathlib import Path

from megatron_cp.common.errors import EXIT_OF_SIGNAL, EXIT_OK
from megatron_cp.common.terminal import ArgumentParser, say
from megatron_cp.launch import launcher
from megatron_cp.launch.process import signals_to_stop_at

_DTYPES = ("float32", "bfloat16", "float16")


def main(argv: Sequence[str]) -> int:
    parser = ArgumentParser(
        "megatron-cp convert",
        description="Convert weights from and to the Hugging Face format, in one process, in host memory.",
        allow_abbrev=False,
    )
    ways = parser.add_subparsers(dest="way", required=True, metavar="import|export")
    into = ways.add_parser("import", help="write a checkpoint and a recipe from a published model", allow_abbrev=False)
    into.add_argument("--hf-model", type=Path, required=True, metavar="FOLDER", help="config.json and *.safetensors")
    into.add_argument("--megatron-path", type=Path, required=True, metavar="FOLDER", help="a new folder")
    out = ways.add_parser("export", help="write a Hugging Face model from a checkpoint", allow_abbrev=False)
    out.add_argument("--megatron-path", type=Path, required=True, metavar="FOLDER", help="a run's folder")
    out.add_argument("--iteration", type=int, metavar="N", help="checkpoint to export (default: the latest)")
    out.add_argument("--hf-path", type=Path, required=True, metavar="FOLDER", help="a new folder")
    for way in (into, out):
        way.add_argument("--torch-dtype", choices=_DTYPES, help="data type of the weights (default: unchanged)")
    args = parser.parse_args(argv)
    if (launcher.world_size() or 1) > 1:
        parser.error("conversion runs in a single process. Fix: start it without torchrun")
    os.environ.pop("RANK", None)  # set by a launcher; this process reports errors itself
    for number in signals_to_stop_at():
        if number != signal.SIGINT:
            # Exit normally, so that unfinished files are removed.
            signal.signal(number, lambda number, _: sys.exit(EXIT_OF_SIGNAL[signal.Signals(number)]))
    # Conversion needs no GPU memory, and gives the same result without.
    os.environ["CUDA_VISIBLE_DEVICES"] = ""
    # As in a run: deprecation warnings of model classes need no action by users.
    logging.getLogger("megatron").setLevel(logging.ERROR)
    if args.way == "import":
        from megatron_cp.convert.importing import import_model  # torch and megatron-core: ten seconds

        say(import_model(args.hf_model, args.megatron_path, args.torch_dtype))
    else:
        from megatron_cp.convert.exporting import export_model

        say(export_model(args.megatron_path, args.hf_path, args.iteration, args.torch_dtype))
    return EXIT_OK
