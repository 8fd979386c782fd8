"""Dialogues through chat templates: the same tokens and masks as transformers."""

from pathlib import Path
from typing import Any

import pytest

from megatron_cp.common.errors import DataError
from megatron_cp.data.text.chat_template import ChatTemplate, EncodedDialogue
from megatron_cp.data.text.dialogues import BadDialogue, Dialogue, dialogue_of
from megatron_cp.data.text.tokenizers import ByteLevelTokenizer, HuggingFaceTokenizer, NullTokenizer
from tests.unit_tests.data.text.chat_templates import SPECIAL, make_chat_tokenizer
from tests.unit_tests.data.text.tokenizer_folders import TEMPLATES, make_tokenizer

TURNS = [
    {"role": "user", "content": "the cat sat 😀\n"},
    {"role": "assistant", "content": "\n  on a mat, naïve"},
    {"role": "user", "content": "and?"},
    {"role": "assistant", "content": "was fed."},
]
SYSTEM = [{"role": "system", "content": "the mat"}, *TURNS]
TOOLS = [
    {"type": "function", "function": {"name": "feed", "parameters": {"type": "object", "properties": {}}}},
]
CALLS = [
    {"role": "user", "content": "the cat"},
    {"role": "assistant", "tool_calls": [{"function": {"name": "feed", "arguments": '{"what": "cat"}'}}]},
    {"role": "tool", "content": "fed"},
    {"role": "assistant", "content": "was fed"},
]
# Templates that write the same text for a message whatever follows it. Qwen 3 drops the reasoning of earlier answers.
STABLE = sorted(set(SPECIAL) - {"qwen3"})


def opened(tmp_path: Path, name: str, *, marked: bool = False) -> tuple[ChatTemplate, Any]:
    """Return our template and transformers' tokenizer of one folder."""
    from transformers import AutoTokenizer

    folder = tmp_path / f"{name}-{marked}"
    if not folder.exists():
        make_chat_tokenizer(folder, name, marked=marked)
    return ChatTemplate(HuggingFaceTokenizer(folder)), AutoTokenizer.from_pretrained(folder, local_files_only=True)


def encoded(template: ChatTemplate, messages: list[dict[str, Any]], train_on: Any = "assistant") -> EncodedDialogue:
    return template.encode(dialogue_of({"messages": messages}, "messages"), train_on)


def mask_of(found: EncodedDialogue) -> list[int]:
    mask = [0] * len(found.ids)
    for begin, end in found.spans:
        mask[begin:end] = [1] * (end - begin)
    return mask


def of_transformers(tokenizer: Any, messages: list[dict[str, Any]], **options: Any) -> tuple[list[int], list[int]]:
    found = tokenizer.apply_chat_template(messages, return_assistant_tokens_mask=True, **options)
    return found["input_ids"], found["assistant_masks"]


@pytest.mark.parametrize("messages", [TURNS, SYSTEM], ids=["turns", "system"])
@pytest.mark.parametrize("name", sorted(SPECIAL))
def test_marked_templates_give_the_tokens_and_masks_of_transformers(
    tmp_path: Path, name: str, messages: list[dict[str, Any]]
) -> None:
    template, tokenizer = opened(tmp_path, name, marked=True)
    found = encoded(template, messages)
    assert (found.ids, mask_of(found)) == of_transformers(tokenizer, messages)
    assert 0 < sum(mask_of(found)) < len(found.ids)
    last = encoded(template, messages, "last_assistant")
    assert last.ids == found.ids and last.spans == found.spans[-1:]


@pytest.mark.parametrize("messages", [TURNS, SYSTEM], ids=["turns", "system"])
@pytest.mark.parametrize("name", STABLE)
def test_differences_of_renderings_give_the_masks_of_the_marked_template(
    tmp_path: Path, name: str, messages: list[dict[str, Any]]
) -> None:
    template, tokenizer = opened(tmp_path, name)
    if name == "mistral" and messages is SYSTEM:  # it writes the system message before the last user message
        with pytest.raises(BadDialogue, match=r"differently when other messages follow.*Fix: .*dataset\.train_on=all"):
            encoded(template, messages)
        return
    ids, mask = of_transformers(opened(tmp_path, name, marked=True)[1], messages)
    found = encoded(template, messages)
    assert found.ids == ids == tokenizer.apply_chat_template(messages)["input_ids"]
    assert mask_of(found) == mask
    last = encoded(template, messages, "last_assistant")
    assert last.spans == found.spans[-1:]
    assert encoded(template, messages, "all").spans == [(0, len(ids))]


