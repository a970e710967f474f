"""Show that every mutant is caught by its test: `make mutants`, or `make mutants ARGS="a1 b"` for some of them.

For each: the tracked files are copied to a temporary folder; the test passes there; the patch applies; what it changes
can be imported; the test fails, and by an assertion of its own or a finding of a checker, not by an error. Prints a
table; exit code 1 when a mutant survives, doesn't apply or breaks something else.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import tempfile
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from xml.etree import ElementTree

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT))

from tests.mutants.catalogue import Mutant, all_mutants  # noqa: E402

AT_ONCE = 2
TEST_S = 170
_CAUGHT = ("AssertionError", "assert ", "Failed: ", "twinpool.contracts.errors.UnorderedAccess")
"""How a failure's message begins that says a rule was broken: an assertion, an exception that didn't come or that the
checker raised."""


_PASSING: set[str] = set()
"""Tests that have passed without a mutant: several mutants may have one test."""


def main(chosen: list[str]) -> int:
    mutants = [m for m in all_mutants() if not chosen or any(m.path.name.startswith(c) for c in chosen)]
    if not mutants:
        print(f"no mutant begins with {' or '.join(chosen)}", file=sys.stderr)
        return 1
    with ThreadPoolExecutor(AT_ONCE) as threads:
        verdicts = []
        for mutant, verdict in zip(mutants, threads.map(judge, mutants), strict=True):
            verdicts.append(verdict)
            print(f"{mutant.path.stem:56} {verdict}", flush=True)
    good = sum(verdict.startswith("caught") for verdict in verdicts)
    print(f"{good} of {len(mutants)} mutants are caught")
    return int(good < len(mutants))


def judge(mutant: Mutant) -> str:
    """What became of one mutant, in words; they begin with "caught" when all is well."""
    with tempfile.TemporaryDirectory(prefix="mutant-") as folder:
        tree = Path(folder) / "tree"
        copy_tree(tree)
        if mutant.test not in _PASSING:
            passed, detail = run_test(mutant, tree)
            if not passed:
                return f"ITS TEST FAILS WITHOUT IT: {detail}"
            _PASSING.add(mutant.test)
        applied = command(["git", "apply", str(mutant.path)], tree)
        if applied.returncode:
            return f"DOESN'T APPLY: {applied.stderr.strip().splitlines()[0]}"
        modules = [name.removesuffix(".py") for name in mutant.changes if name.endswith(".py")]  # Not C++.
        imports = "; ".join(f"import twinpool.{name.replace('/', '.')}" for name in modules)
        imported = command([sys.executable, "-c", imports], tree)
        if imported.returncode:
            return f"CAN'T BE IMPORTED: {imported.stderr.strip().splitlines()[-1]}"
        passed, detail = run_test(mutant, tree)
        if passed:
            return "SURVIVES"
        return f"caught: {detail}" if detail.startswith(_CAUGHT) else f"BREAKS SOMETHING ELSE: {detail}"


def copy_tree(target: Path) -> None:
    """The tracked files, and new ones that aren't ignored."""
    listed = command(["git", "ls-files", "-co", "--exclude-standard", "-z"], ROOT)
    for name in filter(None, listed.stdout.split("\0")):
        if (ROOT / name).is_file() or (ROOT / name).is_symlink():
            (target / name).parent.mkdir(parents=True, exist_ok=True)
            shutil.copy(ROOT / name, target / name, follow_symlinks=False)


def run_test(mutant: Mutant, tree: Path) -> tuple[bool, str]:
    """Whether the test passes in `tree`, and if not, the first line of the first failure."""
    report = tree.parent / "report.xml"
    report.unlink(missing_ok=True)
    options = ["-x", "-q", "-p", "no:cacheprovider", f"--junitxml={report}", f"--timeout={TEST_S}"]
    ran = command([sys.executable, "-m", "pytest", *options, mutant.test], tree)
    if not report.is_file():
        return False, f"pytest ended with {ran.returncode}: {(ran.stdout + ran.stderr).strip()[-200:]}"
    suite = ElementTree.parse(report).getroot()
    for kind in ("failure", "error"):
        for found in suite.iter(kind):
            words = (found.get("message") or "").strip().splitlines()
            return False, ("" if kind == "failure" else "error: ") + (words[0] if words else "no message")[:160]
    if not any(True for _ in suite.iter("testcase")):
        return False, "there is no such test"
    return ran.returncode == 0, f"pytest ended with {ran.returncode}"


def command(words: list[str], tree: Path) -> subprocess.CompletedProcess[str]:
    outside = {"PYTHONPATH": str(tree), "GIT_CEILING_DIRECTORIES": str(tree.parent), "PYTHONDONTWRITEBYTECODE": "1"}
    return subprocess.run(
        words, cwd=tree, env=os.environ | outside, capture_output=True, text=True, check=False, timeout=2 * TEST_S
    )


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
