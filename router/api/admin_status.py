"""Operators' endpoints that show: status, check, what became of a request, and the dashboard.

`router.api.admin_changes` has those that change the cluster. Who may ask is looked at for all of them alike, before any
is called (`forbidden`). With ``TWINPOOL_ADMIN_TOKEN`` or ``security.admin_keys_file`` set every request needs the token
or one of the keys. Without either only clients on this machine are answered, and neither pages of a browser nor
requests through a proxy on this machine, both of which reach the router from loopback too. A worker that doesn't answer
within `STATUS_DEADLINE_S` or `CHECK_DEADLINE_S` is shown as unreachable.

Records tell what became of a request, or what it does now (`twinpool explain`).

The dashboard has a page, which anybody may load, and events, which operators alone may have:

    GET /dashboard            the page, and the files that it is made of below it
    GET /cluster/dashboard    events: `past`, then a `frame` about once a second, `away` while the controller is away

The page asks for events by fetch, so that it can send an operator's key. It says nothing of the cluster by itself and
loads nothing from elsewhere, which its Content-Security-Policy has browsers keep.
"""

from __future__ import annotations

import asyncio
import hmac
import ipaddress
import os
import platform
import socket
import time
import urllib.parse
from collections import Counter
from functools import cache
from pathlib import Path
from typing import Any

from msgspec.structs import replace

from twinpool.contracts.build_id import build_id
from twinpool.contracts.ids import Role
from twinpool.contracts.message_types import as_dict
from twinpool.contracts.messages.request_record import ID_CHARS, in_order
from twinpool.contracts.messages.router_report import AutoscalerView, RouterReport
from twinpool.contracts.messages.worker_status import CheckReport, WorkerStatus, WorkerView
from twinpool.router.api.http_exchange import HttpExchange
from twinpool.router.openai.api_errors import ApiError, ClientGone
from twinpool.router.service.controller_calls import NoViewer
from twinpool.router.service.router_service import RouterService
from twinpool.router.state.worker_table import GONE, weights_version

TOKEN_VARIABLE = "TWINPOOL_ADMIN_TOKEN"
STATUS_DEADLINE_S = 1.0
CHECK_DEADLINE_S = 10.0
FORWARDED = (b"forwarded", b"x-forwarded-for", b"x-forwarded-host", b"x-real-ip", b"via")
"""Headers that a proxy adds."""
STARTING = "starting"
"""Error code of a router that has not received the controller's table of workers yet."""


def forbidden(service: RouterService, exchange: HttpExchange) -> ApiError | None:
    """Return the error if this client may not operate the cluster, else None."""
    token = os.environ.get(TOKEN_VARIABLE, "")
    if token or service.admin_keys is not None:
        given = exchange.header(b"authorization").removeprefix("Bearer ").strip()
        if token and hmac.compare_digest(given.encode(), token.encode()):
            return None
        if service.admin_keys is not None:
            if given and service.admin_keys.tenant_of(given) is not None:
                return None
            return _forbidden("cluster endpoints need an operator's key, as Authorization: Bearer KEY")
        return _forbidden(f"cluster endpoints need the token of {TOKEN_VARIABLE}, as Authorization: Bearer TOKEN")
    if not _is_loopback(exchange.client_host):
        return _forbidden(f"cluster endpoints answer on loopback only, unless {TOKEN_VARIABLE} is set for serve")
    # A page in the operator's browser can reach loopback too; browsers send an Origin header, tools don't.
    if exchange.header(b"origin") or any(exchange.header(name) for name in FORWARDED) or not _names_this_host(exchange):
        text = f"set {TOKEN_VARIABLE} for serve and for its operators"
        return _forbidden(f"cluster endpoints don't answer browsers and proxies on this machine: {text}")
    return None


def _forbidden(message: str) -> ApiError:
    return ApiError(403, message, "permission_error", "forbidden")


def _is_loopback(address: str) -> bool:
    try:
        return ipaddress.ip_address(address).is_loopback
    except ValueError:
        return False


def _names_this_host(exchange: HttpExchange) -> bool:
    """Whether the Host header names this machine: another name that resolves to loopback is an attack or a proxy's."""
    host = exchange.header(b"host")
    name = host.rpartition(":")[0] if host.rpartition(":")[2].isdigit() else host
    name = name.strip("[]").lower()
    return name in ("", "localhost", socket.gethostname().lower()) or _is_loopback(name)


