"""skips.py REPORT ALLOWED: fail when a test was skipped, or failed as expected, without being on the committed list.

REPORT is pytest's JUnit XML. ALLOWED has one test a line, ``CLASSNAME::NAME  reason``; a name may end in ``*``, and
lines that start with ``#`` say something. A line without a reason is refused.
"""

from __future__ import annotations

import fnmatch
import sys
import xml.etree.ElementTree as ET
from pathlib import Path


def read_allowed(path: Path) -> dict[str, str]:
    """Pattern -> reason."""
    allowed = {}
    for line in path.read_text().splitlines():
        if line.strip() and not line.startswith("#"):
            pattern, _, reason = line.strip().partition(" ")
            if not reason.strip():
                sys.exit(f"{path}: {pattern} has no reason")
            allowed[pattern] = reason.strip()
    return allowed


def read_skipped(path: Path) -> dict[str, str]:
    """Test -> what it said; skips and expected failures alike, as pytest writes both as ``skipped``."""
    skipped = {}
    for case in ET.parse(path).getroot().iter("testcase"):
        mark = case.find("skipped")
        if mark is not None:
            skipped[f"{case.get('classname')}::{case.get('name')}"] = mark.get("message") or ""
    return skipped


def main() -> None:
    allowed = read_allowed(Path(sys.argv[2]))
    surprises = {
        test: said
        for test, said in read_skipped(Path(sys.argv[1])).items()
        if not any(fnmatch.fnmatchcase(test, pattern) for pattern in allowed)
    }
    for test, said in surprises.items():
        sys.stderr.write(f"not run, and not allowed to be: {test}: {said}\n")
    sys.exit(1 if surprises else 0)


if __name__ == "__main__":
    main()
