"""Convert a checkpoint's optimizer state to another layout's optimizers.

megatron-core has a separate optimizer for experts spread over ranks (``allreduce`` false). Tensors are saved by
parameter name, so either layout finds them. Non-tensor state (group settings, step counts, loss scale) is saved per
optimizer of the saving layout.
"""

from typing import Any

from megatron.core.optimizer.optimizer import param_group_identifier_keys

# The one group key that depends on the layout.
_BY_LAYOUT = "is_expert_parallel"
_HIGH_PRECISION = "fp32_from_fp16_params"  # of a plain half-precision optimizer: one list per group


def index_groups(state: dict[Any, Any], groups: list[list[dict[str, Any]]]) -> dict[Any, Any]:
    """Replace lists of groups without parameters in a state, in place.

    rank 0 would save an empty list as an object, which does not fit the tensors of other stages.
    """
    for each in _states_of(state, groups):
        if _HIGH_PRECISION in each:
            each[_HIGH_PRECISION] = {number: own for number, own in enumerate(each[_HIGH_PRECISION]) if own}
    return state


def _states_of(state: dict[Any, Any], groups: list[list[dict[str, Any]]]) -> list[dict[str, Any]]:
    """Return the state of each optimizer."""
    return [state[index] for index in range(len(groups))] if 0 in state else [state]


def fill_step_counts(state: dict[Any, Any], groups: list[list[dict[str, Any]]]) -> dict[Any, Any]:
    """Copy step counts to optimizers and groups without parameters, in place.

    Rank 0 saves non-tensor state. Rank 0's pipeline stage may have no spread experts, or only an embedding, and so no
    parameters without decay.

    Args:
        state: of these optimizers, from ``sharded_state_dict``.
        groups: parameter groups of each optimizer.
    """
    states = _states_of(state, groups)
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


def to_layout(loaded: dict[Any, Any], saved: dict[Any, Any], groups: list[list[dict[str, Any]]]) -> dict[Any, Any]:
    """Convert a loaded state of :func:`index_groups` for these optimizers.

    Args:
        loaded: the loaded state: the checkpoint's plain values merged with this layout's tensors.
        saved: the checkpoint's plain values alone.
        groups: parameter groups of each of this layout's optimizers.
    """
    saved_states = [saved[index] for index in sorted(saved)] if 0 in saved else [saved]
    if len(saved_states) != len(groups):
        if len(groups) == 1:
            tensors = {name: value for name, value in loaded.items() if not isinstance(name, int)}
            loaded = _merge(tensors, saved_states, groups[0])
        else:
            # An optimizer without parameters loads nothing.
            loaded = {index: _merge(loaded.get(index, {}), saved_states, own) for index, own in enumerate(groups)}
    for state, own in zip(_states_of(loaded, groups), groups, strict=True):
        state.get("optimizer", state).setdefault("state", {})
        if "optimizer" in state:
            numbered = state.get(_HIGH_PRECISION, {})
            state[_HIGH_PRECISION] = [numbered.get(number, []) for number in range(len(own))]
    return loaded


def _merge(tensors: dict[str, Any], saved_states: list[dict[str, Any]], groups: list[dict[str, Any]]) -> dict[str, Any]:
    """Merge one optimizer's tensors with the saved plain values."""
    plain = saved_states[0]
    if "optimizer" in plain:
        inner = _merge(tensors.get("optimizer", {}), [each["optimizer"] for each in saved_states], groups)
        return plain | tensors | {"optimizer": inner}
    saved_groups = {_identity(group): group for each in saved_states for group in each["param_groups"]}
    own = tensors.get("param_groups", [{}] * len(groups))
    merged = [
        {**saved_groups[_identity(group)], _BY_LAYOUT: group[_BY_LAYOUT], **parameters}
        for group, parameters in zip(groups, own, strict=True)
    ]
    return plain | tensors | {"state": plain.get("state", {}) | tensors.get("state", {}), "param_groups": merged}


def _identity(group: dict[str, Any]) -> tuple:
    return tuple(group.get(key) for key in param_group_identifier_keys if key != _BY_LAYOUT)
