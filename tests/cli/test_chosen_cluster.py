"""Which cluster of a machine a command acts on: it is named first, and a change among several is nobody's guess."""

from __future__ import annotations

import argparse
import json
import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.cluster.router_stub import RouterStub, router_stub, row
from twinpool.cli import command_line
from twinpool.cli import commands as cli
from twinpool.cluster.processes.process_ids import start_time
from twinpool.cluster.processes.run_folder import live_runs, run_file_path, write_run_file

CHANGES = {
    "drain": ["decode-0"], "undrain": ["decode-0"], "role": ["decode-0", "prefill"], "add": ["decode"],
    "scale": ["decode=2"], "restart": ["decode-0"], "cordon": ["here"], "uncordon": ["here"],
    "apply": ["FILE"], "upgrade": ["--python", sys.prefix], "down": [],
    "adapters": ["unload", "a-name"], "weights": ["update", "/a/folder"], "flush": [], "pause": [], "resume": [],
    "sleep": [], "wake": [],
}  # fmt: skip
LOOKS = {"status": [], "check": [], "explain": ["an-id"]}
ELSEWHERE = {"replay", "plan", "batch"}
"""Commands whose URL is any endpoint's."""


@pytest.fixture
def stub(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[RouterStub]:
    monkeypatch.setenv("XDG_RUNTIME_DIR", str(tmp_path))
    monkeypatch.delenv("TWINPOOL_URL", raising=False)
    with router_stub() as running:
        yield running


@pytest.fixture
def another(stub: RouterStub, tmp_path: Path) -> Iterator[subprocess.Popen[bytes]]:
    """A second cluster of this machine, older than the first, with a process of its own."""
    with subprocess.Popen([sys.executable, "-c", "import sys; sys.stdin.read()"], stdin=subprocess.PIPE) as process:
        write_run_file("http://127.0.0.1:1", tmp_path, "other", keeper=process.pid, folder="f", config="/a/file.yaml")
        os.utime(run_file_path(process.pid), (1, 1))
        yield process
        process.kill()


def words_of(command: str, given: list[str], tmp_path: Path) -> list[str]:
    (file := tmp_path / "cluster.yaml").write_text("")
    return [command, *(str(file) if word == "FILE" else word for word in given)]


def twinpool(*words: str) -> int:
    return cli.run(command_line.parser().parse_args(words))


def test_every_command_that_finds_a_cluster_is_known_to_change_it_or_only_to_look() -> None:
    (commands,) = [
        action.choices for action in command_line.parser()._actions if isinstance(action, argparse._SubParsersAction)
    ]
    finding = {name for name, parser in commands.items() if "--url" in parser._option_string_actions}
    assert finding == CHANGES.keys() | LOOKS.keys() | ELSEWHERE


@pytest.mark.parametrize("command", CHANGES)
def test_what_changes_something_refuses_to_choose_among_several(
    command: str,
    stub: RouterStub,
    another: subprocess.Popen[bytes],
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:
    write_run_file(stub.url, tmp_path, "demo")
    assert twinpool(*words_of(command, CHANGES[command], tmp_path)) == 2
    out, said = capsys.readouterr()
    assert out == ""
    first, *others = said.splitlines()
    assert first == "error: 2 clusters run on this machine, and nothing was changed: say which one it is for"
    assert others[0].startswith(f"  --url {stub.url}, model demo, up ")
    assert others[1].startswith("  --url http://127.0.0.1:1, model other, up ")
    assert others[1].endswith("of /a/file.yaml, detached")
    assert stub.calls == []
    assert another.poll() is None


@pytest.mark.parametrize("command", sorted((CHANGES.keys() | LOOKS.keys()) - {"status", "upgrade", "down"}))
def test_the_cluster_is_named_first_and_not_on_standard_output(
    command: str, stub: RouterStub, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    write_run_file(stub.url, tmp_path, "demo")
    stub.refusal = (409, "not now")
    stub.report = {"ok": False, "workers": []}
    twinpool(*words_of(command, (CHANGES | LOOKS)[command], tmp_path))
    out, said = capsys.readouterr()
    assert said.splitlines()[0].startswith(f"cluster {stub.url}, model demo, up ")
    assert said.splitlines()[0].endswith("(the only one on this machine)")
    assert stub.url not in out


def test_a_look_takes_the_newest_and_says_so_and_json_stays_json(
    stub: RouterStub, another: subprocess.Popen[bytes], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    write_run_file(stub.url, tmp_path, "demo")
    for command in ("status", "check"):
        assert twinpool(command, "--json") == 0
        out, said = capsys.readouterr()
        json.loads(out)
        assert said.startswith(f"cluster {stub.url}, model demo")
        assert "the newest of 2 on this machine; --url chooses another" in said


@pytest.mark.parametrize("by", ["flag", "variable"])
def test_one_that_is_named_is_changed_among_several(
    by: str,
    stub: RouterStub,
    another: subprocess.Popen[bytes],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    write_run_file(stub.url, tmp_path, "demo")
    if by == "variable":
        monkeypatch.setenv("TWINPOOL_URL", stub.url + "/")
    stub.ordered = [row("decode-0", outcome="stays")]
    assert twinpool("cordon", "here", *(["--url", stub.url] if by == "flag" else [])) == 0
    assert stub.calls == [("POST", "/cluster/cordon/here")]
    assert capsys.readouterr().err.splitlines()[0].startswith(f"cluster {stub.url}, model demo")


def test_down_says_what_it_ends_and_ends_no_other(
    stub: RouterStub, another: subprocess.Popen[bytes], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert twinpool("down", "--url", "http://127.0.0.1:2") == 3
    capsys.readouterr()
    signal.signal(signal.SIGCHLD, signal.SIG_DFL)
    assert twinpool("down") == 0
    out, said = capsys.readouterr()
    assert said.startswith("ends cluster http://127.0.0.1:1, model other, up ")
    assert "the only one on this machine" in said
    assert out == "http://127.0.0.1:1 is down\n"


def test_a_cluster_that_another_supervisor_takes_over_keeps_its_time(stub: RouterStub, tmp_path: Path) -> None:
    path = write_run_file(stub.url, tmp_path, "demo")
    tree = json.loads(path.read_text()) | {"since": 1000.0}
    path.write_text(json.dumps(tree))
    write_run_file(stub.url, tmp_path, "demo")
    assert [run.since for run in live_runs()] == [1000.0]
    path.write_text(json.dumps(tree | {"started": (start_time(os.getpid()) or 0) - 1}))
    write_run_file(stub.url, tmp_path, "demo")
    assert live_runs()[0].since > 1000.0, "that file was of another process"


def test_undrain_waits_until_the_worker_serves_unless_told_not_to(
    stub: RouterStub, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr("twinpool.cli.operator.pool_commands.POLL_S", 0.0)
    stub.ordered = [row("decode-0", "left", incarnation=3, outcome="starts again")]
    starting, serving = row("decode-0", "starting", incarnation=4), row("decode-0", "ready", incarnation=4)
    stub.tables = [[row("decode-0", "left", incarnation=3)], [starting], [starting], [serving]]
    assert twinpool("undrain", "decode-0", "--url", stub.url) == 0
    assert len(stub.tables) == 1
    assert capsys.readouterr().out.splitlines()[:2] == ["decode-0 starts again", "decode-0 serves on here"]
    stub.calls.clear()
    assert twinpool("undrain", "decode-0", "--no-wait", "--url", stub.url) == 0
    assert stub.calls == [("POST", "/cluster/undrain/decode-0")]


def test_undrain_of_one_that_still_drains_ends_as_soon_as_it_admits(
    stub: RouterStub, capsys: pytest.CaptureFixture[str]
) -> None:
    stub.ordered = [row("decode-0", "ready", incarnation=2, outcome="admits again")]
    stub.tables = [[row("decode-0", "ready", incarnation=2)]]
    assert twinpool("undrain", "decode-0", "--url", stub.url) == 0
    stub.ordered = [row("decode-0", "unreachable", outcome="can't be reached: no link")]
    assert twinpool("undrain", "decode-0", "--url", stub.url) == 1


@pytest.mark.parametrize("words", [["drain", "decode-0"], ["role", "decode-0", "prefill"]])
def test_an_order_that_is_not_waited_for_is_given_and_no_more(stub: RouterStub, words: list[str]) -> None:
    stub.ordered = [row("decode-0", "draining")]
    if words[0] == "role":
        stub.answer = lambda method, path: (stub.calls.append((method, path)), (200, {"incarnation": 1}))[1]  # type: ignore[method-assign, func-returns-value]
    assert twinpool(*words, "--no-wait", "--url", stub.url) == 0
    assert len(stub.calls) == 1
