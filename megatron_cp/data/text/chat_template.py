"""Encode dialogues with a tokenizer's chat template, and mark the tokens to learn.

The assistant's tokens come from the template's ``{% generation %}`` blocks, as in transformers' ``apply_chat_template(
return_assistant_tokens_mask=True)``. A template without them is rendered once per prefix of the dialogue: an answer is
what the rendering with the answer has beyond the rendering before it. This needs a template that writes the same text
for a message whatever follows it; every dialogue is checked for that.
"""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Sequence
from typing import Any, Literal, NamedTuple

from megatron_cp.common.errors import DataError, first_line, readable
from megatron_cp.common.input_files import decode_text, read_bytes
from megatron_cp.config.names import NAME
from megatron_cp.data.text.dialogues import BadDialogue, Dialogue, Message
from megatron_cp.data.text.tokenizer_files import chat_templates, special_tokens
from megatron_cp.data.text.tokenizers import Encoding, HuggingFaceTokenizer, NullTokenizer, Tokenizer

TrainOn = Literal["assistant", "last_assistant", "all"]
Span = tuple[int, int]
_GENERATION = re.compile(r"\{%[-+]?\s*generation\s*[-+]?%\}")
_OTHER = f"{NAME.dataset.chat_template}=FILE (a template with {{% generation %}} blocks)"
_CHANGE = f"change the messages, or {NAME.dataset.bad_dialogues}=skip"


class EncodedDialogue(NamedTuple):
    """Token ids of a dialogue, and the [begin, end) of its tokens to learn.

    ``left_out``: number of the first message whose text the template leaves out; None if there is none.
    """

    ids: list[int]
    spans: list[Span]
    left_out: int | None


