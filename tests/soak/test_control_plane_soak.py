"""A detached cluster whose control plane is killed part by part under load: the controller that leads, Ray's control
store, the supervisor with it, and the server that holds both tables. Every answer exact, no worker started again."""

from __future__ import annotations

import json
import signal
import threading
import time
from pathlib import Path
from typing import Any

import psutil
import pytest

from tests.support.changing_cluster import WAIT_S, Detached, Load, command, detached, kill, ready, some_prompts
from tests.support.checkpoints import Oracle, make_checkpoint
from tests.support.redis_servers import LedgerServer
from tests.support.served_cluster import until


def controllers(cluster: Detached) -> dict[str, Any]:
    done = cluster.twinpool("status", "--json")
    return dict(json.loads(done.stdout).get("controllers", {})) if done.returncode == 0 else {}


def process_at(cluster: Detached, endpoint: str) -> psutil.Process:
    return cluster.one("twinpool.cluster.controller.controller_process", endpoint.rpartition(":")[2])


def control_store(cluster: Detached) -> psutil.Process:
    found: list[psutil.Process] = []

    def look() -> bool:
        found[:] = [process for process in cluster.processes() if process.name() == "gcs_server"]
        return len(found) == 1

    until(look, "one control store", WAIT_S)
    return found[0]


def stop_the_leader(cluster: Detached, server: LedgerServer) -> None:
    """The controller that leads is stopped: a standby takes over. It goes on, ends, and comes back as a standby."""
    before = controllers(cluster)
    leader = process_at(cluster, before["leader"])
    began = time.monotonic()
    leader.send_signal(signal.SIGSTOP)

    def followed() -> bool:
        now = controllers(cluster)
        return bool(now) and not now["away"] and now["term"] > before["term"] and now["leader"] in before["standbys"]

    until(followed, "a standby to lead", WAIT_S)
    print(f"a router knew the next leader {time.monotonic() - began:.1f} s after the leader was stopped")
    leader.send_signal(signal.SIGCONT)
    until(lambda: before["leader"] in controllers(cluster).get("standbys", ()), "it to stand by", WAIT_S)


def kill_the_control_store(cluster: Detached, server: LedgerServer) -> None:
    store = control_store(cluster)
    kill(store)
    until(lambda: control_store(cluster).pid != store.pid, "the next control store", WAIT_S)


def kill_store_and_supervisor(cluster: Detached, server: LedgerServer) -> None:
    """The next supervisor finds a Ray without a control store, and starts that first."""
    supervisor, store = cluster.one("twinpool.cluster.serve.detached_cluster"), control_store(cluster)
    kill(supervisor)
    kill(store)
    until(lambda: cluster.one("twinpool.cluster.serve.detached_cluster").pid != supervisor.pid, "a supervisor", WAIT_S)
    until(lambda: control_store(cluster).pid != store.pid, "a control store", WAIT_S)


def take_the_server_away(cluster: Detached, server: LedgerServer) -> None:
    """Shorter than the leader's lease and a worker's."""
    server.kill()
    threading.Event().wait(2.0)
    server.start()
    until(lambda: bool(now := controllers(cluster)) and not now["away"], "a leader", WAIT_S)


CHANGES = (stop_the_leader, kill_the_control_store, kill_store_and_supervisor, take_the_server_away)


@pytest.mark.soak
@pytest.mark.timeout(900)
def test_no_answer_and_no_worker_is_lost_with_the_control_plane(tmp_path: Path) -> None:
    (tmp_path / "server").mkdir()
    server = LedgerServer(tmp_path / "server", "--appendonly", "yes", "--appendfsync", "always").start()
    folder = make_checkpoint(tmp_path / "model", "qwen3", seed=37)
    sections: dict[str, dict[str, Any]] = {
        "cache": {"device_tokens": 8192},
        "prefill": {"chunk_tokens": 128},
        "cluster": {"ledger": server.url, "ray_storage": server.url, "standby_controllers": 1, "lease_s": 20},
        "faults": {"step_delay_s": 0.004},
    }
    try:
        with detached(folder, tmp_path / "run", "--prefill", "1", "--decode", "2", sections=sections) as cluster:
            first = {name: (row["incarnation"], row["pid"]) for name, row in cluster.status().items()}
            load = Load(cluster.url, cluster.model, some_prompts(11))
            with load.running():
                for change in CHANGES:
                    load.more()
                    change(cluster, server)
                    ready(cluster, prefill=1, decode=2)
                    now = {name: (row["incarnation"], row["pid"]) for name, row in cluster.status().items()}
                    assert now == first, f"{change.__name__}: no worker may be started again"
                load.more()
                # By the next supervisor, through the next control store.
                command(cluster, "restart", "decode-0")
                ready(cluster, prefill=1, decode=2)
                load.more()
            assert cluster.status()["decode-0"]["incarnation"] == first["decode-0"][0] + 1
            load.verify(Oracle(folder))
            cluster.settle()
            print(f"{len(load.answers)} answers, {load.resumed} resumed, all exact")
        assert not server.client.keys("*"), "down leaves nothing on the server"
    finally:
        server.close()