def test_a_template_that_changes_earlier_answers_is_refused_for_them_only(tmp_path: Path) -> None:
    template, _ = opened(tmp_path, "qwen3")
    with pytest.raises(BadDialogue, match=r"answer 1 .*Fix: dataset\.train_on=last_assistant"):
        encoded(template, TURNS)
    ids, mask = of_transformers(opened(tmp_path, "qwen3", marked=True)[1], TURNS[:2])
    found = encoded(template, TURNS[:2])
    assert (found.ids, mask_of(found)) == (ids, mask)
    both = encoded(template, TURNS, "last_assistant")
    assert both.ids[slice(*both.spans[0])] == template._tokenizer.tokenize(
        "<think>\n\n</think>\n\nwas fed.<|im_end|>\n"
    )


@pytest.mark.parametrize("name", ["qwen2_5", "qwen3"])
def test_tool_calls_are_learned_and_results_are_not(tmp_path: Path, name: str) -> None:
    template, tokenizer = opened(tmp_path, name, marked=True)
    found = template.encode(dialogue_of({"messages": CALLS, "tools": TOOLS}, "messages"), "assistant")
    as_objects = dialogue_of({"messages": CALLS}, "messages").messages
    assert (found.ids, mask_of(found)) == of_transformers(tokenizer, list(as_objects), tools=TOOLS)
    learned = template._tokenizer.decode([token for begin, end in found.spans for token in found.ids[begin:end]])
    assert '"arguments": {"what": "cat"}' in learned and "<tool_response>" not in learned


def test_deepseek_gets_arguments_as_text(tmp_path: Path) -> None:
    template, _ = opened(tmp_path, "deepseek_v3")
    found = encoded(template, CALLS[:2])
    assert '```json\n{"what": "cat"}\n```' in template._tokenizer.decode(found.ids)


@pytest.mark.parametrize("name", ["smollm2", "gemma3", "llama3"])
def test_a_template_without_tool_calls_is_refused(tmp_path: Path, name: str) -> None:
    template, _ = opened(tmp_path, name)
    with pytest.raises(BadDialogue, match=r"leaves tool calls out|refuses the dialogue"):
        encoded(template, CALLS[:2])


def test_text_that_the_template_leaves_out_is_reported(tmp_path: Path) -> None:
    template, _ = opened(tmp_path, "mistral", marked=True)
    assert encoded(template, SYSTEM).left_out == 1
    assert encoded(template, TURNS).left_out is None


def test_a_template_that_raises_is_a_bad_dialogue(tmp_path: Path) -> None:
    template, _ = opened(tmp_path, "gemma3")
    two = Dialogue([{"role": "user", "content": "a"}, {"role": "user", "content": "b"}, TURNS[1]])
    with pytest.raises(BadDialogue, match=r"Conversation roles must alternate.*Fix: .*bad_dialogues=skip"):
        template.encode(two, "assistant")


def test_missing_and_broken_templates_are_named(tmp_path: Path) -> None:
    plain = HuggingFaceTokenizer(make_tokenizer(tmp_path / "plain", TEMPLATES["bos"]))
    with pytest.raises(DataError, match=r"no chat template.*Fix: .*dataset\.chat_template=FILE"):
        ChatTemplate(plain)
    with pytest.raises(DataError, match=r"Fix: tokenizer\.tokenizer_type=HuggingFaceTokenizer .*chat_template=FILE"):
        ChatTemplate(ByteLevelTokenizer())
    with pytest.raises(DataError, match="NullTokenizer: reads no text"):
        ChatTemplate(NullTokenizer(9), "any.jinja")
    broken = tmp_path / "broken.jinja"
    broken.write_text("{% for message in messages %}")
    with pytest.raises(DataError, match=rf"{broken}: line 1: .*Fix: "):
        encoded(ChatTemplate(plain, str(broken)), TURNS)
    with pytest.raises(DataError, match=r"missing\.jinja: cannot be read"):
        ChatTemplate(plain, str(tmp_path / "missing.jinja"))


