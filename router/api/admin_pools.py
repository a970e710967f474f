"""Operators' endpoints that change the pools: more workers, fewer, the same again, and cordons of nodes.

    POST /cluster/add?role=ROLE&count=N&node=NODE     start N workers more (1 without `count`), on NODE or anywhere
    POST /cluster/scale?prefill=N&decode=M            bring pools to so many workers, by starts and by drains
    POST /cluster/restart/WORKER                      drain a worker, and start it again as its next incarnation
    POST /cluster/cordon/NODE, /cluster/uncordon/NODE place no worker there any more; those that serve go on

The controller decides and carries out; this router passes the order on and answers with the workers concerned, each
with its ``outcome``. Workers that are told to leave hear it with their next heartbeat and leave by drain.
"""

from __future__ import annotations

import asyncio
from typing import Any
from urllib.parse import parse_qs

from twinpool.contracts.errors import RequestError
from twinpool.contracts.ids import Role, WorkerName
from twinpool.contracts.messages.pool_changes import (
    AddWorkers,
    ChangedWorkers,
    CordonNode,
    PoolChange,
    RestartWorker,
    ScalePools,
    UncordonNode,
)
from twinpool.router.api.admin_drain import ANSWER_DEADLINE_S, asked, conflict, find_target, name_after, undrainable
from twinpool.router.api.admin_status import forbidden, unknown_as_yet
from twinpool.router.api.asgi_exchange import HttpExchange
from twinpool.router.openai.api_errors import ApiError
from twinpool.router.service.router_service import RouterService
from twinpool.router.state.worker_table import GONE

MAX_AT_ONCE = 1024
"""The most workers that one order may ask for."""


async def add(service: RouterService, exchange: HttpExchange) -> None:
    """Start workers more. Answers 409 where the controller refuses."""
    if failure := forbidden(service, exchange) or unknown_as_yet(service):
        return await exchange.fail(failure)
    query = _query(exchange)
    try:
        change = AddWorkers(
            _role(query.get("role", "")), _count("count", query.get("count", "1")), query.get("node", "")
        )
    except RequestError as error:
        return await exchange.fail(_invalid(error))
    await _change(service, exchange, change)


async def scale(service: RouterService, exchange: HttpExchange) -> None:
    """Bring the named pools to so many workers; other pools stay. With ``force`` a pool may be left empty."""
    if failure := forbidden(service, exchange) or unknown_as_yet(service):
        return await exchange.fail(failure)
    try:
        query = {key: value for key, value in _query(exchange).items() if key != "force"}
        counts = {_role(role): _count(role, number) for role, number in query.items()}
        if not counts:
            raise RequestError("name a pool and its number of workers: ?decode=3")
    except RequestError as error:
        return await exchange.fail(_invalid(error))
    await _change(service, exchange, ScalePools(counts, empty=asked(exchange, "force")))


async def restart(service: RouterService, exchange: HttpExchange) -> None:
    """As `_restart`, after the orders that are under way."""
    async with service.orders:
        await _restart(service, exchange)


async def _restart(service: RouterService, exchange: HttpExchange) -> None:
    """Have a worker drain and start again; one that has left or is dead is started. Answers with the incarnation that
    leaves. With ``force`` even the last worker of its role."""
    target = find_target(service, exchange, name_after(exchange, "/cluster/restart/"), nodes=False)
    if isinstance(target, ApiError):
        return await exchange.fail(target)
    (entry,) = target.entries
    if entry.status.state == "ready":
        if failure := undrainable(service, target, force=asked(exchange, "force"), otherwise="restart it"):
            return await exchange.fail(failure)
        entry.request_drain(service.clock.now())
    if not await _change(service, exchange, RestartWorker(entry.record.name)):
        entry.cancel_drain()


async def cordon(service: RouterService, exchange: HttpExchange) -> None:
    """Place no worker on a node any more."""
    await _cordon(service, exchange, "/cluster/cordon/", CordonNode)


async def uncordon(service: RouterService, exchange: HttpExchange) -> None:
    """Let workers be placed on a node again."""
    await _cordon(service, exchange, "/cluster/uncordon/", UncordonNode)


async def _cordon(
    service: RouterService, exchange: HttpExchange, path: str, change: type[CordonNode] | type[UncordonNode]
) -> None:
    if failure := forbidden(service, exchange) or unknown_as_yet(service):
        return await exchange.fail(failure)
    await _change(service, exchange, change(name_after(exchange, path)))


async def _change(service: RouterService, exchange: HttpExchange, change: PoolChange) -> bool:
    """Pass a change on to the controller, and answer; returns whether the controller has made it."""
    before = {entry.record.name: (entry.record.incarnation, entry.status.state) for entry in service.core.workers}
    try:
        async with asyncio.timeout(ANSWER_DEADLINE_S):
            changed = await service.worker_links.directory.change_pools(change)
    except RequestError as error:
        await exchange.fail(conflict(str(error)))
        return False
    except (OSError, TimeoutError) as error:
        reason = str(error) or "no answer in time"
        await exchange.fail(ApiError(503, f"the controller can't be reached: {reason}", "server_error", "down"))
        return False
    names = (change.name,) if isinstance(change, RestartWorker) else changed.names
    rows = [_row(name, before.get(name, (0, "new")), change, changed) for name in names]
    await exchange.answer_json(200, {"workers": rows})
    return True


def _row(name: WorkerName, before: tuple[int, str], change: PoolChange, changed: ChangedWorkers) -> dict[str, Any]:
    """A worker of the answer: its incarnation before the change, 0 where it is new, and what becomes of it. `before`:
    that, and its state, as this router knew them; of who starts and who leaves the controller knows better."""
    incarnation, state = before
    match change:
        case AddWorkers():
            outcome = "starts"
        case ScalePools() if name in changed.start or name in changed.leave:
            outcome = "starts" if name in changed.start else "leaves"
        case ScalePools():
            outcome = "starts" if state in ("new", *GONE) else "leaves"
        case RestartWorker():
            outcome = "leaves and starts again" if state in ("ready", "draining") else "starts"
        case CordonNode() | UncordonNode():
            outcome = "is started elsewhere"
    return {"name": name, "incarnation": incarnation, "outcome": outcome}


def _query(exchange: HttpExchange) -> dict[str, str]:
    return {
        key: values[-1] for key, values in parse_qs(exchange.query.decode("latin-1"), keep_blank_values=True).items()
    }


def _role(name: str) -> Role:
    if name not in set(Role):
        raise RequestError(f"a role is {', '.join(Role)}; got {name!r:.40}")
    return Role(name)


def _count(what: str, text: str) -> int:
    if not (text.isascii() and text.isdigit() and len(text) <= 4 and int(text) <= MAX_AT_ONCE):
        raise RequestError(f"{what} must be a whole number of workers, at most {MAX_AT_ONCE}; got {text!r:.40}")
    return int(text)


def _invalid(error: RequestError) -> ApiError:
    return ApiError(400, str(error), "invalid_request_error", "invalid")
