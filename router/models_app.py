"""The HTTP application of several models behind one endpoint.

Each model has a cluster of its own, and here a router service of its own, with its own core, queue, readers and links.
A request goes to one of them: the one that the `model` of its body names, or, of operators' paths, its query
(``?model=NAME``). What is told of the endpoint as a whole, its models, health, load and metrics, is put together from
all of them; metrics carry the label `model`. The handlers are those of one model's application (`router.api.app`),
which doesn't know of others.

Who may ask at all, what connections and bodies may take, and a drain are the first service's (the lead's) for all of
them: a body is read before its model is known. The limits of tenants hold for all models together, as they hold for all
routers: each service leases its slices of the same controller.
"""

from __future__ import annotations

import urllib.parse
from collections.abc import Awaitable, Callable, Iterable, Iterator, Sequence
from typing import Any

from prometheus_client.core import Metric

from twinpool.contracts.errors import ConfigError, RequestError
from twinpool.router.api.admin_models import SERVED_ROUTES, Handler, health_of, model_card
from twinpool.router.api.app import (
    ADMIN_PREFIX_ROUTES,
    ADMIN_ROUTES,
    BATCHES,
    CLIENT_PREFIX_ROUTES,
    CLIENT_ROUTES,
    COUNT_KINDS,
    FRONT_ROUTES,
    PAGE_ROUTES,
    PREFIX_ROUTES,
    ROUTES,
    TEXT_KINDS,
    App,
    Routes,
    admin_refusal_of,
    find_handler,
    keep_refusal,
    model_refusal_of,
    run_lifespan,
    serve_exchange,
    stranger_refusal_of,
)
from twinpool.router.api.batch_endpoints import BatchEndpoints
from twinpool.router.api.dashboard.front_page import PATH as FRONT
from twinpool.router.api.dashboard.front_page import describe, show_front
from twinpool.router.api.http_exchange import AsgiReceive, AsgiScope, AsgiSend, HttpExchange
from twinpool.router.batch.batch_lines import MODEL_OF, NO_OBJECT
from twinpool.router.batch.batch_runner import BatchRunner
from twinpool.router.batch.batch_store import BatchStore
from twinpool.router.metrics.prometheus_metrics import Scrapes
from twinpool.router.openai.api_errors import ApiError, ShuttingDown, failure_of
from twinpool.router.openai.parse_request import UnknownModel
from twinpool.router.openai.request_fields import describe as described
from twinpool.router.service.router_service import RouterService

LABEL = "model"
"""The label of metrics that names their model."""


class ModelSwitch:
    """The services of one router's models; chooses the one that a request is for."""

    def __init__(self, services: Sequence[RouterService]) -> None:
        """The first service leads. Raises `ConfigError` where two of them have the same name."""
        self.services, self.lead = tuple(services), services[0]
        self._by_name: dict[str, RouterService] = {}
        for service in self.services:
            for name in service.spec.names:
                if name in self._by_name:
                    raise ConfigError(f"two models are served as {name}: router.served_model_name names them")
                self._by_name[name] = service
        self.body_limit = max(service.body_limit for service in self.services)
        self.lead.buffer.limit = max(self.lead.buffer.limit, self.body_limit)

    @property
    def names(self) -> list[str]:
        """Of each model its first name."""
        return [service.spec.name for service in self.services]

    def named(self, model: object) -> RouterService:
        """Return the service of a model, or of an adapter over it. Raises `RequestError` where no model is named, and
        `UnknownModel`."""
        if model is None:
            raise RequestError(f"several models are served here: name one of them, {self._listed()}", param="model")
        if not isinstance(model, str):
            raise RequestError(f"model must be a string; got {described(model)}", param="model")
        found = self._by_name.get(model)
        if found is None:
            found = next((one for one in self.services if model in one.intake.adapters), None)
        if found is None:
            message = f"the model {described(model)} does not exist; this server has {self._listed()}"
            raise UnknownModel(message, param="model")
        return found

    async def of_body(self, exchange: HttpExchange) -> RouterService:
        """Read a request's body, put it back, and return the service of its model. Raises as `HttpExchange.body` and
        `named`. A body that is no JSON object is the lead's, whose reader says what is wrong with it."""
        raw = await exchange.body(self.body_limit, self.lead.buffer)
        exchange.put_back(raw)
        try:
            model = MODEL_OF.decode(raw).model
        except NO_OBJECT:
            return self.lead
        return self.named(model)

    def of_line(self, body: bytes, tenant: str) -> RouterService | ApiError:
        """Return the service of the model that a line of a batch names, or why its tenant may not use it. Raises as
        `named`."""
        try:
            service = self.named(MODEL_OF.decode(body).model)
        except NO_OBJECT:
            return ApiError(400, "body must be a JSON object", "invalid_request_error", None, "body")
        return model_refusal_of((service,), tenant) or service

    def places(self) -> dict[str, int]:
        """Return which of the services has each name, adapters' included."""
        adapters = {name: place for place, one in enumerate(self.services) for name in one.intake.adapters}
        return adapters | {name: self.services.index(one) for name, one in self._by_name.items()}

    def of_query(self, exchange: HttpExchange) -> RouterService:
        """Return the service of the model that an operator's path names. Raises as `named`."""
        given = urllib.parse.parse_qs(exchange.query.decode("latin-1"))
        return self.named(given[LABEL][0] if LABEL in given else None)

    def _listed(self) -> str:
        return ", ".join(map(repr, self._by_name))


