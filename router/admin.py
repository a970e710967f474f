"""Operators' endpoints: status, check, drain and undrain.

Only for clients on this machine, or with the token of ``TWINPOOL_ADMIN_TOKEN``. A worker that doesn't answer is shown
as ``unreachable``; nothing here waits longer than the ports' own deadlines.
"""

from __future__ import annotations

import asyncio
import hmac
import ipaddress
import os
from dataclasses import replace
from typing import Any
from urllib.parse import parse_qs

from contracts.ids import Role
from contracts.messages import CheckReport, WorkerStatus
from contracts.ports import WorkerView
from router.failures import Failure
from router.service import RouterService
from router.web import Exchange
from router.workers import GONE, Entry

TOKEN_VARIABLE = "TWINPOOL_ADMIN_TOKEN"
STATUS_DEADLINE_S = 1.0
CHECK_DEADLINE_S = 10.0


def _forbidden(exchange: Exchange) -> Failure | None:
    token = os.environ.get(TOKEN_VARIABLE, "")
    given = exchange.header(b"authorization").removeprefix("Bearer ").strip()
    if token and given and hmac.compare_digest(given.encode(), token.encode()):
        return None
    try:
        local = ipaddress.ip_address(exchange.client_host).is_loopback
    except ValueError:
        local = False
    # A page in the operator's browser can reach loopback too; browsers name their origin, tools don't.
    if local and not exchange.header(b"origin"):
        return None
    return Failure(
        403,
        f"cluster endpoints answer on loopback, or with the token in {TOKEN_VARIABLE}",
        "permission_error",
        "forbidden",
    )


async def status(service: RouterService, exchange: Exchange) -> None:
    """Every worker the controller knows, asked now."""
    if failure := _forbidden(exchange):
        await exchange.fail(failure)
        return
    lines = await asyncio.gather(*(_status_of(service, view) for view in service.fleet.views))
    shown = [_status_line(line) | _breaker_of(service, line) for line in sorted(lines, key=_order)]
    await exchange.answer_json(200, {"workers": shown})


async def _status_of(service: RouterService, view: WorkerView) -> WorkerStatus:
    if view.status.state in GONE or view.status.state == "starting":
        return view.status
    port = service.fleet.port((view.record.name, view.record.incarnation))
    try:
        if port is None:
            raise ConnectionError("no link")
        async with asyncio.timeout(STATUS_DEADLINE_S):
            return await port.status()
    except (OSError, TimeoutError):
        return replace(view.status, state="unreachable")


def _status_line(s: WorkerStatus) -> dict[str, Any]:
    return {
        "name": s.name,
        "role": str(s.role),
        "state": s.state,
        "pid": s.pid,
        "node": s.node,
        "incarnation": s.incarnation,
        "running": s.running,
        "waiting": s.waiting,
        "pages_total": s.pages_total,
        "pages_free": s.pages_free,
        "outgoing": s.outgoing,
        "stalled_s": round(s.stalled_s, 1),
        "counters": s.counters,
    }


def _breaker_of(service: RouterService, s: WorkerStatus) -> dict[str, str]:
    """Whether this router sends the worker requests (`router.breaker`)."""
    entry = service.brain.workers.get((s.name, s.incarnation))
    return {"breaker": str(entry.breaker.state)} if entry is not None else {}


def _order(s: WorkerStatus) -> tuple[bool, tuple[str, int]]:
    return (s.role is not Role.PREFILL, _natural(s.name))


def _natural(name: str) -> tuple[str, int]:
    head, _, number = name.rpartition("-")
    return (head, int(number)) if number.isdigit() else (name, 0)


