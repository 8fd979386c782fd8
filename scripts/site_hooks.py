"""Add the repository's pages outside docs/ to the site, as the section Project (a hook of mkdocs.yml)."""

from __future__ import annotations

import re
from pathlib import Path

from mkdocs.config.defaults import MkDocsConfig
from mkdocs.structure.files import File, Files
from mkdocs.structure.pages import Page

ROOT = Path(__file__).resolve().parents[1]
PAGES = {
    "CONTRIBUTING.md": "project/contributing.md",
    "CHANGELOG.md": "project/changelog.md",
    "SECURITY.md": "project/security.md",
    "benchmarks/README.md": "project/benchmarks.md",
    "3rdparty/README.md": "project/third_party.md",
}
LINKS = {**PAGES, "README.md": "index.md"}


def on_config(config: MkDocsConfig) -> MkDocsConfig:
    pages = [page for source, page in PAGES.items() if (ROOT / source).exists()]
    config.nav = [*(config.nav or []), {"Project": pages}]
    return config


def on_files(files: Files, config: MkDocsConfig) -> Files:
    for source, page in PAGES.items():
        if (ROOT / source).exists():
            files.append(File.generated(config, page, abs_src_path=str(ROOT / source)))
    return files


def on_page_markdown(markdown: str, page: Page, config: MkDocsConfig, files: Files) -> str:
    """Convert links between docs/ and the repository's other pages to links of the site."""
    outside = page.file.src_uri in PAGES.values()
    for source, target in LINKS.items():
        up = r"(?:\.\./)*" if outside else r"(?:\.\./)+"
        markdown = re.sub(rf"\]\({up}{re.escape(source)}(#[\w-]+)?\)", rf"](../{target}\1)", markdown)
    if outside:
        markdown = re.sub(r"\]\((?:\.\./)?docs/", "](../", markdown)
        markdown = re.sub(r"\[([^\]]+)\]\((?!http|#|\.\./)[^)]*\)", r"\1", markdown)  # other files of the repository
    return markdown
