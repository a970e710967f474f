"""A cluster on a machine that has more to do than it can: too many workers asked for, busy neighbours, a full disk.

Throughout, every answer is exact or refused by words, those that served keep their incarnations while the processor is
what lacks, and when the load ends all is as before.
"""

from __future__ import annotations

import contextlib
import os
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import psutil
import pytest

from tests.support.changing_cluster import WAIT_S, Load, ready, some_prompts
from tests.support.checkpoints import Oracle, make_checkpoint
from tests.support.served_cluster import Serving, serving, until
from twinpool.cluster.assembly.node_shares import cores

BUSY = 100
BUSY_S = 60.0
DISK = "48m"
REFUSED = ("503", "429", "no worker", "not ready", "unavailable", "overloaded", "try again")
"""What refusals say: a client is told, and nothing else has come to it."""


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_checkpoint(tmp_path_factory.mktemp("model"), "qwen3", seed=60)


@contextlib.contextmanager
def busy(count: int) -> Iterator[None]:
    """So many processes that compute all the while, with the priority of any other."""
    processes = [subprocess.Popen([sys.executable, "-S", "-c", "while True: pass"]) for _ in range(count)]
    try:
        yield
    finally:
        for process in processes:
            process.kill()
        for process in processes:
            process.wait()


@contextlib.contextmanager
def watched(cluster: Serving) -> Iterator[list[list[dict[str, Any]]]]:
    """Every table that the cluster shows meanwhile."""
    seen: list[list[dict[str, Any]]] = []
    over = threading.Event()

    def look() -> None:
        while not over.wait(0.3):
            with contextlib.suppress(AssertionError, ValueError, subprocess.SubprocessError):
                seen.append(list(cluster.status().values()))

    thread = threading.Thread(target=look)
    thread.start()
    try:
        yield seen
    finally:
        over.set()
        thread.join(WAIT_S)


def incarnations(cluster: Serving) -> dict[str, int]:
    return {name: row["incarnation"] for name, row in cluster.status().items()}


@pytest.mark.soak
@pytest.mark.timeout(1200)
def test_more_than_fits_is_refused_and_what_fits_and_busy_neighbours_harm_no_answer(
    model: Path, tmp_path: Path
) -> None:
    oracle = Oracle(model)
    sections = {"cache": {"device_tokens": 8192}, "cluster": {"start_timeout_s": 300}}
    with serving(model, tmp_path / "run", sections=sections, orderly=False) as cluster:
        load = Load(cluster.url, cluster.model, some_prompts(1), streams=3)
        before = incarnations(cluster)
        with load.running():
            load.more()
            for count in (60, 400):
                refused = cluster.twinpool("scale", f"decode={count}", timeout=WAIT_S)
                assert refused.returncode == 1
                assert f"{count - 1} more decode workers would not fit" in refused.stderr, refused.stderr
                assert "(cluster.workers_per_core)" in refused.stderr
                assert incarnations(cluster) == before, "nothing was added"
                load.more()
            with watched(cluster) as seen:
                more = cluster.twinpool("scale", "decode=6", timeout=600)
                assert more.returncode == 0, more.stdout + more.stderr
            at_once = max(sum(row["state"] == "starting" and row["incarnation"] > 0 for row in rows) for rows in seen)
            assert at_once <= max(2, cores() // 2)
            assert any("its turn" in row["waits"] for rows in seen for row in rows), "who waits says so"
            load.more()
            assert {name: n for name, n in incarnations(cluster).items() if name in before} == before
            down = cluster.twinpool("scale", "decode=1", timeout=600)
            assert down.returncode == 0, down.stdout + down.stderr
            calm, began = len(load.answers), time.monotonic()
            with busy(BUSY):
                time.sleep(BUSY_S)
                answered = len(load.answers) - calm
            load.more()
            print(f"{answered} answers in {time.monotonic() - began:.0f} s beside {BUSY} busy processes")
        load.verify(oracle)
        after = incarnations(cluster)
        assert {name: after[name] for name in before} == before, "nobody lost its lease"
        ready(cluster, prefill=1, decode=1)
        cluster.settle()
    print(f"{len(load.answers)} answers, all exact")


@contextlib.contextmanager
def small_disk() -> Iterator[Path]:
    """A file system of its own with a few MB, at a path that is short enough for sockets below it."""
    folder = Path(tempfile.mkdtemp(prefix="td", dir="/tmp"))
    mounted = subprocess.run(["mount", "-t", "tmpfs", "-o", f"size={DISK}", "tmpfs", str(folder)], check=False)
    if mounted.returncode:
        folder.rmdir()
        pytest.skip("this machine lets nobody mount a file system")
    try:
        yield folder
    finally:
        until(
            lambda: not subprocess.run(["umount", str(folder)], check=False, capture_output=True).returncode, "umount"
        )
        folder.rmdir()


def fill(path: Path) -> None:
    """Write until there is no room for another byte."""
    with contextlib.suppress(OSError), path.open("wb", buffering=0) as file:
        for size in (1 << 20, 1 << 12, 1):
            with contextlib.suppress(OSError):
                while True:
                    file.write(b"x" * size)


@pytest.mark.soak
@pytest.mark.timeout(900)
def test_a_full_disk_costs_no_exact_answer_and_all_is_back_once_it_has_room(model: Path, tmp_path: Path) -> None:
    """Run folder, table, logs and storage are on it."""
    oracle = Oracle(model)
    with small_disk() as disk:
        sections: dict[str, dict[str, Any]] = {
            "cache": {"device_tokens": 8192, "host_bytes": 8 << 20, "storage.backend": "file"},
            "cluster": {"start_timeout_s": 300},
        }
        sections["cache"]["storage.path"] = str(disk / "pages")
        with serving(model, disk / "run", sections=sections, orderly=False, temporary=disk) as cluster:
            load = Load(cluster.url, cluster.model, some_prompts(2), streams=3)
            with load.running():
                load.more()
                fill(disk / "filler")
                assert not os.statvfs(disk).f_bavail
                time.sleep(30.0)
                refused, load.failures[:] = list(load.failures), []
                (disk / "filler").unlink()
                until(lambda: _serves(cluster), "all to serve again", WAIT_S)
                refused += load.failures
                load.failures.clear()
                load.more(8)
            strange = [text for text in refused if not any(word in text.lower() for word in REFUSED)]
            assert not strange, strange[:5]
            load.verify(oracle)
            ready(cluster, prefill=1, decode=1)
        print(f"{len(load.answers)} answers, all exact; {len(refused)} refused while the disk was full")


def _serves(cluster: Serving) -> bool:
    with contextlib.suppress(AssertionError, ValueError, subprocess.SubprocessError, psutil.Error):
        return [row["state"] for row in cluster.status().values() if row["state"] != "left"] == ["ready", "ready"]
    return False
