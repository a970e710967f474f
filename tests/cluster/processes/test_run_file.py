from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from twinpool.cluster.processes import run_folder as runfile
from twinpool.cluster.processes.process_ids import kill_process, same_process, start_time


@pytest.fixture(autouse=True)
def runtime(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("XDG_RUNTIME_DIR", str(tmp_path))
    return tmp_path / "twinpool"


def _plant(folder: Path, pid: int, started: int, url: str) -> Path:
    folder.mkdir(exist_ok=True)
    path = folder / f"run-{pid}.json"
    path.write_text(json.dumps({"url": url, "pid": pid, "started": started, "logs": "", "model": "m"}))
    return path


def test_a_live_run_is_found(tmp_path: Path) -> None:
    assert runfile.newest_live_run() is None
    runfile.write_run_file("http://127.0.0.1:8000", tmp_path, "demo")
    run = runfile.newest_live_run()
    assert run is not None
    assert (run.url, run.pid, run.model) == ("http://127.0.0.1:8000", os.getpid(), "demo")


def test_a_run_whose_pid_belongs_to_another_process_now_is_stale(runtime: Path) -> None:
    started = start_time(os.getpid())
    assert started is not None
    path = _plant(runtime, os.getpid(), started - 1, "http://old")
    assert runfile.newest_live_run() is None
    assert not path.exists()


def test_the_newest_live_run_wins(runtime: Path, tmp_path: Path) -> None:
    parent = os.getppid()
    started = start_time(parent)
    assert started is not None
    path = _plant(runtime, parent, started, "http://older")
    os.utime(path, (1, 1))
    runfile.write_run_file("http://newer", tmp_path, "demo")
    run = runfile.newest_live_run()
    assert run is not None
    assert run.url == "http://newer"


def test_a_run_is_found_by_the_file_that_it_was_launched_with(
    runtime: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    runfile.write_run_file("http://one", tmp_path, "demo", config=str(tmp_path / "cluster.yaml"))
    monkeypatch.chdir(tmp_path)
    run = runfile.live_run_of(Path("cluster.yaml"))
    assert run is not None
    assert run.url == "http://one"
    assert runfile.live_run_of(Path("other.yaml")) is None
    assert runfile.live_run_of(runtime / "cluster.yaml") is None


def test_a_damaged_run_file_is_passed_over(runtime: Path) -> None:
    runtime.mkdir()
    (runtime / "run-1.json").write_text("{")
    (runtime / "run-2.json").write_text('{"url": 3}')
    assert runfile.newest_live_run() is None


def test_a_process_is_not_killed_when_its_start_time_differs() -> None:
    child = subprocess.Popen([sys.executable, "-S", "-c", "input()"], stdin=subprocess.PIPE)
    try:
        started = start_time(child.pid)
        assert started is not None
        kill_process(child.pid, started + 1)
        assert same_process(child.pid, started)
        kill_process(child.pid, started)
        assert child.wait(60) == -9
        assert start_time(child.pid) is None
    finally:
        child.kill()
        child.wait()
        assert child.stdin is not None
        child.stdin.close()
