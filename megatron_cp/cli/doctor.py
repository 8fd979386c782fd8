"""``megatron-cp doctor``: show what is installed, used and missing.

Reads the records of the driver and the packages, so it answers in under a second and a broken library cannot crash it.
``--try`` also imports each library, in a separate process.
"""

from __future__ import annotations

import argparse
import importlib.util
import os
import re
import shutil
import subprocess
import sys
import sysconfig
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from megatron_cp.attention.modules.te_support import MINIMUM, parse_version
from megatron_cp.common.errors import EXIT_CONFIG, EXIT_FAILED, EXIT_OK, format_violations
from megatron_cp.common.installation import how_to_install, how_to_install_requirement
from megatron_cp.common.terminal import ArgumentParser, say
from megatron_cp.config.flags import add_recipe, add_world_size, compose, given, parse
from megatron_cp.config.names import NAME
from megatron_cp.models.fusions import kernels_in_use
from megatron_cp.rules import Environment, check, resolve_auto
from megatron_cp.rules.base import Context
from megatron_cp.rules.environment import installed_version
from megatron_cp.rules.nvml import Driver, read_driver
from megatron_cp.rules.resolve import ranks_to_check

MEGATRON_CORE = "0.19.2"
_SECONDS_TO_IMPORT = 300


@dataclass(frozen=True)
class Library:
    """An installed or missing library.

    note: its purpose or its problem. module: what ``--try`` imports, divided by commas. for_gpus: may fail to import
    without a driver, and is not used there.
    """

    name: str
    version: str | None
    note: str = ""
    module: str | None = None
    for_gpus: bool = False


@dataclass(frozen=True)
class Survey:
    """What the machine and the environment have.

    torch_cuda: CUDA version of the torch build, or None. to_compile: missing tools for compilation during training.
    """

    environment: Environment
    driver: Driver | None
    libraries: tuple[Library, ...]
    torch_cuda: str | None = None
    to_compile: tuple[str, ...] = ()

    def __getitem__(self, name: str) -> Library:
        return next(library for library in self.libraries if library.name == name)


@dataclass(frozen=True)
class Finding:
    """An action for the user; ``needed`` if this machine cannot train without it."""

    needed: bool
    text: str


def survey() -> Survey:
    """Survey this machine and this Python environment."""
    torch_cuda = _torch_cuda()
    nccl, cudnn = _of_cuda("nccl"), _of_cuda("cudnn")
    torch = installed_version("torch")
    te = installed_version("transformer-engine")
    te_torch = installed_version("transformer-engine-torch")
    libraries = (
        Library("megatron-core", installed_version("megatron-core"), module="megatron.core.parallel_state"),
        Library("torch", torch, f"for CUDA {torch_cuda}" if torch_cuda else "without CUDA" if torch else "", "torch"),
        Library("NCCL", nccl, "" if nccl else "no separate package; torch's build may include it"),
        Library("cuDNN", cudnn, "" if cudnn else "no separate package; torch's build may include it"),
        Library("gloo", f"torch {torch}'s" if torch else None),
        Library(
            "transformer-engine",
            te,
            "the package transformer-engine-torch is missing" if te and not te_torch else "",
            "megatron.core, transformer_engine.pytorch",  # with our check that both use one cuDNN
            for_gpus=True,
        ),
        _optional("flash-attn", "for Transformer Engine"),
        _apex(),
        _optional("mamba-ssm", "fused Mamba layers on GPUs"),
        _optional("causal-conv1d", "fused Mamba layers on GPUs"),
    )
    return Survey(Environment.detect(), read_driver(), libraries, torch_cuda, tuple(_missing_to_compile()))


def _of_cuda(name: str) -> str | None:
    """Return the version of NVIDIA's package ``name``, for CUDA 13 or 12."""
    return next((v for n in ("13", "12") if (v := installed_version(f"nvidia-{name}-cu{n}"))), None)


def _missing_to_compile() -> Iterator[str]:
    """Name missing compilation tools: Triton compiles kernel launchers in C."""
    if not (os.environ.get("CC") or shutil.which("gcc") or shutil.which("clang")):
        yield "a C compiler (gcc)"
    scheme = sysconfig.get_default_scheme().replace("posix_local", "posix_prefix")
    if not Path(sysconfig.get_path("include", scheme), "Python.h").is_file():
        yield "Python's headers (python3-dev)"


def _optional(name: str, use: str) -> Library:
    return Library(name, installed_version(name), f"{use}, optional", name.replace("-", "_"), for_gpus=True)


def _torch_cuda() -> str | None:
    """Read the CUDA version of the torch build, without importing torch."""
    spec = importlib.util.find_spec("torch")
    if spec is None or spec.origin is None:
        return None
    try:
        text = (Path(spec.origin).parent / "version.py").read_text(encoding="utf-8")
    except OSError:
        return None
    found = re.search(r"^cuda\b[^=]*= *'([^']+)'", text, flags=re.MULTILINE)
    return found.group(1) if found else None


