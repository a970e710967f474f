"""docs/architecture.md and its pages: short, one picture, every file on one page, and the walk of a request."""

from __future__ import annotations

import re
from collections import Counter

import pytest

from docs import request_walk
from tests.support.served_cluster import ROOT
from twinpool.contracts.build_id import PACKAGES

PAGE = (ROOT / "docs" / "architecture.md").read_text()
PICTURE = (ROOT / "docs" / "architecture.svg").read_text()
PAGES = {
    "contracts": ("contracts",),
    "cache": ("cache",),
    "transfer": ("transfer",),
    "engine": ("engine",),
    "workers": ("worker", "prefill", "decode", "colocate"),
    "router": ("router",),
    "cluster": ("cluster", "cli"),
    "simulator": ("sim",),
}
"""Which packages each page tells of."""
SOURCES = (".py", ".h", ".cpp")


def words(page: str) -> int:
    return len(page.split())


def listed(page: str) -> list[str]:
    """The files below `## Files`: a heading names the folder, a line its file."""
    text = (ROOT / "docs" / "architecture" / f"{page}.md").read_text().partition("\n## Files\n")[2]
    found: list[str] = []
    for part in text.split("\n### ")[1:]:
        folder = part.splitlines()[0]
        assert folder.endswith("/"), folder
        names = re.findall(r"^- `([\w.]+)`: \S", part, re.MULTILINE)
        assert len(names) == len(re.findall(r"^- ", part, re.MULTILINE)), f"{folder}: a file a line"
        assert names == sorted(names), f"{folder}: in order"
        found += [folder + name for name in names]
    return found


def test_the_page_is_short_and_has_one_picture() -> None:
    assert words(PAGE) <= 1500
    assert re.findall(r"!\[[^\]]*\]\(([^)]+)\)", PAGE) == ["architecture.svg"]
    assert "<img" not in PAGE
    assert "```" not in PAGE, "a drawing in letters is a picture too"


def test_the_picture_names_folders_that_are_there() -> None:
    folders = re.findall(r'class="folder"[^>]*>([\w/]+)<', PICTURE)
    assert len(folders) > 15
    assert all((ROOT / folder).is_dir() for folder in folders), folders


@pytest.mark.parametrize("page", PAGES)
def test_a_page_lists_every_file_of_its_packages_and_no_other(page: str) -> None:
    there = {
        path.relative_to(ROOT).as_posix()
        for package in PAGES[page]
        for path in (ROOT / package).rglob("*")
        if path.suffix in SOURCES and path.name != "__init__.py"
    }
    files = listed(page)
    assert Counter(files).most_common(1)[0][1] == 1
    assert set(files) - there == set(), "listed, and not there"
    assert there - set(files) == set(), "there, and not listed"


@pytest.mark.parametrize("page", PAGES)
def test_files_that_a_page_speaks_of_are_there(page: str) -> None:
    """By their whole path, or by that below the page's package."""
    text = (ROOT / "docs" / "architecture" / f"{page}.md").read_text().partition("\n## Files\n")[0]
    for name in re.findall(r"`([\w./]+\.py|[\w/]+/)`", text):
        assert any((ROOT / folder / name).exists() for folder in ("", *PAGES[page])), name


def test_every_package_has_a_page_and_the_page_of_all_links_to_each() -> None:
    assert sorted(PACKAGES) == sorted(package for packages in PAGES.values() for package in packages)
    assert {path.stem for path in (ROOT / "docs" / "architecture").iterdir()} == PAGES.keys()
    assert set(re.findall(r"\(architecture/(\w+)\.md\)", PAGE)) == PAGES.keys()


def test_the_walk_of_a_request_leads_through_functions_that_are_there() -> None:
    walk = request_walk.stops(PAGE)
    assert len(walk) == len(re.findall(r"^\| `[\w./]+\.py` ", PAGE, re.MULTILINE)) > 50
    for path, name in walk:
        defined = rf"^ *(?:async )?(?:def|class) {name}\b"
        assert re.search(defined, (ROOT / path).read_text(), re.MULTILINE), f"{path} has no {name}"


@pytest.mark.slow
def test_the_page_says_what_a_chat_really_enters_and_calls() -> None:
    """Within what hangs on when steps of both workers fall together: on a busy machine they poll more."""
    quoted = re.findall(r"enters (\d+) files, each further token takes (\d+) Python calls", " ".join(PAGE.split()))
    files, calls = map(int, quoted[0])
    chat, token = request_walk.chat_walks().values()
    assert abs(len(chat.files) - files) <= 8, f"a chat enters {len(chat.files)} files"
    assert calls / 2 <= sum(token.calls.values()) / request_walk.TOKENS <= 1.5 * calls


def test_the_page_says_how_many_files_the_walk_opens_and_returns_to() -> None:
    files, returns = request_walk.counted(PAGE)
    assert f"These are {files} files, and {len(returns)} returns" in " ".join(PAGE.split())
    assert request_walk.counted("| `a.py` | `A` | a |\n| `b.py` | `B` | b |\n| `a.py` | `A` | c |") == (
        2,
        [request_walk.Stop("a.py", "A")],
    )
