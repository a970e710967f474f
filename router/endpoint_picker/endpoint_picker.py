"""The endpoint picker: which router, of one cluster or of several with the same model, a request goes to; and the gRPC
server by which gateways ask.

Routers know what a choice needs: which prefixes their workers hold, by tenant, and what is ahead of a prompt. So they
are asked: each gets the request as a preview (`open_answers.preview`), reads and places it as if it were to
answer it, and says when its first token would come, and how many tokens have to be computed before it. Where all can
tell a time those that are much later than the first are out of the choice; of the others the one with the fewest tokens
gets the request. Nothing is guessed from metrics.

A router that doesn't answer within the time is left out, and for `AWAY_S` asked after all others alone. Requests of
which there is no preview go to the endpoint with the fewest exchanges under way, as far as this picker knows.

The server speaks Envoy's external processing, as the Gateway API's inference extension has it
(`docs/proposals/004-endpoint-picker-protocol` of kubernetes-sigs/gateway-api-inference-extension, 1.0). The gateway
opens a stream for each exchange, and is told the endpoints in the header `DESTINATION` and, with the same value, in
dynamic metadata; or it is given an answer for the client. Bodies come whole (`BUFFERED`) or in pieces that the picker
sends back once it has chosen (`FULL_DUPLEX_STREAMED`); sent otherwise, or too large, they aren't looked at.
"""

from __future__ import annotations

import asyncio
import hashlib
import math
import signal
import socket
import ssl
from collections import Counter
from collections.abc import AsyncIterator, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import grpc
import grpc.aio
import httpx
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric

from twinpool.contracts.clock import Clock, SystemClock
from twinpool.contracts.errors import ConfigError
from twinpool.contracts.json_logs import log
from twinpool.contracts.outside_data import read_json
from twinpool.router.endpoint_picker.ext_proc_messages import (
    HEALTH,
    PROCESSOR,
    GatewayExchange,
    HttpRequest,
    ImmediateResponse,
    health_answer,
    read_health_check,
    read_request,
)
from twinpool.router.metrics.prometheus_metrics import Scrapes
from twinpool.router.metrics.request_tally import TTFT_BUCKETS_S, HistogramTally
from twinpool.router.openai.api_errors import ApiError
from twinpool.router.openai.request_headers import PREVIEW_HEADER
from twinpool.router.service.admission import BodyBuffer
from twinpool.router.tokenizer_pool.prepare_request import BODY_BYTES_MOST

RESOLVE_S = 5.0
"""Seconds between two looks at which addresses the names of endpoints have, and for which each is waited for."""
AWAY_S = 5.0
"""Seconds for which a router that didn't answer is asked only where no other is left."""
MOST_ASKED = 16
"""Routers that one request is previewed by. Of more, those that requests of the same beginning are previewed by."""
MOST_NAMED = 3
"""Endpoints that a choice names: the first, and those that the gateway may try after it."""
OUTCOMES = ("preview", "key", "load", "at_fault", "fallback", "refused", "no_preview", "no_endpoint")
"""What decides a choice: previews; an `Idempotency-Key`; the load, of what isn't previewed; a router that says what is
wrong with the request; the load, as no preview came. The others are answers to the client in place of one: all routers
refuse it, no preview came, there is no endpoint."""
PREVIEWS = ("taken", "refused", "unread", "failed")
"""What comes of a preview: an estimate, an error, an answer that isn't known here, none within the time."""
NEAR, NEAR_S = 1.25, 0.01
"""Up to so many times the least, and seconds more, times to a first token count as equal: they are predictions."""
PREFIX_BYTES = 1024
"""Of a body: its beginning, by which requests ask the same routers."""
ASKED_HEADERS = ("authorization", "x-api-key", "content-type", "x-slo-ttft-ms", "x-session-id")
"""Headers of a request that its preview has too."""
TOLD_HEADERS = ("content-type", "retry-after")
"""Headers of a router's refusal that its client gets."""
ANSWER_BYTES = 64 * 1024
"""Of a refusal that its client gets."""


