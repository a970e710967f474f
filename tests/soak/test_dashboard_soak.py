"""The dashboard of a real cluster in a real browser: its numbers beside `/metrics` and the status, whatever happens.

Under load a worker is drained, one is killed, the pools are scaled, and the controller is killed. After each the page
must come to show what the metrics and the status say, tell of it in its log, and never have complained.
"""

from __future__ import annotations

import os
import signal
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from urllib.parse import urlparse

import pytest

from tests.dashboard.page_numbers import differences, numbers
from tests.support.browser import Tab, browsing, chromium
from tests.support.served_cluster import Serving, family, serving, until

pytestmark = [
    pytest.mark.soak,
    pytest.mark.slow,
    pytest.mark.timeout(900),
    pytest.mark.skipif(chromium() is None, reason="no Chromium"),
]

PROMPTS = [f"Chapter {i}. It was a fine morning, and the old house by the river stood empty. " * 3 for i in range(24)]


@contextmanager
def loaded(cluster: Serving) -> Iterator[None]:
    """Requests one after the other until the end of the block; each must get its whole answer."""
    ended, failed = threading.Event(), list[BaseException]()

    def ask() -> None:
        while not ended.is_set():
            try:
                cluster.complete_all(PROMPTS[:8], at_once=4, max_tokens=64)
            except BaseException as error:
                failed.append(error)
                return

    thread = threading.Thread(target=ask)
    thread.start()
    try:
        yield
    finally:
        ended.set()
        thread.join(120)
    assert not thread.is_alive()
    assert not failed, failed[0]


def log_of(tab: Tab) -> list[str]:
    texts: list[str] = tab.run("[...document.querySelectorAll('#log p')].map((one) => one.textContent)")
    return texts


def agree(cluster: Serving, tab: Tab, *, but: tuple[str, ...] = ()) -> None:
    """Wait until nothing runs and the page shows what the metrics and the status say. `but`: names of numbers that are
    a controller's own, and may differ after its death."""

    def left() -> list[str]:
        lines = differences(tab, cluster.metrics(), cluster.status())
        return [line for line in lines if not line.startswith(but or ("\0",))]

    cluster.settle()
    found: list[str] = []

    def same() -> bool:
        found[:] = left()
        return not found

    try:
        until(same, "the page to agree", 30, 0.3)
    except AssertionError:
        raise AssertionError("\n".join(found)) from None


def test_the_page_agrees_through_a_drain_a_kill_a_scaling_and_a_dead_controller(
    tmp_path_factory: pytest.TempPathFactory,
) -> None:
    sections = {"cluster": {"lease_s": 60}}  # A controller that starts on a busy machine may be away for long.
    run = tmp_path_factory.mktemp("run")
    with (
        serving("demo", run, "--prefill", "2", "--decode", "2", sections=sections, ready_within=240) as cluster,
        browsing() as browser,
    ):
        tab = browser.tab()
        tab.look(1600, 1000)
        tab.go(f"{cluster.url}/dashboard")
        tab.until("document.body?.dataset.frame > 0", 60)
        cluster.complete_all(PROMPTS, max_tokens=32)
        agree(cluster, tab)

        with loaded(cluster):
            until(lambda: float(numbers(tab)["now.tokens_s"].value) > 0, "tokens to flow", 30, 0.2)
            assert float(numbers(tab)["now.bytes_s"].value) > 0
            assert cluster.twinpool("drain", "decode-1").returncode == 0
        agree(cluster, tab)
        assert numbers(tab)["decode-1.state"].value == "left"
        assert any("decode-1 has left" in text for text in log_of(tab)), "draining may last less than a heartbeat"
        assert cluster.twinpool("undrain", "decode-1").returncode == 0

        victim = cluster.status()["prefill-0"]
        with loaded(cluster):
            os.kill(victim["pid"], signal.SIGKILL)
            until(lambda: any("prefill-0 died" in text for text in log_of(tab)), "the death to be told", 60, 0.2)
            until(lambda: cluster.status()["prefill-0"]["state"] == "ready", "prefill-0 to be back", 120, 0.3)
        agree(cluster, tab)
        assert numbers(tab)["deaths"].text == "1"
        assert numbers(tab)["prefill-0.state"].text == "ready (2nd start)"

        with loaded(cluster):
            assert cluster.twinpool("scale", "decode=3", timeout=120).returncode == 0
            until(lambda: cluster.status()["decode-2"]["state"] == "ready", "decode-2", 120, 0.3)
        agree(cluster, tab)
        assert any("an operator has scaled decode to 3" in text for text in log_of(tab))

        rows = tab.run("document.querySelectorAll('#log li').length")
        (controller,) = [
            p for p in family(cluster.process) if "twinpool.cluster.controller.controller_process" in p.cmdline()
        ]
        with loaded(cluster):
            controller.kill()
            tab.until("document.getElementById('link').dataset.state === 'away'", 30)
            tab.until("document.getElementById('link').dataset.state === 'live'", 60)
        agree(cluster, tab, but=("damage.",))
        assert tab.run("document.querySelectorAll('#log li').length") > rows, "what was told before stays"
        assert tab.run("document.querySelector('.chart-line').getAttribute('d').length") > 200, "and so do the curves"

        assert tab.complaints == []
        host = urlparse(cluster.url).netloc
        assert {urlparse(url).netloc for url in tab.requests} <= {host, ""}
