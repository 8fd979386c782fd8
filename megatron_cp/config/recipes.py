"""Compose a recipe: Hydra YAML and overrides in, a :class:`RunConfig` out.

A recipe is one YAML file. A Hydra defaults list in it picks files from the config groups in ``configs/`` and may name
another recipe as the base. Later values win, in this order: defaults of the dataclasses, recipe, ``--config`` files,
command-line flags, ``key=value`` overrides. Unknown keys and wrong types are errors that name the nearest valid key.
"""

from __future__ import annotations

import copy
import io
import logging
import os
import re
import sys
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

from megatron_cp.common.errors import ConfigError, Violation
from megatron_cp.common.installation import clone
from megatron_cp.common.interpolation import (
    MOST_CHAINED,
    FromEnvironment,
    as_written,
    chained,
    record_reads,
    resolved,
)
from megatron_cp.common.terminal import in_a_line
from megatron_cp.common.yaml_files import TooLargeError, bounded_hydra, bounded_text
from megatron_cp.config import bridge_names
from megatron_cp.config.names import NAME
from megatron_cp.config.recipe_names import not_a_recipe
from megatron_cp.config.run_config import RunConfig
from megatron_cp.config.schema import (
    alternatives,
    build,
    field_paths,
    hints,
    kind_of,
    nearest,
    nearest_first,
    section_names,
)
from megatron_cp.launch import launcher

logger = logging.getLogger(__name__)

# Bridge's names for mixed_precision, with dashes replaced by underscores.
_PRECISIONS = {
    "fp32": "fp32",
    "32": "fp32",
    "bf16": "bf16",
    "bf16_mixed": "bf16",
    "fp16": "fp16",
    "fp16_mixed": "fp16",
    "16_mixed": "fp16",
}


def _library(kind: str) -> Path:
    """Return the folder of the package's recipes or config groups."""
    if (root := clone()) is not None:
        return root / kind
    target = Path(__file__).resolve().parents[2]  # pip install --target
    shared = [root / "share" / "megatron_cp" / kind for root in (target, Path(sys.prefix))]
    return next(filter(Path.is_dir, shared), shared[-1])


def _groups() -> list[str]:
    """Return the names of the config groups."""
    return sorted(path.name for path in _library("configs").iterdir() if path.is_dir())


def list_recipes() -> dict[str, str]:
    """Return name -> description (first comment line) of the package's recipes."""
    found = {}
    for path in sorted(_library("recipes").glob("*.yaml")):
        with path.open(encoding="utf-8") as file:
            first = file.readline()
        found[path.stem] = first.lstrip("# ").strip() if first.startswith("#") else ""
    return found


def list_models() -> list[str]:
    """List the names of the published models that come with the package."""
    return sorted(path.stem for path in _library("configs/model").glob("*.yaml"))


def load_recipe(
    name_or_path: str | Path,
    overrides: Sequence[str] | str = (),
    *,
    files: Sequence[str | Path] = (),
    flags: Mapping[str, Any] | None = None,
) -> RunConfig:
    """Compose a recipe into a finalized configuration.

    Checks names and types; :mod:`megatron_cp.rules` checks the rules.

    Args:
        name_or_path: a recipe of the package, or a YAML file.
        overrides: Hydra overrides such as ``model.context_parallel_size=4``, or a single one. ``group=choice`` picks
            another file of a config group of the recipe.
        files: YAML files merged over the recipe, in order.
        flags: dotted names and values, merged over the files.

    Raises:
        ConfigError: all problems found.
    """
    choices, values = _split_overrides([overrides] if isinstance(overrides, str) else overrides)
    with record_reads() as variables:
        recipe, name = _compose(name_or_path, choices)
        layers = [recipe, *(_load_yaml(Path(file)) for file in files), _nest((flags or {}).items()), _nest(values)]
        plain = _resolve([_normalize(layer) for layer in layers], name, variables)
    if variables and launcher.is_first_rank():
        read = ", ".join(in_a_line(variable) for variable in dict.fromkeys(variables))
        logger.warning("recipe %s reads environment variables: %s", in_a_line(name), read)
    return from_settings(plain, bridge_names.settle(plain))


def from_settings(settings: dict[str, Any], problems: list[Violation] | None = None) -> RunConfig:
    """Return the finalized configuration of plain settings, nested by section.

    Raises:
        ConfigError: the given ``problems``, unknown settings and wrong types.
    """
    problems = problems or []
    config: RunConfig = build(RunConfig, settings, problems)
    if problems:
        raise ConfigError(problems)
    return config.finalize()


