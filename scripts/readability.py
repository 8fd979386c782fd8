"""Print the mean and the longest sentence of each page.

    python scripts/readability.py [PAGE ...]

Headings, tables and code blocks do not count. Inline code is one word. Sentences longer than LONGEST words follow the
table.
"""

from __future__ import annotations

import re
import statistics
import sys
from collections.abc import Iterator
from pathlib import Path

from markdown_it import MarkdownIt
from markdown_it.token import Token

from megatron_cp.common.terminal import say

ROOT = Path(__file__).resolve().parents[1]
MEAN, LONGEST = 16, 35
_SENTENCE_END = re.compile(r"""(?<=[.!?])["')\]]*\s+(?=["'(\[]?[A-Z0-9])""")


def pages() -> list[Path]:
    """List README, CONTRIBUTING, CHANGELOG, SECURITY, benchmarks' and docs pages."""
    return [*sorted(ROOT.glob("*.md")), *sorted(ROOT.glob("benchmarks/**/*.md")), *sorted(ROOT.glob("docs/**/*.md"))]


def sentences(text: str) -> list[str]:
    """Return the sentences of a Markdown page."""
    found: list[str] = []
    for paragraph in _paragraphs(_without_boxes(text)):
        found += [each for each in _SENTENCE_END.split(paragraph) if words(each)]
    return found


def words(sentence: str) -> int:
    """Count the words of a sentence."""
    return sum(any(letter.isalnum() for letter in word) for word in sentence.split())


def figures(text: str) -> tuple[int, float, int]:
    """Return the number of sentences, and their mean and largest length in words."""
    lengths = [words(each) for each in sentences(text)]
    return len(lengths), statistics.mean(lengths or [0]), max(lengths, default=0)


def _without_boxes(text: str) -> str:
    """Remove front matter, and make paragraphs of admonitions and tabs."""
    text = re.sub(r"\A---\n.*?\n---\n", "", text, flags=re.DOTALL)
    lines, inside = [], False
    for line in text.split("\n"):
        if re.match(r"(!!!|\?\?\?\+?|===) ", line):
            inside = True
            lines.append("")
        else:
            inside = inside and (not line or line.startswith("    "))
            lines.append(line.removeprefix("    ") if inside else line)
    return "\n".join(lines)


def _paragraphs(text: str) -> Iterator[str]:
    tokens = MarkdownIt("commonmark").enable("table").parse(text)
    outside = 0
    for token in tokens:
        if token.type in ("table_open", "heading_open"):
            outside += 1
        elif token.type in ("table_close", "heading_close"):
            outside -= 1
        elif token.type == "inline" and not outside:
            yield "".join(_text(child) for child in token.children or ())


def _text(token: Token) -> str:
    if token.type in ("softbreak", "hardbreak"):
        return " "
    return "Code" if token.type == "code_inline" else token.content if token.type == "text" else ""


def main(names: list[str]) -> None:
    """Print the figures of these pages, or of all."""
    too_long = []
    say(f"{'page':42}{'sentences':>10}{'mean':>7}{'longest':>9}")
    for page in [Path(name) for name in names] or pages():
        text = page.read_text(encoding="utf-8")
        count, mean, longest = figures(text)
        name = page.resolve().relative_to(ROOT) if page.resolve().is_relative_to(ROOT) else page
        say(f"{name!s:42}{count:10}{mean:7.1f}{longest:9}")
        too_long += [f"{name}: {words(each)} words: {each}" for each in sentences(text) if words(each) > LONGEST]
    for each in too_long:
        say(each)


if __name__ == "__main__":
    main(sys.argv[1:])
