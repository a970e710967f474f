"""Real faults in a real cluster, as a real Prometheus sees them at the operators' ports of two routers: the alerts of
deploy/prometheus fire, and cease when the cluster has mended itself."""

from __future__ import annotations

import os
import signal
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path

import httpx
import pytest

from tests.support.free_ports import free_port
from tests.support.prometheus_server import PrometheusServer
from tests.support.served_cluster import Serving, serving

STEPS = 400
"""Of decode before it hangs: more than what comes before needs, and fewer than what comes then does."""
WAIT_S = 180.0


def ask(cluster: Serving, tokens: int) -> int:
    """One answer of the endpoint; returns its status, 0 where the connection broke."""
    body = {"model": cluster.model, "prompt": "It was a fine morning, and", "max_tokens": tokens, "ignore_eos": True}
    try:
        return httpx.post(f"{cluster.url}/v1/completions", json=body, timeout=WAIT_S, verify=False).status_code
    except httpx.TransportError:
        return 0


def ask_at_once(pool: ThreadPoolExecutor, cluster: Serving, requests: int, tokens: int) -> list[Future[int]]:
    return [pool.submit(ask, cluster, tokens) for _ in range(requests)]


@pytest.mark.soak
@pytest.mark.timeout(900)
def test_alerts_fire_on_damage_a_full_queue_a_wedged_pool_and_a_lost_worker(tmp_path: Path) -> None:
    admin = free_port()
    sections = {
        "router": {"max_queue": 3},
        "cluster": {"stall_s": 75},
        "decode": {"speculation": "off"},  # A step is a token.
        "faults": {"corrupt_page": 2, "hang": f"decode-0:{STEPS}"},
        "security": {"admin_port": admin},
    }
    with (
        serving(
            "demo", tmp_path / "run", "--routers", "2", sections=sections, orderly=False, ready_within=240
        ) as cluster,
        PrometheusServer(tmp_path / "prometheus", [f"127.0.0.1:{admin + i}" for i in range(2)]) as prometheus,
        ThreadPoolExecutor(24) as clients,
    ):

        def fires(*names: str) -> None:
            prometheus.wait(lambda: set(names) <= prometheus.firing().keys(), f"{names} to fire", WAIT_S)

        def ceases(*names: str) -> None:
            prometheus.wait(lambda: not set(names) & prometheus.firing().keys(), f"{names} to cease", WAIT_S)

        prometheus.wait(lambda: prometheus.value("sum(up)") == 2, "both routers to be scraped")
        prometheus.wait(lambda: len(prometheus.query("twinpool_state_damage_total{where='handover'}")) == 2, "zeros")
        assert not prometheus.firing().keys() - {"TwinpoolNoStandbyController"}

        for _ in range(3):
            assert ask(cluster, 2) == 200
        fires("TwinpoolStateDamage")
        (damage,) = prometheus.firing()["TwinpoolStateDamage"]  # one, though both routers tell of it
        assert (damage["worker"], damage["where"]) == ("decode-0", "handover")

        answers = ask_at_once(clients, cluster, 24, 48)  # A router takes three at a time.
        assert {answer.result() for answer in answers} == {200, 429}
        fires("TwinpoolQueueFull")

        hung = ask_at_once(clients, cluster, 2, 2 * STEPS)
        fires("TwinpoolWorkerStalled", "TwinpoolStalled")
        assert {alert["worker"] for alert in prometheus.firing()["TwinpoolWorkerStalled"]} == {"decode-0"}
        assert [answer.result() for answer in hung] == [200, 200]
        ceases("TwinpoolWorkerStalled", "TwinpoolStalled", "TwinpoolWorkerLost")
        assert prometheus.value("max(twinpool_worker_starts_total{worker='decode-0'})") == 2

        os.kill(cluster.status()["prefill-0"]["pid"], signal.SIGKILL)
        fires("TwinpoolWorkerLost", "TwinpoolPoolDown")
        assert {alert["role"] for alert in prometheus.firing()["TwinpoolPoolDown"]} == {"prefill"}
        ceases("TwinpoolWorkerLost", "TwinpoolPoolDown")
        assert ask(cluster, 4) == 200
        generated = prometheus.value("sum(twinpool_generated_tokens_total)")
        assert generated == prometheus.value("sum(vllm:generation_tokens_total)") > 3 * 2 + 2 * STEPS
