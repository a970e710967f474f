"""`twinpool status` says how many requests are off a decode worker's device."""

from __future__ import annotations

import io
import re
from typing import Any

import pytest
from rich.console import Console

from tests.cluster.router_stub import row as row_of
from twinpool.cli.admin_client import duration
from twinpool.cli.operator.status_command import check_line, folded, status_table, status_view
from twinpool.router.state.circuit_breaker import CircuitState


def test_status_shows_how_many_requests_are_retracted() -> None:
    row = {
        "name": "decode-0", "role": "decode", "state": "ready", "pid": 1, "node": "here", "incarnation": 1,
        "running": 2, "waiting": 3, "pages_total": 64, "pages_free": 0, "counters": {"retracted": 3.0},
    }  # fmt: skip
    console = Console(width=160)
    with console.capture() as shown:
        console.print(status_table([row, row | {"name": "decode-1", "counters": {"retracted": 0.0}}]))
    first, second = (line for line in shown.get().splitlines() if "decode-" in line)
    assert "ready, 3 retracted" in first
    assert "retracted" not in second


def test_status_shows_the_plane_by_which_pages_travel() -> None:
    row = {
        "name": "decode-0", "role": "decode", "state": "ready", "pid": 1, "node": "here", "incarnation": 1,
        "running": 2, "waiting": 3, "pages_total": 64, "pages_free": 0, "plane": "staged",
    }  # fmt: skip
    console = Console(width=160)
    with console.capture() as shown:
        console.print(status_table([row, row | {"name": "decode-1", "plane": None}]))
    first, second = (line.split() for line in shown.get().splitlines() if "decode-" in line)
    assert (first[-2], second[-2]) == ("staged", "-")


def test_status_shows_what_the_autoscaler_does_and_what_a_start_waits_for() -> None:
    pool = {"role": "decode", "ready": 1, "wanted": 2, "least": 1, "most": 4, "need": 1.62, "why": "[pages]"}
    autoscaler = {
        "pools": [pool, {**pool, "role": "prefill", "need": None, "why": "nothing was measured yet"}],
        "decisions": [{"ago_s": 12.3, "text": "decode 1 -> 2 (decode-1 starts): [pages]"}],
        "held_s": 30.0,
        "counters": {},
    }
    row = {
        "name": "decode-1", "state": "starting", "node": "", "pid": 0, "incarnation": 1, "running": 0, "waiting": 0,
        "pages_free": 0, "pages_total": 0, "waits": "a node with a place for a decode worker",
    }  # fmt: skip
    console = Console(width=160, record=True, file=io.StringIO())
    console.print(status_view({"workers": [row], "autoscaler": autoscaler}))
    text = console.export_text()
    assert "starting, waits for a node with a place for a decode worker" in text
    assert "12 s ago: decode 1 -> 2 (decode-1 starts): [pages]" in text
    assert "held for 30 s more: an operator has changed a pool" in text
    assert "1.6" in text


def test_status_shows_the_settings_that_a_worker_was_started_with() -> None:
    row = {
        "name": "decode-0", "role": "decode", "state": "ready", "pid": 1, "node": "here", "incarnation": 1,
        "running": 2, "waiting": 3, "pages_total": 64, "pages_free": 0, "plane": "shm", "settings": "0a1b2c3d",
    }  # fmt: skip
    console = Console(width=160)
    with console.capture() as shown:
        console.print(status_table([row, row | {"name": "decode-1", "settings": None}]))
    first, second = (line.split() for line in shown.get().splitlines() if "decode-" in line)
    assert (first[-1], second[-1]) == ("0a1b2c3d", "-")


def shown(status: dict[str, object], **options: bool | float) -> str:
    console = Console(width=160, record=True, file=io.StringIO())
    console.print(status_view(status, **options))  # type: ignore[arg-type]
    return console.export_text()


def test_fifty_eight_workers_that_wait_are_one_row_with_their_number() -> None:
    waits = "a node with a place for a decode worker"
    waiting = [row_of(f"decode-{n}", "starting", pid=0, pages_total=0, waits=waits) for n in range(2, 60)]
    rows = [row_of("prefill-0", running=1), row_of("decode-0"), row_of("decode-1", running=2), *waiting]
    text = shown({"workers": rows})
    lines = [line for line in text.splitlines() if "fill-" in line or "decode-" in line]
    assert len(lines) == 4
    assert "decode-2 to decode-59: 58" in lines[-1]
    assert f"starting, waits for {waits}" in lines[-1]
    assert "61 workers; alike ones share a row: --all shows each" in text
    assert sum("decode-" in line for line in shown({"workers": rows}, unfold=True).splitlines()) == 60


def test_a_small_table_and_rows_that_differ_are_not_folded() -> None:
    alike = [row_of(f"decode-{n}") for n in range(8)]
    assert "decode-7" in shown({"workers": alike})
    busy = [row_of(f"decode-{n}", running=n) for n in range(40)]
    assert sum("decode-" in line for line in shown({"workers": busy}).splitlines()) == 40