def _apex() -> Library:
    """Tell NVIDIA's apex from another project of the same name."""
    spec = importlib.util.find_spec("apex")
    if spec is None:
        return Library("apex", None, "NVIDIA's, from source; fused optimizer without Transformer Engine, optional")
    version = installed_version("apex") or "of unknown version"
    places = [Path(place) for place in spec.submodule_search_locations or []]
    if any((place / "multi_tensor_apply").is_dir() for place in places):
        return Library("apex", version, "NVIDIA's", "amp_C", for_gpus=True)
    return Library("apex", version, "NOT NVIDIA's: another project of the same name")


def findings(found: Survey, *, of_recipe: bool = False) -> Iterator[Finding]:
    """List missing or incompatible software; rule K57 covers a recipe's needs."""
    core, gpus = found["megatron-core"].version, found.environment.device == "gpu"
    pinned = f"megatron-core=={MEGATRON_CORE}"
    if core is None:
        yield Finding(True, f"install {pinned}: {how_to_install_requirement(pinned)}")
    elif parse_version(core) != parse_version(MEGATRON_CORE):
        yield Finding(True, f"install {pinned} instead of {core}: only {MEGATRON_CORE} is supported")
    if found["torch"].version is None:
        yield Finding(True, f"install torch: {how_to_install_requirement('torch')}")
    elif gpus and found.torch_cuda is None:
        yield Finding(True, f"install torch with CUDA instead of {found['torch'].version}, which cannot use the GPUs")
    elif gpus and found.driver is not None and found.torch_cuda is not None:
        runs, built = found.driver.cuda, parse_version(found.torch_cuda)
        if built[0] > runs[0]:  # within a major version newer CUDA libraries run on older drivers
            text = (
                f"update the driver: {found.driver.version} supports CUDA up to {runs[0]}.{runs[1]}, but torch "
                f"{found['torch'].version} is built for CUDA {found.torch_cuda}"
            )
            yield Finding(True, text)
    if gpus and found.to_compile:
        missing = " and ".join(found.to_compile)
        yield Finding(True, f"install {missing}: the first step on a machine compiles fused functions")
    if found.driver is not None and found.driver.gpus and not gpus:
        visible = os.environ.get("CUDA_VISIBLE_DEVICES")
        yield Finding(False, f"CUDA_VISIBLE_DEVICES={visible} hides this machine's GPUs; unset it to use them")
    te, extra = found["transformer-engine"], how_to_install("gpu")
    if te.version is not None and te.note:
        yield Finding(gpus, f"reinstall Transformer Engine ({te.note}): {extra}")
    elif gpus and te.version is None and not of_recipe:
        yield Finding(False, f"install Transformer Engine for the fastest attention and layers: {extra}")
    elif gpus and te.version is not None and parse_version(te.version) < parse_version(MINIMUM):
        yield Finding(False, f"update Transformer Engine from {te.version} to at least {MINIMUM}: {extra}")
    if found["apex"].note.startswith("NOT"):
        yield Finding(False, "uninstall apex: this is another project of the same name")


def attention_of(c: Context) -> tuple[str, list[str]]:
    """Return the attention that a finalized configuration uses here, and the reasons."""
    model, version = c.config.model, c.environment.transformer_engine
    wanted = model.attention_backend
    if wanted == "native":
        why = [f"{NAME.model.attention_backend}=native selects it"]
    elif model.transformer_impl == "local":
        why = [f"{NAME.model.transformer_impl}=local disables Transformer Engine"]
    elif c.environment.device != "gpu":
        why = ["no GPU, which Transformer Engine's attention needs"]
    elif version is None:
        why = ["Transformer Engine is not installed"]
    elif c.gaps:  # selected explicitly, it breaks a rule
        why = [f"{NAME.model.attention_backend}=te selects it"] if c.backend == "te" else []
        why += [f"Transformer Engine {version}, {gap.field}: {gap.message}" for gap in c.gaps]
    else:
        why = [f"Transformer Engine {version} supports this recipe"]
    return "Transformer Engine's" if c.backend == "te" else "our own", why


def _try(libraries: Sequence[Library]) -> dict[str, str]:
    """Import each installed library in its own process; return errors by name."""
    errors = {}
    for library in libraries:
        if library.version is None or library.module is None:
            continue
        code = f"import megatron_cp, torch, {library.module}"  # ours first: megatron-core needs it without CUDA
        try:
            done = subprocess.run(
                [sys.executable, "-c", code],
                capture_output=True,
                text=True,
                timeout=_SECONDS_TO_IMPORT,
                check=False,
            )
        except subprocess.TimeoutExpired:
            errors[library.name] = f"not imported after {_SECONDS_TO_IMPORT} s"
            continue
        if done.returncode:
            errors[library.name] = _last_error(done.stderr) or f"exit code {done.returncode}"
    return errors


