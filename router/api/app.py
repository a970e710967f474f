"""The HTTP application: routes of OpenAI's and of operators' endpoints, and the handlers of the former."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import asdict
from types import MappingProxyType

from twinpool.contracts.build_id import package_version
from twinpool.contracts.errors import TwinpoolError
from twinpool.contracts.json_logs import log
from twinpool.router.api import admin_changes as changes
from twinpool.router.api import admin_status as admin
from twinpool.router.api.admin_models import SERVED_ROUTES, Handler, health_of, health_problems, model_card
from twinpool.router.api.batch_endpoints import PATHS, BatchEndpoints
from twinpool.router.api.dashboard.front_page import PATH as FRONT
from twinpool.router.api.dashboard.front_page import answer_front
from twinpool.router.api.http_exchange import AsgiReceive, AsgiScope, AsgiSend, HttpExchange
from twinpool.router.api.http_protocol import OPEN_PATHS
from twinpool.router.api.openapi import openapi_document
from twinpool.router.batch.batch_runner import BatchRunner
from twinpool.router.batch.batch_store import BatchStore
from twinpool.router.openai.api_errors import (
    ApiError,
    BodyTooLarge,
    BufferFull,
    ClientGone,
    NotJson,
    QueueFull,
    ShuttingDown,
    failure_of,
    failure_of_done,
    unsupported_reason,
)
from twinpool.router.openai.parse_request import check_model
from twinpool.router.openai.request_headers import NO_TRACE, PREVIEW_HEADER, read_request_headers, read_traceparent
from twinpool.router.openai.response_stream import WRITE_BYTES, ResponseStream, StreamHeartbeat
from twinpool.router.openai.response_writer import version_of
from twinpool.router.records.kept_records import RefusedRequest
from twinpool.router.security.tenant_accounts import TenantLimited
from twinpool.router.service.open_answers import ClientRequest, preview
from twinpool.router.service.router_service import RouterService
from twinpool.router.tokenizer_pool.tokenizer_process import FrameKind

ERROR_WRITE_TIMEOUT_S = 5.0
"""How long writing the error of an answer that was cut short may take."""
CLIENT_GRACE_S = 30.0
"""How long after its deadline a request may end before the handler itself gives up on it."""

BATCHES = "twinpool.batches"
"""The endpoints of files and batches, in the scope of a request."""
App = Callable[[AsgiScope, AsgiReceive, AsgiSend], Awaitable[None]]
Routes = dict[str, dict[str, Handler]]
"""Handlers by path, or by the beginning of a path, and by method."""


def create_app(service: RouterService) -> App:
    """Return the ASGI application of one router; its lifespan events start and close `service`.

    Where operators have a port of their own, it has no `OPERATORS` paths. Raises `ConfigError` where `batch.folder`
    can't be used.
    """
    routes = (CLIENT_ROUTES if service.security.admin_port else {**ROUTES, **PAGE_ROUTES}) | FRONT_ROUTES
    prefixes = CLIENT_PREFIX_ROUTES if service.security.admin_port else PREFIX_ROUTES
    origins = service.security.origins
    runner = BatchRunner(service, BatchStore(service.batch)) if service.batch.folder else None
    batches = BatchEndpoints(runner)

    async def app(scope: AsgiScope, receive: AsgiReceive, send: AsgiSend) -> None:
        if scope["type"] == "http":
            scope[BATCHES] = batches
            exchange = HttpExchange(scope, receive, send)
            exchange.allow_origin(origins)
            await serve_exchange(service, exchange, find_handler(exchange, routes, prefixes), refusal_of)
        elif scope["type"] == "lifespan":
            await run_lifespan((service,), runner, receive, send)

    return app


def create_admin_app(service: RouterService) -> App:
    """Return the ASGI application of the operators' port."""

    async def app(scope: AsgiScope, receive: AsgiReceive, send: AsgiSend) -> None:
        exchange = HttpExchange(scope, receive, send)
        handler = find_handler(exchange, ADMIN_ROUTES, ADMIN_PREFIX_ROUTES)
        await serve_exchange(service, exchange, handler, admin_refusal_of)

    return app