def unknown_as_yet(service: RouterService) -> ApiError | None:
    """Return the error (503) of a router that has not received the controller's table of workers yet, else None.

    Such a router must not answer that there are no workers.
    """
    if service.worker_links.known:
        return None
    message = "this router has just started and doesn't know the workers yet; ask again"
    return ApiError(503, message, "server_error", STARTING)


async def status(service: RouterService, exchange: HttpExchange) -> None:
    """Answer with a row for each worker that the controller knows, asked now, prefill first, then by name; with the
    build of this router, and a row for each router that the controller hears of."""
    if failure := unknown_as_yet(service):
        await exchange.fail(failure)
        return
    views = service.worker_links.views
    asked = asyncio.gather(*(_status_of(service, view) for view in views))
    routers, lines = await asyncio.gather(_routers(service), asked)
    pairs = sorted(zip(lines, views, strict=True), key=lambda pair: _order(pair[0]))
    shown = [
        status_line(line) | _breaker_of(service, line) | node_of(view) | _link_of(service, view) for line, view in pairs
    ]
    latency = service.controller.latency
    scaler = {"autoscaler": _autoscaler_of(latency.view)} if latency is not None else {}
    plane = service.controller.control_plane()
    controllers = {"controllers": as_dict(plane)} if plane is not None else {}
    known = {"routers": [router_row(report) for report in routers]} if routers is not None else {}
    load = _load_of(service, routers)
    held = Counter(digest for line in lines for digest in line.adapters)
    adapters = [as_dict(one) | {"workers": held[one.digest]} for one in service.adapters]
    told = {"adapters": adapters} if service.adapter_settings.used else {}
    served = {**as_dict(service.core.workers.served), "version": weights_version(service.core.workers)}
    more = {**load, **known, **scaler, **controllers, **told, "weights": served}
    answer = {"workers": shown, "router_build": build_id(), **more}
    await exchange.answer_json(200, answer)


def _load_of(service: RouterService, routers: list[RouterReport] | None) -> dict[str, Any]:
    """What is served, for how long by this router, and what goes on: of all routers where the controller tells of them,
    else of this one."""
    requests, here = service.core.requests, (platform.node(), os.getpid())
    # What this router has told the controller of itself is seconds old.
    others = [report for report in routers or () if (report.node, report.pid) != here]
    return {
        "model": service.spec.name,
        "router_up_s": round(max(0.0, time.time() - service.started), 1),
        **({"tokens_per_s": round(sum(report.tokens_per_s for report in routers), 1)} if routers else {}),
        "in_flight": requests.in_flight + sum(report.in_flight for report in others),
        "waiting": requests.waiting + sum(report.waiting for report in others),
    }


async def _routers(service: RouterService) -> list[RouterReport] | None:
    """The routers that the controller hears of; None where it doesn't answer, or is of a build that doesn't tell."""
    source = service.controller.source
    if source is None:
        return None
    try:
        async with asyncio.timeout(STATUS_DEADLINE_S):
            return await source.routers()
    except (ConnectionError, TimeoutError):
        return None


def router_row(report: RouterReport) -> dict[str, Any]:
    """Return the row of a router, by its latest report."""
    return {
        "name": report.identity.name,
        "node": report.node,
        "pid": report.pid,
        "address": report.identity.address,
        "build": report.build,
        "settings": report.identity.settings,
        "kept": report.identity.kept,
        "in_flight": report.in_flight,
        "tokens_per_s": round(report.tokens_per_s, 1),
    }


async def _status_of(service: RouterService, view: WorkerView) -> WorkerStatus:
    if view.status.state in GONE or view.status.state == "starting":
        return view.status
    port = service.worker_links.port((view.record.name, view.record.incarnation))
    try:
        if port is None:
            raise ConnectionError("no link")
        async with asyncio.timeout(STATUS_DEADLINE_S):
            return replace(await port.status(), last_end=view.status.last_end)
    except (OSError, TimeoutError):
        return replace(view.status, state="unreachable")


def _autoscaler_of(view: AutoscalerView) -> dict[str, Any]:
    """Return what the autoscaler told last: its pools, its latest decisions, and for how long it is held."""
    return {
        "pools": [
            {
                "role": str(pool.role),
                "ready": pool.ready,
                "wanted": pool.wanted,
                "least": pool.least,
                "most": pool.most,
                "need": round(pool.need, 2) if pool.need >= 0 else None,
                "why": pool.why,
            }
            for pool in view.pools
        ],
        "decisions": [{"ago_s": round(one.ago_s, 1), "text": one.text} for one in view.decisions],
        "held_s": round(view.held_s, 1),
        "counters": view.counters,
    }