def _last_error(text: str) -> str:
    """Return a traceback's exception on one line.

    It begins at the last line without an indent.
    """
    lines = text.strip().splitlines()
    start = max((number for number, line in enumerate(lines) if not line.startswith(" ")), default=0)
    return "; ".join(line.strip() for line in lines[start:])


def _machine_lines(found: Survey) -> Iterator[str]:
    driver, environment = found.driver, found.environment
    for gpu, number in Counter(driver.gpus).items() if driver else ():
        yield _line(
            "GPU", f"{number} x {gpu.name}, compute capability {gpu.compute_capability}, {gpu.memory / 2**30:.0f} GiB"
        )
    if not (driver and driver.gpus):
        yield _line("GPU", "none")
    text = f"{driver.version}, supports CUDA {driver.cuda[0]}.{driver.cuda[1]} and older" if driver else "none"
    yield _line("NVIDIA driver", text)
    yield _line("Python", ".".join(map(str, sys.version_info[:3])))
    for name, value in environment.variables.items():
        yield _line(name, value)


def _line(name: str, text: str) -> str:
    return f"  {name:18} {text}"


def _parser() -> argparse.ArgumentParser:
    parser = ArgumentParser(
        "megatron-cp doctor",
        description="Show installed libraries, the attention that a recipe uses and why, and what to install. "
        "Exit codes: 0 if this machine can train (the recipe, if given), 1 if something needed is missing or "
        "broken, 2 if the recipe is invalid or breaks a rule here.",
        allow_abbrev=False,
    )
    add_recipe(parser, "also show the attention that this recipe uses")
    add_world_size(parser, "ranks of the recipe")
    parser.add_argument("--try", dest="trial", action="store_true", help="also import every library (slow)")
    return parser


def main(argv: Sequence[str]) -> int:
    """Print the report; ``--help`` has the exit codes.

    Raises:
        ConfigError: the recipe cannot be composed, or a launcher's variable is not a number.
    """
    parser = _parser()
    args = parse(parser, argv)
    if not args.recipe and (args.overrides or given(args) or args.config or args.world_size is not None):
        parser.error("settings, --config and --world-size need --recipe NAME")
    config = compose(parser, args) if args.recipe else None
    found = survey()
    left_out = {x.name for x in found.libraries if x.for_gpus and x.version and not found.driver}
    broken = _try([x for x in found.libraries if x.name not in left_out]) if args.trial else {}
    to_do = list(findings(found, of_recipe=config is not None))
    for name, error in broken.items():
        to_do.append(Finding(name in ("megatron-core", "torch"), f"{name} cannot be imported: {error}"))

    say("machine", *_machine_lines(found), sep="\n")
    say("libraries")
    for library in found.libraries:
        state = "missing" if library.version is None else library.version
        fails = " (cannot be imported)" if library.name in broken else ""
        if args.trial and library.name in left_out:
            fails = " (not tried: no driver)"
        say(_line(library.name, f"{state}{fails}{'; ' + library.note if library.note else ''}"))
    violations = []
    if config is not None:
        world_size = ranks_to_check(config, args.world_size)
        config, choice = resolve_auto(config, world_size, None, found.environment)
        context = Context(config, world_size, None, found.environment)
        attention, why = attention_of(context)
        backend = config.dist.distributed_backend or ("nccl" if found.environment.device == "gpu" else "gloo")
        say(f"{config.recipe} on {world_size} ranks")
        if context.te_layers and attention == "our own":
            attention += ", with Transformer Engine's kernels"
        say(_line("attention", f"{attention}: {why[0]}"), *(_line("", reason) for reason in why[1:]), sep="\n")
        say(_line("layers", "Transformer Engine's" if context.te_layers else "megatron-core's own"))
        fused = kernels_in_use(config.model, context.te_layers)
        say(_line("fused kernels", ", ".join(fused) or "none of Transformer Engine's"))
        say(_line("communication", backend), *([_line("", choice)] if choice else []), sep="\n")
        violations = check(config, world_size, None, found.environment)
        to_do += [Finding(False, f"{v.message}; {v.fix}") for v in violations if v.rule == "K57"]
        violations = [v for v in violations if v.rule != "K57"]
    say("to do" if to_do else "nothing to do")
    for finding in sorted(to_do, key=lambda finding: not finding.needed):
        say(f"  {'needed: ' if finding.needed else ''}{finding.text}")
    sys.stdout.flush()
    if violations:
        say(format_violations(violations), file=sys.stderr)
    if any(finding.needed for finding in to_do):
        return EXIT_FAILED
    return EXIT_CONFIG if any(violation.severity == "error" for violation in violations) else EXIT_OK
