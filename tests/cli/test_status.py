"""`twinpool status` says how many requests are off a decode worker's device."""

from __future__ import annotations

from rich.console import Console

from cli.admin_client import status_table


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