# ---------------------------------------------------------------- the choice


@dataclass(frozen=True, slots=True)
class Estimate:
    """What a router says of a request: the less, the sooner (`RequestPreview`)."""

    waiting: int
    first_token_s: float | None
    tokens: int
    """To be computed before the first token: of this prompt and of those ahead of it."""


@dataclass(frozen=True, slots=True)
class RouterRefusal:
    """A router's error for a request, which it would answer with."""

    status: int
    body: bytes
    headers: Mapping[str, str]

    @property
    def for_now(self) -> bool:
        """Whether another router, or this one later, may take the request: it isn't the request's own fault."""
        return self.status in (429, 502, 503, 504)


class Endpoints:
    """The routers that there are, as addresses ``ip:port``; names are looked up again and again, so that the name of a
    headless service stands for all of its pods."""

    def __init__(self, names: Sequence[str], ca: str = "") -> None:
        """`names`: ``host:port`` each. `ca`: the file of the authority of their certificates; empty: they speak plain
        HTTP. Raises `ConfigError`."""
        self._names = [_host_and_port(name) for name in names]
        self.tls = bool(ca)
        try:
            self._trust: ssl.SSLContext | bool = ssl.create_default_context(cafile=ca) if ca else False
        except (OSError, ssl.SSLError) as error:
            raise ConfigError(f"can't read the certificate authority {ca}: {error}") from None
        self.hosts: dict[str, str] = {}
        """The host name that each address was found by, by which its certificate is checked."""
        self._lookups: dict[tuple[str, int], asyncio.Future[list[str]]] = {}
        """The latest of each name: one that hangs is waited for again, and no second thread hangs with it."""

    def client(self, timeout_s: float) -> httpx.AsyncClient:
        """A client of all endpoints, for previews. The caller closes it."""
        limits = httpx.Limits(max_connections=1024, max_keepalive_connections=256, keepalive_expiry=50.0)
        return httpx.AsyncClient(timeout=timeout_s, limits=limits, verify=self._trust, trust_env=False)

    async def resolve(self) -> None:
        """Look up all names, for `RESOLVE_S`. What a name had is kept while it can't be looked up."""
        for name in self._names:
            if name not in self._lookups:
                self._lookups[name] = asyncio.ensure_future(_looked_up(*name))
        await asyncio.wait(self._lookups.values(), timeout=RESOLVE_S)
        found = dict[str, str]()
        for name, lookup in list(self._lookups.items()):
            failure: object = f"no answer within {RESOLVE_S:g} s"
            if lookup.done():
                failure = self._lookups.pop(name).exception()
            if failure is None:
                found |= dict.fromkeys(lookup.result(), name[0])
                continue
            log("endpoint not found", host=name[0], reason=str(failure))
            found |= {address: host for address, host in self.hosts.items() if host == name[0]}
        if found.keys() != self.hosts.keys():
            log("endpoints", addresses=sorted(found))
        self.hosts = found


class PickTally:
    """What a picker has counted since its start."""

    def __init__(self) -> None:
        self.picks, self.previews = dict.fromkeys(OUTCOMES, 0), dict.fromkeys(PREVIEWS, 0)
        self.seconds = HistogramTally(TTFT_BUCKETS_S)
        """From the last byte of a request that was seen to the choice."""

    def families(self, *, exchanges: int, endpoints: Mapping[str, int]) -> Iterator[Metric]:
        """Yield all families. `exchanges`: those under way. `endpoints`: how many, by state."""
        text = "Choices of an endpoint, by what decided"
        picks = CounterMetricFamily("twinpool_picker_picks", text, labels=["outcome"])
        for outcome, count in self.picks.items():
            picks.add_metric([outcome], count)
        text = "Previews that routers were asked for, by what came of them"
        previews = CounterMetricFamily("twinpool_picker_previews", text, labels=["result"])
        for result, count in self.previews.items():
            previews.add_metric([result], count)
        known = GaugeMetricFamily("twinpool_picker_endpoints", "Endpoints that are known, by state", labels=["state"])
        for state, count in endpoints.items():
            known.add_metric([state], count)
        yield from (picks, self.seconds.family("twinpool_picker_pick_seconds", "Time that choices took"), previews)
        yield known
        text = "Exchanges under way that were sent to an endpoint"
        yield GaugeMetricFamily("twinpool_picker_exchanges", text, value=exchanges)


