"""README and docs name what exists, and stay short enough to be read."""

import re
import tomllib
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[3]
DOCS = ROOT / "docs"
PAGES = [ROOT / "README.md", *sorted(DOCS.rglob("*.md"))]
TOP = ("parity", "cases", "docs", "fixtures")
WORDS, README_WORDS = 13_000, 570
MEASURED = DOCS / "measured"
WRITER = r"(`|^    )(parity |python -m (parity|cases\.bench)|python -c |make )"
"""A command in the text, or on a line of its own."""


def names_of(page):
    return page.relative_to(ROOT).as_posix()


def broken_paths(text):
    """Paths below `TOP` and modules `parity.x.y` in a text that do not exist."""
    for path in re.findall(rf"(?<![\w/.-])((?:{'|'.join(TOP)})/[\w./-]+)", text):
        if not (ROOT / path.rstrip(".")).exists():
            yield path
    for name in set(re.findall(r"(?<![\w/.-])parity(?:\.\w+)+", text)):
        if not _is_there(name):
            yield name


def _is_there(dotted):
    """Whether a dotted name is a module, or an attribute of one (of a class in one)."""
    parts = dotted.split(".")
    for cut in range(len(parts), 0, -1):
        folder = ROOT.joinpath(*parts[:cut])
        file = folder.with_suffix(".py")
        if file.exists() or (folder / "__init__.py").exists():
            source = (file if file.exists() else folder / "__init__.py").read_text()
            rest = parts[cut:]
            return not rest or all(re.search(rf"\b{name}\b", source) for name in rest)
    return False


def broken_links(page, text):
    """Relative links whose file, or whose heading in it, does not exist."""
    for target in re.findall(r"\]\(([^)\s]+)\)", text):
        if re.match(r"[a-z]+:", target):
            continue
        path, _, anchor = target.partition("#")
        file = (page.parent / path).resolve() if path else page
        if not file.exists() or (anchor and anchor not in anchors(file.read_text())):
            yield target


def anchors(text):
    """The anchors of a page's headings, as GitHub forms them."""
    titles = re.findall(r"^#+ (.*)$", text, re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", title.lower()).replace(" ", "-") for title in titles}


@pytest.mark.parametrize("page", PAGES, ids=map(names_of, PAGES))
def test_what_a_page_names_exists(page):
    text = page.read_text()
    assert sorted(broken_paths(text)) == []
    assert sorted(broken_links(page, text)) == []


def test_it_is_short_enough_to_be_read():
    words = {
        names_of(p): len(p.read_text().split())
        for p in PAGES
        if not {MEASURED, DOCS / "results"} & {*p.parents} and p.name != "changes.md"
    }
    assert words["README.md"] <= README_WORDS
    assert sum(words.values()) <= WORDS, words


@pytest.mark.parametrize("page", sorted(MEASURED.glob("*.md")), ids=map(names_of, sorted(MEASURED.glob("*.md"))))
def test_a_measured_page_names_the_command_that_writes_it(page):
    head = page.read_text().split("\n## ")[0]
    assert re.search(WRITER, head, re.MULTILINE)


def test_the_map_shows_the_layers_that_are_checked():
    contracts = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["importlinter"]["contracts"]
    layers = next(c["layers"] for c in contracts if c["type"] == "layers")
    text = (DOCS / "architecture.md").read_text().split("\n## Layers")[1].split("\n\n")[2]
    drawn = [re.match(r" {4}(\w+( \| \w+)*)", line)[1] for line in text.splitlines()]
    assert drawn == [layer.replace("parity.", "") for layer in layers]


@pytest.mark.parametrize("title", ["Follow one case", "Follow one trainer check"])
def test_the_map_follows_it_in_at_most_fifteen_modules(title):
    section = (DOCS / "architecture.md").read_text().split(f"\n## {title}\n")[1].split("\n## ")[0]
    modules = set(re.findall(r"parity/[\w/]+\.py", section))
    assert 10 <= len(modules) <= 15, sorted(modules)


def test_the_checks_see_what_is_broken():
    page = DOCS / "glossary.md"
    paths = "see parity/no/such.py and `parity.no.such`, not parity/registry.py"
    assert list(broken_paths(paths)) == ["parity/no/such.py", "parity.no.such"]
    assert list(broken_paths("parity.registry.no_such_function")) == ["parity.registry.no_such_function"]
    links = "[a](nowhere.md) [b](glossary.md) [c](glossary.md#no-heading) [d](https://x.org)"
    assert list(broken_links(page, links)) == ["nowhere.md", "glossary.md#no-heading"]


def test_every_target_of_the_makefile_is_written_once():
    text = (ROOT / "Makefile").read_text()
    names = re.search(r"^\.PHONY: (.*)$", text, re.MULTILINE)[1].split()
    assert [n for n in names if len(re.findall(rf"^{n}:", text, re.MULTILINE)) != 1] == []
