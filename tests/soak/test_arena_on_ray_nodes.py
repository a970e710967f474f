"""A cluster that has joined somebody else's Ray: its nodes get arena agents, as actors, and lose them with it."""

from __future__ import annotations

import os
import random
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import httpx
import psutil
import pytest

from tests.support.checkpoints import Oracle, compare, make_checkpoint
from tests.support.served_cluster import environment, serving, until
from twinpool.cluster.processes.free_port import free_port

PLACES = '{"twinpool_prefill": 1, "twinpool_decode": 1}'


@contextmanager
def ray_node(folder: Path, port: int) -> Iterator[psutil.Process]:
    """A Ray of one node, which ends with all that it started."""
    command = [
        str(Path(sys.executable).with_name("ray")), "start", "--head", "--block", f"--port={port}",
        "--include-dashboard=false", f"--resources={PLACES}", "--num-cpus=2", f"--temp-dir={folder}",
        "--object-store-memory=80000000",
    ]  # fmt: skip
    env = environment(folder) | {"RAY_AUTH_MODE": "disabled"}
    process = subprocess.Popen(command, env=env, stdout=subprocess.DEVNULL, start_new_session=True)
    root = psutil.Process(process.pid)
    try:
        yield root
    finally:
        mine = [root, *root.children(recursive=True)]
        process.send_signal(signal.SIGTERM)
        _, alive = psutil.wait_procs(mine, timeout=20)
        for left in alive:
            left.kill()
        process.wait(20)
        shutil.rmtree(folder, ignore_errors=True)


def own_address() -> str:
    """This machine's, as Ray finds it: of the way that packets would take; none is sent."""
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        probe.connect(("192.0.2.1", 9))
        return str(probe.getsockname()[0])


def arenas_below(root: psutil.Process) -> list[str]:
    """The segments that processes of this Ray hold open."""
    found = set()
    for process in root.children(recursive=True):
        try:
            links = [os.readlink(fd) for fd in Path(f"/proc/{process.pid}/fd").iterdir()]
        except OSError:
            continue
        found |= {link for link in links if "twinpool-arena" in link}
    return sorted(found)


@pytest.mark.soak
@pytest.mark.timeout(900)
def test_a_node_of_a_joined_ray_keeps_host_memory_until_the_cluster_leaves(tmp_path: Path) -> None:
    folder = make_checkpoint(tmp_path / "model", "qwen3", seed=23)
    oracle, rng, port = Oracle(folder), random.Random(1), free_port("127.0.0.1", 0)
    prompt = [rng.randrange(1, 300) for _ in range(300)]
    sections = {
        "cache": {"device_tokens": 8192, "host_bytes": 24 << 20, "load_back": "always"},
        "cluster": {"start_timeout_s": 300},
    }
    # Its sockets lie deep below, and their paths may not be long.
    ray = Path(tempfile.mkdtemp(prefix="ray-", dir="/tmp"))
    with ray_node(ray, port) as root:
        with serving(
            folder, tmp_path / "run", "--ray-address", f"{own_address()}:{port}", sections=sections, ready_within=400
        ) as cluster:

            def row(name: str) -> dict[str, object]:
                rows = httpx.get(f"{cluster.url}/cluster/status", timeout=60).json()["workers"]
                return next(r for r in rows if r["name"] == name)

            first = cluster.complete(prompt, max_tokens=8)
            assert compare(oracle, prompt, first.tokens).equal
            assert len(arenas_below(root)) == 2
            pid = row("prefill-0")["pid"]
            assert isinstance(pid, int)
            os.kill(pid, signal.SIGKILL)
            until(lambda: row("prefill-0")["state"] == "ready" and row("prefill-0")["pid"] != pid, "its successor", 300)
            again = cluster.complete([*prompt, *first.tokens, 5, 6, 7], max_tokens=8)
            assert again.twinpool["cached_by_tier"]["host"] == len(prompt) // 16 * 16
        until(lambda: not arenas_below(root), "the memory to go with the cluster", 30)
