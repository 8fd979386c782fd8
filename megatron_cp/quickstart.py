"""Quick start: build a corpus, tokenize it, train a model, print a summary.

``megatron-cp quickstart`` runs this; in a clone, ``scripts/quickstart.sh`` creates the environment first. The corpus is
the source of the Python standard library, so no network is needed. Arguments are overrides of the recipe, as for
``megatron-cp train``.
"""

from __future__ import annotations

import hashlib
import json
import math
import shlex
import signal
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from functools import partial
from itertools import count
from pathlib import Path
from types import FrameType

from rich.console import Console
from rich.panel import Panel
from rich.table import Table

from megatron_cp.attention.transports.registry import RING
from megatron_cp.common.errors import EXIT_CONFIG, EXIT_INTERRUPTED, ConfigError, DataError
from megatron_cp.common.input_files import read_json
from megatron_cp.common.terminal import ArgumentParser, printable, say
from megatron_cp.config.flags import add_overrides
from megatron_cp.config.names import NAME
from megatron_cp.config.recipes import load_recipe
from megatron_cp.config.run_config import TokenizerConfig
from megatron_cp.data.text.corpus import PLAIN_TEMPLATE, dialogues_about, standard_library_sources
from megatron_cp.data.text.preprocess import preprocess
from megatron_cp.data.text.tokenizers import build_tokenizer
from megatron_cp.launch.process import drop_lost_output, end_with_parent, handled, program, signals_to_stop_at
from megatron_cp.report.runs import read_runs
from megatron_cp.report.summary import first_and_last_loss, validation_loss
from megatron_cp.rules import check_or_raise
from megatron_cp.rules.environment import Environment

RECIPE = "llama_tiny_pretrain_config"
TOKENIZER = TokenizerConfig("ByteLevelTokenizer")
RANKS = 4
TUNING = "llama_tiny_sft_config"  # reads the quick start's dialogues and first run
_MOST_DIALOGUES = 500

# With fewer GPUs than ranks: context parallelism over all of them.
_LAYOUTS = {
    1: (f"{NAME.model.context_parallel_size}=1", *RING.settings),
    2: (f"{NAME.model.context_parallel_size}=2", *RING.settings),
    RANKS: (),
}


class NumberedSteps:
    """Numbered steps on the console, with the time that each took."""

    def __init__(self, console: Console, total: int) -> None:
        self.console = console
        self.seconds: dict[str, float] = {}
        self._total = total

    @contextmanager
    def part(self, name: str, what: str) -> Iterator[list[str]]:
        """Print a numbered step; the body appends its results to the yielded list."""
        number = len(self.seconds) + 1
        self.console.print(f"[bold cyan]{number}/{self._total}[/] [bold]{name}[/]  [dim]{what}[/]")
        start = time.perf_counter()
        results: list[str] = []
        yield results
        self.seconds[name] = time.perf_counter() - start
        for result in results:
            self.console.print(f"    {result} [dim]({self.seconds[name]:.1f} s)[/]", highlight=False)


def prepare_data(folder: Path, parts: NumberedSteps, sources: Sequence[Path] | None = None) -> Path:
    """Build the .bin/.idx pair in ``folder`` unless it is current; return its prefix."""
    prefix, stamp = folder / "corpus", folder / "made_from.json"
    with parts.part("corpus", "the source of the Python standard library") as results:
        sources = standard_library_sources() if sources is None else sources
        made_from = _fingerprint(sources)
        size = sum(path.stat().st_size for path in sources)
        current = _read(stamp) == made_from and Path(f"{prefix}.idx").is_file()
        results.append(f"{len(sources)} files, {size / 1e6:.1f} MB")
    with parts.part("tokens", "bytes, in Megatron's .bin/.idx files") as results:
        if current:
            results.append(f"{_short(prefix)}.bin, .idx: up to date")
        else:
            stamp.unlink(missing_ok=True)
            made = preprocess(sources, prefix, TOKENIZER, progress="    tokenizing")
            _write_dialogues(folder, sources)
            stamp.write_text(json.dumps(made_from))
            results.append(f"{_short(prefix)}.bin, .idx: {made.tokens / 1e6:.1f} million tokens")
    return prefix