async def run_lifespan(
    services: Sequence[RouterService], runner: BatchRunner | None, receive: AsgiReceive, send: AsgiSend
) -> None:
    """Start and close `services`, and what runs batches, as the server's lifespan events say."""
    while True:
        message = await receive()
        if message["type"] == "lifespan.startup":
            for service in services:
                await service.start()
            if runner is not None:
                runner.start()
            await send({"type": "lifespan.startup.complete"})
        else:
            if runner is not None:
                await runner.close()
            for service in services:
                await service.close()
            await send({"type": "lifespan.shutdown.complete"})
            return


async def serve_exchange(
    service: RouterService,
    exchange: HttpExchange,
    handler: Handler | ApiError,
    refuse: Callable[[RouterService, HttpExchange], ApiError | None],
) -> None:
    """Answer one request with `handler`, or with the error that this is, unless `refuse` says why it may not pass."""
    try:
        if exchange.is_preflight:
            await exchange.answer_preflight()
        elif isinstance(handler, ApiError):
            await exchange.fail(handler)
        elif (refusal := refuse(service, exchange)) is not None:
            if exchange.path in TEXT_KINDS:
                keep_refusal(service, exchange, refusal)
            await (exchange.refuse_body if exchange.method == "POST" else exchange.fail)(refusal)
        else:
            await handler(service, exchange)
    except ClientGone:
        pass
    except (NotJson, BodyTooLarge, BufferFull, QueueFull, ShuttingDown, TenantLimited) as error:
        await (exchange.fail if exchange.body_done else exchange.refuse_body)(failure_of(error))
    except TwinpoolError as error:
        await exchange.fail(failure_of(error))
    except Exception:
        log("handler failed", trace=True, client_id=exchange.client_id, path=exchange.path)
        if exchange.started:
            raise
        await exchange.fail(ApiError(500, "the router failed inside; see its log", "server_error", "internal"))
    finally:
        exchange.release()


def refusal_of(service: RouterService, exchange: HttpExchange) -> ApiError | None:
    """Return why a request may not pass, None where it may; notes who asks. Operators have a token of their own."""
    return stranger_refusal_of(service, exchange) or model_refusal_of((service,), exchange.tenant)


def stranger_refusal_of(service: RouterService, exchange: HttpExchange) -> ApiError | None:
    """Return why whoever asks is nobody who may, None where it is; notes who it is."""
    if exchange.path.startswith("/cluster/") or exchange.path in SERVED_ROUTES:
        return admin.forbidden(service, exchange)
    keys = service.admission.keys
    if keys is None or exchange.path in WITHOUT_KEY or exchange.path in PAGE_ROUTES or exchange.path in FRONT_ROUTES:
        return None
    given = exchange.header(b"authorization")
    secret = given[7:].strip() if given[:7].lower() == "bearer " else exchange.header(b"x-api-key")
    if not secret:
        message = "an API key is needed: send the header Authorization: Bearer KEY"
        return ApiError(401, message, "authentication_error", "missing_api_key")
    tenant = keys.tenant_of(secret)
    if tenant is None:
        return ApiError(401, "this API key is not known", "authentication_error", "invalid_api_key")
    exchange.tenant = tenant
    return None


def model_refusal_of(services: Sequence[RouterService], tenant: str) -> ApiError | None:
    """Return why a tenant may use none of these services' models and adapters, None where it may, or nobody needs a
    key."""
    allowed = services[0].admission.allowed(tenant).models if tenant else ()
    if not allowed or any(set(allowed) & {*one.spec.names, *one.intake.adapters} for one in services):
        return None
    served = " and ".join(name for one in services for name in one.spec.names)
    message = f"{tenant} may use {' and '.join(allowed)}; this server has {served}"
    return ApiError(403, message, "permission_error", "model_not_allowed")


def admin_refusal_of(service: RouterService, exchange: HttpExchange) -> ApiError | None:
    """Return why a request to the operators' port may not pass, None where it may."""
    is_open = exchange.path in OPEN_PATHS - OPERATORS or exchange.path in PAGE_ROUTES or exchange.path == FRONT
    return None if is_open else admin.forbidden(service, exchange)


def find_handler(exchange: HttpExchange, routes: Routes, prefixes: Routes) -> Handler | ApiError:
    """Return the handler of a request's path and method, or the error of a request that has none."""
    methods = routes.get(exchange.path)
    if methods is None:
        for prefix, found in prefixes.items():
            if exchange.path.startswith(prefix) and len(exchange.path) > len(prefix):
                methods = found
    if methods is None and (why := unsupported_reason(exchange.path)):
        return ApiError(404, f"{exchange.path} isn't here: {why}", "invalid_request_error", "not_supported")
    if methods is None:
        return ApiError(404, f"no such endpoint: {exchange.path}", "invalid_request_error", "not_found")
    handler = methods.get("GET" if exchange.method == "HEAD" else exchange.method)
    if handler is None:
        return ApiError(405, f"{exchange.path} takes {' or '.join(methods)}", "invalid_request_error", "bad_method")
    return handler


