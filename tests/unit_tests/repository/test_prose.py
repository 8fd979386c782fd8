"""Pages are readable, and docstrings begin with a short line.

Sentences are short, and words are plain. The changelog has an entry for the version.
"""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from pathlib import Path

import pytest

import megatron_cp
from megatron_cp import cli
from megatron_cp.rules import RULES
from megatron_cp.rules.explain import OTHER_CHECKS
from scripts.readability import LONGEST, MEAN, figures, pages, sentences

ROOT = Path(__file__).parents[3]
# Pages above the limits. Remove a page from the list when it meets the limits or is deleted.
NOT_YET: set[str] = set()
PAGES = {str(page.relative_to(ROOT)): page.read_text(encoding="utf-8") for page in pages()}
PRIVATE_NAME = (
    r"_(?:told|tells?|says?|said|goes?_on|nobody|somebody|whoever|whatever|noticed|in_vain|wants?|hears?)(?:_|$)"
)
RULE_IDS = RULES.keys() | OTHER_CHECKS.keys()
# Words that begin a noun phrase or a fragment; ruff's D401 takes each for a verb.
NO_VERBS = re.compile(
    "an?|the|th(?:is|at|ese|ose)|its|their|our|each|every|all|any|both|some|one|two|three|what|wh(?:o|ose|ich|en|ere|y)"
    "|whether|how|as|at|by|for|from|in|of|on|with|without|after|before"
)
CODE = [
    path
    for folder in ("megatron_cp", "tests", "scripts", "benchmarks", "docs")
    for path in ROOT.glob(f"{folder}/**/*.py")
]
Documented = ast.Module | ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef
PLAIN = ["README.md", "CONTRIBUTING.md", "CHANGELOG.md"]
CONTRIBUTING = PAGES["CONTRIBUTING.md"]


def is_readable(text: str) -> bool:
    _, mean, longest = figures(text)
    return mean <= MEAN and longest <= LONGEST


@pytest.mark.parametrize("name", sorted(set(PAGES) - NOT_YET))
def test_sentences_are_short(name: str) -> None:
    assert is_readable(PAGES[name]), f"python scripts/readability.py {name}"


def test_the_list_of_long_pages_is_current() -> None:
    assert {name for name in NOT_YET if name in PAGES and not is_readable(PAGES[name])} == NOT_YET


def test_sentences_are_counted() -> None:
    text = """\
---
title: not a sentence
---
# A heading is none

One two three. Four `a b = c` five ([six](page.md))! Seven 1.5 eight:

- nine
- ten eleven

| a table | is none |
|---|---|
| a | b |

    code is none

!!! note
    Twelve thirteen.
"""
    counted = ["One two three", "Four Code five (six", "Seven 1.5 eight:", "nine", "ten eleven", "Twelve thirteen."]
    assert [each.rstrip(".!)") for each in sentences(text)] == [each.rstrip(".") for each in counted]
    assert figures(text) == (6, 15 / 6, 4)


def private_words() -> list[str]:
    """Return the words of the column "Do not write" in CONTRIBUTING's list."""
    (table,) = re.findall(r"^\| Do not write \|.*\n\|---.*\n((?:\|.*\n)+)", CONTRIBUTING, flags=re.MULTILINE)
    return [word.strip() for row in table.splitlines() for word in row.split("|")[1].split(",")]


def private_words_in(text: str) -> list[str]:
    return [word for word in private_words() if re.search(rf"\b{word}\b", text, flags=re.IGNORECASE)]


@pytest.mark.parametrize("name", PLAIN)
def test_pages_have_no_private_words(name: str) -> None:
    text = re.sub(r"^\| Do not write \|.*\n(?:\|.*\n)+", "", PAGES[name], flags=re.MULTILINE)
    assert private_words_in(re.sub(r"\]\([^)]*\)", "]", text)) == []
    assert len(private_words()) > 15


