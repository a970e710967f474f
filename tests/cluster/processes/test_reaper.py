from __future__ import annotations

import os
import signal
import subprocess
import sys
import textwrap
import time
from pathlib import Path

import pytest

from twinpool.cluster.processes import reaper
from twinpool.cluster.processes.process_ids import start_time

REAPER = str(reaper.__file__)


def _sleeper(*args: str, **kwargs: object) -> subprocess.Popen[bytes]:
    return subprocess.Popen(  # type: ignore[call-overload, no-any-return]
        [sys.executable, "-S", "-c", "import sys; sys.stdin.read()", *args], stdin=subprocess.PIPE, **kwargs
    )


class Reaper:
    def __init__(self, mark: str, folder: Path) -> None:
        reading, self.pipe = os.pipe()
        self.process = subprocess.Popen(
            [sys.executable, "-S", "-P", "-E", REAPER, str(reading), mark, str(folder)],
            pass_fds=[reading],
            start_new_session=True,
        )
        os.close(reading)

    def say(self, line: str) -> None:
        os.write(self.pipe, line.encode() + b"\n")

    def end(self) -> None:
        os.close(self.pipe)
        assert self.process.wait(60) == 0


@pytest.mark.slow
def test_everything_of_a_run_dies_with_it_and_nothing_else(tmp_path: Path) -> None:
    folder = tmp_path / "run"
    folder.mkdir()
    mark = f"test-{os.getpid()}"
    path = tmp_path / "run-1.json"
    path.write_text("{}")
    reaper = Reaper(mark, folder)
    reported, stranger, reused = _sleeper(), _sleeper(), _sleeper()
    marked = _sleeper(env={**os.environ, "TWINPOOL_RUN": mark})
    named = _sleeper(f"--session={folder}/session")
    begun = tmp_path / "run.within"
    begun.mkdir()
    of_begun = _sleeper(env={**os.environ, "TWINPOOL_RUN": f"{mark}.within"})
    named_begun = _sleeper(f"--session={begun}/session")
    another = _sleeper(env={**os.environ, "TWINPOOL_RUN": f"{mark}2"})
    with (folder / "out.log").open("w") as out:
        writing = _sleeper(stdout=out)
    everyone = [reported, stranger, reused, marked, named, writing, of_begun, named_begun, another]
    try:
        reaper.say(f"pid {reported.pid} {start_time(reported.pid)}")
        reaper.say(f"pid {reused.pid} {(start_time(reused.pid) or 0) - 1}")
        reaper.say(f"path {path}")
        reaper.end()
        dead = (reported, marked, named, writing, of_begun, named_begun)
        assert [p.wait(60) for p in dead] == [-signal.SIGKILL] * len(dead)
        assert [p.poll() for p in (stranger, reused, another)] == [None] * 3
        assert not folder.exists()
        assert not begun.exists()
        assert not path.exists()
    finally:
        for process in everyone:
            process.kill()
            process.wait()
            assert process.stdin is not None
            process.stdin.close()


@pytest.mark.slow
def test_a_run_that_is_killed_is_cleaned_up_grandchildren_included(tmp_path: Path) -> None:
    folder = tmp_path / "run"
    folder.mkdir()
    script = textwrap.dedent(f"""
        import os, subprocess, sys
        os.environ["TWINPOOL_RUN"] = "killed-{os.getpid()}"
        reading, writing = os.pipe()
        subprocess.Popen([sys.executable, "-S", "-P", "-E", {REAPER!r}, str(reading), os.environ["TWINPOOL_RUN"],
                          {str(folder)!r}], pass_fds=[reading], start_new_session=True)
        os.close(reading)
        clean = {{k: v for k, v in os.environ.items() if k != "TWINPOOL_RUN"}}
        inner = "import os, subprocess, sys; subprocess.run([sys.executable, '-S', '-c', " \\
                "'import os, time; print(os.getpid(), flush=True); time.sleep(60)'], env={{}})"
        subprocess.Popen([sys.executable, "-S", "-c", inner])
        import time; time.sleep(60)
    """)
    serve = subprocess.Popen([sys.executable, "-S", "-c", script], stdout=subprocess.PIPE)
    assert serve.stdout is not None
    grandchild = int(serve.stdout.readline())
    assert start_time(grandchild) is not None
    serve.kill()
    serve.wait()
    # The grandchild holds the other end of this pipe: its end is our signal.
    assert serve.stdout.read() == b""
    serve.stdout.close()
    end = time.monotonic() + 60
    while start_time(grandchild) is not None:  # Its files are closed before it has ended.
        assert time.monotonic() < end


def test_whoever_descends_from_the_run_belongs_to_it_however_far_down(monkeypatch: pytest.MonkeyPatch) -> None:
    """None of those below has its mark, or its folder; a pid says nothing about who came first."""
    first = 1 << 30  # No process has such a pid.
    parents = {first + 5: 1, first + 7: first + 5, first + 2: first + 7, first + 1: first + 2, first + 9: 1}
    table = [(pid, parent, pid + 1000) for pid, parent in sorted(parents.items())]
    monkeypatch.setattr(reaper, "_processes", lambda: iter(table))
    run = reaper.ReapedRun("a-mark-of-nobody", "/nowhere/run")
    run.on_line(f"pid {first + 5} {first + 1005}")
    run.on_line(f"pid {first + 9} {first + 1008}")  # Another process has this one's pid by now.
    assert run.members() == [first + number for number in (1, 2, 5, 7)]
