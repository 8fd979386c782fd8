"""Choose the checkpoint to start from, and check that it fits the configuration.

Every rank reads for itself, so a checkpoint that does not fit is reported before any process group exists.
"""

from __future__ import annotations

from dataclasses import asdict, dataclass, is_dataclass, replace
from pathlib import Path
from typing import Any

from megatron_cp.common.errors import ConfigError
from megatron_cp.config.names import NAME
from megatron_cp.config.overrides import override
from megatron_cp.config.run_config import ModelConfig, RunConfig, settings_affecting
from megatron_cp.config.setting import FUNCTION, OPTIMIZER, SCHEDULE, WEIGHTS
from megatron_cp.models.hybrid_pattern import layers_of, without_stages
from megatron_cp.models.vocabulary import padded
from megatron_cp.rules.remedies import ALTERNATIVES, Fix
from megatron_cp.training.checkpoint.content import FORMAT, read_common
from megatron_cp.training.checkpoint.differences import checkpoint_fix, describe, differences, new_run_fix, overrides
from megatron_cp.training.checkpoint.files import (
    checkpoint_folder,
    existing_folder,
    latest_iteration,
    saved_iterations,
    suggest_folder,
)
from megatron_cp.training.optimizer import schedule_of

# Schedule fields that megatron-core's state lacks: the decay of a WSD schedule.
FORGOTTEN = ("wsd_decay_steps", "lr_wsd_decay_style")


@dataclass(frozen=True)
class ResumePoint:
    """The checkpoint that a run starts from.

    finetune: weights only. consumed_samples: data position; 0 if unused.
    """

    root: str
    iteration: int
    finetune: bool
    consumed_samples: int = 0


def find_resume_point(config: RunConfig) -> ResumePoint | None:
    """Return the checkpoint to start from, ``None`` to start fresh.

    With ``checkpoint.pretrained_checkpoint``, or a ``checkpoint.load`` other than ``checkpoint.save``, a run starts
    from there, and resumes from its own checkpoints once it has saved any. The same configuration started again always
    resumes.

    Raises:
        ConfigError: a requested checkpoint is missing or does not fit.
    """
    begun = _newest_own(config)
    if begun is not None:
        return begun
    wanted = config.checkpoint
    root, finetune = wanted.load or "", wanted.finetune
    advice = f"{NAME.checkpoint.load}=null {NAME.checkpoint.exit_on_missing_checkpoint}=false (starts fresh)"
    if wanted.pretrained_checkpoint:
        finetune = not root or latest_iteration(root) is None
        root = wanted.pretrained_checkpoint if finetune else root
        advice = f"{NAME.checkpoint.pretrained_checkpoint}=null (starts fresh)"
    elif finetune:
        advice = f"{NAME.checkpoint.pretrained_checkpoint}=PATH, or {NAME.checkpoint.finetune}=false (starts fresh)"
    elif wanted.save and Path(root).absolute() != Path(wanted.save).absolute():
        root = root if latest_iteration(wanted.save) is None else wanted.save
    measured = config.train.skip_train
    if measured:
        advice = f"{NAME.checkpoint.load}=PATH ({NAME.train.skip_train}=true evaluates a checkpoint)"
    # ckpt_step selects a checkpoint of the other folder, if there is one.
    has_begun = not finetune and (bool(wanted.pretrained_checkpoint) or root != wanted.load)
    step = None if has_begun else wanted.ckpt_step
    iteration = latest_iteration(root) if step is None and root else step
    option = NAME.checkpoint.pretrained_checkpoint if root == wanted.pretrained_checkpoint else NAME.checkpoint.load

    def suggest() -> str:
        return suggest_folder(root, lambda run, step: checkpoint_fix(option, run, step)) if root else ""

    if iteration is None:
        if finetune or measured or wanted.exit_on_missing_checkpoint or wanted.load != wanted.save:
            raise ConfigError(f"{option}={root}: there is no checkpoint (no iter_* folder). Fix: {suggest() or advice}")
        return None
    folder = existing_folder(root, iteration)
    if folder is None:
        others = saved_iterations(root)
        fix = suggest() or (f"{NAME.checkpoint.ckpt_step}={others[-1]}" if others else advice)
        raise ConfigError(f"{option}={root}: there is no {checkpoint_folder(root, iteration).name}. Fix: {fix}")
    return _checked(ResumePoint(root, iteration, finetune), folder, config, weights_only=finetune or measured)


