"""Put pages of the repository that lie outside docs/ into the site, under project/ (a hook of mkdocs.yml)."""

from __future__ import annotations

import re
from pathlib import Path

from mkdocs.config.defaults import MkDocsConfig
from mkdocs.structure.files import File, Files
from mkdocs.structure.pages import Page

ROOT = Path(__file__).resolve().parents[1]
PAGES = {
    "SECURITY.md": "project/security.md",
    "3rdparty/README.md": "project/third_party.md",
    "benchmarks/README.md": "project/benchmarks.md",
}


def on_files(files: Files, config: MkDocsConfig) -> Files:
    for source, page in PAGES.items():
        text = (ROOT / source).read_text(encoding="utf-8")
        text = re.sub(r"\]\((?:\.\./)?docs/", "](../", text)  # links from the repository's root to docs/
        files.append(File.generated(config, page, content=text))
    return files


def on_page_markdown(markdown: str, page: Page, config: MkDocsConfig, files: Files) -> str:
    for source, target in PAGES.items():  # links from docs/ to the repository's root
        markdown = re.sub(rf"\]\((?:\.\./)+{re.escape(source)}(#[\w-]+)?\)", rf"](../{target}\1)", markdown)
    return markdown