# ---------------------------------------------------------------- text

TEXT_KINDS = {
    "/v1/completions": FrameKind.COMPLETION,
    "/v1/chat/completions": FrameKind.CHAT,
    "/v1/responses": FrameKind.RESPONSES,
    "/v1/messages": FrameKind.MESSAGES,
    "/v1/embeddings": FrameKind.EMBEDDINGS,
    "/inference/v1/generate": FrameKind.GENERATE,
    "/classify": FrameKind.CLASSIFY,
    **dict.fromkeys(("/v1/score", "/score"), FrameKind.SCORE),
    **dict.fromkeys(("/v1/rerank", "/v2/rerank", "/rerank"), FrameKind.RERANK),
}
"""The endpoints that generate text or tokens, or embed, by path: of each request that is refused it is kept why."""
COUNT_KINDS = {
    "/tokenize": FrameKind.TOKENIZE,
    "/detokenize": FrameKind.DETOKENIZE,
    "/v1/messages/count_tokens": FrameKind.COUNT_TOKENS,
    "/v1/responses/input_tokens": FrameKind.INPUT_TOKENS,
}
"""The endpoints that count or make tokens, by path."""


async def _generate(service: RouterService, exchange: HttpExchange) -> None:
    """Answer a request for text; of one that is refused before it is placed, keep why."""
    began = service.clock.now()
    service.answering += 1
    try:
        await _answer(service, exchange)
    except ClientGone:
        raise
    except TwinpoolError as error:
        keep_refusal(service, exchange, failure_of(error), service.clock.now() - began, error.numbers)
        raise
    finally:
        service.answering -= 1


def keep_refusal(
    service: RouterService,
    exchange: HttpExchange,
    failure: ApiError,
    total_s: float = 0.0,
    numbers: Mapping[str, float] = MappingProxyType({}),
) -> None:
    """Keep why a request for text is refused, unless it was a preview. One of nobody who is known here is no trace:
    else strangers would fill the collector."""
    if exchange.header(PREVIEW_HEADER.encode()):
        return
    stranger = service.admission.keys is not None and not exchange.tenant
    trace = NO_TRACE if stranger else service.records.traced(read_traceparent(exchange.header(b"traceparent")))
    service.refused(RefusedRequest(exchange.client_id, exchange.tenant, trace, total_s), failure, numbers)


async def _answer(service: RouterService, exchange: HttpExchange) -> None:
    if service.draining:
        raise ShuttingDown
    if service.demand.needed:
        service.demand.check_room()
    exchange.require_json()
    service.admission.check_room()  # Before the body takes memory, and time to read.
    headers = read_request_headers(exchange.header)
    if headers.resume is None:  # A client that comes back may be the one that fills its own limit.
        await service.check_tenant(exchange.tenant)
    raw = await exchange.body(service.body_limit, service.buffer)
    gone = False
    stream: ResponseStream | None = None

    def client_left() -> None:
        nonlocal gone
        gone = True
        if stream is not None:
            service.abandon(stream)
            stream.fail("the client left")

    exchange.on_gone(client_left)
    kind = TEXT_KINDS[exchange.path]
    asked = ClientRequest(kind, raw, exchange.client_id, exchange.tenant, headers, exchange.on_gone)
    if headers.preview:
        return await exchange.answer_json(200, asdict(await preview(service, asked)))
    stream = await service.open(asked)
    del raw, asked
    exchange.forget_body()
    exchange.ignored = stream.request.ignored
    try:
        # The router core ends the request at its deadline; this timeout is for a router core that fails to.
        async with asyncio.timeout(stream.timeout_s + CLIENT_GRACE_S):
            if gone:
                return
            if stream.request.stream:
                await _stream(service, exchange, stream, headers.timeline)
                return
            await stream.ended()
            if gone:
                return
            if stream.failed is not None:
                await exchange.fail(failure_of_done(stream.failed, stream.request))
                return
            exchange.weights = version_of(stream.choices)
            await exchange.answer_parts(200, stream.answer.whole(stream.timeline() if headers.timeline else None))
    except TimeoutError:
        log("request was not ended in time", request_id=stream.id, level=logging.ERROR)
        await _give_up(
            exchange, stream, ApiError(504, f"no end after {stream.timeout_s:g} s", "server_error", "deadline")
        )
    finally:
        service.abandon(stream)  # Does nothing unless the answer was cut short.