def node_of(view: WorkerView) -> dict[str, Any]:
    """Return a row's keys about the worker's node, settings, build and fingerprint, which the controller knows."""
    record = view.record
    return {
        "node": record.node,
        "node_id": record.node_id,
        "rank_nodes": [[one.node, one.node_id] for one in record.rank_nodes],
        "cordoned": view.cordoned,
        "settings": record.settings,
        "build": record.build,
        "weights_version": record.weights_version,
        "fingerprint": as_dict(record.fingerprint) if record.fingerprint is not None else None,
    }


def status_line(s: WorkerStatus) -> dict[str, Any]:
    """Return the part of a worker's row that comes from its status; `stalled_s` in seconds, with one decimal."""
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
        "last_end": s.last_end,
        "waits": s.waits,
        "plane": s.plane,
        "counters": s.counters,
    }


def _breaker_of(service: RouterService, s: WorkerStatus) -> dict[str, str]:
    """Return a row's key about this router's circuit breaker for the worker; empty for a worker it doesn't know."""
    entry = service.core.workers.get((s.name, s.incarnation))
    return {"breaker": str(entry.breaker.state)} if entry is not None else {}


def _link_of(service: RouterService, view: WorkerView) -> dict[str, str]:
    """Return a row's key about why this router has no link to the worker; empty text where it has."""
    return {"unlinked": service.worker_links.refused((view.record.name, view.record.incarnation))}


def _order(s: WorkerStatus) -> tuple[bool, tuple[str, int]]:
    return (s.role is not Role.PREFILL, natural(s.name))


def natural(name: str) -> tuple[str, int]:
    """Return the sorting key of a worker's name, by which ``decode-2`` comes before ``decode-10``."""
    head, _, number = name.rpartition("-")
    return (head, int(number)) if number.isdigit() else (name, 0)


async def check(service: RouterService, exchange: HttpExchange) -> None:
    """Have every worker and the router recount their books; answer with the violations of each."""
    if failure := unknown_as_yet(service):
        await exchange.fail(failure)
        return
    alive = [v for v in service.worker_links.views if v.status.state not in GONE and v.status.state != "starting"]
    alive.sort(key=lambda v: _order(v.status))
    reports = await asyncio.gather(*(_check_of(service, view) for view in alive))
    workers = [
        {
            "name": r.name,
            "checked": {
                "pages": r.pages,
                "slots": r.slots,
                "leases": r.leases,
                "rooms": r.rooms,
                "kept_answers": r.kept_answers,
            },
            "violations": list(r.violations),
        }
        for r in reports
    ]
    own = service.check()
    if own:
        none = {"pages": 0, "slots": 0, "leases": 0, "rooms": 0, "kept_answers": 0}
        workers.append({"name": "router", "checked": none, "violations": own})
    ok = not any(w["violations"] for w in workers)
    await exchange.answer_json(200, {"ok": ok, "workers": workers})


async def _check_of(service: RouterService, view: WorkerView) -> CheckReport:
    port = service.worker_links.port((view.record.name, view.record.incarnation))
    try:
        if port is None:
            raise ConnectionError("no link to it")
        async with asyncio.timeout(CHECK_DEADLINE_S):
            return await port.check()
    except (OSError, TimeoutError) as error:
        reason = str(error) or f"no answer within {CHECK_DEADLINE_S:g} s"
        return CheckReport(view.record.name, 0, 0, 0, 0, (f"unreachable: {reason}",))


REQUESTS_PREFIX = "/cluster/requests/"


