"""The documentation site builds strictly, and its pages are readable.

It loads nothing from other hosts.
"""

import gzip
import json
import os
import re
import subprocess
import sys
from pathlib import Path

import jsonschema
import pytest
import yaml

from scripts import write_commands

ROOT = Path(__file__).parents[3]
DOCS = ROOT / "docs"
PAGES = sorted(DOCS.rglob("*.md"))
CAVEATS = DOCS / "explanation" / "status.md"


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Build the site.

    A link, anchor or page that is missing fails the build (with --quiet it would not).
    """
    folder = tmp_path_factory.mktemp("site")
    command = [sys.executable, "-m", "mkdocs", "build", "--strict", "--site-dir", str(folder)]
    environment = {**os.environ, "NO_MKDOCS_2_WARNING": "1"}
    done = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr
    return folder


def test_every_page_is_in_the_site(site: Path) -> None:
    for page in PAGES:
        assert (site / page.relative_to(DOCS)).with_suffix(".html").exists(), page


def test_nothing_is_loaded_from_other_hosts(site: Path) -> None:
    """Links may go to other hosts; scripts, styles, fonts and pictures may not."""
    for path in site.rglob("*.html"):
        text = path.read_text(encoding="utf-8")
        assert not re.findall(r"<(?:script|img|iframe|source)[^>]* src=\"?(?:https?:)?//", text), path
        assert not re.findall(r"<link(?![^>]*canonical)[^>]* href=\"?(?:https?:)?//", text), path
    for path in site.rglob("*.css"):
        assert not re.findall(r"(?:url\(|@import )[\"']?(?:https?:)?//", path.read_text(encoding="utf-8")), path


def test_search_finds_rules_settings_and_the_python_api(site: Path) -> None:
    entries = json.loads((site / "search" / "search_index.json").read_text(encoding="utf-8"))["docs"]
    places = {entry["location"] for entry in entries}
    assert {"reference/rules.html#k56", "reference/settings.html#model"} <= places
    assert any(place.startswith("reference/python_api.html#megatron_cp.api.train") for place in places)


@pytest.mark.skipif(sys.version_info[:2] != (3, 12), reason="argparse words its help otherwise")
def test_the_commands_page_is_current() -> None:
    assert write_commands.PATH.read_text(encoding="utf-8") == write_commands.document()


def prose(page: Path) -> str:
    """Return a page without code, tables, headings and comments."""
    text = re.sub(r"^ *```.*?^ *```$|<!--.*?-->", "", page.read_text(encoding="utf-8"), flags=re.M | re.S)
    return re.sub(r"^(?:\||#|    ).*$", "", text, flags=re.M)


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(DOCS)))
def test_rules_are_linked_with_words(page: Path) -> None:
    if page.name in ("rules.md", "constraints_without_rules.md"):
        return
    text = prose(page)
    assert not re.findall(r"(?<![\w`-])[A-K][1-9]\d?(?![\w`])", re.sub(r"\[[^\]]*\]\([^)]*\)|`[^`]*`", "", text))
    assert not re.findall(r"\[(?:(?:rule|constraint)\s)?[A-K]\d+\]\(", text), "add what the rule is about"


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(DOCS)))
def test_only_one_page_lists_what_has_not_run(page: Path) -> None:
    reported = re.findall(
        r"no GPU has|not (?:been )?(?:run|tried|measured) (?:yet|on a)|not tried\b", page.read_text(encoding="utf-8")
    )
    assert not reported or page == CAVEATS


def test_the_kubernetes_manifest_matches_the_schema() -> None:
    """The schema is JobSet v1alpha2's, without descriptions.

    Unknown fields are errors.
    """
    page = (DOCS / "how-to" / "kubernetes.md").read_text(encoding="utf-8")
    (text,) = re.findall(r"```yaml title=\"jobset.yaml\"\n(.*?)```", page, flags=re.S)
    packed = Path(__file__).with_name("jobset_schema.json.gz").read_bytes()
    validator = jsonschema.Draft202012Validator(json.loads(gzip.decompress(packed)))
    manifest = yaml.safe_load(text)
    validator.validate(manifest)
    (job,) = manifest["spec"]["replicatedJobs"]
    job["template"]["spec"]["template"]["spec"]["container"] = []
    with pytest.raises(jsonschema.ValidationError, match="container"):
        validator.validate(manifest)
