"""`twinpool status` says how many requests are off a decode worker's device."""

from __future__ import annotations

import io

from rich.console import Console

from cli.admin_client import status_table, status_view


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