def _resolve(layers: list[dict[str, Any]], name: str, variables: list[str]) -> dict[str, Any]:
    """Merge layers over the defaults and resolve interpolations.

    ``variables``: see :func:`record_reads`.
    """
    from omegaconf import OmegaConf
    from omegaconf.errors import OmegaConfBaseException

    last: dict[str, Any] = {}  # dotted name -> value of the last layer that sets it
    for layer in layers:
        last |= _flat(layer)
    problems = [
        Violation("K2", "error", path, "??? is a placeholder, and a value is required", f"{path}=VALUE")
        for path, value in last.items()
        if value == "???"
    ]
    if problems:
        raise ConfigError(problems)
    if (number := chained(last)) > MOST_CHAINED:
        message = f"{number} interpolations refer to interpolated values, more than {MOST_CHAINED}"
        raise _problem("K3", "--recipe", message, "write the values instead of ${section.setting}")
    try:
        merged = OmegaConf.merge(asdict(RunConfig(recipe=name)), *layers)
        plain: dict[str, Any] = resolved(merged, variables, by_value=("model",))
    except OmegaConfBaseException as error:
        raise _unresolved(error) from error
    except ValueError as error:
        message = "an environment variable is one value, not a list or a mapping"
        raise _problem("K3", str(error), message, f"{error}=[${{oc.env:FIRST}},${{oc.env:SECOND}}]") from error
    if isinstance(plain["recipe"], FromEnvironment):
        message = "the recipe's name cannot come from an environment variable"
        raise _problem("K3", "recipe", message, f"{NAME.checkpoint.save}=${{oc.env:NAME}} (sets the run folder)")
    return plain


def parse_overrides(overrides: Sequence[str]) -> dict[str, Any]:
    """Return overrides of settings (not config groups) as nested plain values.

    Raises:
        ConfigError: overrides that cannot be parsed.
    """
    return _nest(_split_overrides(overrides)[1])


def to_yaml(config: RunConfig) -> str:
    """Return the whole configuration as YAML: a recipe without a defaults list."""
    import yaml

    return yaml.safe_dump(settings_of(config), sort_keys=False, width=120)


_DERIVED = ["expert_tensor_parallel_size", "max_seqlen_per_dp_cp_rank"]


def settings_of(config: RunConfig) -> dict[str, Any]:
    """Return the whole configuration as plain values for a new recipe.

    Interpolations of environment variables are kept. Values derived from the save folder, the layout or the sequence
    length are written as null, since the new recipe may change those.
    """
    settings = asdict(config)
    if config.checkpoint.load == config.checkpoint.save:
        settings["checkpoint"]["load"] = None
    # Learned positions are weights; YaRN's length is part of the scaling.
    is_free = config.model.position_embedding_type in ("rope", "none")
    for name in _DERIVED + ["max_position_embeddings"] * is_free:
        without = copy.deepcopy(config)
        setattr(without.model, name, None)
        if getattr(without.finalize().model, name) == getattr(config.model, name):
            settings["model"][name] = None
    return as_written(settings)


def _problem(rule: str, field: str, message: str, fix: str = "") -> ConfigError:
    return ConfigError([Violation(rule, "error", field, message, fix)])


def _one_line(error: Exception) -> str:
    return " ".join(str(error).split())


def _unresolved(error: Any) -> ConfigError:
    """Convert OmegaConf's interpolation error, without its notes on types."""
    why = str(error).partition("\n")[0]
    if "GrammarParseError" in why and "oc.decode" in str(error):  # the text contains parts of the variable's value
        why = "an environment variable's value is not a number, a boolean or a list of these"
    fix = "write ${section.setting} for a setting's value, ${oc.env:NAME} for an environment variable's"
    if variable := re.search(r"Environment variable '(.*)' not found", why):
        name = variable.group(1)
        why = f"the environment variable {name} is not set"
        fix = f"export {name}=VALUE, or give a default: ${{oc.env:{name},VALUE}}"
    elif setting := re.search(r"Interpolation key '(.*)' not found", why):
        why = f"there is no setting {setting.group(1)}{nearest(setting.group(1), list(field_paths(RunConfig)))}"
    return _problem("K3", error.full_key or "", f"cannot resolve the configuration: {why}", fix)


