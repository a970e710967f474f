"""Builds: what tells two of them apart, and what doesn't."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest

from twinpool.contracts.build_id import PACKAGES, build_id, build_of, source_root


@pytest.fixture(scope="module")
def source(tmp_path_factory: pytest.TempPathFactory) -> Path:
    root = tmp_path_factory.mktemp("source")
    for package in PACKAGES:
        shutil.copytree(source_root() / package, root / package, ignore=shutil.ignore_patterns("__pycache__"))
    return root


def test_every_package_of_the_distribution_counts() -> None:
    assert sorted(PACKAGES) == sorted(path.name for path in (source_root() / "twinpool").iterdir() if path.is_symlink())


def test_a_copy_of_the_source_is_the_same_build_wherever_it_lies(source: Path) -> None:
    assert build_of(source) == build_of(source_root()) == build_id()
    (source / "cli" / "__pycache__").mkdir()
    (source / "cli" / "__pycache__" / "commands.pyc").touch()
    assert build_of(source) == build_id()


@pytest.mark.parametrize("package", PACKAGES)
def test_a_change_in_any_package_is_another_build(source: Path, package: str) -> None:
    path = source / package / "__init__.py"
    before = path.read_bytes()
    path.write_bytes(before + b"\n")
    try:
        assert build_of(source) != build_id()
    finally:
        path.write_bytes(before)


def test_a_file_under_another_name_is_another_build(source: Path) -> None:
    path = source / "contracts" / "clock.py"
    path.rename(path.with_name("watch.py"))
    try:
        assert build_of(source) != build_id()
    finally:
        path.with_name("watch.py").rename(path)
