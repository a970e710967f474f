"""Operators' endpoints: status and check (`router.drains` has drain, undrain and role).

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

from contracts.ids import Role
from contracts.messages import CheckReport, WorkerStatus
from contracts.ports import WorkerView
from router.failures import Failure
from router.service import RouterService
from router.web import Exchange
from router.workers import GONE

TOKEN_VARIABLE = "TWINPOOL_ADMIN_TOKEN"
STATUS_DEADLINE_S = 1.0
CHECK_DEADLINE_S = 10.0


def forbidden(exchange: Exchange) -> Failure | None:
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
    if failure := forbidden(exchange):
        await exchange.fail(failure)
        return
    lines = await asyncio.gather(*(_status_of(service, view) for view in service.fleet.views))
    shown = [status_line(line) | _breaker_of(service, line) for line in sorted(lines, key=_order)]
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


def status_line(s: WorkerStatus) -> dict[str, Any]:
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
    return (s.role is not Role.PREFILL, natural(s.name))


def natural(name: str) -> tuple[str, int]:
    head, _, number = name.rpartition("-")
    return (head, int(number)) if number.isdigit() else (name, 0)


async def check(service: RouterService, exchange: Exchange) -> None:
    """Every worker recounts its books; so does the router."""
    if failure := forbidden(exchange):
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
