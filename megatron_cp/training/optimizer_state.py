"""A checkpoint's optimizer state in the shape of another layout's optimizers.

megatron-core steps the parameters of experts that are spread over ranks (``allreduce`` false) with an optimizer of
their own. Its tensors are named by parameter, so that either shape finds them; what a checkpoint holds beside tensors
(settings of groups, counts of steps, a loss scale) lies where the optimizers of the saving layout were.
"""

from typing import Any

from megatron.core.optimizer.optimizer import param_group_identifier_keys

# The one key of a group that follows from the layout.
_BY_LAYOUT = "is_expert_parallel"


def with_common_steps(state: dict[Any, Any], groups: list[list[dict[str, Any]]]) -> dict[Any, Any]:
    """A state to be saved in which optimizers and groups without parameters have counted the steps of the others, in
    place.

    What is no tensor is saved by rank 0, whose pipeline stage may have no experts where other stages' are spread over
    ranks, or nothing but an embedding, and so none of the parameters that do not decay.

    Args:
        state: of these optimizers, as ``sharded_state_dict`` returns it.
        groups: the parameter groups of each of them.
    """
    states = [state[index] for index in range(len(groups))] if 0 in state else [state]
    inner = [each.get("optimizer", each) for each in states]
    counting = [any(group["params"] for group in own) for own in groups]
    if not any(counting):
        return state
    counted = inner[counting.index(True)]
    steps = [group["step"] for group in counted["param_groups"] if "step" in group]
    for each, own in zip(inner, groups, strict=True):
        for saved, group in zip(each["param_groups"], own, strict=True) if steps else ():
            if not group["params"]:
                saved["step"] = steps[0]
    if "common_step" in counted.get("state", {}):
        for each in (each for each, counts in zip(inner, counting, strict=True) if not counts):
            each.setdefault("state", {})["common_step"] = counted["state"]["common_step"]
    return state


def shaped_as_now(loaded: dict[Any, Any], saved: dict[Any, Any], groups: list[list[dict[str, Any]]]) -> dict[Any, Any]:
    """A loaded state as these optimizers' ``load_state_dict`` takes it.

    Args:
        loaded: the optimizer's state as loaded, the checkpoint's plain values merged with this layout's tensors.
        saved: the checkpoint's plain values alone.
        groups: the parameter groups of each of this layout's optimizers.
    """
    before = [saved[index] for index in sorted(saved)] if 0 in saved else [saved]
    if len(before) == len(groups):
        for state in [loaded[index] for index in range(len(groups))] if 0 in saved else [loaded]:
            # Nothing is loaded for an optimizer without parameters.
            state.get("optimizer", state).setdefault("state", {})
            if "optimizer" in state:
                state.setdefault("fp32_from_fp16_params", [])
        return loaded
    if len(groups) == 1:
        tensors = {name: value for name, value in loaded.items() if not isinstance(name, int)}
        return _completed(tensors, before, groups[0])
    # Nothing is loaded for an optimizer without parameters.
    return {index: _completed(loaded.get(index, {}), before, own) for index, own in enumerate(groups)}


def _completed(tensors: dict[str, Any], before: list[dict[str, Any]], groups: list[dict[str, Any]]) -> dict[str, Any]:
    """One optimizer's tensors with the plain values that the saved ones had."""
    plain = before[0]
    if "optimizer" in plain:
        inner = _completed(tensors.get("optimizer", {}), [each["optimizer"] for each in before], groups)
        return plain | tensors | {"optimizer": inner}
    theirs = {_identity(group): group for each in before for group in each["param_groups"]}
    own = tensors.get("param_groups", [{}] * len(groups))
    merged = [
        {**theirs[_identity(group)], _BY_LAYOUT: group[_BY_LAYOUT], **parameters}
        for group, parameters in zip(groups, own, strict=True)
    ]
    return plain | tensors | {"state": plain.get("state", {}) | tensors.get("state", {}), "param_groups": merged}


def _identity(group: dict[str, Any]) -> tuple:
    return tuple(group.get(key) for key in param_group_identifier_keys if key != _BY_LAYOUT)