@pytest.mark.parametrize(
    "command", [[], *([name] for name in cli._MODULES), ["convert", "import"], ["convert", "export"]]
)
def test_help_has_no_private_words(command: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main([*command, "--help"]) == 0
    assert private_words_in(capsys.readouterr().out) == []


def test_names_of_tests_have_no_private_words() -> None:
    texts = [path.read_text(encoding="utf-8") for path in ROOT.glob("tests/**/*.py")]
    names = {name for text in texts for name in re.findall(r"^ *def (test_\w+)", text, flags=re.MULTILINE)}
    assert [name for name in sorted(names) if re.search(PRIVATE_NAME, name)] == []
    assert len(names) > 1000


def rules_without_words(text: str) -> list[str]:
    """Return the codes of rules that stand alone.

    With words: "rule K28 (no offloading)" and "error K28: SETTING=...".
    """
    with_words = r"\b[Rr]ules? [A-K]\d+ \([^)]|\b(?:error|warning) [A-K]\d+: "
    codes = re.findall(r"(?<![\w`'\"-])[A-K][1-9]\d?(?![\w`])", re.sub(with_words, "", text))
    return [code for code in codes if code in RULE_IDS]


def texts_of_a_module(source: str) -> str:
    """Return the strings of a module: messages, helps and rules.

    Docstrings and a rule's own id are not among them.
    """
    tree = ast.parse(source)
    docstrings = {id(node.value) for node in ast.walk(tree) if isinstance(node, ast.Expr)}
    strings = [node for node in ast.walk(tree) if isinstance(node, ast.Constant) and isinstance(node.value, str)]
    return "\n".join(node.value for node in strings if id(node) not in docstrings and node.value not in RULE_IDS)


def test_rules_never_stand_without_words() -> None:
    texts = {path: texts_of_a_module(path.read_text(encoding="utf-8")) for path in ROOT.glob("megatron_cp/**/*.py")}
    for pattern in ("*.md", "recipes/*.yaml", "configs/**/*.yaml", "megatron_cp/**/*.yaml", "scripts/**/*.*sh"):
        for path in ROOT.glob(pattern):
            texts[path] = re.sub(r"^```.*?^```$", "", path.read_text(encoding="utf-8"), flags=re.DOTALL | re.MULTILINE)
    found = {str(path.relative_to(ROOT)): codes for path, text in texts.items() if (codes := rules_without_words(text))}
    assert found == {}, "add what the rule is about: rule K28 (no offloading)"
    assert rules_without_words("see rule K28. As D1; `A6`, rule B3 (lengths), error A2: x=1: no") == ["K28", "D1"]


def first_lines(node: ast.AST) -> Iterator[tuple[Documented, str]]:
    """Yield the first lines of docstrings below a node, with the nodes."""
    if isinstance(node, Documented) and (text := ast.get_docstring(node)):
        yield node, text.split("\n")[0]
    for statement in getattr(node, "body", []) if isinstance(node, ast.Module | ast.stmt) else []:
        yield from first_lines(statement)


def is_noun_phrase(line: str) -> bool:
    """Return whether the first word cannot be a verb."""
    first, second = [*re.findall(r"[\w']+", line), "", ""][:2]
    return not line[0].isalpha() or bool(NO_VERBS.fullmatch(first.lower())) or first.endswith("'s") or second == "of"


def is_called(node: Documented) -> bool:
    """Return whether it is a helper, fixture or method: no test and no property."""
    if not isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef) or node.name.startswith("test_"):
        return False
    return not any(re.search(r"property$|\.setter$", ast.unparse(each)) for each in node.decorator_list)


def test_docstrings_begin_with_a_short_imperative_line() -> None:
    """Noun phrases pass ruff, which checks verbs (D401) and the empty line (D205)."""
    found = [
        (f"{path.relative_to(ROOT)}:{getattr(node, 'lineno', 1)}", node, line)
        for path in CODE
        for node, line in first_lines(ast.parse(path.read_text(encoding="utf-8")))
    ]
    assert [(place, line) for place, _, line in found if len(line) > 80] == []
    assert [(place, line) for place, node, line in found if is_called(node) and is_noun_phrase(line)] == []
    assert len(found) > 3000
    lines = ["The losses.", "What is sent.", "Losses of a step.", "[h, s] of a pack.", "torch's group.", "As upstream."]
    assert all(map(is_noun_phrase, lines)) and not is_noun_phrase("Return the losses of a step.")


def test_the_version_is_in_the_changelog() -> None:
    entries = re.findall(r"^## \[([^]]+)\](?: - (\d{4}-\d\d-\d\d))?$", PAGES["CHANGELOG.md"], flags=re.MULTILINE)
    names = [name for name, _ in entries]
    assert names[0] == "Unreleased" and names[1] == megatron_cp.__version__
    assert all(date for _, date in entries[1:])
    kinds = set(re.findall(r"^### (.*)$", PAGES["CHANGELOG.md"], flags=re.MULTILINE))
    assert kinds <= {"Added", "Changed", "Deprecated", "Removed", "Fixed", "Security"}
