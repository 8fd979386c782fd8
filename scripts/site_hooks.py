"""Add the repository's pages outside docs/ to the site, as a section Project.

This is a hook of mkdocs.yml.
"""

from __future__ import annotations

import posixpath
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
    **{
        f"benchmarks/results/{path.name}": f"project/results/{path.name}"
        for path in sorted((ROOT / "benchmarks/results").glob("*.md"))
    },
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
    """Convert links between docs/ and the repository's pages to links of the site."""
    here = page.file.src_uri
    outside = {target: source for source, target in PAGES.items()}
    source = outside.get(here, f"docs/{here}")

    def convert(link: re.Match[str]) -> str:
        path = posixpath.normpath(posixpath.join(posixpath.dirname(source), link[2]))
        target = LINKS.get(path, path.removeprefix("docs/"))
        if target == path:  # another file of the repository
            return link[1] if here in outside else link[0]
        return f"[{link[1]}]({posixpath.relpath(target, posixpath.dirname(here) or '.')}{link[3] or ''})"

    return re.sub(r"\[([^\]]+)\]\((?!http|#)([^)#\s]+)(#[\w-]+)?\)", convert, markdown)
