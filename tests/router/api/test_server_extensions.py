"""What the server offers beside ASGI: who hears that a client has left, and who doesn't."""

from __future__ import annotations

import asyncio
from dataclasses import dataclass, field
from typing import Any, cast

import pytest

from twinpool.router.api.http_exchange import DIRECT_WRITE, ON_GONE, HttpExchange
from twinpool.router.api.http_protocol import LeavingCalls, offer_extensions


@dataclass(eq=False)
class Cycle:
    """What of uvicorn's request is looked at."""

    disconnected: bool = False
    response_complete: bool = False
    chunked_encoding: bool = True
    scope: dict[str, Any] = field(default_factory=dict)


def test_every_request_that_is_not_answered_hears_that_its_client_left_once() -> None:
    leaving, heard = LeavingCalls(), list[str]()
    first, second, done = Cycle(), Cycle(), Cycle()
    for name, cycle in (("a", first), ("b", first), ("c", second), ("d", done)):
        leaving.add(cast(Any, cycle), lambda name=name: heard.append(name))  # type: ignore[misc]
    done.response_complete = True
    leaving.answered()
    leaving.left()
    leaving.left()
    assert heard == ["a", "b", "c"]


def test_who_asks_after_the_client_left_is_told_at_once_and_after_the_answer_never() -> None:
    leaving, heard = LeavingCalls(), list[str]()
    leaving.add(cast(Any, Cycle(disconnected=True)), lambda: heard.append("late"))
    leaving.add(cast(Any, Cycle(response_complete=True)), lambda: heard.append("answered"))
    assert heard == ["late"]
    leaving.left()
    assert heard == ["late"]


def test_answered_requests_of_a_connection_that_stays_open_are_forgotten() -> None:
    leaving = LeavingCalls()
    for _ in range(100):
        cycle = Cycle()
        leaving.add(cast(Any, cycle), lambda: None)
        cycle.response_complete = True
        leaving.answered()
    assert leaving._calls == {}


@pytest.mark.parametrize("offered", [True, False])
def test_a_client_that_leaves_is_heard_of_with_the_extension_and_without(offered: bool) -> None:
    leaving, heard = LeavingCalls(), list[str]()
    cycle = Cycle(scope={"type": "http", "method": "POST", "path": "/", "headers": []})
    if offered:
        offer_extensions(cast(Any, cycle), leaving)
        assert set(cycle.scope["extensions"]) == {DIRECT_WRITE, ON_GONE}
    gone = asyncio.Event()

    async def receive() -> dict[str, Any]:
        await gone.wait()
        return {"type": "http.disconnect"}

    async def life() -> None:
        exchange = HttpExchange(cycle.scope, receive, cast(Any, None))
        exchange.on_gone(lambda: heard.append("one"))
        exchange.on_gone(lambda: heard.append("two"))
        tasks = len(asyncio.all_tasks())
        assert tasks == (1 if offered else 2), "the extension needs no task"
        gone.set()
        leaving.left()
        for _ in range(5):
            await asyncio.sleep(0)
        exchange.release()

    asyncio.run(life())
    assert heard == ["one", "two"]
