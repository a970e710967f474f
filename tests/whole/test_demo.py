"""The demo as a new user meets it: the packaged checkpoint, the defaults, what the pages of docs say to type."""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import httpx
import psutil
import pytest

from tests.serving import ROOT, Serving, environment, family, serving, until

PAGES = ["README.md", "docs/using.md", "docs/operating.md"]


@pytest.fixture(scope="module")
def demo(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Serving]:
    with serving("demo", tmp_path_factory.mktemp("demo") / "run") as cluster:
        yield cluster


@pytest.fixture(autouse=True)
def settled(demo: Serving) -> Iterator[None]:
    yield
    if demo.process.poll() is None:
        demo.settle()


def test_what_serve_prints_is_ready_to_paste(demo: Serving) -> None:
    text = "\n".join(demo.lines)
    before, ready, after = text.partition(f"Twinpool is ready: {demo.url}\n")
    assert ready
    assert "://" not in before, "the only URL printed before that"
    curl = next(line for line in after.splitlines() if line.startswith("curl "))
    done = subprocess.run(curl, shell=True, capture_output=True, text=True, check=True, timeout=60)
    assert json.loads(done.stdout)["choices"][0]["text"]
    for worker in ("prefill-0", "decode-0"):
        assert worker in before


def test_the_demo_takes_at_most_two_gigabytes(demo: Serving) -> None:
    demo.complete("It was a fine morning, and", max_tokens=200)
    sizes = {f"{p.pid} {p.name()}": p.memory_full_info().pss for p in family(demo.process)}
    total = sum(sizes.values())
    print(f"{total / 2**20:.0f} MiB:", {k: f"{v / 2**20:.0f}" for k, v in sizes.items()})
    assert total <= 2 * 10**9


def test_completions_are_readable_words(demo: Serving) -> None:
    text = demo.complete("It was a fine morning, and the old man", max_tokens=60).text
    words = re.findall(r"[a-z]+", text.lower())
    common = {"the", "of", "and", "to", "a", "in", "was", "he", "his", "that", "it", "with", "had", "as", "her", "for"}
    assert len(words) > 20
    assert sum(w in common for w in words) > len(words) / 5, text


def blocks(page: str, language: str) -> list[str]:
    return re.findall(rf"^```{language}\n(.*?)^```", (ROOT / page).read_text(), re.DOTALL | re.MULTILINE)


@pytest.mark.slow
@pytest.mark.parametrize("page", PAGES)
def test_what_the_pages_say_to_type_works(demo: Serving, page: str, tmp_path: Path) -> None:
    shim = tmp_path / "twinpool"
    shim.write_text(f'#!/bin/sh\nexec {sys.executable} -m cluster.cli "$@"\n')
    shim.chmod(0o755)
    env = environment(demo.runtime) | {"PATH": f"{tmp_path}:{os.environ['PATH']}"}
    shell, python = blocks(page, "sh"), blocks(page, "python")
    assert shell
    for language, texts in (("sh", shell), ("python", python)):
        for text in texts:
            code = text.replace("http://127.0.0.1:8000", demo.url)
            command = ["bash", "-euo", "pipefail", "-c", code] if language == "sh" else [sys.executable, "-c", code]
            done = subprocess.run(command, env=env, capture_output=True, text=True, timeout=120, check=False)
            assert done.returncode == 0, (text, done.stdout, done.stderr)
            assert done.stdout.strip(), text
            assert '"error"' not in done.stdout, (text, done.stdout)


@pytest.mark.slow
def test_a_killed_serve_leaves_nothing(demo: Serving) -> None:
    """Last in this file: the cluster is gone afterwards."""
    relatives = family(demo.process)
    names = {p.pid: p.cmdline()[:3] for p in relatives}
    assert len(relatives) > 4
    ours = {c.laddr.port for p in relatives for c in p.net_connections() if c.status == psutil.CONN_LISTEN}
    assert int(demo.url.rpartition(":")[2]) in ours
    demo.process.send_signal(signal.SIGKILL)
    demo.process.wait()
    psutil.wait_procs(relatives, timeout=10)
    assert not {p.pid: names[p.pid] for p in relatives if p.is_running()}
    until(lambda: not list(demo.runtime.rglob("run-*.json")), "the run file to go", 10)
    left = {c.laddr.port for c in psutil.net_connections("tcp") if c.status == psutil.CONN_LISTEN}
    assert not ours & left
    pids = {str(p.pid) for p in relatives}
    shared = [p.name for p in Path("/dev/shm").iterdir() if pids & set(re.findall(r"\d+", p.name))]
    assert not shared
    assert not list(demo.runtime.rglob("*ray*"))
    assert demo.twinpool("status").returncode == 3
    with pytest.raises(httpx.ConnectError):
        httpx.get(f"{demo.url}/health")