def _write_dialogues(folder: Path, sources: Sequence[Path]) -> None:
    """Write the dialogues and the chat template of ``TUNING``."""
    with (folder / "dialogues.jsonl").open("w", encoding="utf-8") as file:
        for messages in dialogues_about(sources, _MOST_DIALOGUES):
            file.write(json.dumps({"messages": messages}) + "\n")
    (folder / "chat_template.jinja").write_text(PLAIN_TEMPLATE, encoding="utf-8")


def _fingerprint(sources: Sequence[Path]) -> dict[str, object]:
    """Return values that change with the text and with the tokenizer."""
    digest = hashlib.sha256()
    for path in sources:
        content = path.read_bytes()
        digest.update(f"{path.name} {len(content)}\n".encode() + content)
    made = {"tokenizer": TOKENIZER.tokenizer_type, "dialogues": _MOST_DIALOGUES}
    return {"text": digest.hexdigest(), "files": len(sources), **made}


def _read(path: Path) -> object:
    try:
        return read_json(path)
    except (OSError, ValueError):
        return None


def new_run_folder(parent: Path) -> Path:
    """Make ``parent/run-001`` or the next free number, so no run resumes another.

    Of two quick starts at once each gets a folder of its own.
    """
    taken = [int(p.name[4:]) for p in parent.glob("run-*") if p.name[4:].isdigit()]
    for number in count(max(taken, default=0) + 1):
        folder = parent / f"run-{number:03}"
        with suppress(FileExistsError):
            folder.mkdir(parents=True)
            break
    return folder


def overrides_for(prefix: Path, save: Path, gpus: int) -> list[str]:
    """Return the quick start's overrides; the user's overrides come after them."""
    ranks = _ranks(gpus)
    return [
        f"{NAME.dataset.data_path}={prefix}",
        f"{NAME.dataset.split}='95,5,0'",
        f"{NAME.tokenizer.tokenizer_type}={TOKENIZER.tokenizer_type}",
        f"{NAME.checkpoint.save}={save}",
        f"{NAME.validation.eval_iters}=4",
        f"{NAME.logger.log_interval}={50 if sys.stderr.isatty() else 10}",  # a terminal also has a live line
        *_LAYOUTS[ranks],
    ]


def _ranks(gpus: int) -> int:
    return max(n for n in _LAYOUTS if n <= gpus) if gpus else RANKS


def _short(path: Path) -> Path:
    """Return a path relative to the current folder if it is inside."""
    path = path.absolute()
    return Path(printable(path.relative_to(Path.cwd()) if path.is_relative_to(Path.cwd()) else path))


def _train(overrides: Sequence[str], ranks: int) -> int:
    command = [sys.executable, "-m", "megatron_cp", "train", f"-n={ranks}", "--recipe", RECIPE, *overrides]
    process = subprocess.Popen(command, preexec_fn=partial(end_with_parent, signal.SIGTERM))

    def pass_on(number: int, frame: FrameType | None) -> None:
        drop_lost_output()
        if number != signal.SIGINT:  # the terminal sends Ctrl-C to all of its processes
            process.send_signal(number)

    with handled(signals_to_stop_at(), pass_on):  # the ranks save a checkpoint before they exit
        return process.wait()


def last_screen(
    console: Console, parts: NumberedSteps, save: Path, data: str, vocab_size: int, train_iters: int, ranks: int
) -> None:
    """Print loss, files and next commands; ``save`` is the run folder."""
    (run,) = read_runs([save])

    table = Table.grid(padding=(0, 2))
    table.add_column(style="bold")
    table.add_column(overflow="fold")
    table.add_row("loss", f"[green]{first_and_last_loss(run)}[/] first and last of {len(run.steps)} iterations")
    table.add_row("", f"(uniform guess over {vocab_size} tokens: {math.log(vocab_size):.2f})")
    if held_out := validation_loss(run):
        table.add_row("held out", f"{held_out} on files outside of the training data")
    table.add_row("time", ", ".join(f"{name} {seconds:.1f} s" for name, seconds in parts.seconds.items()))
    table.add_row("run folder", f"{_short(save)}")
    table.add_row("", "config.yaml, metrics.jsonl, tensorboard/ and the checkpoint")
    table.add_row("data", f"{_short(Path(data))}.bin, .idx")
    console.print()
    console.print(Panel(table, title="done", title_align="left", border_style="green"))

    launch = f"{program('megatron-cp')} train -n {ranks} --recipe"
    longer = 2 * train_iters  # lr_decay_iters too: the schedule in config.yaml ends with the run
    more = (
        f"{NAME.train.train_iters}={longer} {NAME.scheduler.lr_decay_iters}={longer} "
        f"{NAME.scheduler.override_opt_param_scheduler}=true"
    )
    console.print("[bold]What to try next[/]")
    for what, command in (
        (
            "See the curves",
            f"{program('tensorboard', 'tensorboard.main')} --logdir {shlex.quote(str(_short(save.parent)))}",
        ),
        ("Continue training from this checkpoint", f"{launch} {shlex.quote(str(_short(save / 'config.yaml')))} {more}"),
        ("Tune the model on dialogues", f"{launch} {TUNING} {_tuning_overrides(save)}"),
        ("Use another transport: a ring", f"{program('megatron-cp')} quickstart parallel=cp4_p2p"),
        ("Tokenize your own text", f"{program('megatron-cp')} preprocess --help"),
        ("List all recipes", f"{program('megatron-cp')} recipes"),
    ):
        console.print(f"  {what}:")
        console.print(f"    {command}", style="cyan", highlight=False, soft_wrap=True)