def resume_fix(config: RunConfig, root: str, iteration: int) -> str:
    """Return the settings to type to start this run from another checkpoint."""
    away: dict[str, Any] = {"load": root, "pretrained_checkpoint": None, "finetune": False}
    for names in ([], ["load"], ["load", "pretrained_checkpoint"], list(away)):
        changed = {name: away[name] for name in names} | {"ckpt_step": iteration}
        try:
            start = find_resume_point(replace(config, checkpoint=replace(config.checkpoint, **changed)))
        except ConfigError:
            continue
        if start is not None and Path(start.root) == Path(root) and start.iteration == iteration:
            break
    return str(Fix(tuple(override(f"checkpoint.{name}", value) for name, value in changed.items())))


def _checked(start: ResumePoint, folder: Path, config: RunConfig, weights_only: bool) -> ResumePoint:
    """Check a checkpoint (ConfigError if it does not fit) and add the data position.

    :func:`load_checkpoint` reports a damaged checkpoint, on all ranks.
    """
    try:
        common = read_common(folder, config.checkpoint.verify_checksums)
        check_fits(config, common, folder, weights_only)
    except ConfigError:
        raise
    except Exception:  # damaged files can raise any error
        return start
    return start if start.finetune else replace(start, consumed_samples=common["progress"]["consumed_samples"])


def _newest_own(config: RunConfig) -> ResumePoint | None:
    """Return the newest checkpoint that this configuration wrote, or None.

    A damaged checkpoint counts as own, unless the user asked to start anew or from another one.
    """
    root = config.checkpoint.save
    iteration = latest_iteration(root) if root else None
    folder = existing_folder(root, iteration) if root and iteration is not None else None
    if root is None or iteration is None or folder is None:
        return None
    try:
        common = read_common(folder, config.checkpoint.verify_checksums)
    except Exception:  # damaged files can raise any error
        wanted = config.checkpoint
        other = wanted.ckpt_step is not None and wanted.load == root and not wanted.pretrained_checkpoint
        return (
            None if config.train.skip_train or (other and not wanted.finetune) else ResumePoint(root, iteration, False)
        )
    if not is_own_checkpoint(config, common):
        return None
    return _checked(ResumePoint(root, iteration, False), folder, config, weights_only=False)


def is_own_checkpoint(config: RunConfig, common: dict[str, Any]) -> bool:
    """Return whether this configuration, up to defaults, wrote the checkpoint."""
    saved = common.get("config")
    if not isinstance(saved, dict):
        return False
    known = _with_current_settings(saved)
    known["checkpoint"]["verify_checksums"] = config.checkpoint.verify_checksums  # no effect on training
    return known in (config.as_written(), asdict(config))


def _with_current_settings(saved: dict[str, Any]) -> dict[str, Any]:
    default = RunConfig()
    known = asdict(default)
    for name, value in saved.items():
        if isinstance(value, dict) and is_dataclass(getattr(default, name, None)):
            known[name] |= {setting: each for setting, each in value.items() if setting in known[name]}
        elif name in known:
            known[name] = value
    return known


def loads_optimizer(config: RunConfig, common: dict[str, Any]) -> bool:
    """Return whether a resuming run loads the optimizer state.

    ``checkpoint.load_optim=false`` applies to the first start; later starts load the run's own optimizer.
    """
    own = is_own_checkpoint(config, common) and config.checkpoint.save_optim
    return config.checkpoint.load_optim or own


