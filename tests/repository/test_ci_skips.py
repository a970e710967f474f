from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

SCRIPT = Path(__file__).parents[2] / ".ci" / "skips.py"
CASES = """<testsuites><testsuite>
<testcase classname="tests.a" name="test_runs"/>
<testcase classname="tests.a" name="test_needs_a_gpu[1]"><skipped type="pytest.skip" message="no GPU"/></testcase>
<testcase classname="tests.a" name="test_known"><skipped type="pytest.xfail" message="known"/></testcase>
</testsuite></testsuites>"""


@pytest.mark.parametrize(
    ("allowed", "code", "words"),
    [
        ("tests.a::test_needs_a_gpu*  no GPU here\n# a remark\ntests.a::test_known  see the docs\n", 0, ""),
        ("tests.a::test_needs_a_gpu*  no GPU here\n", 1, "tests.a::test_known: known"),
        ("tests.a::test_known  see the docs\n", 1, "test_needs_a_gpu[1]: no GPU"),
        ("tests.a::*\n", 1, "has no reason"),
    ],
)
def test_a_skip_or_expected_failure_without_a_committed_reason_fails_ci(
    tmp_path: Path, allowed: str, code: int, words: str
) -> None:
    (tmp_path / "report.xml").write_text(CASES)
    (tmp_path / "allowed.txt").write_text(allowed)
    command = [sys.executable, str(SCRIPT), str(tmp_path / "report.xml"), str(tmp_path / "allowed.txt")]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == code
    assert words in done.stderr
