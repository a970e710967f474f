"""The pages of docs/ against what they speak of. What they say to type is run by tests/whole/test_demo.py."""

from __future__ import annotations

import importlib
import pkgutil
import re
import shlex
import subprocess
import sys
from pathlib import Path

import pytest

from tests.repository import family_table
from tests.support.served_cluster import ROOT
from twinpool.cli import command_line
from twinpool.contracts.build_id import PACKAGES
from twinpool.contracts.config.load_config import load_config
from twinpool.engine.models.registry import ARCHITECTURES

AGAIN = "run `make pages`"
PAGES = [*sorted(ROOT.glob("*.md")), *sorted((ROOT / "docs").rglob("*.md"))]


def test_the_page_of_configuration_is_what_the_source_says() -> None:
    assert printed("configuration.py") == (ROOT / "docs" / "configuration.md").read_text(), AGAIN


def test_the_page_of_metrics_is_what_the_source_says() -> None:
    assert printed("metrics.py") == (ROOT / "docs" / "metrics.md").read_text(), AGAIN


def test_the_page_of_metrics_has_every_family_that_the_router_names() -> None:
    page = (ROOT / "docs" / "metrics.md").read_text()
    for path in sorted((ROOT / "router").rglob("*.py")):
        for name in re.findall(r'"(twinpool_[a-z_]+|vllm:[a-z_0-9]+)"', path.read_text()):
            assert re.search(rf"`{name}(_total)?`", page), f"{path.name}: {name}"


def test_the_page_of_states_is_drawn_from_the_tables() -> None:
    page = printed("state_diagrams.py")
    assert page == (ROOT / "docs" / "states.md").read_text(), AGAIN
    assert page.count("```mermaid\nstateDiagram-v2\n    [*] --> ") == page.count("\n## ") > 10


def test_the_page_of_what_may_be_imported_is_what_the_source_says() -> None:
    assert printed("api_reference.py") == (ROOT / "docs" / "api.md").read_text(), AGAIN


@pytest.mark.slow
def test_the_page_of_families_is_what_the_parameters_of_tests_are() -> None:
    assert family_table.page() == (ROOT / "docs" / "families.md").read_text(), AGAIN
    unshown = [name for name, cells in family_table.table().items() if not cells["equal to"]]
    assert not unshown, "equal to nothing"


def test_what_may_be_imported_can_be_and_is_named_by_its_face() -> None:
    page = (ROOT / "docs" / "api.md").read_text()
    faces = re.findall(r"^`from ([\w.]+) import \.\.\.`$", page, re.MULTILINE)
    assert len(faces) == len(set(faces)) > 5
    for name in faces:
        face = importlib.import_module(name)
        assert all(hasattr(face, one) for one in face.__all__), name
        assert all(f"`{one}`" in page for one in face.__all__), name


def test_code_that_the_pages_show_imports_from_faces_alone() -> None:
    """And what it imports is there."""
    api = (ROOT / "docs" / "api.md").read_text()
    shown = [
        code for page in PAGES for code in re.findall(r"^```py\n(.*?)^```", page.read_text(), re.MULTILINE | re.DOTALL)
    ]
    lines = [line for code in shown for line in re.findall(r"^from ([\w.]+) import (\w+)$", code, re.MULTILINE)]
    lines = [(module, name) for module, name in lines if module.split(".")[0] == "twinpool"]
    assert lines
    for module, name in lines:
        assert f"`from {module} import ...`" in api, f"{module} is no face"
        assert name in importlib.import_module(module).__all__, f"{module} names no {name}"


def test_every_command_is_shown_and_what_the_pages_show_can_be_parsed() -> None:
    lines = [
        line
        for page in PAGES
        for line in re.findall(r"^(?:\.venv/bin/)?twinpool (.+)$", page.read_text(), re.MULTILINE)
    ]
    shown = [shlex.split(line, comments=True) for line in lines]
    assert {words[0] for words in shown} == set(command_line.COMMANDS)
    for words in shown:
        command_line.parser().parse_args([word for word in words if word not in ("[...]", "...")])


def printed(script: str) -> str:
    command = [sys.executable, str(ROOT / "docs" / script)]
    done = subprocess.run(command, cwd=ROOT, env={"PYTHONPATH": str(ROOT)}, capture_output=True, text=True, check=True)
    return done.stdout


@pytest.mark.parametrize("page", PAGES, ids=lambda p: str(p.relative_to(ROOT)))
def test_links_lead_somewhere(page: Path) -> None:
    for target in re.findall(r"\]\(([^)#:]+)\)", page.read_text()):
        assert (page.parent / target).exists(), f"{page.name} links to {target}"


def anchors(page: Path) -> set[str]:
    """What a link may name of a page behind ``#``, as GitHub makes it of headings."""
    shown = re.sub(r"^```.*?^```", "", page.read_text(), flags=re.MULTILINE | re.DOTALL)
    headings = re.findall(r"^#+ (.+)$", shown, re.MULTILINE)
    plain = [re.sub(r"\[([^\]]*)\]\([^)]*\)", r"\1", heading) for heading in headings]
    return {re.sub(r"[^\w\- ]", "", heading.lower()).strip().replace(" ", "-") for heading in plain}


@pytest.mark.parametrize("page", PAGES, ids=lambda p: str(p.relative_to(ROOT)))
def test_what_a_link_names_of_a_page_is_a_heading_of_it(page: Path) -> None:
    for target, heading in re.findall(r"\]\(([^)#:\s]*)#([^)\s]+)\)", page.read_text()):
        there = page.parent / target if target else page
        if there.suffix == ".md":
            assert heading in anchors(there), f"{page.name} links to {target}#{heading}"


@pytest.mark.parametrize("page", PAGES, ids=lambda p: str(p.relative_to(ROOT)))
def test_files_and_modules_that_a_page_names_are_there(page: Path) -> None:
    """Modules and classes by dots, but for keys of the configuration. Pages of parts have a test of their own."""
    text, packages = page.read_text(), "|".join(PACKAGES)
    if page.parent.name != "architecture":
        for name in re.findall(r"`([\w.-]+(?:/[\w.-]+)+\.(?:py|cpp|h|md|yaml|txt))(?:::\w+)?`", text):
            assert (ROOT / name).is_file(), name
    keys = set(re.findall(r"^\| `([\w.]+)` ", (ROOT / "docs" / "configuration.md").read_text(), re.MULTILINE))
    for name in re.findall(rf"`((?:{packages})(?:\.\w+){{2,}})`", text):
        assert name in keys or pkgutil.resolve_name(f"twinpool.{name}"), name


def test_the_page_of_models_names_every_architecture_and_no_other() -> None:
    text = (ROOT / "docs" / "using.md").read_text()
    named = [re.findall(r"`(\w+)`", line.split("|")[1]) for line in text.splitlines() if line.startswith("| `")]
    found = [name for names in named for name in names if name.endswith(("ForCausalLM", "ForConditionalGeneration"))]
    assert sorted(found) == sorted(ARCHITECTURES)


def test_settings_in_the_pages_are_accepted() -> None:
    """Those of one line together, as they are typed."""
    lines = [re.findall(r"--set ([\w.]+=\S+)", line) for page in PAGES for line in page.read_text().splitlines()]
    typed = [settings for settings in lines if settings and not any("section.key" in s for s in settings)]
    assert typed
    for settings in typed:
        load_config(None, [setting.rstrip("`.,;)") for setting in settings])