def _split_overrides(overrides: Sequence[str]) -> tuple[list[str], list[tuple[str, Any]]]:
    """Parse overrides into choices of config groups and settings with values."""
    if not overrides:
        return [], []
    from hydra.core.override_parser.overrides_parser import OverridesParser
    from hydra.errors import HydraException

    groups = _groups()
    choices, values, problems = [], [], []
    for text in overrides:
        if "=" not in text and not text.startswith("~"):
            message = f"'{text}' is not an override: expected key=value"
            problems.append(Violation("K3", "error", text, message))
            continue
        try:
            parsed = OverridesParser.create().parse_override(text)
        except (HydraException, ValueError, RecursionError) as error:  # also a number of thousands of digits
            fix = f"quote values with special characters: {text.partition('=')[0]}='...'"
            problems.append(Violation("K3", "error", text, f"cannot parse: {_one_line(error)}", fix))
            continue
        key, value = parsed.key_or_group, None
        is_section = key in section_names(RunConfig)
        fix = f"set the value you want: {key}{'.name' if is_section else ''}=value"
        if parsed.is_delete():
            problems.append(Violation("K3", "error", text, "settings cannot be deleted", fix))
        elif parsed.is_sweep_override():
            fix = _sweep_fix(key, text.partition("=")[2])
            problems.append(Violation("K3", "error", text, "several values for one setting", fix))
        elif (value := parsed.value()) is None and key != "mixed_precision" and (is_section or key in groups):
            problems.append(Violation("K2", "error", text, "a whole section cannot be null", fix))
        elif key in groups and isinstance(value, str):
            choices.append(f"{key}={value}")
        elif key in groups and (isinstance(value, list) or not is_section):
            files = sorted(path.stem for path in _library(f"configs/{key}").glob("*.yaml"))
            message = f"'{key}' is a config group: expected one file name"
            problems.append(Violation("K2", "error", text, message, f"{key} is one of {', '.join(files)}"))
        elif isinstance(value, str) and key not in hints(RunConfig) and "." not in key and nearest(key, groups):
            problems.append(Violation("K1", "error", key, f"unknown key '{key}'{nearest(key, groups)}"))
        else:
            values.append((key, value))
    if problems:
        raise ConfigError(problems)
    return choices, values


def _sweep_fix(key: str, values: str) -> str:
    """Return the fix for ``key=1,2`` or ``key=choice(1,2)``: sweeps in Hydra."""
    takes = alternatives(kind_of(RunConfig, key.replace("model.transformer.", "model.")))
    fixes = [f"for a list write {key}=[{values}]"] * (list in takes)
    fixes += [f"for a text write {key}=\"'{values}'\""] * (str in takes and "'" not in values)
    if not fixes or re.match(r"\s*\w+\(", values):
        return f"there are no sweeps: start one run for each value, with {key}=VALUE"
    return ", ".join(fixes)


def _compose(name_or_path: str | Path, choices: list[str]) -> tuple[dict[str, Any], str]:
    """Return the recipe as Hydra composes it, and its name."""
    text = str(name_or_path)
    is_file = text.endswith((".yaml", ".yml")) or "/" in text
    path = Path(text) if is_file else _library("recipes") / f"{text}.yaml"
    if not os.path.isfile(path):  # Path.is_file raises for long names and closed folders
        raise _problem("K4", "--recipe", *not_a_recipe(text, list(list_recipes())))
    if path.suffix != ".yaml":
        fix = f"rename it to {path.with_suffix('.yaml').name}"
        raise _problem("K4", "--recipe", f"{text}: the file name must end in .yaml", fix)

    from hydra import compose, initialize_config_dir
    from hydra.errors import HydraException, MissingConfigException
    from omegaconf import OmegaConf
    from omegaconf.errors import OmegaConfBaseException
    from yaml import YAMLError

    search = f"hydra.searchpath=[{','.join(f"'file://{_library(kind)}'" for kind in ('configs', 'recipes'))}]"
    try:
        with bounded_hydra(), initialize_config_dir(str(path.parent.resolve()), version_base="1.3"):
            used = _groups_of(path.name, search) if choices else set()
            # Hydra replaces the group's file; if the recipe has none, '+' merges the file over the recipe.
            known = [choice if choice.partition("=")[0] in used else f"+{choice}" for choice in choices]
            composed = compose(path.name, overrides=[search, *known])
        plain: Any = OmegaConf.to_container(composed, resolve=False)
    except MissingConfigException as error:
        raise _missing(error, path, choices) from error
    except TooLargeError as error:
        raise _problem("K4", "--recipe", f"cannot compose {path}: {error.what}", error.fix) from error
    # Hydra raises these for a wrong defaults list.
    except (HydraException, OmegaConfBaseException, YAMLError, OSError, ValueError, TypeError, AssertionError) as error:
        is_key = isinstance(error, AssertionError)
        why = "a key in the defaults list is not text" if is_key else _one_line(error)
        fix = "write 'defaults: [RECIPE, GROUP: FILE, _self_]'" if "default" in why else ""
        raise _problem("K4", "--recipe", f"cannot compose {path}: {why}", fix) from error
    return plain, path.stem


def _groups_of(recipe: str, search: str) -> set[str]:
    """Return the config groups of a recipe and its bases. Needs an initialized Hydra."""
    from hydra.core.global_hydra import GlobalHydra
    from hydra.types import RunMode

    picked = GlobalHydra.instance().config_loader().compute_defaults_list(recipe, [search], RunMode.RUN).defaults
    return {config.config_path.rpartition("/")[0] for config in picked if config.config_path}


