"""Dialogues of chat data: messages with roles, read from a row and checked.

A row has ``messages`` of ``role`` and ``content``, or ``conversations`` of ``from`` and ``value`` (ShareGPT). Messages
of the assistant may have ``tool_calls``, and the row ``tools``, both in OpenAI's form.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from megatron_cp.common.input_files import parse_json
from megatron_cp.data.formats.rows import check_encodable

SHARE_GPT = "conversations"  # its usual key
ASSISTANT = "assistant"
Message = dict[str, Any]

# Other names of roles: of ShareGPT, and of tools' results.
_ROLES = {
    "human": "user",
    "gpt": ASSISTANT,
    "model": ASSISTANT,
    "chatgpt": ASSISTANT,
    "function_call": ASSISTANT,
    "observation": "tool",
    "function": "tool",
    "ipython": "tool",
}
# What may stand before a message; "" is the start.
_BEFORE = {
    "system": ("",),
    "developer": ("", "system"),
    "user": ("", "system", "developer", ASSISTANT, "tool"),
    ASSISTANT: ("user", "tool"),
    "tool": ("tool", ASSISTANT),
}


class BadDialogue(ValueError):
    """Dialogue that cannot be trained on; the message says why."""


@dataclass(frozen=True)
class Dialogue:
    """Checked messages, without keys of value None, and the tools they may call."""

    messages: Sequence[Message]
    tools: Sequence[dict[str, Any]] | None = None

    @property
    def answers(self) -> list[int]:
        """Indices of the assistant's messages."""
        return [index for index, message in enumerate(self.messages) if message["role"] == ASSISTANT]


def dialogue_of(row: dict[str, Any], key: str) -> Dialogue:
    """Return the dialogue under ``key``.

    Raises:
        BadDialogue: a message is malformed or empty, roles are out of order, or the assistant says nothing.
    """
    given = _decoded(row[key], key)
    if not isinstance(given, list) or not given:
        raise BadDialogue(f"{key!r} must be a list of messages. Fix: {{{json.dumps(key)}: [{_EXAMPLE}]}}")
    messages = [_message(each, number) for number, each in enumerate(given, 1)]
    _check_order(messages)
    return Dialogue(messages, _tools(row.get("tools")))


def of_pair(prompt: str, response: str) -> Dialogue:
    """Return the dialogue of a pair; raise BadDialogue if a text is empty."""
    given = ({"role": "user", "content": prompt}, {"role": ASSISTANT, "content": response})
    return Dialogue([_message(each, number) for number, each in enumerate(given, 1)])


_EXAMPLE = '{"role": "user", "content": "..."}, {"role": "assistant", "content": "..."}'


def _message(given: Any, number: int) -> Message:
    if not isinstance(given, dict):
        raise BadDialogue(f"message {number} is {type(given).__name__}, not an object. Fix: {_EXAMPLE}")
    message = {key: value for key, value in given.items() if value is not None}
    if "from" in message and "role" not in message:
        message = {"role": message.pop("from"), "content": message.pop("value", ""), **message}
    named = message.get("role")
    role = message["role"] = _ROLES.get(named, named) if isinstance(named, str) else named
    if not isinstance(role, str) or role not in _BEFORE:
        known = ", ".join(_BEFORE)
        raise BadDialogue(f"message {number} has the role {named!r}; roles are {known}. Fix: rename the role")
    if named == "function_call":
        message = {"role": role, "tool_calls": [_decoded(message.get("content"), f"message {number}")]}
    if "content" in message:
        message["content"] = _text(message["content"], number)
        try:
            check_encodable(message["content"], f"message {number}")
        except ValueError as error:
            raise BadDialogue(str(error)) from error
    calls = message.get("tool_calls")
    if calls is not None:
        message["tool_calls"] = [_call(each, number) for each in (calls if isinstance(calls, list) else [calls])]
    if not message.get("content", "").strip() and not message.get("tool_calls") and role != "system":
        raise BadDialogue(f"message {number} ({role}) is empty. Fix: remove the dialogue, or write its text")
    return message


def _text(content: Any, number: int) -> str:
    """Return a message's text; its parts joined if it is a list of them."""
    if isinstance(content, str):
        return content
    parts = content if isinstance(content, list) else [content]
    other = [part for part in parts if not (isinstance(part, dict) and isinstance(part.get("text"), str))]
    if other:
        kind = other[0].get("type", "object") if isinstance(other[0], dict) else type(other[0]).__name__
        raise BadDialogue(f"message {number} has content of type {kind}; only text is trained on. Fix: remove it")
    return "".join(part["text"] for part in parts)


def _call(given: Any, number: int) -> dict[str, Any]:
    """Return a tool call in OpenAI's form, its arguments as an object."""
    call = given if isinstance(given, dict) else {}
    function = call.get("function", call)
    name = function.get("name") if isinstance(function, dict) else None
    if not isinstance(name, str) or not name:
        form = '{"type": "function", "function": {"name": "...", "arguments": {}}}'
        raise BadDialogue(f"message {number} has a tool call without a function's name. Fix: {form}")
    arguments = _decoded(function.get("arguments", function.get("parameters", {})), f"message {number}: arguments")
    known = {key: value for key, value in call.items() if key in ("id", "type") and value is not None}
    return {"type": "function", **known, "function": {"name": name, "arguments": arguments}}


def _tools(given: Any) -> list[dict[str, Any]] | None:
    tools = _decoded(given, "tools") if given else None
    if tools and not (isinstance(tools, list) and all(isinstance(tool, dict) for tool in tools)):
        raise BadDialogue('\'tools\' must be a list of objects. Fix: "tools": [{"type": "function", "function": {}}]')
    return tools or None


def _decoded(value: Any, what: str) -> Any:
    """Return ``value``, parsed if it is a text: Parquet files often store JSON so."""
    if not isinstance(value, str):
        return value
    try:
        return parse_json(value)
    except ValueError as error:
        raise BadDialogue(f"{what} is not valid JSON: {error}. Fix: write a JSON object") from error


def _check_order(messages: Sequence[Message]) -> None:
    before = ""
    called = False
    for number, role in enumerate((message["role"] for message in messages), 1):
        if before not in _BEFORE[role] or (role == "tool" and not called):
            place = f"follows {before}" if before else "comes first"
            needs = " or ".join(each or "the start" for each in _BEFORE[role])
            needs = "an assistant's tool call" if role == "tool" else needs
            raise BadDialogue(
                f"message {number} ({role}) {place}; it must follow {needs}. Fix: reorder or join the messages"
            )
        before = role
        called = bool(messages[number - 1].get("tool_calls")) or (called and role == "tool")
    if ASSISTANT not in (message["role"] for message in messages):
        raise BadDialogue("the dialogue has no assistant message, so there is nothing to learn. Fix: remove the line")