async def check(service: RouterService, exchange: Exchange) -> None:
    """Every worker recounts its books; so does the router."""
    if failure := _forbidden(exchange):
        await exchange.fail(failure)
        return
    alive = [v for v in service.fleet.views if v.status.state not in GONE and v.status.state != "starting"]
    alive.sort(key=lambda v: _order(v.status))
    reports = await asyncio.gather(*(_check_of(service, view) for view in alive))
    workers = [
        {
            "name": r.name,
            "checked": {"pages": r.pages, "slots": r.slots, "leases": r.leases, "rooms": r.rooms},
            "violations": list(r.violations),
        }
        for r in reports
    ]
    own = service.check()
    if own:
        none = {"pages": 0, "slots": 0, "leases": 0, "rooms": 0}
        workers.append({"name": "router", "checked": none, "violations": own})
    ok = not any(w["violations"] for w in workers)
    await exchange.answer_json(200, {"ok": ok, "workers": workers})


async def _check_of(service: RouterService, view: WorkerView) -> CheckReport:
    port = service.fleet.port((view.record.name, view.record.incarnation))
    try:
        if port is None:
            raise ConnectionError("no link to it")
        async with asyncio.timeout(CHECK_DEADLINE_S):
            return await port.check()
    except (OSError, TimeoutError) as error:
        reason = str(error) or f"no answer within {CHECK_DEADLINE_S:g} s"
        return CheckReport(view.record.name, 0, 0, 0, 0, (f"unreachable: {reason}",))


async def drain(service: RouterService, exchange: Exchange) -> None:
    """Stop a worker's admission; it leaves when its work is done. Refused for the last of its role unless ``force``."""
    name = exchange.path.removeprefix("/cluster/drain/")
    force = parse_qs(exchange.query.decode("latin-1")).get("force", ["false"])[-1].lower() in ("1", "true", "yes")
    entry = _find(service, exchange, name)
    if isinstance(entry, Entry):
        state = entry.status.state
        if state == "draining":
            entry = _conflict(f"{name} is draining already")
        elif state != "ready":
            entry = _conflict(f"{name} is {state}: only a ready worker can be drained")
        elif not force and [e.record.name for e in service.brain.serving(entry.record.role)] in ([name], []):
            entry = _conflict(
                f"{name} is the last {entry.record.role} worker that serves; drain it with --force (force=true)"
            )
    await _tell(service, exchange, entry, drain=True)


async def undrain(service: RouterService, exchange: Exchange) -> None:
    """Let a draining worker admit again, until it has left."""
    name = exchange.path.removeprefix("/cluster/undrain/")
    entry = _find(service, exchange, name)
    if isinstance(entry, Entry):
        state = entry.status.state
        if state in GONE:
            entry = _conflict(f"{name} has left" if state == "left" else f"{name} is dead")
        elif state != "draining":
            entry = _conflict(f"{name} is not draining; it is {state}")
    await _tell(service, exchange, entry, drain=False)


def _find(service: RouterService, exchange: Exchange, name: str) -> Entry | Failure:
    if failure := _forbidden(exchange):
        return failure
    entry = service.brain.workers.named(name)
    if entry is not None:
        return entry
    known = ", ".join(sorted((str(e.record.name) for e in service.brain.workers), key=_natural)) or "none"
    return Failure(404, f"no worker is named {name!r}; there are: {known}", "invalid_request_error", "unknown_worker")


def _conflict(message: str) -> Failure:
    return Failure(409, message, "invalid_request_error", "conflict")


async def _tell(service: RouterService, exchange: Exchange, target: Entry | Failure, *, drain: bool) -> None:
    if isinstance(target, Failure):
        await exchange.fail(target)
        return
    port = service.fleet.port(target.key)
    try:
        if port is None:
            raise ConnectionError(f"{target.record.name} has no link")
        async with asyncio.timeout(STATUS_DEADLINE_S + 4.0):
            answer = await (port.drain() if drain else port.undrain())
    except (OSError, TimeoutError) as error:
        reason = str(error) or "no answer in time"
        failure = Failure(503, f"{target.record.name} can't be reached: {reason}", "server_error", "unreachable")
        await exchange.fail(failure)
        return
    service.brain.on_status(answer)
    await exchange.answer_json(200, _status_line(answer))