def _tuning_overrides(save: Path) -> str:
    """Return the overrides of ``TUNING`` for the data and the run of a quick start."""
    data = save.parent / "data"
    values = {
        NAME.checkpoint.pretrained_checkpoint: save,
        NAME.dataset.data_path: data / "dialogues.jsonl",
        NAME.dataset.chat_template: data / "chat_template.jinja",
    }
    return shlex.join(f"{name}={_short(path)}" for name, path in values.items())


def main(
    arguments: Sequence[str] | None = None,
    home: Path = Path("runs", "quickstart"),
    sources: Sequence[Path] | None = None,
) -> int:
    """Run the quick start; return the exit code.

    ``home`` is the folder for data and runs; ``sources`` replace the corpus.
    """
    parser = ArgumentParser(
        prog="megatron-cp quickstart",
        description=f"Train {RECIPE} on the source of the Python standard library, with {RANKS} CPU processes or up to "
        f"{RANKS} GPUs.",
    )
    add_overrides(parser, "settings of the recipe, in Hydra's grammar")
    user = list(parser.parse_args(arguments).overrides)

    console = Console(highlight=False)
    home = home.absolute()
    data, gpus = home / "data", Environment.detect().gpus_per_node or 0
    ranks = _ranks(gpus)
    default_save = home / "run-NNN"
    overrides = [*overrides_for(data / "corpus", default_save, gpus), *user]
    where = f"{ranks} GPUs" if gpus else f"{ranks} CPU processes"
    try:
        config = load_recipe(RECIPE, overrides)  # reports mistakes in the overrides before any work
        check_or_raise(config, ranks)
        model = config.model
        levels = f" {model.hierarchical_context_parallel_sizes}" if model.hierarchical_context_parallel_sizes else ""
        console.print(
            f"[bold]megatron-cp quick start[/]: {RECIPE} on {where}, "
            f"context parallel {model.context_parallel_size} ({model.cp_comm_type}{levels})",
            soft_wrap=True,
        )
        parts = NumberedSteps(console, total=3)
        prepare_data(data, parts, sources)
        if config.checkpoint.save == str(default_save):
            config.checkpoint.save = str(new_run_folder(home))
            overrides.append(f"{NAME.checkpoint.save}={config.checkpoint.save}")
        with parts.part("training", f"{config.train.iterations} iterations; Ctrl-C saves and stops"):
            console.print("    starting the processes", style="dim")
            code = _train(overrides, ranks)
    except (ConfigError, DataError, FileNotFoundError) as error:
        say(f"quickstart: {error}", file=sys.stderr)
        return EXIT_CONFIG
    except KeyboardInterrupt:
        say("quickstart: interrupted", file=sys.stderr)
        return EXIT_INTERRUPTED
    save = Path(config.checkpoint.save or "")
    if code == 0:
        vocab_size = build_tokenizer(config.tokenizer).vocab_size
        last_screen(console, parts, save, str(config.dataset.data_path), vocab_size, config.train.iterations, ranks)
    elif code > 128:
        say(f"quickstart: stopped; the run folder is {_short(save)}", file=sys.stderr)
    else:
        say("quickstart: training failed; see the messages above", file=sys.stderr)
    return code
