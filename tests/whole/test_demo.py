"""The demo as a new user meets it: its start, what the pages of docs say to type, its faults, and its end."""

from __future__ import annotations

import json
import os
import re
import shlex
import signal
import socket
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import httpx
import psutil
import pytest

from tests.support.served_cluster import (
    COMES_BACK_S,
    READY,
    ROOT,
    Serving,
    environment,
    family,
    own_packages,
    serving,
    until,
)

PAGES = ["README.md", "docs/using.md", "docs/operating/watch.md"]
PAGES += [f"docs/using/{name}.md" for name in ("coming-back", "other-apis", "structured-output", "tools")]

GIB = 1 << 30


def mark_of(pid: int) -> str:
    """The mark that every process of a run carries, which is also the name of its temporary folder."""
    (found,) = {
        match.group(0)
        for child in psutil.Process(pid).children()
        for part in child.cmdline()
        if (match := re.search(r"twinpool-\w{8}", part))
    }
    return found


def members(mark: str) -> list[psutil.Process]:
    """Processes of the run, whoever their parent is by now."""
    found = []
    for process in psutil.process_iter():
        try:
            told = [*process.cmdline(), process.environ().get("TWINPOOL_RUN", "")]
            if any(mark in part for part in told) and process.status() != psutil.STATUS_ZOMBIE:
                found.append(process)
        except psutil.Error:
            continue
    return found


def segments_of(processes: list[psutil.Process]) -> set[str]:
    """Named shared memory that they map."""
    maps = "".join(Path(f"/proc/{p.pid}/maps").read_text() for p in processes)
    return set(re.findall(r"(/dev/shm/\S+)$", maps, re.MULTILINE))


def nothing_is_left(cluster: Serving, mark: str, segments: set[str]) -> None:
    until(lambda: not members(mark), "all processes to be gone")
    assert not [p for p in ("/tmp", os.environ.get("TMPDIR", "/tmp")) if (Path(p) / mark).exists()]
    assert not list(cluster.runtime.glob("twinpool/run-*.json"))
    assert not [s for s in segments if Path(s).exists()]
    with socket.socket() as port:
        port.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        port.bind(("127.0.0.1", int(cluster.url.rpartition(":")[2])))


def expect_killed(cluster: Serving) -> None:
    """Kill `serve` after it has worked; nothing of it is left."""
    cluster.complete_all(["It was a fine morning"] * 4, max_tokens=16)
    mark, processes = mark_of(cluster.process.pid), family(cluster.process)
    segments = segments_of(processes)
    cluster.process.kill()
    cluster.process.wait(60)
    nothing_is_left(cluster, mark, segments)
    assert cluster.twinpool("status").returncode == 3


def blocks(page: str, language: str) -> list[str]:
    return re.findall(rf"^```{language}\n(.*?)^```", (ROOT / page).read_text(), re.DOTALL | re.MULTILINE)


@pytest.fixture(scope="module")
def demo(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Serving]:
    folder = tmp_path_factory.mktemp("demo")
    own_packages(folder)  # Where a user's code has names of ours, it isn't run.
    with serving("demo", folder) as cluster:
        yield cluster


@pytest.mark.slow
def test_the_url_comes_last_below_a_short_summary_and_the_curl_line_works(demo: Serving) -> None:
    until(lambda: demo.lines[-1] == READY + demo.url, "the URL")
    steps = [i for i, line in enumerate(demo.lines) if re.match(r" +\d+\.\d s +", line)]
    assert not [line for line in demo.lines[: steps[-1] + 1] if "://" in line], "no URL before it serves"
    assert any("ray " in demo.lines[i] for i in steps), "steps with seconds"
    words = [line.split(maxsplit=1) for line in demo.lines[steps[-1] + 1 :] if line.startswith("  ")]
    told = {line[0]: line[1] for line in words}
    assert [line[0] for line in words][:3] == ["model", "workers", "memory"]
    assert "make little sense" in told["model"]
    assert re.match(r"\d+ prefill, \d+ decode on ", told["workers"])
    assert not any("invariant:" in line for line in demo.lines), "numerics are among the details"
    line = next(line for line in demo.lines if line.startswith("curl "))
    done = subprocess.run(shlex.split(line), capture_output=True, timeout=60, check=True)
    assert len(json.loads(done.stdout)["choices"][0]["text"].split()) > 5
    details = demo.twinpool("status", "--verbose").stdout
    assert "invariant:" in details
    assert re.search(r"decode-0 .*MiB", details), "the tables of the start"
    demo.settle()


@pytest.mark.slow
def test_the_demo_takes_at_most_two_gigabytes(demo: Serving) -> None:
    demo.complete_all([f"Chapter {i}. " * 20 for i in range(32)], max_tokens=32)
    demo.settle()
    assert sum(process.memory_full_info().pss for process in family(demo.process)) < 2 * GIB


@pytest.mark.slow
def test_of_rays_processes_none_runs_that_nobody_asks(demo: Serving) -> None:
    lines = [" ".join(process.cmdline()) for process in family(demo.process)]
    assert any("raylet" in line for line in lines)
    assert not [line for line in lines if "monitor.py" in line or "dashboard.py" in line]


@pytest.mark.slow
def test_workers_come_no_later_than_anything_else_on_the_machine(demo: Serving) -> None:
    """Ray would run them at niceness 15."""
    workers = [p for p in family(demo.process) if any("WorkerActor" in part for part in p.cmdline())]
    assert len(workers) == 2
    assert {p.nice() for p in workers} == {psutil.Process(demo.process.pid).nice()}


