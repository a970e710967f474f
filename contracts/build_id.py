"""The build that a process runs: the package's version, and a digest of its source files.

Versions alone don't tell builds apart: a checkout changes without one, and an editable installation changes under a
cluster that runs. Workers register with theirs, so that an operator sees which of them still run another one.
"""

from __future__ import annotations

import functools
import hashlib
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

PACKAGES = (
    "cache", "cli", "cluster", "colocate", "contracts", "decode", "engine", "prefill", "router", "sim", "transfer",
    "worker",
)  # fmt: skip
"""The folders of the source, beside each other."""
SUFFIXES = (".py", ".cpp", ".h")
DIGITS = 10


def source_root() -> Path:
    """The folder that holds `PACKAGES`, of this process."""
    return Path(__file__).resolve().parents[1]


def import_root() -> Path:
    """The folder that this process has imported `twinpool` from, for the search paths of other processes."""
    return Path(__file__).absolute().parents[2]


@functools.cache
def build_id() -> str:
    """The build of this process, ``VERSION+DIGEST``; read from the files once, as they are at the first call."""
    return build_of(source_root())


def build_of(root: Path) -> str:
    """The build whose source lies in `root`."""
    digest = hashlib.sha256()
    for package in PACKAGES:
        for path in sorted((root / package).rglob("*")):
            if path.suffix in SUFFIXES and path.is_file():
                digest.update(f"{path.relative_to(root)}\0".encode())
                digest.update(hashlib.sha256(path.read_bytes()).digest())
    return f"{package_version()}+{digest.hexdigest()[:DIGITS]}"


def package_version() -> str:
    """The version of the installed package; ``0`` for a source tree that nobody installed."""
    try:
        return version("twinpool")
    except PackageNotFoundError:
        return "0"
