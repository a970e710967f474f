"""An end that is asked for has one exit code at any moment, leaves nothing behind, and is a drain once all serves.
Phases are reached by what a run prints or imports, never by waiting for so long."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import httpx
import psutil
import pytest

from tests.support.served_cluster import COMMAND, READY, ROOT, environment, processes_of, until

ASKED, INTERRUPTED = 0, 130
"""The codes that docs/operating/start.md names."""
SERVE = ("serve", "--port", "0")
CONTROLLER = ("controller", "--address", "127.0.0.1", "--port", "7400")
ONE_PROCESS = (*SERVE, "--set", "transfer.plane=local")
SLOW = ("--set", "faults.step_delay_s=0.01")
"""An answer is in its middle whenever a busy machine comes to what is done meanwhile."""
LONG = (*SLOW, "--set", "cluster.stop_timeout_s=300")
"""Longer than an answer takes on a machine that is busy."""
STOPS_AT = """
import sys, time
class StopsAt:
    def find_spec(self, name, path=None, target=None):
        if name == {module!r}:
            open("at", "w").close()
            while True:
                try:
                    time.sleep(0.01)
                except BaseException:
                    if not {swallows}:
                        raise
sys.meta_path.insert(0, StopsAt())
"""
"""A `sitecustomize` that holds a process where it imports a module; it may swallow what is raised meanwhile."""

AGAIN = """
import io, os, signal
real = os.fdopen
class Again(io.TextIOWrapper):
    def write(self, text):
        written = super().write(text)
        if "new requests are refused" in text:
            os.kill(os.getpid(), signal.SIGTERM)
        return written
def fdopen(fd, mode="r", *rest, **more):
    return Again(open(fd, "wb"), encoding="utf-8") if mode == "w" else real(fd, mode, *rest, **more)
os.fdopen = fdopen
"""
"""A `sitecustomize` with which a second signal comes while the first one's line is written to the terminal."""


class Run:
    """A command whose lines are read as they come."""

    def __init__(self, folder: Path, *words: str, paths: tuple[Path, ...] = (), group: bool = True) -> None:
        self.folder, self.lines = folder, list[str]()
        variables = environment(folder)
        variables["PYTHONPATH"] = os.pathsep.join([*map(str, paths), variables["PYTHONPATH"]])
        self.process = subprocess.Popen(
            [*COMMAND, *words], env=variables, cwd=folder, text=True,
            stdout=subprocess.PIPE, stderr=subprocess.STDOUT, start_new_session=group,
        )  # fmt: skip
        self._over = threading.Event()
        self._reader = threading.Thread(target=self._read, daemon=True)
        self._reader.start()

    def _read(self) -> None:
        assert self.process.stdout is not None
        for line in self.process.stdout:
            self.lines.append(line.rstrip())
        self._over.set()

    def line_with(self, text: str) -> str:
        """The first line that has `text`; waits for it."""
        until(lambda: self._over.is_set() or any(text in line for line in self.lines), f"a line with {text!r}", 180)
        found = [line for line in self.lines if text in line]
        assert found, self.lines
        return found[0]

    @property
    def url(self) -> str:
        return self.line_with(READY).partition(READY)[2].strip()

    def signalled(self, number: signal.Signals, times: int = 2) -> None:
        """As `timeout` does: the process, and then its group."""
        for _ in range(times):
            os.killpg(self.process.pid, number)

    def code(self) -> int:
        return self.process.wait(180)

    def nothing_is_left(self) -> None:
        until(lambda: not processes_of(self.folder), f"all processes of {self.folder} to be gone")
        assert not list(self.folder.glob("twinpool/run-*.json"))


@contextmanager
def running(folder: Path, *words: str, paths: tuple[Path, ...] = ()) -> Iterator[Run]:
    folder.mkdir(exist_ok=True)
    run = Run(folder, *words, paths=paths)
    try:
        yield run
    finally:
        run.process.kill()
        run.process.wait(60)


class Streamed:
    """A streamed answer, read in a thread."""

    def __init__(self, url: str, tokens: int) -> None:
        self.lines: list[str] = []
        self._thread = threading.Thread(target=self._read, args=(url, tokens))
        self._thread.start()
        until(lambda: len(self.lines) > 2, "the first tokens")

    def _read(self, url: str, tokens: int) -> None:
        body = {"prompt": "It was a fine morning", "max_tokens": tokens, "ignore_eos": True, "stream": True}
        with httpx.stream("POST", f"{url}/v1/completions", json=body, timeout=120) as answer:
            self.lines += [f"status {answer.status_code}"]
            try:
                self.lines.extend(answer.iter_lines())
            except httpx.HTTPError as error:
                self.lines.append(f"broken: {error!r}")

    def ended(self) -> list[str]:
        self._thread.join(120)
        return [line for line in self.lines if line]