class ModelRoutes:
    """The handlers of several models' application: those of one model's, each with what chooses its service, or with
    what is told of all of them in its place."""

    def __init__(self, switch: ModelSwitch) -> None:
        self._switch = switch
        self._scrapes = Scrapes(self._collect, self._seen, join=joined)
        self._of_all: dict[str, Handler] = {
            "/v1/models": self._models,
            "/v1/models/": self._one_model,
            "/health": self._health,
            "/ping": self._health,
            "/load": self._load,
            "/metrics": self._metrics,
        }

    def of(self, routes: Routes, *, dashboard: bool) -> Routes:
        """Return the table of a port with `routes`. `dashboard`: whether this port has it."""
        found = {
            path: {method: self._handler(path, handler) for method, handler in methods.items()}
            for path, methods in routes.items()
        }
        if FRONT in found:
            found[FRONT] = {"GET": self._front(tuple(routes), dashboard=dashboard)}
        return found

    def _handler(self, path: str, handler: Handler) -> Handler:
        if path in self._of_all:
            return self._of_all[path]
        if path in TEXT_KINDS or path in COUNT_KINDS:
            return self._by_body(handler)
        if path.startswith("/cluster/") or path in SERVED_ROUTES:
            return self._by_query(handler)
        return handler  # Says the same of every model.

    # ------------------------------------------------------------ of one model

    def _by_body(self, handler: Handler) -> Handler:
        switch = self._switch

        async def chosen(lead: RouterService, exchange: HttpExchange) -> None:
            if lead.draining:
                raise ShuttingDown
            exchange.require_json()
            lead.answering += 1  # A drain waits for a request from here on.
            try:
                try:
                    service = await switch.of_body(exchange)
                except RequestError as error:
                    keep_refusal(lead, exchange, failure_of(error))
                    raise
                if failure := model_refusal_of((service,), exchange.tenant):
                    return await exchange.fail(failure)
                await handler(service, exchange)
            finally:
                lead.answering -= 1

        return chosen

    def _by_query(self, handler: Handler) -> Handler:
        switch = self._switch

        async def chosen(lead: RouterService, exchange: HttpExchange) -> None:
            await handler(switch.of_query(exchange), exchange)

        return chosen

    # ------------------------------------------------------------ of all of them

    async def _models(self, lead: RouterService, exchange: HttpExchange) -> None:
        cards = [
            model_card(one, name) for one in self._switch.services for name in (*one.spec.names, *one.intake.adapters)
        ]
        await exchange.answer_json(200, {"object": "list", "data": cards})

    async def _one_model(self, lead: RouterService, exchange: HttpExchange) -> None:
        name = exchange.path.removeprefix("/v1/models/")
        await exchange.answer_json(200, model_card(self._switch.named(name), name))

    def _health_of_all(self) -> dict[str, Any]:
        models = {one.spec.name: health_of(one) for one in self._switch.services}
        bad = [name for name, health in models.items() if health["problems"]]
        status = "draining" if self._switch.lead.draining else "unhealthy" if len(bad) == len(models) else "ok"
        return {
            "status": "degraded" if bad and status == "ok" else status,
            "problems": [f"{name}: {problem}" for name in bad for problem in models[name]["problems"]],
            "models": models,
        }

    async def _health(self, lead: RouterService, exchange: HttpExchange) -> None:
        """Answer 200 while at least one model can be served and the server doesn't drain, else 503."""
        health = self._health_of_all()
        await exchange.answer_json(200 if health["status"] in ("ok", "degraded") else 503, health)

    async def _load(self, lead: RouterService, exchange: HttpExchange) -> None:
        load = sum(one.core.requests.in_flight for one in self._switch.services)
        await exchange.answer_json(200, {"server_load": load})

    async def _metrics(self, lead: RouterService, exchange: HttpExchange) -> None:
        text, kind = await self._scrapes.answer(exchange.header(b"accept"))
        await exchange.answer(200, text, kind=kind.encode())

    def _front(self, routes: tuple[str, ...], *, dashboard: bool) -> Handler:
        async def front(lead: RouterService, exchange: HttpExchange) -> None:
            about = describe(lead, routes, problems=bool(self._health_of_all()["problems"]), dashboard=dashboard)
            if "models" in about:
                about["models"] = self._switch.names
            await show_front(exchange, about)

        return front

    # ------------------------------------------------------------ their metrics

    def _collect(self) -> Iterator[Metric]:
        for source in self._switch.lead.metrics.of_process:
            yield from source()
        for one in self._switch.services:
            for family in one.metrics.of_model():
                yield labelled(family, one.spec.name)

    def _seen(self) -> Iterator[Metric]:
        seen = [(one.spec.name, one.metrics.seen()) for one in self._switch.services]
        return (labelled(family, name) for name, families in seen for family in families)


