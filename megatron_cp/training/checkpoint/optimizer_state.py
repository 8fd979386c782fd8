"""A checkpoint's optimizer state in the shape of another layout's optimizers.

megatron-core steps the parameters of experts that are spread over ranks (``allreduce`` false) with an optimizer of
their own. Its tensors are named by parameter, so that either shape finds them; what a checkpoint holds beside tensors
(settings of groups, counts of steps, a loss scale) lies where the optimizers of the saving layout were.
"""

from typing import Any

from megatron.core.optimizer.optimizer import param_group_identifier_keys

# The one key of a group that follows from the layout.
_BY_LAYOUT = "is_expert_parallel"
_HIGH_PRECISION = "fp32_from_fp16_params"  # of a plain optimizer of half-precision parameters: a list for each group


def by_number(state: dict[Any, Any], groups: list[list[dict[str, Any]]]) -> dict[Any, Any]:
    """A state to be saved or loaded that has no list for groups without parameters, in place.

    An empty list is no tensor: rank 0's would be saved as one, and not fit the tensors of stages that have some.
    """
    for each in _of_each(state, groups):
        if _HIGH_PRECISION in each:
            each[_HIGH_PRECISION] = {number: own for number, own in enumerate(each[_HIGH_PRECISION]) if own}
    return state


def _of_each(state: dict[Any, Any], groups: list[list[dict[str, Any]]]) -> list[dict[str, Any]]:
    """The state of each optimizer."""
    return [state[index] for index in range(len(groups))] if 0 in state else [state]


def with_common_steps(state: dict[Any, Any], groups: list[list[dict[str, Any]]]) -> dict[Any, Any]:
    """A state to be saved in which optimizers and groups without parameters have counted the steps of the others, in
    place.

    What is no tensor is saved by rank 0, whose pipeline stage may have no experts where other stages' are spread over
    ranks, or nothing but an embedding, and so none of the parameters that do not decay.

    Args:
        state: of these optimizers, as ``sharded_state_dict`` returns it.
        groups: the parameter groups of each of them.
    """
    states = _of_each(state, groups)
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
    """A loaded state, of :func:`by_number`, as these optimizers' ``load_state_dict`` takes it.

    Args:
        loaded: the optimizer's state as loaded, the checkpoint's plain values merged with this layout's tensors.
        saved: the checkpoint's plain values alone.
        groups: the parameter groups of each of this layout's optimizers.
    """
    before = [saved[index] for index in sorted(saved)] if 0 in saved else [saved]
    if len(before) != len(groups):
        if len(groups) == 1:
            tensors = {name: value for name, value in loaded.items() if not isinstance(name, int)}
            loaded = _completed(tensors, before, groups[0])
        else:
            # Nothing is loaded for an optimizer without parameters.
            loaded = {index: _completed(loaded.get(index, {}), before, own) for index, own in enumerate(groups)}
    for state, own in zip(_of_each(loaded, groups), groups, strict=True):
        state.get("optimizer", state).setdefault("state", {})
        if "optimizer" in state:
            numbered = state.get(_HIGH_PRECISION, {})
            state[_HIGH_PRECISION] = [numbered.get(number, []) for number in range(len(own))]
    return loaded


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
