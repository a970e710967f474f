"""The wheel: every file that production needs is in it, its licence too, and nothing of the tests or benches."""

from __future__ import annotations

import ast
import subprocess
import sys
import tomllib
import zipfile
from importlib.metadata import packages_distributions

import pytest
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

from tests.support.served_cluster import ROOT
from twinpool.contracts.build_id import PACKAGES

PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())


@pytest.mark.slow
def test_the_wheel_carries_the_licence_that_it_names(wheel: zipfile.ZipFile) -> None:
    (metadata,) = (name for name in wheel.namelist() if name.endswith(".dist-info/METADATA"))
    (licence,) = (name for name in wheel.namelist() if name.endswith(".dist-info/licenses/LICENSE"))
    assert "License-Expression: Apache-2.0" in wheel.read(metadata).decode().splitlines()
    assert wheel.read(licence) == (ROOT / "LICENSE").read_bytes()
    text = " ".join(wheel.read(licence).decode().split())
    assert text.startswith("Apache License Version 2.0, January 2004")
    assert "END OF TERMS AND CONDITIONS" in text


@pytest.mark.slow
def test_the_wheel_has_every_tracked_file_of_the_packages_and_no_other(wheel: zipfile.ZipFile) -> None:
    """Below the one name that it has: a package beside it may be called `router` or `contracts`."""
    tracked = subprocess.run(
        ["git", "ls-files", "-co", "--exclude-standard", "--", *PACKAGES],
        cwd=ROOT, check=True, capture_output=True, text=True,
    )  # fmt: skip
    wanted = {f"twinpool/{name}" for name in tracked.stdout.splitlines() if (ROOT / name).is_file()}
    assert len(wanted) > 300
    wanted.add("twinpool/__init__.py")
    assert {name for name in wheel.namelist() if ".dist-info/" not in name} == wanted


def test_the_changelog_has_the_version_that_the_package_bears() -> None:
    """As a section of its own once it is released, until then by name under what is to come."""
    text = (ROOT / "CHANGELOG.md").read_text()
    sections = text.split("\n## ")[1:]
    assert sections[0].startswith("[Unreleased]\n")
    version = PROJECT["project"]["version"]
    released = [section.split("]")[0].strip("[") for section in sections[1:]]
    assert version in released or f" {version} " in sections[0]


def imported_of_others() -> set[str]:
    """The names of packages that are neither of this project nor of the standard library and that it imports."""
    found = set()
    for package in PACKAGES:
        for path in (ROOT / package).rglob("*.py"):
            for node in ast.walk(ast.parse(path.read_text())):
                if isinstance(node, ast.Import):
                    found |= {alias.name.split(".")[0] for alias in node.names}
                elif isinstance(node, ast.ImportFrom) and not node.level:
                    found.add((node.module or "").split(".")[0])
    return found - sys.stdlib_module_names - {"twinpool"}


STARTED = {"ziglang": "its compiler is a program", "nixl-cu12": "imported by a name that depends on CUDA's version"}


def test_what_is_imported_is_declared_and_what_is_declared_is_imported() -> None:
    """Else an installation lacks it as soon as whoever brought it goes on without, or has what nobody needs."""
    project = PROJECT["project"]
    extras = [one for name, extra in project["optional-dependencies"].items() if name != "dev" for one in extra]
    declared = {canonicalize_name(Requirement(one).name) for one in (*project["dependencies"], *extras)}
    brings = {top: {*map(canonicalize_name, names)} for top, names in packages_distributions().items()}
    imported = imported_of_others()
    assert [top for top in sorted(imported) if not brings[top] & declared] == [], "imported, and declared nowhere"
    of_use = {name for top in imported for name in brings[top]}
    assert declared - of_use == STARTED.keys(), "declared, and imported nowhere"