@pytest.mark.parametrize(
    "other",
    [
        {"role": "prefill"}, {"state": "draining"}, {"node": "there"}, {"running": 1}, {"waiting": 1},
        {"pages_free": 1}, {"pages_total": 99}, {"plane": "tcp"}, {"settings": "s2"}, {"cordoned": True},
        {"waits": "a node"}, {"stalled_s": 9.0}, {"unlinked": "refused"}, {"breaker": "open"},
        {"counters": {"retracted": 2.0}},
    ],
    ids=lambda other: next(iter(other)),
)  # fmt: skip
def test_workers_that_differ_in_anything_that_matters_share_no_row(other: dict[str, Any]) -> None:
    rows = [row_of(f"decode-{n}", **(other if n % 2 else {})) for n in range(20)]
    assert [[row["name"] for row in rows[n::2]] for n in (0, 1)] == [
        [row["name"] for row in alike] for alike in folded(rows)
    ]


def test_how_a_process_ended_once_is_not_shown_of_one_that_serves_or_has_left_in_order() -> None:
    old = {"last_end": "killed, signal 9", "breaker": "over", "unlinked": "it is gone", "stalled_s": 3.0}
    text = shown(
        {"workers": [row_of("decode-0", "left", **old), row_of("decode-1", "ready", last_end="killed, signal 9")]}
    )
    for word in ("signal", "breaker", "over", "SIGKILL", "gone", "progress"):
        assert word not in text
    text = shown({"workers": [row_of("decode-0", "dead", last_end="killed, signal 9")]})
    assert "dead, its process ended: killed (SIGKILL, as where memory is short)" in text
    text = shown({"workers": [row_of("decode-0", "starting", last_end="exit code 1", breaker="open")]})
    assert "starting, again, as the one before ended: exit code 1, gets no requests for now" in text


def test_status_says_of_every_state_of_a_routers_breaker_what_it_means_for_requests() -> None:
    means = {
        CircuitState.CLOSED: "ready",
        CircuitState.OPEN: "ready, gets no requests for now: too many have failed there",
        CircuitState.HALF_OPEN: "ready, gets one request to see whether it works again",
        CircuitState.OVER: "ready",
    }
    assert means.keys() == set(CircuitState)
    for state, words in means.items():
        found = shown({"workers": [row_of("decode-0", breaker=str(state))]})
        (line,) = (line for line in found.splitlines() if "decode-0" in line)
        assert re.split(" {2,}", line.strip())[1] == words


def test_a_row_of_several_workers_has_their_starts_and_no_process_and_one_that_has_left_has_none() -> None:
    rows = [row_of(f"decode-{n}", incarnation=1 + n % 3, pid=4711) for n in range(20)]
    cells = [line.split() for line in shown({"workers": rows}).splitlines() if "decode-0" in line]
    assert cells[0][:8] == ["decode-0", "to", "decode-19:", "20", "ready", "here", "1-3", "0"]
    alone = [row_of("decode-0", pid=4711, incarnation=5), row_of("decode-1", "left", pid=4712, incarnation=6)]
    first, second = (line.split() for line in shown({"workers": alone}).splitlines() if "decode-" in line)
    assert first[:5] == ["decode-0", "ready", "here", "4711", "5"]
    assert second[:4] == ["decode-1", "left", "here", "6"]
    text = shown({"workers": alone})
    assert "share a row" not in text


@pytest.mark.parametrize(
    ("seconds", "words"),
    [
        (-3.0, "0 s"), (59.4, "59 s"), (60.0, "1 min 0 s"), (3599.0, "59 min 59 s"), (3600.0, "1 h 0 min"),
        (86_399.0, "23 h 59 min"), (86_400.0, "1 d 0 h"), (2 * 86_400 + 3 * 3600 + 59 * 60, "2 d 3 h"),
    ],
)  # fmt: skip
def test_a_time_is_shown_in_its_two_largest_units(seconds: float, words: str) -> None:
    assert duration(seconds) == words


def test_the_first_line_has_url_model_time_rate_and_load() -> None:
    known = {
        "url": "http://h:1",
        "model": "m",
        "router_up_s": 75.0,
        "tokens_per_s": 1234.4,
        "in_flight": 5,
        "waiting": 2,
    }
    first = shown(known | {"workers": []}, up_s=90061.0).splitlines()[0].rstrip()
    assert first == "http://h:1, model m, up 1 d 1 h, 1,234 tokens a second, 3 requests running, 2 waiting"
    assert "this router up 1 min 15 s" in shown(known | {"workers": []})
    assert shown({"url": "http://h:1", "workers": []}).splitlines()[0].rstrip() == "http://h:1", "an older router"


def test_a_check_begins_with_its_verdict_and_says_what_is_normal() -> None:
    checked = {"pages": 64, "slots": 8, "leases": 0, "rooms": 0}
    good = {"ok": True, "workers": [{"name": "decode-0", "checked": checked, "violations": []}]}
    assert check_line(good).startswith("all accounted for: 1 worker and the router")
    assert "any number is normal" in check_line(good)
    of_worker = {"name": "decode-0", "checked": checked, "violations": ["page 3 is lost", "x"]}
    bad = {"ok": False, "workers": [of_worker]}
    assert check_line(bad).startswith("violations found: 2, of decode-0")
    of_router = {"name": "router", "checked": checked, "violations": ["a request of nobody's"]}
    whole = {"name": "decode-1", "checked": checked, "violations": []}
    both = {"ok": False, "workers": [whole, of_worker, of_router]}
    assert check_line(both).startswith("violations found: 3, of decode-0, router"), "its books are checked as well"
