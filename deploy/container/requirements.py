"""Prints what pyproject.toml requires, with the extras that are named: ``requirements.py kernels,redis``."""

from __future__ import annotations

import sys
import tomllib
from pathlib import Path


def main(extras: list[str]) -> str:
    project = tomllib.loads(Path("pyproject.toml").read_text())["project"]
    offered = project["optional-dependencies"]
    if unknown := set(extras) - offered.keys():
        raise SystemExit(f"pyproject.toml has no extra {', '.join(sorted(unknown))}; it has {', '.join(offered)}")
    return "\n".join([*project["dependencies"], *(line for extra in extras for line in offered[extra])])


if __name__ == "__main__":
    print(main([extra for extra in sys.argv[1].split(",") if extra]))
