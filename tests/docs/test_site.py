"""The pages of docs/ belong together: each has its place, links and anchors lead somewhere, lines can be read."""

import re
from pathlib import Path

import pytest

import jtile as jt
from jtile import models, ops

ROOT = Path(__file__).resolve().parent.parent.parent
DOCS = ROOT / "docs"
PAGES = sorted(page for page in DOCS.rglob("*.md") if "_build" not in page.parts)
TEXTS = [ROOT / "README.md", ROOT / "CONTRIBUTING.md", ROOT / "CHANGELOG.md", *PAGES]
name = lambda page: str(page.relative_to(ROOT))


def without_code(text):
    blocks = re.sub(r"(?ms)^ *(`{3,})[^\n]*\n.*?^ *\1 *$", "", text)
    return re.sub(r"`[^`\n]+`(?!\])", "", blocks)


def anchors(page):
    """What Sphinx and GitHub call the headings of a page."""
    headings = re.findall(r"(?m)^#{1,4} +(.*)$", re.sub(r"(?ms)^```.*?^```", "", page.read_text()))
    return {re.sub(r"[^\w\- ]", "", h.lower().replace("`", "")).strip().replace(" ", "-") for h in headings}


def test_every_page_has_its_place():
    listed = {DOCS / "index.md"}
    for page in PAGES:
        for tree in re.findall(r"(?ms)^```\{toctree\}\n(.*?)^```", page.read_text()):
            listed |= {(page.parent / f"{line}.md").resolve() for line in tree.split("\n") if line and line[0] != ":"}
    assert {name(page) for page in PAGES} ^ {name(page) for page in listed} == set()


@pytest.mark.parametrize("page", TEXTS, ids=name)
def test_links_and_anchors_lead_somewhere(page):
    links = re.findall(r"\]\((?!https?:|mailto:)([^)\s]+)\)", without_code(page.read_text()))
    broken = []
    for link in links:
        path, _, anchor = link.partition("#")
        target = (page.parent / path).resolve() if path else page
        if not target.exists() or (anchor and anchor not in anchors(target)):
            broken.append(link)
    assert broken == []


def test_every_public_name_is_on_a_page_of_the_api():
    listed = set()
    for page in (DOCS / "api").glob("*.md"):
        names = re.findall(r"(?m)^\.\. auto(?:function|class):: (\w+)$", page.read_text())
        assert len(names) == len(set(names)), page
        listed |= set(names)
    eager = {"Config", "config", "configure", "Kernel", "call", "kernel", "tuned", "Lowered", "dynamic", "Options"}
    library = {n for n, o in vars(ops).items() if not n.startswith("_") and callable(o)}
    assert sorted((eager | set(jt._NAMES) | library | set(models.__all__)) - listed) == []
    assert "auto" in dir(jt)


@pytest.mark.parametrize("page", TEXTS, ids=name)
def test_lines_are_short(page):
    long = [line for line in without_tables(page.read_text()) if len(line) > 120]
    assert long == [], "make format wraps them; a line of code is cut by hand"


def without_tables(text):
    return [line for line in text.split("\n") if not line.lstrip().startswith("|")]


def test_the_version_is_the_same_everywhere():
    """The package, its citation, and the topmost section of the changes; older sections stand below newer ones."""
    packaged = re.search(r'(?m)^version = "(.*)"', (ROOT / "pyproject.toml").read_text())[1]
    cited = re.search(r"(?m)^version: (.*)$", (ROOT / "CITATION.cff").read_text())[1]
    sections = re.findall(r"(?m)^## (\d+)\.(\d+)\.(\d+) \(.+\)$", (ROOT / "CHANGELOG.md").read_text())
    assert packaged == cited == ".".join(sections[0])
    assert sections == sorted(sections, key=lambda parts: [*map(int, parts)], reverse=True)