class EndpointPicker:
    """Picks endpoints, and knows what it has sent to which. On one event loop."""

    def __init__(
        self, endpoints: Endpoints, client: httpx.AsyncClient, clock: Clock, timeout_s: float, *, fail_open: bool = True
    ) -> None:
        """`timeout_s`: for which previews are waited for. `fail_open`: whether a request of which no preview has come
        is sent to one of the endpoints all the same; else it is refused."""
        self._endpoints, self._client, self._clock = endpoints, client, clock
        self._timeout_s, self._fail_open = timeout_s, fail_open
        self.open: Counter[str] = Counter()
        """Exchanges under way, by the endpoint that they were sent to first."""
        self.tally = PickTally()
        self._away_until: dict[str, float] = {}
        self._turn = 0

    def families(self) -> Iterator[Metric]:
        """Yield the families of a scrape."""
        hosts = self._endpoints.hosts
        away = sum(self._clock.now() < self._away_until.get(one, 0.0) for one in hosts)
        known = {"present": len(hosts) - away, "away": away}
        return self.tally.families(exchanges=self.open.total(), endpoints=known)

    async def pick(self, request: HttpRequest, subset: Sequence[str] | None) -> list[str] | ImmediateResponse:
        """The endpoints for a request, the best first; or the answer that it gets instead. `subset`: those that the
        gateway allows; None: all."""
        began = self._clock.now()
        outcome, picked = await self._pick(request, subset)
        self.tally.picks[outcome] += 1
        self.tally.seconds.observe(self._clock.now() - began)
        return picked

    async def _pick(
        self, request: HttpRequest, subset: Sequence[str] | None
    ) -> tuple[str, list[str] | ImmediateResponse]:
        able = [one for one in self._endpoints.hosts if subset is None or one in subset]
        if not able:
            return "no_endpoint", refusal(503, "no endpoint of this pool is there", "no_endpoint")
        self._turn += 1
        able = able[self._turn % len(able) :] + able[: self._turn % len(able)]
        if key := request.headers.get("idempotency-key"):
            return "key", _by_affinity(able, key.encode())[:MOST_NAMED]  # To where an answer that was begun is kept.
        if not request.is_previewed:
            return "load", self._by_load(self._present(able))[:MOST_NAMED]
        present = self._present(able)
        said = await self._ask(request, present)
        if not said and (left := [one for one in able if one not in present]):
            said = await self._ask(request, left)
        return self._chosen(said, able)

    def _chosen(
        self, said: Mapping[str, Estimate | RouterRefusal], able: Sequence[str]
    ) -> tuple[str, list[str] | ImmediateResponse]:
        """The choice by what routers have said, and what decided; those that said nothing aren't in it."""
        if takes := {one: told for one, told in said.items() if isinstance(told, Estimate)}:
            return "preview", self._by_cost(takes)[:MOST_NAMED]
        refused = {one: told for one, told in said.items() if isinstance(told, RouterRefusal)}
        if at_fault := [one for one, told in refused.items() if not told.for_now]:
            # The router says in its own words what is wrong with the request.
            return "at_fault", self._by_load(at_fault)[:1]
        if refused:
            best = min(refused.values(), key=lambda told: told.status != 429)
            status = 429 if best.status == 429 else 503
            return "refused", ImmediateResponse(status, best.body, best.headers, "all_endpoints_refuse")
        if self._fail_open:
            return "fallback", self._by_load(able)[:MOST_NAMED]
        message = "no endpoint has said what it would do with the request"
        return "no_preview", refusal(503, message, "no_preview")

    def _by_cost(self, takes: Mapping[str, Estimate]) -> list[str]:
        """Those that take the request, the best first."""
        times = {one: told.first_token_s for one, told in takes.items() if told.first_token_s is not None}
        soon = min(times.values()) * NEAR + NEAR_S if len(times) == len(takes) else math.inf

        def cost(one: str) -> tuple[bool, float, int, int]:
            told, seconds = takes[one], times.get(one, 0.0)
            return told.waiting > 0, seconds if seconds > soon else 0.0, told.tokens, self.open[one]

        return sorted(takes, key=cost)

    async def _ask(self, request: HttpRequest, able: Sequence[str]) -> dict[str, Estimate | RouterRefusal]:
        """What routers say of a request, each that has said something within the time."""
        if len(able) > MOST_ASKED:
            able = _by_affinity(able, (request.body or b"")[:PREFIX_BYTES])[:MOST_ASKED]
        told = await asyncio.gather(*[self._preview(request, one) for one in able])
        return {one: said for one, said in zip(able, told, strict=True) if said is not None}

    async def _preview(self, request: HttpRequest, endpoint: str) -> Estimate | RouterRefusal | None:
        scheme = "https" if self._endpoints.tls else "http"
        given = {name: request.headers[name] for name in ASKED_HEADERS if name in request.headers}
        host = self._endpoints.hosts.get(endpoint, "")
        try:
            async with asyncio.timeout(self._timeout_s):
                response = await self._client.post(
                    f"{scheme}://{endpoint}{request.path}",
                    content=request.body,
                    headers=httpx.Headers({**given, PREVIEW_HEADER: "1"}, encoding="latin-1"),
                    extensions={"sni_hostname": host} if self._endpoints.tls else None,
                )
        except (httpx.HTTPError, TimeoutError, OSError) as error:
            self._away_until[endpoint] = self._clock.now() + AWAY_S
            self.tally.previews["failed"] += 1
            log("no preview", endpoint=endpoint, reason=f"{type(error).__name__}: {error}")
            return None
        self._away_until.pop(endpoint, None)
        if response.status_code != 200:
            told = {name: response.headers[name] for name in TOLD_HEADERS if name in response.headers}
            self.tally.previews["refused"] += 1
            return RouterRefusal(response.status_code, response.content[:ANSWER_BYTES], told)
        said = _estimate(response.content)
        self.tally.previews["unread" if said is None else "taken"] += 1
        return said

    def _present(self, able: Sequence[str]) -> list[str]:
        """Those that have answered when they were asked last; all where none has."""
        now = self._clock.now()
        return [one for one in able if now >= self._away_until.get(one, 0.0)] or list(able)

    def _by_load(self, able: Sequence[str]) -> list[str]:
        return sorted(able, key=lambda one: self.open[one])