def check_fits(config: RunConfig, common: dict[str, Any], folder: Path, finetune: bool) -> None:
    """Check that a run can resume from a checkpoint, or ``finetune`` its weights.

    Raises:
        ConfigError: different model, optimizer, schedule, program or newer version; names the differences.
    """
    check_format(common, folder)
    save = config.checkpoint.save
    _check_model(config.model, save, common, folder, finetune)
    if finetune:
        return
    if "scheduler" not in common:
        raise ConfigError(f"checkpoint {folder} holds weights only. Fix: {new_run_fix(save, folder)}")
    now, scheduler = asdict(config), config.scheduler
    if loads_optimizer(config, common):
        _check_optimizer(now, common["config"], folder)
    if not (scheduler.override_opt_param_scheduler or scheduler.use_checkpoint_opt_param_scheduler):
        _check_schedule(schedule_of(scheduler, config.train, config.optimizer), now, common, folder)


def check_format(common: dict[str, Any], folder: Path) -> None:
    """Raise ConfigError if another program or a newer version wrote the checkpoint."""
    version = common.get("format")
    if version is None:
        raise ConfigError(
            f"checkpoint {folder} was written by another program. "
            f"Fix: {NAME.checkpoint.load}=FOLDER (a run folder of megatron_cp)"
        )
    if version > FORMAT:
        raise ConfigError(
            f"checkpoint {folder} has format {version}, newer than this version's {FORMAT}. Fix: upgrade megatron_cp"
        )


def _check_model(here: ModelConfig, save: str | None, common: dict[str, Any], folder: Path, finetune: bool) -> None:
    saved, now = saved_model(common), replace(here)
    for model in (saved, now):
        # The split into pipeline stages does not change the model.
        model.hybrid_layer_pattern = without_stages(model.hybrid_layer_pattern) or None
        if model.position_embedding_type != "learned_absolute":  # has no weights
            model.max_position_embeddings = None
    if finetune and mtp_differs(saved, now):
        for model in (saved, now):
            model.hybrid_layer_pattern = layers_of(model.hybrid_layer_pattern) or None
            model.mtp_num_layers, model.mtp_use_repeated_layer = None, False
    if saved.num_layers == now.num_layers and saved.layer_types == now.layer_types:
        saved.moe_layer_freq = now.moe_layer_freq  # a number and a list can be equivalent
    # RoPE and YaRN share weights, but use different frequencies.
    turned = {saved.position_embedding_type, now.position_embedding_type} == {"rope", "yarn"}
    positions = [NAME.model.position_embedding_type] if turned else []
    weights = [name for name in settings_affecting(WEIGHTS) if name not in positions]
    function = [*positions, *settings_affecting(FUNCTION)]
    saved.vocab_size = saved.vocab_size or now.vocab_size  # None: the tokenizer's, in older checkpoints
    other_weights, other_function = (
        differences({"model": asdict(saved)}, {"model": asdict(now)}, names)
        for names in (weights, [] if finetune else function)
    )
    padding, rows = _other_padding(saved, now)
    different = other_weights | other_function
    if different or padding:
        fix = str(Fix((*overrides(different), *rows)))
        begin = f"{ALTERNATIVES}{new_run_fix(save, folder)} (a new run with its weights)"
        raise ConfigError(
            f"checkpoint {folder} is of a different model: {'; '.join(describe(different) + padding)}. "
            f"Fix: {fix} (the checkpoint's values){'' if other_weights or padding else begin}"
        )


def saved_model(common: dict[str, Any]) -> ModelConfig:
    """Return a checkpoint's model, in the settings of this version."""
    return ModelConfig(**_with_current_settings(common["config"])["model"])


def mtp_differs(saved: ModelConfig, now: ModelConfig) -> bool:
    """Return whether only one of two models has MTP layers."""
    return bool(saved.mtp_num_layers) != bool(now.mtp_num_layers)