def refuses_what_is_new(url: str) -> None:
    health = httpx.get(f"{url}/health", timeout=60)
    assert (health.status_code, health.json()["status"]) == (503, "draining")
    assert httpx.get(f"{url}/live", timeout=60).status_code == 200
    refused = httpx.post(f"{url}/v1/completions", json={"prompt": "x"}, timeout=60)
    assert (refused.status_code, refused.json()["error"]["code"]) == (503, "shutting_down")
    assert int(refused.headers["retry-after"]) > 0


def drains(run: Run, end: Callable[[], object], tokens: int = 700) -> None:
    """What runs is finished, to the last token, and what is new is refused meanwhile."""
    url = run.url
    answer = Streamed(url, tokens)
    end()
    run.line_with("new requests are refused")
    until(lambda: httpx.get(f"{url}/health", timeout=60).status_code == 503, "the router to be told", pause_s=0.01)
    refuses_what_is_new(url)
    lines = answer.ended()
    assert lines[-1] == "data: [DONE]", lines[-3:]
    assert '"length"' in lines[-2]


# ------------------------------------------------------------ before anything runs


@pytest.mark.slow
@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
@pytest.mark.parametrize(
    ("words", "module", "swallows", "code"),
    [
        pytest.param(SERVE, "twinpool.cli.command_line", False, ASKED, id="flags"),
        pytest.param(SERVE, "twinpool.cluster.serve.preflight", False, ASKED, id="preflight"),
        pytest.param(SERVE, "torch", True, ASKED, id="torch"),
        pytest.param(SERVE, "twinpool.cluster.serve.serve_cluster", False, ASKED, id="serve"),
        pytest.param(ONE_PROCESS, "twinpool.cluster.serve.serve_one_process", True, ASKED, id="one-process"),
        pytest.param(("demo",), "twinpool.cli.load.demo_command", False, ASKED, id="show"),
        pytest.param(CONTROLLER, "twinpool.cluster.controller.controller_process", False, ASKED, id="controller"),
        pytest.param(("status",), "twinpool.cli.operator.status_command", False, INTERRUPTED, id="status"),
    ],
)
def test_an_end_that_is_asked_for_while_modules_are_imported_has_its_code(
    tmp_path: Path, words: tuple[str, ...], module: str, swallows: bool, code: int, number: signal.Signals
) -> None:
    """The last one is a command that has not done its work; SIGTERM ends it as any process."""
    (tmp_path / "sitecustomize.py").write_text(STOPS_AT.format(module=module, swallows=swallows))
    with running(tmp_path / "run", *words, paths=(tmp_path,)) as run:
        until(lambda: (tmp_path / "run" / "at").exists() or run.process.poll() is not None, f"{module}")
        assert (tmp_path / "run" / "at").exists(), run.lines
        run.signalled(number)
        if code == INTERRUPTED and number is signal.SIGTERM:
            code = -signal.SIGTERM
        assert run.code() == code, run.lines
        assert not any("Traceback" in line for line in run.lines), run.lines
        run.nothing_is_left()


@pytest.mark.slow
def test_a_second_interrupt_that_comes_while_the_interpreter_ends_changes_no_code(tmp_path: Path) -> None:
    """The interpreter puts the default handlers back before it has freed everything; so does this hook."""
    (tmp_path / "sitecustomize.py").write_text(
        STOPS_AT.format(module="twinpool.cli.operator.status_command", swallows=False) + "import atexit, os, signal\n"
        "def late():\n    signal.signal(signal.SIGINT, signal.SIG_DFL)\n    os.kill(os.getpid(), signal.SIGINT)\n"
        "atexit.register(late)\n"
    )
    with running(tmp_path / "run", "status", paths=(tmp_path,)) as run:
        until(lambda: (tmp_path / "run" / "at").exists() or run.process.poll() is not None, "the import")
        run.signalled(signal.SIGINT, times=1)
        assert run.code() == INTERRUPTED, run.lines


# ------------------------------------------------------------ one process


@pytest.mark.slow
def test_one_process_that_is_asked_to_end_while_it_starts(tmp_path: Path) -> None:
    with running(tmp_path / "run", *ONE_PROCESS) as run:
        run.line_with(" logs ")
        run.signalled(signal.SIGTERM)
        assert run.code() == ASKED, run.lines
        assert "stopped while starting" in run.lines
        run.nothing_is_left()