def refusal(status: int, message: str, code: str) -> ImmediateResponse:
    """An answer to the client in the form of routers' errors."""
    body = ApiError(status, message, "server_error", code).to_json()
    return ImmediateResponse(status, body, {"content-type": "application/json", "retry-after": "1"}, code)


def _estimate(body: bytes) -> Estimate | None:
    """What a preview says; None where it is none that is known here, of a newer build perhaps."""
    try:
        told: dict[str, Any] = read_json(body)
        seconds = told["first_token_s"]
        tokens = int(told["prompt_tokens"]) - int(told["cached_tokens"]) + int(told["queued_tokens"])
        return Estimate(int(told["waiting"]), None if seconds is None else float(seconds), tokens)
    except (ValueError, KeyError, TypeError):
        return None


def _by_affinity(able: Sequence[str], key: bytes) -> list[str]:
    """In an order that is the key's own, whoever else is there (rendezvous hashing, Thaler and Ravishankar 1998)."""
    return sorted(able, key=lambda one: hashlib.blake2b(one.encode() + b"\0" + key, digest_size=8).digest())


def _host_and_port(name: str) -> tuple[str, int]:
    host, _, port = name.rpartition(":")
    if not host or not port.isdigit() or not 0 < int(port) < 65536:
        raise ConfigError(f"an endpoint is named as HOST:PORT; got {name!r}")
    return host.strip("[]"), int(port)