async def explain(service: RouterService, exchange: HttpExchange) -> None:
    """Answer with the records of a request's choices, found here, at the controller or at other routers."""
    asked = urllib.parse.unquote(exchange.path.removeprefix(REQUESTS_PREFIX))
    if len(asked) > ID_CHARS:
        message = f"a request's id has at most {ID_CHARS} characters"
        await exchange.fail(ApiError(400, message, "invalid_request_error", "bad_request_id"))
        return
    records = service.records.kept.find(asked)
    elsewhere = "" if service.records.recorder is not None else "; there are no others"
    kept_s = service.records.kept.kept_s
    if not records and service.records.recorder is not None:
        try:
            found = await service.records.recorder.find_records(asked)
        except ConnectionError as error:
            elsewhere = f"; the controller, who asks the other routers, doesn't answer: {error}"
        else:
            records, kept_s = in_order(found.records), max(kept_s, found.kept_s)
            silent = found.asked - found.answered
            elsewhere = f"; {silent} of {found.asked} routers did not answer" if silent else "; nor have other routers"
    if not records:
        await exchange.fail(
            ApiError(404, _unknown(service, asked, kept_s, elsewhere), "invalid_request_error", "unknown")
        )
        return
    await exchange.answer_json(200, {"records": [record.as_json() for record in records]})


def _unknown(service: RouterService, asked: str, kept_s: float, elsewhere: str) -> str:
    """What is said of an id of which nothing is known."""
    config = service.config
    if not config.kept_records:
        return f"no request {asked!r} is running, and records of others aren't kept (router.kept_records is 0)"
    held = f"those here go back {kept_s:.0f} s" if kept_s else "there are none yet"
    return (
        f"nothing is known of a request {asked!r}{elsewhere}. Each router keeps its latest {config.kept_records} "
        f"records (router.kept_records) in {config.kept_record_bytes // 1024**2} MiB (router.kept_record_bytes), "
        f"and {held}; of requests that were refused it keeps the latest {config.kept_refusals} (router.kept_refusals). "
        f"Give the id of an answer, or what it has in the header x-request-id"
    )


FOLDER = Path(__file__).parent / "dashboard"
PAGE = "/dashboard"
KINDS = {".html": b"text/html; charset=utf-8", ".css": b"text/css", ".js": b"text/javascript"}
HEADERS = (
    (
        b"content-security-policy",
        b"default-src 'none'; script-src 'self'; style-src 'self'; connect-src 'self'; img-src data:; "
        b"base-uri 'none'; form-action 'none'; frame-ancestors 'none'",
    ),
    (b"x-content-type-options", b"nosniff"),
    (b"referrer-policy", b"no-referrer"),
    (b"cross-origin-opener-policy", b"same-origin"),
    (b"cache-control", b"no-cache"),
)
WRITE_S = 30.0
"""Seconds that one event may take to a viewer that doesn't read, before its connection is closed."""
SITE_HEADER = b"sec-fetch-site"
OWN_SITES = frozenset({"", "same-origin", "none"})
"""What browsers say of a request by the page itself; programs say nothing."""


@cache
def page_files() -> dict[str, tuple[bytes, bytes]]:
    """The page's files by path, each as its content type and its bytes; read once."""
    found = {}
    for file in sorted(FOLDER.iterdir()):
        if file.suffix in KINDS:
            path = PAGE if file.name == "index.html" else f"{PAGE}/{file.name}"
            found[path] = KINDS[file.suffix], file.read_bytes()
    return found


async def page(service: RouterService, exchange: HttpExchange) -> None:
    """Answer with a file of the page."""
    kind, body = page_files()[exchange.path]
    await exchange.answer(200, body, kind=kind, headers=HEADERS)


async def events(service: RouterService, exchange: HttpExchange) -> None:
    """Answer with the dashboard's events until the client leaves."""
    if failure := _cross_site(exchange):
        return await exchange.fail(failure)
    if service.controller.dashboard is None:
        return await exchange.fail(ApiError(409, "this router shows no dashboard", "conflict_error", "conflict"))
    try:
        viewer = service.controller.dashboard.open()
    except NoViewer as error:
        return await exchange.fail(ApiError(503, str(error), "server_error", "no_viewer", retry_after_s=10))
    try:
        exchange.on_gone(viewer.close)
        await exchange.begin_events()
        async for event in viewer.events():
            async with asyncio.timeout(WRITE_S):
                await exchange.write(event)
        await exchange.write(b"", more=False)
    except TimeoutError:
        raise ClientGone("the viewer doesn't read") from None
    finally:
        viewer.close()


def _cross_site(exchange: HttpExchange) -> ApiError | None:
    """Return the error if another site's page asks, which could keep a viewer's place though it couldn't read."""
    if exchange.header(SITE_HEADER) in OWN_SITES:
        return None
    return ApiError(403, "the dashboard's events are for its own page", "permission_error", "forbidden")