def labelled(family: Metric, model: str) -> Metric:
    """Return a family whose samples say which model they are of."""
    found = Metric(family.name, family.documentation, family.type, family.unit)
    found.samples = [one._replace(labels={**one.labels, LABEL: model}) for one in family.samples]
    return found


def joined(families: Iterable[Metric]) -> list[Metric]:
    """Return families in which samples of the same name are together, as both formats want them."""
    by_name: dict[str, Metric] = {}
    for family in families:
        if (there := by_name.setdefault(family.name, family)) is not family:
            there.samples = [*there.samples, *family.samples]
    return list(by_name.values())


# ---------------------------------------------------------------- the applications


def create_models_app(services: Sequence[RouterService]) -> App:
    """Return the ASGI application of several models; its lifespan events start and close their services.

    Raises `ConfigError` where two models have the same name, or `batch.folder` can't be used.
    """
    switch, apart = ModelSwitch(services), bool(services[0].security.admin_port)
    store = BatchStore(switch.lead.batch) if switch.lead.batch.folder else None
    runner = BatchRunner(switch.lead, store, models=switch) if store is not None else None
    routes = (CLIENT_ROUTES if apart else {**ROUTES, **PAGE_ROUTES}) | FRONT_ROUTES
    prefixes = CLIENT_PREFIX_ROUTES if apart else PREFIX_ROUTES
    answer = _answering(switch, routes, prefixes, _refusal(switch), BatchEndpoints(runner), dashboard=not apart)

    async def app(scope: AsgiScope, receive: AsgiReceive, send: AsgiSend) -> None:
        if scope["type"] == "http":
            exchange = HttpExchange(scope, receive, send)
            exchange.allow_origin(switch.lead.security.origins)
            await answer(exchange)
        elif scope["type"] == "lifespan":
            await run_lifespan(switch.services, runner, receive, send)

    return app


def create_models_admin_app(services: Sequence[RouterService]) -> App:
    """Return the ASGI application of the operators' port of several models."""
    switch = ModelSwitch(services)
    answer = _answering(
        switch, ADMIN_ROUTES, ADMIN_PREFIX_ROUTES, admin_refusal_of, BatchEndpoints(None), dashboard=True
    )

    async def app(scope: AsgiScope, receive: AsgiReceive, send: AsgiSend) -> None:
        await answer(HttpExchange(scope, receive, send))

    return app


Refusal = Callable[[RouterService, HttpExchange], ApiError | None]


def _refusal(switch: ModelSwitch) -> Refusal:
    """What says why a request may not pass: of one for text the model that it names is looked at later."""

    def refusal(lead: RouterService, exchange: HttpExchange) -> ApiError | None:
        return stranger_refusal_of(lead, exchange) or model_refusal_of(switch.services, exchange.tenant)

    return refusal


def _answering(
    switch: ModelSwitch,
    routes: Routes,
    prefixes: Routes,
    refusal: Refusal,
    batches: BatchEndpoints,
    *,
    dashboard: bool,
) -> Callable[[HttpExchange], Awaitable[None]]:
    """What answers the requests of one port."""
    handlers = ModelRoutes(switch)
    own, own_prefixes = handlers.of(routes, dashboard=dashboard), handlers.of(prefixes, dashboard=dashboard)

    async def answer(exchange: HttpExchange) -> None:
        exchange.scope[BATCHES] = batches
        await serve_exchange(switch.lead, exchange, find_handler(exchange, own, own_prefixes), refusal)

    return answer