async def _stream(service: RouterService, exchange: HttpExchange, stream: ResponseStream, wants_timeline: bool) -> None:
    """Write the stream's events as they come, and its end.

    A failure before the first event is a plain HTTP error; a later one is an event, without ``[DONE]``.
    """
    beat = StreamHeartbeat(stream, service.config.stream_keepalive_s)
    direct_write = exchange.direct_write
    try:
        while events := await stream.more():
            if not exchange.started:
                exchange.weights = version_of(stream.choices)
                await exchange.begin_events()
                if direct_write is not None:
                    stream.write_directly(direct_write, asyncio.get_running_loop().time)
            await exchange.write(events)
            beat.written()
            if len(events) >= WRITE_BYTES:  # More may wait, which others needn't wait for.
                await asyncio.sleep(0)
    finally:
        beat.stop()
    if stream.failed is None:
        if not exchange.started:
            await exchange.begin_events()
        closing = stream.closing(stream.timeline() if wants_timeline else None)
        await exchange.write(closing, more=False)
    elif not exchange.started:
        await exchange.fail(failure_of_done(stream.failed, stream.request))
    else:
        await exchange.write(stream.answer.failed(failure_of_done(stream.failed, stream.request)), more=False)


async def _give_up(exchange: HttpExchange, stream: ResponseStream, failure: ApiError) -> None:
    """End an answer that was cut short with an error, unless the client takes nothing for `ERROR_WRITE_TIMEOUT_S`."""
    with suppress(TimeoutError):
        async with asyncio.timeout(ERROR_WRITE_TIMEOUT_S):
            if exchange.started:
                await exchange.write(stream.answer.failed(failure), more=False)
            else:
                await exchange.fail(failure)


async def _batches(service: RouterService, exchange: HttpExchange) -> None:
    if service.draining and exchange.method == "POST":
        raise ShuttingDown
    endpoints: BatchEndpoints = exchange.scope[BATCHES]
    await endpoints.answer(exchange)


async def _stored_response(service: RouterService, exchange: HttpExchange) -> None:
    await exchange.fail(
        ApiError(404, "responses aren't stored here: keep what was answered", "invalid_request_error", "not_stored")
    )


async def _count(service: RouterService, exchange: HttpExchange) -> None:
    if service.draining:
        raise ShuttingDown
    exchange.require_json()
    raw = await exchange.body(service.body_limit, service.buffer)
    answer = await service.text(COUNT_KINDS[exchange.path], raw, exchange.tenant)
    exchange.ignored = answer.ignored
    await exchange.answer(200, answer.body)


# ---------------------------------------------------------------- what is served, and how it is


async def _models(service: RouterService, exchange: HttpExchange) -> None:
    names = (*service.spec.names, *service.intake.adapters)
    await exchange.answer_json(200, {"object": "list", "data": [model_card(service, name) for name in names]})


async def _one_model(service: RouterService, exchange: HttpExchange) -> None:
    name = exchange.path.removeprefix("/v1/models/")
    check_model({"model": name}, service.spec, service.intake.adapters)
    await exchange.answer_json(200, model_card(service, name))


async def _health(service: RouterService, exchange: HttpExchange) -> None:
    """Answer 200 while each role that is needed has a worker that serves and waiting work advances, else 503 with the
    problems; so it does from the moment that this router is to end."""
    health = health_of(service)
    await exchange.answer_json(503 if health["problems"] else 200, health)


async def _front(service: RouterService, exchange: HttpExchange) -> None:
    """Answer with what this port has; operators' paths are among it unless they have a port of their own."""
    apart = bool(service.security.admin_port)
    routes = (*CLIENT_ROUTES, *CLIENT_PREFIX_ROUTES) if apart else (*ROUTES, *PREFIX_ROUTES)
    await answer_front(service, exchange, routes, problems=bool(health_problems(service)), dashboard=not apart)


