"""The operators' endpoint of request records: what became of a request, or what it does now (`twinpool explain`)."""

from __future__ import annotations

import urllib.parse

from twinpool.contracts.messages.record_ring import in_order
from twinpool.router.api.admin_status import forbidden
from twinpool.router.api.asgi_exchange import HttpExchange
from twinpool.router.openai.api_errors import ApiError
from twinpool.router.service.router_service import RouterService

PREFIX = "/cluster/requests/"
ID_CHARS = 256


async def explain(service: RouterService, exchange: HttpExchange) -> None:
    """Answer with the records of a request's choices, found here, at the controller or at other routers."""
    if failure := forbidden(service, exchange):
        await exchange.fail(failure)
        return
    asked = urllib.parse.unquote(exchange.path.removeprefix(PREFIX))
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
