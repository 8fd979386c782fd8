"""Chat templates of published models, with their special tokens.

Some variants have generation blocks. The ``.jinja`` files hold the templates as their models publish them.
"""
# ruff: noqa: E501, RUF001 (texts of templates)

import json
from pathlib import Path

from tests.unit_tests.data.text.tokenizer_folders import WORDS

_CHATML = ("<|im_start|>", "<|im_end|>", "<|endoftext|>")
_TOOLS = ("<tool_call>", "</tool_call>", "<tool_response>", "</tool_response>")
# Special tokens; the first two are BOS and EOS.
SPECIAL = {
    "chatml": _CHATML,
    "deepseek_v3": ("<｜begin▁of▁sentence｜>", "<｜end▁of▁sentence｜>", "<｜User｜>", "<｜Assistant｜>"),
    "gemma3": ("<bos>", "<eos>", "<start_of_turn>", "<end_of_turn>"),
    "llama3": ("<|begin_of_text|>", "<|eot_id|>", "<|start_header_id|>", "<|end_header_id|>"),
    "mistral": ("<s>", "</s>", "[INST]", "[/INST]", "[TOOL_CALLS]", "[AVAILABLE_TOOLS]", "[/AVAILABLE_TOOLS]"),
    "qwen2_5": _CHATML + _TOOLS,
    "qwen3": (*_CHATML, *_TOOLS, "<think>", "</think>"),
    "smollm2": _CHATML,
}
_PLAIN = "{{'<|im_start|>' + message['role'] + '\\n' + message['content'] + '<|im_end|>' + '\\n'}}"
_PLAIN_MARKED = (
    "{{'<|im_start|>' + message['role'] + '\\n'}}{% set text = message['content'] + '<|im_end|>' + '\\n' %}"
    "{% if message['role'] == 'assistant' %}{% generation %}{{ text }}{% endgeneration %}"
    "{% else %}{{ text }}{% endif %}"
)
# Replacements that put generation blocks around what the assistant writes.
_MARKS = {
    "chatml": [(_PLAIN, _PLAIN_MARKED)],
    "smollm2": [(_PLAIN, _PLAIN_MARKED)],
    "deepseek_v3": [
        (
            "{{'<｜Assistant｜>' + message['content'] + '<｜end▁of▁sentence｜>'}}",
            "{{'<｜Assistant｜>'}}{% generation %}{{message['content'] + '<｜end▁of▁sentence｜>'}}{% endgeneration %}",
        )
    ],
    "gemma3": [
        ("(first_user_prefix if loop.first else \"\") }}\n    {%- if message['content'] is string -%}",
         "(first_user_prefix if loop.first else \"\") }}\n    {%- if role == 'model' -%}{%- generation -%}"
         "{{ message['content'] | trim + '<end_of_turn>\\n' }}{%- endgeneration -%}"
         "{%- elif message['content'] is string -%}"),
        ("    {{ '<end_of_turn>\\n' }}", "    {%- if role != 'model' -%}{{ '<end_of_turn>\\n' }}{%- endif -%}"),
    ],
    "llama3": [
        (
            "{{ content }}{% endfor %}",
            "{% if message['role'] == 'assistant' %}{% set parts = content.split('<|end_header_id|>\\n\\n') %}"
            "{{ parts[0] + '<|end_header_id|>\\n\\n' }}{% generation %}{{ parts[1] }}{% endgeneration %}"
            "{% else %}{{ content }}{% endif %}{% endfor %}",
        )
    ],
    "mistral": [
        (
            '{{- " " + message["content"]|trim + eos_token}}',
            '{%- generation %}{{- " " + message["content"]|trim + eos_token}}{%- endgeneration %}',
        )
    ],
    "qwen2_5": [
        (' or (message.role == "assistant" and not message.tool_calls) %}', " %}"),
        (
            "{{- '<|im_start|>' + message.role }}\n        {%- if message.content %}\n            {{- '\\n' + message.content }}",
            "{{- '<|im_start|>' + message.role + '\\n' }}{%- generation %}\n        {%- if message.content %}\n"
            "            {{- message.content }}",
        ),
        ("{{- '\\n<tool_call>", "{{- ('\\n' if message.content or not loop.first else '') + '<tool_call>"),
        (
            "{%- endfor %}\n        {{- '<|im_end|>\\n' }}\n    {%- elif message.role == \"tool\"",
            "{%- endfor %}\n        {{- '<|im_end|>\\n' }}{%- endgeneration %}\n    {%- elif message.role == \"tool\"",
        ),
    ],
    "qwen3": [
        ("{{- '<|im_start|>' + message.role + '\\n<think>", "{{- '<think>"),
        ("{{- '<|im_start|>' + message.role + '\\n' + content }}\n            {%- endif %}", "{{- content }}\n            {%- endif %}"),
        ("{{- '<|im_start|>' + message.role + '\\n' + content }}\n        {%- endif %}", "{{- content }}\n        {%- endif %}"),
        ("{%- if loop.index0 > ns", "{{- '<|im_start|>' + message.role + '\\n' }}{%- generation %}{%- if loop.index0 > ns"),
        (
            "{{- '<|im_end|>\\n' }}\n    {%- elif message.role == \"tool\"",
            "{{- '<|im_end|>\\n' }}{%- endgeneration %}\n    {%- elif message.role == \"tool\"",
        ),
    ],
}  # fmt: skip


def template(name: str, *, marked: bool = False) -> str:
    """Return a model's chat template, or its variant with generation blocks."""
    text = (Path(__file__).parent / f"{name}.jinja").read_text()
    for old, new in _MARKS[name] if marked else ():
        assert text.count(old) == 1, (name, old, text.count(old))
        text = text.replace(old, new)
    return text


def make_chat_tokenizer(folder: Path, name: str, *, marked: bool = False) -> Path:
    """Write a small byte-level tokenizer with a model's special tokens and template."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

    special = list(SPECIAL[name])
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    tokenizer.train_from_iterator(
        [WORDS] * 9, trainers.BpeTrainer(special_tokens=special, vocab_size=310, initial_alphabet=alphabet)
    )
    folder.mkdir()
    tokenizer.save(str(folder / "tokenizer.json"))
    config = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "bos_token": special[0],
        "eos_token": special[1],
        "chat_template": template(name, marked=marked),
    }
    (folder / "tokenizer_config.json").write_text(json.dumps(config))
    return folder