def test_bytes_are_marked_by_character(tmp_path: Path) -> None:
    file = tmp_path / "plain.jinja"
    file.write_text("{% for m in messages %}{{ m.role + ': ' + m.content + '\n' }}{% endfor %}"
                    "{% if add_generation_prompt %}assistant: {% endif %}")  # fmt: skip
    tokenizer = ByteLevelTokenizer()
    found = encoded(ChatTemplate(tokenizer, str(file)), TURNS)
    learned = [tokenizer.decode(found.ids[begin:end]) for begin, end in found.spans]
    assert learned == ["\n  on a mat, naïve\n", "was fed.\n"]


def test_a_template_cannot_run_code(tmp_path: Path) -> None:
    plain = HuggingFaceTokenizer(make_tokenizer(tmp_path / "plain", TEMPLATES["bos"]))
    attack = tmp_path / "attack.jinja"
    attack.write_text("{{ ''.__class__.__mro__[1].__subclasses__() }}")
    with pytest.raises(BadDialogue, match="unsafe"):
        encoded(ChatTemplate(plain, str(attack)), TURNS)


BAD = {
    "no list": ({"messages": "hello"}, "not valid JSON"),
    "empty": ({"messages": []}, "must be a list of messages"),
    "role": ({"messages": [{"role": "narrator", "content": "a"}]}, "the role 'narrator'"),
    "no answer": ({"messages": TURNS[:1]}, "has no assistant message"),
    "two users": ({"messages": [TURNS[0], *TURNS]}, r"message 2 \(user\) follows user; it must follow the start or"),
    "answer first": ({"messages": TURNS[1:]}, r"message 1 \(assistant\) comes first; it must follow user or tool"),
    "late system": ({"messages": [*TURNS, SYSTEM[0]]}, r"message 5 \(system\) follows assistant"),
    "tool without call": ({"messages": [TURNS[0], TURNS[1], CALLS[2]]}, "must follow an assistant's tool call"),
    "empty turn": ({"messages": [TURNS[0], {"role": "assistant", "content": " \n"}]}, r"2 \(assistant\) is empty"),
    "picture": ({"messages": [{"role": "user", "content": [{"type": "image_url"}]}]}, "of type image_url; only text"),
    "number": ({"messages": [{"role": "user", "content": 7}]}, "of type int; only text"),
    "half pair": ({"messages": [{"role": "user", "content": "\ud800"}]}, "half a surrogate pair"),
    "nameless call": ({"messages": [TURNS[0], {"role": "assistant", "tool_calls": [{"id": "1"}]}]}, "function's name"),
    "arguments": (
        {"messages": [TURNS[0], {"role": "assistant", "tool_calls": [{"function": {"name": "f", "arguments": "{"}}]}]},
        "message 2: arguments is not valid JSON",
    ),
    "tools": ({"messages": TURNS, "tools": ["feed"]}, "'tools' must be a list of objects"),
}


@pytest.mark.parametrize("name", BAD)
def test_bad_dialogues_are_refused_with_a_fix(name: str) -> None:
    row, message = BAD[name]
    with pytest.raises(BadDialogue, match=rf"{message}.*Fix: "):
        dialogue_of(row, "messages")


def test_share_gpt_and_text_parts_are_the_same_dialogue() -> None:
    names = {"user": "human", "assistant": "gpt"}
    share = [{"from": names[turn["role"]], "value": turn["content"]} for turn in TURNS]
    parts = [{**turn, "content": [{"type": "text", "text": turn["content"]}]} for turn in TURNS]
    assert dialogue_of({"c": share}, "c") == dialogue_of({"c": parts}, "c") == dialogue_of({"c": TURNS}, "c")