@pytest.mark.slow
def test_completions_are_readable_words(demo: Serving) -> None:
    text = demo.complete("It was a fine morning, and the old man", max_tokens=60).text
    words = re.findall(r"[a-z]+", text.lower())
    common = {"the", "of", "and", "to", "a", "in", "was", "he", "his", "that", "it", "with", "had", "as", "her", "for"}
    assert len(words) > 20
    assert sum(w in common for w in words) > len(words) / 5, text


@pytest.mark.slow
@pytest.mark.parametrize("page", PAGES)
def test_what_the_pages_say_to_type_works(demo: Serving, page: str, tmp_path: Path) -> None:
    shim = tmp_path / "twinpool"
    shim.write_text(f'#!/bin/sh\nexec {sys.executable} -m twinpool.cli.commands "$@"\n')
    shim.chmod(0o755)
    env = environment(demo.runtime) | {"PATH": f"{tmp_path}:{os.environ['PATH']}"}
    shell, python = blocks(page, "sh"), blocks(page, "python")
    assert shell or python
    for language, texts in (("sh", shell), ("python", python)):
        for text in texts:
            code = text.replace("http://127.0.0.1:8000", demo.url)
            command = ["bash", "-euo", "pipefail", "-c", code] if language == "sh" else [sys.executable, "-c", code]
            done = subprocess.run(command, env=env, capture_output=True, text=True, timeout=120, check=False)
            assert done.returncode == 0, (text, done.stdout, done.stderr)
            assert done.stdout.strip(), text
            assert '"error"' not in done.stdout, (text, done.stdout)


@pytest.mark.slow
def test_the_logs_lie_in_one_folder_and_hold_one_event_a_line(demo: Serving) -> None:
    folder = Path(next(line for line in demo.lines if " logs " in line).split()[-1])
    assert {"serve.log", "router.log", "prefill-0.log", "decode-0.log"} <= {path.name for path in folder.iterdir()}
    for line in (folder / "decode-0.log").read_text().splitlines():
        assert {"time", "level", "event", "process"} <= set(json.loads(line))


@pytest.mark.slow
def test_all_ports_but_the_routers_are_on_loopback(demo: Serving) -> None:
    for process in family(demo.process):
        for connection in process.net_connections("inet"):
            if connection.status == psutil.CONN_LISTEN:
                assert connection.laddr.ip.removeprefix("::ffff:") == "127.0.0.1", process


@pytest.mark.slow
def test_a_request_that_comes_while_all_workers_are_down_is_answered(demo: Serving) -> None:
    for worker in demo.status().values():
        os.kill(worker["pid"], signal.SIGKILL)
    assert len(demo.complete("It was a fine morning", max_tokens=8).tokens) == 8
    until(
        lambda: {w["state"] for w in demo.status().values()} == {"ready"},
        "both workers to be back",
        pause_s=COMES_BACK_S,
    )
    assert {w["incarnation"] for w in demo.status().values()} == {2}
    told = [line for line in demo.lines if "died" in line]
    assert any("decode-0 died (killed, signal 9); restarting, incarnation 2" in line for line in told)
    demo.settle()


@pytest.mark.slow
def test_a_router_that_dies_is_started_again_on_its_port(demo: Serving) -> None:
    (router,) = [
        child for child in psutil.Process(demo.process.pid).children() if "twinpool.router.main" in child.cmdline()
    ]
    router.kill()

    def answers() -> bool:
        try:
            return httpx.get(f"{demo.url}/health", timeout=10).status_code == 200
        except httpx.HTTPError:
            return False

    until(lambda: any("router died (signal 9); restarting" in line for line in demo.lines), "the news")
    until(answers, "a new router")
    assert len(demo.complete("It was a fine morning", max_tokens=8).tokens) == 8
    demo.settle()


@pytest.mark.slow
def test_a_kill_of_serve_leaves_nothing_behind(demo: Serving) -> None:
    """The last test of this cluster: it is gone afterwards."""
    assert len(family(demo.process)) > 10
    expect_killed(demo)


@pytest.mark.slow
def test_one_process_serves_and_ends_without_ray(tmp_path: Path) -> None:
    with serving("demo", tmp_path, "--decode", "2", sections={"transfer": {"plane": "local"}}) as cluster:
        (root, reaper) = family(cluster.process)
        assert root.pid == cluster.process.pid
        assert "reaper.py" in " ".join(reaper.cmdline())
        answers = cluster.complete_all(["It was a fine morning"] * 8, max_tokens=16)
        assert len({tuple(answer.tokens) for answer in answers}) == 1
        trace = (
            "replay",
            str(ROOT / "bench/traces/conversation_200.jsonl"),
            "--limit",
            "12",
            "--scale-lengths",
            "0.01",
        )
        replayed = cluster.twinpool(*trace, "--url", cluster.url, "--json", str(tmp_path / "replay.json"))
        assert replayed.returncode == 0, replayed.stdout + replayed.stderr
        figures = json.loads((tmp_path / "replay.json").read_text())["figures"]
        assert (figures["answered"], figures["errors"], figures["wrong"]) == (12, {}, {})
        drained = cluster.twinpool("drain", "decode-1")
        assert drained.returncode == 0, drained.stderr
        assert cluster.status()["decode-1"]["state"] == "left"
        (router,) = json.loads(cluster.twinpool("status", "--json").stdout)["routers"]
        assert (router["name"], f"http://{router['address']}", router["kept"]) == ("router", cluster.url, True)
        assert "not kept" not in cluster.twinpool("status").stdout
        assert cluster.check()["ok"]
        mark = mark_of(cluster.process.pid)
    nothing_is_left(cluster, mark, set())


@pytest.mark.slow
def test_a_kill_of_one_process_leaves_nothing_behind(tmp_path: Path) -> None:
    with serving("demo", tmp_path, sections={"transfer": {"plane": "local"}}) as cluster:
        expect_killed(cluster)