def _missing(error: Any, recipe: Path, choices: list[str]) -> ConfigError:
    """Convert Hydra's error on a missing file, without its search path."""
    group, _, name = str(error.missing_cfg_file).rpartition("/")
    options = nearest_first(name, error.options or [])
    choice = f"{group}={name}"
    if options:
        message = f"there is no file {group}/{name}.yaml{nearest(name, options)}"
        fix = f"{group} is one of {', '.join(options)}"
    elif group:
        message = f"there is no config group {group}{nearest(group, _groups())}"
        fix = f"the groups are {', '.join(_groups())}"
    else:
        message = f"there is no recipe {name}{nearest(name, list(list_recipes()))}"
        fix = "megatron-cp recipes (lists all names); your own file must be in the folder of the recipe that names it"
    if choice in choices:
        return _problem("K4", choice, message, fix)
    return _problem("K4", "--recipe", f"cannot compose {recipe}: {message}", fix)


def _load_yaml(path: Path) -> dict[str, Any]:
    from omegaconf import OmegaConf
    from omegaconf.errors import OmegaConfBaseException
    from yaml import YAMLError

    try:
        loaded: Any = OmegaConf.to_container(OmegaConf.load(io.StringIO(bounded_text(path))), resolve=False)
    except FileNotFoundError as error:
        fix = f"check the path{'' if path.is_absolute() else f', which is relative to {Path.cwd()}'}"
        raise _problem("K4", "--config", f"file not found: {path}", fix) from error
    except TooLargeError as error:
        raise _problem("K4", "--config", f"cannot read {path}: it {error.what}", error.fix) from error
    except (YAMLError, OmegaConfBaseException, OSError, ValueError) as error:
        raise _problem("K4", "--config", f"cannot read {path}: {_one_line(error)}") from error
    if not isinstance(loaded, dict):
        raise _problem("K4", "--config", f"{path} does not hold a mapping of sections")
    return loaded


def _nest(items: Iterable[tuple[str, Any]]) -> dict[str, Any]:
    """Nest values by dotted names; later values win."""
    nested: dict[str, Any] = {}
    for key, value in items:
        if key == "mixed_precision" and not isinstance(value, dict):
            # Keep other settings of the section.
            nested[key] = {**nested.get(key, {}), **_precision(value)}
            continue
        *parents, leaf = key.replace("model.transformer.", "model.").split(".")
        section = nested
        for parent in parents:
            if not isinstance(section.get(parent), dict):
                section[parent] = {}
            section = section[parent]
        section[leaf] = value
    return nested


def _flat(layer: dict[str, Any]) -> dict[str, Any]:
    """Return dotted name -> value of a layer."""
    flat, sections = {}, [("", layer)]
    while sections:
        prefix, section = sections.pop()
        for key, value in section.items():
            if isinstance(value, dict):
                sections.append((f"{prefix}{key}.", value))
            else:
                flat[f"{prefix}{key}"] = value
    return flat


def _normalize(layer: dict[str, Any]) -> dict[str, Any]:
    """Normalize a layer: Bridge's nested model, precision names, sequence length."""
    layer = {key: dict(value) if isinstance(value, dict) else value for key, value in layer.items()}
    if "mixed_precision" in layer and not isinstance(layer["mixed_precision"], dict):
        layer["mixed_precision"] = _precision(layer["mixed_precision"])
    for key in [k for k in layer if k in section_names(RunConfig) and not isinstance(layer[k], dict)]:
        if layer.pop(key) is not None:  # an empty section is valid
            raise _problem("K2", key, "expected a mapping of settings")
    model, dataset = layer.get("model", {}), layer.get("dataset", {})
    if isinstance(model.get("transformer"), dict):
        for key, value in model.pop("transformer").items():
            if model.setdefault(key, value) != value:
                message = f"set to {model[key]!r}, and by model.transformer.{key} to {value!r}"
                raise _problem("K2", f"model.{key}", message, f"remove model.transformer.{key} or model.{key}")
    # The model and the data share one sequence length: a layer that sets one of them sets both.
    model_length, data_length = model.get("seq_length"), dataset.get("seq_length")
    if model_length is None and isinstance(data_length, int):
        layer["model"] = {**model, "seq_length": None}
    elif data_length is None and isinstance(model_length, int):
        layer["dataset"] = {**dataset, "seq_length": model_length}
    return layer


def _precision(name: Any) -> dict[str, bool]:
    chosen = _PRECISIONS.get(str(name).replace("-", "_")) if name is not None else None
    if name is not None and chosen is None:
        suggestion = nearest(str(name), list(_PRECISIONS))
        fix = "mixed_precision=bf16_mixed, or fp16_mixed, fp32, or null (chosen by the device)"
        raise _problem("K2", "mixed_precision", f"unknown mixed precision '{name}'{suggestion}", fix)
    return {kind: kind == chosen for kind in ("fp32", "bf16", "fp16")}