async def _looked_up(host: str, port: int) -> list[str]:
    """The addresses of a name. Raises `OSError`."""
    infos = await asyncio.get_running_loop().getaddrinfo(host, port, type=socket.SOCK_STREAM)
    return [_address(info[4]) for info in infos]


def _address(place: Sequence[object]) -> str:
    """``ip:port`` of what `getaddrinfo` has found."""
    host, port = str(place[0]), place[1]
    return f"[{host}]:{port}" if ":" in host else f"{host}:{port}"


# ---------------------------------------------------------------- the gRPC server

HELD_BYTES_MOST = 256 * 2**20
"""Bytes of bodies that are held for a choice, of all exchanges together, each in pieces and as a whole; a body beyond
them isn't looked at."""
MOST_EXCHANGES = 8192
MOST_SCRAPES, SCRAPE_S, SCRAPE_BYTES = 16, 10.0, 16 * 1024
"""Scrapes of metrics at once, the seconds that each has, and the bytes of its request."""
END_S = 25.0
"""Seconds for which exchanges go on after SIGTERM, less than Kubernetes gives by default."""
HOLD_S = 60.0
"""Seconds for which the next message of a gateway is waited for before a choice: its request is held meanwhile."""
EXCHANGE_S = 6 * 3600.0
"""The same behind the choice, when nothing is held: longer than any answer takes."""
KEEPALIVE = [("grpc.keepalive_time_ms", 60_000), ("grpc.keepalive_timeout_ms", 20_000)]
"""How soon a gateway that is gone without a word is noticed."""


class PickerService:
    """The services of the picker, as gRPC calls them."""

    def __init__(self, endpoints: Endpoints, picker: EndpointPicker) -> None:
        self._endpoints, self._picker, self._held = endpoints, picker, BodyBuffer(HELD_BYTES_MOST)

    def add_to(self, server: grpc.aio.Server) -> None:
        """Have a server offer them. Messages are bytes here."""
        process = grpc.stream_stream_rpc_method_handler(self.process)
        check = grpc.unary_unary_rpc_method_handler(self.check)
        server.add_generic_rpc_handlers(
            (
                grpc.method_handlers_generic_handler(PROCESSOR, {"Process": process}),
                grpc.method_handlers_generic_handler(HEALTH, {"Check": check}),
            )
        )

    async def process(
        self, messages: AsyncIterator[bytes], context: grpc.aio.ServicerContext[bytes, bytes]
    ) -> AsyncIterator[bytes]:
        """Process one exchange."""
        exchange = GatewayExchange(self._picker, self._held)
        try:
            coming = aiter(messages)
            while True:
                try:
                    async with asyncio.timeout(EXCHANGE_S if exchange.chosen else HOLD_S):
                        data = await anext(coming)
                except StopAsyncIteration:
                    return
                except TimeoutError:
                    if exchange.chosen:
                        return  # An exchange goes on without its picker.
                    message = f"no more of the request came within {HOLD_S:g} s"
                    await context.abort(grpc.StatusCode.DEADLINE_EXCEEDED, message)
                try:
                    said = read_request(data)
                except ValueError as error:
                    await context.abort(grpc.StatusCode.INVALID_ARGUMENT, f"a message can't be read: {error}")
                for reply in await exchange.take(said):
                    yield reply.to_bytes()
        finally:
            exchange.close()

    async def check(self, data: bytes, context: grpc.aio.ServicerContext[bytes, bytes]) -> bytes:
        """Answer a health check: of the process, or of whether it knows endpoints to choose from."""
        match read_health_check(data):
            case "" | "liveness":
                return health_answer(serving=True)
            case "readiness" | "envoy.service.ext_proc.v3.ExternalProcessor":
                return health_answer(serving=bool(self._endpoints.hosts))
            case other:
                return await context.abort(grpc.StatusCode.NOT_FOUND, f"no such service: {other[:100]}")


