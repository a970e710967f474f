"""Clients that lose their connection in the middle of a stream and come back with their key and the last event's id."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from typing import Any

import httpx
import psutil


@dataclass
class Events:
    """The events of one stream, as they came: each whole, in bytes."""

    whole: list[bytes] = field(default_factory=list)
    broke: bool = False
    """Whether the connection broke before the end."""

    @property
    def last_id(self) -> str:
        return ids_of(self.whole)[-1] if ids_of(self.whole) else ""

    @property
    def ended(self) -> bool:
        marks = (b"[DONE]", b"message_stop", b"event: response.completed", b"event: response.incomplete")
        return any(mark in event for event in self.whole[-1:] for mark in marks)


def ids_of(events: list[bytes]) -> list[str]:
    """The ids of the events that have one, in order."""
    lines = [line for event in events for line in event.split(b"\n")]
    return [line.removeprefix(b"id: ").decode() for line in lines if line.startswith(b"id: ")]


def read(
    url: str, path: str, body: dict[str, Any], headers: dict[str, str], meanwhile: Callable[[int, httpx.Response], bool]
) -> Events:
    """Ask for a stream and read it; `meanwhile(events, response)` is called after each event, True: leave."""
    found, rest = Events(), b""
    with httpx.Client(base_url=url, timeout=60, trust_env=False) as client:
        try:
            with client.stream("POST", path, json=body, headers=headers) as response:
                assert response.status_code == 200, (response.status_code, response.read())
                for part in response.iter_raw():
                    rest += part
                    *events, rest = rest.split(b"\n\n")
                    for event in events:
                        if event.startswith(b":"):
                            continue
                        found.whole.append(event + b"\n\n")
                        if meanwhile(len(found.whole), response):
                            return found
        except httpx.HTTPError:
            found.broke = True
    return found


def never(events: int, response: httpx.Response) -> bool:
    return False


def server_of(response: httpx.Response, processes: list[psutil.Process]) -> psutil.Process:
    """The process that has the other end of a response's connection."""
    stream = response.extensions["network_stream"]
    mine = stream.get_extra_info("client_addr")[1]
    for process in processes:
        if any(c.raddr and c.raddr.port == mine for c in process.net_connections("tcp")):
            return process
    raise AssertionError(f"nobody serves port {mine}")


@contextmanager
def routers_of(process: psutil.Process) -> Iterator[list[psutil.Process]]:
    """The routers among the descendants of a process."""
    found = []
    for child in process.children(recursive=True):
        with suppress(psutil.NoSuchProcess):  # Others may end meanwhile.
            if "twinpool.router.main" in child.cmdline():
                found.append(child)
    yield found