@pytest.mark.slow
@pytest.mark.parametrize("more", [(), ("--colocate",)], ids=["two-pools", "colocated"])
def test_one_process_drains(tmp_path: Path, more: tuple[str, ...]) -> None:
    (tmp_path / "sitecustomize.py").write_text(AGAIN)
    with running(tmp_path / "run", *ONE_PROCESS, *LONG, *more, paths=(tmp_path,)) as run:
        drains(run, lambda: run.signalled(signal.SIGTERM))
        assert run.code() == ASKED, run.lines
        run.nothing_is_left()


@pytest.mark.slow
def test_a_second_request_ends_it_at_once_with_the_same_code(tmp_path: Path) -> None:
    with running(tmp_path / "run", *ONE_PROCESS, *LONG) as run:
        answer = Streamed(run.url, 1900)
        run.signalled(signal.SIGINT)
        run.line_with("a second signal ends them now")
        pause = threading.Event()
        while run.process.poll() is None:  # Until a second has gone by since the first one.
            run.process.send_signal(signal.SIGINT)
            pause.wait(0.2)
        assert run.code() == ASKED, run.lines
        assert any("asked again" in line for line in run.lines)
        assert answer.ended()[-1] != "data: [DONE]"
        run.nothing_is_left()


# ------------------------------------------------------------ clusters


@pytest.mark.slow
@pytest.mark.parametrize(("line", "number"), [("pages go by", signal.SIGINT), ("started on loopback", signal.SIGTERM)])
def test_a_cluster_that_is_asked_to_end_while_it_starts(tmp_path: Path, line: str, number: signal.Signals) -> None:
    """Ray is starting; workers are."""
    with running(tmp_path / "run", *SERVE) as run:
        run.line_with(line)
        run.signalled(number)
        assert run.code() == ASKED, run.lines
        assert "stopped while starting" in run.lines or any("not ended within" in line for line in run.lines)
        run.nothing_is_left()


@pytest.mark.slow
def test_a_cluster_drains(tmp_path: Path) -> None:
    """`timeout` signals the whole group: Ray and the workers go on until the answers have ended."""
    with running(tmp_path / "run", *SERVE, *LONG, "--routers", "2") as run:
        drains(run, lambda: run.signalled(signal.SIGTERM))
        assert run.code() == ASKED, run.lines
        run.nothing_is_left()


@pytest.mark.slow
@pytest.mark.parametrize("serve", [ONE_PROCESS, SERVE], ids=["one process", "cluster"])
def test_what_is_left_after_its_time_ends_with_an_error(tmp_path: Path, serve: tuple[str, ...]) -> None:
    with running(tmp_path / "short", *serve, *SLOW, "--set", "cluster.stop_timeout_s=0.2") as run:
        answer = Streamed(run.url, 1900)
        run.signalled(signal.SIGINT)
        lines = answer.ended()
        assert "the server is shutting down" in lines[-1], lines[-3:]
        assert run.code() == ASKED, run.lines
        run.nothing_is_left()


@pytest.mark.slow
def test_a_launch_that_is_interrupted_leaves_no_cluster(tmp_path: Path) -> None:
    with running(tmp_path / "run", *SERVE, "--detach") as run:
        run.line_with(" logs ")
        run.signalled(signal.SIGTERM)
        assert run.code() == INTERRUPTED, run.lines
        run.nothing_is_left()


@pytest.mark.slow
def test_the_demo_ends_with_the_same_code_while_its_cluster_starts(tmp_path: Path) -> None:
    with running(tmp_path / "run", "demo", "--port", "0") as run:
        run.line_with("starting two prefill")
        until(lambda: len(psutil.Process(run.process.pid).children()) > 0, "its cluster to be started")
        run.signalled(signal.SIGTERM)
        assert run.code() == ASKED, run.lines
        run.nothing_is_left()


@pytest.mark.slow
def test_a_child_that_cannot_start_is_shown_with_its_last_lines_before_all_is_ended(tmp_path: Path) -> None:
    script = (
        "import sys\nfrom twinpool.cluster.serve import service\n"
        "service.ROUTER = (sys.executable, '-c', 'raise SystemExit(\"no port is free on this moon\")')\n"
        "from twinpool.cli.commands import main\nmain()\n"
    )
    tmp_path.joinpath("run").mkdir()
    done = subprocess.run(
        [sys.executable, "-P", "-c", script, *SERVE],
        env=environment(tmp_path / "run") | {"PYTHONPATH": str(ROOT)},
        capture_output=True, text=True, timeout=180, check=False,
    )  # fmt: skip
    assert done.returncode == 1, done.stdout
    error = done.stdout.partition("error: ")[2].splitlines()
    assert error[0].startswith("the router ended (exit code 1)"), done.stdout
    assert error[1].strip() == "no port is free on this moon"
