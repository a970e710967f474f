"""The dashboard in a real browser, over workers in this process: its numbers, its keys, and what it asks of whom."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from contextlib import ExitStack
from typing import Any
from urllib.parse import urlparse

import pytest

from tests.dashboard.page_numbers import differences, numbers
from tests.router.fake_worker import FakeCluster
from tests.router.http_server import DEMO, Server, serving
from tests.support.browser import Browser, Tab, browsing, chromium
from tests.support.served_cluster import until
from tests.support.worker_pair import counts_for
from twinpool.cluster.assembly.build_worker import build_worker
from twinpool.cluster.serve.serve_one_process import LocalDashboard, LocalDirectory
from twinpool.cluster.worker_process.worker_thread import WorkerThread
from twinpool.contracts.checkpoint.model_spec import read_model_spec
from twinpool.contracts.clock import SystemClock
from twinpool.contracts.config.load_config import config_from_dict
from twinpool.contracts.ids import PAIR, Incarnation, Role, WorkerName
from twinpool.contracts.messages.worker_status import WorkerRecord
from twinpool.router.api.admin_status import TOKEN_VARIABLE

pytestmark = [pytest.mark.slow, pytest.mark.skipif(chromium() is None, reason="no Chromium")]

CONFIG = config_from_dict({"transfer": {"plane": "local"}, "cache": {"device_tokens": 2048}})
FRAME = "document.body?.dataset.frame > 0"


@pytest.fixture(scope="module")
def server() -> Iterator[Server]:
    """A router over a prefill and a decode worker of the demo, which have a thread each."""
    spec, pairs = read_model_spec(DEMO), []
    with ExitStack() as stack:
        for role in PAIR:
            counts = counts_for(DEMO, CONFIG, role, 2048)
            name = WorkerName(f"{role}-0")
            worker = build_worker(role, name, Incarnation(1), spec, CONFIG, host="127.0.0.1", counts=counts)
            host = WorkerThread(worker)
            host.start()
            stack.callback(host.stop, 5.0)
            pairs.append((WorkerRecord(name, Role(role), Incarnation(1), 1, "here", "", host.control, host.fits), host))
        directory = LocalDirectory(pairs)
        dashboard = LocalDashboard(directory, "north", SystemClock())
        with serving(FakeCluster(), spec=spec, config=CONFIG, directory=directory, dashboard=dashboard) as found:
            dashboard.recent = found.service.records.kept.recent
            yield found


@pytest.fixture(scope="module")
def browser() -> Iterator[Browser]:
    with browsing() as found:
        yield found


@pytest.fixture
def tab(browser: Browser, server: Server) -> Iterator[Tab]:
    found = browser.tab()
    found.look(1400, 900)
    found.go(f"{server.url}/dashboard")
    yield found
    assert {urlparse(url).netloc for url in found.requests} <= {f"127.0.0.1:{server.port}", ""}, found.requests
    found.call("Page.close")


def metrics(server: Server) -> dict[str, float]:
    lines = [line.rpartition(" ") for line in server.client.get("/metrics").text.splitlines() if line[:1] != "#"]
    return {name: float(value) for name, _, value in lines}


def status(server: Server) -> Mapping[str, Mapping[str, Any]]:
    return {row["name"]: row for row in server.client.get("/cluster/status").json()["workers"]}


def test_every_number_is_that_of_the_metrics_and_of_the_status(server: Server, tab: Tab) -> None:
    for length in (3, 40, 200):
        server.complete(prompt=list(range(5, 5 + length)), max_tokens=24, ignore_eos=True)
    tab.until(FRAME)
    until(lambda: not differences(tab, metrics(server), status(server)), "the page to show it all", pause_s=0.2)
    assert numbers(tab)["totals.generated_tokens"].text != "0"
    assert tab.run("document.getElementById('verdict').textContent").startswith("All is well")
    drawn = tab.run(
        "[...document.querySelectorAll('.waterfall > li')].map((row) => row.querySelectorAll('.bars i').length)"
    )
    assert len(drawn) == 3
    assert min(drawn) >= 3, "the parts of each request"
    assert tab.complaints == []


def test_all_of_it_can_be_reached_by_keys_and_charts_look_back_by_arrows(tab: Tab) -> None:
    tab.until(FRAME)
    reached = []
    for _ in range(20):
        tab.press("Tab")
        reached.append(
            tab.run("document.activeElement.getAttribute('aria-label') ?? document.activeElement.textContent")
        )
    assert reached[0] == "Skip to the state of the cluster"
    charts = [text for text in reached if text and "Arrow keys look back" in text]
    assert len(charts) == 10
    assert {"5 min", "15 min", "1 h", "6 h"} <= set(reached), "how far charts look back"
    opened = "document.querySelector('.waterfall button').getAttribute('aria-expanded')"
    tab.run("document.querySelector('.waterfall button').focus()")
    for expanded in ("true", "false"):
        tab.press("Enter")
        assert tab.run(opened) == expanded
    tab.run("document.querySelector('.multiple svg').focus()")
    tab.press("ArrowLeft")
    assert tab.run("document.getElementById('moment').textContent").startswith("at ")
    tab.press("Escape")
    assert tab.run("document.getElementById('moment').textContent") == ""
    unnamed = tab.run(
        "[...document.querySelectorAll('svg[role=img], [role=region], [role=img], button, input')].filter((node) =>"
        " !node.getAttribute('aria-label') && !node.textContent.trim() && !node.labels?.length)"
        ".map((node) => node.outerHTML)"
    )
    assert unnamed == []


def test_a_chart_says_its_scale_its_ends_its_lines_and_the_times(server: Server, tab: Tab) -> None:
    server.complete(prompt=[5, 6, 7], max_tokens=9, ignore_eos=True)
    tab.until(FRAME)
    shown = "Object.fromEntries([...document.querySelectorAll('.multiple')].map((box) => [box.dataset.chart, box.{}]))"
    tab.until("document.querySelector('[data-chart=tpot_p50] .high').textContent !== ''")
    scales = tab.run(shown.format("querySelector('.high').textContent"))
    for name in ("ttft_p50", "tpot_p50", "itl_p50"):
        assert re.fullmatch(r"[\d.]+ (µs|ms|s) · log", scales[name]), scales
    assert re.fullmatch(r"[\d,.]+ · linear", scales["running"])
    assert scales["pages_decode"] == "100 % · linear"
    lines = tab.run(shown.format("querySelector('.key-lines').innerText"))
    assert [lines[name].split() for name in ("tpot_p50", "running")] == [["p50", "p99"], ["running", "queued"]]
    axes = tab.run(shown.format("querySelector('.axis').textContent"))
    assert all(text.endswith("now") and "min" in text for text in axes.values()), axes
    titles = tab.run("[...document.querySelectorAll('.multiple h3')].map((one) => one.textContent)")
    assert titles.index("Time per output tokenTPOT") < titles.index("Inter-token latencyITL")


def test_the_time_of_an_output_token_is_that_of_whole_answers(server: Server, tab: Tab) -> None:
    for _ in range(4):
        server.complete(prompt=list(range(5, 40)), max_tokens=24, ignore_eos=True)
    tab.until(FRAME)
    tab.until("Number(document.querySelector('[data-number=\"now.tpot_p50\"]')?.dataset.value) > 0")
    found = metrics(server)
    mean_s = found["twinpool_time_per_output_token_seconds_sum"] / found["twinpool_time_per_output_token_seconds_count"]
    assert float(numbers(tab)["now.tpot_p50"].value) == pytest.approx(mean_s, rel=4), "of the same order"


def test_the_charts_look_back_as_far_as_they_are_asked_to(tab: Tab) -> None:
    tab.until(FRAME)
    pressed = "[...document.querySelectorAll('#ranges button')].map((one) => one.getAttribute('aria-pressed'))"
    assert tab.run(pressed) == ["false", "true", "false", "false"]
    for at, range_s in enumerate((300, 900, 3600, 21600)):
        tab.run(f"document.querySelectorAll('#ranges button')[{at}].click()")
        assert tab.run(pressed).index("true") == at
        # Rows of minutes from before this page's first one, as a controller that has led for long would send.
        back = tab.run(
            "import('/dashboard/past.js').then(({ Past }) => { const past = new Past(), at = 100000;"
            " const row = (when) => ({ at: [when], ttft_p99: [1] });"
            " const minutes = { at: [at - 20000, at - 3000, at - 60], ttft_p99: [1, 1, 1] };"
            " past.take({ boot: 'b', history: row(at), minutes });"
            f" return past.since(at - {range_s}).map((one) => at - one.at); }})"
        )
        assert back == [age for age in (20000, 3000, 60, 0) if age <= range_s]


def test_zeros_that_are_well_are_one_line_and_what_is_not_stands_before_it(server: Server, tab: Tab) -> None:
    tab.until(FRAME)
    tab.until("document.getElementById('faults-well').textContent.endsWith(': all well')")
    folded = "[...document.querySelectorAll('#faults-zeros dt')].map((one) => one.textContent)"
    assert "worker deaths" in tab.run(folded)
    assert not tab.run("document.getElementById('faults-zeros').closest('details').open")
    assert tab.run("document.getElementById('faults').hidden")
    frame = (
        "import('/dashboard/health.js').then(({ Health }) => { const node = (id) => document.getElementById(id);"
        " for (const id of ['faults', 'faults-zeros', 'damage', 'damage-zeros', 'totals', 'routers'])"
        " node(id).replaceChildren();"
        " const zeros = { requests_failed: 2, replays: 0, audits_equal: 1, audits_damaged: 0 };"
        " new Health().draw({ damage: { logits: 1, audit: 0 }, totals: zeros, deaths: 1, workers: [], routers: [],"
        " control: null, up_s: 5, at: 1e9, n: 1 });"
        " return [...node('faults').querySelectorAll('dt'), ...node('damage').querySelectorAll('dt')]"
        ".map((one) => one.textContent); })"
    )
    shown = tab.run(frame)
    assert {"failed", "worker deaths", "steps with non-finite logits"} <= set(shown)
    assert "replayed (failover)" not in shown


@pytest.mark.parametrize(("width", "dark", "still"), [(390, True, False), (1600, False, True)])
def test_it_fits_a_phone_and_a_wall_and_stands_still_for_who_wants_that(
    tab: Tab, width: int, dark: bool, still: bool
) -> None:
    tab.look(width, 900, dark=dark, still=still)
    tab.until(FRAME)
    assert tab.run("document.documentElement.scrollWidth") == width
    wide = "[...document.querySelectorAll('.scroll')].filter((one) => one.checkVisibility()).map((one) =>"
    wide += " [one.scrollWidth > one.clientWidth + 1, one.previousElementSibling?.className === 'swipe'"
    wide += " && !one.previousElementSibling.hidden])"
    tab.until(f"{wide}.every(([wide, says]) => wide === says)")  # A table that is wider than its place says so.
    if width < 600:
        assert [True, True] in tab.run(wide)
    assert tab.run("getComputedStyle(document.querySelector('.link i')).animationName") == ("none" if still else "beat")
    light = tab.run("getComputedStyle(document.documentElement).backgroundColor")
    assert (sum(map(int, light[4:-1].split(","))) < 200) is dark


def test_where_a_key_is_needed_the_page_asks_and_keeps_it_for_the_tab(
    server: Server, browser: Browser, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(TOKEN_VARIABLE, "an operator's")
    tab = browser.tab()
    tab.go(f"{server.url}/dashboard")
    tab.until("document.getElementById('key')?.hidden === false")
    enter = "document.getElementById('key-field').value = {!r}; document.querySelector('#key button').click()"
    tab.run(enter.format("wrong"))
    tab.until("document.getElementById('key').hidden === false && document.getElementById('key-field').value === ''")
    assert tab.run("document.getElementById('main').hidden")
    tab.run(enter.format("an operator's"))
    tab.until(f"{FRAME} && !document.getElementById('main').hidden")
    tab.go(f"{server.url}/dashboard")
    tab.until(f"{FRAME} && !document.getElementById('main').hidden && document.getElementById('key').hidden")
    assert not [one for one in tab.complaints if "403" not in one]
    tab.call("Page.close")