def _other_padding(saved: ModelConfig, now: ModelConfig) -> tuple[list[str], list[str]]:
    """Return differences of vocabulary padding, and overrides for the checkpoint's.

    Padding rows take part in the softmax. megatron-core would drop rows, or add rows of zeros.
    """
    if not now.vocab_size or saved.vocab_size != now.vocab_size:
        return [], []
    there, here = (
        padded(model.vocab_size or 0, model.make_vocab_size_divisible_by, model.tensor_model_parallel_size)
        for model in (saved, now)
    )
    if there == here:
        return [], []
    words = [override(NAME.model.make_vocab_size_divisible_by, there)]
    if there % now.tensor_model_parallel_size:
        words.append(override(NAME.model.tensor_model_parallel_size, saved.tensor_model_parallel_size))
    return [f"the vocabulary is padded to {here} rows here and {there} in the checkpoint"], words


def _check_optimizer(now: dict[str, Any], saved: dict[str, Any], folder: Path) -> None:
    if not saved["checkpoint"]["save_optim"]:
        raise ConfigError(
            f"checkpoint {folder} holds no optimizer state (saved with {NAME.checkpoint.save_optim}=false). "
            f"Fix: {NAME.checkpoint.load_optim}=false (a fresh optimizer), or {NAME.checkpoint.finetune}=true "
            "(a new run with its weights)"
        )
    different = differences(saved, now, settings_affecting(OPTIMIZER))
    optimizer, momenta = now["optimizer"], [bool(each["optimizer"]["sgd_momentum"]) for each in (saved, now)]
    if optimizer["optimizer"] == "sgd" and momenta[0] != momenta[1]:
        # SGD has optimizer state only with momentum; the value may change.
        different |= differences(saved, now, [NAME.optimizer.sgd_momentum])
    here, there = _precision(now["mixed_precision"]), _precision(saved["mixed_precision"])
    if not optimizer["use_distributed_optimizer"] and None not in (here, there) and here != there:
        # Only the distributed optimizer always keeps float32 parameters under the same names.
        different["mixed_precision"] = (here, there)
    if different:
        raise ConfigError(
            f"checkpoint {folder} has the state of a different optimizer: {'; '.join(describe(different))}. Fix: "
            f"{Fix(overrides(different))} (the checkpoint's), or {NAME.checkpoint.load_optim}=false (a fresh optimizer)"
        )


def _precision(section: dict[str, Any]) -> str | None:
    """Return the configured precision; None if it depends on the device."""
    return next((name for name in ("fp32", "bf16", "fp16") if section[name]), None)


def _check_schedule(schedule: dict[str, Any], now: dict[str, Any], common: dict[str, Any], folder: Path) -> None:
    """Check what megatron-core asserts when it loads a schedule, and what it omits."""
    saved = common["scheduler"]
    if schedule["wd_incr_style"] == "constant":
        del schedule["wd_incr_steps"]  # has no effect with a constant style
    if schedule["lr_decay_style"] != "WSD":
        schedule = {name: value for name, value in schedule.items() if name not in FORGOTTEN}
    changed = [name for name, value in schedule.items() if name in saved and saved[name] != value]
    if changed:
        different = differences(common["config"], now, settings_affecting(SCHEDULE))
        if common["config"]["scheduler"]["lr_decay_iters"] == now["scheduler"]["lr_decay_iters"]:
            different.pop(NAME.train.train_iters, None)
        raise ConfigError(
            f"checkpoint {folder} was trained with a different learning-rate schedule: "
            f"{'; '.join(describe(different) or changed)}. Unless {NAME.scheduler.lr_decay_iters} is set, the schedule "
            f"depends on {NAME.train.train_iters}. Fix: {NAME.scheduler.override_opt_param_scheduler}=true "
            f"(the new schedule), or {NAME.scheduler.use_checkpoint_opt_param_scheduler}=true (the checkpoint's)"
        )
