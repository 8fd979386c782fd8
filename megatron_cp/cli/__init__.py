"""The command line: dispatch of commands, error output and exit codes.

Every command but a real run answers without importing torch, in well under a second.
"""

from __future__ import annotations

import errno
import importlib
import os
import sys
from collections.abc import Sequence

from megatron_cp.common.errors import (
    EXIT_CONFIG,
    EXIT_FAILED,
    EXIT_INTERRUPTED,
    EXIT_OK,
    ConfigError,
    DataError,
    RuntimeFault,
)
from megatron_cp.common.terminal import UsageError, say
from megatron_cp.launch import failures, launcher, slurm
from megatron_cp.launch.process import end_with_launcher

# Command: its module and its one-line help.
_MODULES = {
    "quickstart": ("megatron_cp.quickstart", "train a tiny model from scratch on bundled or local text"),
    "train": ("megatron_cp.cli.train", "train a recipe, or show what would run (--dry-run)"),
    "evaluate": ("megatron_cp.cli.evaluate", "measure the loss of a checkpoint on held-out data"),
    "recipes": ("megatron_cp.cli.recipes", "list the recipes"),
    "validate": ("megatron_cp.cli.validate", "check a recipe against every rule"),
    "plan": ("megatron_cp.cli.plan", "find the layout of a model on so many GPUs: memory and time, estimated"),
    "preprocess": ("megatron_cp.cli.data.preprocess", "tokenize text into Megatron's .bin/.idx files"),
    "preview": ("megatron_cp.cli.data.preview", "show what a training step reads: samples, loss mask, packs"),
    "convert": ("megatron_cp.cli.weights.convert", "convert weights from and to the Hugging Face format"),
    "generate": ("megatron_cp.cli.weights.generate", "show text that a checkpoint generates"),
    "verify": ("megatron_cp.cli.verify", "compare a layout's losses and gradients with a single rank"),
    "schedule": ("megatron_cp.cli.schedule", "schedule sequence lengths over ranks and show the balance"),
    "report": ("megatron_cp.cli.report", "show runs side by side: loss, throughput, phases, memory, layout"),
    "profile": ("megatron_cp.cli.profile", "show where the time of profiled steps went, by kernel kind"),
    "doctor": ("megatron_cp.cli.doctor", "show installed libraries and the attention that a recipe uses"),
}


def _usage() -> str:
    commands = "\n".join(f"  {name:10} {text}" for name, (_, text) in _MODULES.items())
    return f"usage: megatron-cp COMMAND ...\n\ncommands:\n{commands}\n\nFor options: megatron-cp COMMAND --help"


def _dispatch(argv: Sequence[str]) -> int:
    if not argv or argv[0] in ("-h", "--help"):
        say(_usage(), file=sys.stdout if argv else sys.stderr)
        return EXIT_OK if argv else EXIT_CONFIG
    name, rest = argv[0], argv[1:]
    if name not in _MODULES:
        from megatron_cp.config.schema import nearest

        raise UsageError("megatron-cp", f"unknown command '{name}'{nearest(name, list(_MODULES))}\n{_usage()}")
    return importlib.import_module(_MODULES[name][0]).main(rest)


def main(argv: Sequence[str] | None = None) -> int:
    """Run a command and return its exit code.

    0: done. 1: failed while running. 2: usage, configuration or data. 129, 130, 143: stopped by a signal.
    """
    for name in ("stdout", "stderr"):
        if getattr(sys, name) is None:  # None where the shell closed it (>&-)
            setattr(sys, name, open(os.devnull, "w", encoding="utf-8"))  # noqa: SIM115
    end_with_launcher()
    try:
        slurm.take_rank()
        code = _dispatch(sys.argv[1:] if argv is None else list(argv))
        sys.stdout.flush()  # here, so that a full disk or a closed pipe is still handled
        return code
    except UsageError as error:
        failures.report(error, error.text, error.program)
        return EXIT_CONFIG
    except (ConfigError, DataError) as error:
        what = "the configuration cannot run\n" if isinstance(error, ConfigError) else ""
        failures.report(error, f"{what}{error}")
        return EXIT_CONFIG
    except RuntimeFault as fault:
        failures.report_fault(fault)
        return EXIT_CONFIG if fault.of_data else EXIT_FAILED
    except KeyboardInterrupt:
        if launcher.is_first_rank():
            say("megatron-cp: interrupted", file=sys.stderr, flush=True)
        return EXIT_INTERRUPTED
    except SystemExit as stop:  # --help
        return stop.code if isinstance(stop.code, int) else EXIT_CONFIG
    except BrokenPipeError:  # the reader (head, less) went away
        _drop_output()
        return EXIT_OK
    except Exception as error:
        lost = (errno.ENOSPC, errno.EDQUOT, errno.EIO)
        if isinstance(error, OSError) and error.errno in lost and error.filename is None:
            _drop_output()
            say(f"megatron-cp: cannot write the output: {error.strerror}", file=sys.stderr, flush=True)
        elif not failures.report_limit(error):
            raise
        return EXIT_FAILED


def _drop_output() -> None:
    """Send pending output to /dev/null: Python would fail on it again at exit."""
    os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
