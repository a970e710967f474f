"""What `GET /` answers: what is here, as a small page for a browser and as JSON for anything else.

It tells a stranger no more than `/health` and `/openapi.json` do: where API keys are needed, not even the model's name.
The operators' port has one of its own; the clients' doesn't say where that is.
"""

from __future__ import annotations

import base64
import hashlib
from collections.abc import Iterable, Mapping
from html import escape
from typing import Any

from twinpool.contracts.build_id import package_version
from twinpool.router.api.http_exchange import HttpExchange
from twinpool.router.api.openapi import openapi_document
from twinpool.router.service.router_service import RouterService

PATH = "/"
DASHBOARD = "/dashboard"
STYLE = (
    ":root{color-scheme:light dark}"
    "body{font:16px/1.5 system-ui,sans-serif;max-width:44rem;margin:3rem auto;padding:0 1rem}"
    "code,td:first-child{font-family:ui-monospace,monospace;font-size:.9em}td{padding:.1rem 1rem .1rem 0;"
    "vertical-align:top}h1{font-size:1.4rem}h2{font-size:1.05rem;margin-top:2rem}"
    "@media(max-width:40rem){td{display:block;padding:0}td:first-child{padding-top:.6rem}}"
)
_STYLE_HASH = base64.b64encode(hashlib.sha256(STYLE.encode()).digest()).decode()
HEADERS = (
    (
        b"content-security-policy",
        f"default-src 'none'; style-src 'sha256-{_STYLE_HASH}'; base-uri 'none'; form-action 'none'; "
        "frame-ancestors 'none'".encode(),
    ),
    (b"x-content-type-options", b"nosniff"),
    (b"referrer-policy", b"no-referrer"),
    (b"cache-control", b"no-cache"),
    (b"vary", b"accept"),
)


async def answer_front(
    service: RouterService, exchange: HttpExchange, routes: Iterable[str], *, problems: bool, dashboard: bool
) -> None:
    """Answer with what is here. `routes`: the paths, or their beginnings, that this port has. `problems`: whether this
    router can't serve now. `dashboard`: whether this port has the dashboard."""
    await show_front(exchange, describe(service, routes, problems=problems, dashboard=dashboard))


async def show_front(exchange: HttpExchange, about: Mapping[str, Any]) -> None:
    """Answer with what `describe` says."""
    if "text/html" in exchange.header(b"accept").lower():
        await exchange.answer(200, page_of(about).encode(), kind=b"text/html; charset=utf-8", headers=HEADERS)
    else:
        await exchange.answer_json(200, about)


def describe(service: RouterService, routes: Iterable[str], *, problems: bool, dashboard: bool) -> dict[str, Any]:
    """What is here, as JSON has it."""
    keys = service.admission.keys is not None
    return {
        "server": "twinpool",
        "version": package_version(),
        "status": "unhealthy" if problems else "ok",
        **({} if keys else {"models": list(service.spec.names)}),
        "needs_key": keys,
        "endpoints": endpoints_of(routes),
        **({"dashboard": DASHBOARD} if dashboard else {}),
        "reference": "/openapi.json",
    }


def endpoints_of(routes: Iterable[str]) -> list[dict[str, str]]:
    """Each documented method of these paths, or paths below them, with what it is for."""
    served, found = tuple(routes), []
    for path, methods in openapi_document()["paths"].items():
        head = path.partition("{")[0]
        if path != PATH and (path in served or (head != path and head in served)):
            found += [
                {"method": method.upper(), "path": path, "about": operation["summary"]}
                for method, operation in methods.items()
            ]
    return found


def page_of(about: Mapping[str, Any]) -> str:
    """The page for a browser."""
    if about["needs_key"]:
        model = "An API key is needed, and says which model is served: <code>GET /v1/models</code>."
    else:
        model = f"Serves <b>{' also as '.join(escape(name) for name in about['models'])}</b>."
    state = "It can answer now." if about["status"] == "ok" else "It can't answer now: see <a href=/health>/health</a>."
    seen = f"<a href={about['dashboard']}>Dashboard</a> · " if "dashboard" in about else ""
    rows = "".join(
        f"<tr><td>{one['method']} {escape(one['path'])}<td>{escape(one['about'])}" for one in about["endpoints"]
    )
    return (
        f"<!doctype html><html lang=en><meta charset=utf-8><meta name=viewport content='width=device-width'>"
        f"<title>Twinpool</title><style>{STYLE}</style><h1>Twinpool {escape(about['version'])}</h1>"
        f"<p>{model} {state}<p>{seen}<a href=/health>Health</a> · <a href={about['reference']}>OpenAPI reference</a>"
        f"<h2>Endpoints</h2><table>{rows}</table>"
        "<p>Point a client of the OpenAI API at <code>/v1</code> of this address. How to use and operate it says the "
        "source's <code>docs</code> folder: <code>using.md</code> and <code>operating.md</code>.</html>"
    )