async def _operators_front(service: RouterService, exchange: HttpExchange) -> None:
    """Answer with what the operators' port has."""
    routes = (*ADMIN_ROUTES, *ADMIN_PREFIX_ROUTES)
    await answer_front(service, exchange, routes, problems=bool(health_problems(service)), dashboard=True)


async def _live(service: RouterService, exchange: HttpExchange) -> None:
    await exchange.answer_json(200, {"status": "alive"})


async def _version(service: RouterService, exchange: HttpExchange) -> None:
    await exchange.answer_json(200, {"version": package_version()})


async def _load(service: RouterService, exchange: HttpExchange) -> None:
    """Answer with the number of choices that have not ended, under vLLM's name ``server_load``."""
    await exchange.answer_json(200, {"server_load": service.core.requests.in_flight})


async def _metrics(service: RouterService, exchange: HttpExchange) -> None:
    """Answer in Prometheus' text format, or in OpenMetrics to whoever asks for that."""
    text, kind = await service.metrics.scrapes.answer(exchange.header(b"accept"))
    await exchange.answer(200, text, kind=kind.encode())


async def _openapi(service: RouterService, exchange: HttpExchange) -> None:
    await exchange.answer_json(200, openapi_document())


WITHOUT_KEY = frozenset({"/live", "/health", "/ping", "/version", "/load", "/metrics", "/openapi.json"})
"""Endpoints that tell nothing about anybody's text."""
ROUTES: Routes = {
    **{path: {"POST": _generate} for path in TEXT_KINDS},
    **{path: {"POST": _count} for path in COUNT_KINDS},
    "/v1/models": {"GET": _models},
    **{path: {"POST": _batches, "GET": _batches} for path in PATHS},
    "/health": {"GET": _health},
    "/live": {"GET": _live},
    "/ping": {"GET": _health, "POST": _health},
    "/version": {"GET": _version},
    "/load": {"GET": _load},
    "/metrics": {"GET": _metrics},
    "/openapi.json": {"GET": _openapi},
    "/cluster/status": {"GET": admin.status},
    "/cluster/dashboard": {"GET": admin.events},
    "/cluster/check": {"POST": admin.check},
    "/cluster/add": {"POST": changes.add},
    "/cluster/scale": {"POST": changes.scale},
    "/cluster/apply": {"POST": changes.apply},
    **SERVED_ROUTES,
}
PREFIX_ROUTES: Routes = {
    "/v1/models/": {"GET": _one_model},
    "/v1/files/": {"GET": _batches, "DELETE": _batches},
    "/v1/batches/": {"GET": _batches, "POST": _batches},
    "/v1/responses/": {"GET": _stored_response, "DELETE": _stored_response, "POST": _stored_response},
    "/cluster/drain/": {"POST": changes.drain},
    "/cluster/undrain/": {"POST": changes.undrain},
    "/cluster/role/": {"POST": changes.role},
    "/cluster/restart/": {"POST": changes.restart},
    "/cluster/cordon/": {"POST": changes.cordon},
    "/cluster/uncordon/": {"POST": changes.uncordon},
    admin.REQUESTS_PREFIX: {"GET": admin.explain},
}

PAGE_ROUTES: Routes = {path: {"GET": admin.page} for path in admin.page_files()}
"""The files of the dashboard's page, which say nothing of the cluster; it asks for `/cluster/dashboard`."""
FRONT_ROUTES: Routes = {FRONT: {"GET": _front}}
"""What is here; the operators' port has one of its own."""
OPERATORS = (
    frozenset({"/metrics", "/load"})
    | SERVED_ROUTES.keys()
    | {path for path in (*ROUTES, *PREFIX_ROUTES) if path.startswith("/cluster/")}
)
"""Paths that only the operators' port has, where there is one: they name tenants, workers and nodes."""
CLIENT_ROUTES = {path: methods for path, methods in ROUTES.items() if path not in OPERATORS}
CLIENT_PREFIX_ROUTES = {path: methods for path, methods in PREFIX_ROUTES.items() if path not in OPERATORS}
ADMIN_ROUTES = (
    {path: methods for path, methods in ROUTES.items() if path in OPERATORS | OPEN_PATHS | {"/version"}}
    | PAGE_ROUTES
    | {FRONT: {"GET": _operators_front}}
)
ADMIN_PREFIX_ROUTES = {path: methods for path, methods in PREFIX_ROUTES.items() if path in OPERATORS}