class ChatTemplate:
    """Chat template of a tokenizer, by default the one in the tokenizer's files.

    ``file``: a Jinja file with another template. ``digest`` changes with the template and its special tokens.

    Raises:
        DataError: there is no template, it cannot be read, or it is no valid Jinja.
    """

    def __init__(self, tokenizer: Tokenizer, file: str | None = None) -> None:
        other = f"{NAME.tokenizer.tokenizer_type}=HuggingFaceTokenizer {NAME.tokenizer.tokenizer_model}=PATH"
        if isinstance(tokenizer, NullTokenizer):
            raise DataError(f"NullTokenizer: reads no text, and the data has dialogues. Fix: {other}")
        path = tokenizer.path if isinstance(tokenizer, HuggingFaceTokenizer) else None
        self._tokenizer = tokenizer
        self.name = file or f"the chat template of {path}"
        self._templates = {"default": _read(file)} if file else chat_templates(path) if path else {}
        self._variables: dict[str, Any] = special_tokens(path) if path else {}
        if "default" not in self._templates:
            where = f"{NAME.tokenizer.tokenizer_model}={path}" if path else type(tokenizer).__name__
            raise DataError(
                f"{where}: has no chat template, and the data has dialogues. Fix: {other} (of an instruct model), or "
                f"{NAME.dataset.chat_template}=FILE"
            )
        self.has_marks = any(map(_GENERATION.search, self._templates.values()))
        self.digest = hashlib.sha256(json.dumps([self._templates, self._variables]).encode()).hexdigest()[:16]

    def encode(self, dialogue: Dialogue, train_on: TrainOn) -> EncodedDialogue:
        """Encode a dialogue once, with all of its answers.

        Raises:
            BadDialogue: the template refuses the dialogue, leaves a tool call out, or has no marks and changes earlier
                messages when later ones follow.
            DataError: the template is no valid Jinja.
        """
        text, marked = self._render(dialogue.messages, dialogue.tools, marks=self.has_marks)
        self._check_tool_calls(dialogue, text)
        encoded = self._tokenizer.encode_with_offsets(text)
        left_out = _left_out(dialogue.messages, text)
        if train_on == "all":
            return EncodedDialogue(encoded.ids, [(0, len(encoded.ids))], left_out)
        last_only = train_on == "last_assistant"
        if not self.has_marks:
            answers = dialogue.answers[-1:] if last_only else dialogue.answers
            marked = [self._difference(dialogue, text, answer) for answer in answers]
        elif last_only:
            marked = marked[self._marks_before(dialogue) :]
        spans = [span for start, end in marked if (span := _tokens(encoded, start, end)) is not None]
        if not spans:
            raise BadDialogue(f"{self.name} marks no token of the assistant. Fix: {_OTHER}")
        return EncodedDialogue(encoded.ids, spans, left_out)

    def user_turn(self, text: str) -> str:
        """Return what a model reads before it answers a user's ``text``.

        Raises:
            BadDialogue: the template refuses a dialogue that begins with the user.
            DataError: the template is no valid Jinja.
        """
        return self._render([{"role": "user", "content": text}], None, prompt=True)[0]

    def _marks_before(self, dialogue: Dialogue) -> int:
        """Count the generation blocks before the last answer."""
        earlier = dialogue.messages[: dialogue.answers[-1]]
        return len(self._render(earlier, dialogue.tools, marks=True)[1]) if earlier else 0

    def _check_tool_calls(self, dialogue: Dialogue, text: str) -> None:
        """Raise BadDialogue if the template leaves a tool call out."""
        for number, message in enumerate(dialogue.messages, 1):
            for name in (call["function"]["name"] for call in message.get("tool_calls", ())):
                if name not in text:
                    raise BadDialogue(
                        f"message {number} calls the tool {name!r}, and {self.name} leaves tool calls out. "
                        f"Fix: {_OTHER}, or {_CHANGE}"
                    )

    def _difference(self, dialogue: Dialogue, text: str, answer: int) -> Span:
        """Return the [begin, end) in ``text`` of an answer, by rendering less."""
        messages, tools = dialogue.messages, dialogue.tools
        before = self._render(messages[:answer], tools, prompt=True)[0] if answer else ""
        with_answer = self._render(messages[: answer + 1], tools)[0]
        if not (text.startswith(with_answer) and with_answer.startswith(before)):
            last = answer == dialogue.answers[-1]
            way = "" if last else f"{NAME.dataset.train_on}=last_assistant, or "
            raise BadDialogue(
                f"{self.name} has no generation blocks, and it writes the messages before answer "
                f"{dialogue.answers.index(answer) + 1} or the answer itself differently when other messages follow, so "
                f"its tokens cannot be found. Fix: {way}{NAME.dataset.train_on}=all, or {_OTHER}"
            )
        return len(before), len(with_answer)

    def _render(
        self,
        messages: Sequence[Message],
        tools: Sequence[dict[str, Any]] | None,
        *,
        prompt: bool = False,
        marks: bool = False,
    ) -> tuple[str, list[Span]]:
        """Return the text of messages, and the spans of generation blocks in it."""
        from jinja2 import TemplateError, TemplateSyntaxError
        from transformers.utils.chat_template_utils import render_jinja_template

        template = self._templates.get("tool_use", self._templates["default"]) if tools else self._templates["default"]
        first: Exception | None = None
        rendered: Any  # annotated as a text upstream
        # Templates want tool calls in transformers' form, or (DeepSeek's) in OpenAI's.
        for form in (messages, _in_openai_form(messages)):
            try:
                rendered = render_jinja_template(
                    conversations=[list(form)],
                    tools=None if tools is None else list(tools),
                    chat_template=template,
                    return_assistant_tokens_mask=marks,
                    add_generation_prompt=prompt,
                    **self._variables,
                )
                (text,), spans = rendered
                return text, list(spans[0]) if marks else []
            except TemplateSyntaxError as error:
                raise DataError(f"{self.name}: line {error.lineno}: {first_line(error)}. Fix: {_OTHER}") from error
            except (TemplateError, TypeError, ValueError, LookupError, AttributeError, ArithmeticError) as error:
                first = first or error
        raise BadDialogue(f"{self.name} refuses the dialogue: {first_line(first or ValueError())}. Fix: {_CHANGE}")


def _read(file: str) -> str:
    """Return a template's text."""
    with readable(file):
        content = read_bytes(file)
    try:
        return decode_text(content, file)
    except ValueError as error:
        raise DataError(f"{NAME.dataset.chat_template}={file}: {error}") from error


def _tokens(encoded: Encoding, start: int, end: int) -> Span | None:
    """Return the [begin, end) of these characters' tokens, as transformers does."""
    if start >= end:
        return None
    first, last = encoded.char_to_token(start), encoded.char_to_token(end - 1)
    return None if first is None else (first, last + 1 if last else len(encoded.ids))


def _left_out(messages: Sequence[Message], text: str) -> int | None:
    """Return the number of the first message whose text is not in the rendering."""
    for number, message in enumerate(messages, 1):
        content = message.get("content", "")
        # Templates of reasoning models drop the reasoning of earlier answers.
        if content.rpartition("</think>")[2].strip() not in text:
            return number
    return None


def _in_openai_form(messages: Sequence[Message]) -> list[Message]:
    """Return messages with absent content as None, and arguments as JSON texts."""
    changed = []
    for message in messages:
        calls = [
            call | {"function": call["function"] | {"arguments": json.dumps(call["function"]["arguments"])}}
            for call in message.get("tool_calls", ())
        ]
        changed.append({"content": None} | message | ({"tool_calls": calls} if calls else {}))
    return changed