class MetricsPage:
    """The metrics of a picker over plain HTTP, at ``/metrics``: an answer a connection, within `SCRAPE_S`."""

    def __init__(self, picker: EndpointPicker) -> None:
        self._scrapes, self._open = Scrapes(picker.families), 0

    async def listen(self, host: str, port: int) -> asyncio.Server:
        """Begin to listen. Raises `ConfigError`."""
        try:
            return await asyncio.start_server(self.answer, host, port, limit=SCRAPE_BYTES)
        except (OSError, OverflowError) as error:
            raise ConfigError(f"can't listen at {host}:{port} for --metrics-port: {error}") from None

    async def answer(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        """Answer one connection, and close it."""
        self._open += 1
        try:
            if self._open <= MOST_SCRAPES:
                async with asyncio.timeout(SCRAPE_S):
                    writer.write(await self._page(await reader.readuntil(b"\r\n\r\n")))
                    await writer.drain()
        except (TimeoutError, OSError, asyncio.IncompleteReadError, asyncio.LimitOverrunError):
            pass  # It sent no request, or doesn't read what it gets.
        finally:
            self._open -= 1
            writer.close()

    async def _page(self, head: bytes) -> bytes:
        first, *lines = head.decode("latin-1").split("\r\n")
        status, body, kind = "404 Not Found", b"metrics are at /metrics\n", "text/plain; charset=utf-8"
        if first.startswith("GET /metrics ") or first.startswith("GET /metrics?"):
            accept = next((line[7:] for line in lines if line.lower().startswith("accept:")), "")
            status, (body, kind) = "200 OK", await self._scrapes.answer(accept)
        told = f"HTTP/1.1 {status}\r\ncontent-type: {kind}\r\ncontent-length: {len(body)}\r\nconnection: close\r\n\r\n"
        return told.encode() + body


async def serve_picker(
    address: tuple[str, int],
    endpoints: Endpoints,
    timeout_s: float,
    *,
    fail_open: bool,
    cert: str = "",
    key: str = "",
    metrics_port: int = 0,
) -> None:
    """Serve at an address, host and port, until SIGTERM or SIGINT. `cert`, `key`: files; empty: without TLS.
    `metrics_port`: of the same host; 0: none. Raises `ConfigError` where an address or the files can't be used."""
    options = [("grpc.max_receive_message_length", BODY_BYTES_MOST + 2**20), ("grpc.so_reuseport", 0), *KEEPALIVE]
    server = grpc.aio.server(options=options, maximum_concurrent_rpcs=MOST_EXCHANGES)
    ended = asyncio.Event()
    for number in (signal.SIGTERM, signal.SIGINT):
        asyncio.get_running_loop().add_signal_handler(number, ended.set)
    async with endpoints.client(timeout_s) as client:
        picker = EndpointPicker(endpoints, client, SystemClock(), timeout_s, fail_open=fail_open)
        PickerService(endpoints, picker).add_to(server)
        port = listen(server, f"{address[0]}:{address[1]}", cert, key)
        page = await MetricsPage(picker).listen(address[0], metrics_port) if metrics_port else None
        await endpoints.resolve()
        await server.start()
        log("endpoint picker serves", port=port, endpoints=sorted(endpoints.hosts))
        while not ended.is_set():
            try:
                await asyncio.wait_for(ended.wait(), RESOLVE_S)
            except TimeoutError:
                await endpoints.resolve()
        await server.stop(END_S)
        if page is not None:
            page.close()


def listen(server: grpc.aio.Server, address: str, cert: str, key: str) -> int:
    """Have a server listen at ``host:port``, by TLS where there are files; returns the port. Raises `ConfigError`."""
    try:
        if not cert:
            return server.add_insecure_port(address)
        pair = Path(key).read_bytes(), Path(cert).read_bytes()
        return server.add_secure_port(address, grpc.ssl_server_credentials([pair]))
    except (OSError, RuntimeError) as error:
        raise ConfigError(f"can't listen at {address}: {error}") from None
