"""The HTTP face: OpenAI's endpoints, operators' endpoints, and the order in which a request passes through them."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from typing import Any

from contracts.errors import RequestError, TwinpoolError
from contracts.ids import Role
from router import admin, drains
from router.asks import check_model, read_chat, read_completion, read_messages, read_template_args, read_tokens
from router.failures import ClientGone, Failure, failure_of, failure_of_done
from router.fields import TOKENIZE, describe, read_fields, read_json
from router.job import Job
from router.log import log
from router.openapi import openapi_document
from router.service import RouterService
from router.web import BodyTooLarge, Exchange, Receive, Scope, Sender

CLIENT_GRACE_S = 30.0

App = Callable[[Scope, Receive, Sender], Awaitable[None]]
Handler = Callable[[RouterService, Exchange], Awaitable[None]]


def create_app(service: RouterService) -> App:
    """The ASGI application; its lifespan starts and closes `service`."""

    async def app(scope: Scope, receive: Receive, send: Sender) -> None:
        if scope["type"] == "http":
            await _serve(service, Exchange(scope, receive, send))
        elif scope["type"] == "lifespan":
            await _lifespan(service, receive, send)

    return app


async def _lifespan(service: RouterService, receive: Receive, send: Sender) -> None:
    while True:
        message = await receive()
        if message["type"] == "lifespan.startup":
            await service.start()
            await send({"type": "lifespan.startup.complete"})
        else:
            await service.close()
            await send({"type": "lifespan.shutdown.complete"})
            return


async def _serve(service: RouterService, exchange: Exchange) -> None:
    try:
        handler = _find(exchange)
        if isinstance(handler, Failure):
            await exchange.fail(handler)
        else:
            await handler(service, exchange)
    except ClientGone:
        pass
    except BodyTooLarge as error:
        failure = Failure(413, str(error), "invalid_request_error", "body_too_large")
        await exchange.refuse_body(failure, service.config.max_body_bytes)
    except TwinpoolError as error:
        await exchange.fail(failure_of(error))
    except Exception:
        log("handler failed", trace=True, client_id=exchange.client_id, path=exchange.path)
        if exchange.started:
            raise
        await exchange.fail(Failure(500, "the router failed inside; see its log", "server_error", "internal"))
    finally:
        exchange.release()


def _find(exchange: Exchange) -> Handler | Failure:
    methods = ROUTES.get(exchange.path)
    if methods is None:
        for prefix, found in PREFIX_ROUTES.items():
            if exchange.path.startswith(prefix) and len(exchange.path) > len(prefix):
                methods = found
    if methods is None:
        return Failure(404, f"no such endpoint: {exchange.path}", "invalid_request_error", "not_found")
    handler = methods.get("GET" if exchange.method == "HEAD" else exchange.method)
    if handler is None:
        return Failure(405, f"{exchange.path} takes {' or '.join(methods)}", "invalid_request_error", "bad_method")
    return handler


# ---------------------------------------------------------------- text


async def _read_body(service: RouterService, exchange: Exchange) -> tuple[dict[str, Any], int]:
    raw = await exchange.body(service.config.max_body_bytes)
    return await service.off_loop(len(raw), lambda: read_json(raw)), len(raw)


async def _completions(service: RouterService, exchange: Exchange) -> None:
    await _generate(service, exchange, chat=False)


async def _chat(service: RouterService, exchange: Exchange) -> None:
    await _generate(service, exchange, chat=True)


async def _generate(service: RouterService, exchange: Exchange, *, chat: bool) -> None:
    body, size = await _read_body(service, exchange)
    read = read_chat if chat else read_completion
    ask = await service.off_loop(size, lambda: read(body, service.spec))
    wants_timeline = exchange.header(b"x-twinpool-timeline") == "1"
    gone = False
    job: Job | None = None

    def client_left() -> None:
        nonlocal gone
        gone = True
        if job is not None:
            service.abandon(job)
            job.fail("the client left")

    exchange.on_gone(client_left)
    job = await service.open(ask, size, exchange.client_id)
    try:
        # The request's own deadline is the brain's; this one ends the wait for a client that reads nothing.
        async with asyncio.timeout(service.config.request_timeout_s + CLIENT_GRACE_S):
            if gone:
                return
            if ask.stream:
                await _stream(exchange, job, wants_timeline)
                return
            await job.ended()
            if gone:
                return
            if job.failed is not None:
                await exchange.fail(failure_of_done(job.failed))
                return
            await exchange.answer(200, job.answer.whole(job.timeline() if wants_timeline else None))
    except TimeoutError:
        log("client takes nothing", id=job.id)
    finally:
        service.abandon(job)  # nothing to do unless the answer was cut short


async def _stream(exchange: Exchange, job: Job, wants_timeline: bool) -> None:
    """Events as they come. A failure before the first is a plain error; later it is an event, without ``[DONE]``."""
    while events := await job.more():
        if not exchange.started:
            await exchange.begin_events()
        await exchange.write(events)
    if job.failed is None:
        if not exchange.started:
            await exchange.begin_events()
        closing = job.answer.closing(job.timeline() if wants_timeline else None)
        await exchange.write(closing, more=False)
    elif not exchange.started:
        await exchange.fail(failure_of_done(job.failed))
    else:
        await exchange.write(b"data: " + failure_of_done(job.failed).to_json() + b"\n\n", more=False)


async def _tokenize(service: RouterService, exchange: Exchange) -> None:
    body, size = await _read_body(service, exchange)
    check_model(body, service.spec)
    values = read_fields(body, TOKENIZE)
    prompt = body.get("prompt")

    def work() -> tuple[int, ...]:
        if body.get("messages") is not None:
            args = read_template_args(body.get("chat_template_kwargs"))
            opens = values.get("add_generation_prompt", True)
            text = service.codec.render(read_messages(body["messages"]), opens, args)
            return service.codec.encode(text, add_special=values.get("add_special_tokens", False), param="messages")
        if not isinstance(prompt, str):
            raise RequestError(f"prompt must be a string; got {describe(prompt)}", param="prompt")
        return service.codec.encode(prompt, add_special=values.get("add_special_tokens", True))

    tokens = await service.off_loop(size, work)
    answer: dict[str, Any] = {"count": len(tokens), "max_model_len": service.spec.context, "tokens": tokens}
    if values.get("return_token_strs"):
        answer["token_strs"] = [service.codec.token_piece(t) for t in tokens]
    await exchange.answer_json(200, answer)


async def _detokenize(service: RouterService, exchange: Exchange) -> None:
    body, size = await _read_body(service, exchange)
    check_model(body, service.spec)
    tokens = read_tokens(body.get("tokens"), service.spec, "tokens")
    text = await service.off_loop(size, lambda: service.codec.decode(tokens))
    await exchange.answer_json(200, {"prompt": text})


# ---------------------------------------------------------------- what is served, and how it is


async def _models(service: RouterService, exchange: Exchange) -> None:
    await exchange.answer_json(200, {"object": "list", "data": [_model(service)]})


async def _one_model(service: RouterService, exchange: Exchange) -> None:
    check_model({"model": exchange.path.removeprefix("/v1/models/")}, service.spec)
    await exchange.answer_json(200, _model(service))


def _model(service: RouterService) -> dict[str, Any]:
    spec = service.spec
    return {
        "id": spec.name,
        "object": "model",
        "created": service.started,
        "owned_by": "twinpool",
        "root": spec.name,
        "parent": None,
        "max_model_len": spec.context,
    }


async def _health(service: RouterService, exchange: Exchange) -> None:
    """200 while requests can be served and work advances."""
    brain = service.brain
    serving = {str(role): len(brain.serving(role)) for role in Role}
    problems = [f"no {role} worker can serve" for role, count in serving.items() if not count]
    if brain.stalled_s > service.config.stall_s:
        problems.append(f"work waits and nothing has advanced for {brain.stalled_s:.1f} s")
    answer = {
        "status": "unhealthy" if problems else "ok",
        "problems": problems,
        "serving": serving,
        "in_house": brain.in_house,
        "waiting": brain.waiting,
    }
    await exchange.answer_json(503 if problems else 200, answer)


async def _live(service: RouterService, exchange: Exchange) -> None:
    await exchange.answer_json(200, {"status": "alive"})


async def _metrics(service: RouterService, exchange: Exchange) -> None:
    await exchange.answer(200, service.metrics.text(), kind=b"text/plain; version=0.0.4; charset=utf-8")


async def _openapi(service: RouterService, exchange: Exchange) -> None:
    await exchange.answer_json(200, openapi_document())


ROUTES: dict[str, dict[str, Handler]] = {
    "/v1/completions": {"POST": _completions},
    "/v1/chat/completions": {"POST": _chat},
    "/v1/models": {"GET": _models},
    "/tokenize": {"POST": _tokenize},
    "/detokenize": {"POST": _detokenize},
    "/health": {"GET": _health},
    "/live": {"GET": _live},
    "/metrics": {"GET": _metrics},
    "/openapi.json": {"GET": _openapi},
    "/cluster/status": {"GET": admin.status},
    "/cluster/check": {"POST": admin.check},
}
PREFIX_ROUTES: dict[str, dict[str, Handler]] = {
    "/v1/models/": {"GET": _one_model},
    "/cluster/drain/": {"POST": drains.drain},
    "/cluster/undrain/": {"POST": drains.undrain},
    "/cluster/role/": {"POST": drains.role},
}
