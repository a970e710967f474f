"""The dashboard: its page, which anybody may load, and its events, which operators alone may.

    GET /dashboard            the page, and the files that it is made of below it
    GET /cluster/dashboard    events: `past`, then a `frame` about once a second, `away` while the controller is away

The page asks for events by fetch, so that it can send an operator's key. It says nothing of the cluster by itself and
loads nothing from elsewhere, which its Content-Security-Policy has browsers keep.
"""

from __future__ import annotations

import asyncio
from functools import cache
from pathlib import Path

from twinpool.router.api.admin_status import forbidden
from twinpool.router.api.asgi_exchange import HttpExchange
from twinpool.router.openai.api_errors import ApiError, ClientGone
from twinpool.router.service.dashboard_relay import NoViewer
from twinpool.router.service.router_service import RouterService

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
    if failure := forbidden(service, exchange) or _cross_site(exchange):
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
